//! The plan that a run prints before loading anything: whether it fits, which changes would make it
//! fit, and its memory. Planning stays fast for large models.

#[allow(dead_code, reason = "each test binary uses its part")]
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::exhaustive::{each_third, is_exhaustive};
use crate::place::Place;
use finetune::model::{ModelConfig, parameters};
use serde_json::{Map, Value, json};

/// Time limit that only a hanging program exceeds.
const HANG: Duration = Duration::from_secs(600);

/// tiny-llama with other sizes, without weights.
pub(crate) fn resized(keys: &[(&str, u64)]) -> Place {
    let place = Place::new();
    let path = place.path("model/config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    for (key, value) in keys {
        config[*key] = json!(value);
    }
    std::fs::write(&path, config.to_string()).unwrap();
    std::fs::remove_file(place.path("model/model.safetensors")).unwrap();
    place
}

/// The command of a run of `place`'s model on its rows.
pub(crate) fn train(place: &Place, output: &str, keys: &[&str], more: &[&str]) -> Command {
    let mut args = vec!["--model", "model", "--dataset", "rows.jsonl", "--output", output];
    for key in ["optimizer.learning_rate=1e-4", "data.max_seq_len=128"].iter().chain(keys) {
        args.extend(["--set", key]);
    }
    args.extend(more);
    place.command(&args)
}

/// Runs a command to its end; returns its output.
fn ends(command: &mut Command) -> Output {
    let started = Instant::now();
    let mut child =
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    let reader = |mut from: Box<dyn std::io::Read + Send>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            from.read_to_end(&mut bytes).unwrap();
            bytes
        })
    };
    let stdout = reader(Box::new(child.stdout.take().unwrap()));
    let stderr = reader(Box::new(child.stderr.take().unwrap()));
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if started.elapsed() > HANG {
            child.kill().unwrap();
            panic!("it hangs");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    Output { status, stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() }
}

fn failed(place: &Place, command: &mut Command) -> String {
    let done = ends(command);
    assert_eq!(done.status.code(), Some(1), "{}", place.told(&done.stderr));
    place.told(&done.stderr)
}

fn succeeded(place: &Place, command: &mut Command) -> String {
    let done = ends(command);
    assert!(done.status.success(), "{}", place.told(&done.stderr));
    place.told(&done.stderr)
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

/// The model has about a seventh as many parameters as the memory has bytes. Full training on two
/// ranks takes 16 bytes a parameter, with 8-bit moments 10, with LoRA 4.
#[test]
#[cfg(target_os = "linux")]
fn a_run_that_fits_nowhere_is_refused_with_what_would_fit() {
    let hidden = 512.0;
    let layers = 0.9 * meminfo("MemAvailable:") / 7.0 / (hidden * hidden * (4.0 + 3.0 * 4.0));
    let place = resized(&[
        ("hidden_size", 512),
        ("num_key_value_heads", 4),
        ("intermediate_size", 2048),
        ("num_hidden_layers", layers as u64),
    ]);
    let keys = ["model.init=random"];
    let refused = failed(&place, &mut train(&place, "out", &keys, &["--ranks", "2", "--dry-run"]));
    assert!(
        refused.starts_with("error: cannot train on 2 ranks: no strategy fits their memory"),
        "{refused}"
    );
    let [need, have] =
        [between(&refused, "needs least, needs ", " a rank"), between(&refused, "; ", " available")];
    assert!(bytes(need) > bytes(have), "{refused}");
    let hints = between(&refused, "hint: one of these fits: ", "\n");
    assert!(!hints.contains("optimizer.state=int8") && !hints.contains("--ranks"), "{hints}");
    assert!(hints.contains("`--set adapter.kind=lora --set quantization.kind=nf4` ("), "{hints}");
    for hint in hints.split("), ") {
        let (typed, figure) = hint.trim_end_matches(')').split_once(" (").unwrap();
        let figure = figure.split_once(" a rank with ").unwrap();
        assert!(bytes(figure.0) <= bytes(have), "{hint}");
        let folder = place.path("").display().to_string();
        let typed = typed.trim_matches('`').replace("FOLDER", &folder);
        let mut more: Vec<&str> = typed.split(' ').collect();
        more.extend(["--ranks", "2", "--dry-run"]);
        let planned = succeeded(&place, &mut train(&place, "out", &keys, &more));
        assert!(planned.contains(&format!("strategy {} ", figure.1)), "{hint}: {planned}");
        assert_eq!(between(&planned, "memory of a step: ", " = "), figure.0, "{hint}");
    }
}

#[test]
fn a_resolved_recipe_says_the_ranks_of_a_group() {
    let place = Place::new();
    let keys = ["parallel.strategy=hsdp"];
    let done = ends(&mut train(&place, "out", &keys, &["--ranks", "4", "--dry-run"]));
    assert!(place.told(&done.stdout).contains("shard_size = 4"), "{}", place.told(&done.stderr));
    let mut several = train(&place, "out", &keys, &["--dry-run", "--world-size", "4", "--rank", "0"]);
    let told = ends(several.args(["--master-addr", "localhost"]));
    if finetune::collective::CONNECTS_PROCESSES {
        assert_eq!(told.status.code(), Some(1));
        let told = place.told(&told.stderr);
        assert!(told.contains("does not report how many ranks a host has"), "{told}");
    }
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

/// Planning once took time cubic in the number of layers: these took over five minutes.
#[test]
fn two_thousand_layers_are_planned_in_no_time() {
    let place = resized(&[("num_hidden_layers", 2000)]);
    write_headers(&place.path("model"));
    let runs = [
        &["adapter.r=4"][..],
        &["adapter.kind=dora", "adapter.exclude_modules=[\"layers.0.self_attn.q_proj\"]"],
        &["adapter.r=4", "quantization.kind=nf4", "quantization.skip_modules=[\"q_proj\"]"],
        &["adapter.r=4", "adapter.modules_to_save=[\"norm\"]"],
        &["optimizer.state=int8"],
    ];
    for keys in each_third(runs, 1) {
        let planned = succeeded(&place, &mut train(&place, "out", keys, &["--dry-run"]));
        assert!(planned.contains("memory of a step: "), "{planned}");
    }
}

#[test]
fn a_million_faults_are_counted() {
    let place = Place::new();
    let faults = if is_exhaustive() { 1_000_000 } else { 100_000 };
    let numbered = |line: &dyn Fn(usize) -> String| (0..faults).map(line).collect::<String>();
    for (text, first) in [
        (format!("[train]\n{}", numbered(&|i| format!("epoch{i} = 1\n"))), "unknown key `train.epoch"),
        (numbered(&|i| format!("[trian{i}]\n")), "unknown section [trian"),
        (numbered(&|i| format!("epoch{i} = 1\n")), "is outside of any section"),
        (format!("[train]\n{}", "epochs = 1\n".repeat(faults + 1)), "`epochs` is set twice"),
    ] {
        place.write("recipe.toml", &text);
        let refused = failed(&place, &mut train(&place, "out", &[], &["--recipe", "recipe.toml"]));
        assert!(refused.contains(first), "{refused:.1000}");
        assert!(refused.contains(&format!("caused by: and {} more\n", faults - 20)), "{refused:.4000}");
        assert_eq!(refused.matches("caused by: ").count(), 21, "{refused:.4000}");
    }
}

/// Writes rows of text, enough to fill micro-batches of a thousand tokens; smaller ones would
/// fragment memory.
pub(crate) fn write_text(place: &Place) {
    let words: Vec<&str> =
        "the island of a sea and the wind over it was quiet for many days".split(' ').collect();
    let row = |i: usize| {
        let text: Vec<&str> = (0..120).map(|j| words[(i * 7 + j * 3) % words.len()]).collect();
        json!({ "text": text.join(" ") }).to_string() + "\n"
    };
    place.write("rows.jsonl", &(0..400).map(row).collect::<String>());
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

const ONE_STEP: &str = "train.max_steps=1";
const TWO_STEPS: &str = "train.max_steps=2";

/// Trains 34 million parameters for one or two steps on one or two ranks. The process's peak,
/// saving included, stays within 5 % of the plan that the run reports at its end, and within 10 %
/// with parameters in a file.
#[test]
#[cfg(target_os = "linux")]
fn runs_keep_to_the_memory_of_their_plan() {
    let place = resized(&[
        ("hidden_size", 512),
        ("num_key_value_heads", 2),
        ("intermediate_size", 1536),
        ("num_hidden_layers", 8),
        ("vocab_size", 8192),
    ]);
    write_text(&place);
    std::fs::create_dir(place.path("away")).unwrap();
    let always =
        ["model.init=random", "log.tensorboard=false", "data.max_seq_len=256", "checkpoint.save_steps=never"];
    let mut off = Vec::new();
    let shapes = [
        &["train.recompute=none", TWO_STEPS][..],
        &["checkpoint.save_steps=1", TWO_STEPS],
        &["checkpoint.save_steps=1", "checkpoint.async_save=false", "optimizer.state=int8", TWO_STEPS],
        &[
            "train.micro_batch_size=4",
            "train.recompute=block",
            "train.gradient_accumulation_steps=2",
            ONE_STEP,
        ],
        &["model.dtype=bf16", "optimizer.master=none", TWO_STEPS],
        &[
            "model.dtype=bf16",
            "optimizer.master=none",
            "optimizer.state=int8",
            "train.gradient_accumulation_steps=2",
            "checkpoint.save_steps=1",
            TWO_STEPS,
        ],
        &["adapter.r=4", "checkpoint.save_steps=1", "train.micro_batch_size=2", TWO_STEPS],
        &[
            "adapter.r=16",
            "quantization.kind=nf4",
            "train.micro_batch_size=4",
            "optimizer.state=int8",
            TWO_STEPS,
        ],
        &["adapter.r=8", "model.dtype=bf16", "train.recompute=block", "train.micro_batch_size=2", TWO_STEPS],
        &["parallel.strategy=ddp", "model.dtype=bf16", TWO_STEPS],
        &["parallel.strategy=fsdp", TWO_STEPS],
        &["parallel.offload=params", "parallel.offload_folder=away", TWO_STEPS],
    ];
    for (i, shape) in each_third(shapes, 0).into_iter().enumerate() {
        let keys = [&always[..], shape].concat();
        let ranks: &[&str] = if shape[0].starts_with("parallel.strategy") { &["--ranks", "2"] } else { &[] };
        let (peak, done) = peak(&mut train(&place, &format!("out{i}"), &keys, ranks));
        let told = place.told(&done.stderr);
        assert!(done.status.success(), "{told}");
        let planned = bytes(between(between(&told, "\npeak memory ", "\n"), " (", " planned"));
        let least = if shape.contains(&"parallel.offload=params") { 0.1 } else { 0.05 };
        if (peak / planned - 1.0).abs() > least {
            let line = between(&told, "memory of a step: ", "\n");
            off.push(format!("{shape:?}: {:.0} MiB where planned is {line}", peak / 1024f64.powi(2)));
        }
    }
    assert!(off.is_empty(), "{}", off.join("\n"));
}
