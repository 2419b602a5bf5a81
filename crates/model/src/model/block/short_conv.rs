//! A short convolution between two gates (LFM2), forward and backward.
//!
//! ```text
//! b, c, x = in_proj(x)
//! y = out_proj(c · conv(b · x))
//! ```
//!
//! The convolution begins anew at every sequence of the batch, and may add a bias. Backward
//! recomputes it and both products, which are elementwise.

use candle_core::{DType, Device, Tensor};

use super::{LayerPass, MixerBackward, MixerGradients};
use crate::error::Result;
use crate::model::Param;
use crate::model::composition::ShortConvMixer;
use crate::model::linear::{self, LoraSaved, MergedLinear};
use crate::ops::attention::Span;
use crate::ops::causal_conv::{ConvWeight, causal_conv, causal_conv_backward};
use crate::ops::matmul::{add_bias, sum_rows};
use crate::ops::{ColumnView, ColumnViewMut, empty};
use crate::runtime::TensorMut;
use crate::runtime::copy::columns_of;

/// The parameters of a short convolution, for one use.
#[derive(Debug, Clone)]
pub struct ShortConvWeights {
    /// The shape of the mixer.
    pub mixer: ShortConvMixer,
    /// The projection to both gates and the input, `in_proj`.
    pub input: MergedLinear,
    /// The weights of the convolution, `[C, W]`.
    pub conv: Param,
    /// The bias of the convolution, `[C]`, if it has one.
    pub bias: Option<Param>,
    /// The output projection, `out_proj`.
    pub out: MergedLinear,
}

/// The tensors that backward needs: `projected` is `[N, 3 C]`, b, c and x.
#[derive(Debug, Clone)]
pub(super) struct ShortConvSaved {
    projected: Tensor,
    lora_input: LoraSaved,
    lora_out: LoraSaved,
}

impl ShortConvSaved {
    /// Returns the bytes that it holds for `tokens` tokens in `dtype`, by tensor, without adapters.
    pub(super) fn parts(mixer: &ShortConvMixer, tokens: usize, dtype: DType) -> [(&'static str, usize); 1] {
        [("gates and input of a convolution", tokens * mixer.input_width() * dtype.size_in_bytes())]
    }

    /// Returns all tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let ShortConvSaved { projected, lora_input, lora_out } = self;
        std::iter::once(projected).chain(lora_input.tensors()).chain(lora_out.tensors()).collect()
    }
}

/// The inputs of a convolution before the next token, `[W − 1, C]`, for generation.
#[derive(Debug)]
pub struct ConvState(TensorMut);

impl ConvState {
    /// Creates the state before the first token.
    pub(super) fn new(mixer: &ShortConvMixer, dtype: DType, device: &Device) -> Result<Self> {
        Ok(ConvState(TensorMut::zeros((mixer.kernel - 1, mixer.channels), dtype, device)?))
    }

    /// Returns its bytes.
    pub(super) fn bytes(mixer: &ShortConvMixer, dtype: DType) -> usize {
        (mixer.kernel - 1) * mixer.channels * dtype.size_in_bytes()
    }
}

/// The gates and the input of a convolution, `[N, C]` each.
struct GatedInputs {
    b: Tensor,
    c: Tensor,
    x: Tensor,
}

impl GatedInputs {
    fn of(projected: &Tensor) -> Result<Self> {
        let channels = projected.dim(1)? / 3;
        let part =
            |i: usize| columns_of(projected, std::slice::from_ref(&(i * channels..(i + 1) * channels)));
        Ok(GatedInputs { b: part(0)?, c: part(1)?, x: part(2)? })
    }
}

impl ShortConvWeights {
    /// Returns the linear layers for changes to them.
    pub(super) fn linears(&mut self) -> [&mut MergedLinear; 2] {
        [&mut self.input, &mut self.out]
    }

    /// Computes `x: [N, D]`, normed → `[N, D]` plus `residual`, and the tensors that backward
    /// needs. With a state, the tokens follow those before it.
    pub(super) fn forward(
        &self,
        pass: LayerPass<'_>,
        x: &Tensor,
        residual: Option<&Tensor>,
        state: Option<&mut ConvState>,
    ) -> Result<(Tensor, ShortConvSaved)> {
        let (projected, lora_input) = linear::forward(&self.input, x, None, pass.branch())?;
        let spans = pass.spans(state.is_some(), x.dim(0)?);
        let GatedInputs { b, c, x } = GatedInputs::of(&projected)?;
        let gated = (b * x)?;
        let convolved = self.convolved(&gated, &spans, state.as_ref().map(|state| &state.0))?;
        drop(gated);
        let product = (c * convolved)?;
        let (y, lora_out) = linear::forward(&self.out, &product, residual, pass.branch())?;
        Ok((y, ShortConvSaved { projected, lora_input, lora_out }))
    }

    /// Adds the gradients of the parameters that do not need the input. Returns that of the input,
    /// if something reads it.
    pub(super) fn backward(
        &self,
        pass: LayerPass<'_>,
        saved: &ShortConvSaved,
        MixerBackward { dout, need_dx }: MixerBackward,
    ) -> Result<MixerGradients<'_>> {
        let (branch, spans) = (pass.branch(), pass.context.spans);
        let (dproduct, pending) = linear::backward(&self.out, &saved.lora_out, &dout, branch)?;
        drop(dout);
        let GatedInputs { b, c, x } = GatedInputs::of(&saved.projected)?;
        let gated = (&b * &x)?;
        let convolved = self.convolved(&gated, spans, None)?;
        if pending.reads_input() {
            pending.add(&(&c * &convolved)?)?;
        }
        let (dc, dconvolved) = ((&dproduct * convolved)?, (dproduct * c)?);
        if let Some(grad) = self.bias.as_ref().and_then(|bias| bias.grad.as_ref()) {
            sum_rows(grad, ColumnView::all(&dconvolved))?;
        }
        let (rows, channels) = gated.dims2()?;
        let dgated = empty(rows, channels, gated.dtype(), gated.device())?;
        let (view, to, dconv) =
            (ColumnView::all(&gated), ColumnViewMut::all(&dgated), self.conv.grad.as_ref());
        causal_conv_backward(view, self.conv(), &dconvolved, spans, dconv, to)?;
        drop((gated, dconvolved));
        let dgated = dgated.into_tensor();
        let draw = TensorMut::new(Tensor::cat(&[(&dgated * x)?, dc, (dgated * b)?], 1)?);
        let (dinput, pending) =
            linear::backward_first(&self.input, &saved.lora_input, &draw, branch, need_dx)?;
        Ok(MixerGradients { dinput, pending: pending.into() })
    }

    /// Returns the convolution of `gated: [N, C]`, with its bias.
    fn convolved(&self, gated: &Tensor, spans: &[Span], state: Option<&TensorMut>) -> Result<Tensor> {
        let convolved = causal_conv(ColumnView::all(gated), self.conv(), spans, state)?;
        let Some(bias) = &self.bias else { return Ok(convolved) };
        let convolved = TensorMut::new(convolved);
        add_bias(ColumnViewMut::all(&convolved), &bias.value)?;
        Ok(convolved.into_tensor())
    }

    fn conv(&self) -> ConvWeight<'_> {
        ConvWeight::plain(&self.conv.value)
    }
}
