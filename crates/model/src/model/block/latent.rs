//! Multi-head latent attention (DeepSeek-V3), forward and backward.
//!
//! ```text
//! q, kv, r = first(x)            r: the rotated part of keys, the same for all heads
//! q = q_up(norm(q))              or q itself, without a latent
//! k, v = kv_up(norm(kv))
//! y = o_proj(attention(rope(q), rope([k, r]), v))
//! ```
//!
//! Attention gets queries, keys and values of one width: zeros fill the narrower of keys and
//! values, which changes no score and no output. The rotated columns of a head come first, as
//! [`rotary`](crate::ops::rotary) expects. The cache of generation has keys and values of all
//! heads. Backward computes the norms and the columns of heads again.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::attention::{AttentionSaved, AttentionWeights, KeyValueCache};
use super::carried::{Carried, CarriedBackward};
use super::{LayerPass, MixerBackward, MixerGradients};
use crate::error::Result;
use crate::model::Param;
use crate::model::composition::LatentMixer;
use crate::model::linear::{self, LoraSaved, MergedLinear};
use crate::model::lora::BranchContext;
use crate::ops::attention::{AttentionOutput, Heads};
use crate::ops::rms_norm::{rms_norm, rms_norm_backward};
use crate::runtime::TensorMut;
use crate::runtime::copy::columns_of;

/// The parameters of latent attention, for one use.
#[derive(Debug, Clone)]
pub struct LatentWeights {
    /// The shape of the mixer.
    pub mixer: LatentMixer,
    /// Scores and output; its `qkv` are the projections to latents.
    pub attention: AttentionWeights,
    /// The way from the latent of queries to queries, if they have one.
    pub q_up: Option<LatentUp>,
    /// The way from the latent of keys and values to both.
    pub kv_up: LatentUp,
}

/// A norm and a projection from a latent.
#[derive(Debug, Clone)]
pub struct LatentUp {
    /// The gain of the norm, `[rank]`.
    pub norm: Param,
    /// The projection from the latent.
    pub up: MergedLinear,
}

/// The tensors that backward needs.
#[derive(Debug, Clone)]
pub(super) struct LatentSaved {
    /// The output of the first projections, `[N, q + kv_rank + rotated]`.
    first: Tensor,
    /// Queries from their latent, `[N, H (plain + rotated)]`.
    q: Option<Tensor>,
    /// Keys and values, `[N, H (plain + value)]`.
    kv: Tensor,
    /// The results of attention; none if backward computes them again.
    pub(super) attended: Option<AttentionOutput>,
    lora_first: LoraSaved,
    lora_q: Option<LoraSaved>,
    lora_kv: LoraSaved,
    lora_o: LoraSaved,
}

impl LatentSaved {
    /// Returns the bytes that it holds for `tokens` tokens in `dtype`, by tensor, without adapters.
    pub(super) fn parts(mixer: &LatentMixer, tokens: usize, dtype: DType) -> Vec<(&'static str, usize)> {
        let (heads, columns) = (mixer.attention.heads, LatentColumns::new(mixer));
        let rows = |width: usize| tokens * width * dtype.size_in_bytes();
        let [output, sums] = AttentionSaved::ATTENDED;
        let mut parts = vec![
            ("latents of attention", rows(columns.first())),
            ("keys and values", rows(columns.kv)),
            (output, rows(heads.q_width())),
            (sums, tokens * heads.num_heads * DType::F32.size_in_bytes()),
        ];
        parts.extend(mixer.q_rank.map(|_| ("queries", rows(columns.q))));
        parts
    }

    /// Returns all tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let attended = self.attended.iter().flat_map(|AttentionOutput { out, lse }| [out, lse]);
        let loras = [&self.lora_first, &self.lora_kv, &self.lora_o].into_iter().chain(&self.lora_q);
        let loras = loras.flat_map(LoraSaved::tensors);
        [&self.first, &self.kv].into_iter().chain(attended).chain(&self.q).chain(loras).collect()
    }
}

/// The columns of latents, and those of heads as attention gets them: rotated, plain, zeros.
struct LatentColumns {
    heads: Heads,
    mixer: LatentMixer,
    /// Width of all queries.
    q: usize,
    /// Width of the latent of queries, or of queries without one.
    first_q: usize,
    /// Width of all keys and values together, without the rotated part of keys.
    kv: usize,
}

impl LatentColumns {
    fn new(mixer: &LatentMixer) -> Self {
        let heads = mixer.attention.heads;
        let q = heads.num_heads * (mixer.plain + mixer.rotated);
        let kv = heads.num_heads * (mixer.plain + mixer.value);
        LatentColumns { heads, mixer: *mixer, q, first_q: mixer.q_rank.unwrap_or(q), kv }
    }

    /// Returns the width of the first projections.
    fn first(&self) -> usize {
        self.first_q + self.mixer.kv_rank + self.mixer.rotated
    }

    /// Returns the latent of keys and values in the first projections.
    fn kv_latent(&self) -> Range<usize> {
        self.first_q..self.first_q + self.mixer.kv_rank
    }

    /// Returns the rotated part of keys in the first projections.
    fn shared_key(&self) -> Range<usize> {
        self.kv_latent().end..self.first()
    }

    /// Returns the queries, keys and values of attention, `[N, 3 H head_dim]`.
    fn assembled(&self, first: &Tensor, q: Option<&Tensor>, kv: &Tensor) -> Result<Tensor> {
        let LatentMixer { plain, rotated, value, .. } = self.mixer;
        let (count, dim) = (self.heads.num_heads, self.heads.head_dim);
        let own_q = match q {
            Some(q) => q.clone(),
            None => columns_of(first, std::slice::from_ref(&(0..self.q)))?,
        };
        let shared = columns_of(first, &[self.shared_key()])?;
        let zeros = Tensor::zeros((first.dim(0)?, dim), first.dtype(), first.device())?;
        let all = Tensor::cat(&[&own_q, kv, &shared, &zeros], 1)?;
        let (kv_start, shared_start) = (self.q, self.q + self.kv);
        let zeros = |len: usize| shared_start + rotated..shared_start + rotated + len;
        let query = |head: usize| {
            let start = head * (plain + rotated);
            [start + plain..start + plain + rotated, start..start + plain, zeros(dim - plain - rotated)]
        };
        let key = |head: usize| {
            let start = kv_start + head * (plain + value);
            [shared_start..shared_start + rotated, start..start + plain, zeros(dim - plain - rotated)]
        };
        let of_value = |head: usize| {
            let start = kv_start + head * (plain + value) + plain;
            [start..start + value, zeros(dim - value)]
        };
        let columns: Vec<Range<usize>> = (0..count)
            .flat_map(query)
            .chain((0..count).flat_map(key))
            .chain((0..count).flat_map(of_value))
            .collect();
        columns_of(&all, &columns)
    }

    /// Returns the gradients of queries, of keys and values, and of the rotated part of keys, from
    /// that of [`LatentColumns::assembled`].
    fn parted(&self, d: &Tensor) -> Result<[Tensor; 3]> {
        let LatentMixer { plain, rotated, value, .. } = self.mixer;
        let (count, dim, width) = (self.heads.num_heads, self.heads.head_dim, self.heads.q_width());
        let query = |head: usize| {
            let start = head * dim;
            [start + rotated..start + rotated + plain, start..start + rotated]
        };
        let key_value = |head: usize| {
            let (key, of_value) = (width + head * dim + rotated, 2 * width + head * dim);
            [key..key + plain, of_value..of_value + value]
        };
        let queries: Vec<_> = (0..count).flat_map(query).collect();
        let keys_values: Vec<_> = (0..count).flat_map(key_value).collect();
        let rotated_keys: Vec<_> =
            (0..count).map(|head| width + head * dim..width + head * dim + rotated).collect();
        let of_heads = columns_of(d, &rotated_keys)?.to_dtype(DType::F32)?;
        let shared = of_heads.reshape((d.dim(0)?, count, rotated))?.sum(1)?.to_dtype(d.dtype())?;
        Ok([columns_of(d, &queries)?, columns_of(d, &keys_values)?, shared])
    }

    /// Returns the values of attention's output without the zeros, `[N, H value]`.
    fn without_zeros(&self, out: &Tensor) -> Result<Tensor> {
        let (dim, value) = (self.heads.head_dim, self.mixer.value);
        if dim == value {
            return Ok(out.clone());
        }
        let columns: Vec<_> = (0..self.heads.num_heads).map(|head| head * dim..head * dim + value).collect();
        columns_of(out, &columns)
    }

    /// Returns the gradient of attention's output with zeros, `[N, H head_dim]`.
    fn with_zeros(&self, d: Tensor) -> Result<Tensor> {
        let (count, dim, value) = (self.heads.num_heads, self.heads.head_dim, self.mixer.value);
        if dim == value {
            return Ok(d);
        }
        let rows = d.dim(0)?;
        let zeros = Tensor::zeros((rows, count, dim - value), d.dtype(), d.device())?;
        Ok(Tensor::cat(&[d.reshape((rows, count, value))?, zeros], 2)?.reshape((rows, count * dim))?)
    }
}

impl LatentUp {
    /// Returns the normed latent.
    fn normed(&self, latent: &Tensor, mixer: &LatentMixer) -> Result<Tensor> {
        rms_norm(latent, &self.norm.value, mixer.norm)
    }

    /// Returns the gradient of the latent from that of the projection's output, and adds those of
    /// the parameters.
    fn backward(
        &self,
        latent: &Tensor,
        dy: &Tensor,
        mixer: &LatentMixer,
        (lora, branch): (&LoraSaved, BranchContext<'_>),
    ) -> Result<Tensor> {
        let (dnormed, pending) = linear::backward(&self.up, lora, dy, branch)?;
        if pending.reads_input() {
            pending.add(&self.normed(latent, mixer)?)?;
        }
        let grad = self.norm.grad.as_ref();
        rms_norm_backward(latent, &self.norm.value, &dnormed, None, grad, None, mixer.norm)
    }
}

impl LatentWeights {
    /// Returns the linear layers for changes to them.
    pub(super) fn linears(&mut self) -> Vec<&mut MergedLinear> {
        let ups = self.q_up.iter_mut().chain([&mut self.kv_up]).map(|up| &mut up.up);
        self.attention.linears().into_iter().chain(ups).collect()
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
    ) -> Result<(Tensor, LatentSaved)> {
        let columns = LatentColumns::new(&self.mixer);
        let (first, lora_first) = linear::forward(&self.attention.qkv, x, None, pass.branch())?;
        let up = |up: &LatentUp, range: Range<usize>| {
            let normed = up.normed(&columns_of(&first, &[range])?, &self.mixer)?;
            linear::forward(&up.up, &normed, None, pass.branch())
        };
        let of_q = self.q_up.as_ref().map(|q_up| up(q_up, 0..columns.first_q)).transpose()?;
        let (q, lora_q) = of_q.unzip();
        let (kv, lora_kv) = up(&self.kv_up, columns.kv_latent())?;
        let qkv = columns.assembled(&first, q.as_ref(), &kv)?;
        let attended = self.attention.attend(pass, &qkv, cache, carried)?;
        drop(qkv);
        let out = columns.without_zeros(&attended.out)?;
        let (y, lora_o) = linear::forward(&self.attention.o, &out, residual, pass.branch())?;
        let attended = Some(attended);
        Ok((y, LatentSaved { first, q, kv, attended, lora_first, lora_q, lora_kv, lora_o }))
    }

    /// Adds the gradients of the parameters that do not need the input. Returns that of the input,
    /// if something reads it.
    pub(super) fn backward(
        &self,
        pass: LayerPass<'_>,
        saved: &LatentSaved,
        MixerBackward { dout, need_dx }: MixerBackward,
        state: &mut CarriedBackward<'_>,
    ) -> Result<MixerGradients<'_>> {
        let (branch, columns) = (pass.branch(), LatentColumns::new(&self.mixer));
        let (dattended, pending) = linear::backward(&self.attention.o, &saved.lora_o, &dout, branch)?;
        drop(dout);
        let qkv = || columns.assembled(&saved.first, saved.q.as_ref(), &saved.kv);
        let attended = match &saved.attended {
            Some(attended) => attended.clone(),
            None => self.attention.attend(pass, &qkv()?, None, &mut state.carried.clone())?,
        };
        if pending.reads_input() {
            pending.add(&columns.without_zeros(&attended.out)?)?;
        }
        let dattended = columns.with_zeros(dattended)?;
        let qkv = qkv()?;
        let dqkv = self.attention.attend_backward(pass, &qkv, &attended, dattended, state)?.into_tensor();
        drop(qkv);
        let [dq, dkv, dshared] = columns.parted(&dqkv)?;
        drop(dqkv);
        let latent = |range: Range<usize>| columns_of(&saved.first, &[range]);
        let dq = match (&self.q_up, &saved.lora_q) {
            (Some(q_up), Some(lora)) => {
                q_up.backward(&latent(0..columns.first_q)?, &dq, &self.mixer, (lora, branch))?
            }
            _ => dq,
        };
        let kv_latent = latent(columns.kv_latent())?;
        let dkv = self.kv_up.backward(&kv_latent, &dkv, &self.mixer, (&saved.lora_kv, branch))?;
        let dfirst = TensorMut::new(Tensor::cat(&[dq, dkv, dshared], 1)?);
        let (dinput, pending) =
            linear::backward_first(&self.attention.qkv, &saved.lora_first, &dfirst, branch, need_dx)?;
        Ok(MixerGradients { dinput, pending: pending.into() })
    }
}
