//! The two ends of the model: embedding, and final norm with output layer and loss.

use std::collections::HashMap;

use candle_core::{DType, Tensor};

use super::lora::{DropoutSource, Lora};
use super::{ModelConfig, Param};
use crate::error::Result;
use crate::ops::cross_entropy::{
    Delta, LossKind, Output, OutputGrads, TokenScore, linear_cross_entropy, logits, score_targets,
};
use crate::ops::embedding::{columns_of, columns_of_backward, embed, embed_backward};
use crate::ops::rms_norm::{rms_norm, rms_norm_backward};
use crate::ops::{ColumnView, Transpose, empty, matmul};

/// Single rows of a token table that train while the table is frozen (PEFT's `trainable_token_indices`). Their values
/// are the table's own; the strategy puts them back there after each update.
#[derive(Debug, Clone)]
pub struct TokenRows {
    /// The token of each row.
    pub ids: Vec<u32>,
    /// `[ids, D]` f32.
    pub grad: Tensor,
}

/// The token embedding, for one forward.
#[derive(Debug, Clone)]
pub struct EmbedWeights {
    /// `[V, D]`, in the dtype it is kept in.
    pub table: Tensor,
    /// An adapter on the table: A is `[r, V]`, B `[D, r]`.
    pub lora: Option<Lora>,
    /// The dtype of activations.
    pub dtype: DType,
}

/// What the backward of the token embedding needs; the table itself, which a rank may hold a shard of, is not among it.
#[derive(Debug, Clone)]
pub struct EmbedGradients {
    /// `[V, D]` f32, where the gradient of the table is added up, if it trains.
    pub table: Option<Tensor>,
    /// Rows of the table that train.
    pub rows: Option<TokenRows>,
    /// An adapter on the table: A is `[r, V]`, B `[D, r]`.
    pub lora: Option<Lora>,
}

impl EmbedWeights {
    /// ids → `[N, D]`.
    ///
    /// # Errors
    /// When the table is no matrix of floating-point values, or an operation of the device fails.
    pub fn forward(&self, config: &ModelConfig, ids: &[u32]) -> Result<Tensor> {
        let x = embed(&self.table, ids, config.embedding_factor, self.dtype)?;
        if let Some(lora) = &self.lora {
            let (u, b) = (columns_of(&lora.a.value, ids)?, ColumnView::all(&lora.b.value));
            let scale = lora.scale * config.embedding_factor;
            matmul(ColumnView::all(&x), ColumnView::all(&u), b, Transpose::Nt, scale, true)?;
        }
        Ok(x)
    }
}

impl EmbedGradients {
    /// Adds the gradients of what trains, for `ids` and the gradient `dx: [N, D]` of their embeddings.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn backward(&self, config: &ModelConfig, ids: &[u32], dx: &Tensor) -> Result<()> {
        let (factor, skip) = (config.embedding_factor, config.pad_token_id);
        if let Some(grad) = &self.table {
            embed_backward(grad, ids, dx, factor, skip)?;
        }
        if let Some(rows) = &self.rows {
            const ELSEWHERE: u32 = u32::MAX;
            let row_of: HashMap<u32, u32> = rows.ids.iter().copied().zip(0..).collect();
            let places: Vec<u32> = ids.iter().map(|id| *row_of.get(id).unwrap_or(&ELSEWHERE)).collect();
            embed_backward(&rows.grad, &places, dx, factor, Some(ELSEWHERE))?;
        }
        let Some(lora) = &self.lora else { return Ok(()) };
        let scale = lora.scale * factor;
        let u = columns_of(&lora.a.value, ids)?;
        let (rows, r) = u.dims2()?;
        let du = empty(rows, r, DType::F32, dx.device())?;
        let b = ColumnView::all(&lora.b.value);
        matmul(ColumnView::all(&du), ColumnView::all(dx), b, Transpose::Nn, scale, false)?;
        if let Some(grad) = &lora.b.grad {
            matmul(
                ColumnView::all(grad),
                ColumnView::all(dx),
                ColumnView::all(&u),
                Transpose::Tn,
                scale,
                true,
            )?;
        }
        match &lora.a.grad {
            Some(grad) => columns_of_backward(grad, ids, &du, skip),
            None => Ok(()),
        }
    }
}

/// Final norm and output layer, for one use.
#[derive(Debug, Clone)]
pub struct HeadWeights {
    /// Gain of the last norm, `model.norm`.
    pub norm: Param,
    /// `lm_head`, or the embedding table when tied: `[V, D]`.
    pub lm_head: Param,
    /// Rows of a tied table that train.
    pub rows: Option<TokenRows>,
    /// An adapter on the output layer.
    pub lora: Option<Lora>,
}

impl HeadWeights {
    /// The summed loss of the rows with a target, and the gradient of `x: [N, D]` for `scale` times that sum.
    ///
    /// # Errors
    /// When shapes or dtypes do not fit each other, or an operation of the device fails.
    pub fn loss_and_grad(
        &self,
        config: &ModelConfig,
        x: &Tensor,
        targets: &[u32],
        scale: f64,
        source: DropoutSource,
    ) -> Result<(f64, Tensor)> {
        let normed = rms_norm(x, &self.norm.value, config.norm)?;
        let u = self.down(&normed, source)?;
        let kind = LossKind { scale, softcap: config.logit_softcap };
        let grads = OutputGrads {
            weight: self.lm_head.grad.as_ref(),
            rows: self.rows.as_ref().map(|rows| (rows.ids.as_slice(), &rows.grad)),
            b: self.lora.as_ref().and_then(|lora| lora.b.grad.as_ref()),
        };
        let out = linear_cross_entropy(&normed, self.output(u.as_ref()), targets, kind, grads)?;
        if let (Some(lora), Some(du)) = (&self.lora, &out.du) {
            lora.down_backward(&normed, du, Some(&out.dx), source)?;
        }
        let grad = self.norm.grad.as_ref();
        let dx = rms_norm_backward(x, &self.norm.value, &out.dx, None, grad, config.norm)?;
        Ok((out.loss, dx))
    }

    /// Loss and hit of every row with a target, in order.
    ///
    /// # Errors
    /// When shapes or dtypes do not fit each other, or an operation of the device fails.
    pub fn score(&self, config: &ModelConfig, x: &Tensor, targets: &[u32]) -> Result<Vec<TokenScore>> {
        let normed = rms_norm(x, &self.norm.value, config.norm)?;
        let u = self.down(&normed, None)?;
        score_targets(&normed, self.output(u.as_ref()), targets, config.logit_softcap)
    }

    /// f32 logits `[N, V]`.
    ///
    /// # Errors
    /// When shapes or dtypes do not fit each other, or an operation of the device fails.
    pub fn logits(&self, config: &ModelConfig, x: &Tensor) -> Result<Tensor> {
        let normed = rms_norm(x, &self.norm.value, config.norm)?;
        let u = self.down(&normed, None)?;
        logits(&normed, self.output(u.as_ref()), config.logit_softcap)
    }

    /// The adapter's inner activations, `[N, r]`.
    fn down(&self, normed: &Tensor, source: DropoutSource) -> Result<Option<Tensor>> {
        self.lora.as_ref().map(|lora| lora.down(normed, source)).transpose()
    }

    fn output<'a>(&'a self, u: Option<&'a Tensor>) -> Output<'a> {
        let delta = self.lora.as_ref().zip(u);
        let delta = delta.map(|(lora, u)| Delta { u, b: &lora.b.value, scale: lora.scale });
        Output { weight: &self.lm_head.value, delta }
    }
}
