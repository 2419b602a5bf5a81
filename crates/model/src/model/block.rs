//! The transformer block of every family, forward and backward.
//!
//! ```text
//! h = x + post?(o_proj(attention(rope(norm?(qkv_proj(norm(x)))))))
//! y = h + post?(down_proj(act(gate) · up))          gate, up = gate_up_proj(norm(h))
//! ```
//!
//! `post?` are the second norms of the Gemma families, `norm?` the per-head norms of qwen3 and gemma3. [`BlockSaved`]
//! holds what cannot be had again cheaply: the projections and the attention output. Norm outputs, rotated heads and
//! the gated product are made again in backward, elementwise.

use candle_core::{DType, Device, Tensor};

use super::layout::{BlockLayout, BlockModule};
use super::linear::{self, LoraSaved, MergedLinear};
use super::lora::{AdapterSwitch, BranchContext, BranchSaved, DropoutSource, LoraShape};
use super::{ModelConfig, Param};
use crate::error::Result;
use crate::ops::ColumnView;
use crate::ops::attention::{AttentionOutput, Qkv, Span, attention, attention_backward};
use crate::ops::elementwise::add;
use crate::ops::glu::{glu, glu_backward};
use crate::ops::rms_norm::{NormKind, rms_norm, rms_norm_backward};
use crate::ops::rotary::{QkNorm, RotaryTable, rotary, rotary_backward};
use crate::recipe::enums::Attention;
use crate::runtime::TensorMut;
use crate::runtime::rng::RngStream;
use crate::runtime::trace::ReleaseSpan;

/// The parameters of one block, for one use.
#[derive(Debug, Clone)]
pub struct BlockWeights {
    /// `input_layernorm`, before attention.
    pub attn_norm: Param,
    /// q, k and v apart, or the one fused `qkv_proj`.
    pub qkv: MergedLinear,
    /// Per-head norms of q and k.
    pub qk_norm: Option<(Param, Param)>,
    /// Attention's output projection, `o_proj`.
    pub o: MergedLinear,
    /// Gemma's norm on the attention's output.
    pub attn_post_norm: Option<Param>,
    /// The norm before the MLP.
    pub mlp_norm: Param,
    /// gate and up apart, or the one fused `gate_up_proj`.
    pub gate_up: MergedLinear,
    /// The MLP's second projection, `down_proj`.
    pub down: MergedLinear,
    /// Gemma's norm on the MLP's output.
    pub mlp_post_norm: Option<Param>,
}

impl BlockWeights {
    /// Keeps quantized weights in bf16 too.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn keep_in_bf16(&mut self) -> Result<()> {
        let linears = [&mut self.qkv, &mut self.o, &mut self.gate_up, &mut self.down];
        linears.into_iter().try_for_each(MergedLinear::keep_in_bf16)
    }
}

/// What a micro-batch hands to every block.
#[derive(Debug, Clone)]
pub struct BlockContext<'a> {
    /// The sequences of the batch, side by side.
    pub spans: &'a [Span],
    /// One table per rope of the model.
    pub tables: &'a [RotaryTable],
    /// Flash or eager.
    pub attention: Attention,
    /// Whether adapters take part in the forward.
    pub adapter: AdapterSwitch,
    /// Present in training only.
    pub dropout: Option<DropoutContext>,
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
    /// How the adapters of block `layer` take part in its forward.
    fn branch(&self, layer: usize) -> BranchContext {
        BranchContext { adapter: self.adapter, source: self.source(layer) }
    }

    /// The dropout of block `layer`; of the head, the number after the last block.
    pub fn source(&self, layer: usize) -> DropoutSource {
        self.dropout.map(|d| (d.stream.part(layer as u64), d.first_token))
    }
}

/// What a block's backward needs. Shapes: `x`, `h` `[N, D]`; `qkv` `[N, (H + 2K) head_dim]`; `gate_up` `[N, 2F]`.
#[derive(Debug, Clone)]
pub struct BlockSaved {
    x: Tensor,
    qkv: Tensor,
    attended: AttentionOutput,
    /// The attention's output before Gemma's post norm.
    o: Option<Tensor>,
    h: Tensor,
    gate_up: Tensor,
    /// The MLP's output before Gemma's post norm.
    m: Option<Tensor>,
    lora: [LoraSaved; 4],
}

/// Bytes that a block keeps from its forward for its backward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SavedBytes {
    /// Of its input, which is kept under recompute too.
    pub input: usize,
    /// Of all else.
    pub rest: usize,
}

impl BlockSaved {
    /// The bytes that it holds after a forward of `tokens` tokens in `dtype`, where `adapter` says what each linear layer
    /// of the block carries.
    pub fn bytes(
        config: &ModelConfig,
        tokens: usize,
        dtype: DType,
        adapter: impl Fn(&BlockModule) -> Option<LoraShape>,
    ) -> SavedBytes {
        let [(_, input), rest @ ..] = Self::parts(config, tokens, dtype, adapter);
        SavedBytes { input, rest: rest.iter().map(|(_, bytes)| bytes).sum() }
    }

    /// The same by what it is of, the block's input first.
    pub fn parts(
        config: &ModelConfig,
        tokens: usize,
        dtype: DType,
        adapter: impl Fn(&BlockModule) -> Option<LoraShape>,
    ) -> [(&'static str, usize); 8] {
        let (d, f, heads) = (config.hidden_size, config.intermediate_size, config.heads);
        let rows = |width: usize| tokens * width * dtype.size_in_bytes();
        let layout = BlockLayout::new(config);
        let branches = layout.linears().filter_map(|module| Some((adapter(module)?, module.weight.out())));
        let lora = branches.map(|(shape, out)| BranchSaved::bytes(shape, out, tokens, dtype)).sum();
        [
            ("the block's input", rows(d)),
            ("q, k and v", rows(heads.qkv_width())),
            ("attention's output", rows(heads.q_width())),
            ("its log-sum-exps", tokens * heads.num_heads * DType::F32.size_in_bytes()),
            ("the input of the MLP", rows(d)),
            ("gate and up", rows(2 * f)),
            // `o` and `m`.
            ("outputs before post norms", if config.post_norms { rows(2 * d) } else { 0 }),
            ("inner activations of adapters", lora),
        ]
    }

    /// All that it holds.
    #[cfg(test)]
    fn tensors(&self) -> Vec<&Tensor> {
        let BlockSaved { x, qkv, attended: AttentionOutput { out, lse }, o, h, gate_up, m, lora } = self;
        let always = [x, qkv, out, lse, h, gate_up];
        let branches = lora.iter().flat_map(LoraSaved::tensors);
        always.into_iter().chain(o).chain(m).chain(branches).collect()
    }
}

/// Keys and values of the tokens seen so far, for generation: `[capacity, K · head_dim]` each.
#[derive(Debug)]
pub struct BlockCache {
    k: TensorMut,
    v: TensorMut,
    len: usize,
}

impl BlockCache {
    /// An empty cache for `capacity` tokens.
    ///
    /// # Errors
    /// When the device has not enough memory.
    pub fn new(config: &ModelConfig, capacity: usize, dtype: DType, device: &Device) -> Result<Self> {
        let shape = (capacity, config.heads.kv_width());
        let zeros = || TensorMut::zeros(shape, dtype, device);
        Ok(BlockCache { k: zeros()?, v: zeros()?, len: 0 })
    }

    /// Appends the keys and values of new tokens; returns all so far and the span that attends to them.
    fn append(&mut self, k: ColumnView<'_>, v: ColumnView<'_>) -> Result<(Tensor, Tensor, Span)> {
        let new = k.tensor.dim(0)?;
        for (cache, columns) in [(&self.k, k), (&self.v, v)] {
            let rows = columns.tensor.narrow(1, columns.start, columns.len)?.contiguous()?;
            cache.slice_set(&rows, 0, self.len)?;
        }
        self.len += new;
        let span = Span { q_start: 0, q_len: new, k_start: 0, k_len: self.len };
        let so_far = |cache: &TensorMut| cache.narrow(0, 0, self.len).map(TensorMut::into_tensor);
        Ok((so_far(&self.k)?, so_far(&self.v)?, span))
    }
}

/// `x: [N, D]` → `[N, D]` and what backward needs. With a cache, the tokens follow those in it.
///
/// # Errors
/// When shapes or dtypes do not fit each other, or an operation of the device fails.
pub fn forward(
    config: &ModelConfig,
    layer: usize,
    w: &BlockWeights,
    x: &Tensor,
    context: &BlockContext<'_>,
    cache: Option<&mut BlockCache>,
) -> Result<(Tensor, BlockSaved)> {
    let mut release = ReleaseSpan::default();
    let branch = context.branch(layer);
    let normed = rms_norm(x, &w.attn_norm.value, config.norm)?;
    let (qkv, lora_qkv) = linear::forward(&w.qkv, &normed, None, branch)?;
    let attended = attention_forward(config, layer, w, &qkv, context, cache)?;
    let (h, o, lora_o) =
        output_projection(&w.o, w.attn_post_norm.as_ref(), &attended.out, x, config.norm, branch)?;
    let normed = rms_norm(&h, &w.mlp_norm.value, config.norm)?;
    let (gate_up, lora_gate_up) = linear::forward(&w.gate_up, &normed, None, branch)?;
    let product = glu(&gate_up, config.activation)?;
    let (y, m, lora_down) =
        output_projection(&w.down, w.mlp_post_norm.as_ref(), &product, &h, config.norm, branch)?;
    let lora = [lora_qkv, lora_o, lora_gate_up, lora_down];
    release.begin();
    Ok((y, BlockSaved { x: x.clone(), qkv, attended, o, h, gate_up, m, lora }))
}

/// The end of a half: `residual + post?(layer(x))`; also the layer's own output when a post norm reads it.
fn output_projection(
    layer: &MergedLinear,
    post_norm: Option<&Param>,
    x: &Tensor,
    residual: &Tensor,
    norm: NormKind,
    branch: BranchContext,
) -> Result<(Tensor, Option<Tensor>, LoraSaved)> {
    match post_norm {
        None => {
            let (y, saved) = linear::forward(layer, x, Some(residual), branch)?;
            Ok((y, None, saved))
        }
        Some(post_norm) => {
            let (out, saved) = linear::forward(layer, x, None, branch)?;
            let y = add(residual, &rms_norm(&out, &post_norm.value, norm)?)?;
            Ok((y, Some(out), saved))
        }
    }
}

/// The backward of [`output_projection`]: the gradient of the layer's input.
fn output_projection_backward(
    layer: &MergedLinear,
    post_norm: Option<&Param>,
    (x, out, saved): (&Tensor, Option<&Tensor>, &LoraSaved),
    dy: &Tensor,
    norm: NormKind,
    source: DropoutSource,
) -> Result<Tensor> {
    let through_norm = match (post_norm, out) {
        (Some(p), Some(out)) => Some(rms_norm_backward(out, &p.value, dy, None, p.grad.as_ref(), norm)?),
        _ => None,
    };
    linear::backward(layer, saved, x, through_norm.as_ref().unwrap_or(dy), source)
}

fn attention_forward(
    config: &ModelConfig,
    layer: usize,
    w: &BlockWeights,
    qkv: &Tensor,
    context: &BlockContext<'_>,
    cache: Option<&mut BlockCache>,
) -> Result<AttentionOutput> {
    let rotated = rotate(config, layer, w, qkv, context)?;
    let inputs = attention_inputs(config, &rotated, qkv);
    let kind = config.attention(layer);
    match cache {
        None => attention(inputs, context.spans, kind, context.attention),
        Some(cache) => {
            let (k, v, span) = cache.append(inputs.k, inputs.v)?;
            let inputs = Qkv { q: inputs.q, k: ColumnView::all(&k), v: ColumnView::all(&v) };
            attention(inputs, &[span], kind, context.attention)
        }
    }
}

fn rotate(
    config: &ModelConfig,
    layer: usize,
    w: &BlockWeights,
    qkv: &Tensor,
    context: &BlockContext<'_>,
) -> Result<Tensor> {
    rotary(qkv, config.heads, qk_norm(config, w), &context.tables[config.layers[layer].rope])
}

fn qk_norm<'a>(config: &ModelConfig, w: &'a BlockWeights) -> Option<QkNorm<'a>> {
    let (q, k) = w.qk_norm.as_ref()?;
    Some(QkNorm { q: (&q.value, q.grad.as_ref()), k: (&k.value, k.grad.as_ref()), kind: config.norm })
}

/// q and k from the rotated tensor, v from the raw projection.
fn attention_inputs<'a>(config: &ModelConfig, rotated: &'a Tensor, qkv: &'a Tensor) -> Qkv<'a> {
    let heads = config.heads;
    Qkv {
        q: ColumnView { tensor: rotated, start: 0, len: heads.q_width() },
        k: ColumnView { tensor: rotated, start: heads.q_width(), len: heads.kv_width() },
        v: ColumnView { tensor: qkv, start: heads.qk_width(), len: heads.kv_width() },
    }
}

/// Adds the gradients of the block's trainable parameters and returns that of its input, unless `need_dx` is false
/// (the first block over a frozen embedding).
///
/// # Errors
/// When shapes or dtypes do not fit each other, or an operation of the device fails.
pub fn backward(
    config: &ModelConfig,
    layer: usize,
    w: &BlockWeights,
    saved: &BlockSaved,
    dy: &Tensor,
    context: &BlockContext<'_>,
    need_dx: bool,
) -> Result<Option<Tensor>> {
    let mut release = ReleaseSpan::default();
    let source = context.source(layer);
    let norm = config.norm;
    let dh = {
        let product = glu(&saved.gate_up, config.activation)?;
        let ends = (&product, saved.m.as_ref(), &saved.lora[3]);
        let dproduct = output_projection_backward(&w.down, w.mlp_post_norm.as_ref(), ends, dy, norm, source)?;
        drop(product);
        let dgate_up = glu_backward(&saved.gate_up, &dproduct, config.activation)?;
        drop(dproduct);
        let normed = rms_norm(&saved.h, &w.mlp_norm.value, norm)?;
        let dnormed = linear::backward(&w.gate_up, &saved.lora[2], &normed, &dgate_up, source)?;
        rms_norm_backward(&saved.h, &w.mlp_norm.value, &dnormed, Some(dy), w.mlp_norm.grad.as_ref(), norm)?
    };
    let ends = (&saved.attended.out, saved.o.as_ref(), &saved.lora[1]);
    let dout = output_projection_backward(&w.o, w.attn_post_norm.as_ref(), ends, &dh, norm, source)?;
    let dqkv = {
        let rotated = rotate(config, layer, w, &saved.qkv, context)?;
        let inputs = attention_inputs(config, &rotated, &saved.qkv);
        let kind = config.attention(layer);
        TensorMut::new(attention_backward(
            inputs,
            &saved.attended,
            &dout,
            context.spans,
            kind,
            context.attention,
        )?)
    };
    let table = &context.tables[config.layers[layer].rope];
    rotary_backward(&saved.qkv, &dqkv, config.heads, qk_norm(config, w), table)?;
    let normed = rms_norm(&saved.x, &w.attn_norm.value, norm)?;
    if !need_dx && w.attn_norm.grad.is_none() {
        linear::backward_weights(&w.qkv, &saved.lora[0], &normed, &dqkv, source)?;
        return Ok(None);
    }
    let dnormed = linear::backward(&w.qkv, &saved.lora[0], &normed, &dqkv, source)?;
    let dx = rms_norm_backward(
        &saved.x,
        &w.attn_norm.value,
        &dnormed,
        Some(&dh),
        w.attn_norm.grad.as_ref(),
        norm,
    )?;
    release.begin();
    Ok(Some(dx))
}

#[cfg(test)]
mod tests;
