//! The token embedding: its forward, and the backward of its trainable parts.

use std::collections::HashMap;

use candle_core::{DType, Tensor};

use super::ModelConfig;
use super::lora::{AdapterSwitch, Lora};
use crate::error::Result;
use crate::ops::embedding::{columns_of, columns_of_backward, embed, embed_backward};
use crate::ops::{Addend, ColumnView, ColumnViewMut, Transpose, empty, matmul};
use crate::runtime::TensorMut;

/// Single trainable rows of a frozen token table (PEFT's `trainable_token_indices`). Their values
/// are the table's own; the strategy writes them back after each update.
#[derive(Debug, Clone)]
pub struct TokenRows {
    /// The token of each row.
    pub ids: Vec<u32>,
    /// `[ids, D]` f32.
    pub grad: TensorMut,
}

/// The token embedding, for one forward.
#[derive(Debug, Clone)]
pub struct EmbedWeights {
    /// `[V, D]`, in its storage dtype.
    pub table: Tensor,
    /// An adapter on the table: A is `[r, V]`, B `[D, r]`.
    pub lora: Option<Lora>,
    /// The dtype of activations.
    pub dtype: DType,
}

/// The inputs of the embedding's backward, without the table itself, of which a rank may hold only
/// a shard.
#[derive(Debug, Clone)]
pub struct EmbedGradients {
    /// `[V, D]` f32: the sum of the table's gradient, if it trains.
    pub table: Option<TensorMut>,
    /// Trainable rows of the table.
    pub rows: Option<TokenRows>,
    /// An adapter on the table: A is `[r, V]`, B `[D, r]`.
    pub lora: Option<Lora>,
}

impl EmbedWeights {
    /// Returns the embeddings of N `ids`, `[N, D]`, in the dtype of activations.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn forward(&self, config: &ModelConfig, ids: &[u32], adapter: AdapterSwitch) -> Result<Tensor> {
        let x = TensorMut::new(embed(&self.table, ids, config.embedding_factor, self.dtype)?);
        if let Some(lora) = adapter.of(self.lora.as_ref()) {
            let (u, b) = (columns_of(&lora.a.value, ids)?, ColumnView::all(&lora.b.value));
            let scale = lora.scale * config.embedding_factor;
            let (out, u) = (ColumnViewMut::all(&x), ColumnView::all(&u));
            matmul(out, u, b, Transpose::Nt, scale, Addend::Destination)?;
        }
        Ok(x.into_tensor())
    }
}

impl EmbedGradients {
    /// Adds the gradients of the trainable parts, for `ids` and the gradient `dx: [N, D]` of their
    /// embeddings.
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
        let (dx, b) = (ColumnView::all(dx), ColumnView::all(&lora.b.value));
        matmul(ColumnViewMut::all(&du), dx, b, Transpose::Nn, scale, Addend::Nothing)?;
        if let Some(grad) = &lora.b.grad {
            let (grad, u) = (ColumnViewMut::all(grad), ColumnView::all(&u));
            matmul(grad, dx, u, Transpose::Tn, scale, Addend::Destination)?;
        }
        match &lora.a.grad {
            Some(grad) => columns_of_backward(grad, ids, &du, skip),
            None => Ok(()),
        }
    }
}
