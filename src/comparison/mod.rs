//! Finished runs side by side, and sweeps over recipes.

mod compared_run;
pub(crate) mod comparison_table;
pub(crate) mod sweep;
