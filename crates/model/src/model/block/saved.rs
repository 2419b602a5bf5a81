//! The tensors that a block keeps from its forward for its backward, and their bytes.

use candle_core::{DType, Tensor};

use super::alt_up_saved::AltUpSaved;
use super::channel_mixer::ChannelMixerSaved;
use super::per_layer::PerLayerSaved;
use super::token_mixer::TokenMixerSaved;
use crate::model::ModelConfig;
use crate::model::block_part::BlockPart;
use crate::model::composition::{AltUp, PerLayerInput};
use crate::model::layout::{BlockLayout, BlockModule};
use crate::model::lora::{BranchSaved, LoraShape};

/// The tensors that a block's backward needs. Shapes: `x`, `h` and the mixers' outputs `[N, D]`.
#[derive(Debug, Clone)]
pub struct BlockSaved {
    pub(super) x: Tensor,
    pub(super) token_mixer: TokenMixerSaved,
    /// The token mixer's output before its post norm.
    pub(super) token_out: Option<Tensor>,
    /// The input of the channel mixer's half: `x` in a parallel plan.
    pub(super) h: Tensor,
    pub(super) channel_mixer: ChannelMixerSaved,
    /// The channel mixer's output before its post norm.
    pub(super) channel_out: Option<Tensor>,
    pub(super) per_layer: Option<PerLayerSaved>,
    pub(super) alt_up: Option<AltUpSaved>,
}

/// Bytes that a block keeps from its forward for its backward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SavedBytes {
    /// Bytes of its input, which is kept under recompute too.
    pub input: usize,
    /// Bytes of all other tensors.
    pub rest: usize,
    /// The part of `rest` that [`BlockSaved::drop_attended`] drops.
    pub attended: usize,
}

impl BlockSaved {
    /// Returns the bytes that it holds after a forward of `tokens` tokens in `dtype` through block
    /// `layer`. `adapter` gives the adapter of each linear layer of the block.
    pub fn bytes(
        config: &ModelConfig,
        layer: usize,
        tokens: usize,
        dtype: DType,
        adapter: impl Fn(&BlockModule) -> Option<LoraShape>,
    ) -> SavedBytes {
        let parts = Self::parts(config, layer, tokens, dtype, adapter);
        let (input, rest) = parts.split_at(1);
        let sum = |parts: &[(&str, usize)]| parts.iter().map(|(_, bytes)| bytes).sum();
        let attended = rest.iter().filter(|(name, _)| TokenMixerSaved::is_attended(name));
        let attended = attended.map(|(_, bytes)| bytes).sum();
        SavedBytes { input: sum(input), rest: sum(rest), attended }
    }

    /// Drops the results of attention and of the delta rule, which are no products. Backward
    /// computes them again, with the same bits.
    pub fn drop_attended(&mut self) {
        self.token_mixer.drop_attended();
    }

    /// Returns the number of tokens that chose each expert of the block; `None` without experts.
    pub fn expert_loads(&self) -> Option<Vec<usize>> {
        self.channel_mixer.loads()
    }

    /// Returns the same bytes by tensor, the block's input first.
    pub fn parts(
        config: &ModelConfig,
        layer: usize,
        tokens: usize,
        dtype: DType,
        adapter: impl Fn(&BlockModule) -> Option<LoraShape>,
    ) -> Vec<(&'static str, usize)> {
        let block = &config.blocks[layer];
        let hidden = tokens * config.hidden_size * dtype.size_in_bytes();
        let layout = BlockLayout::new(config, layer);
        let branch = |module: &BlockModule, rows| {
            adapter(module).map_or(0, |shape| BranchSaved::bytes(shape, module.weight.out(), rows, dtype))
        };
        let linears = || layout.linears();
        // The parts of the whole model keep nothing.
        let outside = linears().filter(|module| module.part.expert().is_none() && !module.part.is_of_model());
        // AltUp uses its router twice.
        let uses = |module: &BlockModule| if module.part == BlockPart::AltUpRouter { 2 } else { 1 };
        let lora = outside.map(|module| uses(module) * branch(module, tokens)).sum::<usize>()
            + block.channel_mixer.experts().map_or(0, |experts| {
                // All experts together see each token as often as experts are chosen for it.
                let inside = || linears().filter(|module| module.part.expert().is_some());
                let fixed = inside().map(|module| branch(module, 0)).sum::<usize>();
                let of_all =
                    inside().map(|module| branch(module, tokens * experts.router.chosen)).sum::<usize>();
                fixed + (of_all - fixed) / experts.count
            });
        let mut parts = vec![("the block's input", Self::input_bytes(config, layer, tokens, dtype))];
        parts.extend(TokenMixerSaved::parts(&block.token_mixer, tokens, dtype));
        // In a parallel plan it is the block's input.
        parts.push(("the input of the MLP", if block.residual.is_parallel() { 0 } else { hidden }));
        parts.extend(ChannelMixerSaved::parts(config, &block.channel_mixer, tokens, dtype));
        // One output per mixer.
        let outputs = if block.residual.has_post_norms() { 2 * hidden } else { 0 };
        parts.push(("outputs before post norms", outputs));
        let of_input = |input: &PerLayerInput| PerLayerSaved::bytes(input, config, tokens, dtype);
        let of_input = block.per_layer_input.as_ref().map(of_input);
        parts.extend(of_input.map(|bytes| ("the part of the per-layer input", bytes)));
        let is_last = layer + 1 == config.num_layers();
        let of_streams = |alt_up: &AltUp| AltUpSaved::bytes(alt_up, config, is_last, tokens, dtype);
        parts.extend(block.residual.alt_up().map(|alt_up| ("the streams of AltUp", of_streams(alt_up))));
        parts.push(("inner activations of adapters", lora));
        parts
    }

    /// Returns the bytes of the input of block `layer`: of all streams behind the first one.
    fn input_bytes(config: &ModelConfig, layer: usize, tokens: usize, dtype: DType) -> usize {
        let width = if layer == 0 { config.hidden_size } else { config.streams_width() };
        tokens * width * dtype.size_in_bytes()
    }

    /// Returns all tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let BlockSaved { x, token_mixer, token_out, h, channel_mixer, channel_out, per_layer, alt_up } = self;
        let of_streams = alt_up.iter().flat_map(AltUpSaved::tensors);
        let of_input = per_layer.iter().flat_map(PerLayerSaved::tensors);
        let mixers = token_mixer.tensors().into_iter().chain(channel_mixer.tensors());
        [x, h]
            .into_iter()
            .chain(token_out)
            .chain(channel_out)
            .chain(mixers)
            .chain(of_input)
            .chain(of_streams)
            .collect()
    }
}
