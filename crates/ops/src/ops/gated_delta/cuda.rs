//! The delta rule by the kernels of `kernels/gated_delta.cu`: 8 lanes hold a column of a state and
//! step over the tokens. The backward processes the value heads of some key heads at a time, so
//! that the tensors between its steps stay within [`DELTA_WORKSPACE`].

use std::rc::Rc;

use candle_core::{DType, Tensor};

use super::{
    CHUNK, DELTA_WORKSPACE, DeltaHeads, DeltaInputs, DeltaOutput, GateGrads, KERNEL_LINES, MOST_WIDE_HEAD,
    Span, states_of,
};
use crate::backends::gpu::{Driver, In, InOut, LaunchShape, Out, are_floats, kernels, number};
use crate::error::Result;
use crate::ops::matmul::{ColumnView, empty, sum_rows};
use crate::ops::span_tables::SpanTables;
use crate::runtime::TensorMut;

/// Threads per block.
const THREADS: u32 = 128;
/// Columns or rows of a state of a block.
const LINES: usize = KERNEL_LINES;
/// Rows and key heads of a block, one for each warp.
const UNITS: usize = 4;
/// Bytes of the tensors between the steps of a backward; few in tests, so that small cases have
/// several passes.
const WORKSPACE: usize = if cfg!(test) { 1 << 16 } else { DELTA_WORKSPACE };

/// Returns true if kernels support these inputs.
pub(super) fn is_supported(inputs: &DeltaInputs<'_>, heads: DeltaHeads) -> bool {
    let dtype = inputs.qkv.dtype();
    are_floats([dtype])
        && [inputs.a.tensor.dtype(), inputs.b.tensor.dtype()] == [dtype; 2]
        && heads.key_dim <= MOST_WIDE_HEAD
        && heads.value_dim <= MOST_WIDE_HEAD
}

/// The launches of one call.
struct Launches<'a> {
    driver: &'a dyn Driver,
    inputs: DeltaInputs<'a>,
    heads: DeltaHeads,
    tables: Rc<SpanTables>,
    /// The parameters in f32.
    params: [Tensor; 2],
    rows: usize,
}

/// The value heads of a launch.
#[derive(Clone, Copy)]
struct HeadRange {
    first: usize,
    count: usize,
}

/// Calls a kernel on the inputs, then the given arguments, then the sizes of the heads.
macro_rules! launch {
    ($kernel:expr, $all:expr, $shape:expr, $first:expr, [$($arg:expr),*], [$($last:expr),*]) => {{
        let Launches { driver, inputs, heads, params: [a_log, dt_bias], .. } = $all;
        let size = |width: usize| number(width);
        $kernel(
            *driver,
            $shape,
            In::all(inputs.qkv)?,
            In::columns(&inputs.a)?,
            In::columns(&inputs.b)?,
            In::all(a_log)?,
            In::all(dt_bias)?,
            $($arg,)*
            size(heads.num_key_heads)?,
            size(heads.group())?,
            size(heads.key_dim)?,
            size(heads.value_dim)?,
            size(inputs.a.tensor.dim(1)?)?,
            size(inputs.b.tensor.dim(1)?)?,
            size($first)?,
            $($last,)*
        )
    }};
}

/// Returns the kernel for this width of those for at most 64, 128 and 256 values.
macro_rules! by_width {
    ($width:expr, [$small:ident, $medium:ident, $large:ident]) => {
        match $width {
            ..=64 => kernels::$small,
            65..=128 => kernels::$medium,
            _ => kernels::$large,
        }
    };
}

impl<'a> Launches<'a> {
    fn new(
        driver: &'a dyn Driver,
        inputs: DeltaInputs<'a>,
        heads: DeltaHeads,
        spans: &[Span],
    ) -> Result<Self> {
        let rows = inputs.qkv.dim(0)?;
        let tables = SpanTables::of(spans, rows, inputs.qkv.device())?;
        let params = [inputs.a_log.to_dtype(DType::F32)?, inputs.dt_bias.to_dtype(DType::F32)?];
        Ok(Launches { driver, inputs, heads, tables, params, rows })
    }

    fn is_bf16(&self) -> bool {
        self.inputs.qkv.dtype() == DType::BF16
    }

    /// Returns blocks for pieces, value heads and lines of their states.
    fn shape(&self, pieces: &Tensor, heads: HeadRange, lines: usize) -> Result<LaunchShape> {
        let grid = [number(pieces.dim(0)?)?, number(heads.count)?, number(lines.div_ceil(LINES))?];
        Ok(LaunchShape { grid, block: [THREADS, 1, 1], shared_bytes: 0 })
    }

    /// Returns an f32 tensor for the steps of the backward.
    fn step_tensor(&self, rows: usize, cols: usize) -> Result<TensorMut> {
        empty(rows, cols, DType::F32, self.inputs.qkv.device())
    }

    /// Computes the outputs and the states before the chunks.
    fn forward(&self, state: Option<&TensorMut>, out: &Tensor, saved: Option<&Tensor>) -> Result<()> {
        let all = HeadRange { first: 0, count: self.heads.num_value_heads };
        let shape = self.shape(&self.tables.spans, all, self.heads.value_dim)?;
        macro_rules! forward {
            ($kernel:expr) => {{
                let (pieces, before) = (In::all(&self.tables.spans)?, In::optional(None)?);
                let carried = InOut::optional(state.map(|state| &**state))?;
                let (out, missing, saved) = (Out::all(out)?, Out::optional(None)?, Out::optional(saved)?);
                launch!($kernel, self, shape, 0, [pieces, before, carried, out, missing, saved], [])
            }};
        }
        let width = self.heads.key_dim;
        if self.is_bf16() {
            forward!(by_width!(width, [gated_delta_64_bf16, gated_delta_128_bf16, gated_delta_256_bf16]))
        } else {
            forward!(by_width!(width, [gated_delta_64_f32, gated_delta_128_f32, gated_delta_256_f32]))
        }
    }

    /// Step 1: v − Sᵀk of the tokens, `[N, heads, Dv]`.
    fn missing(&self, heads: HeadRange, states: Option<&Tensor>) -> Result<TensorMut> {
        let missing = self.step_tensor(self.rows, heads.count * self.heads.value_dim)?;
        let shape = self.shape(&self.tables.chunks, heads, self.heads.value_dim)?;
        macro_rules! missing {
            ($kernel:expr) => {{
                let (pieces, before) = (In::all(&self.tables.chunks)?, In::optional(states)?);
                let (carried, out) = (InOut::optional(None)?, Out::optional(None)?);
                let (missing, saved) = (Out::all(&missing)?, Out::optional(None)?);
                launch!($kernel, self, shape, heads.first, [pieces, before, carried, out, missing, saved], [])
            }};
        }
        let width = self.heads.key_dim;
        if self.is_bf16() {
            missing!(by_width!(width, [gated_delta_64_bf16, gated_delta_128_bf16, gated_delta_256_bf16]))?;
        } else {
            missing!(by_width!(width, [gated_delta_64_f32, gated_delta_128_f32, gated_delta_256_f32]))?;
        }
        Ok(missing)
    }

    /// Step 2: writes du `[N, heads, Dv]`, and the gradients of the saved states.
    fn columns(&self, heads: HeadRange, dout: &Tensor, du: &Tensor, dstates: Option<&Tensor>) -> Result<()> {
        let shape = self.shape(&self.tables.spans, heads, self.heads.value_dim)?;
        macro_rules! columns {
            ($kernel:expr) => {{
                let (pieces, dout) = (In::all(&self.tables.spans)?, In::all(dout)?);
                let (du, dstates) = (Out::all(du)?, Out::optional(dstates)?);
                launch!($kernel, self, shape, heads.first, [pieces, dout, du, dstates], [])
            }};
        }
        let width = self.heads.key_dim;
        if self.is_bf16() {
            columns!(by_width!(
                width,
                [
                    gated_delta_backward_columns_64_bf16,
                    gated_delta_backward_columns_128_bf16,
                    gated_delta_backward_columns_256_bf16
                ]
            ))
        } else {
            columns!(by_width!(
                width,
                [
                    gated_delta_backward_columns_64_f32,
                    gated_delta_backward_columns_128_f32,
                    gated_delta_backward_columns_256_f32
                ]
            ))
        }
    }

    /// Step 3: writes the gradients of the normed queries and keys, `[N, heads, 2, Dk]`, and those
    /// of the decays, `[N, heads, parts]`.
    fn rows(&self, step: &BackwardStep<'_>, dout: &Tensor, to: [&Tensor; 2]) -> Result<()> {
        let shape = self.shape(&self.tables.chunks, step.heads, self.heads.key_dim)?;
        macro_rules! rows {
            ($kernel:expr) => {{
                let (pieces, dout) = (In::all(&self.tables.chunks)?, In::all(dout)?);
                let (states, dstates) = (In::optional(step.states)?, In::optional(step.dstates)?);
                let (missing, du) = (In::all(step.missing)?, In::all(step.du)?);
                let (dkq, slopes) = (InOut::all(to[0])?, Out::all(to[1])?);
                let first = step.heads.first;
                launch!(
                    $kernel,
                    self,
                    shape,
                    first,
                    [pieces, states, dstates, missing, du, dout, dkq, slopes],
                    []
                )
            }};
        }
        let width = self.heads.value_dim;
        if self.is_bf16() {
            rows!(by_width!(
                width,
                [
                    gated_delta_backward_rows_64_bf16,
                    gated_delta_backward_rows_128_bf16,
                    gated_delta_backward_rows_256_bf16
                ]
            ))
        } else {
            rows!(by_width!(
                width,
                [
                    gated_delta_backward_rows_64_f32,
                    gated_delta_backward_rows_128_f32,
                    gated_delta_backward_rows_256_f32
                ]
            ))
        }
    }

    /// Step 4: writes the gradients of queries, keys, values and b.
    fn inputs(
        &self,
        step: &BackwardStep<'_>,
        dkq: &Tensor,
        dqkv: &Tensor,
        gates: &GateGrads<'_>,
    ) -> Result<()> {
        let (heads, range) = (self.heads, step.heads);
        let key_heads = range.count / heads.group();
        let shape = LaunchShape::line((self.rows * key_heads).div_ceil(UNITS), THREADS);
        let (first, keys) = (range.first / heads.group(), key_heads * heads.key_dim);
        let columns = |start, len| ColumnView { tensor: dqkv, start, len };
        let dq = columns(first * heads.key_dim, keys);
        let dk = columns(heads.key_width() + first * heads.key_dim, keys);
        let values = 2 * heads.key_width() + range.first * heads.value_dim;
        let dv = columns(values, range.count * heads.value_dim);
        let db =
            ColumnView { tensor: gates.db.tensor, start: gates.db.start + range.first, len: range.count };
        let (rows, count, db_stride) =
            (number(self.rows)?, number(range.count)?, number(gates.db.tensor.dim(1)?)?);
        macro_rules! inputs {
            ($kernel:ident) => {{
                let (dkq, missing, du) = (In::all(dkq)?, In::all(step.missing)?, In::all(step.du)?);
                let (dq, dk) = (Out::columns(&dq)?, Out::columns(&dk)?);
                let (dv, db) = (Out::columns(&dv)?, Out::columns(&db)?);
                launch!(
                    kernels::$kernel,
                    self,
                    shape,
                    range.first,
                    [dkq, missing, du, dq, dk, dv, db],
                    [rows, count, db_stride]
                )
            }};
        }
        if self.is_bf16() {
            inputs!(gated_delta_backward_inputs_bf16)
        } else {
            inputs!(gated_delta_backward_inputs_f32)
        }
    }

    /// Step 5: writes the gradient of a, and those of the parameters by token to `sums`.
    fn decays(
        &self,
        step: &BackwardStep<'_>,
        slopes: &Tensor,
        gates: &GateGrads<'_>,
        sums: Option<&Tensor>,
    ) -> Result<()> {
        let range = step.heads;
        let shape = self.shape(&self.tables.chunks, range, 1)?;
        let da =
            ColumnView { tensor: gates.da.tensor, start: gates.da.start + range.first, len: range.count };
        let parts = self.heads.key_dim.div_ceil(LINES);
        let (rows, parts, da_stride) = (number(self.rows)?, number(parts)?, number(gates.da.tensor.dim(1)?)?);
        macro_rules! decays {
            ($kernel:ident) => {{
                let (pieces, slopes) = (In::all(&self.tables.chunks)?, In::all(slopes)?);
                let (states, dstates) = (In::optional(step.states)?, In::optional(step.dstates)?);
                let (da, sums) = (Out::columns(&da)?, Out::optional(sums)?);
                launch!(
                    kernels::$kernel,
                    self,
                    shape,
                    range.first,
                    [pieces, states, dstates, slopes, da, sums],
                    [rows, parts, da_stride]
                )
            }};
        }
        if self.is_bf16() {
            decays!(gated_delta_backward_decays_bf16)
        } else {
            decays!(gated_delta_backward_decays_f32)
        }
    }
}

/// The tensors between the steps of the backward for some heads.
struct BackwardStep<'a> {
    heads: HeadRange,
    states: Option<&'a Tensor>,
    dstates: Option<&'a Tensor>,
    missing: &'a Tensor,
    du: &'a Tensor,
}

pub(super) fn forward(
    driver: &dyn Driver,
    inputs: DeltaInputs<'_>,
    heads: DeltaHeads,
    spans: &[Span],
    state: Option<&TensorMut>,
) -> Result<DeltaOutput> {
    let (launches, device) = (Launches::new(driver, inputs, heads, spans)?, inputs.qkv.device());
    let out = empty(launches.rows, heads.value_width(), inputs.qkv.dtype(), device)?;
    let chunks = if state.is_some() { 0 } else { states_of(spans) };
    let saved = empty(chunks, heads.num_value_heads * heads.state_len(), DType::F32, device)?;
    launches.forward(state, &out, (chunks > 0).then_some(&*saved))?;
    let shape = (chunks, heads.num_value_heads, heads.key_dim, heads.value_dim);
    Ok(DeltaOutput { out: out.into_tensor(), states: saved.into_tensor().reshape(shape)? })
}

pub(super) fn backward(
    driver: &dyn Driver,
    inputs: DeltaInputs<'_>,
    output: &DeltaOutput,
    dout: &Tensor,
    heads: DeltaHeads,
    spans: &[Span],
    gates: GateGrads<'_>,
) -> Result<Tensor> {
    let launches = Launches::new(driver, inputs, heads, spans)?;
    let (rows, chunks) = (launches.rows, states_of(spans));
    let dqkv = empty(rows, heads.conv_width(), inputs.qkv.dtype(), inputs.qkv.device())?;
    let states = (chunks > 0).then_some(&output.states);
    let parts = heads.key_dim.div_ceil(LINES);
    let group = heads.group();
    debug_assert!(chunks <= rows / CHUNK);
    let at_once = heads.key_heads_at_once(rows, WORKSPACE);
    for first in (0..heads.num_key_heads).step_by(at_once) {
        let count = at_once.min(heads.num_key_heads - first) * group;
        let range = HeadRange { first: first * group, count };
        let missing = launches.missing(range, states)?;
        let du = launches.step_tensor(rows, count * heads.value_dim)?;
        let dstates = launches.step_tensor(chunks, count * heads.state_len())?;
        let dstates = (chunks > 0).then_some(&*dstates);
        launches.columns(range, dout, &du, dstates)?;
        let step = BackwardStep { heads: range, states, dstates, missing: &missing, du: &du };
        let dkq = launches.step_tensor(rows, count * 2 * heads.key_dim)?;
        let slopes = launches.step_tensor(rows, count * parts)?;
        launches.rows(&step, dout, [&dkq, &slopes])?;
        launches.inputs(&step, &dkq, &dqkv, &gates)?;
        let params = [gates.params.dt_bias, gates.params.a_log];
        let is_trained = rows > 0 && params.iter().any(Option::is_some);
        let sums = is_trained.then(|| launches.step_tensor(2 * rows, count)).transpose()?;
        launches.decays(&step, &slopes, &gates, sums.as_deref())?;
        let Some(sums) = sums else { continue };
        for (i, grad) in params.into_iter().enumerate() {
            let Some(grad) = grad else { continue };
            let own = grad.narrow(0, range.first, count)?;
            let of_rows = sums.narrow(0, i * rows, rows)?;
            sum_rows(&own, ColumnView::all(&of_rows))?;
        }
    }
    Ok(dqkv.into_tensor())
}
