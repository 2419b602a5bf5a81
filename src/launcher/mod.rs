//! Start of the ranks of this process, signals, and restarts after a crash.

pub(crate) mod child;
mod elastic;
pub(crate) mod interrupt;
pub(crate) mod ranks;
pub(crate) mod restarts;
pub(crate) mod signals;
