//! Whole-run figures of `finetune plan`, against arithmetic by hand: loading, evaluating, saving,
//! tokens.

use serde_json::Value;

use crate::plan::sizing::{plan, shapes};
use crate::test_dir::TestDir;

/// Parameters of the 7B shape, stored in f32 because its config.json names no dtype.
const SEVEN_B: f64 = 6_738_415_616.0;
/// Bytes a second read from the disk of an H100 host; it writes half as many.
const DISK: f64 = 7e9;

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

fn near(said: f64, by_hand: f64) {
    assert!((said - by_hand).abs() <= 1e-9 * by_hand.abs().max(1.0), "{said}, by hand {by_hand}");
}

/// Returns the plan of the 7B shape on eight H100.
fn seven_b(dir: &TestDir, sets: &[&str]) -> Value {
    let mut args = vec!["--on", "8xH100-80GB"];
    args.extend(sets.iter().flat_map(|set| ["--set", set]));
    plan(dir, "7B", &args)
}

#[test]
fn weights_are_loaded_once_and_results_are_saved() {
    let dir = shapes();
    let never = ["train.max_steps=1000", "checkpoint.save_steps=never"];
    let run = &seven_b(&dir, &never)["run"];
    // Without checkpoints only the weights are written.
    near(number(&run["loading"]), 4.0 * SEVEN_B / DISK);
    near(number(&run["saving"]), 4.0 * SEVEN_B / (DISK / 2.0));
    assert_eq!(run["evaluating"], 0.0);
    let parts = ["stepping", "loading", "saving"].map(|part| number(&run[part]));
    near(number(&run["total"]), parts.iter().sum());
    let bf16 = &seven_b(&dir, &[&never[..], &["checkpoint.output_dtype=bf16"]].concat())["run"];
    near(number(&bf16["saving"]), 2.0 * SEVEN_B / (DISK / 2.0));
    // By default one checkpoint at the end, with masters and states, which no step overlaps.
    let auto = &seven_b(&dir, &["train.max_steps=1000"])["run"];
    near(number(&auto["saving"]), (12.0 + 4.0) * SEVEN_B / (DISK / 2.0));
}

#[test]
fn checkpoints_are_written_beside_steps_or_waited_for() {
    let dir = shapes();
    let result = 4.0 * SEVEN_B / (DISK / 2.0);
    // f32 masters and two f32 moments.
    let checkpoint = 12.0 * SEVEN_B / (DISK / 2.0);
    let waited = ["train.max_steps=1000", "checkpoint.save_steps=300", "checkpoint.async_save=false"];
    near(number(&seven_b(&dir, &waited)["run"]["saving"]), 3.0 * checkpoint + result);
    let lean = [&waited[..], &["optimizer.master=none"]].concat();
    near(number(&seven_b(&dir, &lean)["run"]["saving"]), 3.0 * checkpoint * 10.0 / 12.0 + result);
    // 300 steps take longer than writing a checkpoint; only 10 steps overlap the last one.
    let said = seven_b(&dir, &["train.max_steps=310", "checkpoint.save_steps=300"]);
    let step = number(&said["time"]["total"]);
    assert!(300.0 * step > checkpoint && 10.0 * step < checkpoint);
    near(number(&said["run"]["saving"]), checkpoint - 10.0 * step + result);
    // Two steps take less: each of five checkpoints delays the run by the rest, and no step
    // overlaps the last one.
    let said = seven_b(&dir, &["train.max_steps=10", "checkpoint.save_steps=2"]);
    let step = number(&said["time"]["total"]);
    near(number(&said["run"]["saving"]), 4.0 * (checkpoint - 2.0 * step) + checkpoint + result);
}

/// Storage without a given size is the size of the run's files.
#[test]
fn storage_is_what_a_run_keeps() {
    let dir = shapes();
    let cost = |sets: &[&str]| {
        let sets = [&["train.max_steps=1000"], sets].concat();
        let mut args = vec!["--on", "8xH100-80GB", "--price", "1/GB-month"];
        args.extend(sets.iter().flat_map(|set| ["--set", set]));
        let said = plan(&dir, "7B", &args);
        // A month has 730 hours.
        number(&said["cost"]) * 730.0 * 3600.0 / number(&said["run"]["total"]) * 1e9
    };
    let by_hand = |said: f64, bytes: f64| assert!((said / (bytes * SEVEN_B) - 1.0).abs() < 1e-9, "{said}");
    by_hand(cost(&["checkpoint.save_steps=never"]), 4.0);
    // One at the end.
    by_hand(cost(&[]), 12.0 + 4.0);
    // Three are made, two kept.
    by_hand(cost(&["checkpoint.save_steps=300"]), 2.0 * 12.0 + 4.0);
    by_hand(cost(&["checkpoint.save_steps=300", "checkpoint.keep_last=9"]), 3.0 * 12.0 + 4.0);
    // Of ten, two and at most three more: those of steps 300, 600 and 900.
    by_hand(cost(&["checkpoint.save_steps=100", "checkpoint.keep_every=300"]), 5.0 * 12.0 + 4.0);
}

/// Of the values of `train.recompute`, "auto" takes the fastest one that fits: it uses what the
/// memory holds.
#[test]
fn no_more_blocks_are_recomputed_than_the_memory_demands() {
    let dir = shapes();
    for (model, on, recipe, bytes, more) in [
        ("7B", "A100-40GB", "lora", 40e9, "train.micro_batch_size=8"),
        ("70B", "A100-80GB", "qlora", 80e9, "train.micro_batch_size=2"),
        ("7B", "8xA100-40GB", "full", 40e9, "train.micro_batch_size=4"),
    ] {
        let args = ["--on", on, "--recipe", recipe, "--set", more];
        let said = plan(&dir, model, &args);
        let recompute = said["recompute"].as_str().unwrap();
        assert!(recompute.starts_with("first:"), "{model} on {on}: {recompute}");
        let used = number(&said["bytes"]);
        assert!(said["fits"] == true && used >= 0.85 * bytes, "{model} on {on}: {used}");
        let slower = plan(&dir, model, &[&args[..], &["--set", "train.recompute=block"]].concat());
        assert!(number(&slower["time"]["total"]) > number(&said["time"]["total"]), "{model} on {on}");
        assert!(number(&slower["bytes"]) < used, "{model} on {on}");
    }
}

/// A forward takes a third of full training's operations, half of an adapter's, and somewhat more
/// than a quarter of full training's with recomputing, which leaves out `down_proj` and the last
/// block. Attention differs: its backward takes two and a half forwards.
#[test]
fn a_forward_is_counted_by_its_operations() {
    let dir = shapes();
    let share = |method: &str, recompute: &str| {
        let set = format!("train.recompute={recompute}");
        let said = plan(&dir, "7B", &["--on", "H100-80GB", "--recipe", method, "--set", &set]);
        number(&said["time"]["forward"]) / number(&said["time"]["compute"])
    };
    // Weights of blocks and of the output layer; of adapters of rank 16; attention over 1,024 keys
    // on average.
    let blocks = 32.0 * (4.0 * 4096.0 * 4096.0 + 3.0 * 4096.0 * 11008.0);
    let head = 32_000.0 * 4096.0;
    let adapters = 32.0 * 16.0 * (4.0 * 2.0 * 4096.0 + 3.0 * (4096.0 + 11008.0));
    let attention = 32.0 * 4.0 * 4096.0 * 1024.0;
    let full = 2.0 * (blocks + head) + attention;
    let down = 32.0 * 4096.0 * 11008.0;
    let again = (2.0 * (blocks - down) + attention) * 31.0 / 32.0;
    let all = 6.0 * (blocks + head) + 3.5 * attention;
    near(share("full", "none"), full / all);
    near(share("full", "block"), full / (all + again));
    let lora = full + 2.0 * adapters;
    let all = 4.0 * (blocks + head) + 6.0 * adapters + 3.5 * attention;
    near(share("lora", "none"), lora / all);
    // Without the B of `down_proj`.
    let adapters_again = (adapters - 32.0 * 16.0 * 4096.0) * 31.0 / 32.0;
    near(share("lora", "block"), lora / (all + again + 2.0 * adapters_again));
    assert!((0.32..0.34).contains(&share("full", "none")) && (0.26..0.27).contains(&share("full", "block")));
    assert!((0.48..0.51).contains(&share("lora", "none")));
}

/// Held-out rows are evaluated before the first step, during the run if requested, and after the
/// last step.
#[test]
fn evaluations_are_as_many_as_a_run_has() {
    let dir = TestDir::new();
    let rows = std::fs::read_to_string(dir.path("rows.jsonl")).unwrap();
    dir.write("four.jsonl", &rows.lines().take(4).map(|row| format!("{row}\n")).collect::<String>());
    let of = |sets: &[&str]| {
        let mut args = vec!["--on", "2xH100-80GB", "--dataset", "four.jsonl", "--eval-dataset", "four.jsonl"];
        // A rank's step has the same four rows.
        let all = ["data.packing=false", "train.micro_batch_size=4", "train.max_steps=10"];
        args.extend(all.iter().chain(sets).flat_map(|set| ["--set", set]));
        let said = plan(&dir, "model", &args);
        // Each of two ranks evaluates two rows.
        let one = number(&said["time"]["forward"]) / 2.0;
        number(&said["run"]["evaluating"]) / one
    };
    for (sets, evaluations) in [
        (&[][..], 2.0),
        (&["eval.at_end=false"], 1.0),
        // After steps 3, 6 and 9; after step 5 only, for step 10 is the last.
        (&["eval.steps=3"], 5.0),
        (&["eval.steps=5"], 3.0),
        (&["eval.steps=5", "eval.at_end=false"], 2.0),
    ] {
        near(of(sets), evaluations);
    }
}

/// The flags printed for a training option, added to the current command, give that option: the
/// same bytes with the same strategy. Keys that no flag can remove are named.
#[test]
fn a_way_that_is_typed_is_that_way() {
    let dir = shapes();
    let cases: [(&str, &[&str]); 6] = [
        ("1B", &["--on", "4090"]),
        ("7B", &["--recipe", "qlora", "--on", "4090"]),
        (
            "7B",
            &[
                "--recipe",
                "qlora",
                "--set",
                "adapter.r=64",
                "--set",
                "quantization.block_size=128",
                "--on",
                "4090",
            ],
        ),
        ("3B", &["--set", "optimizer.state=int8", "--set", "train.micro_batch_size=4", "--on", "A100-40GB"]),
        ("7B", &["--recipe", "lora", "--set", "train.micro_batch_size=auto", "--on", "8xA100-40GB"]),
        ("3B", &["--set", "parallel.strategy=hsdp", "--set", "parallel.shard_size=2", "--on", "4xA100-40GB"]),
    ];
    let (mut compared, mut removed) = (0, 0);
    for (model, more) in cases {
        for leaf in plan(&dir, model, more)["leaves"].as_array().unwrap() {
            let typed = leaf["typed"].as_str().unwrap();
            let mut left_out = leaf["left_out"].as_array().unwrap().iter().map(|key| key.as_str().unwrap());
            let (sets, without) = typed.split_once(", without ").unwrap_or((typed, ""));
            assert_eq!(left_out.clone().collect::<Vec<_>>().join(", "), without);
            // A table comes from a recipe, a key from a flag.
            let key = left_out.clone().find(|key| !key.starts_with('['));
            if left_out.any(|name| name.starts_with('[')) {
                removed += 1;
                continue;
            }
            let pairs = more.chunks(2).filter(|pair| key.is_none_or(|key| !pair[1].starts_with(key)));
            let args: Vec<&str> = pairs.flatten().copied().chain(sets.split_whitespace()).collect();
            let said = plan(&dir, model, &args);
            for figure in ["bytes", "host_bytes", "strategy", "recompute"] {
                assert_eq!(said[figure], leaf[figure], "{figure} of {model}, {args:?}");
            }
            compared += 1;
        }
    }
    // For the four commands without a recipe's table all options are compared; for the others only
    // those that keep the tables.
    assert!(compared > 30 && removed > 10, "{compared} {removed}");
}
