//! The adapter's branch of a linear layer, forward beside backward: LoRA (arXiv 2106.09685) and
//! DoRA (arXiv 2402.09353).
//!
//! ```text
//! LoRA   y += s · (drop(x) Aᵀ) Bᵀ
//! DoRA   y  = x Wᵀ − z + g ⊙ (z + s · (drop(x) Aᵀ) Bᵀ)        z = drop(x) Wᵀ,  g = m / ‖W + s B A‖ (a constant)
//! ```
//!
//! The branch is computed in f32, as in PEFT (a CPU that multiplies bf16 rounds the factors beside
//! bf16 activations). On a GPU with bf16 compute it is computed in bf16, as in PEFT under autocast:
//! A and B are then bf16, beside f32 values that the optimizer updates. Without dropout DoRA's `x
//! Wᵀ − z` cancels and is not computed.

use candle_core::{DType, Device, Tensor};

use super::Param;
use super::fp8_base::BaseWeights;
use super::panels_ahead::PanelsAhead;
use crate::error::{Error, Result};
use crate::ops::dora::{magnitude_backward, scale_columns, weight_norm};
use crate::ops::dropout::{Dropout, dropout};
use crate::ops::elementwise::add_into;
use crate::ops::matmul_quantized::{Weight, dequantize};
use crate::ops::{Addend, ColumnView, ColumnViewMut, LowRank, Transpose, empty, has_kernels, matmul};
use crate::recipe::enums::AdapterKind;
use crate::runtime::TensorMut;
use crate::runtime::copy::copy_into;
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
    /// The dropout probability of an input value in training.
    pub dropout: f32,
    /// The number of the layer within its block, for the dropout stream.
    pub module_index: u64,
}

/// The size of an adapter on a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoraShape {
    /// LoRA or DoRA.
    pub kind: AdapterKind,
    /// The rank: the number of rows of A.
    pub r: usize,
    /// The dtype in which its branch is computed.
    pub dtype: DType,
    /// True if kernels compute it.
    pub has_kernels: bool,
}

impl LoraShape {
    /// Returns the number of columns of a buffer of `[N, r]`.
    pub(crate) fn buffer_width(self) -> usize {
        buffer_width(self.r, self.dtype, self.has_kernels)
    }
}

/// Returns the number of columns of a buffer of `[N, r]`. In bf16 on a GPU it is a multiple of 8,
/// so that each row starts at a multiple of 16 bytes, the unit in which products read.
fn buffer_width(r: usize, dtype: DType, has_kernels: bool) -> usize {
    let is_padded = has_kernels && dtype == DType::BF16;
    if is_padded { r.next_multiple_of(8) } else { r }
}

/// The inputs of the branch's backward, besides the layer's input.
#[derive(Debug, Clone)]
pub(super) struct BranchSaved {
    /// `drop(x) Aᵀ`: `[N, r]` in the dtype of A, in a buffer of [`LoraShape::buffer_width`] columns
    /// or of those of a group.
    u: Tensor,
    /// The first of its columns in the buffer.
    start: usize,
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
    /// Returns the inputs of LoRA's backward, with its inner activations in the columns from
    /// `start` on.
    pub(super) fn lora(u: Tensor, start: usize) -> Self {
        BranchSaved { u, start, dora: None }
    }

    /// Returns its bytes for `tokens` tokens, after a layer of width `out` that returns `dtype`.
    pub(super) fn bytes(shape: LoraShape, out: usize, tokens: usize, dtype: DType) -> usize {
        let f32 = DType::F32.size_in_bytes();
        let u = tokens * shape.buffer_width() * shape.dtype.size_in_bytes();
        let dora = match shape.kind {
            AdapterKind::Lora => 0,
            // `unscaled`; `factor` and `norm`.
            AdapterKind::Dora => tokens * out * dtype.size_in_bytes() + 2 * out * f32,
        };
        u + dora
    }

    /// Returns all tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let dora = self.dora.iter().flat_map(|DoraSaved { unscaled, factor, norm }| [unscaled, factor, norm]);
        std::iter::once(&self.u).chain(dora).collect()
    }
}

/// Selects whether a forward uses the adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdapterSwitch {
    /// With every LoRA and DoRA branch.
    #[default]
    On,
    /// With the frozen weights alone.
    Off,
}

impl AdapterSwitch {
    /// Returns the adapter on a module, unless it is switched off.
    pub(super) fn of(self, lora: Option<&Lora>) -> Option<&Lora> {
        lora.filter(|_| self == AdapterSwitch::On)
    }
}

/// The settings of the linear layers of a block in a pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct BranchContext<'a> {
    /// Selects whether the adapters are used.
    pub(super) adapter: AdapterSwitch,
    /// The random stream of their dropout.
    pub(super) source: DropoutSource,
    /// The panels of quantized weights, if they are made ahead.
    pub(super) panels: Option<&'a PanelsAhead<'a>>,
}

impl BranchContext<'_> {
    /// Returns the settings of a layer by itself.
    pub(super) fn alone(adapter: AdapterSwitch, source: DropoutSource) -> Self {
        BranchContext { adapter, source, panels: None }
    }

    /// Returns the panel of the weights of a product, if it was made ahead, as
    /// [`PanelsAhead::take`].
    ///
    /// # Errors
    /// An operation of the device failed.
    pub(super) fn panel(&self, weights: &[Weight<'_>]) -> Result<Option<Tensor>> {
        let Some(panels) = self.panels else { return Ok(None) };
        let quantized = weights.iter().map(|weight| match weight {
            Weight::Quantized(weight) => Some(*weight),
            Weight::Dense(_) => None,
        });
        let quantized = quantized.collect::<Option<Vec<_>>>();
        quantized.map_or(Ok(None), |weights| panels.take(&weights))
    }
}

/// The random stream of a block's dropout and its first token; `None` outside training.
pub(crate) type DropoutSource = Option<(RngStream, u64)>;

impl Lora {
    fn dropout(&self, source: DropoutSource) -> Option<Dropout> {
        let (stream, first_token) = source.filter(|_| self.dropout > 0.0)?;
        Some(Dropout { p: self.dropout, stream: stream.part(self.module_index), first_token })
    }

    /// Returns the adapter's input: `x`, or `x` after dropout.
    fn input(&self, x: &Tensor, source: DropoutSource) -> Result<Tensor> {
        self.dropout(source).map_or_else(|| Ok(x.clone()), |module_index| dropout(x, module_index))
    }

    /// Returns whether dropout applies to its input.
    pub(super) fn drops(&self, source: DropoutSource) -> bool {
        self.dropout(source).is_some()
    }

    /// Returns whether the branch is DoRA's.
    pub(super) fn is_dora(&self) -> bool {
        self.magnitude.is_some()
    }

    /// Computes LoRA's inner activations of `x`.
    pub(super) fn saved(&self, x: &Tensor, source: DropoutSource) -> Result<BranchSaved> {
        Ok(BranchSaved::lora(self.down(x, source)?, 0))
    }

    /// Writes LoRA's branch `s · u Bᵀ`, plus `added`, to the columns `out`, given its inner
    /// activations.
    pub(super) fn up(&self, saved: &BranchSaved, out: ColumnViewMut<'_>, added: Addend<'_>) -> Result<()> {
        let b = ColumnView::all(&self.b.value);
        matmul(out, self.inner(saved), b, Transpose::Nt, self.scale, added)
    }

    /// Returns the low-rank term that LoRA adds to the layer's product, given its inner
    /// activations.
    pub(super) fn branch<'a>(&'a self, saved: &'a BranchSaved) -> LowRank<'a> {
        LowRank { u: self.inner(saved), factor: &self.b.value, scale: self.scale }
    }

    /// Returns the low-rank term that LoRA adds to the gradient of its input, given that of u. The
    /// branch has no dropout here.
    pub(super) fn to_input<'a>(&'a self, du: &'a Tensor) -> LowRank<'a> {
        LowRank { u: self.of_rank(du), factor: &self.a.value, scale: 1.0 }
    }

    /// Allocates a buffer for `[N, r]` in the dtype of A.
    fn rank_buffer(&self, rows: usize, device: &Device) -> Result<TensorMut> {
        let a = &self.a.value;
        empty(rows, buffer_width(a.dim(0)?, a.dtype(), has_kernels(device)), a.dtype(), device)
    }

    /// Returns the `r` used columns of such a buffer.
    fn of_rank<'a>(&self, buffer: &'a Tensor) -> ColumnView<'a> {
        ColumnView { len: self.a.value.dims()[0], ..ColumnView::all(buffer) }
    }

    /// Returns the inner activations of the forward.
    fn inner<'a>(&self, saved: &'a BranchSaved) -> ColumnView<'a> {
        ColumnView { start: saved.start, ..self.of_rank(&saved.u) }
    }

    fn of_rank_mut<'a>(&self, buffer: &'a TensorMut) -> ColumnViewMut<'a> {
        ColumnViewMut { len: self.a.value.dims()[0], ..ColumnViewMut::all(buffer) }
    }

    /// Computes `drop(x) Aᵀ`: `[N, r]` in the dtype of A, in the first columns of the returned
    /// buffer.
    pub(super) fn down(&self, x: &Tensor, source: DropoutSource) -> Result<Tensor> {
        let u = self.rank_buffer(x.dim(0)?, x.device())?;
        let input = self.input(x, source)?;
        let (input, a) = (ColumnView::all(&input), ColumnView::all(&self.a.value));
        matmul(self.of_rank_mut(&u), input, a, Transpose::Nt, 1.0, Addend::Nothing)?;
        Ok(u.into_tensor())
    }

    /// Adds A's gradient, given that of u, `[N, r]`.
    pub(super) fn add_gradient_of_a(&self, x: &Tensor, du: &Tensor, source: DropoutSource) -> Result<()> {
        let Some(grad) = &self.a.grad else { return Ok(()) };
        let input = self.input(x, source)?;
        let (grad, input) = (ColumnViewMut::all(grad), ColumnView::all(&input));
        matmul(grad, self.of_rank(du), input, Transpose::Tn, 1.0, Addend::Destination)
    }

    /// Adds the gradient through A for `du: [N, r]` to `dx`, or writes it if nothing is added.
    pub(super) fn down_backward(
        &self,
        du: &Tensor,
        (dx, added): (&TensorMut, Addend<'_>),
        source: DropoutSource,
    ) -> Result<()> {
        let through_a = |dst: &TensorMut, added: Addend<'_>| {
            let a = ColumnView::all(&self.a.value);
            matmul(ColumnViewMut::all(dst), self.of_rank(du), a, Transpose::Nn, 1.0, added)
        };
        match self.dropout(source) {
            None => through_a(dx, added),
            Some(module_index) => {
                let branch = empty(dx.dim(0)?, dx.dim(1)?, DType::F32, dx.device())?;
                through_a(&branch, Addend::Nothing)?;
                let branch = dropout(&branch, module_index)?;
                let accumulate = added.place_in(ColumnViewMut::all(dx))?;
                if accumulate { add_into(dx, &branch) } else { copy_into(dx, &branch) }
            }
        }
    }

    /// Returns the gradient of u, `s · dy B`, and adds B's gradient; `dy` is the gradient of `s · u
    /// Bᵀ`.
    pub(super) fn up_backward(&self, saved: &BranchSaved, dy: ColumnView<'_>) -> Result<Tensor> {
        let du = self.rank_buffer(dy.tensor.dim(0)?, dy.tensor.device())?;
        self.up_backward_into(self.of_rank_mut(&du), saved, dy)?;
        Ok(du.into_tensor())
    }

    /// Writes the gradient of u, `s · dy B`, to `du`, and adds B's gradient; `dy` is the gradient
    /// of `s · u Bᵀ`.
    pub(super) fn up_backward_into(
        &self,
        du: ColumnViewMut<'_>,
        saved: &BranchSaved,
        dy: ColumnView<'_>,
    ) -> Result<()> {
        let b = ColumnView::all(&self.b.value);
        matmul(du, dy, b, Transpose::Nn, self.scale, Addend::Nothing)?;
        if let Some(grad) = &self.b.grad {
            let (grad, u) = (ColumnViewMut::all(grad), self.inner(saved));
            matmul(grad, dy, u, Transpose::Tn, self.scale, Addend::Destination)?;
        }
        Ok(())
    }
}

/// Writes `x Wᵀ` with the branch of DoRA to the columns `out`, plus `added`, given its one weight.
pub(super) fn dora_forward(
    base: &BaseWeights<'_>,
    lora: &Lora,
    x: &Tensor,
    out: ColumnViewMut<'_>,
    added: Addend<'_>,
    source: DropoutSource,
) -> Result<BranchSaved> {
    let Some(magnitude) = &lora.magnitude else { return Err(Error::internal("DoRA without a magnitude")) };
    let [values] = base.values[..] else { return Err(Error::internal("DoRA on more than one weight")) };
    let panel;
    let weight = match values {
        // The norm and the products read one panel.
        Weight::Quantized(quantized) if has_kernels(x.device()) => {
            panel = dequantize(&[quantized], x.dtype())?;
            Weight::Dense(&panel)
        }
        weight => weight,
    };
    let base = BaseWeights { values: vec![weight], codes: base.codes.clone() };
    let u = lora.down(x, source)?;
    let b = ColumnView::all(&lora.b.value);
    let mut accumulate = added.place_in(out)?;
    let norm = weight_norm(weight, &lora.a.value, &lora.b.value, lora.scale)?;
    let factor = (&magnitude.value / &norm)?;
    let unscaled = empty(x.dim(0)?, out.len, x.dtype(), x.device())?;
    let z = ColumnViewMut::all(&unscaled);
    let input = lora.input(x, source)?;
    base.multiply(z, ColumnView::all(&input), Transpose::Nt, Addend::Nothing)?;
    if lora.drops(source) {
        let added = Addend::destination_if(accumulate);
        base.multiply(out, ColumnView::all(x), Transpose::Nt, added)?;
        scale_columns(out, z.as_view(), &factor.ones_like()?.neg()?, true)?;
        accumulate = true;
    }
    matmul(z, lora.of_rank(&u), b, Transpose::Nt, lora.scale, Addend::Destination)?;
    scale_columns(out, z.as_view(), &factor, accumulate)?;
    let unscaled = unscaled.into_tensor();
    Ok(BranchSaved { u, start: 0, dora: Some(DoraSaved { unscaled, factor, norm }) })
}

/// Adds the gradients of DoRA's B and m, and returns that of u. Adds the gradient of `dy` through
/// the layer to `dx`, or writes it if nothing is added.
pub(super) fn dora_backward(
    base: &BaseWeights<'_>,
    lora: &Lora,
    saved: &BranchSaved,
    dy: ColumnView<'_>,
    dx: Option<(&TensorMut, Addend<'_>)>,
    source: DropoutSource,
) -> Result<Tensor> {
    let Some(dora) = &saved.dora else { return Err(Error::internal("DoRA without its forward")) };
    if let Some(grad) = lora.magnitude.as_ref().and_then(|m| m.grad.as_ref()) {
        magnitude_backward(grad, dy, &dora.unscaled, &dora.norm)?;
    }
    let scaled = empty(dy.tensor.dim(0)?, dy.len, dy.tensor.dtype(), dy.tensor.device())?;
    scale_columns(ColumnViewMut::all(&scaled), dy, &dora.factor, false)?;
    let du = lora.up_backward(saved, ColumnView::all(&scaled))?;
    if let Some((dx, added)) = dx {
        let to_input = |dst: &TensorMut, dy: ColumnView<'_>, added: Addend<'_>| {
            base.multiply(ColumnViewMut::all(dst), dy, Transpose::Nn, added)
        };
        match lora.dropout(source) {
            None => to_input(dx, ColumnView::all(&scaled), added)?,
            Some(module_index) => {
                to_input(dx, dy, added)?;
                scale_columns(ColumnViewMut::all(&scaled), dy, &dora.factor.ones_like()?.neg()?, true)?;
                let through_z = empty(dx.dim(0)?, dx.dim(1)?, DType::F32, dx.device())?;
                to_input(&through_z, ColumnView::all(&scaled), Addend::Nothing)?;
                add_into(dx, &dropout(&through_z, module_index)?)?;
            }
        }
        lora.down_backward(&du, (dx, Addend::Destination), source)?;
    }
    Ok(du)
}
