//! The output folder of a run through the binary: finetune never overwrites or removes files of
//! others, one run at a time uses a folder, and a resumed run keeps its state, including the date
//! of its chat template.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use crate::at_work::{MAX_STEPS, STEPS, go_on, has_stopped, stops_at_work};
use crate::test_dir::{TestDir, copy_folder, flip, lora};
use finetune::checkpoint::{self, SavedCheckpoint};
use serde_json::Value;

/// Returns every file below a folder.
fn tree(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut contents = BTreeMap::new();
    let Ok(entries) = std::fs::read_dir(folder) else { return contents };
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            contents.extend(tree(&path));
        } else {
            let bytes = std::fs::read(&path).unwrap();
            contents.insert(path, bytes);
        }
    }
    contents
}

/// The arguments of a run of 4 steps that keeps all checkpoints, with `more` flags and another
/// `output` than `out`.
fn args<'a>(output: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let keep = ["--set", "checkpoint.keep_last=9", "--set", "checkpoint.save_steps=2", "--quiet"];
    let args = lora(&[&keep[..], more].concat());
    args.into_iter().map(|arg| if arg == "out" { output } else { arg }).collect()
}

fn run(dir: &TestDir, args: &[&str]) -> Output {
    dir.command(args).env("RAYON_NUM_THREADS", "1").output().unwrap()
}

fn succeed(dir: &TestDir, args: &[&str]) {
    let done = run(dir, args);
    assert!(done.status.success(), "{}", dir.told(&done.stderr));
}

/// Runs a command that must fail with a user error and change nothing below `folder`; returns its
/// output.
fn refused(dir: &TestDir, folder: &str, args: &[&str]) -> String {
    let before = tree(&dir.path(folder));
    let done = run(dir, args);
    let said = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{said}");
    let after = tree(&dir.path(folder));
    assert!(before == after, "{folder} changed: {:?}, before {:?}\n{said}", after.keys(), before.keys());
    said
}

fn metrics(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the steps of metrics.jsonl in order.
fn steps(folder: &Path) -> Vec<u64> {
    metrics(folder)
        .iter()
        .filter(|line| line.get("loss").is_some())
        .map(|line| line["step"].as_u64().unwrap())
        .collect()
}

fn until(what: &str, child: &mut Child, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(300), "{what}");
        assert!(child.try_wait().unwrap().is_none(), "the run ended before {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn start(dir: &TestDir, args: &[&str]) -> Child {
    let mut command = dir.command(args);
    command.env("RAYON_NUM_THREADS", "1").stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// A run that has begun to train and then waits for [`go_on`].
fn at_work(dir: &TestDir, args: &[&str]) -> Child {
    let mut command = dir.command(args);
    stops_at_work(&mut command).env("RAYON_NUM_THREADS", "1").stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let lines =
        || std::fs::read_to_string(dir.path("out/metrics.jsonl")).is_ok_and(|text| text.lines().count() > 2);
    until("it trains", &mut child, lines);
    has_stopped(&mut child);
    child
}

const LONG: [&str; 4] = ["--set", MAX_STEPS, "--set", "checkpoint.save_steps=1000"];

// Files that are not the run's.

#[test]
fn a_folder_that_is_no_run_is_not_touched() {
    let dir = TestDir::new();
    for name in ["README.md", "recipe.toml", "metrics.jsonl", "report.html"] {
        std::fs::create_dir_all(dir.path("project/checkpoint-4")).unwrap();
        dir.write(&format!("project/{name}"), "mine");
    }
    dir.write("project/checkpoint-4/notes.txt", "mine");
    dir.write("project/checkpoint-x.tmp-mine", "mine");
    for more in [&["--resume"][..], &["--resume", "elsewhere"], &[]] {
        let said = refused(&dir, "project", &args("project", more));
        assert!(said.contains("project"), "{said}");
        assert!(!dir.path("project/.finetune").exists());
    }
    std::fs::remove_dir_all(dir.path("project/checkpoint-4")).unwrap();
    let said = refused(&dir, "project", &args("project", &["--resume"]));
    assert_eq!(
        said,
        "error: cannot resume in project\n  caused by: the folder belongs to no run of finetune: it has neither \
         .finetune/run.json nor an intact checkpoint\nhint: give a new folder with `--output`\n"
    );
}

#[test]
fn no_run_goes_on_in_the_folder_of_another() {
    let dir = TestDir::new();
    for output in ["one", "two"] {
        succeed(&dir, &args(output, &[]));
    }
    let said = refused(&dir, "two", &args("two", &["--resume", "one/checkpoint-2"]));
    assert!(
        said.starts_with(
            "error: cannot resume from one/checkpoint-2 in two\n  caused by: two holds another run, started "
        ),
        "{said}"
    );
    assert!(
        said.contains(
            "hint: give a new folder with `--output`, or `--output one` to resume in the run's own folder"
        ),
        "{said}"
    );
    // The same holds for a folder of an older program, without a record.
    std::fs::remove_dir_all(dir.path("two/.finetune")).unwrap();
    let said = refused(&dir, "two", &args("two", &["--resume", "one"]));
    assert!(said.contains("caused by: two is not empty"), "{said}");
    // A new folder may be used, and the run continues to the bit.
    let fork = args("three", &["--resume", "one/checkpoint-2"]);
    succeed(&dir, &fork);
    let adapter = |output: &str| std::fs::read(dir.path(output).join("adapter_model.safetensors")).unwrap();
    assert!(adapter("three") == adapter("one"));
    assert_eq!(steps(&dir.path("three")), [3, 4]);
    refused(&dir, "three", &fork);
    // State after a kill before the first own checkpoint: the same command continues.
    std::fs::remove_dir_all(dir.path("three/checkpoint-4")).unwrap();
    succeed(&dir, &fork);
    assert!(adapter("three") == adapter("one"));
}

#[test]
fn a_file_that_the_run_did_not_write_is_not_overwritten() {
    let dir = TestDir::new();
    succeed(&dir, &args("out", &[]));
    dir.write("out/notes.txt", "mine");
    let again = args("out", &["--resume"]);
    succeed(&dir, &again);
    for name in ["README.md", "recipe.toml", "adapter_config.json"] {
        let text = std::fs::read_to_string(dir.path("out").join(name)).unwrap();
        dir.write(&format!("out/{name}"), &format!("{text}\n "));
        let said = refused(&dir, "out", &again);
        let why = format!("caused by: {name} would be overwritten, and is not the file that the run wrote");
        assert!(said.starts_with("error: cannot train in out\n") && said.contains(&why), "{said}");
        std::fs::remove_file(dir.path("out").join(name)).unwrap();
        succeed(&dir, &again);
    }
    assert_eq!(std::fs::read_to_string(dir.path("out/notes.txt")).unwrap(), "mine");
}

/// Anything at the path of a new checkpoint that is no sound checkpoint is renamed and kept. The
/// run resumes from the newest sound one.
#[cfg(unix)]
#[test]
fn something_else_in_the_place_of_a_checkpoint_is_kept() {
    let dir = TestDir::new();
    let again = args("out", &["--resume"]);
    let (there, aside) = ("out/checkpoint-4", dir.path("out/checkpoint-4.aside-1"));
    let plants: [(&str, &dyn Fn()); 4] = [
        ("a checkpoint without its manifest", &|| {
            std::fs::remove_file(dir.path("out/checkpoint-4/manifest.json")).unwrap();
        }),
        ("a file", &|| {
            std::fs::remove_dir_all(dir.path(there)).unwrap();
            dir.write(there, "mine");
        }),
        ("a link to nothing", &|| {
            std::fs::remove_dir_all(dir.path(there)).unwrap();
            std::os::unix::fs::symlink("nowhere", dir.path(there)).unwrap();
        }),
        ("an empty folder", &|| {
            std::fs::remove_dir_all(dir.path(there)).unwrap();
            std::fs::create_dir(dir.path(there)).unwrap();
        }),
    ];
    for (what, plant) in plants {
        succeed(&dir, &args("out", &[]));
        plant();
        let kind = |path: &std::path::Path| path.symlink_metadata().unwrap().file_type();
        let planted = kind(&dir.path(there));
        let done = run(&dir, &again);
        let said = dir.told(&done.stderr);
        assert!(done.status.success(), "{what}: {said}");
        let message =
            "out/checkpoint-4 is not a sound checkpoint of this run: kept as out/checkpoint-4.aside-1";
        assert!(said.contains(message), "{what}: {said}");
        assert_eq!(kind(&aside), planted, "{what}");
        assert_eq!(SavedCheckpoint::open(&dir.path(there)).unwrap().state.step, 4, "{what}");
        std::fs::remove_dir_all(dir.path("out")).unwrap();
    }
}

#[test]
fn a_file_that_comes_while_the_run_is_at_work_stays() {
    let dir = TestDir::new();
    let child = at_work(&dir, &args("out", &LONG));
    dir.write("out/README.md", "mine");
    go_on(&child);
    let done = child.wait_with_output().unwrap();
    let said = dir.told(&done.stderr);
    assert!(done.status.success(), "{said}");
    assert!(
        said.contains(
            "README.md appeared during the run and would be overwritten: the result is in out/result"
        ),
        "{said}"
    );
    assert_eq!(std::fs::read_to_string(dir.path("out/README.md")).unwrap(), "mine");
    for name in ["README.md", "report.html", "adapter_config.json", "adapter_model.safetensors"] {
        assert!(dir.path("out/result").join(name).metadata().unwrap().len() > 100, "{name}");
    }
    assert!(!dir.path("out/adapter_config.json").exists());
}

/// A folder of an older program's run is recognized by its checkpoints.
#[test]
fn a_folder_without_a_record() {
    let dir = TestDir::new();
    succeed(&dir, &args("out", &[]));
    let adapter = || std::fs::read(dir.path("out/adapter_model.safetensors")).unwrap();
    let wanted = adapter();
    let as_killed = || {
        std::fs::remove_dir_all(dir.path("out/.finetune")).unwrap();
        std::fs::remove_dir_all(dir.path("out/checkpoint-4")).unwrap();
    };
    as_killed();
    succeed(&dir, &args("out", &["--resume"]));
    assert!(adapter() == wanted);
    assert_eq!(steps(&dir.path("out")), [1, 2, 3, 4]);
    for (name, text) in [("README.md", "# My own words"), ("recipe.toml", "[train]\nmax_steps = 4\n")] {
        as_killed();
        let theirs = std::fs::read(dir.path("out").join(name)).unwrap();
        dir.write(&format!("out/{name}"), text);
        let said = refused(&dir, "out", &args("out", &["--resume"]));
        assert!(said.contains(&format!("caused by: {name} would be overwritten")), "{said}");
        assert!(!dir.path("out/.finetune").exists(), "nothing is left of the try");
        std::fs::write(dir.path("out").join(name), theirs).unwrap();
        succeed(&dir, &args("out", &["--resume"]));
    }
}

// Checkpoints that stay.

#[test]
fn the_newest_sound_checkpoint_stays_and_strangers_too() {
    let dir = TestDir::new();
    succeed(&dir, &args("out", &[]));
    let out = dir.path("out");
    flip(&out.join("checkpoint-4/optimizer.safetensors"));
    // A user's folder with a later number, and names like those of temporary folders.
    let gone = {
        let mut child = start(&dir, &["--version"]);
        child.wait().unwrap();
        child.id()
    };
    let own = std::process::id();
    let (dead, alive) = (format!("checkpoint-3.tmp-{gone}"), format!("checkpoint-3.tmp-{own}"));
    let strangers = ["checkpoint-900", "checkpoint-x.tmp-mine", "checkpoint-7.tmp-mine", &alive];
    for name in strangers.iter().chain([&dead.as_str()]) {
        std::fs::create_dir(out.join(name)).unwrap();
        dir.write(&format!("out/{name}/notes.txt"), "mine");
    }
    let one = ["--resume", "--set", "checkpoint.keep_last=1", "--set", "checkpoint.save_steps=1"];
    let done = run(&dir, &args("out", &one));
    let said = dir.told(&done.stderr);
    assert!(done.status.success(), "{said}");
    assert!(said.contains("checkpoint-4 is damaged") && said.contains("checkpoint-900 is damaged"), "{said}");
    for name in strangers {
        assert!(out.join(name).join("notes.txt").exists(), "{name} was removed");
    }
    assert!(!out.join(dead).exists(), "what a killed run left goes");
    assert!(!out.join("checkpoint-2").exists() && !out.join("checkpoint-3").exists(), "one is kept");
    assert_eq!(SavedCheckpoint::open(&out.join("checkpoint-4")).unwrap().state.step, 4);
    let aside = out.join("checkpoint-4.aside-1");
    assert!(aside.join("manifest.json").exists(), "the damaged one is moved, not removed");
    assert_eq!(checkpoint::newest(&out).unwrap().0.unwrap().state.step, 4);
}

/// A newer, damaged checkpoint does not make the next save delete what it has just written.
#[test]
fn a_damaged_newer_checkpoint_does_not_count() {
    let dir = TestDir::new();
    succeed(&dir, &args("out", &[]));
    let out = dir.path("out");
    copy_folder(&out.join("checkpoint-4"), &out.join("checkpoint-9"));
    flip(&out.join("checkpoint-9/adapter_model.safetensors"));
    let more = ["checkpoint.keep_last=1", "checkpoint.save_steps=3"].map(|key| ["--set", key]).concat();
    let more = [&["--resume", "out/checkpoint-2"], &more[..]].concat();
    succeed(&dir, &args("out", &more));
    // 3 was saved, beside a sound 4 of the same run.
    for (step, sound) in [(3, true), (4, true), (9, false)] {
        let opened = SavedCheckpoint::open(&out.join(format!("checkpoint-{step}")));
        assert_eq!(opened.is_ok(), sound, "{step}");
    }
    assert!(!out.join("checkpoint-2").exists());
}

#[test]
fn checkpoints_of_every_nth_step_stay() {
    let dir = TestDir::new();
    let more = ["checkpoint.keep_last=1", "checkpoint.save_steps=1", "checkpoint.keep_every=2"];
    succeed(&dir, &args("out", &more.map(|key| ["--set", key]).concat()));
    let steps = (1..=4).filter(|step| dir.path("out").join(format!("checkpoint-{step}")).exists());
    assert_eq!(steps.collect::<Vec<_>>(), [2, 4]);
}

// One run at a time.

#[test]
fn of_two_runs_started_together_one_trains() {
    let dir = TestDir::new();
    let mut told_of_lock = 0;
    for attempt in 0..12 {
        let output = format!("out-{attempt}");
        let both: Vec<Child> = (0..2).map(|_| start(&dir, &args(&output, &[]))).collect();
        let ids: Vec<u32> = both.iter().map(Child::id).collect();
        let done: Vec<Output> = both.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
        let codes: Vec<i32> = done.iter().map(|done| done.status.code().unwrap()).collect();
        let said: Vec<String> = done.iter().map(|done| dir.told(&done.stderr)).collect();
        let loser = codes.iter().position(|code| *code == 1);
        assert!(codes.contains(&0) && loser.is_some(), "{codes:?}: {said:?}");
        let loser = loser.unwrap();
        let in_use =
            said[loser].contains(&format!("the folder is in use by process {} on host ", ids[1 - loser]));
        assert!(in_use || said[loser].contains("the folder is not empty"), "{said:?}");
        told_of_lock += usize::from(in_use);
        assert_eq!(steps(&dir.path(&output)), [1, 2, 3, 4], "{output}");
        assert_eq!(std::fs::read(dir.path(&output).join(".finetune/lock")).unwrap(), b"");
    }
    assert!(told_of_lock > 0, "no two runs met");
}

#[cfg(unix)]
#[test]
fn a_run_at_work_is_not_joined_and_one_that_was_killed_goes_on() {
    let dir = TestDir::new();
    dir.write("dated.jinja", DATED);
    let dated = ["--set", "data.chat_template=dated.jinja", "--set", "data.train_on=all"];
    for more in [&["--set", "checkpoint.save_steps=2"][..], &dated] {
        let line = [&LONG[..], more].concat();
        let again = [&line[..], &["--resume"]].concat();
        let (first, again) = (args("out", &line), args("out", &again));
        let mut child = at_work(&dir, &first);
        let named = format!("caused by: the folder is in use by process {} on host ", child.id());
        for line in [&first, &again] {
            let done = run(&dir, line);
            let said = dir.told(&done.stderr);
            assert_eq!(done.status.code(), Some(1), "{said}");
            assert!(said.starts_with("error: cannot train in out\n") && said.contains(&named), "{said}");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let left = std::fs::read_to_string(dir.path("out/.finetune/lock")).unwrap();
        assert!(left.contains(&child.id().to_string()), "a killed run leaves its record: {left}");
        succeed(&dir, &again);
        assert_eq!(steps(&dir.path("out")), (1..=STEPS as u64).collect::<Vec<_>>());
        std::fs::remove_dir_all(dir.path("out")).unwrap();
    }
}

#[test]
fn a_folder_that_another_host_took() {
    let dir = TestDir::new();
    succeed(&dir, &args("out", &[]));
    let holder = r#"{"host":"node-7","pid":4711,"since":"2026-01-02T03:04:05+00:00","boot":"another"}"#;
    dir.write("out/.finetune/lock", holder);
    let said = refused(&dir, "out", &args("out", &["--resume"]));
    assert!(
        said.contains(
            "process 4711 on host node-7 took the folder at 2026-01-02T03:04:05+00:00 and has not released it"
        ),
        "{said}"
    );
    assert!(
        said.contains("hint: when you know that it has ended, `rm out/.finetune/lock` and start again"),
        "{said}"
    );
    std::fs::remove_file(dir.path("out/.finetune/lock")).unwrap();
    succeed(&dir, &args("out", &["--resume"]));
}

// Date of the chat template.

/// Prints the time with its fraction of a second, so that no two clock reads are equal.
const DATED: &str = "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}{% for message in messages %}\n{{ message.role }}: {{ message.content }}{% endfor %}";

/// The date is read once: a resumed run trains on the same tokens, whenever and wherever it
/// resumes.
#[test]
fn a_run_goes_on_with_the_date_that_it_began_with() {
    let dir = TestDir::new();
    dir.write("dated.jinja", DATED);
    let dated = |output, more: &[&'static str]| {
        let keys = ["--set", "data.chat_template=dated.jinja", "--set", "data.train_on=all"];
        args(output, &[&keys[..], more].concat())
    };
    succeed(&dir, &dated("out", &["--ranks", "2"]));
    let adapter = |output: &str| std::fs::read(dir.path(output).join("adapter_model.safetensors")).unwrap();
    let wanted = adapter("out");
    let read = |name: &str| std::fs::read_to_string(dir.path(name)).unwrap();
    let date = |name: &str| -> Value {
        serde_json::from_str::<Value>(&read(name)).unwrap()["chat_template_date"].clone()
    };
    let began = date("out/.finetune/run.json");
    assert!(began.as_str().is_some_and(|text| text.contains('T')), "{began}");
    // Another run gets another date, and so another digest of its rows.
    succeed(&dir, &dated("later", &["--ranks", "2"]));
    assert!(date("later/.finetune/run.json") != began);
    let state = |name: &str| -> Value { serde_json::from_str(&read(name)).unwrap() };
    let data = |output: &str| {
        state(&format!("{output}/checkpoint-2/trainer_state.json"))["fingerprint"]["data"].clone()
    };
    assert!(data("out") != data("later"), "the template's date reaches the rows");

    std::fs::create_dir(dir.path("moved")).unwrap();
    copy_folder(&dir.path("out/checkpoint-2"), &dir.path("moved/checkpoint-2"));
    succeed(&dir, &dated("moved", &["--ranks", "2", "--resume"]));
    std::fs::remove_dir_all(dir.path("out/checkpoint-4")).unwrap();
    succeed(&dir, &dated("out", &["--ranks", "2", "--resume"]));
    for output in ["out", "moved"] {
        assert_eq!(date(&format!("{output}/checkpoint-4/trainer_state.json")), began, "{output}");
        assert_eq!(date(&format!("{output}/.finetune/run.json")), began, "{output}");
        assert_eq!(
            data(output),
            state(&format!("{output}/checkpoint-4/trainer_state.json"))["fingerprint"]["data"]
        );
    }
    assert!(adapter("out") == wanted && adapter("moved") == wanted);
    // A template without a date records none: the same run leaves the same bytes on another day.
    succeed(&dir, &args("plain", &[]));
    assert!(state("plain/checkpoint-2/trainer_state.json").get("chat_template_date").is_none());
}
