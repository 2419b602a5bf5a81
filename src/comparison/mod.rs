//! Comparison of runs, and sweeps over recipe keys.

mod compared_run;
pub(crate) mod comparison_table;
pub(crate) mod sweep;
