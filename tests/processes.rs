//! One run in several processes under mpirun, through the binary: the bytes of the same run in one process; what does
//! not fit is refused. Skips loudly where there is no mpirun.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(clippy::print_stderr, reason = "a skipped check is said aloud")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const BINARY: &str = env!("CARGO_BIN_EXE_finetune");

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// The command line of a run, after the binary.
fn line(output: &Path, more: &[&str]) -> Vec<String> {
    let (model, data) = (golden().join("models/tiny-llama"), golden().join("data/sft_messages.jsonl"));
    let mut line = vec!["--recipe".to_owned(), "fsdp-full".into()];
    for (flag, path) in [("--model", &model), ("--dataset", &data), ("--output", &output.to_owned())] {
        line.extend([flag.to_owned(), path.display().to_string()]);
    }
    for key in [
        "data.max_seq_len=256",
        "train.max_steps=4",
        "train.gradient_accumulation_steps=2",
        "checkpoint.save_steps=2",
        "log.tensorboard=false",
    ] {
        line.extend(["--set".to_owned(), key.to_owned()]);
    }
    line.extend(more.iter().map(|word| (*word).to_owned()));
    line
}

fn mpirun() -> Option<Command> {
    if Command::new("mpirun").arg("--version").output().is_err() {
        eprintln!("SKIPPED: there is no mpirun; runs in several processes were not tried");
        return None;
    }
    let mut command = Command::new("mpirun");
    command.args(["--oversubscribe", "--allow-run-as-root"]);
    command.env("HF_HUB_OFFLINE", "1").env("RAYON_NUM_THREADS", "1").env("FINETUNE_RDZV_TIMEOUT", "20");
    Some(command)
}

/// Runs one process for each of `apps`: its settings of the environment, and its line.
fn run(mut mpirun: Command, apps: &[(&[&str], Vec<String>)]) -> Output {
    for (i, (environment, line)) in apps.iter().enumerate() {
        if i > 0 {
            mpirun.arg(":");
        }
        mpirun.args(["-n", "1"]);
        environment.iter().for_each(|pair| {
            mpirun.args(["-x", pair]);
        });
        mpirun.arg(BINARY).args(line);
    }
    mpirun.output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Compares what `ranks` processes leave with what as many threads of one process leave.
fn same_bytes(ranks: usize, more: &[&str]) {
    let Some(mpirun) = mpirun() else { return };
    let place = tempfile::tempdir().unwrap();
    let [apart, together] = ["apart", "together"].map(|name| place.path().join(name));
    let apps: Vec<(&[&str], Vec<String>)> = (0..ranks).map(|_| (&[] as _, line(&apart, more))).collect();
    let done = run(mpirun, &apps);
    assert!(done.status.success(), "{}", said(&done));
    let threads = ranks.to_string();
    let line = line(&together, &[more, &["--ranks", &threads]].concat());
    let one = Command::new(BINARY).args(line).output().unwrap();
    assert!(one.status.success(), "{}", said(&one));
    let mut compared = 0;
    for folder in ["", "checkpoint-2"] {
        for entry in std::fs::read_dir(together.join(folder)).unwrap() {
            let name = entry.unwrap().file_name();
            if name.to_string_lossy().ends_with(".safetensors") {
                let read = |output: &Path| std::fs::read(output.join(folder).join(&name)).unwrap();
                assert!(read(&apart) == read(&together), "{folder}/{}", name.display());
                compared += 1;
            }
        }
    }
    assert_eq!(compared, ranks + 2 * ranks);
}

#[test]
fn processes_give_the_bytes_of_threads() {
    same_bytes(2, &[]);
}

/// Sums over several groups are in the order of all ranks here too, in f32 and in bf16.
#[test]
fn groups_of_processes_give_the_bytes_of_threads() {
    for dtype in ["f32", "bf16"] {
        let reduce = format!("parallel.reduce_dtype={dtype}");
        let hsdp = ["parallel.strategy=hsdp", "parallel.shard_size=2", "train.gradient_accumulation_steps=1"];
        let sets: Vec<&str> = hsdp.iter().chain([&reduce.as_str()]).flat_map(|key| ["--set", key]).collect();
        same_bytes(4, &sets);
    }
}

/// A process that fails ends the others, and says itself who it is, where it was and what it called last.
#[test]
fn a_process_that_fails_names_rank_phase_and_last_call() {
    for (fault, cause) in [("1:backward:2:error", "planted fault"), ("0:save:panic", "the thread panicked")] {
        let Some(mpirun) = mpirun() else { return };
        let place = tempfile::tempdir().unwrap();
        let output = place.path().join("out");
        let set = format!("FINETUNE_FAULT={fault}");
        let environment = [set.as_str()];
        let app = (&environment as &[&str], line(&output, &[]));
        let done = run(mpirun, &[app.clone(), app]);
        assert_eq!(done.status.code(), Some(75), "{fault}: {}", said(&done));
        let (rank, phase) = (&fault[..1], if fault.contains("save") { "save" } else { "backward" });
        let text = said(&done);
        assert!(text.contains(&format!("error: rank {rank} failed in phase {phase}")), "{fault}: {text}");
        assert!(text.contains(cause), "{fault}: {text}");
        assert!(text.contains(&format!("rank {rank}: its last call was call ")), "{fault}: {text}");
    }
}

#[test]
fn processes_about_to_run_different_things_are_refused() {
    let Some(mpirun) = mpirun() else { return };
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("out");
    let other = line(&output, &["--set", "optimizer.learning_rate=1e-3"]);
    let done = run(mpirun, &[(&[], line(&output, &[])), (&[], other)]);
    assert_eq!(done.status.code(), Some(1), "{}", said(&done));
    assert!(said(&done).contains("plan"), "{}", said(&done));
    assert!(!output.exists(), "weights were loaded");
}

#[test]
fn a_wrong_secret_is_refused() {
    let Some(mpirun) = mpirun() else { return };
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("out");
    let secrets =
        ["FINETUNE_RDZV_SECRET=correct horse battery", "FINETUNE_RDZV_SECRET=another secret of theirs"];
    let apps: Vec<(&[&str], Vec<String>)> =
        secrets.iter().map(|secret| (std::slice::from_ref(secret), line(&output, &[]))).collect();
    let done = run(mpirun, &apps);
    assert!(!done.status.success());
    assert!(said(&done).contains("secret"), "{}", said(&done));
    assert!(!said(&done).contains("battery") && !said(&done).contains("of theirs"), "{}", said(&done));
    assert!(!output.exists(), "weights were loaded");
}
