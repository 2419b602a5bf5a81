//! The same run for any number of threads, including many.

use crate::golden_run::{metrics, number};
use crate::test_dir::{TestDir, lora};

/// Returns the results of a run in `dtype` on this many threads: the losses as bits, and the
/// adapter file.
fn run(threads: &str, dtype: &str) -> (Vec<u64>, Vec<u8>) {
    let dir = TestDir::new();
    let dtype = format!("model.dtype={dtype}");
    // Enough rows that products are packed and work is shared among many threads.
    let rows = ["--set", "train.micro_batch_size=16", "--set", "train.gradient_accumulation_steps=1"];
    let more =
        ["--quiet", "--set", &dtype, "--set", "adapter.lora_dropout=0.1", "--set", "train.neftune_alpha=5"];
    let mut command = dir.command(&lora(&[&rows[..], &more].concat()));
    let done = command.env("RAYON_NUM_THREADS", threads).output().unwrap();
    assert!(done.status.success(), "{}", dir.told(&done.stderr));
    let folder = dir.path("out");
    let losses = metrics(&folder, "loss").iter().map(|step| number(step, "loss").to_bits()).collect();
    (losses, std::fs::read(folder.join("adapter_model.safetensors")).unwrap())
}

#[test]
fn a_run_on_64_threads_is_that_on_one_to_the_byte() {
    for dtype in ["f32", "bf16"] {
        let [one, many] = ["1", "64"].map(|threads| run(threads, dtype));
        assert_eq!(one.0.len(), 4);
        assert_eq!(one.0, many.0, "losses in {dtype}");
        assert!(one.1 == many.1, "other bytes of the adapter in {dtype}");
    }
}
