//! Decides and describes what will run; builds nothing and prints nothing.
//!
//! A recipe and facts (config.json, headers, devices, data) become a [`Plan`]:
//! - `resolve` finds files and decides open keys; `parallel` and `fit` choose strategy and
//!   recomputing by the memory that `memory` estimates;
//! - `activation_memory` counts what forward keeps, and finds the least recomputing that fits;
//! - `loss_path` describes how the loss uses the output layer, `micro_batch` decides the size of
//!   micro-batches;
//! - `run_params` lists parameters, `written_bytes` counts the bytes that a run writes;
//! - `method` and `describe` put the plan into words, `changes` lists changes that need less
//!   memory;
//! - `memory_check` refuses steps that exceed the memory, `warnings` and `unlearnable_ends` warn;
//! - `fingerprint` lists the settings that two runs must share.
//!
//! The planner refuses keys that contradict one another or the machine before any weight is read.
//! Module `training` runs a plan. [`sizing`] estimates runs on hardware other than this machine.

mod activation_memory;
mod bf16_copy;
mod carried;
mod changes;
mod cuda_graphs;
mod describe;
mod fingerprint;
mod fit;
mod fp8_base;
mod fp8_weights;
mod global_batch;
mod good_sense;
mod gpu_memory;
mod loss_path;
mod memory;
mod memory_check;
mod memory_parts;
mod method;
mod micro_batch;
mod moment;
mod parallel;
mod reference;
mod resolve;
pub mod router_aux_loss;
mod run_params;
mod schedule;
pub mod sizing;
mod traffic;
mod unlearnable_ends;
mod warnings;
mod written_bytes;

pub use fingerprint::RECIPE;
pub use fit::MemoryBudget;
pub(crate) use fit::widest_micro_batch;
pub use fit::{PlannedStep, Rows, StepInputs, process_bytes};
pub use global_batch::{decide_accumulation, decide_rows, sampler_options};
pub use good_sense::UnusualRate;
pub(crate) use gpu_memory::COMMUNICATOR;
pub use loss_path::LossPath;
pub use memory::MemoryPlan;
pub use memory::{MemoryOptions, Saving};
pub use memory::{NCCL, PROCESS, available};
pub(crate) use memory_parts::{KeptGroup, MASTERS, MemoryParts};
pub use method::Method;
pub use parallel::WorldSize;
pub use resolve::Plan;
pub(crate) use resolve::parameter_counts;
pub use run_params::ParamCache;
pub use warnings::held_out_report;
pub use warnings::prompt_beyond_positions;
pub use written_bytes::{StoredAs, WrittenBytes};
