//! The tensor operations of `finetune` with their backward passes, on CPUs and GPUs. The crate
//! `finetune` re-exports the module `ops`.

pub mod ops;

use finetune_backends as backends;
use finetune_core::{error, median, recipe, units};
use finetune_runtime::{instruction_set, quant, rounding, runtime};
