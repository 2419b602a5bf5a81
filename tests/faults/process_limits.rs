//! Process limits of the system: memory (`ulimit -v`, `ulimit -d`), and names that are not UTF-8.
#![cfg(target_os = "linux")]

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;

use crate::system_faults::in_shell;
use crate::test_dir::{TestDir, lora};

/// Runs a step that needs about 110 MiB under a limit; returns exit code and output.
fn run_under(limit: &str) -> (Option<i32>, String) {
    let dir = TestDir::new();
    let more =
        ["--set", "train.micro_batch_size=16", "--set", "data.packing=true", "--set", "data.max_seq_len=512"];
    let mut command = in_shell(limit, &dir.command(&lora(&more)));
    let done = command.env("RAYON_NUM_THREADS", "2").output().unwrap();
    (done.status.code(), dir.told(&done.stderr))
}

/// Exceeding a memory limit would end the run by SIGABRT, with nothing saved: finetune refuses it
/// first.
#[test]
fn a_run_that_exceeds_a_limit_on_memory_is_refused_and_others_end() {
    for (letter, name, limits) in [
        ("v", "address space", [200_000, 260_000, 300_000, 340_000, 500_000, 2_000_000]),
        ("d", "data", [100_000, 140_000, 180_000, 220_000, 400_000, 2_000_000]),
    ] {
        let mut codes = Vec::new();
        for kib in limits {
            let (code, said) = run_under(&format!("ulimit -{letter} {kib}"));
            if code != Some(0) {
                assert_eq!(code, Some(1), "-{letter} {kib}: {said}");
                assert!(
                    said.contains("error: cannot train: a step does not fit the available memory\n"),
                    "{said}"
                );
                let limit = format!("the limit on the {name} of this process (`ulimit -{letter}`) leaves ");
                assert!(said.contains(&limit), "{said}");
            }
            codes.push(code);
        }
        assert_eq!((codes[0], codes[5]), (Some(1), Some(0)), "-{letter}: {codes:?}");
    }
}

/// `ulimit -v` counts as the available memory.
#[test]
fn the_limit_of_a_scheduler_is_memory() {
    let dir = TestDir::new();
    let more = [
        "--set",
        "train.micro_batch_size=64",
        "--set",
        "data.packing=true",
        "--set",
        "data.max_seq_len=2048",
    ];
    let rows = std::fs::read_to_string(dir.path("rows.jsonl")).unwrap();
    dir.write("rows.jsonl", &rows.repeat(20));
    let done = in_shell("ulimit -v 1200000", &dir.command(&lora(&more))).output().unwrap();
    let said = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(said.contains("(`ulimit -v`) leaves "), "{said}");
    assert!(!dir.path("out/metrics.jsonl").exists());
}

#[test]
fn a_name_that_is_not_utf8_is_refused_with_its_argument() {
    let dir = TestDir::new();
    let name = OsStr::from_bytes(b"a\xff");
    let start = |words: &[&str], flag: &str, joined: bool| {
        let mut command = dir.command(words);
        let mut word = OsString::from(format!("{flag}="));
        word.push(name);
        if joined {
            command.arg(word)
        } else {
            command.args([OsStr::new(flag), name])
        };
        let done = command.output().unwrap();
        (done.status.code(), dir.told(&done.stderr))
    };
    for flag in ["--model", "--dataset", "--recipe", "--eval-dataset", "--output", "--resume"] {
        for joined in [false, true] {
            let (code, said) = start(&["--quiet"], flag, joined);
            assert_eq!(code, Some(2), "{said}");
            assert!(said.contains(&format!("error: cannot use `{flag}`\n")), "{said}");
            assert!(said.contains(r"a\xff` is not UTF-8"), "{said}");
        }
    }
    let (code, said) = start(&["merge", "--model", "model"], "--adapter", false);
    assert_eq!((code, said.contains("cannot use `--adapter`")), (Some(2), true), "{said}");
    assert!(!dir.path("out").exists());
    assert!(!std::fs::exists(dir.path("").join(name)).unwrap());
}

/// The remedy that the message names.
#[test]
fn a_link_leads_to_a_folder_whose_name_is_not_utf8() {
    let dir = TestDir::new();
    let name = OsStr::from_bytes(b"a\xff");
    let folder = dir.path("").join(name);
    std::fs::create_dir(&folder).unwrap();
    std::fs::rename(dir.path("model"), folder.join("model")).unwrap();
    std::fs::rename(dir.path("rows.jsonl"), folder.join("rows.jsonl")).unwrap();
    std::os::unix::fs::symlink(folder.join("model"), dir.path("model")).unwrap();
    std::os::unix::fs::symlink(folder.join("rows.jsonl"), dir.path("rows.jsonl")).unwrap();
    std::os::unix::fs::symlink(&folder, dir.path("link")).unwrap();
    let mut args = lora(&[]);
    let output = args.iter().position(|word| *word == "out").unwrap();
    args[output] = "link/out";
    let done = dir.command(&args).output().unwrap();
    assert_eq!(done.status.code(), Some(0), "{}", dir.told(&done.stderr));
    let eval = ["eval", "--model", "model", "--adapter", "link/out", "--dataset", "rows.jsonl"];
    let done = dir.command(&eval).output().unwrap();
    assert_eq!(done.status.code(), Some(0), "{}", dir.told(&done.stderr));
}
