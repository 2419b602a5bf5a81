//! The training engine: parameters and who holds which part of them ([`parallel`]), the step and the loop ([`engine`]), checkpoints
//! ([`checkpoint`]), and where the time of a run goes ([`profile`]). The crate `finetune` shows these modules as its own.

pub mod checkpoint;
pub mod engine;
pub mod objectives;
pub mod parallel;
pub mod profile;

use finetune_comm::collective;
use finetune_core::{clock, error, locks, median, threads, units};
use finetune_data as data;
use finetune_model::{model, optim, weights};
use finetune_ops::ops;
use finetune_recipe as recipe;
use finetune_report as report;
use finetune_runtime::{quant, runtime};
