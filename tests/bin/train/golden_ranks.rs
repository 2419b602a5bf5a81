//! Golden trajectories of transformers + PEFT on 2 and 4 ranks, sharded and replicated, within the
//! tolerances of one rank (module `train`). A golden step is one global batch in file order. Ranks
//! share its micro-batches, or its rows if it has fewer micro-batches than ranks.

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

/// Steps of two micro-batches of two rows.
fn four_rows_follow(name: &str) {
    ON_2.into_iter().chain(ON_4).for_each(|split| follows(name, split));
}

/// Steps of one micro-batch of two rows.
fn two_rows_follow(name: &str) {
    ON_2.into_iter().for_each(|split| follows(name, split));
}

#[test]
fn full_follows_transformers() {
    four_rows_follow("full");
}

#[test]
fn lora_follows_peft() {
    four_rows_follow("lora");
}

#[test]
fn rslora_follows_peft() {
    four_rows_follow("rslora");
}

#[test]
fn qlora_follows_peft_on_bitsandbytes() {
    four_rows_follow("qlora");
}

#[test]
fn dora_follows_peft() {
    four_rows_follow("dora");
    four_rows_follow("qdora");
}

#[test]
fn lora_on_other_families_follows_peft() {
    two_rows_follow("lora_qwen2");
    two_rows_follow("lora_phi3");
    for family in ["granite", "smollm3", "olmo2", "ministral3", "qwen3-moe", "qwen3-5", "gemma4-moe"] {
        for split in [ON_2[0], ON_2[2]] {
            follows(&format!("lora_{family}"), split);
            follows(&format!("full_{family}"), split);
        }
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
    for name in ["lora_tables", "lora_tables_tied", "lora_tokens", "lora_tokens_untied"] {
        two_rows_follow(name);
    }
}
