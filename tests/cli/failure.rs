//! A rank that fails, in any phase of a run, ends the run within 5 seconds, says who, where and after which call, and leaves
//! what was saved. The 5 seconds are a promise to whoever starts runs: they count from the moment the fault says that it
//! strikes, and a run that goes on for longer is killed and fails the test. What comes before may take its time.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use finetune::collective::Phase;

/// How long survivors may run after a rank has failed.
const PROMISE: Duration = Duration::from_secs(5);

/// How long a run may take that nothing has struck.
const PATIENCE: Duration = Duration::from_secs(120);

fn train(output: &Path, fault: Option<&str>, ranks: usize, more: &[&str]) -> Output {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut command = Command::new(env!("CARGO_BIN_EXE_finetune"));
    command.env("HF_HUB_OFFLINE", "1").env("RAYON_NUM_THREADS", "1").env_remove("RUST_BACKTRACE");
    if let Some(fault) = fault {
        command.env("FINETUNE_FAULT", fault);
    }
    let data = golden.join("data/sft_messages.jsonl");
    command.arg("--model").arg(golden.join("models/tiny-llama")).arg("--output").arg(output);
    command.arg("--dataset").arg(&data).arg("--eval-dataset").arg(&data);
    command.args(["--quiet", "--recipe", "fsdp-full", "--ranks", &ranks.to_string()]);
    for key in [
        "data.max_seq_len=256",
        "train.max_steps=3",
        "train.gradient_accumulation_steps=1",
        "checkpoint.save_steps=1",
        "eval.steps=1",
        "log.tensorboard=false",
    ] {
        command.args(["--set", key]);
    }
    watched(
        command.args(more).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap(),
    )
}

/// What a run says and how it ends, which must be soon after a fault has struck.
fn watched(mut run: Child) -> Output {
    let (send, lines) = mpsc::channel();
    let said = BufReader::new(run.stderr.take().unwrap());
    let reader = std::thread::spawn(move || said.lines().try_for_each(|line| send.send(line.unwrap())));
    let (mut stderr, mut until, mut limit) = (String::new(), Instant::now() + PATIENCE, PATIENCE);
    // The last line is followed by the end of the process, whose standard error closes then.
    let ended = loop {
        match lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                if line.contains("planted fault") && line.contains("strikes") {
                    (until, limit) = (Instant::now() + PROMISE, PROMISE);
                }
                stderr += &format!("{line}\n");
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break true,
            Err(mpsc::RecvTimeoutError::Timeout) => break false,
        }
    };
    if !ended {
        run.kill().unwrap();
    }
    let status = run.wait().unwrap();
    reader.join().unwrap().unwrap_or(());
    assert!(ended, "still running {} s later:\n{stderr}", limit.as_secs());
    Output { status, stdout: Vec::new(), stderr: stderr.into_bytes() }
}

/// Names of what is in a folder.
fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_rank_that_fails_in_any_phase_ends_the_run() {
    for phase in Phase::ALL {
        for (rank, ranks) in [(0, 2), (1, 2), (2, 3)] {
            for kind in ["error", "panic"] {
                let place = tempfile::tempdir().unwrap();
                let output = place.path().join("out");
                let fault = format!("{rank}:{}:{kind}", phase.name());
                let done = train(&output, Some(&fault), ranks, &[]);
                let text = String::from_utf8_lossy(&done.stderr);
                assert_eq!(done.status.code(), Some(75), "{fault} of {ranks}: {text}");
                let named = format!("rank {rank} failed in phase {}", phase.name());
                assert!(text.contains(&named), "{fault}: {text}");
                assert!(
                    text.contains(&format!("caused by: planted fault {fault}")) || kind == "panic",
                    "{text}"
                );
                assert!(text.contains(&format!("planted fault {fault} strikes")), "{fault}: {text}");
                let last = match phase {
                    Phase::Meet => format!("rank {rank}: it had made no call"),
                    _ => format!("rank {rank}: its last call was no "),
                };
                assert!(text.contains(&last), "{fault}: {text}");
                let left = names(&output);
                assert!(left.iter().all(|name| !name.contains(".tmp-")), "{fault}: {left:?}");
                for checkpoint in left.iter().filter(|name| name.starts_with("checkpoint-")) {
                    assert!(output.join(checkpoint).join("manifest.json").exists(), "{fault}: {checkpoint}");
                }
            }
        }
    }
}

/// What was saved before a failure is what the run goes on from, to the end of the unbroken one.
#[test]
fn a_run_goes_on_after_a_rank_was_lost() {
    let place = tempfile::tempdir().unwrap();
    let [whole, broken] = ["whole", "broken"].map(|name| place.path().join(name));
    assert!(train(&whole, None, 2, &[]).status.success());
    assert_eq!(train(&broken, Some("1:backward:3:panic"), 2, &[]).status.code(), Some(75));
    assert!(names(&broken).contains(&"checkpoint-2".to_owned()), "{:?}", names(&broken));
    let resumed = train(&broken, None, 2, &["--resume"]);
    assert!(resumed.status.success(), "{}", String::from_utf8_lossy(&resumed.stderr));
    let weights: Vec<String> =
        names(&whole).into_iter().filter(|name| name.ends_with(".safetensors")).collect();
    assert_eq!(weights.len(), 2, "{weights:?}");
    for file in weights {
        assert_eq!(std::fs::read(whole.join(&file)).unwrap(), std::fs::read(broken.join(&file)).unwrap());
    }
}

#[test]
fn a_fault_that_cannot_be_read() {
    let place = tempfile::tempdir().unwrap();
    let done = train(&place.path().join("out"), Some("1:sleep:panic"), 2, &[]);
    assert_eq!(done.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&done.stderr).contains("FINETUNE_FAULT"));
}
