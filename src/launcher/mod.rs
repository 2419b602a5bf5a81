//! Start of ranks in this process or in a process each, signals, and restarts after a crash.

pub(crate) mod child;
mod elastic;
pub(crate) mod interrupt;
mod process_position;
pub(crate) mod processes;
pub(crate) mod ranks;
pub(crate) mod restarts;
pub(crate) mod signals;
