//! A plan brought to life: the ranks of this process and how they start, the trainer of each, what a run leaves in its
//! output folder, signals, the check of a merge; what `bench` measures: operations, how fast ranks talk, and how speed
//! grows with ranks; answers to prompts; and what `doctor` tells: of the program, the machine, and the libraries that GPUs need.

pub(crate) mod alarms;
mod bottlenecks;
mod card;
mod child;
mod closing;
pub(crate) mod communication;
mod compared_run;
pub(crate) mod comparison_table;
mod device_failure;
mod earlier;
mod elastic;
pub(crate) mod fact_lines;
pub(crate) mod generation;
pub(crate) mod host_facts;
pub(crate) mod interrupt;
pub(crate) mod masked_row;
pub(crate) mod merge_check;
mod monitoring;
pub(crate) mod nvidia_libraries;
pub(crate) mod op_speeds;
pub(crate) mod output_folder;
mod planned_time;
pub(crate) mod program_facts;
pub(crate) mod ranks;
pub(crate) mod report_page;
pub(crate) mod restarts;
mod result;
mod rollback;
mod run_comparison;
pub(crate) mod scaling;
pub(crate) mod showcase;
pub(crate) mod signals;
pub(crate) mod sizing_inputs;
pub(crate) mod smaller_micro_batch;
mod space;
pub(crate) mod sweep;
pub(crate) mod train;
pub(crate) mod train_plan;
mod trainer;
pub(crate) mod verify_resume;
mod weights_writer;

pub(crate) use earlier::EarlierRun;
pub use merge_check::{Certificate, MergeBase, MergeCheck};
pub use trainer::trainer;
pub use weights_writer::weights_writer;
