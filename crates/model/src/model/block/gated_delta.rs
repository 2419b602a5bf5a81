//! Gated DeltaNet (Qwen3.5, Qwen3-Next), forward and backward.
//!
//! ```text
//! qkv, z, b, a = in_proj(x)
//! y = out_proj(norm(delta(silu(conv(qkv)), b, a)) · silu(z))
//! ```
//!
//! Convolution and state begin anew at every sequence of the batch. Backward recomputes the
//! convolution and the norm; the recurrence keeps one state per chunk of tokens.

use std::borrow::Cow;
use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use super::{LayerPass, MixerBackward, MixerGradients};
use crate::error::Result;
use crate::model::Param;
use crate::model::composition::DeltaMixer;
use crate::model::linear::{self, LoraSaved, MergedLinear};
use crate::ops::attention::Span;
use crate::ops::causal_conv::{ConvWeight, causal_conv, causal_conv_backward};
use crate::ops::gated_delta::{
    CHUNK, DeltaHeads, DeltaInputs, DeltaOutput, DeltaParamGrads, gated_delta, gated_delta_backward,
};
use crate::ops::gated_norm::{gated_rms_norm, gated_rms_norm_backward};
use crate::ops::{ColumnView, ColumnViewMut, empty};
use crate::runtime::TensorMut;
use crate::runtime::copy::columns_of;

/// The parameters of Gated DeltaNet, for one use.
#[derive(Debug, Clone)]
pub struct GatedDeltaWeights {
    /// The shape of the mixer.
    pub mixer: DeltaMixer,
    /// The first projections.
    pub input: MergedLinear,
    /// The weights of the convolution, `[C, W]`.
    pub conv: Param,
    /// The logarithm of each head's rate of decay, `[V]`.
    pub rate: Param,
    /// The addend of the projected decays, `[V]`.
    pub step: Param,
    /// The gain of the gated norm, `[Dv]`.
    pub norm: Param,
    /// The output projection.
    pub out: MergedLinear,
}

/// The tensors that backward needs: `projected` is `[N, C + V Dv + 2 V]`, in the order of
/// [`InputColumns`].
#[derive(Debug, Clone)]
pub(super) struct GatedDeltaSaved {
    projected: Tensor,
    /// The results of the delta rule; none if backward computes them again.
    pub(super) delta: Option<DeltaOutput>,
    lora_input: LoraSaved,
    lora_out: LoraSaved,
}

impl GatedDeltaSaved {
    /// The names of the results of the delta rule.
    pub(super) const ATTENDED: [&str; 2] = ["output of Gated DeltaNet", "states of Gated DeltaNet"];

    /// Returns the bytes that it holds for `tokens` tokens in `dtype`, by tensor, without adapters.
    /// A sequence keeps the state before each chunk but its first, so shorter sequences keep less.
    pub(super) fn parts(mixer: &DeltaMixer, tokens: usize, dtype: DType) -> [(&'static str, usize); 3] {
        let rows = |width: usize| tokens * width * dtype.size_in_bytes();
        let [output, states] = Self::ATTENDED;
        [
            ("inputs of Gated DeltaNet", rows(mixer.input_width())),
            (output, rows(mixer.heads.value_width())),
            (states, tokens / CHUNK * state_bytes(mixer.heads)),
        ]
    }

    /// Returns all tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let GatedDeltaSaved { projected, delta, lora_input, lora_out } = self;
        let delta = delta.iter().flat_map(|DeltaOutput { out, states }| [out, states]);
        let loras = lora_input.tensors().into_iter().chain(lora_out.tensors());
        std::iter::once(projected).chain(delta).chain(loras).collect()
    }
}

/// Returns the bytes of the states of all heads, in f32.
fn state_bytes(heads: DeltaHeads) -> usize {
    heads.num_value_heads * heads.key_dim * heads.value_dim * DType::F32.size_in_bytes()
}

/// The state after the tokens seen so far, for generation.
#[derive(Debug)]
pub struct DeltaState {
    /// The last inputs of the convolution, `[W − 1, C]`.
    conv: TensorMut,
    /// The states of the heads, `[V, Dk, Dv]` f32.
    heads: TensorMut,
}

impl DeltaState {
    /// Creates the state before the first token.
    pub(super) fn new(mixer: &DeltaMixer, dtype: DType, device: &Device) -> Result<Self> {
        let DeltaHeads { num_value_heads, key_dim, value_dim, .. } = mixer.heads;
        let conv = (mixer.conv_kernel - 1, mixer.heads.conv_width());
        Ok(DeltaState {
            conv: TensorMut::zeros(conv, dtype, device)?,
            heads: TensorMut::zeros((num_value_heads, key_dim, value_dim), DType::F32, device)?,
        })
    }

    /// Returns its bytes.
    pub(super) fn bytes(mixer: &DeltaMixer, dtype: DType) -> usize {
        let conv = (mixer.conv_kernel - 1) * mixer.heads.conv_width() * dtype.size_in_bytes();
        conv + state_bytes(mixer.heads)
    }
}

/// The columns of the projected inputs: q, k and v, then the gates z, b and a.
struct InputColumns {
    qkv: Range<usize>,
    z: Range<usize>,
    b: Range<usize>,
    a: Range<usize>,
}

impl InputColumns {
    fn new(heads: DeltaHeads) -> Self {
        let (conv, value, count) = (heads.conv_width(), heads.value_width(), heads.num_value_heads);
        let b = conv + value;
        InputColumns { qkv: 0..conv, z: conv..b, b: b..b + count, a: b + count..b + 2 * count }
    }
}

/// Returns the columns `range` of `tensor`.
fn view(tensor: &Tensor, range: Range<usize>) -> ColumnView<'_> {
    ColumnView { tensor, start: range.start, len: range.len() }
}

/// Returns the columns `range` of `tensor`, to write them.
fn view_mut(tensor: &TensorMut, range: Range<usize>) -> ColumnViewMut<'_> {
    ColumnViewMut { tensor, start: range.start, len: range.len() }
}

/// The ranges of columns that bring projections by key head into the order of [`InputColumns`], and
/// back.
struct KeyHeadOrder {
    to_parts: Vec<Range<usize>>,
    to_heads: Vec<Range<usize>>,
}

impl KeyHeadOrder {
    /// A key head has q, k, and v and z of its value heads; after all of these come b and a of its
    /// value heads.
    fn new(heads: DeltaHeads) -> Self {
        let DeltaHeads { num_key_heads, num_value_heads, key_dim, value_dim } = heads;
        let of_key = num_value_heads / num_key_heads;
        let (keys, values) = (key_dim, of_key * value_dim);
        let columns = InputColumns::new(heads);
        let widths = [keys, keys, values, values, of_key, of_key];
        let parts =
            [0, heads.key_width(), 2 * heads.key_width(), columns.z.start, columns.b.start, columns.a.start];
        let qkvz = 2 * (keys + values);
        // The first column of part `part` of a key head, in the order by key head.
        let by_head = |part: usize, head: usize| match part {
            0..4 => head * qkvz + widths[..part].iter().sum::<usize>(),
            _ => num_key_heads * qkvz + head * 2 * of_key + (part - 4) * of_key,
        };
        let range = |start: usize, part: usize| start..start + widths[part];
        let to_parts = (0..6).flat_map(|part| (0..num_key_heads).map(move |head| (part, head)));
        let heads_first = |parts: Range<usize>| {
            (0..num_key_heads).flat_map(move |head| parts.clone().map(move |part| (part, head)))
        };
        let to_heads = heads_first(0..4).chain(heads_first(4..6));
        KeyHeadOrder {
            to_parts: to_parts.map(|(part, head)| range(by_head(part, head), part)).collect(),
            to_heads: to_heads.map(|(part, head)| range(parts[part] + head * widths[part], part)).collect(),
        }
    }
}

impl GatedDeltaWeights {
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
        state: Option<&mut DeltaState>,
    ) -> Result<(Tensor, GatedDeltaSaved)> {
        let (mut projected, lora_input) = linear::forward(&self.input, x, None, pass.branch())?;
        if self.mixer.by_key_head {
            projected = columns_of(&projected, &KeyHeadOrder::new(self.mixer.heads).to_parts)?;
        }
        let spans = pass.spans(state.is_some(), x.dim(0)?);
        let delta = self.delta(&projected, &spans, state.as_deref())?;
        let normed = self.normed(pass, &projected, &delta)?;
        let (y, lora_out) = linear::forward(&self.out, &normed, residual, pass.branch())?;
        Ok((y, GatedDeltaSaved { projected, delta: Some(delta), lora_input, lora_out }))
    }

    /// Convolves the projected inputs and applies the delta rule to them.
    fn delta(&self, projected: &Tensor, spans: &[Span], state: Option<&DeltaState>) -> Result<DeltaOutput> {
        let columns = InputColumns::new(self.mixer.heads);
        let conv_state = state.map(|state| &state.conv);
        let qkv = causal_conv(view(projected, columns.qkv), self.conv(), spans, conv_state)?;
        let inputs = self.inputs(projected, &qkv);
        gated_delta(inputs, self.mixer.heads, spans, state.map(|state| &state.heads))
    }

    fn conv(&self) -> ConvWeight<'_> {
        ConvWeight::silu(&self.conv.value)
    }

    /// Returns the inputs of the delta rule, of the convolved `qkv`.
    fn inputs<'a>(&'a self, projected: &'a Tensor, qkv: &'a Tensor) -> DeltaInputs<'a> {
        let columns = InputColumns::new(self.mixer.heads);
        DeltaInputs {
            qkv,
            a: view(projected, columns.a),
            b: view(projected, columns.b),
            a_log: &self.rate.value,
            dt_bias: &self.step.value,
        }
    }

    /// Returns the gated norm of the delta rule's output.
    fn normed(&self, pass: LayerPass<'_>, projected: &Tensor, delta: &DeltaOutput) -> Result<Tensor> {
        let z = view(projected, InputColumns::new(self.mixer.heads).z);
        gated_rms_norm(&delta.out, z, &self.norm.value, pass.config.norm.eps)
    }

    /// Adds the gradients of the parameters that do not need the input. Returns that of the input,
    /// if something reads it.
    pub(super) fn backward(
        &self,
        pass: LayerPass<'_>,
        saved: &GatedDeltaSaved,
        MixerBackward { dout, need_dx }: MixerBackward,
    ) -> Result<MixerGradients<'_>> {
        let (branch, projected) = (pass.branch(), &saved.projected);
        let (dnormed, pending) = linear::backward(&self.out, &saved.lora_out, &dout, branch)?;
        let delta = match &saved.delta {
            Some(delta) => Cow::Borrowed(delta),
            None => Cow::Owned(self.delta(projected, pass.context.spans, None)?),
        };
        if pending.reads_input() {
            pending.add(&self.normed(pass, projected, &delta)?)?;
        }
        drop(dout);
        let mut dprojected = self.backward_inside(pass, projected, &delta, dnormed)?;
        if self.mixer.by_key_head {
            dprojected = columns_of(&dprojected, &KeyHeadOrder::new(self.mixer.heads).to_heads)?;
        }
        let (saved, draw) = (&saved.lora_input, TensorMut::new(dprojected));
        let (dinput, pending) = linear::backward_first(&self.input, saved, &draw, branch, need_dx)?;
        Ok(MixerGradients { dinput, pending: pending.into() })
    }

    /// Returns the gradient of the projected inputs from that of the gated norm's output.
    fn backward_inside(
        &self,
        pass: LayerPass<'_>,
        projected: &Tensor,
        delta: &DeltaOutput,
        dnormed: Tensor,
    ) -> Result<Tensor> {
        let (spans, columns) = (pass.context.spans, InputColumns::new(self.mixer.heads));
        let (rows, width) = projected.dims2()?;
        let d = empty(rows, width, projected.dtype(), projected.device())?;
        let (z, dz) = (view(projected, columns.z.clone()), view_mut(&d, columns.z));
        let (norm, eps) = (&self.norm, pass.config.norm.eps);
        let dout =
            gated_rms_norm_backward(&delta.out, z, &norm.value, &dnormed, norm.grad.as_ref(), eps, dz)?;
        drop(dnormed);
        let raw_qkv = view(projected, columns.qkv.clone());
        let qkv = causal_conv(raw_qkv, self.conv(), spans, None)?;
        let grads = DeltaParamGrads { a_log: self.rate.grad.as_ref(), dt_bias: self.step.grad.as_ref() };
        let (da, db) = (view_mut(&d, columns.a), view_mut(&d, columns.b));
        let inputs = self.inputs(projected, &qkv);
        let dqkv = gated_delta_backward(inputs, delta, &dout, self.mixer.heads, spans, grads, da, db)?;
        drop((qkv, dout));
        let dconv = self.conv.grad.as_ref();
        causal_conv_backward(raw_qkv, self.conv(), &dqkv, spans, dconv, view_mut(&d, columns.qkv))?;
        Ok(d.into_tensor())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Value heads 2 and 3 belong to key head 1.
    #[test]
    fn columns_by_key_head_and_back() -> Result<()> {
        let heads = DeltaHeads { num_key_heads: 2, num_value_heads: 4, key_dim: 2, value_dim: 1 };
        let order = KeyHeadOrder::new(heads);
        let names = "q00 q01 k00 k01 v0 v1 z0 z1 q10 q11 k10 k11 v2 v3 z2 z3 b0 b1 a0 a1 b2 b3 a2 a3";
        let names: Vec<&str> = names.split(' ').collect();
        let numbers: Vec<f32> = (0..names.len()).map(|i| i as f32).collect();
        let by_head = Tensor::from_vec(numbers.clone(), (1, names.len()), &Device::Cpu)?;
        let by_part = columns_of(&by_head, &order.to_parts)?;
        let indices: Vec<f32> = by_part.flatten_all()?.to_vec1()?;
        let columns: Vec<&str> = indices.iter().map(|i| names[*i as usize]).collect();
        let wanted = "q00 q01 q10 q11 k00 k01 k10 k11 v0 v1 v2 v3 z0 z1 z2 z3 b0 b1 b2 b3 a0 a1 a2 a3";
        assert_eq!(columns, wanted.split(' ').collect::<Vec<_>>());
        let back: Vec<f32> = columns_of(&by_part, &order.to_heads)?.flatten_all()?.to_vec1()?;
        assert_eq!(back, numbers);
        Ok(())
    }
}
