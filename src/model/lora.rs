//! The adapter's branch of a linear layer, forward beside backward: LoRA (arXiv 2106.09685) and DoRA
//! (arXiv 2402.09353).
//!
//! ```text
//! LoRA   y += s · (drop(x) Aᵀ) Bᵀ
//! DoRA   y  = x Wᵀ − z + g ⊙ (z + s · (drop(x) Aᵀ) Bᵀ)        z = drop(x) Wᵀ,  g = m / ‖W + s B A‖ (a constant)
//! ```
//!
//! The branch is computed in f32, as PEFT does, and in bf16 on a GPU that computes in bf16, as PEFT does under autocast:
//! A and B are bf16 then, beside f32 values that the optimizer updates. Without dropout DoRA's `x Wᵀ − z` cancels and is not computed.

use candle_core::{DType, Tensor};

use super::Param;
use super::linear::Linear;
use crate::error::Result;
use crate::ops::dora::{magnitude_backward, scale_columns, weight_norm};
use crate::ops::dropout::{Dropout, dropout};
use crate::ops::elementwise::add_into;
use crate::ops::matmul_quantized::matmul_weight;
use crate::ops::{ColumnView, ColumnViewMut, Transpose, empty, matmul};
use crate::recipe::enums::AdapterKind;
use crate::runtime::TensorMut;
use crate::runtime::rng::RngStream;

/// An adapter on a linear layer.
#[derive(Debug, Clone)]
pub struct Lora {
    /// `[r, in]`, f32 or bf16.
    pub a: Param,
    /// `[out, r]`, in the dtype of A.
    pub b: Param,
    /// DoRA's m: `[out]` f32.
    pub magnitude: Option<Param>,
    /// `lora_alpha / r`, or `lora_alpha / √r` with rsLoRA.
    pub scale: f64,
    /// Probability that an input value is dropped in training.
    pub dropout: f32,
    /// Numbers the layer within its block, for the dropout stream.
    pub module_index: u64,
}

/// The size of an adapter on a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoraShape {
    /// LoRA or DoRA.
    pub kind: AdapterKind,
    /// The rank: A has so many rows.
    pub r: usize,
    /// What its branch is computed in.
    pub dtype: DType,
}

/// What the branch's backward needs besides the layer's input.
#[derive(Debug, Clone)]
pub(super) struct BranchSaved {
    /// `drop(x) Aᵀ`: `[N, r]` in the dtype of A.
    pub(super) u: Tensor,
    dora: Option<DoraSaved>,
}

#[derive(Debug, Clone)]
struct DoraSaved {
    /// `z + s · u Bᵀ`: `[N, out]`.
    unscaled: Tensor,
    /// m / norm: `[out]` f32.
    factor: Tensor,
    /// `‖W + s B A‖`: `[out]` f32.
    norm: Tensor,
}

impl BranchSaved {
    /// The bytes that it holds of `tokens` tokens, after a layer of width `out` that returns `dtype`.
    pub(super) fn bytes(shape: LoraShape, out: usize, tokens: usize, dtype: DType) -> usize {
        let f32 = DType::F32.size_in_bytes();
        let u = tokens * shape.r * shape.dtype.size_in_bytes();
        let dora = match shape.kind {
            AdapterKind::Lora => 0,
            // `unscaled`; `factor` and `norm`.
            AdapterKind::Dora => tokens * out * dtype.size_in_bytes() + 2 * out * f32,
        };
        u + dora
    }

    /// All tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let dora = self.dora.iter().flat_map(|DoraSaved { unscaled, factor, norm }| [unscaled, factor, norm]);
        std::iter::once(&self.u).chain(dora).collect()
    }
}

/// Whether a forward computes with the adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdapterSwitch {
    /// With every LoRA and DoRA branch.
    #[default]
    On,
    /// With the frozen weights alone.
    Off,
}

impl AdapterSwitch {
    /// The adapter on a module, unless it is switched off.
    pub(super) fn of(self, lora: Option<&Lora>) -> Option<&Lora> {
        lora.filter(|_| self == AdapterSwitch::On)
    }
}

/// How the adapters of a block take part in a forward.
#[derive(Debug, Clone, Copy)]
pub(super) struct BranchContext {
    /// Whether they do.
    pub(super) adapter: AdapterSwitch,
    /// Where their dropout draws from.
    pub(super) source: DropoutSource,
}

/// Where the dropout of a block draws from; none outside training.
pub(crate) type DropoutSource = Option<(RngStream, u64)>;

impl Lora {
    fn dropout(&self, source: DropoutSource) -> Option<Dropout> {
        let (stream, first_token) = source.filter(|_| self.dropout > 0.0)?;
        Some(Dropout { p: self.dropout, stream: stream.part(self.module_index), first_token })
    }

    /// The adapter's input: `x`, or `x` with values dropped.
    fn input(&self, x: &Tensor, source: DropoutSource) -> Result<Tensor> {
        self.dropout(source).map_or_else(|| Ok(x.clone()), |module_index| dropout(x, module_index))
    }

    /// `drop(x) Aᵀ`: `[N, r]` in the dtype of A.
    pub(super) fn down(&self, x: &Tensor, source: DropoutSource) -> Result<Tensor> {
        let a = &self.a.value;
        let u = empty(x.dim(0)?, a.dim(0)?, a.dtype(), x.device())?;
        let input = self.input(x, source)?;
        matmul(
            ColumnViewMut::all(&u),
            ColumnView::all(&input),
            ColumnView::all(a),
            Transpose::Nt,
            1.0,
            false,
        )?;
        Ok(u.into_tensor())
    }

    /// Adds A's gradient, and to `dx` what comes through A, given `du: [N, r]`.
    pub(super) fn down_backward(
        &self,
        x: &Tensor,
        du: &Tensor,
        dx: Option<&TensorMut>,
        source: DropoutSource,
    ) -> Result<()> {
        if let Some(grad) = &self.a.grad {
            let input = self.input(x, source)?;
            matmul(
                ColumnViewMut::all(grad),
                ColumnView::all(du),
                ColumnView::all(&input),
                Transpose::Tn,
                1.0,
                true,
            )?;
        }
        let Some(dx) = dx else { return Ok(()) };
        let through_a = |dst: &TensorMut, accumulate: bool| {
            let a = ColumnView::all(&self.a.value);
            matmul(ColumnViewMut::all(dst), ColumnView::all(du), a, Transpose::Nn, 1.0, accumulate)
        };
        match self.dropout(source) {
            None => through_a(dx, true),
            Some(module_index) => {
                let branch = empty(dx.dim(0)?, dx.dim(1)?, DType::F32, x.device())?;
                through_a(&branch, false)?;
                add_into(dx, &dropout(&branch, module_index)?)
            }
        }
    }

    /// The gradient of u, `s · dy B`, and B's gradient added; `dy` is the gradient of `s · u Bᵀ`.
    fn up_backward(&self, u: &Tensor, dy: ColumnView<'_>) -> Result<Tensor> {
        let (rows, r) = u.dims2()?;
        let du = empty(rows, r, u.dtype(), u.device())?;
        matmul(
            ColumnViewMut::all(&du),
            dy,
            ColumnView::all(&self.b.value),
            Transpose::Nn,
            self.scale,
            false,
        )?;
        if let Some(grad) = &self.b.grad {
            matmul(ColumnViewMut::all(grad), dy, ColumnView::all(u), Transpose::Tn, self.scale, true)?;
        }
        Ok(du.into_tensor())
    }
}

/// Adds `x Wᵀ` and the adapter's branch to the columns `out`, which hold zeros or, if `accumulate`, a residual.
pub(super) fn forward(
    layer: &Linear,
    lora: &Lora,
    x: &Tensor,
    out: ColumnViewMut<'_>,
    accumulate: bool,
    source: DropoutSource,
) -> Result<BranchSaved> {
    let u = lora.down(x, source)?;
    let b = ColumnView::all(&lora.b.value);
    let weight = layer.weight.get();
    let Some(magnitude) = &lora.magnitude else {
        matmul_weight(out, ColumnView::all(x), weight, Transpose::Nt, accumulate)?;
        matmul(out, ColumnView::all(&u), b, Transpose::Nt, lora.scale, true)?;
        return Ok(BranchSaved { u, dora: None });
    };
    let norm = weight_norm(weight, &lora.a.value, &lora.b.value, lora.scale)?;
    let factor = (&magnitude.value / &norm)?;
    let unscaled = empty(x.dim(0)?, out.len, x.dtype(), x.device())?;
    let z = ColumnViewMut::all(&unscaled);
    let dropped = lora.dropout(source).is_some();
    matmul_weight(z, ColumnView::all(&lora.input(x, source)?), weight, Transpose::Nt, false)?;
    if dropped {
        matmul_weight(out, ColumnView::all(x), weight, Transpose::Nt, accumulate)?;
        scale_columns(out, z.as_view(), &factor.ones_like()?.neg()?, true)?;
    }
    matmul(z, ColumnView::all(&u), b, Transpose::Nt, lora.scale, true)?;
    scale_columns(out, z.as_view(), &factor, accumulate || dropped)?;
    let unscaled = unscaled.into_tensor();
    Ok(BranchSaved { u, dora: Some(DoraSaved { unscaled, factor, norm }) })
}

/// Adds the adapter's gradients and, to `dx` (or into it, where not `accumulate`), what `dy` gives through the layer.
pub(super) fn backward(
    layer: &Linear,
    lora: &Lora,
    saved: &BranchSaved,
    x: &Tensor,
    dy: ColumnView<'_>,
    dx: Option<(&TensorMut, bool)>,
    source: DropoutSource,
) -> Result<()> {
    let weight = layer.weight.get();
    let Some(dora) = &saved.dora else {
        if let Some((dx, accumulate)) = dx {
            matmul_weight(ColumnViewMut::all(dx), dy, weight, Transpose::Nn, accumulate)?;
        }
        let du = lora.up_backward(&saved.u, dy)?;
        return lora.down_backward(x, &du, dx.map(|(dx, _)| dx), source);
    };
    if let Some(grad) = lora.magnitude.as_ref().and_then(|m| m.grad.as_ref()) {
        magnitude_backward(grad, dy, &dora.unscaled, &dora.norm)?;
    }
    let scaled = empty(x.dim(0)?, dy.len, x.dtype(), x.device())?;
    scale_columns(ColumnViewMut::all(&scaled), dy, &dora.factor, false)?;
    let du = lora.up_backward(&saved.u, ColumnView::all(&scaled))?;
    if let Some((dx, accumulate)) = dx {
        match lora.dropout(source) {
            None => matmul_weight(
                ColumnViewMut::all(dx),
                ColumnView::all(&scaled),
                weight,
                Transpose::Nn,
                accumulate,
            )?,
            Some(module_index) => {
                matmul_weight(ColumnViewMut::all(dx), dy, weight, Transpose::Nn, accumulate)?;
                scale_columns(ColumnViewMut::all(&scaled), dy, &dora.factor.ones_like()?.neg()?, true)?;
                let through_z = empty(dx.dim(0)?, dx.dim(1)?, DType::F32, x.device())?;
                matmul_weight(
                    ColumnViewMut::all(&through_z),
                    ColumnView::all(&scaled),
                    weight,
                    Transpose::Nn,
                    false,
                )?;
                add_into(dx, &dropout(&through_z, module_index)?)?;
            }
        }
    }
    lora.down_backward(x, &du, dx.map(|(dx, _)| dx), source)
}
