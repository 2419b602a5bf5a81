//! Whole runs through the GPU kernels without a GPU: the golden trajectories of transformers +
//! PEFT, by a binary with feature `kernel-emu`, whose every operation with a kernel launches it in
//! the emulator.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../support/exhaustive.rs"]
mod exhaustive;
#[path = "../support/golden_files.rs"]
mod golden_files;
#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../support/golden_run.rs"]
mod golden_run;
#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../support/logits.rs"]
mod logits;

use std::process::Command;

use exhaustive::each_third;
use golden_run::{ONE_RANK, Split, follows_as, follows_in_bf16, follows_with, golden};

/// Runs threads in order and completes copies at once.
const FORWARD: (&str, &str) = ("FINETUNE_EMULATE", "forward");

#[test]
fn full_training_follows_transformers() {
    follows_with("full", ONE_RANK, &[FORWARD]);
}

#[test]
fn lora_follows_peft() {
    follows_with("lora", ONE_RANK, &[FORWARD]);
}

#[test]
fn qlora_follows_peft_on_bitsandbytes() {
    follows_with("qlora", ONE_RANK, &[FORWARD]);
}

#[test]
fn dora_follows_peft() {
    follows_with("dora", ONE_RANK, &[FORWARD]);
}

/// Runs threads in a shuffled order.
const SHUFFLED: (&str, &str) = ("FINETUNE_EMULATE", "5");

/// In bf16, where LoRA's matrices are bf16 with f32 masters; each run repeats with shuffled
/// threads.
#[test]
fn bf16_follows_and_repeats_itself() {
    for name in ["full_olmo2", "lora_qwen2"] {
        follows_in_bf16(name, &[(FORWARD, None), (SHUFFLED, None)]);
    }
    let without_masters = Some("optimizer.master=none");
    follows_in_bf16("full_olmo2", &[(FORWARD, without_masters), (SHUFFLED, without_masters)]);
}

/// The same for other adapters. QLoRA's panels of a late second queue have the bits of weights kept
/// in bf16 beside their codes.
#[test]
fn bf16_of_other_adapters_follows_and_repeats_itself() {
    follows_in_bf16("lora_tokens", &[(FORWARD, None), (SHUFFLED, None)]);
    follows_in_bf16("dora", &[(SHUFFLED, None)]);
    follows_in_bf16("qlora", &[(SHUFFLED, None), (FORWARD, Some("quantization.bf16_copy=true"))]);
}

/// Packed bases, whose panels a kernel makes.
#[test]
fn lora_on_bases_that_stay_packed_follows_peft() {
    for format in each_third(["gptq", "awq", "ct_int4", "fp8_block", "mxfp4", "gguf_q4_k"], 0) {
        let keep = ["--set", "model.dequantize=false"];
        follows_as(&format!("lora_{format}"), ONE_RANK, &keep, &[FORWARD]);
    }
}

/// In bf16 the panels of a late second queue have the bits of the dequantized base.
#[test]
fn bf16_over_a_packed_base_has_the_bits_of_the_dequantized_one() {
    let runs = [(SHUFFLED, Some("model.dequantize=false")), (FORWARD, Some("model.dequantize=true"))];
    for format in each_third(["gptq", "fp8_block", "gguf_q4_k"], 2) {
        follows_in_bf16(&format!("lora_{format}"), &runs);
    }
}

/// The frozen weights in fp8, by the emulated products of codes.
#[test]
fn a_base_in_fp8_follows() {
    for name in ["lora_qwen2", "qlora"] {
        golden_run::follows_in_fp8(name, [2e-2, 1e-1], &[FORWARD]);
    }
}

/// Runs whose blocks are launched as graphs have the bits of launches one by one.
#[test]
fn graphs_of_blocks_have_the_bits_of_single_launches() {
    for name in ["lora_qwen2", "qlora", "full"] {
        follows_in_bf16(name, &[(FORWARD, None), (SHUFFLED, Some("train.cuda_graphs=true"))]);
    }
}

/// Each rank has the graphs of its own blocks, whose weights are gathered between them.
#[test]
fn ranks_with_graphs_follow_transformers() {
    let split = Split { ranks: 2, strategy: "fsdp", shard_size: None };
    follows_as("full", split, &["--set", "train.cuda_graphs=true"], &[FORWARD]);
}

/// Gemma 2 and 3: two norms in each half of a block, soft-caps and windows.
#[test]
fn both_gemmas_have_the_logits_of_transformers() {
    finetune::ops::selftest::emulate().unwrap();
    for name in ["tiny-gemma2", "tiny-gemma3"] {
        let stored = golden().join("forward").join(format!("{name}.safetensors"));
        let distance = logits::distance(&stored, &golden().join("models").join(name));
        assert!(distance < 1e-4, "{name}: {distance}");
    }
}

/// Ranks are threads, and each computes on the emulator.
#[test]
fn ranks_follow_transformers() {
    let split = Split { ranks: 2, strategy: "fsdp", shard_size: None };
    follows_with("full", split, &[("FINETUNE_EMULATE", "3")]);
}

/// The self-test passes and names the emulator.
#[test]
fn the_self_test_runs_emulated() {
    let mut doctor = Command::new(env!("CARGO_BIN_EXE_finetune"));
    let done = doctor.args(["doctor", "--selftest", "--emulated"]).output().unwrap();
    let told = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && told.contains("self-test on emulated GPU kernels"), "{told}");
    assert!(told.contains("probe: all ") && told.contains(" recorded by the emulator"), "{told}");
}

/// A kernel that fails in a training step: exit code 3, and the error names the step, the kernel
/// and its arguments.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_kernel_at_fault_is_named() {
    let (mut train, dir) = (Command::new(env!("CARGO_BIN_EXE_finetune")), tempfile::tempdir().unwrap());
    let out = dir.path().join("out");
    train.args(["--quiet", "--recipe", "quickstart", "--set", "train.max_steps=3"]);
    train.args(["--set", "train.gradient_accumulation_steps=1", "--set", "train.micro_batch_size=1"]);
    train.args(["--set", "checkpoint.save_steps=1", "--set", "data.eval=[]"]);
    train
        .arg("--output")
        .arg(&out)
        .env(FORWARD.0, FORWARD.1)
        .env("FINETUNE_FAULT", "0:backward:3:launch_fault");
    let done = train.output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(3), "{said}");
    assert!(said.contains("error: step 2 failed in its backward\n  caused by: kernel "), "{said}");
    let launch = regex::Regex::new(
        r"the launch: the kernel \w+ of kernels/\w+\.cu, \d+ x \d+ x 1 blocks of \d+ x 1 x 1 threads, \d+ B of shared memory, over .*\[\d+ x \d+ B\]",
    );
    assert!(launch.unwrap().is_match(&said), "{said}");
    assert!(said.contains("everything saved before is intact"), "{said}");
    assert!(out.join("checkpoint-1/manifest.json").exists() && !out.join("checkpoint-2").exists(), "{said}");
}

/// Shows that training reads the schedule: without kernels the runs above would pass as well.
#[test]
fn a_schedule_that_is_none_is_refused() {
    let (mut train, dir) = (Command::new(env!("CARGO_BIN_EXE_finetune")), tempfile::tempdir().unwrap());
    train
        .args(["--recipe", "quickstart", "--set", "train.max_steps=1", "--output"])
        .arg(dir.path().join("out"));
    let done = train.env("FINETUNE_EMULATE", "sideways").output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(!done.status.success() && said.contains("FINETUNE_EMULATE is \"sideways\""), "{said}");
}
