//! Softmax attention with rotary positions, forward and backward.
//!
//! ```text
//! y = o_proj(gate? · attention(factor? · rope(norm?(qkv_proj(x))), sink?))
//! ```
//!
//! `norm?` are the norms of q and k: of each head (qwen3, gemma3) or of all heads together (olmo2).
//! Those of Hunyuan and Llama 4 see each head after its rotation; Llama 4's have no weight. The
//! rows of a fused projection may be grouped by key head (GPT-NeoX, Falcon). `factor?` grows with a
//! query's position (ministral3). Tokens may attend within blocks alone, which then are spans of
//! their own (Llama 4). `gate?` is the sigmoid of further outputs of `q_proj` (Qwen3.5). `sink?` is
//! a logit of each head in its softmax (gpt-oss). Values may have a norm of each head too, and be
//! the projection to keys (Gemma 4), whose columns then stand twice in `qkv`. Keys and values may
//! be those of an earlier block; `qkv` is then q alone. Backward recomputes rotated heads, normed
//! values and gated outputs, which are elementwise.

use std::borrow::Cow;
use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use super::carried::{Carried, CarriedBackward, CarriedGradients, KeysValues};
use super::{LayerPass, MixerBackward, MixerGradients};
use crate::error::Result;
use crate::model::composition::{AttentionMixer, FusedQkv, QkNormWidth, Sharing, Values};
use crate::model::linear::{self, LoraSaved, MergedLinear};
use crate::model::rope::QueryGrowth;
use crate::model::rotary_tables::PositionTable;
use crate::model::{ModelConfig, Param};
use crate::ops::ColumnView;
use crate::ops::attention::{AttentionOutput, Heads, Qkv, Span, attention, attention_backward};
use crate::ops::attention_sinks::{attention_sinks, attention_sinks_backward};
use crate::ops::elementwise::add;
use crate::ops::glu::{Activation, glu, glu_backward};
use crate::ops::rms_norm::{NormKind, rms_norm, rms_norm_backward};
use crate::ops::rotary::{QkNorm, rotary, rotary_backward};
use crate::runtime::TensorMut;
use crate::runtime::copy::{columns_of, converted};

/// The parameters of attention, for one use.
#[derive(Debug, Clone)]
pub struct AttentionWeights {
    /// The shape of the mixer.
    pub mixer: AttentionMixer,
    /// q, k and v apart, or the one fused `qkv_proj`.
    pub qkv: MergedLinear,
    /// Norms of q and k. If the keys are of another block, the second stands for none.
    pub qk_norm: Option<(Param, Param)>,
    /// The logit of each head that joins its softmax, `[H]`.
    pub sinks: Option<Param>,
    /// The output projection, `o_proj`.
    pub o: MergedLinear,
}

/// The tensors that backward needs: `qkv` is `[N, (H + 2K) head_dim]`.
#[derive(Debug, Clone)]
pub(super) struct AttentionSaved {
    qkv: Tensor,
    /// The logits of the gates on the output, `[N, H head_dim]`.
    gates: Option<Tensor>,
    /// The results of attention; none if backward computes them again.
    pub(super) attended: Option<AttentionOutput>,
    lora_qkv: LoraSaved,
    lora_o: LoraSaved,
}

impl AttentionSaved {
    /// The names of the results of attention.
    pub(super) const ATTENDED: [&str; 2] = ["attention's output", "its log-sum-exps"];

    /// Returns the bytes that it holds for `tokens` tokens in `dtype`, by tensor, without adapters.
    pub(super) fn parts(mixer: &AttentionMixer, tokens: usize, dtype: DType) -> Vec<(&'static str, usize)> {
        let heads = mixer.heads;
        let rows = |width: usize| tokens * width * dtype.size_in_bytes();
        let [output, sums] = Self::ATTENDED;
        let mut parts = vec![
            ("q, k and v", rows(mixer.projected_heads().qkv_width())),
            (output, rows(heads.q_width())),
            (sums, tokens * heads.num_heads * DType::F32.size_in_bytes()),
        ];
        parts.extend(mixer.has_gates.then(|| ("gates of attention", rows(heads.q_width()))));
        parts
    }

    /// Returns all tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let AttentionSaved { qkv, gates, attended, lora_qkv, lora_o } = self;
        let attended = attended.iter().flat_map(|AttentionOutput { out, lse }| [out, lse]);
        let loras = lora_qkv.tensors().into_iter().chain(lora_o.tensors());
        std::iter::once(qkv).chain(attended).chain(gates).chain(loras).collect()
    }
}

/// Keys and values of the tokens seen so far, for generation: `[capacity, K · head_dim]` each.
#[derive(Debug)]
pub struct KeyValueCache {
    k: TensorMut,
    v: TensorMut,
    len: usize,
}

impl KeyValueCache {
    /// Creates an empty cache for `capacity` tokens.
    pub(super) fn new(heads: Heads, capacity: usize, dtype: DType, device: &Device) -> Result<Self> {
        let shape = (capacity, heads.kv_width());
        let zeros = || TensorMut::zeros(shape, dtype, device);
        Ok(KeyValueCache { k: zeros()?, v: zeros()?, len: 0 })
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
        cache: Option<&mut KeyValueCache>,
        carried: &mut Carried,
    ) -> Result<(Tensor, AttentionSaved)> {
        let (raw, lora_qkv) = linear::forward(&self.qkv, x, None, pass.branch())?;
        let heads = self.mixer.heads;
        let (qkv, gates) = if self.mixer.has_gates {
            let order = GateOrder::new(heads);
            let (qkv, gates) = (columns_of(&raw, &order.qkv)?, columns_of(&raw, &order.gates)?);
            drop(raw);
            (qkv, Some(gates))
        } else if self.mixer.fused == Some(FusedQkv::ByKeyHead) {
            let qkv = columns_of(&raw, &by_kind(heads))?;
            drop(raw);
            (qkv, None)
        } else if self.mixer.values == Values::NormedKeys {
            let keys = heads.q_width()..heads.qk_width();
            (columns_of(&raw, &[0..heads.qk_width(), keys])?, None)
        } else {
            (raw, None)
        };
        let attended = self.attend(pass, &qkv, cache, carried)?;
        let gated = match &gates {
            None => attended.out.clone(),
            Some(gates) => glu(&Tensor::cat(&[gates, &attended.out], 1)?, Activation::Sigmoid)?,
        };
        let (y, lora_o) = linear::forward(&self.o, &gated, residual, pass.branch())?;
        Ok((y, AttentionSaved { qkv, gates, attended: Some(attended), lora_qkv, lora_o }))
    }

    /// Attends with the queries, keys and values in `qkv: [N, (H + 2K) head_dim]`, before their
    /// norms and rotation. Keys and values are those of another block, or are kept for others, as
    /// the mixer declares.
    pub(super) fn attend(
        &self,
        pass: LayerPass<'_>,
        qkv: &Tensor,
        cache: Option<&mut KeyValueCache>,
        carried: &mut Carried,
    ) -> Result<AttentionOutput> {
        let (rotated, values) = (self.rotate(pass, qkv)?, self.normed_values(pass.config, qkv)?);
        let of_another = carried.read_by(&self.mixer)?.cloned();
        let inputs = self.inputs(&rotated, qkv, values.as_ref(), of_another.as_ref());
        let kind = self.mixer.kind();
        let context = pass.context;
        let keeps = self.mixer.sharing == Sharing::Stored;
        let attended = match cache {
            None => {
                if keeps {
                    let columns =
                        |view: ColumnView<'_>| view.tensor.narrow(1, view.start, view.len)?.contiguous();
                    carried.keep(pass.layer, columns(inputs.k)?, columns(inputs.v)?);
                }
                attention(inputs, &self.spans(context.spans), kind, context.attention)?
            }
            Some(cache) => {
                let (k, v, span) = cache.append(inputs.k, inputs.v)?;
                if keeps {
                    carried.keep(pass.layer, k.clone(), v.clone());
                }
                let inputs = Qkv { q: inputs.q, k: ColumnView::all(&k), v: ColumnView::all(&v) };
                attention(inputs, &self.spans(&[span]), kind, context.attention)?
            }
        };
        match &self.sinks {
            None => Ok(attended),
            Some(sinks) => attention_sinks(attended, &sinks.value),
        }
    }

    /// Returns the gradient of `qkv` from that of attention's output. Adds that of the sinks.
    pub(super) fn attend_backward(
        &self,
        pass: LayerPass<'_>,
        qkv: &Tensor,
        attended: &AttentionOutput,
        dattended: Tensor,
        state: &mut CarriedBackward<'_>,
    ) -> Result<TensorMut> {
        if let Some(Param { value, grad: Some(grad) }) = &self.sinks {
            attention_sinks_backward(attended, &dattended, value, grad)?;
        }
        let dqkv = {
            let (rotated, values) = (self.rotate(pass, qkv)?, self.normed_values(pass.config, qkv)?);
            let of_another = state.carried.read_by(&self.mixer)?;
            let inputs = self.inputs(&rotated, qkv, values.as_ref(), of_another);
            TensorMut::new(attention_backward(
                inputs,
                attended,
                &dattended,
                &self.spans(pass.context.spans),
                self.mixer.kind(),
                pass.context.attention,
            )?)
        };
        drop(dattended);
        let dqkv = self.share_gradients(pass, dqkv, state.gradients)?;
        self.rotate_backward(pass, qkv, &dqkv)?;
        self.norm_values_backward(pass.config, qkv, &dqkv)?;
        Ok(dqkv)
    }

    /// Returns the spans whose tokens see each other: blocks of the sequences `spans`, or these.
    fn spans<'s>(&self, spans: &'s [Span]) -> Cow<'s, [Span]> {
        match self.mixer.chunk {
            None => Cow::Borrowed(spans),
            Some(chunk) => Cow::Owned(spans.iter().flat_map(|span| span.in_chunks(chunk)).collect()),
        }
    }

    /// Moves the gradients of keys and values that are not its own to those of their block, and
    /// adds those of blocks that read its own. Returns the gradient of its own projection.
    fn share_gradients(
        &self,
        pass: LayerPass<'_>,
        dqkv: TensorMut,
        gradients: &mut CarriedGradients,
    ) -> Result<TensorMut> {
        let heads = self.mixer.heads;
        let (q, kv) = (heads.q_width(), heads.kv_width());
        let starts = [q, heads.qk_width()];
        if let Some(owner) = self.mixer.reads_from() {
            let [dk, dv] = starts.map(|start| dqkv.narrow(1, start, kv).map(TensorMut::into_tensor));
            gradients.add_keys_values(owner, [dk?, dv?])?;
            let dq = dqkv.narrow(1, 0, q)?.into_tensor();
            return Ok(TensorMut::new(dq.contiguous()?));
        }
        for (sum, start) in gradients.take_keys_values(pass.layer).into_iter().flatten().zip(starts) {
            let own = converted(&dqkv.narrow(1, start, kv)?.into_tensor(), DType::F32)?;
            dqkv.slice_set(&converted(&add(&own, &sum)?, dqkv.dtype())?, 1, start)?;
        }
        Ok(dqkv)
    }

    /// Returns the normed values, `[N, K head_dim]`, if they have a norm.
    fn normed_values(&self, config: &ModelConfig, qkv: &Tensor) -> Result<Option<Tensor>> {
        if self.mixer.values == Values::Projected {
            return Ok(None);
        }
        let (rows, ones) = (self.value_rows(qkv)?, self.ones(qkv)?);
        let normed = rms_norm(&rows, &ones, weightless(config.norm))?;
        Ok(Some(normed.reshape((qkv.dim(0)?, self.mixer.heads.kv_width()))?))
    }

    /// Converts the gradient of normed values in `dqkv` to that of the raw values.
    fn norm_values_backward(&self, config: &ModelConfig, qkv: &Tensor, dqkv: &TensorMut) -> Result<()> {
        if self.mixer.values == Values::Projected {
            return Ok(());
        }
        let (raw, dy, ones) = (self.value_rows(qkv)?, self.value_rows(dqkv)?, self.ones(qkv)?);
        let dx = rms_norm_backward(&raw, &ones, &dy, None, None, None, weightless(config.norm))?;
        let heads = self.mixer.heads;
        Ok(dqkv.slice_set(&dx.reshape((qkv.dim(0)?, heads.kv_width()))?, 1, heads.qk_width())?)
    }

    /// Returns the values in `qkv`, `[N K, head_dim]`.
    fn value_rows(&self, qkv: &Tensor) -> Result<Tensor> {
        let heads = self.mixer.heads;
        let values = qkv.narrow(1, heads.qk_width(), heads.kv_width())?.contiguous()?;
        Ok(values.reshape((qkv.dim(0)? * heads.num_kv_heads, heads.head_dim))?)
    }

    /// Returns the weight of a norm without one, `[head_dim]`.
    fn ones(&self, qkv: &Tensor) -> Result<Tensor> {
        Ok(Tensor::ones(self.mixer.heads.head_dim, qkv.dtype(), qkv.device())?)
    }

    /// Takes q and k from the rotated tensor, and v from the normed `values` or from the raw
    /// projection, or both k and v of another block.
    fn inputs<'a>(
        &self,
        rotated: &'a Tensor,
        qkv: &'a Tensor,
        values: Option<&'a Tensor>,
        of_another: Option<&'a KeysValues>,
    ) -> Qkv<'a> {
        let heads = self.mixer.heads;
        if let Some(KeysValues { k, v }) = of_another {
            let [q, k, v] = [rotated, k, v].map(ColumnView::all);
            return Qkv { q, k, v };
        }
        let raw = || ColumnView { tensor: qkv, start: heads.qk_width(), len: heads.kv_width() };
        Qkv {
            q: ColumnView { tensor: rotated, start: 0, len: heads.q_width() },
            k: ColumnView { tensor: rotated, start: heads.q_width(), len: heads.kv_width() },
            v: values.map_or_else(raw, ColumnView::all),
        }
    }

    /// Returns the normed and rotated q and k, `[N, (H + K) head_dim]`, from the raw projection; q
    /// alone if k is of another block.
    fn rotate(&self, pass: LayerPass<'_>, qkv: &Tensor) -> Result<Tensor> {
        let (heads, table) = (self.mixer.projected_heads(), self.table(pass));
        let normed = self.whole_norm(pass.config, qkv)?;
        let rotated =
            rotary(normed.as_ref().unwrap_or(qkv), heads, self.head_norm(pass.config), &table.rotary)?;
        let rotated = self.norm_rotated(pass.config, rotated)?;
        let Some((growth, factors)) = self.growth(pass) else { return Ok(rotated) };
        let q = growth.times(&rotated.narrow(1, 0, heads.q_width())?, factors)?;
        let k = rotated.narrow(1, heads.q_width(), heads.kv_width())?;
        Ok(Tensor::cat(&[q, k], 1)?)
    }

    /// Converts the gradient of the rotated q and k in `dqkv` to that of the raw projection.
    fn rotate_backward(&self, pass: LayerPass<'_>, qkv: &Tensor, dqkv: &TensorMut) -> Result<()> {
        let (config, heads, table) = (pass.config, self.mixer.projected_heads(), self.table(pass));
        if let Some((growth, factors)) = self.growth(pass) {
            let dq = dqkv.narrow(1, 0, heads.q_width())?.into_tensor();
            dqkv.slice_set(&growth.times(&dq, factors)?, 1, 0)?;
        }
        self.norm_rotated_backward(pass, qkv, dqkv)?;
        let normed = self.whole_norm(config, qkv)?;
        let raw = normed.as_ref().unwrap_or(qkv);
        rotary_backward(raw, dqkv, heads, self.head_norm(config), &table.rotary)?;
        for (start, len, norm) in self.whole_norms() {
            let columns =
                |tensor: &Tensor| -> Result<Tensor> { Ok(tensor.narrow(1, start, len)?.contiguous()?) };
            let dy = columns(dqkv)?;
            let dx = rms_norm_backward(
                &columns(qkv)?,
                &norm.value,
                &dy,
                None,
                norm.grad.as_ref(),
                None,
                config.norm,
            )?;
            dqkv.slice_set(&dx, 1, start)?;
        }
        Ok(())
    }

    /// Norms each head of the rotated q and k, `[N, (H + K) head_dim]`, if its norms follow the
    /// rotation.
    fn norm_rotated(&self, config: &ModelConfig, rotated: Tensor) -> Result<Tensor> {
        let heads = self.mixer.heads;
        let normed = |(start, len, norm): (usize, usize, Param)| -> Result<Tensor> {
            let rows = heads_of(&rotated, start, len, heads.head_dim)?;
            Ok(rms_norm(&rows, &norm.value, config.norm)?.reshape((rotated.dim(0)?, len))?)
        };
        let parts = self.norms_after_rope(&rotated)?.into_iter().map(normed).collect::<Result<Vec<_>>>()?;
        if parts.is_empty() { Ok(rotated) } else { Ok(Tensor::cat(&parts, 1)?) }
    }

    /// Converts the gradient of the normed q and k in `dqkv` to that of the rotated ones.
    fn norm_rotated_backward(&self, pass: LayerPass<'_>, qkv: &Tensor, dqkv: &TensorMut) -> Result<()> {
        let norms = self.norms_after_rope(qkv)?;
        if norms.is_empty() {
            return Ok(());
        }
        let (heads, kind) = (self.mixer.heads, pass.config.norm);
        let rotated = rotary(qkv, heads, None, &self.table(pass).rotary)?;
        for (start, len, norm) in norms {
            let rows = |tensor: &Tensor| heads_of(tensor, start, len, heads.head_dim);
            let (x, dy, grad) = (rows(&rotated)?, rows(dqkv)?, norm.grad.as_ref());
            let dx = rms_norm_backward(&x, &norm.value, &dy, None, grad, None, kind)?;
            dqkv.slice_set(&dx.reshape((qkv.dim(0)?, len))?, 1, start)?;
        }
        Ok(())
    }

    /// Returns the growth of the queries and its factors, `[N, 1]` f32, unless all are 1.
    fn growth<'a>(&self, pass: LayerPass<'a>) -> Option<(QueryGrowth, &'a Tensor)> {
        pass.config.ropes[self.mixer.rope].query_growth.zip(self.table(pass).query_factors.as_ref())
    }

    fn table<'a>(&self, pass: LayerPass<'a>) -> &'a PositionTable {
        &pass.context.tables[self.mixer.rope]
    }

    /// Returns start and length of the columns of q and of k with their norms, if these see all
    /// heads together.
    fn whole_norms(&self) -> Vec<(usize, usize, &Param)> {
        self.norms_of(QkNormWidth::Whole)
    }

    /// Returns the same of norms of each rotated head. Norms without a weight have ones in the
    /// dtype of `like`.
    fn norms_after_rope(&self, like: &Tensor) -> Result<Vec<(usize, usize, Param)>> {
        let heads = self.mixer.heads;
        if self.mixer.qk_norm == Some(QkNormWidth::PlainHeadAfterRope) {
            let ones = Param { value: self.ones(like)?, grad: None };
            return Ok(vec![(0, heads.q_width(), ones.clone()), (heads.q_width(), heads.kv_width(), ones)]);
        }
        let norms = self.norms_of(QkNormWidth::HeadAfterRope).into_iter();
        Ok(norms.map(|(start, len, norm)| (start, len, norm.clone())).collect())
    }

    fn norms_of(&self, width: QkNormWidth) -> Vec<(usize, usize, &Param)> {
        let heads = self.mixer.heads;
        match &self.qk_norm {
            Some((q, k)) if self.mixer.qk_norm == Some(width) => {
                vec![(0, heads.q_width(), q), (heads.q_width(), heads.kv_width(), k)]
            }
            _ => Vec::new(),
        }
    }

    /// Returns the projection with normed q and k, if the norms see all heads together.
    fn whole_norm(&self, config: &ModelConfig, qkv: &Tensor) -> Result<Option<Tensor>> {
        let heads = self.mixer.heads;
        let normed = |(start, len, norm): (usize, usize, &Param)| {
            rms_norm(&qkv.narrow(1, start, len)?.contiguous()?, &norm.value, config.norm)
        };
        let mut parts = self.whole_norms().into_iter().map(normed).collect::<Result<Vec<_>>>()?;
        if parts.is_empty() {
            return Ok(None);
        }
        parts.push(qkv.narrow(1, heads.qk_width(), heads.kv_width())?);
        Ok(Some(Tensor::cat(&parts, 1)?))
    }

    /// Returns the norms of q and k, if they see each head alone.
    fn head_norm(&self, config: &ModelConfig) -> Option<QkNorm<'_>> {
        let (q, k) = self.qk_norm.as_ref().filter(|_| self.mixer.qk_norm == Some(QkNormWidth::Head))?;
        Some(QkNorm { q: (&q.value, q.grad.as_ref()), k: (&k.value, k.grad.as_ref()), kind: config.norm })
    }

    /// Adds the gradients of the parameters that do not need the input. Returns that of the input,
    /// if something reads it.
    pub(super) fn backward(
        &self,
        pass: LayerPass<'_>,
        saved: &AttentionSaved,
        MixerBackward { dout, need_dx }: MixerBackward,
        state: &mut CarriedBackward<'_>,
    ) -> Result<MixerGradients<'_>> {
        let (heads, branch) = (self.mixer.heads, pass.branch());
        let (dgated, pending) = linear::backward(&self.o, &saved.lora_o, &dout, branch)?;
        drop(dout);
        let attended = match &saved.attended {
            Some(attended) => attended.clone(),
            None => self.attend(pass, &saved.qkv, None, &mut state.carried.clone())?,
        };
        let (dattended, dgates) = match &saved.gates {
            None => {
                pending.add(&attended.out)?;
                (dgated, None)
            }
            Some(gates) => {
                let dgated = TensorMut::new(dgated);
                let inputs = Tensor::cat(&[gates, &attended.out], 1)?;
                let d = glu_backward(&inputs, &dgated, Activation::Sigmoid)?;
                drop(inputs);
                // The gated output takes the place of its gradient.
                pending.add(&dgated)?;
                drop(dgated);
                let q = heads.q_width();
                let half = |range| columns_of(&d, std::slice::from_ref(&range));
                (half(q..2 * q)?, Some(half(0..q)?))
            }
        };
        let dqkv = self.attend_backward(pass, &saved.qkv, &attended, dattended, state)?;
        let dqkv = match dgates {
            None => dqkv,
            Some(dgates) => {
                let both = Tensor::cat(&[&dqkv.into_tensor(), &dgates], 1)?;
                drop(dgates);
                TensorMut::new(columns_of(&both, &GateOrder::new(heads).raw)?)
            }
        };
        let dqkv = if self.mixer.fused == Some(FusedQkv::ByKeyHead) {
            TensorMut::new(columns_of(&dqkv, &by_key_head(heads))?)
        } else if self.mixer.values == Values::NormedKeys {
            let dvalues = dqkv.narrow(1, heads.qk_width(), heads.kv_width())?.into_tensor();
            let dkeys = dqkv.narrow(1, heads.q_width(), heads.kv_width())?.into_tensor();
            dqkv.slice_set(&add(&dkeys.contiguous()?, &dvalues.contiguous()?)?, 1, heads.q_width())?;
            TensorMut::new(columns_of(&dqkv, std::slice::from_ref(&(0..heads.qk_width())))?)
        } else {
            dqkv
        };
        let (dinput, pending) = linear::backward_first(&self.qkv, &saved.lora_qkv, &dqkv, branch, need_dx)?;
        Ok(MixerGradients { dinput, pending: pending.into() })
    }
}

/// The ranges of columns of a projection with gates, and back. `q_proj` gives the query of a head,
/// then its gates; k and v follow all heads.
struct GateOrder {
    /// q, k and v in the raw projection.
    qkv: Vec<Range<usize>>,
    /// The gates in the raw projection.
    gates: Vec<Range<usize>>,
    /// The raw projection in q, k, v and the gates side by side.
    raw: Vec<Range<usize>>,
}

impl GateOrder {
    fn new(heads: Heads) -> Self {
        let (dim, q, qkv) = (heads.head_dim, heads.q_width(), heads.qkv_width());
        let of_heads = |first: usize, step: usize| {
            (0..heads.num_heads).map(move |head| first + head * step..first + head * step + dim)
        };
        let after_q = std::iter::once(2 * q..q + qkv);
        let pairs = of_heads(0, dim).zip(of_heads(qkv, dim)).flat_map(|(query, gate)| [query, gate]);
        GateOrder {
            qkv: of_heads(0, 2 * dim).chain(after_q).collect(),
            gates: of_heads(dim, 2 * dim).collect(),
            raw: pairs.chain(std::iter::once(q..qkv)).collect(),
        }
    }
}

/// Returns the ranges of columns of q, of k and of v in a projection by key head.
fn by_kind(heads: Heads) -> Vec<Range<usize>> {
    let (dim, group) = (heads.head_dim, heads.num_heads / heads.num_kv_heads);
    let start = |head: usize| head * (group + 2) * dim;
    let part = |first: usize, count: usize| {
        let range = move |head: usize| start(head) + first * dim..start(head) + (first + count) * dim;
        (0..heads.num_kv_heads).map(range)
    };
    part(0, group).chain(part(group, 1)).chain(part(group + 1, 1)).collect()
}

/// Returns the ranges of columns of a projection by key head in q, k and v side by side.
fn by_key_head(heads: Heads) -> Vec<Range<usize>> {
    let (dim, group) = (heads.head_dim, heads.num_heads / heads.num_kv_heads);
    let (k, v) = (heads.q_width(), heads.qk_width());
    let of_head =
        |head: usize| [(head * group * dim, group * dim), (k + head * dim, dim), (v + head * dim, dim)];
    (0..heads.num_kv_heads).flat_map(of_head).map(|(start, len)| start..start + len).collect()
}

/// Returns `len` columns of `x: [N, …]` from `start` on as a row for each head, `[N H, head_dim]`.
fn heads_of(x: &Tensor, start: usize, len: usize, head_dim: usize) -> Result<Tensor> {
    Ok(x.narrow(1, start, len)?.contiguous()?.reshape((x.dim(0)? * len / head_dim, head_dim))?)
}

/// Returns the norm of this epsilon for a weight of ones.
fn weightless(norm: NormKind) -> NormKind {
    NormKind { unit_offset: false, ..norm }
}
