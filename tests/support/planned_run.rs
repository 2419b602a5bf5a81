//! Runs of a model of chosen sizes, and what their plans and processes say of memory.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use finetune::model::{ModelConfig, parameters};
use serde_json::{Map, Value, json};

use crate::test_dir::TestDir;

/// tiny-llama with other sizes, without weights.
pub(crate) fn resized(keys: &[(&str, u64)]) -> TestDir {
    let dir = TestDir::new();
    let path = dir.path("model/config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    for (key, value) in keys {
        config[*key] = json!(value);
    }
    std::fs::write(&path, config.to_string()).unwrap();
    std::fs::remove_file(dir.path("model/model.safetensors")).unwrap();
    dir
}

/// The command of a run of `dir`'s model on its rows.
pub(crate) fn train(dir: &TestDir, output: &str, keys: &[&str], more: &[&str]) -> Command {
    let mut args = vec!["--model", "model", "--dataset", "rows.jsonl", "--output", output];
    for key in ["optimizer.learning_rate=1e-4", "data.max_seq_len=128"].iter().chain(keys) {
        args.extend(["--set", key]);
    }
    args.extend(more);
    dir.command(&args)
}

/// Returns the bytes of a size such as `1.50 GiB`.
pub(crate) fn bytes(text: &str) -> f64 {
    let (number, unit) = text.split_once(' ').unwrap();
    let power = ["B", "KiB", "MiB", "GiB", "TiB"].iter().position(|known| *known == unit).unwrap();
    number.parse::<f64>().unwrap() * 1024f64.powi(power as i32)
}

/// Returns the text between `start` and `end`.
pub(crate) fn between<'a>(text: &'a str, start: &str, end: &str) -> &'a str {
    let (_, rest) = text.split_once(start).unwrap_or_else(|| panic!("no `{start}` in {text}"));
    rest.split_once(end).unwrap_or_else(|| panic!("no `{end}` in {rest}")).0
}

#[cfg(target_os = "linux")]
pub(crate) fn meminfo(key: &str) -> f64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    bytes(&format!("{} KiB", between(&text, key, "kB").trim()))
}

/// Writes the headers of a model's weights, with sparse data.
pub(crate) fn write_headers(model: &Path) {
    let path = model.join("config.json");
    let config = ModelConfig::from_json(&std::fs::read_to_string(path).unwrap(), "config.json").unwrap();
    let (mut header, mut at) = (Map::new(), 0);
    for spec in parameters(&config) {
        let end = at + 4 * spec.len() as u64;
        header.insert(spec.name, json!({ "dtype": "F32", "shape": spec.shape, "data_offsets": [at, end] }));
        at = end;
    }
    let text = Value::Object(header).to_string();
    let mut file = std::fs::File::create(model.join("model.safetensors")).unwrap();
    file.write_all(&(text.len() as u64).to_le_bytes()).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.set_len(8 + text.len() as u64 + at).unwrap();
}

/// Writes rows of text, enough to fill micro-batches of a thousand tokens; smaller ones would
/// fragment memory.
pub(crate) fn write_text(dir: &TestDir) {
    let words: Vec<&str> =
        "the island of a sea and the wind over it was quiet for many days".split(' ').collect();
    let row = |i: usize| {
        let text: Vec<&str> = (0..120).map(|j| words[(i * 7 + j * 3) % words.len()]).collect();
        json!({ "text": text.join(" ") }).to_string() + "\n"
    };
    dir.write("rows.jsonl", &(0..400).map(row).collect::<String>());
}

/// Returns the peak memory of a process and its output.
#[cfg(target_os = "linux")]
pub(crate) fn peak(command: &mut Command) -> (f64, Output) {
    let child =
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let waiter = std::thread::spawn(move || child.wait_with_output().unwrap());
    let mut peak = 0.0;
    while !waiter.is_finished() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        if let Some((_, rest)) = text.split_once("VmHWM:") {
            peak = bytes(&format!("{} KiB", rest.split_once("kB").unwrap().0.trim()));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    (peak, waiter.join().unwrap())
}
