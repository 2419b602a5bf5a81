//! Linear layers with their adapters: `y = x Wᵀ + b` and the branch of [`lora`].
//!
//! A frozen weight costs one product in backward (dx), its adapter three thin ones. On a CPU with
//! packed bf16 products, the weight's product includes the branch's up-product, so that the output
//! is written once. Adapters of layers with the same input share their passes over it
//! ([`super::lora_group`]). On a GPU the weights of layers with the same input are one product. A
//! LoRA branch is written first there: it is bound by memory, and the weights' product, bound by
//! arithmetic, reads the branch as its addend at no extra cost.

mod pending_gradients;

use candle_core::{DType, Device, Tensor};

pub(super) use pending_gradients::PendingGradients;
use pending_gradients::PendingWeight;

use super::fp8_base::{BaseWeights, Fp8Base, Fp8Part};
use super::lora::{self, BranchContext, BranchSaved, Lora};
use super::lora_group::LoraGroup;
use super::panels_ahead::PanelWeights;
use super::{Param, WeightMatrix};
use crate::error::{Error, Result};
use crate::ops::matmul::{add_bias, sum_rows};
use crate::ops::matmul_quantized::{
    Weight, dequantize, matmul_weight, matmul_weight_plus_low_rank, matmul_weights,
};
use crate::ops::{Addend, ColumnView, ColumnViewMut, LowRank, Transpose, empty, has_kernels, matmul};
use crate::runtime::TensorMut;
use crate::runtime::copy::{converted, stacked, zero};

/// A linear layer's parameters.
#[derive(Debug, Clone)]
pub struct Linear {
    /// The weight matrix, `[out, in]`.
    pub weight: WeightMatrix,
    /// The bias, `[out]`, if the layer has one.
    pub bias: Option<Param>,
    /// The adapter, if this layer is a target.
    pub lora: Option<Lora>,
    /// True if its weight is never quantized: its few outputs decide about all values of a token.
    pub is_gate: bool,
}

/// One or more linear layers with the same input and adjacent outputs: q, k, v; gate and up; or
/// one.
#[derive(Debug, Clone)]
pub struct MergedLinear {
    /// The layers, in the order of their outputs.
    pub layers: Vec<Linear>,
    /// The weights of all layers as one matrix `[Σ out, in]`, if they are dense and contiguous, or
    /// are kept in bf16 beside their blocks.
    pub merged: Option<Param>,
    /// The layers whose frozen weights are multiplied in fp8, if any.
    pub(super) fp8: Option<Fp8Base>,
}

/// Layers of a [`MergedLinear`] with a common product of their weights.
struct Part<'a> {
    layers: &'a [Linear],
    weights: Vec<Weight<'a>>,
    /// The sum of the gradient of the weights.
    grad: Option<&'a TensorMut>,
    /// The weights in fp8, if they are multiplied so.
    fp8: Option<Fp8Part>,
}

/// The inputs of the adapters' backward of a [`MergedLinear`], besides its input.
#[derive(Debug, Clone, Default)]
pub(crate) struct LoraSaved(Vec<Option<BranchSaved>>);

#[cfg(test)]
impl LoraSaved {
    /// Returns all tensors that it holds.
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        self.0.iter().flatten().flat_map(BranchSaved::tensors).collect()
    }
}

impl Linear {
    fn out(&self) -> Result<usize> {
        Ok(self.weight.get().dims()?.0)
    }

    fn has_dora(&self) -> bool {
        self.lora.as_ref().is_some_and(Lora::is_dora)
    }
}

impl MergedLinear {
    /// Returns the layers in parts with one product each. On a GPU all layers with weights of one
    /// kind are one part, but not with DoRA, which needs the product of a single layer. Elsewhere
    /// layers are one part if they are contiguous and have no adapters. Layers in fp8 are one part
    /// on any device.
    fn parts(&self, device: &Device, has_dora: bool) -> Result<Vec<Part<'_>>> {
        if let Some(fp8) = &self.fp8 {
            return self.fp8_parts(fp8, has_dora);
        }
        let all = if has_kernels(device) {
            self.as_one().filter(|_| !has_dora)
        } else {
            self.merged().filter(|_| self.layers.iter().all(|layer| layer.lora.is_none()))
        };
        Ok(all.map_or_else(|| self.layers.iter().map(Part::of).collect(), |all| vec![all]))
    }

    /// Returns the layers in fp8 as one part, or one by one for DoRA, and the other ones.
    fn fp8_parts(&self, fp8: &Fp8Base, has_dora: bool) -> Result<Vec<Part<'_>>> {
        let (in_fp8, others) = self.layers.split_at(fp8.layers);
        let each = if has_dora { 1 } else { fp8.layers };
        let mut start = 0;
        let part = |layers| {
            let part = Part::frozen(layers, weights_of(layers));
            let len = part.columns()?.iter().map(|(_, len)| len).sum();
            start += len;
            Ok(Part { fp8: Some(fp8.part(start - len, len)?), ..part })
        };
        in_fp8.chunks(each).map(part).chain(others.iter().map(|layer| Ok(Part::of(layer)))).collect()
    }

    /// Also keeps quantized weights in bf16, and the codes of weights in fp8. DoRA multiplies by
    /// each layer's own weight instead.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub(super) fn keep_in_bf16(&mut self) -> Result<()> {
        if self.merged.is_some() || self.layers.iter().any(|layer| layer.has_dora()) {
            return Ok(());
        }
        if self.fp8.is_some() {
            return self.keep_codes();
        }
        // Quantized layers come first, then the small gates that are never quantized.
        let (mut quantized, mut dense) = (Vec::new(), Vec::new());
        for layer in &self.layers {
            match &layer.weight {
                WeightMatrix::Quantized(weight) if dense.is_empty() => quantized.push(weight),
                WeightMatrix::Dense(weight) if !quantized.is_empty() && weight.grad.is_none() => {
                    dense.push(weight);
                }
                _ => return Ok(()),
            }
        }
        if quantized.is_empty() {
            return Ok(());
        }
        let mut value = dequantize(&quantized, DType::BF16)?;
        if !dense.is_empty() {
            let dense = dense.iter().map(|weight| converted(&weight.value, DType::BF16));
            let dense = dense.collect::<Result<Vec<_>>>()?;
            let parts: Vec<&Tensor> = std::iter::once(&value).chain(&dense).collect();
            value = stacked(&parts)?;
        }
        self.merged = Some(Param { value, grad: None });
        Ok(())
    }

    /// Makes zeros of gradients that a micro-batch overwrites, for layers without rows in it.
    pub(super) fn clear_overwritten_gradients(&self) -> Result<()> {
        let whole = self.merged.as_ref().and_then(|merged| merged.grad.as_ref());
        let of_layers = self.layers.iter().filter_map(|layer| layer.weight.grad());
        let overwritten = whole.into_iter().chain(of_layers).filter(|grad| grad.dtype() != DType::F32);
        overwritten.into_iter().try_for_each(zero)
    }

    /// Returns the layers as one product, if their weights are one matrix.
    fn merged(&self) -> Option<Part<'_>> {
        let merged = self.merged.as_ref()?;
        let weights = vec![Weight::Dense(&merged.value)];
        Some(Part { grad: merged.grad.as_ref(), ..Part::frozen(&self.layers, weights) })
    }

    /// Returns the quantized weights of all layers, if a product on a GPU dequantizes them as one
    /// matrix. A layer with DoRA has a product of its own, and products in fp8 read codes.
    pub(super) fn quantized(&self) -> Option<PanelWeights<'_>> {
        let quantized = self.layers.iter().map(|layer| match layer.weight.get() {
            Weight::Quantized(weight) if !layer.has_dora() => Some(weight),
            _ => None,
        });
        let is_dequantized = self.merged.is_none() && self.fp8.is_none();
        quantized.collect::<Option<Vec<_>>>().filter(|_| is_dequantized)
    }

    fn as_one(&self) -> Option<Part<'_>> {
        self.merged().or_else(|| {
            let weights = weights_of(&self.layers);
            let quantized = weights.iter().all(|weight| matches!(weight, Weight::Quantized(_)));
            quantized.then(|| Part::frozen(&self.layers, weights))
        })
    }

    /// Works like [`backward_parts`] if the layers' adapters are a group.
    fn backward_grouped<'a>(
        &'a self,
        group: LoraGroup<'a>,
        saved: &[Option<BranchSaved>],
        dy: &Tensor,
        (dx, branch): (Option<&TensorMut>, BranchContext<'_>),
    ) -> Result<PendingGradients<'a>> {
        let all = Part::frozen(&self.layers, Vec::new());
        let du = group.backward(saved, dy, &all.columns()?)?;
        match dx {
            Some(dx) if self.fp8.is_some() => self.input_gradient_in_fp8(dx, dy, group.to_input(&du))?,
            Some(dx) => {
                let weights = self.merged().map_or_else(|| weights_of(&self.layers), |merged| merged.weights);
                match branch.panel(&weights)? {
                    Some(panel) => {
                        input_gradient(dx, dy, &[Weight::Dense(&panel)], group.to_input(&du))?;
                    }
                    None => input_gradient(dx, dy, &weights, group.to_input(&du))?,
                }
            }
            None => {}
        }
        let (mut start, mut pending) =
            (0, PendingGradients { group: Some((group, du)), ..PendingGradients::default() });
        for part in self.layers.iter().map(Part::of) {
            start = part.add_gradients((dy, start), &mut pending)?;
        }
        Ok(pending)
    }

    /// Works like [`input_gradient`], by the parts in fp8 and the other ones.
    fn input_gradient_in_fp8(&self, dx: &TensorMut, dy: &Tensor, low_rank: LowRank<'_>) -> Result<()> {
        let (dx, factor) = (ColumnViewMut::all(dx), ColumnView::all(low_rank.factor));
        matmul(dx, low_rank.u, factor, Transpose::Nn, low_rank.scale, Addend::Nothing)?;
        let mut start = 0;
        for part in self.parts(dy.device(), false)? {
            let len = part.columns()?.iter().map(|(_, len)| len).sum();
            part.base()?.multiply(
                dx,
                ColumnView { tensor: dy, start, len },
                Transpose::Nn,
                Addend::Destination,
            )?;
            start += len;
        }
        Ok(())
    }
}

fn weights_of(layers: &[Linear]) -> Vec<Weight<'_>> {
    layers.iter().map(|layer| layer.weight.get()).collect()
}

impl<'a> Part<'a> {
    fn of(layer: &'a Linear) -> Self {
        let layers = std::slice::from_ref(layer);
        Part { grad: layer.weight.grad(), ..Part::frozen(layers, weights_of(layers)) }
    }

    /// Returns a part whose weights have no gradient.
    fn frozen(layers: &'a [Linear], weights: Vec<Weight<'a>>) -> Self {
        Part { layers, weights, grad: None, fp8: None }
    }

    /// Returns the weights, with their codes if they are multiplied in fp8.
    fn base(&self) -> Result<BaseWeights<'_>> {
        let codes = self.fp8.as_ref().map(|fp8| fp8.codes(&self.weights)).transpose()?;
        Ok(BaseWeights { values: self.weights.clone(), codes })
    }

    /// Multiplies by the weights, or by their panel if it was made ahead.
    fn multiply(
        &self,
        branch: BranchContext<'_>,
        dst: ColumnViewMut<'_>,
        a: ColumnView<'_>,
        form: Transpose,
        added: Addend<'_>,
    ) -> Result<()> {
        match branch.panel(&self.weights)? {
            Some(panel) => matmul_weight(dst, a, Weight::Dense(&panel), form, added),
            None => self.base()?.multiply(dst, a, form, added),
        }
    }

    /// Returns the first column and the width of each layer's output, relative to the part.
    fn columns(&self) -> Result<Vec<(usize, usize)>> {
        let mut start = 0;
        let range_of = |layer: &Linear| {
            let len = layer.out()?;
            start += len;
            Ok((start - len, len))
        };
        self.layers.iter().map(range_of).collect()
    }

    /// Writes the outputs to the columns from `start` on, plus `added`. Returns the column after
    /// the last.
    fn forward(
        &self,
        x: &Tensor,
        (y, start): (&TensorMut, usize),
        added: Addend<'_>,
        branch: BranchContext<'_>,
        (downs, saved): (Vec<Option<BranchSaved>>, &mut LoraSaved),
    ) -> Result<usize> {
        let columns = self.columns()?;
        let len = columns.iter().map(|(_, len)| len).sum();
        let all = ColumnViewMut { tensor: y, start, len };
        let out = |&(at, len): &(usize, usize)| ColumnViewMut { tensor: y, start: start + at, len };
        let loras: Vec<_> = self.layers.iter().map(|layer| branch.adapter.of(layer.lora.as_ref())).collect();
        if let ([_], [Some(lora)]) = (self.layers, &loras[..])
            && lora.is_dora()
        {
            let base = self.base()?;
            saved.0.push(Some(lora::dora_forward(&base, lora, x, all, added, branch.source)?));
        } else if let ([weight], [Some(lora)]) = (&self.weights[..], &loras[..])
            && !has_kernels(x.device())
            && self.fp8.is_none()
        {
            let down = match downs.into_iter().next().flatten() {
                Some(down) => down,
                None => lora.saved(x, branch.source)?,
            };
            let x = ColumnView::all(x);
            matmul_weight_plus_low_rank(all, x, *weight, Transpose::Nt, added, lora.branch(&down))?;
            saved.0.push(Some(down));
        } else {
            let branches_first = has_kernels(x.device()) && loras.iter().all(Option::is_some);
            let base = |added| self.multiply(branch, all, ColumnView::all(x), Transpose::Nt, added);
            if !branches_first {
                base(added)?;
            }
            let added = if branches_first { added } else { Addend::Destination };
            for ((lora, down), columns) in loras.iter().zip(downs).zip(&columns) {
                let through = |lora: &Lora| {
                    let down = down.map_or_else(|| lora.saved(x, branch.source), Ok)?;
                    lora.up(&down, out(columns), added)?;
                    Ok::<_, Error>(down)
                };
                saved.0.push((*lora).map(through).transpose()?);
            }
            if branches_first {
                base(Addend::Destination)?;
            }
        }
        for (layer, columns) in self.layers.iter().zip(&columns) {
            if let Some(bias) = &layer.bias {
                add_bias(out(columns), &bias.value)?;
            }
        }
        Ok(start + len)
    }

    /// Adds the gradients of the part's trainable parameters; those that need the input go to
    /// `pending`. Adds to `dx`, or writes it unless `added`, the gradient through its layers of the
    /// columns of `dy` from `start` on. Returns the column after the last.
    fn backward(
        &self,
        saved: &[Option<BranchSaved>],
        (dy, start): (&Tensor, usize),
        dx: Option<(&TensorMut, Addend<'_>)>,
        branch: BranchContext<'_>,
        pending: &mut PendingGradients<'a>,
    ) -> Result<usize> {
        let columns = self.columns()?;
        let len = columns.iter().map(|(_, len)| len).sum();
        let all = ColumnView { tensor: dy, start, len };
        let of_layer = |&(at, len): &(usize, usize)| ColumnView { tensor: dy, start: start + at, len };
        let (layers, source) = (self.layers, branch.source);
        let branches =
            || layers.iter().zip(saved).map(|(layer, saved)| layer.lora.as_ref().zip(saved.as_ref()));
        if let ([_], Some(Some((lora, saved)))) = (layers, branches().next())
            && lora.is_dora()
        {
            let base = self.base()?;
            let du = lora::dora_backward(&base, lora, saved, all, dx, source)?;
            pending.adapters.push((lora, du));
        } else if let ([weight], [_], Some(Some((lora, saved))), Some((dx, added))) =
            (&self.weights[..], layers, branches().next(), dx)
            && !has_kernels(dy.device())
            && self.fp8.is_none()
            && !lora.drops(source)
        {
            let (du, dx) = (lora.up_backward(saved, all)?, ColumnViewMut::all(dx));
            matmul_weight_plus_low_rank(dx, all, *weight, Transpose::Nn, added, lora.to_input(&du))?;
            pending.adapters.push((lora, du));
        } else {
            let writes_first = |lora: &Lora| !lora.drops(source);
            let branches_first = has_kernels(dy.device())
                && branches().all(|branch| branch.is_some_and(|(lora, _)| writes_first(lora)));
            let mut dx = dx;
            let base = |dx: Option<(&TensorMut, Addend<'_>)>| {
                dx.map_or(Ok(()), |(dx, added)| {
                    self.multiply(branch, ColumnViewMut::all(dx), all, Transpose::Nn, added)
                })
            };
            if !branches_first {
                base(dx)?;
                dx = dx.map(|(dx, _)| (dx, Addend::Destination));
            }
            for (adapter, columns) in branches().zip(&columns) {
                let Some((lora, saved)) = adapter else { continue };
                let du = lora.up_backward(saved, of_layer(columns))?;
                if let Some(dx) = dx {
                    lora.down_backward(&du, dx, source)?;
                }
                pending.adapters.push((lora, du));
                dx = dx.map(|(dx, _)| (dx, Addend::Destination));
            }
            if branches_first {
                base(dx)?;
            }
        }
        self.add_gradients((dy, start), pending)
    }

    /// Adds the gradients of trainable biases, given those of the outputs, which are the columns of
    /// `dy` from `start` on; those of weights go to `pending`. Returns the column after the last.
    fn add_gradients(
        &self,
        (dy, start): (&Tensor, usize),
        pending: &mut PendingGradients<'a>,
    ) -> Result<usize> {
        let columns = self.columns()?;
        let len = columns.iter().map(|(_, len)| len).sum();
        pending.weights.extend(self.grad.map(|grad| PendingWeight { grad, dy: dy.clone(), start, len }));
        for (layer, (at, len)) in self.layers.iter().zip(columns) {
            if let Some(grad) = layer.bias.as_ref().and_then(|bias| bias.grad.as_ref()) {
                sum_rows(grad, ColumnView { tensor: dy, start: start + at, len })?;
            }
        }
        Ok(start + len)
    }
}

/// Writes `dy · weights + low_rank` to `dx`, with `weights` stacked by rows.
fn input_gradient(dx: &TensorMut, dy: &Tensor, weights: &[Weight<'_>], low_rank: LowRank<'_>) -> Result<()> {
    let Some((last, others)) = weights.split_last() else { return Err(Error::internal("no layers")) };
    let on_gpu = has_kernels(dx.device());
    let (dx, all) = (ColumnViewMut::all(dx), ColumnView::all(dy));
    if on_gpu {
        let factor = ColumnView::all(low_rank.factor);
        matmul(dx, low_rank.u, factor, Transpose::Nn, low_rank.scale, Addend::Nothing)?;
        return matmul_weights(dx, all, weights, Transpose::Nn, Addend::Destination);
    }
    let (len, _) = last.dims()?;
    let before = ColumnView { len: all.len - len, ..all };
    if !others.is_empty() {
        matmul_weights(dx, before, others, Transpose::Nn, Addend::Nothing)?;
    }
    let of_last = ColumnView { start: before.len, len, ..all };
    let added = Addend::destination_if(!others.is_empty());
    matmul_weight_plus_low_rank(dx, of_last, *last, Transpose::Nn, added, low_rank)
}

/// Computes `x: [N, in]` → `[N, Σ out]`, plus a given `residual` (single layers only).
pub(super) fn forward(
    linear: &MergedLinear,
    x: &Tensor,
    residual: Option<&Tensor>,
    branch: BranchContext<'_>,
) -> Result<(Tensor, LoraSaved)> {
    let (rows, _) = x.dims2()?;
    let widths = linear.layers.iter().map(Linear::out).collect::<Result<Vec<_>>>()?;
    let y = empty(rows, widths.iter().sum(), x.dtype(), x.device())?;
    let added = residual.map_or(Addend::Nothing, Addend::Matrix);
    let saved = forward_into(linear, x, &y, added, branch)?;
    Ok((y.into_tensor(), saved))
}

/// Works like [`forward`] and writes to `y: [N, Σ out]`.
pub(super) fn forward_into(
    linear: &MergedLinear,
    x: &Tensor,
    y: &TensorMut,
    added: Addend<'_>,
    branch: BranchContext<'_>,
) -> Result<LoraSaved> {
    let loras = || linear.layers.iter().map(|layer| branch.adapter.of(layer.lora.as_ref()));
    let has_dora = loras().flatten().any(Lora::is_dora);
    let group = LoraGroup::of(loras(), x, branch.source)?;
    let mut downs = match group {
        Some(group) => group.down(x)?,
        None => vec![None; linear.layers.len()],
    };
    let (mut saved, mut start) = (LoraSaved::default(), 0);
    for part in linear.parts(x.device(), has_dora)? {
        let of_part = downs.drain(..part.layers.len()).collect();
        start = part.forward(x, (y, start), added, branch, (of_part, &mut saved))?;
    }
    Ok(saved)
}

/// Returns the tensors that backward needs, without the product: a DoRA adapter alone reads its
/// output. `x` is computed only for an adapter.
pub(super) fn recompute(
    linear: &MergedLinear,
    x: impl FnOnce() -> Result<Tensor>,
    branch: BranchContext<'_>,
) -> Result<LoraSaved> {
    let loras: Vec<_> = linear.layers.iter().map(|layer| branch.adapter.of(layer.lora.as_ref())).collect();
    if loras.iter().all(Option::is_none) {
        return Ok(LoraSaved(vec![None; loras.len()]));
    }
    let x = x()?;
    if loras.iter().flatten().any(|lora| lora.is_dora()) {
        return Ok(forward(linear, &x, None, branch)?.1);
    }
    let group = LoraGroup::of(loras.iter().copied(), &x, branch.source)?;
    if let Some(group) = group {
        return group.down(&x).map(LoraSaved);
    }
    let saved = |lora: Option<&Lora>| lora.map(|lora| lora.saved(&x, branch.source)).transpose();
    loras.into_iter().map(saved).collect::<Result<_>>().map(LoraSaved)
}

/// Returns the gradient of the input, `[N, in]`, and adds the gradients of trainable parameters
/// that do not need the input.
pub(super) fn backward<'a>(
    linear: &'a MergedLinear,
    saved: &LoraSaved,
    dy: &Tensor,
    branch: BranchContext<'_>,
) -> Result<(Tensor, PendingGradients<'a>)> {
    let Some(first) = linear.layers.first() else { return Err(Error::internal("no layers")) };
    let dx = empty(dy.dim(0)?, first.weight.get().dims()?.1, dy.dtype(), dy.device())?;
    let pending = backward_parts(linear, saved, dy, Some(&dx), branch)?;
    Ok((dx.into_tensor(), pending))
}

/// Works like [`backward`], but without `need_dx` adds the gradients of the trainable parameters
/// alone: nothing below the layers trains.
pub(super) fn backward_first<'a>(
    linear: &'a MergedLinear,
    saved: &LoraSaved,
    dy: &Tensor,
    branch: BranchContext<'_>,
    need_dx: bool,
) -> Result<(Option<Tensor>, PendingGradients<'a>)> {
    if need_dx {
        return backward(linear, saved, dy, branch).map(|(dx, pending)| (Some(dx), pending));
    }
    Ok((None, backward_parts(linear, saved, dy, None, branch)?))
}

/// Adds the gradients of trainable parameters that do not need the input. Writes the gradient of
/// the input to `dx: [N, in]`, if given.
pub(super) fn backward_parts<'a>(
    linear: &'a MergedLinear,
    LoraSaved(saved): &LoraSaved,
    dy: &Tensor,
    dx: Option<&TensorMut>,
    branch: BranchContext<'_>,
) -> Result<PendingGradients<'a>> {
    let source = branch.source;
    let loras = || {
        linear.layers.iter().zip(saved).map(|(layer, saved)| layer.lora.as_ref().filter(|_| saved.is_some()))
    };
    if let Some(group) = LoraGroup::of(loras(), dy, source)? {
        return linear.backward_grouped(group, saved, dy, (dx, branch));
    }
    let has_dora = loras().flatten().any(Lora::is_dora);
    let (mut start, mut layer) = (0, 0);
    let mut pending = PendingGradients { source, ..PendingGradients::default() };
    for part in linear.parts(dy.device(), has_dora)? {
        let dx = dx.map(|dx| (dx, Addend::destination_if(start > 0)));
        let of_part = &saved[layer..layer + part.layers.len()];
        layer += of_part.len();
        start = part.backward(of_part, (dy, start), dx, branch, &mut pending)?;
    }
    Ok(pending)
}
