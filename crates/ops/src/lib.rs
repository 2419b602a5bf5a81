//! The floors of `finetune` that compute: number formats, devices and memory, and the tensor operations. The crate
//! `finetune` shows these modules as its own, and its `src/lib.rs` has the table of all floors.

pub mod instruction_set;
pub mod ops;
pub mod quant;
pub mod rounding;
pub mod runtime;
pub mod stored_dtype;

pub(crate) use finetune_core::{error, median, recipe, units};
