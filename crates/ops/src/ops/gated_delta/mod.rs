//! The gated delta rule over packed sequences, a linear attention ("Gated Delta Networks", arXiv
//! 2412.06464).
//!
//! ```text
//! k = k / ‖k‖, q = q / ‖q‖ / √Dk          per key head, ‖x‖ = sqrt(Σ x² + 1e-6)
//! β = σ(b), g = −exp(a_log) · softplus(a + dt_bias)
//! S ← e^g · S
//! S ← S + k (β (v − Sᵀk))ᵀ                 per value head, S: [Dk, Dv], zero before a span
//! o = Sᵀq
//! ```
//!
//! Value head h uses the key head `h / (V / K)`. All in f32, results are rounded once. Spans
//! restart the state and the chunks, so the bits of a sequence do not depend on its neighbours.
//!
//! The CPU form computes a chunk of 64 tokens by matrix products. With `γ` the running sum of `g`,
//! `D_ij = e^(γ_i − γ_j)` and `S` the state before the chunk, the corrections `u = β (v − …)` solve
//! a unit lower-triangular system:
//!
//! ```text
//! u_i + Σ_{j<i} β_i D_ij (k_i·k_j) u_j = β_i (v_i − e^γ_i Sᵀk_i)
//! o_i = e^γ_i Sᵀq_i + Σ_{j≤i} D_ij (q_i·k_j) u_j
//! S' = e^γ_C S + Σ_j D_Cj k_j u_jᵀ
//! ```
//!
//! The backward recomputes a chunk from the state before it, the only tensor that the forward
//! saves, and carries the gradient of the state backwards. Symbols: K key heads, V value heads.

pub(super) mod cases;
mod cpu;
mod cuda;
mod reference;

use candle_core::Tensor;

pub use super::attention::Span;
use super::causal_conv::is_one_sequence;
use super::matmul::{ColumnView, ColumnViewMut};
use crate::backends::gpu::Route;
use crate::error::{Error, Result};
use crate::runtime::TensorMut;
use crate::runtime::trace::{SpanInfo, span};
pub(crate) use reference::{reference, reference_backward};

/// Tokens of a chunk.
pub const CHUNK: usize = 64;

/// The largest number of values of a key, and of a value, for which kernels exist.
pub const MOST_WIDE_HEAD: usize = 256;

/// Lines of a state that a block of the kernels holds.
const KERNEL_LINES: usize = 16;

/// Bytes that a backward on a GPU takes for the tensors between its steps, at most, unless one key
/// head needs more.
const DELTA_WORKSPACE: usize = 256 << 20;

/// Added to the sum of squares of a key or a query.
const NORM_EPS: f32 = 1e-6;

/// The heads of a linear attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaHeads {
    /// K, the number of heads of queries and of keys.
    pub num_key_heads: usize,
    /// V, the number of heads of values: a multiple of K.
    pub num_value_heads: usize,
    /// Dk, the width of a query and of a key.
    pub key_dim: usize,
    /// Dv, the width of a value.
    pub value_dim: usize,
}

impl DeltaHeads {
    /// Returns the width of all queries, also that of all keys.
    pub fn key_width(self) -> usize {
        self.num_key_heads * self.key_dim
    }

    /// Returns the width of all values.
    pub fn value_width(self) -> usize {
        self.num_value_heads * self.value_dim
    }

    /// Returns the width of queries, keys and values side by side.
    pub fn conv_width(self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Returns the number of value heads of a key head.
    pub(super) fn group(self) -> usize {
        self.num_value_heads / self.num_key_heads.max(1)
    }

    /// Returns the values of the state of one value head.
    pub(super) fn state_len(self) -> usize {
        self.key_dim * self.value_dim
    }

    /// Returns the bytes of the tensors between the steps of a GPU's backward over `rows` tokens
    /// for one key head.
    fn key_head_bytes(self, rows: usize) -> usize {
        let parts = self.key_dim.div_ceil(KERNEL_LINES);
        let of_row = 2 * self.value_dim + 2 * self.key_dim + parts + 2;
        size_of::<f32>() * self.group() * (rows * of_row + rows / CHUNK * self.state_len())
    }

    /// Returns the number of key heads that a GPU's backward over `rows` tokens computes together
    /// within `workspace` bytes.
    fn key_heads_at_once(self, rows: usize, workspace: usize) -> usize {
        (workspace / self.key_head_bytes(rows).max(1)).clamp(1, self.num_key_heads)
    }

    /// Returns the bytes that a GPU's backward over `rows` tokens takes between its steps.
    pub fn backward_workspace(self, rows: usize) -> usize {
        self.key_heads_at_once(rows, DELTA_WORKSPACE) * self.key_head_bytes(rows)
    }

    /// Returns the floating-point operations of a forward over `tokens` tokens of long sequences.
    pub fn forward_flops(self, tokens: usize) -> usize {
        let (dk, dv) = (self.key_dim, self.value_dim);
        tokens * self.num_value_heads * (6 * dk * dv + CHUNK * (4 * dk + 3 * dv))
    }

    /// Returns the floating-point operations of its backward, which recomputes the chunks.
    pub fn backward_flops(self, tokens: usize) -> usize {
        let (dk, dv) = (self.key_dim, self.value_dim);
        tokens * self.num_value_heads * (14 * dk * dv + CHUNK * (10 * dk + 8 * dv))
    }
}

/// The inputs of the gated delta rule.
#[derive(Clone, Copy)]
pub struct DeltaInputs<'a> {
    /// Queries, keys and values after the convolution: `[N, 2 K·Dk + V·Dv]`.
    pub qkv: &'a Tensor,
    /// The inputs of the decay: `[N, V]` in the dtype of `qkv`.
    pub a: ColumnView<'a>,
    /// The inputs of the step size β: `[N, V]` in the dtype of `qkv`.
    pub b: ColumnView<'a>,
    /// The logarithm of the decay rate: `[V]` of any floating-point dtype.
    pub a_log: &'a Tensor,
    /// Added to `a`: `[V]` of any floating-point dtype.
    pub dt_bias: &'a Tensor,
}

/// The result of the gated delta rule, with what its backward needs.
#[derive(Debug, Clone)]
pub struct DeltaOutput {
    /// `[N, V·Dv]` in the dtype of the inputs; zero for rows outside all spans.
    pub out: Tensor,
    /// The state before each chunk of 64 tokens, `[chunks, V, Dk, Dv]` f32. The first chunk of a
    /// span, before which the state is zero, is left out, and so are all chunks of a generation.
    pub states: Tensor,
}

/// Gradients of the parameters, f32 or on the CPU also bf16, to which the backward adds.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeltaParamGrads<'a> {
    /// The gradient of [`DeltaInputs::a_log`]: `[V]`.
    pub a_log: Option<&'a TensorMut>,
    /// The gradient of [`DeltaInputs::dt_bias`]: `[V]`.
    pub dt_bias: Option<&'a TensorMut>,
}

/// Computes the gated delta rule within every span. A generation passes `state: [V, Dk, Dv]` f32,
/// the state before the first row of its one span, which becomes that after the last row.
///
/// # Errors
/// Fails if a tensor is not contiguous or of another shape, the spans overlap or are not in order,
/// `state` is given without one span of all rows, or an operation of the device fails.
pub fn gated_delta(
    inputs: DeltaInputs<'_>,
    heads: DeltaHeads,
    spans: &[Span],
    state: Option<&TensorMut>,
) -> Result<DeltaOutput> {
    let tokens = inputs.check(heads, spans)?;
    let _span = span(|| delta_info("gated_delta", &inputs, heads, 1).flops(heads.forward_flops(tokens)));
    if state.is_some() && !is_one_sequence(spans, inputs.qkv) {
        return Err(Error::internal("a state of the delta rule requires one span of all rows"));
    }
    match Route::of(inputs.qkv, cuda::is_supported(&inputs, heads)) {
        Route::Kernel(driver) => cuda::forward(driver, inputs, heads, spans, state),
        Route::Composed => reference(inputs, heads, spans, state),
        Route::Cpu => cpu::forward(inputs, heads, spans, state),
    }
}

/// Returns the gradient of `qkv`, and writes those of `a` and `b`: `[N, V]` in the same dtype.
/// `dout` is that of [`DeltaOutput::out`].
///
/// # Errors
/// Fails like [`gated_delta`], or if `output` has no state for a chunk.
pub fn gated_delta_backward(
    inputs: DeltaInputs<'_>,
    output: &DeltaOutput,
    dout: &Tensor,
    heads: DeltaHeads,
    spans: &[Span],
    grads: DeltaParamGrads<'_>,
    da: ColumnViewMut<'_>,
    db: ColumnViewMut<'_>,
) -> Result<Tensor> {
    let tokens = inputs.check(heads, spans)?;
    let chunks = states_of(spans);
    if output.states.dim(0)? != chunks {
        return Err(Error::internal("a backward of the delta rule has not the states of its chunks")
            .because(format!("found {}, wanted {chunks}", output.states.dim(0)?)));
    }
    let _span =
        span(|| delta_info("gated_delta_backward", &inputs, heads, 2).flops(heads.backward_flops(tokens)));
    let gates = GateGrads { params: grads, da, db };
    match Route::of(inputs.qkv, cuda::is_supported(&inputs, heads)) {
        Route::Kernel(driver) => cuda::backward(driver, inputs, output, dout, heads, spans, gates),
        Route::Composed => reference_backward(inputs, output, dout, heads, spans, gates),
        Route::Cpu => cpu::backward(inputs, output, dout, heads, spans, gates),
    }
}

/// Returns the number of chunks of these spans whose states are saved, the first dimension of
/// [`DeltaOutput::states`]: at most a 64th of the tokens.
fn states_of(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.q_len.div_ceil(CHUNK).saturating_sub(1)).sum()
}

/// The gradients around the delta rule that a backward writes or adds to.
#[derive(Clone, Copy)]
pub(crate) struct GateGrads<'a> {
    pub(crate) params: DeltaParamGrads<'a>,
    pub(crate) da: ColumnViewMut<'a>,
    pub(crate) db: ColumnViewMut<'a>,
}

impl DeltaInputs<'_> {
    /// Returns the number of tokens of all spans.
    ///
    /// # Errors
    /// Fails if a width differs from that of the heads, or the spans overlap or are not in order.
    fn check(&self, heads: DeltaHeads, spans: &[Span]) -> Result<usize> {
        let (rows, width) = self.qkv.dims2()?;
        let found = [width, self.a.len, self.b.len, heads.group() * heads.num_key_heads];
        let values = heads.num_value_heads;
        if found != [heads.conv_width(), values, values, values] {
            return Err(Error::internal("inputs of the delta rule have other widths than its heads")
                .because(format!("found {width}, {} and {} for {heads:?}", self.a.len, self.b.len)));
        }
        let mut end = 0;
        for span in spans {
            if span.q_start < end || span.q_start + span.q_len > rows {
                return Err(Error::internal("spans of the delta rule overlap or are not in order")
                    .because(format!("found {span:?} after row {end} of {rows}")));
            }
            end = span.q_start + span.q_len;
        }
        Ok(spans.iter().map(|span| span.q_len).sum())
    }
}

/// Returns the trace info of a pass over the inputs, `times` times, and the states.
fn delta_info(name: &'static str, inputs: &DeltaInputs<'_>, heads: DeltaHeads, times: usize) -> SpanInfo {
    let rows = inputs.qkv.dims().first().copied().unwrap_or_default();
    let values = times * rows * (heads.conv_width() + heads.value_width());
    let states = rows.div_ceil(CHUNK) * heads.num_value_heads * heads.state_len();
    let dims = [rows, heads.num_key_heads, heads.num_value_heads, heads.key_dim, heads.value_dim];
    SpanInfo::op(name).dims(&dims).bytes(values * inputs.qkv.dtype().size_in_bytes() + 4 * states)
}
