//! The step from a recipe to a run: [`loading`] opens the base model, its adapter and the data, and
//! [`planning`] decides and describes a run. The crate `finetune` re-exports both modules.

pub mod loading;
pub mod planning;

use finetune_comm::collective;
use finetune_core::{error, gguf_names, locks, units};
use finetune_data as data;
use finetune_engine::{checkpoint, engine, objectives, parallel};
use finetune_export as export;
use finetune_hub as hub;
use finetune_model::{adapter, model, optim};
use finetune_ops::ops;
use finetune_recipe as recipe;
use finetune_report as report;
use finetune_runtime::{quant, runtime};
use finetune_weights as weights;
