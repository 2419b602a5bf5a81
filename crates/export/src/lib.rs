//! Exports of trained models in the layouts of other programs.
//!
//! [`hf`] writes a Hugging Face folder, [`quantized`] one with its linear layers quantized,
//! [`gguf`] the file that llama.cpp runs. `adapter` writes adapters, and `checkpoint` checkpoints.

pub mod gguf;
pub mod hf;
pub mod quantized;

use finetune_core::error;
use finetune_data as data;
use finetune_model::{adapter, model};
use finetune_ops::ops;
use finetune_recipe as recipe;
use finetune_runtime::quant;
use finetune_weights as weights;
