//! The products of a block's passes in their order, for panels that are made ahead.

use super::BlockWeights;
use crate::model::Norm;
use crate::model::block_part::LinearGroup;
use crate::model::linear::MergedLinear;
use crate::model::panels_ahead::PanelWeights;

impl BlockWeights {
    /// Returns the linear layers of a forward outside experts in the order of their products.
    pub(super) fn products(&self) -> Vec<&MergedLinear> {
        self.in_order(false, |_| true)
    }

    /// Returns the same for recomputing, which may leave out `down_proj`.
    pub(super) fn products_of_recompute(&self) -> Vec<&MergedLinear> {
        self.in_order(false, |group| self.channel_mixer.is_recomputed(group))
    }

    /// Returns the same in the order of their products in backward. Without `need_dx` the first
    /// layer of the block has none.
    pub(super) fn products_of_backward(&self, need_dx: bool) -> Vec<&MergedLinear> {
        // AltUp always reads the gradient of attention's input.
        let need_dx =
            need_dx || self.alt_up.is_some() || self.token_norms.before.as_ref().is_some_and(Norm::trains);
        self.in_order(true, |group| need_dx || group != LinearGroup::Qkv)
    }

    fn in_order(&self, in_backward: bool, multiplies: impl Fn(LinearGroup) -> bool) -> Vec<&MergedLinear> {
        let groups = LinearGroup::in_order(in_backward).into_iter().filter(|group| multiplies(*group));
        let of_channels = |group| self.channel_mixer.linear(group);
        let of_input = |group| self.per_layer.as_ref().and_then(|part| part.linear(group));
        groups
            .filter_map(|group| {
                self.token_mixer.linear(group).or_else(|| of_channels(group)).or_else(|| of_input(group))
            })
            .collect()
    }
}

/// Returns the weights of the products that dequantize them.
pub(super) fn panels_of(products: Vec<&MergedLinear>) -> impl Iterator<Item = PanelWeights<'_>> {
    products.into_iter().filter_map(MergedLinear::quantized)
}
