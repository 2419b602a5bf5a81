//! The model: one block for all families, between an embedding and a head.
//!
//! A model is a list of segments, `Embed`, `Block(0..n)`, `Head`. Weights are handed to a segment for one use
//! ([`EmbedWeights`], [`BlockWeights`], [`HeadWeights`]: views on wherever a strategy keeps them); they do not live in
//! it. A block is a token mixer and a channel mixer around a residual plan ([`BlockConfig`]). A family is a declaration
//! ([`Architecture`], one file each in `families`) that composes a [`ModelConfig`] of such blocks from config.json.
//! `layout` is the one table of a block's tensors. Each layer's forward and backward stand side by side, and what backward
//! needs is a named struct.
//!
//! What runs a step over the segments is `engine`; where weights live is `sharding`.

pub mod assemble;
mod block;
mod block_part;
mod composition;
mod config;
mod config_reader;
mod embedding;
mod families;
mod init;
mod layout;
mod linear;
mod lm_head;
mod lora;
mod lora_group;
mod rope;
mod rotary_tables;
mod semantics;
mod spec;
mod stored;

pub use assemble::ParamLookup;
pub use block::{
    AttentionWeights, BlockCache, BlockContext, BlockSaved, BlockWeights, ChannelMixerWeights,
    DropoutContext, GatedMlpWeights, MixerNorms, SavedBytes, TokenMixerWeights, backward, forward,
};
pub use block_part::{BlockPart, LinearGroup};
pub use composition::{AttentionMixer, BlockConfig, ChannelMixer, GatedMlp, ResidualPlan, TokenMixer};
pub use config::ModelConfig;
pub use embedding::{EmbedGradients, EmbedWeights, TokenRows};
pub use families::{Architecture, GgufFacts, GgufSeventyB, GgufSoftcap, GgufWindows};
pub use init::{initial_lora, initial_value};
pub use layout::{BlockLayout, BlockModule, ModelPart, Segment, WeightShape};
pub use linear::{Linear, LoraSaved, MergedLinear};
pub use lm_head::HeadWeights;
pub use lora::{AdapterSwitch, Lora, LoraShape};
pub use rope::{Rope, RopeKind};
pub use rotary_tables::RotaryTables;
pub use spec::{Module, ModuleKind, ParamSpec, Role, modules, parameters};
pub use stored::{StoredModel, settle, stored_name};

use candle_core::Tensor;

use crate::ops::matmul_quantized::{Quantized, Weight};
use crate::runtime::TensorMut;

/// One parameter in use: its value and, if it trains, where its gradient is added up.
#[derive(Debug, Clone)]
pub struct Param {
    /// The value, in the compute dtype (adapters: f32, their matrices bf16 on a GPU that computes in it; frozen matrices may
    /// be bf16 beside f32).
    pub value: Tensor,
    /// f32, or bf16 on the CPU where one micro-batch makes a step; same shape; none for a frozen parameter, which has no weight-gradient code path.
    pub grad: Option<TensorMut>,
}

/// The matrix of a linear layer in use.
#[derive(Debug, Clone)]
pub enum WeightMatrix {
    /// Frozen or trainable, as any parameter.
    Dense(Param),
    /// Frozen, in blocks of 4 or 8 bits.
    Quantized(Quantized),
}

impl WeightMatrix {
    /// What products take.
    pub fn get(&self) -> Weight<'_> {
        match self {
            WeightMatrix::Dense(param) => Weight::Dense(&param.value),
            WeightMatrix::Quantized(quantized) => Weight::Quantized(quantized),
        }
    }

    /// Where its gradient is added up.
    pub fn grad(&self) -> Option<&TensorMut> {
        match self {
            WeightMatrix::Dense(param) => param.grad.as_ref(),
            WeightMatrix::Quantized(_) => None,
        }
    }
}
