//! A block that computes one of several hidden states (AltUp, arXiv 2301.13310; Gemma 3n), forward
//! and backward.
//!
//! ```text
//! p_i = x_i + Σ_k a_ik x_k                 a = prediction(route(x_0))
//! h   = (p_0 + post(token_mixer(n)) + n + laurel(n)) / √2         n = norm(p_0)
//! z   = h + post(channel_mixer(norm(h)))
//! c_i = p_i + (1 + b_i) (z − p_0)          b = correction(route(z))
//! y_0 = c_0,  y_i = c_i + per_layer(scale · c_0)
//! ```
//!
//! `route(x) = tanh(router(norm(x) / D))`. The streams `x_i` stand side by side: `[N, S D]`. The
//! first block makes them of the embeddings (`streams`), the last one makes one of them. Sums over
//! streams are in f32. Backward computes the outputs of `c` and of norms again.

use candle_core::{DType, Tensor};

use super::alt_up_saved::{AltUpSaved, Factors};
use super::carried::{Carried, CarriedBackward};
use super::laurel::LaurelWeights;
use super::streams::{StreamEnds, join, split};
use super::{
    BlockCache, BlockSaved, BlockWeights, HalfEnds, LayerPass, MixerBackward, MixerGradients, Norm,
    PerLayerWeights, around_mixer, around_mixer_backward,
};
use crate::error::{Error, Result};
use crate::model::linear::{self, MergedLinear, PendingGradients};
use crate::model::lora::BranchContext;
use crate::model::{ModelConfig, Param};
use crate::ops::elementwise::{add, scaled};
use crate::ops::matmul::sum_rows;
use crate::ops::{ColumnView, empty};
use crate::runtime::copy::converted;

/// Factor on the sum of the half of attention and of Laurel's.
const HALF_ROOT: f64 = std::f64::consts::FRAC_1_SQRT_2;

/// The parameters of AltUp in a block.
#[derive(Debug, Clone)]
pub struct AltUpWeights {
    /// The number of streams, S.
    pub streams: usize,
    /// The projection to a value for each stream, `[S, D]`.
    pub router: MergedLinear,
    /// The norm before it.
    pub router_norm: Norm,
    /// The projection to the factors of predictions, `[S S, S]`.
    pub prediction: MergedLinear,
    /// The projection to the factors of corrections, `[S, S]`.
    pub correction: MergedLinear,
    /// The factor on the corrected stream before the per-layer input, `[D]`.
    pub output_scale: Param,
    /// The low-rank branch beside attention.
    pub laurel: LaurelWeights,
    /// The first block's projections to streams and the last one's from them.
    pub ends: StreamEnds,
}

/// Gradients of the router that wait for its second use.
struct PendingRouter<'w> {
    pending: PendingGradients<'w>,
    /// The router's input, `[N, D]`.
    inputs: Tensor,
}

/// Computes a block with AltUp, like [`forward`](super::forward).
pub(super) fn forward(
    pass: LayerPass<'_>,
    w: &BlockWeights,
    alt_up: &AltUpWeights,
    x: &Tensor,
    (carried, cache): (&mut Carried, Option<&mut BlockCache>),
) -> Result<(Tensor, BlockSaved)> {
    let (config, dtype) = (pass.config, x.dtype());
    let (predicted, predict) = alt_up.predict(pass, &alt_up.ends.streams(pass, x, alt_up.streams)?, dtype)?;
    let active = first_of(&predicted, config)?;
    let normed = w.token_norms.input(config, &active)?;
    let (of_laurel, laurel) = alt_up.laurel.forward(pass, &normed)?;
    let (token_out, token_mixer) = w.token_mixer.forward(pass, &normed, None, cache, carried)?;
    let attended = add(&active, &w.token_norms.output(config, &token_out)?)?;
    let h = scaled(&add(&attended, &add(&normed, &of_laurel)?)?, HALF_ROOT)?;
    let mlp = |normed: &Tensor, residual: Option<&Tensor>| w.channel_mixer.forward(pass, normed, residual);
    let channel = around_mixer(&w.channel_norms, config, (&h, &h), mlp)?;
    let activated = channel.y;
    let correct = alt_up.factors(pass, &activated, &alt_up.correction)?;
    let mut streams = corrected(&split(&predicted, alt_up.streams)?, &activated, &correct)?;
    let first = converted(&alt_up.scaled_output(&streams[0])?, dtype)?;
    let (of_input, per_layer) = per_layer_of(w)?.branch(pass, first, carried)?;
    let of_input = converted(&of_input, DType::F32)?;
    for stream in &mut streams[1..] {
        *stream = (&*stream + &of_input)?;
    }
    let y = join(&streams, dtype)?;
    let (y, last) = if alt_up.ends.is_last() {
        (alt_up.ends.one_of(pass, &y, alt_up.streams)?, Some(y))
    } else {
        (y, None)
    };
    let alt_up = AltUpSaved { predicted, predict, activated, correct, laurel, last };
    let saved = BlockSaved {
        x: x.clone(),
        token_mixer,
        token_out: Some(token_out),
        h,
        channel_mixer: channel.saved,
        channel_out: channel.out,
        per_layer: Some(per_layer),
        alt_up: Some(alt_up),
    };
    Ok((y, saved))
}

/// Computes the backward of a block with AltUp, like [`backward`](super::backward).
pub(super) fn backward(
    pass: LayerPass<'_>,
    (w, alt_up): (&BlockWeights, &AltUpWeights),
    saved: &BlockSaved,
    (dy, need_dx): (&Tensor, bool),
    state: &mut CarriedBackward<'_>,
) -> Result<Option<Tensor>> {
    let missing = || Error::internal("the saved tensors are of a block without AltUp");
    let saved_streams = saved.alt_up.as_ref().ok_or_else(missing)?;
    let (config, dtype, count) = (pass.config, dy.dtype(), alt_up.streams);
    let mut dstreams = match &saved_streams.last {
        Some(last) => alt_up.ends.one_of_backward(pass, last, dy, count)?,
        None => split(dy, count)?,
    };
    let predicted = split(&saved_streams.predicted, count)?;
    let first = {
        let dbranch = converted(&sum_of(&dstreams[1..])?, dtype)?;
        let saved = saved.per_layer.as_ref().ok_or_else(missing)?;
        per_layer_of(w)?.branch_backward(pass, saved, &dbranch, state)?
    };
    let first = converted(&first, DType::F32)?;
    alt_up.add_scale_gradient(&predicted, saved_streams, &first)?;
    dstreams[0] = (&dstreams[0] + alt_up.scaled_output(&first)?)?;
    let (dactivated, router) = alt_up.correct_backward(pass, &predicted, saved_streams, &mut dstreams)?;
    let channel = |half: MixerBackward| w.channel_mixer.backward(pass, &saved.channel_mixer, half);
    let ends = HalfEnds { x: &saved.h, out: saved.channel_out.as_ref() };
    let around = (&dactivated, Some(&dactivated));
    let dh = around_mixer_backward(&w.channel_norms, config, ends, around, true, channel)?;
    let dh = dh.ok_or_else(|| Error::internal("a channel mixer without the gradient of its input"))?;
    let dactive = token_half_backward(pass, (w, alt_up), saved, saved_streams, &dh, state)?;
    dstreams[0] = (&dstreams[0] + converted(&dactive, DType::F32)?)?;
    let streams = alt_up.ends.streams(pass, &saved.x, count)?;
    let dstreams = alt_up.predict_backward(pass, &streams, saved_streams, (&dstreams, dtype), router)?;
    alt_up.ends.streams_backward(pass, &saved.x, &dstreams, need_dx)
}

/// Returns the gradient of the active stream, `[N, D]`, through attention and Laurel.
fn token_half_backward(
    pass: LayerPass<'_>,
    (w, alt_up): (&BlockWeights, &AltUpWeights),
    saved: &BlockSaved,
    saved_streams: &AltUpSaved,
    dh: &Tensor,
    state: &mut CarriedBackward<'_>,
) -> Result<Tensor> {
    let config = pass.config;
    let dhalf = scaled(dh, HALF_ROOT)?;
    let (Some(before), Some(after), Some(out)) =
        (&w.token_norms.before, &w.token_norms.after, &saved.token_out)
    else {
        return Err(Error::internal("a block with AltUp without its norms"));
    };
    let half = MixerBackward { dout: after.backward(config, out, &dhalf, None, None)?, need_dx: true };
    let MixerGradients { dinput, pending } = w.token_mixer.backward(pass, &saved.token_mixer, half, state)?;
    let dinput = dinput.ok_or_else(|| Error::internal("a token mixer without the gradient of its input"))?;
    let (of_laurel, pending_laurel) = alt_up.laurel.backward(pass, &saved_streams.laurel, &dhalf)?;
    let dnormed = add(&add(&dinput, &of_laurel)?, &dhalf)?;
    let active = first_of(&saved_streams.predicted, config)?;
    let (rows, width) = active.dims2()?;
    let normed = empty(rows, width, active.dtype(), active.device())?;
    let dactive = before.backward(config, &active, &dnormed, Some(&dhalf), Some(&normed))?;
    pending.add(&normed)?;
    pending_laurel.add(&normed)?;
    Ok(dactive)
}

impl AltUpWeights {
    /// Returns the linear layers for changes to them.
    pub(super) fn linears(&mut self) -> impl Iterator<Item = &mut MergedLinear> {
        let AltUpWeights { router, prediction, correction, laurel, ends, .. } = self;
        [router, prediction, correction].into_iter().chain(laurel.linears()).chain(ends.linears())
    }

    /// Returns the router's input for `x: [N, D]`.
    fn router_inputs(&self, config: &ModelConfig, x: &Tensor) -> Result<Tensor> {
        scaled(&self.router_norm.forward(config, x)?, 1.0 / config.hidden_size as f64)
    }

    /// Returns the factors that `layer` makes of what the router says of `x: [N, D]`.
    fn factors(&self, pass: LayerPass<'_>, x: &Tensor, layer: &MergedLinear) -> Result<Factors> {
        let inputs = self.router_inputs(pass.config, x)?;
        let (raw, lora_router) = linear::forward(&self.router, &inputs, None, alone(pass))?;
        let routed = converted(&converted(&raw, DType::F32)?.tanh()?, x.dtype())?;
        let (factors, lora_factors) = linear::forward(layer, &routed, None, alone(pass))?;
        Ok(Factors { routed, factors, lora_router, lora_factors })
    }

    /// Returns the gradient of the router's own input `x: [N, D]`, from that of the factors, and
    /// the router's gradients that need its input.
    fn factors_backward<'w>(
        &'w self,
        pass: LayerPass<'_>,
        (x, layer): (&Tensor, &'w MergedLinear),
        saved: &Factors,
        dfactors: &Tensor,
    ) -> Result<(Tensor, PendingRouter<'w>)> {
        let (config, routed) = (pass.config, &saved.routed);
        let (drouted, pending) = linear::backward(layer, &saved.lora_factors, dfactors, alone(pass))?;
        pending.add(routed)?;
        let tanh = converted(routed, DType::F32)?;
        let slope = tanh.sqr()?.affine(-1.0, 1.0)?;
        let draw = converted(&(converted(&drouted, DType::F32)? * slope)?, routed.dtype())?;
        let (dinputs, pending) = linear::backward(&self.router, &saved.lora_router, &draw, alone(pass))?;
        let dnormed = scaled(&dinputs, 1.0 / config.hidden_size as f64)?;
        let dx = self.router_norm.backward(config, x, &dnormed, None, None)?;
        Ok((dx, PendingRouter { pending, inputs: self.router_inputs(config, x)? }))
    }

    /// Returns the predictions of the f32 `streams`, side by side in `dtype`.
    fn predict(&self, pass: LayerPass<'_>, streams: &[Tensor], dtype: DType) -> Result<(Tensor, Factors)> {
        let saved = self.factors(pass, &converted(&streams[0], dtype)?, &self.prediction)?;
        let factors = columns(&saved.factors)?;
        let predicted = streams.iter().zip(factors.chunks(self.streams)).map(|(stream, factors)| {
            let mut sum = stream.clone();
            for (factor, other) in factors.iter().zip(streams) {
                sum = (sum + other.broadcast_mul(factor)?)?;
            }
            Ok(sum)
        });
        Ok((join(&predicted.collect::<Result<Vec<_>>>()?, dtype)?, saved))
    }

    /// Returns the gradients of the f32 `streams` from those of the predictions.
    fn predict_backward(
        &self,
        pass: LayerPass<'_>,
        streams: &[Tensor],
        saved: &AltUpSaved,
        (dpredicted, dtype): (&[Tensor], DType),
        of_correction: PendingRouter<'_>,
    ) -> Result<Vec<Tensor>> {
        let count = self.streams;
        let factors = columns(&saved.predict.factors)?;
        let mut dfactors = Vec::with_capacity(count * count);
        let mut dstreams = dpredicted.to_vec();
        for (i, d) in dpredicted.iter().enumerate() {
            for (k, stream) in streams.iter().enumerate() {
                dfactors.push((d * stream)?.sum_keepdim(1)?);
                dstreams[k] = (&dstreams[k] + d.broadcast_mul(&factors[i * count + k])?)?;
            }
        }
        let dfactors = join(&dfactors, dtype)?;
        let x = converted(&streams[0], dtype)?;
        let (dx, router) = self.factors_backward(pass, (&x, &self.prediction), &saved.predict, &dfactors)?;
        router.pending.add_both(&router.inputs, of_correction.pending, &of_correction.inputs)?;
        dstreams[0] = (&dstreams[0] + converted(&dx, DType::F32)?)?;
        Ok(dstreams)
    }

    /// Turns `dstreams`, the gradients of the corrected streams, into those of the predicted ones.
    /// Returns that of the mixers' output, `[N, D]`.
    fn correct_backward(
        &self,
        pass: LayerPass<'_>,
        predicted: &[Tensor],
        saved: &AltUpSaved,
        dstreams: &mut [Tensor],
    ) -> Result<(Tensor, PendingRouter<'_>)> {
        let innovation = innovation(predicted, &saved.activated)?;
        let factors = columns(&saved.correct.factors)?;
        let dfactors = dstreams.iter().map(|d| Ok((d * &innovation)?.sum_keepdim(1)?));
        let dfactors = join(&dfactors.collect::<Result<Vec<_>>>()?, saved.activated.dtype())?;
        let parts = dstreams.iter().zip(&factors);
        let parts = parts.map(|(d, factor)| Ok(d.broadcast_mul(&factor.affine(1.0, 1.0)?)?));
        let dinnovation = sum_of(&parts.collect::<Result<Vec<_>>>()?)?;
        dstreams[0] = (&dstreams[0] - &dinnovation)?;
        let inputs = (&saved.activated, &self.correction);
        let (of_router, pending) = self.factors_backward(pass, inputs, &saved.correct, &dfactors)?;
        let dactivated = (dinnovation + converted(&of_router, DType::F32)?)?;
        Ok((converted(&dactivated, saved.activated.dtype())?, pending))
    }

    /// Returns `x: [N, D]` f32 times the factor on the corrected stream.
    fn scaled_output(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.broadcast_mul(&converted(&self.output_scale.value, DType::F32)?)?)
    }

    /// Adds the gradient of the factor on the corrected stream, from that of its product.
    fn add_scale_gradient(&self, predicted: &[Tensor], saved: &AltUpSaved, d: &Tensor) -> Result<()> {
        let Some(grad) = &self.output_scale.grad else { return Ok(()) };
        let first = corrected(&predicted[..1], &saved.activated, &saved.correct)?;
        sum_rows(grad, ColumnView::all(&(&first[0] * d)?))
    }
}

/// Returns the settings of AltUp's linear layers, which make their panels themselves.
fn alone(pass: LayerPass<'_>) -> BranchContext<'_> {
    BranchContext { panels: None, ..pass.branch() }
}

/// Returns the part of a block's input of its own, which every block with AltUp has.
fn per_layer_of(w: &BlockWeights) -> Result<&PerLayerWeights> {
    w.per_layer.as_ref().ok_or_else(|| Error::internal("a block with AltUp without a per-layer input"))
}

/// Returns the first of the streams side by side, `[N, D]`.
fn first_of(streams: &Tensor, config: &ModelConfig) -> Result<Tensor> {
    Ok(streams.narrow(1, 0, config.hidden_size)?.contiguous()?)
}

/// Returns `activated` minus the prediction of the first stream, f32.
fn innovation(predicted: &[Tensor], activated: &Tensor) -> Result<Tensor> {
    Ok((converted(activated, DType::F32)? - &predicted[0])?)
}

/// Returns the corrections of f32 streams, f32.
fn corrected(predicted: &[Tensor], activated: &Tensor, correct: &Factors) -> Result<Vec<Tensor>> {
    let innovation = innovation(predicted, activated)?;
    let streams = predicted.iter().zip(columns(&correct.factors)?);
    let streams = streams.map(|(x, factor)| Ok((innovation.broadcast_mul(&factor.affine(1.0, 1.0)?)? + x)?));
    streams.collect()
}

/// Returns each column of `x: [N, C]`, `[N, 1]` f32.
fn columns(x: &Tensor) -> Result<Vec<Tensor>> {
    split(x, x.dim(1)?)
}

/// Returns the sum of tensors of one shape.
fn sum_of(parts: &[Tensor]) -> Result<Tensor> {
    let (first, others) = parts.split_first().ok_or_else(|| Error::internal("a sum of nothing"))?;
    others.iter().try_fold(first.clone(), |sum, part| Ok((sum + part)?))
}
