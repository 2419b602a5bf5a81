//! Checks of a merged model, and of a killed and resumed run.

mod merge_check;
mod run_comparison;
pub(crate) mod verify_resume;

pub(crate) use merge_check::{MergeBase, MergeCheck};
