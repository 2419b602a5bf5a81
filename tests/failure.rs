//! A rank that fails, in any phase of a run, ends the run at once, says who and where, and leaves what was saved.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use finetune::collective::Phase;

fn train(output: &Path, fault: Option<&str>, ranks: usize, more: &[&str]) -> Output {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut command = assert_cmd::Command::cargo_bin("finetune").unwrap();
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
    command.args(more).timeout(Duration::from_secs(120)).output().unwrap()
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
                let started = Instant::now();
                let done = train(&output, Some(&fault), ranks, &[]);
                let text = String::from_utf8_lossy(&done.stderr);
                assert_eq!(done.status.code(), Some(75), "{fault} of {ranks}: {text}");
                let named = format!("rank {rank} failed in phase {}", phase.name());
                assert!(text.contains(&named), "{fault}: {text}");
                assert!(text.contains("planted fault"), "{fault}: {text}");
                // Far more than it takes: a run that hangs is stopped by the other limit.
                assert!(started.elapsed() < Duration::from_secs(60), "{fault}");
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
