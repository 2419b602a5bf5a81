//! The two ends of the model: embedding, and final norm with output layer and loss.

use candle_core::Tensor;

use super::{ModelConfig, Param};
use crate::error::Result;
use crate::ops::cross_entropy::{LossKind, TokenScore, linear_cross_entropy, logits, score_targets};
use crate::ops::embedding::{embed, embed_backward};
use crate::ops::rms_norm::{rms_norm, rms_norm_backward};

/// The token embedding, for one use.
#[derive(Debug, Clone)]
pub struct EmbedWeights {
    /// `[V, D]`.
    pub table: Param,
}

impl EmbedWeights {
    /// ids → `[N, D]`.
    pub fn forward(&self, config: &ModelConfig, ids: &[u32]) -> Result<Tensor> {
        embed(&self.table.value, ids, config.embedding_factor)
    }

    /// Adds the table's gradient, if it trains.
    pub fn backward(&self, config: &ModelConfig, ids: &[u32], dx: &Tensor) -> Result<()> {
        match &self.table.grad {
            Some(grad) => embed_backward(grad, ids, dx, config.embedding_factor, config.pad_token_id),
            None => Ok(()),
        }
    }
}

/// Final norm and output layer, for one use.
#[derive(Debug, Clone)]
pub struct HeadWeights {
    /// `model.norm`.
    pub norm: Param,
    /// `lm_head`, or the embedding table when tied: `[V, D]`.
    pub lm_head: Param,
}

impl HeadWeights {
    /// The summed loss of the rows with a target, and the gradient of `x: [N, D]` for `scale` times that sum.
    pub fn loss_and_grad(
        &self,
        config: &ModelConfig,
        x: &Tensor,
        targets: &[u32],
        scale: f64,
    ) -> Result<(f64, Tensor)> {
        let normed = rms_norm(x, &self.norm.value, config.norm)?;
        let kind = LossKind { scale, softcap: config.logit_softcap };
        let (loss, d) =
            linear_cross_entropy(&normed, &self.lm_head.value, targets, kind, self.lm_head.grad.as_ref())?;
        let dx = rms_norm_backward(x, &self.norm.value, &d, None, self.norm.grad.as_ref(), config.norm)?;
        Ok((loss, dx))
    }

    /// Loss and hit of every row with a target, in order.
    pub fn score(&self, config: &ModelConfig, x: &Tensor, targets: &[u32]) -> Result<Vec<TokenScore>> {
        let normed = rms_norm(x, &self.norm.value, config.norm)?;
        score_targets(&normed, &self.lm_head.value, targets, config.logit_softcap)
    }

    /// f32 logits `[N, V]`.
    pub fn logits(&self, config: &ModelConfig, x: &Tensor) -> Result<Tensor> {
        let normed = rms_norm(x, &self.norm.value, config.norm)?;
        logits(&normed, &self.lm_head.value, config.logit_softcap)
    }
}
