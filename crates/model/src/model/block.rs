//! The transformer block of every family, forward and backward.
//!
//! ```text
//! h = x + post?(token_mixer(norm(x)))
//! y = h + post?(channel_mixer(norm(h)))
//! ```
//!
//! In parallel residual plans both mixers read `x`: `y = h + channel_mixer(norm(x))`.
//!
//! `post?` are the second norms of the Gemma families. OLMo 2 has only these, and no `norm`.
//! Granite has a factor on each mixer's output, and Gemma 4 a stored one on `y`. Each mixer has a
//! file below `block/`. [`BlockSaved`] holds the tensors that are expensive to recompute. Backward
//! recomputes norm outputs, which are elementwise, in the pass that computes the gradient of the
//! norm's input. So the gradients of parameters that multiply a norm's output come last
//! (`PendingGradients`).

mod alt_up;
mod alt_up_saved;
mod attention;
mod carried;
mod channel_mixer;
mod experts;
mod gate_cutoff;
mod gated_delta;
mod gated_mlp;
mod latent;
mod laurel;
mod mlp_and_experts;
mod per_layer;
mod plain_mlp;
mod products;
mod saved;
mod shared_expert;
mod short_conv;
mod streams;
mod token_mixer;
mod xielu;

pub use alt_up::AltUpWeights;
pub use attention::{AttentionWeights, KeyValueCache};
pub use carried::{Carried, CarriedBackward, CarriedGradients};
pub use channel_mixer::ChannelMixerWeights;
pub use experts::{ExpertBalance, ExpertWeights, ExpertsWeights};
pub use gated_delta::{DeltaState, GatedDeltaWeights};
pub use gated_mlp::GatedMlpWeights;
pub use latent::{LatentUp, LatentWeights};
pub use laurel::LaurelWeights;
pub use mlp_and_experts::MlpAndExpertsWeights;
pub use per_layer::{PerLayerModelWeights, PerLayerWeights};
pub use plain_mlp::{ActivationWeights, PlainMlpWeights};
pub use saved::{BlockSaved, SavedBytes};
pub use shared_expert::SharedExpertWeights;
pub use short_conv::{ConvState, ShortConvWeights};
pub use streams::StreamEnds;
pub use token_mixer::{BlockCache, TokenMixerWeights};
pub use xielu::XieluWeights;

use std::borrow::Cow;

use candle_core::{DType, Tensor};

use super::linear::MergedLinear;
use super::lora::{AdapterSwitch, BranchContext, DropoutSource};
use super::panels_ahead::PanelsAhead;
use super::rotary_tables::PositionTable;
use super::{ModelConfig, Norm};
use crate::error::{Error, Result};
use crate::ops::attention::Span;
use crate::ops::elementwise::{add, scaled};
use crate::ops::{empty, has_kernels};
use crate::recipe::enums::Attention;
use crate::runtime::rng::RngStream;
use crate::runtime::trace::ReleaseSpan;
use channel_mixer::PendingMixer;
use products::panels_of;
use token_mixer::TokenMixerSaved;

/// The parameters of one block, for one use.
#[derive(Debug, Clone)]
pub struct BlockWeights {
    /// The norms around the token mixer.
    pub token_norms: MixerNorms,
    /// The part that lets a token read others.
    pub token_mixer: TokenMixerWeights,
    /// The norms around the channel mixer.
    pub channel_norms: MixerNorms,
    /// The part that computes each token by itself.
    pub channel_mixer: ChannelMixerWeights,
    /// The part that adds the block's own input, after both mixers.
    pub per_layer: Option<PerLayerWeights>,
    /// The parts of AltUp, in a model with several hidden states.
    pub alt_up: Option<Box<AltUpWeights>>,
    /// Factor on the block's output, `[1]` f32.
    pub output_factor: Option<Tensor>,
}

/// The norms around a mixer.
#[derive(Debug, Clone)]
pub struct MixerNorms {
    /// The norm of the mixer's input.
    pub before: Option<Norm>,
    /// The norm on the mixer's output.
    pub after: Option<Norm>,
    /// Factor on the output, after its norm.
    pub factor: f64,
}

impl MixerNorms {
    /// Returns the mixer's input from that of its half, `x: [N, D]`.
    fn input(&self, config: &ModelConfig, x: &Tensor) -> Result<Tensor> {
        match &self.before {
            Some(before) => before.forward(config, x),
            None => Ok(x.clone()),
        }
    }

    /// Returns the norm of the mixer's output `out: [N, D]`.
    fn output(&self, config: &ModelConfig, out: &Tensor) -> Result<Tensor> {
        match &self.after {
            Some(after) => after.forward(config, out),
            None => Ok(out.clone()),
        }
    }
}

impl BlockWeights {
    /// Returns the linear layers for changes to them.
    fn linears(&mut self) -> impl Iterator<Item = &mut MergedLinear> {
        let mixers = self.token_mixer.linears().into_iter().chain(self.channel_mixer.linears());
        let of_input = self.per_layer.iter_mut().flat_map(PerLayerWeights::linears);
        mixers.chain(of_input).chain(self.alt_up.iter_mut().flat_map(|alt_up| alt_up.linears()))
    }

    /// Also keeps quantized weights in bf16.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn keep_in_bf16(&mut self) -> Result<()> {
        self.linears().try_for_each(MergedLinear::keep_in_bf16)
    }

    /// Multiplies by the frozen weights of linear layers in fp8 from now on, except those of
    /// routers and other gates. With `keeps` their codes are kept.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn multiply_in_fp8(&mut self, keeps: bool) -> Result<()> {
        self.linears().try_for_each(|linear| linear.multiply_in_fp8(keeps))
    }

    /// Returns the block with its quantized weights in bf16 too, if its backward recomputes it from
    /// `x` on a GPU in bf16: the two products of a weight then share its panel. Recomputing
    /// multiplies by `down_proj` only before a norm of its output; without one, it is left out. The
    /// panels of all experts would be too large, so each product of an expert makes its own.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn with_panels(&self, x: &Tensor) -> Result<Option<Self>> {
        if x.dtype() != DType::BF16 || !has_kernels(x.device()) {
            return Ok(None);
        }
        let mut block = self.clone();
        let of_channels = block.channel_mixer.panels(block.channel_norms.after.is_some());
        let of_input = block.per_layer.iter_mut().flat_map(PerLayerWeights::linears);
        let of_streams = block.alt_up.iter_mut().flat_map(|alt_up| alt_up.linears());
        let of_mixers = block.token_mixer.linears().into_iter().chain(of_channels);
        let linears = of_mixers.chain(of_input).chain(of_streams);
        linears.into_iter().try_for_each(MergedLinear::keep_in_bf16)?;
        Ok(Some(block))
    }
}

/// The inputs of a micro-batch that all blocks share.
#[derive(Debug, Clone)]
pub struct BlockContext<'a> {
    /// The sequences of the batch, side by side.
    pub spans: &'a [Span],
    /// One table per rope of the model.
    pub tables: &'a [PositionTable],
    /// Flash or eager.
    pub attention: Attention,
    /// Selects whether the forward uses the adapters.
    pub adapter: AdapterSwitch,
    /// The dropout masks; `None` outside training.
    pub dropout: Option<DropoutContext>,
    /// The loss that balances experts; `None` without it.
    pub balance: Option<&'a ExpertBalance>,
}

/// Names the dropout masks of a micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct DropoutContext {
    /// The stream of (seed, step).
    pub stream: RngStream,
    /// Index in the step's global batch of the micro-batch's first token.
    pub first_token: u64,
}

impl BlockContext<'_> {
    /// Returns the dropout stream of block `layer`; the head uses the number after the last block.
    pub fn source(&self, layer: usize) -> DropoutSource {
        self.dropout.map(|d| (d.stream.part(layer as u64), d.first_token))
    }
}

/// One block in a pass: the inputs of its mixers besides weights and activations.
#[derive(Debug, Clone, Copy)]
struct LayerPass<'a> {
    config: &'a ModelConfig,
    layer: usize,
    context: &'a BlockContext<'a>,
    /// The panels of its products, if they are made ahead.
    panels: Option<&'a PanelsAhead<'a>>,
}

impl<'a> LayerPass<'a> {
    /// Returns the settings of the block's linear layers.
    fn branch(&self) -> BranchContext<'a> {
        BranchContext { adapter: self.context.adapter, source: self.source(), panels: self.panels }
    }

    /// Returns the sequences of `tokens` tokens for a mixer with a state: those of the batch, or
    /// one that `continues` an earlier state.
    fn spans(&self, continues: bool, tokens: usize) -> Cow<'a, [Span]> {
        if continues { vec![Span::sequence(0, tokens)].into() } else { self.context.spans.into() }
    }

    /// Returns the dropout stream of the block's adapters.
    fn source(&self) -> DropoutSource {
        self.context.source(self.layer)
    }
}

/// Computes `x: [N, D]` → `[N, D]` and the tensors that backward needs. Reads the state beside the
/// hidden states and adds to it. With a cache, the tokens follow those in it.
///
/// # Errors
/// Shapes or dtypes do not match, or a tensor operation failed.
pub fn forward(
    config: &ModelConfig,
    layer: usize,
    w: &BlockWeights,
    x: &Tensor,
    context: &BlockContext<'_>,
    carried: &mut Carried,
    cache: Option<&mut BlockCache>,
) -> Result<(Tensor, BlockSaved)> {
    let pass = LayerPass { config, layer, context, panels: None };
    if let Some(model) = w.per_layer.as_ref().and_then(|part| part.model.as_ref()) {
        let rows = carried.per_layer.take().ok_or_else(|| Error::internal("no rows of per-layer inputs"))?;
        carried.per_layer = Some(model.inputs(pass, x, &rows)?);
    }
    forward_from(pass, w, x, carried, cache)
}

/// Works like [`forward`] from a state with the inputs of all blocks.
fn forward_from(
    pass: LayerPass<'_>,
    w: &BlockWeights,
    x: &Tensor,
    carried: &mut Carried,
    cache: Option<&mut BlockCache>,
) -> Result<(Tensor, BlockSaved)> {
    let (mut release, config) = (ReleaseSpan::default(), pass.config);
    let panels = PanelsAhead::new(panels_of(w.products()), x);
    // Generation has its memory for keys and values.
    let pass = LayerPass { panels: cache.is_none().then_some(&panels), ..pass };
    if let Some(alt_up) = &w.alt_up {
        let out = alt_up::forward(pass, w, alt_up, x, (carried, cache))?;
        release.begin();
        return Ok(out);
    }
    let token = token_half(pass, w, x, (carried, cache))?;
    let channel =
        |normed: &Tensor, residual: Option<&Tensor>| w.channel_mixer.forward(pass, normed, residual);
    let h = channel_input(pass, x, &token.y);
    let channel = around_mixer(&w.channel_norms, config, (h, &token.y), channel)?;
    let (y, per_layer) = match &w.per_layer {
        Some(part) => part.forward(pass, channel.y, carried).map(|(y, saved)| (y, Some(saved)))?,
        None => (channel.y, None),
    };
    let saved = BlockSaved {
        x: x.clone(),
        token_mixer: token.saved,
        token_out: token.out,
        h: h.clone(),
        channel_mixer: channel.saved,
        channel_out: channel.out,
        per_layer,
        alt_up: None,
    };
    let y = times_output_factor(w, y)?;
    release.begin();
    Ok((y, saved))
}

/// Computes a block again from its input `x: [N, D]` and the state after the forward, with the bits
/// of [`forward`]. Returns the block's output and the tensors that its backward needs.
///
/// # Errors
/// Shapes or dtypes do not match, or a tensor operation failed.
pub fn forward_again(
    config: &ModelConfig,
    layer: usize,
    w: &BlockWeights,
    x: &Tensor,
    context: &BlockContext<'_>,
    carried: &Carried,
) -> Result<(Tensor, BlockSaved)> {
    let pass = LayerPass { config, layer, context, panels: None };
    // The state stays as the forward has left it: keys and values that this block keeps are in it.
    forward_from(pass, w, x, &mut carried.clone(), None)
}

/// Computes the tensors that the backward of a block needs from its input `x: [N, D]` and the state
/// after the forward, with the bits of [`forward`]. Only a post norm reads the channel mixer's
/// output; without this norm, its last product is not computed.
///
/// # Errors
/// Shapes or dtypes do not match, or a tensor operation failed.
pub fn recompute(
    config: &ModelConfig,
    layer: usize,
    w: &BlockWeights,
    x: &Tensor,
    context: &BlockContext<'_>,
    carried: &Carried,
) -> Result<BlockSaved> {
    if w.channel_norms.after.is_some() || w.per_layer.is_some() {
        return forward_again(config, layer, w, x, context, carried).map(|(_, saved)| saved);
    }
    let mut release = ReleaseSpan::default();
    let panels = PanelsAhead::new(panels_of(w.products_of_recompute()), x);
    let pass = LayerPass { config, layer, context, panels: Some(&panels) };
    let token = token_half(pass, w, x, (&mut carried.clone(), None))?;
    let h = channel_input(pass, x, &token.y);
    let normed = w.channel_norms.input(config, h)?;
    let channel_mixer = w.channel_mixer.recompute(pass, &normed)?;
    let saved = BlockSaved {
        x: x.clone(),
        token_mixer: token.saved,
        token_out: token.out,
        h: h.clone(),
        channel_mixer,
        channel_out: None,
        per_layer: None,
        alt_up: None,
    };
    release.begin();
    Ok(saved)
}

/// Multiplies the block's output, or its gradient, by the stored factor.
fn times_output_factor(w: &BlockWeights, y: Tensor) -> Result<Tensor> {
    match &w.output_factor {
        Some(factor) => Ok(y.broadcast_mul(&factor.to_dtype(y.dtype())?)?),
        None => Ok(y),
    }
}

/// Returns the input of the channel mixer's half: the block's input or the token mixer's half.
fn channel_input<'a>(pass: LayerPass<'_>, x: &'a Tensor, token_half: &'a Tensor) -> &'a Tensor {
    if pass.config.blocks[pass.layer].residual.is_parallel() { x } else { token_half }
}

/// Computes the token mixer's half of a block.
fn token_half(
    pass: LayerPass<'_>,
    w: &BlockWeights,
    x: &Tensor,
    (carried, cache): (&mut Carried, Option<&mut BlockCache>),
) -> Result<HalfOutput<TokenMixerSaved>> {
    around_mixer(&w.token_norms, pass.config, (x, x), |normed, residual| {
        w.token_mixer.forward(pass, normed, residual, cache, carried)
    })
}

/// The result of half of a block's forward.
struct HalfOutput<S> {
    y: Tensor,
    /// The mixer's own output if a norm reads it.
    out: Option<Tensor>,
    saved: S,
}

/// Computes `around + factor · after?(mixer(before?(x)))`. A mixer that gets a residual adds it to
/// its output itself.
fn around_mixer<S>(
    norms: &MixerNorms,
    config: &ModelConfig,
    (x, around): (&Tensor, &Tensor),
    mixer: impl FnOnce(&Tensor, Option<&Tensor>) -> Result<(Tensor, S)>,
) -> Result<HalfOutput<S>> {
    let normed = norms.input(config, x)?;
    match &norms.after {
        None if norms.factor == 1.0 => {
            let (y, saved) = mixer(&normed, Some(around))?;
            Ok(HalfOutput { y, out: None, saved })
        }
        None => {
            let (out, saved) = mixer(&normed, None)?;
            Ok(HalfOutput { y: add(around, &scaled(&out, norms.factor)?)?, out: None, saved })
        }
        Some(after) => {
            let (out, saved) = mixer(&normed, None)?;
            let normed = after.forward(config, &out)?;
            Ok(HalfOutput { y: add(around, &scaled(&normed, norms.factor)?)?, out: Some(out), saved })
        }
    }
}

/// Adds the gradients of the block's trainable parameters, and those of the state beside the hidden
/// states, which later blocks have added to. Returns the gradient of its input; `None` if `need_dx`
/// is false (the first block over a frozen embedding) and no norm needs it.
///
/// # Errors
/// Shapes or dtypes do not match, or a tensor operation failed.
pub fn backward(
    config: &ModelConfig,
    layer: usize,
    w: &BlockWeights,
    saved: &BlockSaved,
    (dy, need_dx): (&Tensor, bool),
    context: &BlockContext<'_>,
    state: &mut CarriedBackward<'_>,
) -> Result<Option<Tensor>> {
    let mut release = ReleaseSpan::default();
    let panels = PanelsAhead::new(panels_of(w.products_of_backward(need_dx)), dy);
    let pass = LayerPass { config, layer, context, panels: Some(&panels) };
    let dx = match &w.alt_up {
        Some(alt_up) => alt_up::backward(pass, (w, alt_up), saved, (dy, need_dx), state)?,
        None => halves_backward(pass, w, saved, (dy, need_dx), state)?,
    };
    let model = w.per_layer.as_ref().and_then(|part| part.model.as_ref());
    let of_inputs = model.map(|model| model.backward(pass, &saved.x, state, need_dx)).transpose()?.flatten();
    let dx = match (dx, of_inputs) {
        (Some(dx), Some(more)) => Some(add(&dx, &more)?),
        (dx, _) => dx,
    };
    release.begin();
    Ok(dx)
}

/// Works like [`backward`] for both halves of a block with one hidden state.
fn halves_backward(
    pass: LayerPass<'_>,
    w: &BlockWeights,
    saved: &BlockSaved,
    (dy, need_dx): (&Tensor, bool),
    state: &mut CarriedBackward<'_>,
) -> Result<Option<Tensor>> {
    let (config, layer) = (pass.config, pass.layer);
    let dy = &times_output_factor(w, dy.clone())?;
    let dy = match (&w.per_layer, &saved.per_layer) {
        (Some(part), Some(saved)) => &part.backward(pass, saved, dy, state)?,
        _ => dy,
    };
    let channel = |half: MixerBackward| w.channel_mixer.backward(pass, &saved.channel_mixer, half);
    let ends = HalfEnds { x: &saved.h, out: saved.channel_out.as_ref() };
    let dh = around_mixer_backward(&w.channel_norms, config, ends, (dy, Some(dy)), true, channel)?;
    let dh = dh.ok_or_else(|| Error::internal("a channel mixer without the gradient of its input"))?;
    let token = |half: MixerBackward| w.token_mixer.backward(pass, &saved.token_mixer, half, state);
    let ends = HalfEnds { x: &saved.x, out: saved.token_out.as_ref() };
    // In a parallel plan the channel mixer does not read the token mixer's output.
    let dtoken = if config.blocks[layer].residual.is_parallel() { dy } else { &dh };
    around_mixer_backward(&w.token_norms, config, ends, (dtoken, Some(&dh)), need_dx, token)
}

/// The input of half of a block, and its mixer's output if a norm read it.
#[derive(Clone, Copy)]
struct HalfEnds<'a> {
    x: &'a Tensor,
    out: Option<&'a Tensor>,
}

/// The arguments of a mixer's backward.
struct MixerBackward {
    /// The gradient of the mixer's output.
    dout: Tensor,
    /// False if nothing reads the gradient of the input.
    need_dx: bool,
}

/// The results of a mixer's backward.
struct MixerGradients<'w> {
    /// The gradient of the mixer's input, if something reads it.
    dinput: Option<Tensor>,
    /// Gradients of parameters that need the mixer's input.
    pending: PendingMixer<'w>,
}

/// Computes the backward of [`around_mixer`] from the gradient `dy` of its result: the gradient of
/// `x` plus `around`, that of other uses of `x` if it has some; `None` if nothing needs it.
fn around_mixer_backward<'w>(
    norms: &MixerNorms,
    config: &ModelConfig,
    HalfEnds { x, out }: HalfEnds<'_>,
    (dy, around): (&Tensor, Option<&Tensor>),
    need_dx: bool,
    mixer: impl FnOnce(MixerBackward) -> Result<MixerGradients<'w>>,
) -> Result<Option<Tensor>> {
    let scaled_dy = scaled(dy, norms.factor)?;
    let dout = match (&norms.after, out) {
        (Some(after), Some(out)) => after.backward(config, out, &scaled_dy, None, None)?,
        _ => scaled_dy,
    };
    let need_dx = need_dx || norms.before.as_ref().is_some_and(Norm::trains);
    let MixerGradients { dinput, pending } = mixer(MixerBackward { dout, need_dx })?;
    let Some(dinput) = dinput else {
        if pending.reads_input() {
            pending.add(&norms.input(config, x)?)?;
        }
        return Ok(None);
    };
    let Some(before) = &norms.before else {
        let dx = match around {
            Some(around) => add(around, &dinput)?,
            None => dinput,
        };
        pending.add(x)?;
        return Ok(Some(dx));
    };
    let (rows, width) = x.dims2()?;
    let normed = || empty(rows, width, x.dtype(), x.device());
    let normed = pending.reads_input().then(normed).transpose()?;
    let dx = before.backward(config, x, &dinput, around, normed.as_ref())?;
    drop(dinput);
    if let Some(normed) = normed {
        pending.add(&normed)?;
    }
    Ok(Some(dx))
}

#[cfg(test)]
mod tests;
