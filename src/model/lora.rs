//! The adapter's branch of a linear layer, forward beside backward: LoRA (arXiv 2106.09685) and DoRA
//! (arXiv 2402.09353).
//!
//! ```text
//! LoRA   y += s · (drop(x) Aᵀ) Bᵀ
//! DoRA   y  = x Wᵀ − z + g ⊙ (z + s · (drop(x) Aᵀ) Bᵀ)        z = drop(x) Wᵀ,  g = m / ‖W + s B A‖ (a constant)
//! ```
//!
//! The branch is computed in f32, as PEFT does. Without dropout DoRA's `x Wᵀ − z` cancels and is not computed.

use candle_core::{DType, Tensor};

use super::Param;
use super::linear::Linear;
use crate::error::Result;
use crate::ops::dora::{magnitude_backward, scale_columns, weight_norm};
use crate::ops::dropout::{Dropout, dropout};
use crate::ops::random::Stream;
use crate::ops::reduce::add_into;
use crate::ops::weight::weight_product;
use crate::ops::{Columns, Form, empty, product};

/// An adapter on a linear layer.
#[derive(Debug, Clone)]
pub struct Lora {
    /// `[r, in]` f32.
    pub a: Param,
    /// `[out, r]` f32.
    pub b: Param,
    /// DoRA's m: `[out]` f32.
    pub magnitude: Option<Param>,
    /// `lora_alpha / r`, or `lora_alpha / √r` with rsLoRA.
    pub scale: f64,
    /// Probability that an input value is dropped in training.
    pub dropout: f32,
    /// Numbers the layer within its block, for the dropout stream.
    pub site: u64,
}

/// What the branch's backward needs besides the layer's input.
#[derive(Debug, Clone)]
pub(super) struct BranchSaved {
    /// `drop(x) Aᵀ`: `[N, r]` f32.
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

/// Where the dropout of a block draws from; none outside training.
pub(crate) type DropoutSource = Option<(Stream, u64)>;

impl Lora {
    fn site(&self, source: DropoutSource) -> Option<Dropout> {
        let (stream, first_token) = source.filter(|_| self.dropout > 0.0)?;
        Some(Dropout { p: self.dropout, stream: stream.part(self.site), first_token })
    }

    /// The adapter's input: `x`, or `x` with values dropped.
    fn input(&self, x: &Tensor, source: DropoutSource) -> Result<Tensor> {
        self.site(source).map_or_else(|| Ok(x.clone()), |site| dropout(x, site))
    }

    /// `drop(x) Aᵀ`: `[N, r]` f32.
    pub(super) fn down(&self, x: &Tensor, source: DropoutSource) -> Result<Tensor> {
        let u = empty(x.dim(0)?, self.a.value.dim(0)?, DType::F32, x.device())?;
        let input = self.input(x, source)?;
        product(Columns::all(&u), Columns::all(&input), Columns::all(&self.a.value), Form::Nt, 1.0, false)?;
        Ok(u)
    }

    /// Adds A's gradient, and to `dx` what comes through A, given `du: [N, r]`.
    pub(super) fn down_backward(
        &self,
        x: &Tensor,
        du: &Tensor,
        dx: Option<&Tensor>,
        source: DropoutSource,
    ) -> Result<()> {
        if let Some(grad) = &self.a.grad {
            let input = self.input(x, source)?;
            product(Columns::all(grad), Columns::all(du), Columns::all(&input), Form::Tn, 1.0, true)?;
        }
        let Some(dx) = dx else { return Ok(()) };
        let through_a = |dst: &Tensor, accumulate: bool| {
            let a = Columns::all(&self.a.value);
            product(Columns::all(dst), Columns::all(du), a, Form::Nn, 1.0, accumulate)
        };
        match self.site(source) {
            None => through_a(dx, true),
            Some(site) => {
                let branch = empty(dx.dim(0)?, dx.dim(1)?, DType::F32, x.device())?;
                through_a(&branch, false)?;
                add_into(dx, &dropout(&branch, site)?)
            }
        }
    }

    /// The gradient of u, `s · dy B`, and B's gradient added; `dy` is the gradient of `s · u Bᵀ`.
    fn up_backward(&self, u: &Tensor, dy: Columns<'_>) -> Result<Tensor> {
        let (rows, r) = u.dims2()?;
        let du = empty(rows, r, DType::F32, u.device())?;
        product(Columns::all(&du), dy, Columns::all(&self.b.value), Form::Nn, self.scale, false)?;
        if let Some(grad) = &self.b.grad {
            product(Columns::all(grad), dy, Columns::all(u), Form::Tn, self.scale, true)?;
        }
        Ok(du)
    }
}

/// Adds `x Wᵀ` and the adapter's branch to the columns `out`, which hold zeros or, if `accumulate`, a residual.
pub(super) fn forward(
    layer: &Linear,
    lora: &Lora,
    x: &Tensor,
    out: Columns<'_>,
    accumulate: bool,
    source: DropoutSource,
) -> Result<BranchSaved> {
    let u = lora.down(x, source)?;
    let b = Columns::all(&lora.b.value);
    let weight = layer.weight.get();
    let Some(magnitude) = &lora.magnitude else {
        weight_product(out, Columns::all(x), weight, Form::Nt, accumulate)?;
        product(out, Columns::all(&u), b, Form::Nt, lora.scale, true)?;
        return Ok(BranchSaved { u, dora: None });
    };
    let norm = weight_norm(weight, &lora.a.value, &lora.b.value, lora.scale)?;
    let factor = (&magnitude.value / &norm)?;
    let unscaled = empty(x.dim(0)?, out.len, x.dtype(), x.device())?;
    let z = Columns::all(&unscaled);
    let dropped = lora.site(source).is_some();
    weight_product(z, Columns::all(&lora.input(x, source)?), weight, Form::Nt, false)?;
    if dropped {
        weight_product(out, Columns::all(x), weight, Form::Nt, accumulate)?;
        scale_columns(out, z, &factor.ones_like()?.neg()?, true)?;
    }
    product(z, Columns::all(&u), b, Form::Nt, lora.scale, true)?;
    scale_columns(out, z, &factor, accumulate || dropped)?;
    Ok(BranchSaved { u, dora: Some(DoraSaved { unscaled, factor, norm }) })
}

/// Adds the adapter's gradients and, to `dx` (or into it, where not `accumulate`), what `dy` gives through the layer.
pub(super) fn backward(
    layer: &Linear,
    lora: &Lora,
    saved: &BranchSaved,
    x: &Tensor,
    dy: Columns<'_>,
    dx: Option<(&Tensor, bool)>,
    source: DropoutSource,
) -> Result<()> {
    let weight = layer.weight.get();
    let Some(dora) = &saved.dora else {
        if let Some((dx, accumulate)) = dx {
            weight_product(Columns::all(dx), dy, weight, Form::Nn, accumulate)?;
        }
        let du = lora.up_backward(&saved.u, dy)?;
        return lora.down_backward(x, &du, dx.map(|(dx, _)| dx), source);
    };
    if let Some(grad) = lora.magnitude.as_ref().and_then(|m| m.grad.as_ref()) {
        magnitude_backward(grad, dy, &dora.unscaled, &dora.norm)?;
    }
    let scaled = empty(x.dim(0)?, dy.len, x.dtype(), x.device())?;
    scale_columns(Columns::all(&scaled), dy, &dora.factor, false)?;
    let du = lora.up_backward(&saved.u, Columns::all(&scaled))?;
    if let Some((dx, accumulate)) = dx {
        match lora.site(source) {
            None => weight_product(Columns::all(dx), Columns::all(&scaled), weight, Form::Nn, accumulate)?,
            Some(site) => {
                weight_product(Columns::all(dx), dy, weight, Form::Nn, accumulate)?;
                scale_columns(Columns::all(&scaled), dy, &dora.factor.ones_like()?.neg()?, true)?;
                let through_z = empty(dx.dim(0)?, dx.dim(1)?, DType::F32, x.device())?;
                weight_product(Columns::all(&through_z), Columns::all(&scaled), weight, Form::Nn, false)?;
                add_into(dx, &dropout(&through_z, site)?)?;
            }
        }
    }
    lora.down_backward(x, &du, dx.map(|(dx, _)| dx), source)
}
