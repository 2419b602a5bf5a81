//! `finetune` fine-tunes Hugging Face language models without Python.
//!
//! The library is a stack of crates: each sees only the crates below it. This crate re-exports
//! their modules. The page docs/design.md has the table of crates and modules.

mod bench;
pub mod cli;
pub mod commands;
mod comparison;
mod doctor;
mod generation;
mod launcher;
pub mod loading;
pub mod planning;
mod session;
pub mod training;
pub mod verify;

pub use session::{Session, SessionSteps, TrainedModel};

pub use finetune_comm::{collective, rendezvous};
use finetune_core::{clock, locks, private_file, program};
pub use finetune_core::{contained, error, median, threads, units};
pub use finetune_data as data;
pub use finetune_engine::{checkpoint, engine, objectives, parallel, profile};
pub use finetune_hub as hub;
pub use finetune_model::{adapter, export, model, optim, weights};
pub use finetune_ops::ops;
pub use finetune_recipe as recipe;
pub use finetune_report as report;
pub use finetune_runtime::{instruction_set, quant, rounding, runtime, stored_dtype};
