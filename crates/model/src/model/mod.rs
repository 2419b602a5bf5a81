//! The model: one block for all families, between an embedding and a head.
//!
//! A model is a list of segments, `Embed`, `Block(0..n)`, `Head`. A segment does not own weights:
//! it receives them for one use, as views of the strategy's storage ([`EmbedWeights`],
//! [`BlockWeights`], [`HeadWeights`]). A block is a token mixer and a channel mixer around a
//! residual plan ([`BlockConfig`]). A family is a declaration ([`Architecture`], one file each in
//! `families`) that composes a [`ModelConfig`] of such blocks from config.json. `layout` is the
//! only table of a block's tensors. Each layer's forward and backward are in one file, and a named
//! struct holds the tensors that backward needs.
//!
//! `engine` runs a step over the segments; `parallel` stores the weights.

pub mod assemble;
mod block;
mod block_part;
mod composition;
mod config;
mod config_reader;
mod embedding;
mod families;
mod fp8_base;
mod init;
mod launches_alone;
mod layout;
mod linear;
mod linear_in_fp8;
mod lm_head;
mod lora;
mod lora_group;
mod norm;
mod panels_ahead;
mod rope;
mod rotary_tables;
mod semantics;
mod spec;
mod stored;

pub use assemble::ParamLookup;
pub use block::{
    ActivationWeights, AltUpWeights, AttentionWeights, BlockCache, BlockContext, BlockSaved, BlockWeights,
    Carried, CarriedBackward, CarriedGradients, ChannelMixerWeights, ConvState, DeltaState, DropoutContext,
    ExpertBalance, ExpertWeights, ExpertsWeights, GatedDeltaWeights, GatedMlpWeights, KeyValueCache,
    LatentUp, LatentWeights, LaurelWeights, MixerNorms, MlpAndExpertsWeights, PerLayerModelWeights,
    PerLayerWeights, PlainMlpWeights, SavedBytes, SharedExpertWeights, ShortConvWeights, StreamEnds,
    TokenMixerWeights, XieluWeights, backward, forward, forward_again, recompute,
};
pub use block_part::XIELU;
pub use block_part::{BlockPart, LinearGroup};
pub use composition::{
    AltUp, AttentionMixer, BlockConfig, ChannelMixer, DeltaMixer, Experts, FusedQkv, GatedMlp, HiddenNorm,
    LatentMixer, MlpActivation, MlpAndExperts, PerLayerInput, PlainMlp, QkNormWidth, ResidualPlan,
    SharedExpert, Sharing, ShortConvMixer, TokenMixer, Values,
};
pub use config::ModelConfig;
pub use embedding::{EmbedGradients, EmbedWeights, TableGradients, TableWeights, TokenRows};
pub use families::families;
pub use families::{
    Architecture, GgufDelta, GgufExperts, GgufFacts, GgufGrowth, GgufLocalRope, GgufNoPositions,
    GgufSeventyB, GgufSliding, GgufSoftcap, GgufWindows,
};
pub use fp8_base::fp8_weights;
pub use init::{initial_lora, initial_value};
pub use layout::{
    BlockLayout, BlockModule, ModelPart, Segment, WeightShape, per_layer_modules, stacked_experts,
    unused_weights,
};
pub use linear::{Linear, MergedLinear};
pub use lm_head::HeadWeights;
pub use lora::{AdapterSwitch, Lora, LoraShape};
pub use norm::Norm;
pub use rope::QueryGrowth;
pub use rope::{Rope, RopeKind};
pub use rotary_tables::{PositionTable, RotaryTables};
pub use spec::{Module, ModuleKind, ParamSpec, Role, modules, parameters};
pub use stored::{StoredModel, settle, stored_name, unread_modules, unstack_experts};

use candle_core::Tensor;

use crate::ops::matmul_quantized::{Quantized, Weight};
use crate::runtime::TensorMut;

/// One parameter in use: its value and, if it trains, the sum of its gradients.
#[derive(Debug, Clone)]
pub struct Param {
    /// The value, in the compute dtype. Adapters are f32, their matrices bf16 on a GPU that
    /// computes in bf16. Frozen matrices may be bf16 beside f32.
    pub value: Tensor,
    /// The sum of gradients, in the shape of `value`: f32, or bf16 on the CPU if a step has one
    /// micro-batch. `None` for a frozen parameter, whose weight gradient is never computed.
    pub grad: Option<TensorMut>,
}

/// The matrix of a linear layer in use.
#[derive(Debug, Clone)]
pub enum WeightMatrix {
    /// Frozen or trainable, like any parameter.
    Dense(Param),
    /// Frozen, in blocks of 4 or 8 bits.
    Quantized(Quantized),
}

impl WeightMatrix {
    /// Returns the operand of matrix products.
    pub fn get(&self) -> Weight<'_> {
        match self {
            WeightMatrix::Dense(param) => Weight::Dense(&param.value),
            WeightMatrix::Quantized(quantized) => Weight::Quantized(quantized),
        }
    }

    /// Returns the buffer that sums its gradient, if it trains.
    pub fn grad(&self) -> Option<&TensorMut> {
        match self {
            WeightMatrix::Dense(param) => param.grad.as_ref(),
            WeightMatrix::Quantized(_) => None,
        }
    }
}
