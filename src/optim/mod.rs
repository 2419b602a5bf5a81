//! Learning-rate schedules and the optimizer: AdamW over whatever tensors it is handed.

mod adamw;
mod schedule;
mod staging;

pub use adamw::{INT8_MIN_ELEMENTS, MomentDtype, Moments, Optimizer, OptimizerOptions, ParamGroup};
pub use schedule::{Schedule, ScheduleKind};
