//! Softmax attention with rotary positions, forward and backward.
//!
//! ```text
//! y = o_proj(attention(rope(norm?(qkv_proj(x)))))
//! ```
//!
//! `norm?` are the per-head norms of qwen3 and gemma3. Backward recomputes rotated heads, which are
//! elementwise.

use candle_core::{DType, Device, Tensor};

use super::{LayerPass, MixerBackward};
use crate::error::Result;
use crate::model::composition::AttentionMixer;
use crate::model::linear::{self, LoraSaved, MergedLinear};
use crate::model::{ModelConfig, Param};
use crate::ops::ColumnView;
use crate::ops::attention::{AttentionOutput, Qkv, Span, attention, attention_backward};
use crate::ops::rotary::{QkNorm, RotaryTable, rotary, rotary_backward};
use crate::runtime::TensorMut;
use crate::runtime::copy::converted;

/// The parameters of attention, for one use.
#[derive(Debug, Clone)]
pub struct AttentionWeights {
    /// The shape of the mixer.
    pub mixer: AttentionMixer,
    /// q, k and v apart, or the one fused `qkv_proj`.
    pub qkv: MergedLinear,
    /// Per-head norms of q and k.
    pub qk_norm: Option<(Param, Param)>,
    /// The output projection, `o_proj`.
    pub o: MergedLinear,
}

/// The tensors that backward needs: `qkv` is `[N, (H + 2K) head_dim]`.
#[derive(Debug, Clone)]
pub(super) struct AttentionSaved {
    qkv: Tensor,
    attended: AttentionOutput,
    lora_qkv: LoraSaved,
    lora_o: LoraSaved,
}

impl AttentionSaved {
    /// Returns the bytes that it holds for `tokens` tokens in `dtype`, by tensor, without adapters.
    pub(super) fn parts(config: &ModelConfig, tokens: usize, dtype: DType) -> [(&'static str, usize); 3] {
        let heads = config.heads;
        let rows = |width: usize| tokens * width * dtype.size_in_bytes();
        [
            ("q, k and v", rows(heads.qkv_width())),
            ("attention's output", rows(heads.q_width())),
            ("its log-sum-exps", tokens * heads.num_heads * DType::F32.size_in_bytes()),
        ]
    }

    /// Returns all tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let AttentionSaved { qkv, attended: AttentionOutput { out, lse }, lora_qkv, lora_o } = self;
        [qkv, out, lse].into_iter().chain(lora_qkv.tensors()).chain(lora_o.tensors()).collect()
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
    /// Creates an empty cache for `capacity` tokens.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn new(config: &ModelConfig, capacity: usize, dtype: DType, device: &Device) -> Result<Self> {
        let shape = (capacity, config.heads.kv_width());
        let zeros = || TensorMut::zeros(shape, dtype, device);
        Ok(BlockCache { k: zeros()?, v: zeros()?, len: 0 })
    }

    /// Appends the keys and values of new tokens. Returns all so far and the span that attends to
    /// them.
    fn append(&mut self, k: ColumnView<'_>, v: ColumnView<'_>) -> Result<(Tensor, Tensor, Span)> {
        let new = k.tensor.dim(0)?;
        for (cache, columns) in [(&self.k, k), (&self.v, v)] {
            let rows = columns.tensor.narrow(1, columns.start, columns.len)?;
            let rows = converted(&rows, rows.dtype())?;
            cache.slice_set(&rows, 0, self.len)?;
        }
        self.len += new;
        let span = Span { q_start: 0, q_len: new, k_start: 0, k_len: self.len };
        let so_far = |cache: &TensorMut| cache.narrow(0, 0, self.len).map(TensorMut::into_tensor);
        Ok((so_far(&self.k)?, so_far(&self.v)?, span))
    }
}

impl AttentionWeights {
    /// Returns the linear layers for changes to them.
    pub(super) fn linears(&mut self) -> [&mut MergedLinear; 2] {
        [&mut self.qkv, &mut self.o]
    }

    /// Computes `x: [N, D]`, normed → `[N, D]` plus `residual`, and the tensors that backward
    /// needs.
    pub(super) fn forward(
        &self,
        pass: LayerPass<'_>,
        x: &Tensor,
        residual: Option<&Tensor>,
        cache: Option<&mut BlockCache>,
    ) -> Result<(Tensor, AttentionSaved)> {
        let (qkv, lora_qkv) = linear::forward(&self.qkv, x, None, pass.branch())?;
        let attended = self.attend(pass, &qkv, cache)?;
        let (y, lora_o) = linear::forward(&self.o, &attended.out, residual, pass.branch())?;
        Ok((y, AttentionSaved { qkv, attended, lora_qkv, lora_o }))
    }

    fn attend(
        &self,
        pass: LayerPass<'_>,
        qkv: &Tensor,
        cache: Option<&mut BlockCache>,
    ) -> Result<AttentionOutput> {
        let rotated = self.rotate(pass, qkv)?;
        let inputs = attention_inputs(pass.config, &rotated, qkv);
        let kind = self.mixer.kind(pass.config.heads);
        let context = pass.context;
        match cache {
            None => attention(inputs, context.spans, kind, context.attention),
            Some(cache) => {
                let (k, v, span) = cache.append(inputs.k, inputs.v)?;
                let inputs = Qkv { q: inputs.q, k: ColumnView::all(&k), v: ColumnView::all(&v) };
                attention(inputs, &[span], kind, context.attention)
            }
        }
    }

    fn rotate(&self, pass: LayerPass<'_>, qkv: &Tensor) -> Result<Tensor> {
        rotary(qkv, pass.config.heads, self.qk_norm(pass.config), self.table(pass))
    }

    fn table<'a>(&self, pass: LayerPass<'a>) -> &'a RotaryTable {
        &pass.context.tables[self.mixer.rope]
    }

    fn qk_norm(&self, config: &ModelConfig) -> Option<QkNorm<'_>> {
        let (q, k) = self.qk_norm.as_ref()?;
        Some(QkNorm { q: (&q.value, q.grad.as_ref()), k: (&k.value, k.grad.as_ref()), kind: config.norm })
    }

    /// Adds the gradients of the parameters. Returns that of the input, if something reads it.
    pub(super) fn backward(
        &self,
        pass: LayerPass<'_>,
        saved: &AttentionSaved,
        MixerBackward { dout, input, need_dx }: MixerBackward<'_>,
    ) -> Result<Option<Tensor>> {
        let (config, source) = (pass.config, pass.source());
        let dattended = linear::backward(&self.o, &saved.lora_o, &saved.attended.out, &dout, source)?;
        drop(dout);
        let dqkv = {
            let rotated = self.rotate(pass, &saved.qkv)?;
            let inputs = attention_inputs(config, &rotated, &saved.qkv);
            TensorMut::new(attention_backward(
                inputs,
                &saved.attended,
                &dattended,
                pass.context.spans,
                self.mixer.kind(config.heads),
                pass.context.attention,
            )?)
        };
        rotary_backward(&saved.qkv, &dqkv, config.heads, self.qk_norm(config), self.table(pass))?;
        linear::backward_first(&self.qkv, &saved.lora_qkv, &input()?, &dqkv, source, need_dx)
    }
}

/// Takes q and k from the rotated tensor, v from the raw projection.
fn attention_inputs<'a>(config: &ModelConfig, rotated: &'a Tensor, qkv: &'a Tensor) -> Qkv<'a> {
    let heads = config.heads;
    Qkv {
        q: ColumnView { tensor: rotated, start: 0, len: heads.q_width() },
        k: ColumnView { tensor: rotated, start: heads.q_width(), len: heads.kv_width() },
        v: ColumnView { tensor: qkv, start: heads.qk_width(), len: heads.kv_width() },
    }
}
