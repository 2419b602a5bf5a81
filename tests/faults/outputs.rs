//! Results of runs, `merge`, `quantize` and `export` appear complete and flushed to disk, or not at
//! all. The next start removes leftovers of killed commands; a command stopped by a signal removes
//! its own.

use std::path::Path;
use std::process::Command;

use crate::faults::{ALL, Fault, calls, library};
use crate::test_dir::{TestDir, copy_folder, golden};
use crate::{child, finish, names, tree};

/// A command line without its output, and the output's name.
type Verb = (&'static [&'static str], &'static str);

const VERBS: [Verb; 4] = [
    (&["merge", "--model", "model", "--adapter", "adapter"], "out"),
    (&["quantize", "--model", "model", "--kind", "nf4"], "out"),
    (&["export", "--model", "model", "--format", "hf"], "out"),
    (&["export", "--model", "model", "--format", "gguf"], "out.gguf"),
];

/// A place with an adapter and an empty folder `made` for the output.
fn prepared() -> TestDir {
    let dir = TestDir::new();
    copy_folder(&golden("train/lora/adapter_final"), &dir.path("adapter"));
    std::fs::create_dir(dir.path("made")).unwrap();
    dir
}

fn making(dir: &TestDir, (args, output): Verb) -> Command {
    let output = dir.path("made").join(output).display().to_string();
    dir.command(&[args, &["--quiet", "--output", &output]].concat())
}

/// Checks that each of the files `wanted` below `made` is flushed before the rename to `target`,
/// and the parent after it.
fn assert_flushed<'a>(calls: &[String], made: &str, target: &str, wanted: impl Iterator<Item = &'a String>) {
    let renamed = calls.iter().position(|call| *call == format!("r {target}"));
    let (before, after) =
        calls.split_at(renamed.unwrap_or_else(|| panic!("no rename to {target} in {calls:#?}")));
    let flushed = |calls: &[String], path: &str| calls.iter().any(|call| *call == format!("s {path}"));
    for name in wanted {
        let path = format!("{made}/{name}");
        assert!(flushed(before, &path), "{path} was not flushed before its folder got its name: {before:#?}");
    }
    let parent = Path::new(target).parent().unwrap().display().to_string();
    assert!(flushed(after, &parent), "{parent} was not flushed after the rename: {after:#?}");
}

/// Includes copied files: the tokenizer and generation_config.json.
#[test]
fn all_that_a_commit_names_is_flushed() {
    if library().is_none() {
        return;
    }
    for verb in VERBS {
        let dir = prepared();
        let made = dir.path("made").canonicalize().unwrap();
        let calls = calls(&mut making(&dir, verb), &made, ALL);
        let output = made.join(verb.1).display().to_string();
        let rename = calls.iter().position(|call| *call == format!("r {output}")).unwrap();
        // The temporary name contains the process id.
        let flushed = calls[..rename].iter().rev().find_map(|call| call.strip_prefix("s "));
        let temporary = flushed.unwrap().to_owned();
        assert!(temporary.starts_with(&format!("{output}.tmp-")), "{temporary}");
        if verb.1 == "out" {
            let actual = tree(&made.join("out"));
            for name in ["tokenizer.json", "generation_config.json", "config.json", "model.safetensors"] {
                assert!(actual.contains_key(name), "{verb:?} left no {name}");
            }
            assert_flushed(&calls, &temporary, &output, actual.keys());
        } else {
            assert_flushed(&calls, &temporary, &output, std::iter::empty());
        }
    }
    // A training run: its checkpoints and its result.
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().canonicalize().unwrap().join("out");
    let calls = calls(&mut child::command("fresh", &output), &output, ALL);
    let shown = output.display().to_string();
    let checkpoint = format!("{shown}/checkpoint-4");
    let temporary =
        calls.iter().find_map(|call| call.strip_prefix("m ").filter(|p| p.starts_with(&checkpoint)));
    let members = tree(&output.join("checkpoint-4"));
    assert!(members.contains_key("tokenizer.json"), "{:?}", members.keys());
    assert_flushed(&calls, temporary.unwrap(), &checkpoint, members.keys());
    let result = ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"].map(str::to_owned);
    let own = format!("{shown}/.finetune");
    assert_flushed(&calls, &format!("{own}/result"), &format!("{own}/committed"), result.iter());
}

/// Kills at the first write, in the middle, at the rename and right after it.
#[test]
fn a_kill_leaves_all_or_nothing_and_is_swept() {
    if library().is_none() {
        return;
    }
    for verb in VERBS {
        let dir = prepared();
        let made = dir.path("made");
        let calls = calls(&mut making(&dir, verb), &made, ALL);
        let wanted = tree(&made);
        let renamed = calls.iter().position(|call| call.ends_with(&format!("/made/{}", verb.1))).unwrap();
        let mut left = 0;
        for at in [4, renamed / 2, renamed + 1, renamed + 2] {
            clear(&made);
            let mut run = making(&dir, verb);
            Fault { at, what: "kill".into(), ops: ALL, ..Fault::default() }.strike(&mut run, &made, None);
            let done = finish(&mut run);
            let what = format!("{verb:?} killed at {}", calls[at - 1]);
            assert_eq!(done.code, None, "{what}: {done:?}");
            if made.join(verb.1).exists() {
                assert!(at == renamed + 2 && tree(&made) == wanted, "{what}: {:?}", names(&made));
                continue;
            }
            left += names(&made).len();
            let done = finish(&mut making(&dir, verb));
            assert_eq!(done.code, Some(0), "{what}: {done:?}");
            assert_eq!(names(&made), [verb.1], "{what}: what was left is gone");
            assert!(tree(&made) == wanted, "{what}");
        }
        assert!(left >= 2, "{verb:?} left nothing to sweep");
    }
}

#[test]
fn a_signal_removes_what_was_begun() {
    if library().is_none() {
        return;
    }
    for verb in VERBS {
        let dir = prepared();
        let made = dir.path("made");
        let mut run = making(&dir, verb);
        Fault { at: 1, what: "int".into(), ops: "w", ..Fault::default() }.strike(&mut run, &made, None);
        let done = finish(&mut run);
        assert_eq!(done.code, Some(130), "{verb:?}: {done:?}");
        assert!(
            done.errors.contains("warning: stopped by a signal; removed the unfinished "),
            "{verb:?}: {done:?}"
        );
        assert_eq!(names(&made), [""; 0], "{verb:?}");
    }
}

fn clear(folder: &Path) {
    std::fs::remove_dir_all(folder).unwrap();
    std::fs::create_dir(folder).unwrap();
}
