//! Models: weights on disk ([`weights`]), families and layers ([`model`]), adapters ([`adapter`]), optimizers ([`optim`]), and the
//! files that other programs open ([`export`]). The crate `finetune` shows these modules as its own.

pub mod adapter;
pub mod export;
pub mod model;
pub mod optim;
pub mod weights;

use finetune_core::{error, locks, threads, units};
use finetune_data as data;
use finetune_ops::ops;
use finetune_recipe as recipe;
use finetune_runtime::{quant, runtime, stored_dtype};
