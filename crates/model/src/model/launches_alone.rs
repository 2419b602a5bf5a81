//! Blocks whose passes consist of operations of `ops` alone, so that their launches on a GPU can be
//! requested together. In other blocks, candle computes a part.
//!
//! Each field of a composition is named here: a new one does not compile before somebody decides.
//! `tests/kernels/graphs.rs` compares the bits of every family of which this is true.

use super::block::{BlockWeights, ChannelMixerWeights, TokenMixerWeights};
use super::composition::{
    AttentionMixer, BlockConfig, ChannelMixer, FusedQkv, GatedMlp, MlpActivation, PlainMlp, QkNormWidth,
    ResidualPlan, Sharing, TokenMixer, Values,
};
use super::{Lora, ModelConfig};

impl ModelConfig {
    /// Returns whether passes over block `layer` consist of operations of `ops` alone, with
    /// adapters other than DoRA's.
    pub fn launches_alone(&self, layer: usize) -> bool {
        let BlockConfig {
            token_mixer,
            channel_mixer,
            residual,
            residual_factor: _,
            has_output_factor,
            per_layer_input,
        } = &self.blocks[layer];
        let mixers = match (token_mixer, channel_mixer) {
            (TokenMixer::Attention(attention), ChannelMixer::GatedMlp(mlp)) => {
                self.attention_launches_alone(attention) && gated_mlp_launches_alone(mlp)
            }
            (TokenMixer::Attention(attention), ChannelMixer::PlainMlp(mlp)) => {
                self.attention_launches_alone(attention) && plain_mlp_launches_alone(mlp)
            }
            _ => false,
        };
        let plan = match residual {
            ResidualPlan::PreNorm
            | ResidualPlan::PreAndPostNorm
            | ResidualPlan::PostNorm
            | ResidualPlan::Parallel
            | ResidualPlan::ParallelTwoNorms => true,
            ResidualPlan::AltUp(_) => false,
        };
        mixers && plan && !has_output_factor && per_layer_input.is_none()
    }

    fn attention_launches_alone(&self, attention: &AttentionMixer) -> bool {
        let AttentionMixer {
            heads: _,
            window: _,
            chunk: _,
            rope,
            scale: _,
            softcap: _,
            qkv_bias: _,
            o_bias: _,
            qk_norm,
            values,
            fused,
            has_gates,
            has_sinks: _,
            sharing,
        } = attention;
        let norm = match qk_norm {
            None | Some(QkNormWidth::Head) => true,
            Some(QkNormWidth::HeadAfterRope | QkNormWidth::PlainHeadAfterRope | QkNormWidth::Whole) => false,
        };
        let order = matches!(fused, None | Some(FusedQkv::SideBySide));
        let own = *values == Values::Projected && *sharing == Sharing::Own;
        norm && order && own && !has_gates && self.ropes[*rope].query_growth.is_none()
    }
}

fn gated_mlp_launches_alone(mlp: &GatedMlp) -> bool {
    let GatedMlp { activation: _, bias: _, fused: _, own_width: _, gate_deviations } = mlp;
    gate_deviations.is_none()
}

fn plain_mlp_launches_alone(mlp: &PlainMlp) -> bool {
    let PlainMlp { activation, bias: _ } = mlp;
    matches!(activation, MlpActivation::Fixed(_))
}

impl BlockWeights {
    /// Returns whether passes over the block, `layer` of `config`, with these weights consist of
    /// operations of `ops` alone.
    pub fn launches_alone(&self, config: &ModelConfig, layer: usize) -> bool {
        let TokenMixerWeights::Attention(attention) = &self.token_mixer else { return false };
        let mlp = match &self.channel_mixer {
            ChannelMixerWeights::GatedMlp(mlp) => [&mlp.gate_up, &mlp.down],
            ChannelMixerWeights::PlainMlp(mlp) => [&mlp.up, &mlp.down],
            ChannelMixerWeights::Experts(_) | ChannelMixerWeights::MlpAndExperts(_) => return false,
        };
        let linears = [&attention.qkv, &attention.o].into_iter().chain(mlp);
        let mut loras = linears.flat_map(|linear| &linear.layers).filter_map(|layer| layer.lora.as_ref());
        config.launches_alone(layer) && !loras.any(Lora::is_dora)
    }
}
