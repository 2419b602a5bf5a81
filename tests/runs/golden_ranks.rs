//! Golden trajectories of transformers + PEFT on 2 and 4 ranks, sharded and replicated, within the
//! tolerances of one rank (module `train`). A golden step is one global batch in file order. Ranks
//! share its micro-batches, or its rows if it has fewer micro-batches than ranks.

use crate::exhaustive::each_third;
use crate::golden_run::{Split, follows};

const ON_2: [Split; 4] = [
    Split { ranks: 2, strategy: "ddp", shard_size: None },
    Split { ranks: 2, strategy: "zero2", shard_size: None },
    Split { ranks: 2, strategy: "fsdp", shard_size: None },
    Split { ranks: 2, strategy: "hsdp", shard_size: Some(1) },
];

/// Splits for steps of four rows.
const ON_4: [Split; 3] = [
    Split { ranks: 4, strategy: "ddp", shard_size: None },
    Split { ranks: 4, strategy: "fsdp", shard_size: None },
    Split { ranks: 4, strategy: "hsdp", shard_size: Some(2) },
];

/// Repeats `name`, whose steps have two micro-batches of two rows; `first` chooses the splits that
/// a usual run of the tests tries.
fn four_rows_follow(name: &str, first: usize) {
    each_third(ON_2.into_iter().chain(ON_4), first).into_iter().for_each(|split| follows(name, split));
}

/// Like [`four_rows_follow`], with steps of one micro-batch of two rows.
fn two_rows_follow(name: &str, first: usize) {
    each_third(ON_2, first).into_iter().for_each(|split| follows(name, split));
}

#[test]
fn full_follows_transformers() {
    four_rows_follow("full", 2);
}

#[test]
fn lora_follows_peft() {
    four_rows_follow("lora", 0);
}

#[test]
fn rslora_follows_peft() {
    four_rows_follow("rslora", 1);
}

#[test]
fn qlora_follows_peft_on_bitsandbytes() {
    four_rows_follow("qlora", 2);
}

#[test]
fn dora_follows_peft() {
    four_rows_follow("dora", 0);
    four_rows_follow("qdora", 1);
}

#[test]
fn lora_on_other_families_follows_peft() {
    two_rows_follow("lora_qwen2", 1);
    two_rows_follow("lora_phi3", 2);
}

#[test]
fn families_follow_transformers_and_peft() {
    let families = [
        "granite",
        "smollm3",
        "olmo2",
        "ministral3",
        "qwen3-moe",
        "qwen3-5",
        "gemma4-moe",
        "gemma4-e2b",
        "gemma3n",
        "llama4",
        "lfm2-moe",
        "apertus",
    ];
    let of_family = |family| ["lora", "full"].map(|method| format!("{method}_{family}"));
    let on = |name: String| [ON_2[0], ON_2[2]].map(|split| (name.clone(), split));
    let runs = families.into_iter().flat_map(of_family).flat_map(on);
    for (name, split) in each_third(runs, 0) {
        follows(&name, split);
    }
}

#[test]
fn lora_on_packed_bases_follows_peft() {
    for format in ["gptq", "awq", "ct_int4", "fp8_block"] {
        follows(&format!("lora_{format}"), ON_2[2]);
    }
}

#[test]
fn lora_on_tables_and_token_rows_follows_peft() {
    for (first, name) in
        ["lora_tables", "lora_tables_tied", "lora_tokens", "lora_tokens_untied"].into_iter().enumerate()
    {
        two_rows_follow(name, first);
    }
}
