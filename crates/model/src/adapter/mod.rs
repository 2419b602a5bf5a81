//! LoRA adapters in PEFT's format (huggingface/peft), with DoRA, LoRA on the embedding, and modules
//! and single token rows that train whole.
//!
//! [`AdapterConfig`] is adapter_config.json, [`resolve`] selects the modules of a model that get
//! LoRA, with rank and scale, [`SavedAdapter`] and [`write()`] are adapter_model.safetensors, and
//! [`merge`] adds an adapter to its base. The computation and training of LoRA are in `model`; this
//! module has names, files and sums of matrices.
//!
//! Matching follows PEFT 0.21 exactly, so a recipe written for PEFT tunes the same modules.
//! Unsupported keys are refused by name: a partly supported adapter would silently give wrong
//! answers.

mod config;
mod expert_parameters;
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
