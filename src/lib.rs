//! `finetune` fine-tunes Hugging Face language models without Python.
//!
//! The library is a house with floors; a module imports only from lower floors, and two modules of one floor
//! do not see each other. Most floors are crates, where Cargo refuses what would import upwards; `tests/house.rs` checks the
//! rest. This crate shows the modules of the others as its own:
//!
//! | crate | modules | sees |
//! |---|---|---|
//! | `crates/core` | [`error`], [`contained`], [`threads`], [`units`], [`median`], the closed choices of the recipe, `private_file`, `address`, `clock`, `program` | – |
//! | `crates/recipe`, `crates/hub`, `crates/report` | [`recipe`], [`hub`], [`report`] | core |
//! | `crates/ops` | [`instruction_set`], [`rounding`], [`stored_dtype`], [`quant`], [`runtime`], [`ops`] | core |
//! | `crates/comm` | [`rendezvous`], [`collective`] | core, ops, report |
//! | `crates/data` | [`data`] | core, ops, recipe |
//! | `crates/model` | [`weights`], [`model`], [`optim`], [`adapter`], [`export`] | core, data, ops, recipe |
//! | `crates/engine` | [`sharding`], [`checkpoint`], [`engine`], [`profile`] | all of these but hub |
//! | `src` | [`setup`], [`plan`], [`cli`], [`sizing`], [`run`], [`commands`] | all |
//!
//! | floor | modules | what lives there |
//! |---|---|---|
//! | 0 | [`error`], [`contained`], [`threads`], [`instruction_set`], [`units`], [`median`], [`rounding`], [`recipe::enums`], `private_file`, `address`, `clock`, `program` | the one error type and files that are given, panics of foreign code, how threads start, the processor's instructions, human-readable sizes, the median of times, f32 to bf16, the closed choices of the recipe, files that hold secrets, addresses that requests go to, the wall clock, programs to start |
//! | 1 | [`quant`], [`stored_dtype`], [`recipe`], [`rendezvous`], `hub`, [`report`] | number formats; what the TOML may say; how processes meet; downloads; all that a run prints or logs |
//! | 2 | [`runtime`] | the machine, devices, thread pool, allocator, memory of tensors, parameter storage, random numbers |
//! | 3 | [`collective`] | sums, gathers, broadcasts and messages between ranks |
//! | 4 | [`ops`] | every tensor operation with its backward, and nothing but mathematics |
//! | 5 | [`weights`], [`data`] | safetensors in and out; rows to tokens, masks and batches |
//! | 6 | [`model`], [`optim`], [`profile`] | the block and its segments; AdamW and schedules; where the time of a run goes |
//! | 7 | [`adapter`] | PEFT files, targets, merging |
//! | 8 | [`sharding`], [`checkpoint`], [`export`] | where parameters live; what goes to disk |
//! | 9 | [`engine`] | the training step, the loop, evaluation, generation |
//! | 10 | [`setup`] | the base model, the adapter on it, the layout and first values of parameters, data sets |
//! | 11 | [`plan`] | decides and describes what will run: builds and prints nothing |
//! | 12 | [`cli`], [`sizing`] | the command line's types; what a run needs on hardware that need not be here |
//! | 13 | [`run`] | ranks, trainers, what a run leaves, what `bench` measures |
//! | 14 | [`commands`] | one file a verb, 150 lines at most |

pub mod cli;
pub mod commands;
pub mod plan;
pub mod run;
pub mod setup;
pub mod sizing;

pub use finetune_comm::{collective, rendezvous};
use finetune_core::{address, clock, private_file, program};
pub use finetune_core::{contained, error, median, threads, units};
pub use finetune_data as data;
pub use finetune_engine::{checkpoint, engine, profile, sharding};
pub use finetune_hub as hub;
pub use finetune_model::{adapter, export, model, optim, weights};
pub use finetune_ops::{instruction_set, ops, quant, rounding, runtime, stored_dtype};
pub use finetune_recipe as recipe;
pub use finetune_report as report;
