//! The floors of `finetune` that compute: the error type and units that every floor uses, the recipe's closed choices,
//! number formats, devices and memory, and the tensor operations. The crate `finetune` shows these modules as its own,
//! and its `src/lib.rs` has the table of all floors.

pub mod contained;
pub mod error;
pub mod instruction_set;
pub mod median;
pub mod ops;
pub mod quant;
pub mod rounding;
pub mod runtime;
pub mod stored_dtype;
pub mod threads;
pub mod units;

/// The part of the recipe that every floor knows.
pub mod recipe {
    pub mod enums;
}
