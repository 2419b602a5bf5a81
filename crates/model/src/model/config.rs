//! A model's shape and arithmetic, with the differences of families resolved to parts and numbers.
//! `families` reads it from config.json.

use super::composition::{
    AttentionMixer, BlockConfig, ChannelMixer, DeltaMixer, Experts, GatedMlp, HiddenNorm, LatentMixer,
    PlainMlp, TokenMixer,
};
use super::families::Architecture;
use super::rope::Rope;
use crate::ops::attention::Heads;
use crate::ops::gated_delta::DeltaHeads;
use crate::ops::rms_norm::NormKind;

/// A model's shape and arithmetic.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    /// The family of architectures.
    pub family: &'static Architecture,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Width of the hidden states, D.
    pub hidden_size: usize,
    /// Inner width of the MLPs that are no experts, F.
    pub intermediate_size: usize,
    /// Head counts and width of attention, in most layers.
    pub heads: Heads,
    /// The parts of each block.
    pub blocks: Vec<BlockConfig>,
    /// The rotary embeddings, which the attention of blocks indexes.
    pub ropes: Vec<Rope>,
    /// Context length that the model was trained for, in tokens.
    pub max_position_embeddings: usize,
    /// The settings of every norm of the model.
    pub norm: NormKind,
    /// The kind of the norms of hidden states.
    pub hidden_norm: HiddenNorm,
    /// Factor on the embeddings.
    pub embedding_factor: f64,
    /// Factor on logits, before their soft-cap (granite); 1 in most families.
    pub logit_factor: f64,
    /// Soft-cap on logits.
    pub logit_softcap: Option<f64>,
    /// True if embedding and head are one parameter.
    pub tie_word_embeddings: bool,
    /// The padding token, whose row of the embedding gets no gradient from lookups (torch's
    /// `padding_idx`).
    pub pad_token_id: Option<u32>,
    /// Standard deviation of random initial weights.
    pub initializer_range: f64,
    /// The dtype in config.json.
    pub dtype: Option<String>,
    /// The `model_type` of the image-text model whose text part this is.
    pub text_of: Option<String>,
    /// The keys of dropout in config.json with their values. transformers drops values in training
    /// by them, finetune does not.
    pub dropouts: Vec<String>,
}

impl ModelConfig {
    /// Returns the width of the per-layer inputs of the first `blocks` blocks together: 0 in most
    /// families.
    pub fn per_layer_width(&self, blocks: usize) -> usize {
        let inputs = self.blocks.iter().take(blocks).filter_map(|block| block.per_layer_input);
        inputs.map(|input| input.width).sum()
    }

    /// Returns the number of rows of the table of per-layer inputs: 0 in most families.
    pub(crate) fn per_layer_rows(&self) -> usize {
        self.blocks.first().and_then(|block| block.per_layer_input).map_or(0, |input| input.rows)
    }

    /// Returns the width of the hidden states between blocks: of all streams, if it has several.
    pub fn streams_width(&self) -> usize {
        let streams = self.blocks.first().and_then(|block| block.residual.alt_up());
        self.hidden_size * streams.map_or(1, |alt_up| alt_up.streams)
    }

    /// Returns the number of blocks.
    pub fn num_layers(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the attention of each block that has it, in the order of the blocks.
    pub fn attentions(&self) -> impl Iterator<Item = &AttentionMixer> {
        self.blocks.iter().filter_map(|block| block.token_mixer.attention())
    }

    /// Returns the mean widths of the token mixers of all blocks: that of their first projections,
    /// and that of the input of their output projections.
    pub fn mean_token_mixer(&self) -> [f64; 2] {
        let mean = |width: &dyn Fn(&TokenMixer) -> usize| {
            let sum: usize = self.blocks.iter().map(|block| width(&block.token_mixer)).sum();
            sum as f64 / self.num_layers().max(1) as f64
        };
        [mean(&TokenMixer::input_width), mean(&TokenMixer::output_width)]
    }

    /// Returns the Gated DeltaNet of each block that has it, in the order of the blocks.
    pub fn gated_deltas(&self) -> impl Iterator<Item = &DeltaMixer> {
        self.blocks.iter().filter_map(|block| match &block.token_mixer {
            TokenMixer::Attention(_) | TokenMixer::Latent(_) | TokenMixer::ShortConv(_) => None,
            TokenMixer::GatedDelta(delta) => Some(delta),
        })
    }

    /// Returns the width of the widest first projections of a token mixer.
    pub fn token_mixer_width(&self) -> usize {
        self.blocks.iter().map(|block| block.token_mixer.input_width()).max().unwrap_or(0)
    }

    /// Returns the experts of each block that has some, in the order of the blocks.
    pub fn experts(&self) -> impl Iterator<Item = &Experts> {
        self.blocks.iter().filter_map(|block| block.channel_mixer.experts())
    }

    /// Returns the inner width of the widest channel mixer as a token uses it: of experts, that of
    /// all that are chosen for it, and of the shared one.
    pub fn active_width(&self) -> usize {
        let of_experts = |experts: &Experts| {
            let shared = experts.shared.map_or(0, |shared| shared.width);
            experts.router.chosen * experts.width + shared
        };
        let width = |mixer: &ChannelMixer| {
            mixer.mlp_width(self.intermediate_size) + mixer.experts().map_or(0, of_experts)
        };
        self.blocks.iter().map(|block| width(&block.channel_mixer)).max().unwrap_or(0)
    }

    /// Returns the gated MLP of each block that has one, in the order of the blocks.
    pub fn gated_mlps(&self) -> impl Iterator<Item = &GatedMlp> {
        self.blocks.iter().filter_map(|block| match &block.channel_mixer {
            ChannelMixer::GatedMlp(mlp) => Some(mlp),
            ChannelMixer::MlpAndExperts(both) => Some(&both.mlp),
            ChannelMixer::PlainMlp(_) | ChannelMixer::Experts(_) => None,
        })
    }

    /// Returns the MLP without a gate of each block that has one, in the order of the blocks.
    pub fn plain_mlps(&self) -> impl Iterator<Item = &PlainMlp> {
        self.blocks.iter().filter_map(|block| match &block.channel_mixer {
            ChannelMixer::PlainMlp(mlp) => Some(mlp),
            _ => None,
        })
    }

    /// Returns the width of a block's first projections of its MLP together, at most.
    pub fn first_mlp_width(&self) -> usize {
        let widths = self.blocks.iter().map(|block| block.channel_mixer.first_widths());
        widths.max().unwrap_or(0) * self.active_width()
    }

    /// Returns the widths that determine tensor shapes, by their keys in config.json.
    pub(super) fn dimensions(&self) -> String {
        let Heads { num_heads, num_kv_heads, head_dim } = self.heads;
        let experts = self.experts().next().map_or_else(String::new, |experts| {
            format!(", {} experts of width {}", experts.count, experts.width)
        });
        let latent = self.blocks.iter().find_map(|block| match block.token_mixer {
            TokenMixer::Latent(LatentMixer { q_rank, kv_rank, plain, rotated, value, .. }) => {
                let q_rank = q_rank.map_or_else(|| "none".to_owned(), |rank| rank.to_string());
                Some(format!(
                    ", q_lora_rank {q_rank}, kv_lora_rank {kv_rank}, qk_nope_head_dim {plain}, qk_rope_head_dim {rotated}, v_head_dim {value}"
                ))
            }
            _ => None,
        });
        let latent = latent.unwrap_or_default();
        let delta = self.gated_deltas().next().map_or_else(String::new, |delta| {
            let DeltaHeads { num_key_heads, num_value_heads, key_dim, value_dim } = delta.heads;
            format!(
                ", linear attention of {num_key_heads} and {num_value_heads} heads of {key_dim} and {value_dim}"
            )
        });
        format!(
            "hidden_size {}, intermediate_size {}, vocab_size {}, {num_heads} and {num_kv_heads} heads of {head_dim}{latent}{delta}{experts}",
            self.hidden_size, self.intermediate_size, self.vocab_size,
        )
    }
}
