//! Impossible sizes in recipes, flags, config.json and headers: each is refused before memory is
//! allocated.

use serde_json::json;

#[cfg(target_os = "linux")]
use crate::planned_run::{meminfo, resized, write_headers};
use crate::test_dir::{TestDir, lora};

/// Returns the output of a command that must be refused.
fn refused(dir: &TestDir, args: &[&str]) -> String {
    let done = dir.command(args).output().unwrap();
    let said = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{args:?}: {said:.2000}");
    assert!(!dir.path("out").exists(), "{args:?}: an output folder");
    said
}

#[test]
fn sizes_of_a_recipe() {
    let dir = TestDir::new();
    for (key, value, accepted) in [
        ("adapter.r", "1000000000", "a whole number from 1 to 65536"),
        ("adapter.rank_pattern", "{ q_proj = 1000000000 }", "each a whole number from 1 to 65536"),
        ("data.max_seq_len", "9223372036854775807", "a whole number from 2 to 16777216"),
        ("train.micro_batch_size", "1000000000", "a whole number from 1 to 65536"),
        ("train.gradient_accumulation_steps", "1000000000", "a whole number from 1 to 1048576"),
        ("train.gradient_accumulation_steps", "9223372036854775807", "a whole number from 1 to 1048576"),
    ] {
        let said = refused(&dir, &lora(&["--set", &format!("{key}={value}")]));
        assert!(said.contains(&format!("`{key}` is ")) && said.contains(accepted), "{said}");
    }
    let patterns: Vec<String> = (0..5000).map(|i| format!("q{i} = 4")).collect();
    let said =
        refused(&dir, &lora(&["--set", &format!("adapter.rank_pattern={{ {} }}", patterns.join(", "))]));
    assert!(said.contains("`rank_pattern` has 5000 entries; accepted: up to 4096"), "{said:.2000}");
}

/// The largest accepted sizes allocate nothing up front.
#[test]
fn the_largest_sizes_of_a_recipe() {
    let dir = TestDir::new();
    let sets = [
        "data.max_seq_len=16777216",
        "train.micro_batch_size=65536",
        "train.gradient_accumulation_steps=1048576",
        "train.max_steps=9223372036854775807",
        "checkpoint.keep_last=9223372036854775807",
    ];
    let more: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).chain(["--dry-run"]).collect();
    let done = dir.command(&lora(&more)).output().unwrap();
    assert!(done.status.success(), "{}", dir.told(&done.stderr));
}

/// A valid model that is too large for any machine that runs these tests.
#[test]
#[cfg(target_os = "linux")]
fn a_plan_that_cannot_fit() {
    let dir = resized(&[("hidden_size", 16384), ("intermediate_size", 65536), ("num_hidden_layers", 1024)]);
    let random = ["--set", "model.init=random"];
    let said = refused(&dir, &lora(&random));
    assert!(said.contains("error: cannot train: a step does not fit the available memory\n"), "{said}");
    assert!(said.contains("swap included") && said.contains("caused by: a rank's weights "), "{said}");
    assert!(said.contains("the largest part is weights, "), "{said}");
    assert!(said.contains("hint: these need less memory, the cheapest first: `--set "), "{said}");
    // A dry run only warns.
    let done = dir.command(&lora(&[&random[..], &["--dry-run"]].concat())).output().unwrap();
    let told = dir.told(&done.stderr);
    assert!(done.status.success(), "{told}");
    assert!(told.contains("warning: cannot train: a step does not fit the available memory"), "{told}");
}

/// Weights as a sparse file.
#[test]
#[cfg(target_os = "linux")]
fn a_model_that_cannot_be_loaded() {
    let there = meminfo("MemTotal:") + meminfo("SwapTotal:");
    let (hidden, inside) = (4096.0, 16384.0);
    let layers = (1.5 * there / 4.0 / (hidden * inside * 3.0)).ceil();
    let sizes = [("hidden_size", hidden), ("intermediate_size", inside), ("num_hidden_layers", layers)];
    let dir = resized(&sizes.map(|(key, size)| (key, size as u64)));
    write_headers(&dir.path("model"));
    let said = refused(&dir, &["generate", "--model", "model", "--prompt", "a"]);
    assert!(
        said.contains("error: cannot load the model: its weights do not fit the memory of this host"),
        "{said}"
    );
    assert!(said.contains(" of weights; ") && said.contains("swap included"), "{said}");
    // An invalid prompt is reported first.
    dir.write("prompts.jsonl", "{\"prompt\": \"a\"}\n{\"prompt\": 1}\n");
    let said = refused(&dir, &["generate", "--model", "model", "--input", "prompts.jsonl", "--json"]);
    assert!(said.contains("error: cannot use the prompt in prompts.jsonl:2\n"), "{said}");
}

#[test]
fn more_new_tokens_than_there_is_memory_for() {
    let dir = TestDir::new();
    for count in ["1152921504606846976", "18446744073709551615"] {
        let said =
            refused(&dir, &["generate", "--model", "model", "--prompt", "a", "--max-new-tokens", count]);
        assert!(said.contains("error: cannot keep the keys, values and states of "), "{said}");
        assert!(said.contains("hint: give a smaller `--max-new-tokens`"), "{said}");
    }
}

#[test]
fn a_tensor_with_an_endless_name() {
    let dir = TestDir::new();
    let header = json!({ "x".repeat(5_000_000): { "dtype": "F32", "shape": [0], "data_offsets": [0, 0] } });
    let header = header.to_string();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    std::fs::write(dir.path("model/model.safetensors"), bytes).unwrap();
    let said = refused(&dir, &lora(&[]));
    assert!(said.contains("has 5000000 bytes; accepted: up to 4096"), "{said:.2000}");
    assert!(said.len() < 2000, "{} bytes", said.len());
}
