//! The lowest crate of `finetune`: the error type and units that every crate uses, the closed choices of the recipe, panics of
//! foreign code, how threads start, files that hold secrets, addresses that requests go to, the wall clock, programs to
//! start. The crates above show these modules as their own.

pub mod address;
pub mod clock;
pub mod contained;
pub mod error;
pub mod median;
pub mod private_file;
pub mod program;
pub mod threads;
pub mod units;

/// The target of a position that carries no loss.
pub const IGNORE: u32 = u32::MAX;

/// The part of the recipe that every crate knows.
pub mod recipe {
    pub mod enums;
}
