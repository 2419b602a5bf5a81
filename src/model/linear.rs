//! Linear layers with their adapter inside: `y = x Wᵀ + b` and the branch of [`lora`].
//!
//! A group is one or more layers that read the same input and whose outputs stand side by side: q, k, v; gate and up;
//! or a single layer. A frozen weight costs one product in backward (dx); its adapter three thin ones.

use candle_core::Tensor;

use super::lora::{self, BranchContext, BranchSaved, DropoutSource, Lora};
use super::{Param, WeightMatrix};
use crate::error::Result;
use crate::ops::matmul::{add_bias, sum_rows};
use crate::ops::matmul_quantized::matmul_weight;
use crate::ops::{ColumnView, ColumnViewMut, Transpose, empty, matmul};
use crate::runtime::TensorMut;
use crate::runtime::copy::copy_into;

/// A linear layer's parameters.
#[derive(Debug, Clone)]
pub struct Linear {
    /// The weight matrix, `[out, in]`.
    pub weight: WeightMatrix,
    /// The bias, `[out]`, if there is one.
    pub bias: Option<Param>,
    /// The adapter, if this layer is a target.
    pub lora: Option<Lora>,
}

/// What the backward of a group's adapters needs besides its input.
#[derive(Debug, Clone, Default)]
pub struct LoraSaved(Vec<Option<BranchSaved>>);

#[cfg(test)]
impl LoraSaved {
    /// All tensors that it holds.
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        self.0.iter().flatten().flat_map(BranchSaved::tensors).collect()
    }
}

impl Linear {
    fn out(&self) -> Result<usize> {
        Ok(self.weight.get().dims()?.0)
    }
}

/// `x: [N, in]` → `[N, Σ out]`, plus `residual` when given (single layers only).
pub(super) fn forward(
    layers: &[Linear],
    x: &Tensor,
    residual: Option<&Tensor>,
    branch: BranchContext,
) -> Result<(Tensor, LoraSaved)> {
    let (rows, _) = x.dims2()?;
    let widths = layers.iter().map(Linear::out).collect::<Result<Vec<_>>>()?;
    let y = empty(rows, widths.iter().sum(), x.dtype(), x.device())?;
    if let Some(residual) = residual {
        copy_into(&y, residual)?;
    }
    let mut saved = LoraSaved::default();
    let mut start = 0;
    for (layer, &len) in layers.iter().zip(&widths) {
        let out = ColumnViewMut { tensor: &y, start, len };
        start += len;
        let accumulate = residual.is_some();
        saved.0.push(match branch.adapter.of(layer.lora.as_ref()) {
            None => {
                matmul_weight(out, ColumnView::all(x), layer.weight.get(), Transpose::Nt, accumulate)?;
                None
            }
            Some(lora) => Some(lora::forward(layer, lora, x, out, accumulate, branch.source)?),
        });
        if let Some(bias) = &layer.bias {
            add_bias(out, &bias.value)?;
        }
    }
    Ok((y.into_tensor(), saved))
}

/// Adds the gradients of the group's trainable parameters and returns that of `x`.
pub(super) fn backward(
    layers: &[Linear],
    saved: &LoraSaved,
    x: &Tensor,
    dy: &Tensor,
    source: DropoutSource,
) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let dx = empty(rows, width, x.dtype(), x.device())?;
    backward_group(layers, saved, x, dy, Some(&dx), source)?;
    Ok(dx.into_tensor())
}

/// Adds the gradients of the group's trainable parameters alone: nothing below `x` trains.
pub(super) fn backward_weights(
    layers: &[Linear],
    saved: &LoraSaved,
    x: &Tensor,
    dy: &Tensor,
    source: DropoutSource,
) -> Result<()> {
    backward_group(layers, saved, x, dy, None, source)
}

fn backward_group(
    layers: &[Linear],
    saved: &LoraSaved,
    x: &Tensor,
    dy: &Tensor,
    dx: Option<&TensorMut>,
    source: DropoutSource,
) -> Result<()> {
    let mut start = 0;
    for (i, (layer, branch)) in layers.iter().zip(&saved.0).enumerate() {
        let dy = ColumnView { tensor: dy, start, len: layer.out()? };
        start += dy.len;
        let dx = dx.map(|dx| (dx, i > 0));
        match (&layer.lora, branch) {
            (Some(lora), Some(branch)) => lora::backward(layer, lora, branch, x, dy, dx, source)?,
            _ => {
                if let Some((dx, accumulate)) = dx {
                    matmul_weight(ColumnViewMut::all(dx), dy, layer.weight.get(), Transpose::Nn, accumulate)?;
                }
            }
        }
        if let Some(grad) = layer.weight.grad() {
            matmul(ColumnViewMut::all(grad), dy, ColumnView::all(x), Transpose::Tn, 1.0, true)?;
        }
        if let Some(grad) = layer.bias.as_ref().and_then(|bias| bias.grad.as_ref()) {
            sum_rows(grad, dy)?;
        }
    }
    Ok(())
}
