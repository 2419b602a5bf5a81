//! Training runs: plan, ranks' work, output folder, reports and closing lines.

pub(crate) mod alerts;
mod bottlenecks;
mod card;
mod closing;
mod device_failure;
mod earlier;
pub(crate) mod masked_row;
mod monitoring;
pub(crate) mod output_folder;
mod planned_time;
pub(crate) mod reference;
pub(crate) mod report_page;
mod result;
mod rollback;
pub(crate) mod showcase;
pub(crate) mod smaller_micro_batch;
mod space;
pub(crate) mod train;
pub(crate) mod train_plan;
mod trainer;
mod weights_writer;

pub(crate) use earlier::EarlierRun;
pub use trainer::trainer;
pub use weights_writer::weights_writer;
