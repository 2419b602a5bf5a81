//! Models: families and layers ([`model`]), adapters ([`adapter`]) and optimizers ([`optim`]). The
//! crate `finetune` re-exports these modules.

pub mod adapter;
pub mod model;
pub mod optim;

use finetune_core::{error, locks, units};
use finetune_ops::ops;
use finetune_recipe as recipe;
use finetune_runtime::{quant, runtime};
use finetune_weights as weights;
