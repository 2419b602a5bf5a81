//! A plan brought to life: ranks, trainers, what a run leaves, and the check of a merge.

pub(crate) mod merge_check;

pub use merge_check::{BaseChoice, Certificate, MergeBase, MergeCheck};
