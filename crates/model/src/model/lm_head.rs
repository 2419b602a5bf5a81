//! Final norm and output layer: logits, scores, and the loss with its backward.

use candle_core::{Device, Tensor};

use super::embedding::TokenRows;
use super::lora::{AdapterSwitch, BranchContext, DropoutSource, Lora};
use super::{ModelConfig, Norm, Param};
use crate::error::Result;
use crate::ops::Addend;
use crate::ops::cross_entropy::{
    Delta, IGNORE, LossKind, LossSum, LossTargets, Output, OutputGrads, TokenScore, linear_cross_entropy,
    logits, score_targets,
};
use crate::ops::elementwise::scaled;
use crate::runtime::TensorMut;
use crate::runtime::copy::to_device;

/// Rows whose logits [`HeadWeights::log_square_sums`] holds at once.
const SQUARED_ROWS: usize = 256;

/// Final norm and output layer, for one use.
#[derive(Debug, Clone)]
pub struct HeadWeights {
    /// The last norm, `model.norm`.
    pub norm: Norm,
    /// `lm_head`, or the embedding table when tied: `[V, D]`.
    pub lm_head: Param,
    /// Trainable rows of a tied table.
    pub rows: Option<TokenRows>,
    /// An adapter on the output layer.
    pub lora: Option<Lora>,
}

impl HeadWeights {
    /// Computes the summed cross-entropy of the rows with a target, each times its coefficient, and
    /// the gradient of `x: [N, D]` for `scale` times that sum, in the dtype of `x`. Adds the
    /// gradients of the trainable parameters.
    ///
    /// # Errors
    /// The number of coefficients, if any, differs from the number of rows; a tensor operation
    /// failed.
    pub fn loss_and_grad(
        &self,
        config: &ModelConfig,
        x: &Tensor,
        targets: LossTargets<'_>,
        scale: f64,
        source: DropoutSource,
    ) -> Result<(LossSum, Tensor)> {
        let normed = self.normed(config, x)?;
        let u = self.down(&normed, BranchContext::alone(AdapterSwitch::On, source))?;
        let kind = LossKind { scale, softcap: config.logit_softcap };
        let grads = OutputGrads {
            weight: self.lm_head.grad.as_ref(),
            rows: self.rows.as_ref().map(|rows| (rows.ids.as_slice(), &rows.grad)),
            b: self.lora.as_ref().and_then(|lora| lora.b.grad.as_ref()),
        };
        let out = linear_cross_entropy(&normed, self.output(u.as_ref()), targets, kind, grads)?;
        let dx = TensorMut::new(out.dx);
        if let (Some(lora), Some(du)) = (&self.lora, &out.du) {
            lora.add_gradient_of_a(&normed, du, source)?;
            lora.down_backward(du, (&dx, Addend::Destination), source)?;
        }
        let dx = scaled(&dx, config.logit_factor)?;
        let dx = self.norm.backward(config, x, &dx, None, None)?;
        Ok((out.loss, dx))
    }

    /// Returns loss and hit of every row of `x: [N, D]` with a target, in order.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn score(
        &self,
        config: &ModelConfig,
        x: &Tensor,
        targets: &[u32],
        adapter: AdapterSwitch,
        source: DropoutSource,
    ) -> Result<Vec<TokenScore>> {
        let normed = self.normed(config, x)?;
        let u = self.down(&normed, BranchContext::alone(adapter, source))?;
        score_targets(&normed, self.output(u.as_ref()), targets, config.logit_softcap)
    }

    /// Returns log Σ p² over all tokens for every row of `x: [N, D]` with a target, in order and in
    /// f32: the logarithm of the expected probability of a sampled token.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn log_square_sums(
        &self,
        config: &ModelConfig,
        x: &Tensor,
        targets: &[u32],
        source: DropoutSource,
    ) -> Result<Vec<f32>> {
        let normed = self.normed(config, x)?;
        let u = self.down(&normed, BranchContext::alone(AdapterSwitch::On, source))?;
        let rows: Vec<u32> = (0u32..).zip(targets).filter(|(_, id)| **id != IGNORE).map(|(n, _)| n).collect();
        let mut sums = Vec::with_capacity(rows.len());
        for chunk in rows.chunks(SQUARED_ROWS) {
            let ids = to_device(&Tensor::from_slice(chunk, chunk.len(), &Device::Cpu)?, x.device())?;
            let u = u.as_ref().map(|u| u.index_select(&ids, 0)).transpose()?;
            let x = normed.index_select(&ids, 0)?;
            let logits = logits(&x, self.output(u.as_ref()), config.logit_softcap)?;
            let powers = logits.broadcast_sub(&logits.max_keepdim(1)?)?.exp()?;
            let squares = (powers.sqr()?.sum(1)?.log()? - (powers.sum(1)?.log()? * 2.0)?)?;
            sums.extend(squares.to_vec1::<f32>()?);
        }
        Ok(sums)
    }

    /// Returns the logits of `x: [N, D]`, `[N, V]` f32.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn logits(&self, config: &ModelConfig, x: &Tensor, adapter: AdapterSwitch) -> Result<Tensor> {
        let normed = self.normed(config, x)?;
        let u = self.down(&normed, BranchContext::alone(adapter, None))?;
        logits(&normed, self.output(u.as_ref()), config.logit_softcap)
    }

    /// Returns the input of the output layer for `x: [N, D]`, times the factor on logits, which are
    /// linear in it.
    fn normed(&self, config: &ModelConfig, x: &Tensor) -> Result<Tensor> {
        scaled(&self.norm.forward(config, x)?, config.logit_factor)
    }

    /// Returns the adapter's inner activations, `[N, r]`, or `None` without an adapter.
    fn down(&self, normed: &Tensor, branch: BranchContext<'_>) -> Result<Option<Tensor>> {
        let lora = branch.adapter.of(self.lora.as_ref());
        lora.map(|lora| lora.down(normed, branch.source)).transpose()
    }

    /// Returns the output layer, with the adapter if its inner activations `u` are given.
    fn output<'a>(&'a self, u: Option<&'a Tensor>) -> Output<'a> {
        let delta = self.lora.as_ref().zip(u);
        let delta = delta.map(|(lora, u)| Delta { u, b: &lora.b.value, scale: lora.scale });
        Output { weight: &self.lm_head.value, delta }
    }
}
