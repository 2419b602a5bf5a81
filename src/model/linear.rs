//! Linear layers with LoRA inside: `y = x Wᵀ + b + s · (drop(x) Aᵀ) Bᵀ` (arXiv 2106.09685).
//!
//! A group is one or more layers that read the same input and whose outputs stand side by side: q, k, v; gate and up;
//! or a single layer. The adapter's branch is computed in f32, as PEFT does. A frozen weight costs one product in
//! backward (dx); its adapter three thin ones.

use candle_core::{DType, Tensor};

use super::Param;
use crate::error::Result;
use crate::ops::dropout::{Dropout, dropout};
use crate::ops::product::{add_bias, sum_rows};
use crate::ops::random::Stream;
use crate::ops::reduce::{add_into, copy_into};
use crate::ops::{Columns, Form, empty, product};

/// A linear layer's parameters.
#[derive(Debug, Clone)]
pub struct Linear {
    /// `[out, in]`.
    pub weight: Param,
    /// `[out]`.
    pub bias: Option<Param>,
    /// The adapter, if this layer is a target.
    pub lora: Option<Lora>,
}

/// A LoRA adapter on a linear layer.
#[derive(Debug, Clone)]
pub struct Lora {
    /// `[r, in]` f32.
    pub a: Param,
    /// `[out, r]` f32.
    pub b: Param,
    /// `lora_alpha / r`, or `lora_alpha / √r` with rsLoRA.
    pub scale: f64,
    /// Probability that an input value is dropped in training.
    pub dropout: f32,
    /// Numbers the layer within its block, for the dropout stream.
    pub site: u64,
}

/// What a group's backward needs besides its input: `drop(x) Aᵀ` of each layer, `[N, r]` f32.
#[derive(Debug, Clone, Default)]
pub struct LoraSaved(Vec<Option<Tensor>>);

/// Where the dropout of a block draws from; none outside training.
pub(super) type DropoutSource = Option<(Stream, u64)>;

impl Linear {
    fn out(&self) -> Result<usize> {
        Ok(self.weight.value.dim(0)?)
    }
}

impl Lora {
    fn site(&self, source: DropoutSource) -> Option<Dropout> {
        let (stream, first_token) = source.filter(|_| self.dropout > 0.0)?;
        Some(Dropout { p: self.dropout, stream: stream.part(self.site), first_token })
    }
}

/// `x: [N, in]` → `[N, Σ out]`, plus `residual` when given (single layers only).
pub(super) fn forward(
    layers: &[Linear],
    x: &Tensor,
    residual: Option<&Tensor>,
    source: DropoutSource,
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
        let out = Columns { tensor: &y, start, len };
        start += len;
        product(out, Columns::all(x), Columns::all(&layer.weight.value), Form::Nt, 1.0, residual.is_some())?;
        if let Some(bias) = &layer.bias {
            add_bias(out, &bias.value)?;
        }
        saved.0.push(match &layer.lora {
            None => None,
            Some(lora) => {
                let dropped = lora.site(source).map(|site| dropout(x, site)).transpose()?;
                let r = lora.a.value.dim(0)?;
                let u = empty(rows, r, DType::F32, x.device())?;
                let x = Columns::all(dropped.as_ref().unwrap_or(x));
                product(Columns::all(&u), x, Columns::all(&lora.a.value), Form::Nt, 1.0, false)?;
                product(out, Columns::all(&u), Columns::all(&lora.b.value), Form::Nt, lora.scale, true)?;
                Some(u)
            }
        });
    }
    Ok((y, saved))
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
    Ok(dx)
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
    dx: Option<&Tensor>,
    source: DropoutSource,
) -> Result<()> {
    let mut start = 0;
    for (i, (layer, u)) in layers.iter().zip(&saved.0).enumerate() {
        let dy = Columns { tensor: dy, start, len: layer.out()? };
        start += dy.len;
        if let Some(dx) = dx {
            product(Columns::all(dx), dy, Columns::all(&layer.weight.value), Form::Nn, 1.0, i > 0)?;
        }
        if let Some(grad) = &layer.weight.grad {
            product(Columns::all(grad), dy, Columns::all(x), Form::Tn, 1.0, true)?;
        }
        if let Some(grad) = layer.bias.as_ref().and_then(|bias| bias.grad.as_ref()) {
            sum_rows(grad, dy)?;
        }
        if let (Some(lora), Some(u)) = (&layer.lora, u) {
            lora_backward(lora, u, x, dy, dx, source)?;
        }
    }
    Ok(())
}

fn lora_backward(
    lora: &Lora,
    u: &Tensor,
    x: &Tensor,
    dy: Columns<'_>,
    dx: Option<&Tensor>,
    source: DropoutSource,
) -> Result<()> {
    let (rows, r) = u.dims2()?;
    let du = empty(rows, r, DType::F32, x.device())?;
    product(Columns::all(&du), dy, Columns::all(&lora.b.value), Form::Nn, lora.scale, false)?;
    if let Some(grad) = &lora.b.grad {
        product(Columns::all(grad), dy, Columns::all(u), Form::Tn, lora.scale, true)?;
    }
    let site = lora.site(source);
    if let Some(grad) = &lora.a.grad {
        let dropped = site.map(|site| dropout(x, site)).transpose()?;
        let x = Columns::all(dropped.as_ref().unwrap_or(x));
        product(Columns::all(grad), Columns::all(&du), x, Form::Tn, 1.0, true)?;
    }
    let Some(dx) = dx else { return Ok(()) };
    match site {
        None => {
            product(Columns::all(dx), Columns::all(&du), Columns::all(&lora.a.value), Form::Nn, 1.0, true)
        }
        Some(site) => {
            let branch = empty(rows, dx.dim(1)?, DType::F32, x.device())?;
            product(
                Columns::all(&branch),
                Columns::all(&du),
                Columns::all(&lora.a.value),
                Form::Nn,
                1.0,
                false,
            )?;
            add_into(dx, &dropout(&branch, site)?)
        }
    }
}
