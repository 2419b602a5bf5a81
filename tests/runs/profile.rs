//! `[profile]` and the bottleneck messages of a run: a strict reader accepts the traces, tracing
//! changes no number, planted bottlenecks are named, and a healthy run is called healthy. No test
//! asserts a time.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::skipped::skipped;
use crate::test_dir::{TestDir, lora};

/// A trace of three steps, after one step of waiting and one of warm-up.
const THREE_STEPS: [&str; 2] = ["--set", "profile.active=3"];

/// Returns the stderr of a run that must succeed. Spans are measured in CPU time of their thread.
fn run(dir: &TestDir, args: &[&str]) -> String {
    succeed(dir, dir.command(args).env("FINETUNE_CLOCK", "processor"))
}

/// Like [`run`] with a planted clock: a step takes the time of its work and of `fault`, whatever
/// else the machine does.
fn timed(dir: &TestDir, args: &[&str], fault: &str) -> String {
    let mut command = dir.command(args);
    command.env("FINETUNE_CLOCK", "planted");
    if !fault.is_empty() {
        command.env("FINETUNE_FAULT", fault);
    }
    succeed(dir, &mut command)
}

fn succeed(dir: &TestDir, command: &mut Command) -> String {
    let done = command.output().unwrap();
    let text = dir.told(&done.stderr);
    assert!(done.status.success(), "{text}");
    text
}

fn trace(dir: &TestDir, rank: usize) -> Value {
    let text = std::fs::read_to_string(dir.path(&format!("out/trace/rank-{rank}.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn spans(trace: &Value) -> impl Iterator<Item = &Value> {
    trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X")
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// A short full fine-tuning with equal steps on four ranks.
fn fsdp<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["--recipe", "full", "--model", "model", "--dataset", "rows.jsonl", "--ranks", "4"];
    for pair in [
        "parallel.strategy=fsdp",
        "data.max_seq_len=96",
        "data.packing=false",
        "train.max_steps=6",
        "train.gradient_accumulation_steps=1",
        "train.recompute=block",
        "log.tensorboard=false",
    ] {
        args.extend(["--set", pair]);
    }
    args.extend(more);
    args
}

/// The share of a heavy step that spans must name. Without the spans of attention (a quarter), of
/// the norms or of the gates (7 % and 8 %) the share is lower. Cache misses of a busy machine
/// between operations cost less than that.
const NAMED: &str = "--named=0.93";

/// Returns the verdict of the strict trace reader: events nest, cover the steps, name the
/// operations of heavy steps, and carry the counted bytes. None without python3.
fn checked(folder: &Path) -> Option<Result<String, String>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/check_trace.py");
    let Ok(done) = Command::new("python3").arg(script).arg(NAMED).arg(folder).output() else {
        skipped("traces read by scripts/check_trace.py", "there is no python3");
        return None;
    };
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Some(if done.status.success() { Ok(text(done.stdout)) } else { Err(text(done.stderr)) })
}

fn check(folder: &Path) {
    if let Some(said) = checked(folder) {
        said.unwrap();
    }
}

/// Trains three steps of 32 rows on the built-in model, one of them traced. Matrix products use the
/// baseline CPU instructions: faster ones leave a larger share of a step between them.
fn heavy_step(dir: &TestDir) {
    let args =
        ["--recipe", "quickstart", "--output", "out", "--set", "eval.at_end=false", "--set", "data.eval=[]"];
    let sets =
        ["train.max_steps=3", "train.micro_batch_size=32", "log.tensorboard=false", "profile.active=1"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let mut command = dir.command(&[&args[..], &sets].concat());
    succeed(dir, command.env("FINETUNE_CLOCK", "processor").env("FINETUNE_CPU", "baseline"));
}

/// A step of 32 rows of 256 tokens on the built-in model computes enough for the share of named
/// time to be checked. Without the spans of its products, or of the work between them, the check
/// would fail. It is a single step, for the last step of an epoch has fewer rows.
#[test]
fn spans_name_what_a_heavy_step_does() {
    let dir = TestDir::new();
    heavy_step(&dir);
    let Some(said) = checked(&dir.path("out/trace")) else { return };
    said.unwrap();
    let file = dir.path("out/trace/rank-0.json");
    let mut trace = trace(&dir, 0);
    // Each kind of operation has spans, whatever its share of the time.
    for op in [
        "matmul",
        "attention",
        "attention_backward",
        "glu",
        "glu_backward",
        "rotary",
        "rotary_backward",
        "rms_norm",
        "rms_norm_backward",
        "cross_entropy",
        "embedding",
    ] {
        let is_of_op =
            |event: &Value| event["name"].as_str().is_some_and(|name| name.split(' ').next() == Some(op));
        assert!(spans(&trace).any(is_of_op), "no span of {op}");
    }
    let flops = |event: &Value| event["args"]["flops"].as_u64().unwrap_or(0);
    let all: u64 = spans(&trace).map(flops).sum();
    assert!(all >= 12_000_000_000, "{all} operations");
    // A step without attention spans is refused, and the error locates the gap.
    let events = trace["traceEvents"].as_array_mut().unwrap();
    events.retain(|event| !event["name"].as_str().unwrap().starts_with("attention"));
    std::fs::write(file, trace.to_string()).unwrap();
    let refused = checked(&dir.path("out/trace")).unwrap().unwrap_err();
    assert!(
        refused.contains("spans name what was done in ") && refused.contains(" in backward block"),
        "{refused}"
    );
}

#[test]
fn a_trace_of_four_ranks_is_strict_and_counts_the_bytes_of_bench() {
    let dir = TestDir::new();
    let text = run(
        &dir,
        &fsdp(&[&THREE_STEPS[..], &["--output", "out", "--set", "checkpoint.save_steps=3"]].concat()),
    );
    assert!(text.contains("most expensive operations, self time"), "{text}");
    assert!(text.contains("traced 3 steps: trace/rank-*.json opens in ui.perfetto.dev"), "{text}");
    check(&dir.path("out/trace"));
    let first = trace(&dir, 0);
    let names: Vec<&str> = spans(&first).map(|span| span["name"].as_str().unwrap()).collect();
    for name in [
        "step 3",
        "data",
        "zero gradients",
        "forward block 0",
        "recompute block 0",
        "backward block 1",
        "forward embedding 0",
        "save",
        "write checkpoint 3",
        "all-gather values of block 0",
        "wait for a call",
        "release",
        "read what is held",
    ] {
        assert!(names.contains(&name), "no span {name} in {names:?}");
    }
    for op in [
        "matmul ",
        "attention ",
        "attention_backward ",
        "rms_norm ",
        "rotary ",
        "glu ",
        "cross_entropy ",
        "adamw ",
        "embedding ",
    ] {
        assert!(names.iter().any(|name| name.starts_with(op)), "no operation {op} in {names:?}");
    }
    assert!(!names.contains(&"step 2") && !names.contains(&"step 6"), "{names:?}");
    // Bytes of a step without the training loop's own messages and a checkpoint's gathers: the same
    // as `bench scaling` counts.
    let begin = |span: &Value| span["ts"].as_f64().unwrap();
    let saves = |span: &Value| span["cat"] == "phase" && span["name"] == "save";
    let saving: Vec<(f64, f64)> = spans(&first)
        .filter(|span| saves(span))
        .map(|span| (begin(span), begin(span) + span["dur"].as_f64().unwrap()))
        .collect();
    assert_eq!(saving.len(), 1);
    let is_step = |span: &&Value| {
        let of_loop = span["name"].as_str().unwrap().starts_with("all-reduce signals and times");
        let in_save = saving.iter().any(|(from, to)| (*from..*to).contains(&begin(span)));
        span["cat"] == "collective" && !of_loop && !in_save
    };
    let sent: u64 = spans(&first).filter(is_step).map(|span| number(&span["args"]["bytes"])).sum();
    let bench =
        dir.command(&[&["bench", "scaling"][..], &bench_words(), &["--json"]].concat()).output().unwrap();
    assert!(bench.status.success(), "{}", dir.told(&bench.stderr));
    let figures: Value = serde_json::from_slice(&bench.stdout).unwrap();
    let one = figures.as_array().map_or(&figures["results"][0], |all| &all[0]);
    assert_eq!(sent, 3 * number(&one["bytes_sent_per_step"]), "{one}");
    let ops: Value =
        serde_json::from_str(&std::fs::read_to_string(dir.path("out/trace/ops.json")).unwrap()).unwrap();
    assert_eq!(number(&ops["steps"]), 3);
    assert!(ops["by_shape"].as_array().unwrap().len() > ops["operations"].as_array().unwrap().len());
}

/// The flags of [`fsdp`] in the form of `bench scaling`.
fn bench_words() -> Vec<&'static str> {
    fsdp(&[])
}

/// Returns every file of a run's result, and the figures of its steps except times.
fn numbers(dir: &TestDir, output: &str) -> (Vec<Value>, Vec<u8>) {
    let text = std::fs::read_to_string(dir.path(&format!("{output}/metrics.jsonl"))).unwrap();
    let keys = ["step", "epoch", "loss", "learning_rate", "grad_norm", "tokens"];
    let line = |line: &str| -> Value {
        let line: Value = serde_json::from_str(line).unwrap();
        keys.iter().map(|key| line[key].clone()).collect()
    };
    let weights: PathBuf = dir.path(&format!("{output}/adapter_model.safetensors"));
    (text.lines().map(line).collect(), std::fs::read(weights).unwrap())
}

#[test]
fn a_trace_changes_no_number() {
    let dir = TestDir::new();
    let dropout = ["--set", "adapter.lora_dropout=0.1", "--set", "checkpoint.save_steps=2"];
    let text = run(&dir, &lora(&dropout));
    assert!(!dir.path("out/trace").exists() && !text.contains("dearest"), "{text}");
    let plain = numbers(&dir, "out");
    std::fs::rename(dir.path("out"), dir.path("plain")).unwrap();
    let cycles = ["--set", "profile.wait=0", "--set", "profile.active=1", "--set", "profile.repeat=0"];
    run(&dir, &lora(&[&dropout[..], &cycles].concat()));
    assert_eq!(numbers(&dir, "out"), plain);
    check(&dir.path("out/trace"));
    // Cycles of one warm-up step and one traced step.
    let first = trace(&dir, 0);
    let steps: Vec<&str> = spans(&first)
        .filter(|span| span["cat"] == "step")
        .map(|span| span["name"].as_str().unwrap())
        .collect();
    assert_eq!(steps, ["step 2", "step 4"]);
    assert!(spans(&first).any(|span| span["name"].as_str().unwrap().starts_with("dropout ")));
    // A resumed run may have another schedule.
    let resumed = ["--set", "train.max_steps=4", "--resume", "out/checkpoint-2", "--set", "profile.active=2"];
    run(&dir, &lora(&[&dropout[..], &resumed].concat()));
}

#[test]
fn a_run_without_a_step_to_keep_says_so() {
    let dir = TestDir::new();
    let text = run(&dir, &lora(&["--set", "profile.active=1", "--set", "profile.wait=9"]));
    assert!(text.contains("warning: nothing was traced"), "{text}");
    assert!(text.contains("the first step that `[profile]` keeps is 11; the run had 4 steps"), "{text}");
    assert!(!dir.path("out/trace").exists());
}

/// Returns the names of the bottlenecks that a run with this fault reports.
fn named(more: &[&str], fault: &str) -> Vec<String> {
    let dir = TestDir::new();
    let sets = [&["--set", "train.max_steps=8", "--set", "profile.active=5"][..], more].concat();
    let text = timed(&dir, &lora(&sets), fault);
    if !fault.is_empty() {
        assert!(text.contains("strikes"), "{text}");
    }
    let rules = finetune::profile::bottlenecks::RULES;
    let names = rules.iter().map(|rule| rule.name);
    names.filter(|name| text.contains(&format!("{name}: "))).map(str::to_owned).collect()
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn planted_bottlenecks_are_named() {
    assert_eq!(named(&[], "0:data:slow=120ms"), ["input-bound"]);
    assert_eq!(named(&["--ranks", "2"], "1:backward:slow=120ms"), ["straggler"]);
    assert_eq!(named(&["--ranks", "2"], "0:data:slow_link=40ms"), ["communication-bound"]);
    let saves = ["--set", "checkpoint.save_steps=1", "--set", "checkpoint.async_save=false"];
    assert_eq!(named(&saves, "0:save:slow=120ms"), ["saving stalls"]);
    assert_eq!(named(&["--set", "train.recompute=block"], ""), ["recompute waste"]);
}

/// With the real clock a delay appears in the phase where it was planted. It may be longer than
/// planted, never shorter.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn real_delays_are_counted_where_they_are() {
    let least = |more: &[&str], fault: &str, secs: fn(&Value) -> &Value, planted: f64| {
        let dir = TestDir::new();
        let sets =
            [&["--set", "checkpoint.save_steps=1", "--set", "checkpoint.async_save=false"], more].concat();
        succeed(&dir, dir.command(&lora(&sets)).env("FINETUNE_FAULT", fault));
        let text = std::fs::read_to_string(dir.path("out/metrics.jsonl")).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        // The first step follows no save.
        for line in lines.iter().filter(|line| line["loss"].is_f64()).skip(1) {
            assert!(secs(line).as_f64().unwrap() >= planted, "{fault}: {line}");
        }
    };
    least(&[], "0:data:slow=30ms", |line| &line["data_secs"], 0.03);
    least(&[], "0:save:slow=30ms", |line| &line["save_secs"], 0.03);
    least(&["--ranks", "2"], "1:backward:slow=30ms", |line| &line["rank_secs"][1], 0.03);
    least(&["--ranks", "2"], "0:data:slow_link=10ms", |line| &line["exposed_secs"], 0.01);
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant clocks")]
fn a_healthy_run_is_called_healthy() {
    let dir = TestDir::new();
    let text = timed(&dir, &lora(&["--set", "train.max_steps=8", "--set", "profile.active=5"]), "");
    assert!(text.contains("no bottleneck: no rule of docs/profiling.md applies"), "{text}");
}

/// Without a trace a run warns about a large loss of time, and not about a small one.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn what_is_clear_is_said_without_a_trace() {
    let dir = TestDir::new();
    let eight = ["--set", "train.max_steps=8"];
    let text = timed(&dir, &lora(&eight), "0:data:slow=300ms");
    assert!(text.contains("warning: input-bound: "), "{text}");
    let dir = TestDir::new();
    let text = timed(&dir, &lora(&eight), "0:data:slow=5ms");
    assert!(!text.contains("input-bound"), "{text}");
}

/// docs/profiling.md lists the rules with their thresholds, in their order.
#[test]
fn the_page_has_the_rules() {
    let page =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/profiling.md")).unwrap();
    let from = page.lines().skip_while(|line| !line.starts_with("| bottleneck |")).skip(2);
    let rows: Vec<String> = from
        .take_while(|line| line.starts_with("| "))
        .map(|line| line.split(" | ").take(2).collect::<Vec<_>>().join(" | "))
        .collect();
    let rules = finetune::profile::bottlenecks::RULES;
    assert_eq!(rows, rules.map(|rule| format!("| {} | {:.0} %", rule.name, 100.0 * rule.threshold)));
}
