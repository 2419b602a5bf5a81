//! The tensors that a block with AltUp keeps for its backward beside those of every block.

use candle_core::{DType, Tensor};

use super::laurel::LaurelSaved;
use crate::model::ModelConfig;
use crate::model::composition::AltUp;
use crate::model::linear::LoraSaved;

/// The tensors that backward needs beside those of the block.
#[derive(Debug, Clone)]
pub(super) struct AltUpSaved {
    /// The predicted streams, `[N, S D]`.
    pub(super) predicted: Tensor,
    pub(super) predict: Factors,
    /// The output of both mixers, `[N, D]`.
    pub(super) activated: Tensor,
    pub(super) correct: Factors,
    pub(super) laurel: LaurelSaved,
    /// The streams after the last block, `[N, S D]`.
    pub(super) last: Option<Tensor>,
}

/// Factors on streams, and how they came.
#[derive(Debug, Clone)]
pub(super) struct Factors {
    /// The values of the router, `[N, S]`.
    pub(super) routed: Tensor,
    /// `[N, S S]` or `[N, S]`.
    pub(super) factors: Tensor,
    pub(super) lora_router: LoraSaved,
    pub(super) lora_factors: LoraSaved,
}

impl AltUpSaved {
    /// Returns the bytes that it holds for `tokens` tokens in `dtype`, without adapters.
    pub(super) fn bytes(
        alt_up: &AltUp,
        config: &ModelConfig,
        is_last: bool,
        tokens: usize,
        dtype: DType,
    ) -> usize {
        let (s, d) = (alt_up.streams, config.hidden_size);
        let of_streams = if is_last { 2 * s * d } else { s * d };
        let width = of_streams + 2 * d + alt_up.laurel_rank + 3 * s + s * s;
        tokens * width * dtype.size_in_bytes()
    }

    /// Returns all tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let AltUpSaved { predicted, predict, activated, correct, laurel, last } = self;
        let of_factors = [predict, correct].into_iter().flat_map(|factors| {
            let Factors { routed, factors, lora_router, lora_factors } = factors;
            [routed, factors].into_iter().chain(lora_router.tensors()).chain(lora_factors.tensors())
        });
        [predicted, activated].into_iter().chain(last).chain(of_factors).chain(laurel.tensors()).collect()
    }
}
