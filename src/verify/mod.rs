//! Checks of a merge, and of a run that is killed and resumed.

mod merge_check;
mod run_comparison;
pub(crate) mod verify_resume;

pub use merge_check::{Certificate, MergeBase, MergeCheck};
