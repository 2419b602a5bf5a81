//! Learning-rate schedules and the optimizer, independent of the tensors that it updates.
//!
//! An optimizer is an [`OptimizerAlgorithm`]: a list of named state tensors for each parameter, and
//! an update of pieces of memory. Memory, staging, checkpoints and the memory plan follow that
//! list.

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
pub use state::{StateLayout, StateTensor, StateValues};
