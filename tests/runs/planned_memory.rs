//! The memory of runs beside that of their plans.

use crate::exhaustive::each_third;
use crate::planned_run::{between, bytes, peak, resized, train, write_text};

const ONE_STEP: &str = "train.max_steps=1";
const TWO_STEPS: &str = "train.max_steps=2";

/// Trains 34 million parameters for one or two steps on one or two ranks. The process's peak,
/// saving included, stays within 5 % of the plan that the run reports at its end, and within 10 %
/// with parameters in a file.
#[test]
#[cfg(target_os = "linux")]
fn runs_keep_to_the_memory_of_their_plan() {
    let dir = resized(&[
        ("hidden_size", 512),
        ("num_key_value_heads", 2),
        ("intermediate_size", 1536),
        ("num_hidden_layers", 8),
        ("vocab_size", 8192),
    ]);
    write_text(&dir);
    std::fs::create_dir(dir.path("away")).unwrap();
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
        &["train.recompute=first:4", "train.micro_batch_size=4", TWO_STEPS],
        &["train.recompute=selective", "train.micro_batch_size=4", TWO_STEPS],
        &["adapter.r=4", "train.recompute=every:2", "train.micro_batch_size=4", TWO_STEPS],
        &["parallel.strategy=ddp", "model.dtype=bf16", TWO_STEPS],
        &["parallel.strategy=fsdp", TWO_STEPS],
        &["parallel.offload=params", "parallel.offload_folder=away", TWO_STEPS],
    ];
    for (i, shape) in each_third(shapes, 0).into_iter().enumerate() {
        let keys = [&always[..], shape].concat();
        let ranks: &[&str] = if shape[0].starts_with("parallel.strategy") { &["--ranks", "2"] } else { &[] };
        let (peak, done) = peak(&mut train(&dir, &format!("out{i}"), &keys, ranks));
        let told = dir.told(&done.stderr);
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
