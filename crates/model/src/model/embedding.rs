//! The token embedding, and the table of per-layer inputs beside it: their forward, and the
//! backward of their trainable parts.

use std::borrow::Cow;
use std::collections::HashMap;

use candle_core::{DType, Tensor};

use super::block::Carried;
use super::config::ModelConfig;
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
    /// The embedding, `[V, D]`.
    pub tokens: TableWeights,
    /// The table of per-layer inputs, `[V, Σ P]`, in a model that has one.
    pub per_layer: Option<TableWeights>,
    /// The dtype of activations.
    pub dtype: DType,
}

/// A token table, for one forward.
#[derive(Debug, Clone)]
pub struct TableWeights {
    /// `[V, width]`, in its storage dtype.
    pub table: Tensor,
    /// An adapter on the table: A is `[r, V]`, B `[width, r]`.
    pub lora: Option<Lora>,
}

/// The inputs of the embedding's backward, without the tables themselves, of which a rank may hold
/// only a shard.
#[derive(Debug, Clone)]
pub struct EmbedGradients {
    /// Those of the embedding.
    pub tokens: TableGradients,
    /// Those of the table of per-layer inputs, in a model that has one.
    pub per_layer: Option<TableGradients>,
}

/// The inputs of the backward of a token table, without the table itself.
#[derive(Debug, Clone)]
pub struct TableGradients {
    /// `[V, width]` f32: the sum of the table's gradient, if it trains.
    pub table: Option<TensorMut>,
    /// Trainable rows of the table.
    pub rows: Option<TokenRows>,
    /// An adapter on the table: A is `[r, V]`, B `[width, r]`.
    pub lora: Option<Lora>,
}

impl EmbedWeights {
    /// Returns the embeddings of N `ids`, `[N, D]`, in the dtype of activations, and the state
    /// before the first block.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn forward(
        &self,
        config: &ModelConfig,
        ids: &[u32],
        adapter: AdapterSwitch,
    ) -> Result<(Tensor, Carried)> {
        let x = self.tokens.forward(config.embedding_factor, ids, self.dtype, adapter)?;
        let ids = &*per_layer_ids(config, ids);
        let rows = |table: &TableWeights| table.forward(per_layer_factor(config), ids, self.dtype, adapter);
        Ok((x, Carried::new(self.per_layer.as_ref().map(rows).transpose()?)))
    }
}

impl EmbedGradients {
    /// Adds the gradients of the trainable parts, for `ids`, the gradient `dx: [N, D]` of their
    /// embeddings and that of the rows of per-layer inputs, `[N, Σ P]`.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub fn backward(
        &self,
        config: &ModelConfig,
        ids: &[u32],
        dx: &Tensor,
        drows: Option<&Tensor>,
    ) -> Result<()> {
        let skip = config.pad_token_id;
        self.tokens.backward((config.embedding_factor, skip), ids, dx)?;
        match (&self.per_layer, drows) {
            (Some(table), Some(drows)) => {
                table.backward((per_layer_factor(config), skip), &per_layer_ids(config, ids), drows)
            }
            _ => Ok(()),
        }
    }
}

/// Returns the row of each token in the table of per-layer inputs, which may have fewer rows than
/// the embedding: tokens beyond it have the first one.
fn per_layer_ids<'i>(config: &ModelConfig, ids: &'i [u32]) -> Cow<'i, [u32]> {
    let rows = config.per_layer_rows() as u32;
    if rows as usize == config.vocab_size {
        return ids.into();
    }
    ids.iter().map(|id| if *id < rows { *id } else { 0 }).collect()
}

/// Returns the factor on the rows of per-layer inputs: the square root of a block's width.
fn per_layer_factor(config: &ModelConfig) -> f64 {
    (config.per_layer_width(1) as f64).sqrt()
}

impl TableWeights {
    /// Returns the rows of N `ids` times `factor`, `[N, width]`.
    fn forward(&self, factor: f64, ids: &[u32], dtype: DType, adapter: AdapterSwitch) -> Result<Tensor> {
        let x = TensorMut::new(embed(&self.table, ids, factor, dtype)?);
        if let Some(lora) = adapter.of(self.lora.as_ref()) {
            let (u, b) = (columns_of(&lora.a.value, ids)?, ColumnView::all(&lora.b.value));
            let scale = lora.scale * factor;
            let (out, u) = (ColumnViewMut::all(&x), ColumnView::all(&u));
            matmul(out, u, b, Transpose::Nt, scale, Addend::Destination)?;
        }
        Ok(x.into_tensor())
    }
}

impl TableGradients {
    /// Adds the gradients of the trainable parts, for `ids` and the gradient `dx: [N, width]` of
    /// their rows times `factor`. The row of the token `skip` gets none.
    fn backward(&self, (factor, skip): (f64, Option<u32>), ids: &[u32], dx: &Tensor) -> Result<()> {
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
