//! What operations and collectives stand on: devices, memory, threads, random numbers and spans of time ([`runtime`]), formats of
//! quantized numbers ([`quant`]), and the processor's instructions. The crate `finetune` shows these modules as its own.

pub mod instruction_set;
pub mod quant;
pub mod rounding;
pub mod runtime;
pub mod stored_dtype;

use finetune_core::{error, recipe, units};
