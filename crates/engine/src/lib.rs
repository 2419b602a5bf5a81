//! The training engine: parameters and their placement on ranks ([`parallel`]), the step and the
//! loop ([`engine`]), checkpoints ([`checkpoint`]), and the profile of a run ([`profile`]). The
//! crate `finetune` re-exports these modules.

pub mod checkpoint;
pub mod engine;
pub mod objectives;
pub mod parallel;
pub mod profile;

use finetune_comm::collective;
use finetune_core::{clock, error, locks, median, threads, units};
use finetune_data as data;
use finetune_model::{model, optim};
use finetune_ops::ops;
use finetune_recipe as recipe;
use finetune_report as report;
use finetune_runtime::{quant, runtime};
use finetune_weights as weights;
