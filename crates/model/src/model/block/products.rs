//! The products of a block's passes in their order, for panels that are made ahead.

use super::{BlockWeights, PerLayerWeights};
use crate::model::Norm;
use crate::model::linear::MergedLinear;
use crate::model::panels_ahead::PanelWeights;

impl BlockWeights {
    /// Returns the linear layers of a forward outside experts in the order of their
    /// products.
    pub(super) fn products(&self) -> Vec<&MergedLinear> {
        let mixers = self.token_mixer.products(false).into_iter().chain(self.channel_mixer.products());
        mixers.chain(self.per_layer.iter().flat_map(PerLayerWeights::products)).collect()
    }

    /// Returns the same without `down_proj`, for blocks of which recomputing leaves it out.
    pub(super) fn products_of_recompute(&self) -> Vec<&MergedLinear> {
        let of_tokens = self.token_mixer.products(false);
        of_tokens.into_iter().chain(self.channel_mixer.products_of_recompute()).collect()
    }

    /// Returns the same in the order of their products in backward. Without `need_dx` the first
    /// layer of the block has none.
    pub(super) fn products_of_backward(&self, need_dx: bool) -> Vec<&MergedLinear> {
        let of_input = self.per_layer.iter().flat_map(PerLayerWeights::products);
        let of_channels = of_input.rev().chain(self.channel_mixer.products().into_iter().rev());
        let mut all: Vec<_> = of_channels.chain(self.token_mixer.products(true)).collect();
        // AltUp always reads the gradient of attention's input.
        if !need_dx && self.alt_up.is_none() && !self.token_norms.before.as_ref().is_some_and(Norm::trains) {
            all.pop();
        }
        all
    }
}

/// Returns the weights of the products that dequantize them.
pub(super) fn panels_of(products: Vec<&MergedLinear>) -> impl Iterator<Item = PanelWeights<'_>> {
    products.into_iter().filter_map(MergedLinear::quantized)
}
