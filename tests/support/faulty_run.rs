//! Runs with a planted fault or planted numbers, and the wait for their end.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};

/// Time limit of a run, and of survivors after a rank has failed; exceeding it counts as a hang.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// The command of a run of three steps that saves and evaluates after each step.
pub(crate) fn command(output: &Path, fault: Option<&str>, ranks: usize, more: &[&str]) -> Command {
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
pub(crate) fn watched(mut run: Child, promise: Duration) -> Output {
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
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
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
