//! Clocks that stand still or show impossible times: they end no run, and derived figures are
//! omitted.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

use serde_json::Value;

use crate::faults::preloaded;
use crate::skipped::skipped;
use crate::test_dir::{TestDir, lora};

static LIBRARY: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
    let built = preloaded("clock", include_str!("clock.c"));
    if let Err(why) = &built {
        skipped("clocks that stand or show wrong times", why);
    }
    built.ok()
});

/// Makes clocks show the times of `vars`; returns false, after printing it, where this machine
/// cannot.
fn set(command: &mut Command, vars: &[(&str, &str)]) -> bool {
    let Some(library) = LIBRARY.as_deref() else { return false };
    command.env("LD_PRELOAD", library).envs(vars.iter().copied());
    true
}

fn ended(dir: &TestDir, done: &Output) -> String {
    let said = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(0), "{said}");
    assert!(!said.contains("internal error") && !said.contains("warning"), "{said}");
    said
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

const LOGS: [&str; 8] = [
    "--set",
    "log.tensorboard=true",
    "--set",
    "log.peak_tflops=0.1",
    "--set",
    "log.metrics_address=127.0.0.1:0",
    "--set",
    "alerts.rules=[\"stall\", \"no_progress\"]",
];

#[test]
fn a_step_that_takes_no_time_has_no_speed() {
    let dir = TestDir::new();
    let saved = [&LOGS[..], &["--set", "checkpoint.save_steps=8", "--set"]].concat();
    let mut run = dir.command(&lora(&[&saved[..], &["train.max_steps=8"]].concat()));
    // Steps take milliseconds, so by this clock most of them take no time.
    if !set(&mut run, &[("CLOCK_TICK", "20")]) {
        return;
    }
    let said = ended(&dir, &run.output().unwrap());
    let steps = lines(&dir.path("out/metrics.jsonl"));
    assert_eq!(steps.len(), 8, "{said}");
    let without = steps.iter().filter(|step| step.get("tokens_per_sec").is_none());
    let without: Vec<&Value> = without.collect();
    assert!(!without.is_empty(), "{steps:?}");
    for step in &without {
        assert_eq!(step["step_secs"], 0.0, "{step}");
        assert!(
            step.get("mfu").is_none() && step["loss"].is_number() && step["tokens"].is_number(),
            "{step}"
        );
    }
    let report = std::fs::read_to_string(dir.path("out/report.html")).unwrap();
    for text in [&said, &report] {
        for word in ["inf", "NaN"] {
            let is_word = |part: &str| part.trim_matches(|c: char| !c.is_alphanumeric()) == word;
            assert!(!text.split_whitespace().any(is_word), "{word}: {text}");
        }
    }
    // The lines are read back.
    let resumed = [&saved[..], &["train.max_steps=10", "--resume"]].concat();
    let done = dir.command(&lora(&resumed)).output().unwrap();
    assert_eq!(done.status.code(), Some(0), "{}", dir.told(&done.stderr));
    let on = lines(&dir.path("out/metrics.jsonl"));
    assert_eq!((on.len(), &on[..8]), (10, &steps[..]));
}

#[test]
fn a_wall_clock_that_stands_anywhere_ends_no_run() {
    // 1969, 1653, 9999 and later, the year 300,000.
    for secs in ["-1", "-10000000000", "253402300800", "9467085600000"] {
        let dir = TestDir::new();
        let mut run = dir.command(&lora(&LOGS));
        if !set(&mut run, &[("CLOCK_WALL", secs)]) {
            return;
        }
        ended(&dir, &run.output().unwrap());
        assert_eq!(lines(&dir.path("out/metrics.jsonl")).len(), 4, "{secs}");
    }
}

/// On such a clock rustls would panic.
#[test]
fn a_clock_before_1970_is_named_where_certificates_are_needed() {
    let dir = TestDir::new();
    let mut inspect = dir.command(&["inspect", "a/b"]);
    inspect.env_remove("HF_HUB_OFFLINE").env("HF_ENDPOINT", "https://127.0.0.1:1");
    if !set(&mut inspect, &[("CLOCK_WALL", "-1")]) {
        return;
    }
    let done = inspect.output().unwrap();
    let said = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(said.contains("the clock of this machine is before 1970"), "{said}");
}
