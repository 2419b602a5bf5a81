//! Models: weight files ([`weights`]), families and layers ([`model`]), adapters ([`adapter`]),
//! optimizers ([`optim`]), and exports for other programs ([`export`]). The crate `finetune`
//! re-exports these modules.

pub mod adapter;
pub mod export;
pub mod model;
pub mod optim;
pub mod weights;

use finetune_core::{error, gguf_names, locks, threads, tokenizer_names, units};
use finetune_data as data;
use finetune_ops::ops;
use finetune_recipe as recipe;
use finetune_runtime::{quant, runtime, stored_dtype};
