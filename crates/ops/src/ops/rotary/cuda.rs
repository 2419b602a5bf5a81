//! Rotary positions by the kernels of `kernels/rotary.cu`: one block per token, which processes
//! several heads at a time.

use candle_core::{DType, Tensor};
use half::bf16;

use super::{Heads, QkNorm, RotaryTable};
use crate::backends::gpu::{Driver, In, InOut, KernelElement, LaunchShape, Out, kernels, number};
use crate::error::Result;
use crate::ops::matmul::empty;
use crate::ops::rms_norm::{self, NormKind};
use crate::runtime::TensorMut;

/// Threads per block; the kernels assume this number.
const THREADS: u32 = 128;

/// Maximum number of blocks that share the heads of a weight gradient; each writes a row of partial
/// sums. This is two per multiprocessor of a large GPU.
const PARTS: usize = 256;

/// Maximum width of a head.
const MAX_HEAD_DIM: usize = 256;

/// Returns true if kernels support these dtypes and this head width, an even number of values.
pub(super) fn is_supported(qkv: &Tensor, heads: Heads, norm: Option<&QkNorm<'_>>) -> bool {
    let weight = norm.map_or(qkv.dtype(), |norm| norm.q.0.dtype());
    let alike = norm.is_none_or(|norm| norm.k.0.dtype() == weight);
    let types =
        matches!((qkv.dtype(), weight), (DType::BF16, DType::BF16 | DType::F32) | (DType::F32, DType::F32));
    alike && types && heads.head_dim <= MAX_HEAD_DIM && heads.head_dim.is_multiple_of(2)
}

/// The scalar arguments of the kernels.
struct Numbers {
    heads: u32,
    kv_heads: u32,
    dim: u32,
    /// Number of rotated pairs of a head.
    half: u32,
    /// 1 if neighbours are pairs, 0 if the halves of a head are.
    interleaved: u32,
    offset: f32,
    eps: f32,
}

impl Numbers {
    fn of(heads: Heads, norm: Option<&QkNorm<'_>>, table: &RotaryTable) -> Result<Self> {
        let kind = norm.map_or(NormKind { eps: 0.0, unit_offset: false }, |norm| norm.kind);
        Ok(Numbers {
            heads: number(heads.num_heads)?,
            kv_heads: number(heads.num_kv_heads)?,
            dim: number(heads.head_dim)?,
            half: number(table.cos.dim(1)?)?,
            interleaved: u32::from(table.interleaved),
            offset: kind.offset(),
            eps: kind.eps as f32,
        })
    }
}

/// Returns the weights of both norms; null pointers without norms.
fn weights<'a, W: KernelElement>(norm: Option<&QkNorm<'a>>) -> Result<[In<'a, W>; 2]> {
    Ok([In::optional(norm.map(|norm| norm.q.0))?, In::optional(norm.map(|norm| norm.k.0))?])
}

pub(super) fn forward(
    driver: &dyn Driver,
    qkv: &Tensor,
    heads: Heads,
    norm: Option<QkNorm<'_>>,
    table: &RotaryTable,
) -> Result<Tensor> {
    let norm = norm.as_ref();
    let (rows, n) = (qkv.dim(0)?, Numbers::of(heads, norm, table)?);
    let out = empty(rows, heads.qk_width(), qkv.dtype(), qkv.device())?;
    let shape = LaunchShape::line(rows, THREADS);
    macro_rules! launch {
        ($kernel:ident, $x:ty, $w:ty) => {{
            let [q, k] = weights::<$w>(norm)?;
            let (from, to) = (In::<$x>::all(qkv)?, Out::<$x>::all(&out)?);
            let (cos, sin) = (In::<f32>::all(&table.cos)?, In::<f32>::all(&table.sin)?);
            kernels::$kernel(
                driver,
                shape,
                from,
                to,
                cos,
                sin,
                q,
                k,
                n.heads,
                n.kv_heads,
                n.dim,
                n.half,
                n.interleaved,
                n.offset,
                n.eps,
            )?
        }};
    }
    match (qkv.dtype(), norm.map(|norm| norm.q.0.dtype())) {
        (DType::BF16, Some(DType::F32)) => launch!(rotary_bf16_f32, bf16, f32),
        (DType::BF16, _) => launch!(rotary_bf16, bf16, bf16),
        _ => launch!(rotary_f32, f32, f32),
    }
    Ok(out.into_tensor())
}

pub(super) fn backward(
    driver: &dyn Driver,
    qkv: &Tensor,
    dqkv: &TensorMut,
    heads: Heads,
    norm: Option<QkNorm<'_>>,
    table: &RotaryTable,
) -> Result<()> {
    let norm = norm.as_ref();
    let n = Numbers::of(heads, norm, table)?;
    let shape = LaunchShape::line(qkv.dim(0)?, THREADS);
    if let (Some(norm), false) = (norm, shape.is_empty()) {
        let of_keys = norm.k.1.filter(|_| heads.num_kv_heads > 0);
        for (dgain, of_k) in [(norm.q.1, false), (of_keys, true)] {
            if let Some(dgain) = dgain {
                gain_gradient(driver, [qkv, dqkv], &n, table, of_k, dgain)?;
            }
        }
    }
    macro_rules! launch {
        ($kernel:ident, $x:ty, $w:ty) => {{
            let [q, k] = weights::<$w>(norm)?;
            let (raw, d) = (In::<$x>::all(qkv)?, InOut::<$x>::all(dqkv)?);
            let (cos, sin) = (In::<f32>::all(&table.cos)?, In::<f32>::all(&table.sin)?);
            kernels::$kernel(
                driver,
                shape,
                raw,
                d,
                cos,
                sin,
                q,
                k,
                n.heads,
                n.kv_heads,
                n.dim,
                n.half,
                n.interleaved,
                n.offset,
                n.eps,
            )
        }};
    }
    match (qkv.dtype(), norm.map(|norm| norm.q.0.dtype())) {
        (DType::BF16, Some(DType::F32)) => launch!(rotary_backward_bf16_f32, bf16, f32),
        (DType::BF16, _) => launch!(rotary_backward_bf16, bf16, bf16),
        _ => launch!(rotary_backward_f32, f32, f32),
    }
}

/// Adds the weight gradient of q's norm or of k's, in two stages, before the gradient of qkv is
/// overwritten.
fn gain_gradient(
    driver: &dyn Driver,
    [qkv, dqkv]: [&Tensor; 2],
    n: &Numbers,
    table: &RotaryTable,
    of_k: bool,
    dgain: &TensorMut,
) -> Result<()> {
    let rows = qkv.dim(0)?;
    let parts = rows.clamp(1, PARTS);
    let partial = empty(parts, n.dim as usize, DType::F32, qkv.device())?;
    let (shape, rows) = (LaunchShape::line(parts, THREADS), number(rows)?);
    let (cos, sin) = (In::<f32>::all(&table.cos)?, In::<f32>::all(&table.sin)?);
    let (out, of_k) = (Out::<f32>::all(&partial)?, u32::from(of_k));
    if qkv.dtype() == DType::BF16 {
        let (raw, d) = (In::<bf16>::all(qkv)?, In::<bf16>::all(dqkv)?);
        kernels::rotary_gain_partial_bf16(
            driver,
            shape,
            raw,
            d,
            out,
            cos,
            sin,
            rows,
            n.heads,
            n.kv_heads,
            n.dim,
            n.half,
            n.interleaved,
            n.eps,
            of_k,
        )?;
    } else {
        let (raw, d) = (In::<f32>::all(qkv)?, In::<f32>::all(dqkv)?);
        kernels::rotary_gain_partial_f32(
            driver,
            shape,
            raw,
            d,
            out,
            cos,
            sin,
            rows,
            n.heads,
            n.kv_heads,
            n.dim,
            n.half,
            n.interleaved,
            n.eps,
            of_k,
        )?;
    }
    rms_norm::cuda::add_partials(driver, &partial, dgain)
}
