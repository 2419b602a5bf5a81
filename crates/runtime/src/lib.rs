//! The base of operations and collectives: devices, memory, threads, random numbers and trace spans
//! ([`runtime`]), quantized formats ([`quant`]), and the processor's instruction sets. The crate
//! `finetune` re-exports these modules.

pub mod instruction_set;
pub mod quant;
pub mod rounding;
pub mod runtime;
pub mod stored_dtype;

use finetune_core::{error, locks, recipe, units};
