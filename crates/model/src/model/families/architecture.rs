//! The declaration of a family.

use super::gguf_facts::GgufFacts;
use super::sizes::{ModelSizes, ReadHeads};
use crate::error::Result;
use crate::model::block_part::BlockPart;
use crate::model::composition::{BlockConfig, HiddenNorm};
use crate::model::config_reader::ConfigReader;
use crate::model::rope::Rope;
use crate::ops::rms_norm::NormKind;
use crate::weights::ClassNames;

/// A family of models: its names, its defaults, and the function that composes a model from
/// config.json.
#[derive(Debug)]
pub struct Architecture {
    /// The name in saved adapters and checkpoints, which must not change.
    pub name: &'static str,
    /// Its values of `model_type` in config.json.
    pub model_types: &'static [&'static str],
    /// Default of `head_dim`; `None`: `hidden_size / num_attention_heads`.
    pub(super) head_dim: Option<usize>,
    /// True if attention is latent: other keys give the widths of heads.
    pub(super) has_latents: bool,
    /// Default of `tie_word_embeddings`.
    pub(super) ties_embeddings: bool,
    /// The key of the inner width of its MLPs.
    pub intermediate_size: &'static str,
    /// Reads the parts of a model. Defaults are those of transformers' configuration class.
    pub(super) compose: fn(&ConfigReader<'_>, &ModelSizes) -> Result<Composition>,
    /// Returns the name of a module in the checkpoint, after that of its block.
    pub(in crate::model) module_name: fn(BlockPart) -> &'static str,
    /// The stacks of a block's experts, which checkpoints have instead of a tensor for each expert;
    /// `None`: no checkpoint has stacks.
    pub(in crate::model) stacked_experts: Option<StackedExperts>,
    /// True if these stacks hold the transpose of each layer.
    pub(in crate::model) transposes_stacks: bool,
    /// True if transformers reads these stacks in MXFP4, as blocks and scales.
    pub stacks_in_mxfp4: bool,
    /// True if checkpoints hold the biases of a router as one row, `[1, E]`.
    pub(in crate::model) router_bias_is_row: bool,
    /// True if models may have no layers with experts but the keys that count them.
    pub(super) may_be_dense: bool,
    /// The names of blocks, embedding, last norm and head in checkpoints and in transformers.
    pub class_names: &'static ClassNames,
    /// True if transformers reads `partial_rotary_factor`; otherwise whole heads rotate.
    pub(super) rotates_partly: bool,
    /// Reads the number of key-value heads, given that of heads; `None`: `num_key_value_heads`.
    pub(super) num_kv_heads: Option<ReadHeads>,
    /// Default of `intermediate_size`, in widths of the hidden states; `None`: the key is required.
    pub(super) default_inner_width: Option<usize>,
    /// Reads the inner width from other keys.
    pub(super) inner_width: Option<fn(&ConfigReader<'_>) -> Result<usize>>,
    /// The key that counts instead of `tie_word_embeddings` if config.json has it.
    pub(super) tie_key: Option<&'static str>,
    /// The facts of its export as GGUF.
    pub gguf: GgufFacts,
}

/// The names of the stacks of a block's experts, after that of the block.
#[derive(Debug)]
pub(in crate::model) struct StackedExperts {
    /// Gate and up of each expert: `[E, 2 F, D]`.
    pub(in crate::model) gate_up: &'static str,
    /// The second projection of each expert: `[E, D, F]`.
    pub(in crate::model) down: &'static str,
}

/// The parts of a model, as composed by its family.
pub(in crate::model) struct Composition {
    /// One entry per block.
    pub(super) blocks: Vec<BlockConfig>,
    /// The rotary embeddings that the blocks refer to.
    pub(super) ropes: Vec<Rope>,
    /// The settings of every norm of the model.
    pub(super) norm: NormKind,
    /// The kind of the norms of hidden states.
    pub(super) hidden_norm: HiddenNorm,
    /// Factor on the embeddings.
    pub(super) embedding_factor: f64,
    /// Factor on logits.
    pub(super) logit_factor: f64,
    /// Soft-cap on logits.
    pub(super) logit_softcap: Option<f64>,
}
