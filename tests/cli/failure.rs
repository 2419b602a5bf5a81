//! A rank that fails, in any phase, ends the run. The error names rank, phase and last call, and
//! everything saved before stays. The test kills a run, and fails, if it continues for minutes
//! after its fault struck.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use finetune::collective::Phase;

/// Time limit of a run, and of survivors after a rank has failed; exceeding it counts as a hang.
const PATIENCE: Duration = Duration::from_secs(300);

fn train(output: &Path, fault: Option<&str>, ranks: usize, more: &[&str]) -> Output {
    watched(command(output, fault, ranks, more).spawn().unwrap(), PATIENCE)
}

/// The command of a run of three steps that saves and evaluates after each step.
pub(super) fn command(output: &Path, fault: Option<&str>, ranks: usize, more: &[&str]) -> Command {
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
        "data.max_seq_len=128",
        "train.max_steps=3",
        "train.gradient_accumulation_steps=1",
        "checkpoint.save_steps=1",
        "eval.steps=1",
        "log.tensorboard=false",
    ] {
        command.args(["--set", key]);
    }
    command.args(more).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Returns output and exit status of a run, which must end at most `promise` after a fault struck.
pub(super) fn watched(mut run: Child, promise: Duration) -> Output {
    let (send, lines) = mpsc::channel();
    let said = BufReader::new(run.stderr.take().unwrap());
    let reader = std::thread::spawn(move || said.lines().try_for_each(|line| send.send(line.unwrap())));
    let (mut stderr, mut until, mut limit) = (String::new(), Instant::now() + PATIENCE, PATIENCE);
    // The process ends right after its last line, which closes stderr.
    let ended = loop {
        match lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                if line.contains("planted fault") && line.contains("strikes") {
                    (until, limit) = (Instant::now() + promise, promise);
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

/// Returns the names of a folder's entries.
pub(super) fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
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

/// After a rank failed, a run resumes from its checkpoints and ends like an unbroken run.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_run_goes_on_after_a_rank_was_lost() {
    let place = tempfile::tempdir().unwrap();
    let [whole, broken] = ["whole", "broken"].map(|name| place.path().join(name));
    assert!(train(&whole, None, 2, &[]).status.success());
    assert_eq!(train(&broken, Some("1:backward:4:panic"), 2, &[]).status.code(), Some(75));
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
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_fault_that_cannot_be_read() {
    let place = tempfile::tempdir().unwrap();
    let done = train(&place.path().join("out"), Some("1:sleep:panic"), 2, &[]);
    assert_eq!(done.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&done.stderr).contains("FINETUNE_FAULT"));
}

/// Release builds ignore planted faults.
#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "this build plants faults; `cargo test --release` runs it; .ci/run tries the same"
)]
fn a_release_build_plants_no_fault() {
    let place = tempfile::tempdir().unwrap();
    let done = train(&place.path().join("out"), Some("1:backward:panic"), 2, &[]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// The token `~` of tiny-llama, which none of its data files contains. Its row of the table is in
/// the shard of the first of two ranks.
pub(crate) const TILDE: usize = 93;

pub(crate) fn set_column(table: &Tensor, rows: std::ops::Range<usize>, column: usize, value: f32) -> Tensor {
    let (count, width) = table.dims2().unwrap();
    let mut values = table.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    rows.for_each(|row| values[row * width + column] = value);
    Tensor::from_vec(values, (count, width), &Device::Cpu).unwrap()
}

/// Makes column 5 of the input of the first layer's gate and up projections nonzero for token `~`
/// only; they multiply it by `gate` and `up`.
pub(crate) fn tilde_alone_has_column_5(tensors: &mut HashMap<String, Tensor>, gate: f32, up: f32) {
    let mut set = |name: &str, value| {
        let table = tensors.get_mut(name).unwrap();
        *table = set_column(table, 0..table.dims()[0], 5, value);
    };
    set("model.embed_tokens.weight", 0.0);
    set("model.layers.0.mlp.gate_proj.weight", gate);
    set("model.layers.0.mlp.up_proj.weight", up);
    let table = tensors.get_mut("model.embed_tokens.weight").unwrap();
    *table = set_column(table, TILDE..TILDE + 1, 5, 1.0);
    // Attention must add nothing to the column.
    let output = tensors.get_mut("model.layers.0.self_attn.o_proj.weight").unwrap();
    *output = Tensor::zeros(output.dims(), DType::F32, &Device::Cpu).unwrap();
}

/// Copies tiny-llama and applies `change` to its weights.
pub(crate) fn changed_model(folder: &Path, change: impl FnOnce(&mut HashMap<String, Tensor>)) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/tiny-llama");
    std::fs::create_dir_all(folder).unwrap();
    for entry in std::fs::read_dir(&golden).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    let file = folder.join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    change(&mut tensors);
    candle_core::safetensors::save(&tensors, &file).unwrap();
}

/// Evaluates four rows, each its own batch, on two ranks under fsdp; the rows `bad` hold token `~`.
fn evaluated(place: &Path, model: &Path, bad: &[usize]) -> Output {
    let row = |i| if bad.contains(&i) { "a ~ in a row of some length" } else { "a row of some other length" };
    let rows: String = (0..4).map(|i| format!("{{\"text\": \"{}\"}}\n", row(i))).collect();
    let data = place.join("rows.jsonl");
    std::fs::write(&data, rows).unwrap();
    let data = format!("data.eval=[{:?}]", data.display());
    let model = format!("model.id={:?}", model.display().to_string());
    train(
        &place.join("out"),
        None,
        2,
        &["--set", &data, "--set", &model, "--set", "data.max_seq_len=16", "--set", "data.train_on=all"],
    )
}

/// The ranks detect a non-finite loss of any one rank and batch together: exit code 4, and no rank
/// waits in a collective.
#[test]
fn an_evaluation_that_diverges_on_one_rank() {
    let place = tempfile::tempdir().unwrap();
    let [weight, activation] = ["weight", "activation"].map(|name| place.path().join(name));
    changed_model(&weight, |tensors| {
        let table = tensors.get_mut("model.embed_tokens.weight").unwrap();
        *table = set_column(table, TILDE..TILDE + 1, 5, f32::NAN);
    });
    // Only token `~` has a value in column 5, which overflows in the first layer; every weight is
    // finite.
    changed_model(&activation, |tensors| tilde_alone_has_column_5(tensors, 1e25, 1e25));
    for (model, found) in [
        (&weight, "the weight model.embed_tokens.weight on rank 0"),
        (&activation, "the output of model.layers.0 on micro-batch 1 on every rank"),
    ] {
        // The first round of batches and the last one, after which the ranks sum their losses.
        for (bad, rank) in [(0, 0), (1, 1), (2, 0), (3, 1)] {
            let place = tempfile::tempdir().unwrap();
            let done = evaluated(place.path(), model, &[bad]);
            let text = String::from_utf8_lossy(&done.stderr);
            assert_eq!(done.status.code(), Some(4), "row {bad}: {text}");
            let rows = format!("the loss of row {}, which rank {rank} evaluated", bad + 1);
            assert!(text.contains(&rows), "row {bad}: {text}");
            assert!(text.contains(&format!("the first bad value is in {found}\n")), "row {bad}: {text}");
        }
    }
    // Rows without the token do not diverge.
    let place = tempfile::tempdir().unwrap();
    assert!(evaluated(place.path(), &weight, &[]).status.success());
}
