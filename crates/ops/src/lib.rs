//! The tensor operations of `finetune` with their backward passes, on CPUs and GPUs. The crate
//! `finetune` re-exports the module `ops`.

pub mod ops;

// Only the drivers of GPUs have locks.
#[cfg(any(feature = "cuda", feature = "kernel-emu"))]
use finetune_core::locks;
use finetune_core::{error, median, recipe, units};
use finetune_runtime::{instruction_set, quant, rounding, runtime};
