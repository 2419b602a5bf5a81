//! LoRA adapters as PEFT (huggingface/peft) writes and reads them, with its relatives: DoRA, LoRA on the embedding,
//! modules and single token rows that train whole.
//!
//! [`AdapterConfig`] is adapter_config.json, [`resolve`] says which modules of a model get LoRA and with what rank
//! and scale, [`SavedAdapter`] and [`write`] are adapter_model.safetensors, and [`merge`] adds an adapter into its base.
//! How LoRA is computed and trained is for `model` to know; here are names, files and sums of matrices.
//!
//! Matching follows PEFT 0.21 to the letter, so a recipe written with PEFT in mind tunes the same modules. What we
//! do not support is refused by name: an adapter that is half understood would give wrong answers in silence.

mod config;
mod files;
mod folder;
mod merge;
mod targets;
mod tensors;

pub use crate::ops::low_rank::LowRankFactors;
pub use config::{AdapterConfig, CONFIG_FILE, InitLoraWeights};
pub use files::{SavedAdapter, write};
pub use folder::one_below;
pub use merge::{BaseValues, MERGE_FILE, MergeOptions, MergeRecord, MergeReport, Verify, merge};
pub use targets::{
    ModulePattern, NamePattern, Target, TargetSpec, resolve, resolve_rows, resolve_saved, target_names,
};
pub use tensors::{AdapterTensor, TensorKind, WEIGHTS_FILE};
