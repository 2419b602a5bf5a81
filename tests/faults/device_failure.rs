//! Device failures on a machine without a device: refused memory and failing kernels are planted
//! where they happen. The binary names step and phase, ends with the right exit code and keeps
//! everything saved before.

use std::process::Output;

use insta::assert_snapshot;

use crate::test_dir::{TestDir, lora};

/// A short run that saves each step, with `fault` planted. Each phase runs once more than there are
/// steps, for the longest micro-batch is computed before the first step.
fn train(dir: &TestDir, fault: Option<&str>, more: &[&str]) -> Output {
    let mut command = dir.command(&lora(&["--quiet", "--eval-dataset", "rows.jsonl"]));
    for key in ["train.gradient_accumulation_steps=1", "checkpoint.save_steps=1", "eval.steps=2"] {
        command.args(["--set", key]);
    }
    command.args(more).env("RAYON_NUM_THREADS", "1");
    if let Some(fault) = fault {
        command.env("FINETUNE_FAULT", fault);
    }
    command.output().unwrap()
}

/// Returns exit code and stderr of a run with a fault, without figures of this machine.
fn failed(dir: &TestDir, fault: &str, more: &[&str]) -> String {
    let done = train(dir, Some(fault), more);
    let said = dir.told(&done.stderr);
    assert_eq!(said.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{said}");
    let figures = regex::Regex::new(r"(?m)[0-9.]+ [KMG]?i?B( for a step| a rank|$)").unwrap();
    let said = figures.replace_all(&said, "[BYTES]$1");
    format!("exit {}\n{said}", done.status.code().unwrap())
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn memory_that_is_refused_in_a_step() {
    assert_snapshot!(failed(&TestDir::new(), "0:backward:4:out_of_memory", &[]), @"
    exit 1
    warning: planted fault 0:backward:4:out_of_memory strikes
    error: step 3 failed in its backward
      caused by: the device is out of memory, as a test planned
      caused by: the failed request was for [BYTES]
      caused by: the plan estimated [BYTES] for a step; this phase needs memory for workspace, planned as [BYTES]
      caused by: everything saved before is intact
    hint: these need less memory, the cheapest first: `--set train.recompute=block` ([BYTES] a rank), `--set optimizer.state=int8` ([BYTES] a rank), `--set quantization.kind=nf4` ([BYTES] a rank); `--resume` accepts another `train.recompute`, `parallel.offload` or split into micro-batches, other changes need a new run
    ");
    // Settings that are already on are not suggested.
    let smaller = ["train.recompute=block", "train.micro_batch_size=1", "optimizer.state=int8"];
    let smaller: Vec<&str> = smaller.iter().flat_map(|key| ["--set", *key]).collect();
    assert_snapshot!(failed(&TestDir::new(), "0:forward:3:out_of_memory", &smaller), @"
    exit 1
    warning: planted fault 0:forward:3:out_of_memory strikes
    error: step 2 failed in its forward
      caused by: the device is out of memory, as a test planned
      caused by: the failed request was for [BYTES]
      caused by: the plan estimated [BYTES] for a step; this phase needs memory for activations, planned as [BYTES]
      caused by: everything saved before is intact
    hint: these need less memory, the cheapest first: `--set quantization.kind=nf4` ([BYTES] a rank); `--resume` accepts another `train.recompute`, `parallel.offload` or split into micro-batches, other changes need a new run
    ");
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn memory_that_is_refused_beside_the_steps() {
    assert_snapshot!(failed(&TestDir::new(), "0:load:out_of_memory", &[]), @"
    exit 1
    warning: planted fault 0:load:out_of_memory strikes
    error: cannot load the model
      caused by: the device is out of memory, as a test planned
      caused by: the failed request was for [BYTES]
      caused by: the plan estimated [BYTES] for a step; this phase needs memory for weights, gradients and the optimizer's state, planned as [BYTES]
      caused by: everything saved before is intact
    hint: these need less memory, the cheapest first: `--set optimizer.state=int8` ([BYTES] a rank), `--set quantization.kind=nf4` ([BYTES] a rank); `--resume` accepts another `train.recompute`, `parallel.offload` or split into micro-batches, other changes need a new run
    ");
    assert_snapshot!(failed(&TestDir::new(), "0:evaluate:2:out_of_memory", &[]), @"
    exit 1
    warning: planted fault 0:evaluate:2:out_of_memory strikes
    error: cannot evaluate after step 2
      caused by: the device is out of memory, as a test planned
      caused by: the failed request was for [BYTES]
      caused by: the plan estimated [BYTES] for a step; this phase needs memory for workspace, planned as [BYTES]
      caused by: everything saved before is intact
    hint: these need less memory, the cheapest first: `--set optimizer.state=int8` ([BYTES] a rank), `--set quantization.kind=nf4` ([BYTES] a rank); `--resume` accepts another `train.recompute`, `parallel.offload` or split into micro-batches, other changes need a new run
    ");
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_kernel_at_fault_that_is_noticed_late() {
    assert_snapshot!(failed(&TestDir::new(), "0:norm:3:late_fault", &[]), @r#"
    exit 3
    warning: planted fault 0:norm:3:late_fault strikes
    error: step 2 failed in its gradient norm
      caused by: a kernel on the GPU failed
      caused by: DriverError(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered")
      caused by: planted fault 0:norm:3:late_fault
      caused by: everything saved before is intact
    hint: run it again with `FINETUNE_CUDA_SYNC=1`, which waits for each kernel, so that the error names the failing one, and report that error
    "#);
}

/// A run resumes from what was saved before the failure, and leaves the files of an unbroken run.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn what_was_saved_is_not_harmed() {
    let whole = TestDir::new();
    assert!(train(&whole, None, &[]).status.success());
    let wanted = std::fs::read(whole.path("out/adapter_model.safetensors")).unwrap();
    for fault in ["0:backward:4:out_of_memory", "0:loss:4:late_fault"] {
        let dir = TestDir::new();
        assert!(!train(&dir, Some(fault), &[]).status.success(), "{fault}");
        assert!(dir.path("out/checkpoint-2/manifest.json").exists(), "{fault}");
        assert!(
            !dir.path("out/checkpoint-3").exists() && !dir.path("out/adapter_model.safetensors").exists()
        );
        // Memory-saving keys may change on resume.
        let resumed = train(&dir, None, &["--resume", "--set", "train.recompute=block"]);
        assert!(resumed.status.success(), "{fault}: {}", dir.told(&resumed.stderr));
        assert!(wanted == std::fs::read(dir.path("out/adapter_model.safetensors")).unwrap(), "{fault}");
    }
}

/// A micro-batch that "auto" chose is made smaller from the newest checkpoint on. The rows of a
/// step and the loss curve stay. A size that the user set is not changed.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_chosen_micro_batch_is_made_smaller() {
    let rows = |micro: &'static str, rows: &'static str| {
        ["--set", micro, "--set", rows, "--set", "train.max_steps=4", "--ranks", "2"]
    };
    let auto = rows("train.micro_batch_size=auto", "train.gradient_accumulation_steps=4");
    let whole = TestDir::new();
    assert!(train(&whole, None, &auto).status.success());
    // Fails at once, or after three saved steps of one micro-batch; the retry then takes the fourth
    // step in two micro-batches of two rows.
    for (fault, sizes) in [("1:loss:1:out_of_memory", 2), ("1:backward:5:out_of_memory", 1)] {
        let dir = TestDir::new();
        let done = train(&dir, Some(fault), &auto);
        let said = dir.told(&done.stderr);
        assert!(
            said.contains("out of memory") && said.contains("need too much memory: retrying with "),
            "{fault}: {said}"
        );
        assert_eq!(said.matches("need too much memory: retrying with ").count(), sizes, "{fault}: {said}");
        if sizes == 1 {
            assert!(done.status.success(), "{fault}: {said}");
            let recipe = std::fs::read_to_string(dir.path("out/recipe.toml")).unwrap();
            assert!(recipe.contains("micro_batch_size = 2\ngradient_accumulation_steps = 2\n"), "{recipe}");
            for (a, b) in losses(&dir).iter().zip(losses(&whole)) {
                assert!((a / b - 1.0).abs() < 1e-5, "{a} {b}");
            }
            assert_eq!(losses(&dir).len(), 4);
        } else {
            // The planted fault strikes each time, also for a single row: the usual error follows.
            assert_eq!(done.status.code(), Some(1), "{fault}: {said}");
            assert_eq!(said.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{said}");
        }
    }
    let fixed = rows("train.micro_batch_size=2", "train.gradient_accumulation_steps=2");
    let dir = TestDir::new();
    let done = train(&dir, Some("1:loss:1:out_of_memory"), &fixed);
    assert_eq!(done.status.code(), Some(1));
    assert!(!dir.told(&done.stderr).contains("need too much memory: retrying with "));
}

/// The losses of all steps of a run.
fn losses(dir: &TestDir) -> Vec<f64> {
    let lines = std::fs::read_to_string(dir.path("out/metrics.jsonl")).unwrap();
    let lines = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.filter_map(|line| line["step_secs"].as_f64().and(line["loss"].as_f64())).collect()
}

/// With several ranks the run ends like the failing rank, and the error names it.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn one_rank_of_several() {
    for (fault, code, what) in [
        ("1:forward:3:out_of_memory", 1, "out of memory"),
        ("1:backward:3:late_fault", 3, "a kernel on the GPU"),
    ] {
        let dir = TestDir::new();
        let done = train(&dir, Some(fault), &["--ranks", "2", "--set", "parallel.strategy=fsdp"]);
        let said = dir.told(&done.stderr);
        assert_eq!(done.status.code(), Some(code), "{fault}: {said}");
        assert!(said.contains(what) && said.contains("step 2 failed in its "), "{fault}: {said}");
        assert!(
            said.contains("failed in phase ") && said.contains("everything saved before is intact"),
            "{said}"
        );
    }
}
