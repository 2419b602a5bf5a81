//! Decides and describes what will run; builds nothing and prints nothing.
//!
//! A recipe and facts (config.json, headers, devices, data) become a [`Plan`]: `resolve` finds and decides, `parallel` and
//! `fit` choose strategy and recomputing by the memory that `memory` works out, `loss_path` how the loss goes through the output layer, `micro_batch` the size of micro-batches, `run_params` lists parameters, `written_bytes` what a run writes, `method` and `describe` put it into words,
//! `changes` lists what would make a run smaller, `memory_check` refuses what no memory holds, `warnings` and `unlearnable_ends` say what is no
//! error, `fingerprint` says what two runs must have alike. Refused here, before any weight is read: keys that contradict one
//! another or the machine. What brings a plan to life is in `training`. [`sizing`] estimates runs on hardware that need not be here.

mod bf16_copy;
mod changes;
mod describe;
mod fingerprint;
mod fit;
mod global_batch;
mod good_sense;
mod gpu_memory;
mod loss_path;
mod memory;
mod memory_check;
mod memory_parts;
mod method;
mod micro_batch;
mod parallel;
mod resolve;
mod run_params;
mod schedule;
pub mod sizing;
mod traffic;
mod unlearnable_ends;
mod warnings;
mod written_bytes;

pub(crate) use fingerprint::RECIPE;
pub(crate) use fit::{MemoryBudget, PlannedStep, Rows, StepInputs, process_bytes, widest_micro_batch};
pub(crate) use global_batch::{decide_accumulation, decide_rows, sampler_options};
pub use loss_path::LossPath;
pub(crate) use memory::PROCESS;
pub use memory::{MemoryOptions, MemoryPlan, Saving};
pub(crate) use memory_parts::{KeptGroup, MASTERS, MemoryParts};
pub use method::Method;
pub use parallel::WorldSize;
pub use resolve::Plan;
pub(crate) use run_params::ParamCache;
pub(crate) use warnings::held_out_report;
pub use warnings::prompt_beyond_positions;
pub(crate) use written_bytes::{StoredAs, WrittenBytes};
