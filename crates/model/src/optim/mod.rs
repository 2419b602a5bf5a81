//! Learning-rate schedules and the optimizer, over whatever tensors it is handed.
//!
//! An optimizer is an [`OptimizerAlgorithm`]: a list of the named tensors that it keeps beside each parameter, and an
//! update of one piece of memory. All else (memory, staging, checkpoints, the memory plan) walks that list.

mod adamw;
mod algorithm;
mod optimizer;
mod param_group;
mod schedule;
mod staging;
mod state;

pub use adamw::AdamW;
pub use algorithm::{OptimizerAlgorithm, UpdatePiece, UpdateStep};
pub use optimizer::{Optimizer, OptimizerOptions};
pub use param_group::ParamGroup;
pub use schedule::Schedule;
pub use state::{INT8_MIN_ELEMENTS, StateLayout, StateTensor, StateValues};
