//! The lowest crate of `finetune`: errors, units, recipe choices, contained panics, locks, thread
//! starts, secret files, HTTP addresses, the wall clock, child programs, and the names of tokenizer
//! files. Other crates re-export these modules.

pub mod address;
pub mod clock;
pub mod contained;
pub mod error;
pub mod gguf_names;
pub mod locks;
pub mod median;
pub mod private_file;
pub mod program;
pub mod threads;
pub mod tokenizer_names;
pub mod units;

/// Target of a position without a loss.
pub const IGNORE: u32 = u32::MAX;

/// The recipe types that every crate uses.
pub mod recipe {
    pub mod enums;
    mod recompute;
}
