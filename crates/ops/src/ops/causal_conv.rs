//! Depthwise causal convolution over packed sequences: the mixing of neighbours before a linear
//! attention (arXiv 2312.00752, 2412.06464), where SiLU follows, or instead of one (LFM2).
//!
//! `s[n, c] = Σ_w weight[c, w] · x[n − (W − 1) + w, c]` over the inputs of the same span, `y =
//! silu(s)` or `y = s`. All in f32, rounded once; no sum depends on another span.
//!
//! Backward, from `x` alone: `ds = dy · silu'(s)` or `ds = dy`, `dx[m] = Σ_w weight[w] · ds[m + (W
//! − 1) − w]`, `dweight[c, w] = Σ_n ds[n, c] · x[n − (W − 1) + w, c]`.

pub(super) mod cases;
mod cuda;
mod reference;

use rayon::prelude::*;

use candle_core::Tensor;

use super::attention::Span;
use super::glu::Activation;
use super::matmul::{ColumnView, ColumnViewMut};
use crate::backends::gpu::Implementation;
use crate::error::{Error, Result};
use crate::instruction_set::vectorized;
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{
    FloatElement, dims2, read, tensor, unwritten, update, update_in_f32, with_elem,
};
use crate::runtime::trace::{SpanInfo, span};
pub(crate) use reference::{reference, reference_backward};

/// The numbers of tokens of an output for which kernels exist.
pub const KERNEL_TAPS: [usize; 2] = [3, 4];

/// The weights of a convolution, and whether SiLU follows.
#[derive(Debug, Clone, Copy)]
pub struct ConvWeight<'a> {
    /// The weights: `[C, W]`, f32 or bf16.
    pub weight: &'a Tensor,
    /// True if SiLU follows.
    pub has_silu: bool,
}

impl<'a> ConvWeight<'a> {
    /// Returns a convolution by `weight: [C, W]`, f32 or bf16, before SiLU.
    pub fn silu(weight: &'a Tensor) -> Self {
        ConvWeight { weight, has_silu: true }
    }

    /// Returns a convolution by `weight: [C, W]`, f32 or bf16, without an activation.
    pub fn plain(weight: &'a Tensor) -> Self {
        ConvWeight { weight, has_silu: false }
    }
}

/// Columns that a loop processes at a time: their sums stay in the L1 cache.
const COLUMNS: usize = 512;
/// Rows of a task of the backward.
const ROWS: usize = 64;

/// Returns the convolution of `x: [N, C]` by `conv: [C, W]`, without bias: `[N, C]` in the dtype of
/// `x`. Inputs before a span are zero, or those of `state: [W − 1, C]` (generation,
/// one span), which has the last `W − 1` inputs afterwards. Rows outside all spans are zero.
///
/// # Errors
/// Fails if a tensor is not contiguous or of floating-point values, `state` is given for several
/// spans, or an operation of the device fails.
pub fn causal_conv(
    x: ColumnView<'_>,
    conv: ConvWeight<'_>,
    spans: &[Span],
    state: Option<&TensorMut>,
) -> Result<Tensor> {
    let ConvWeight { weight, has_silu } = conv;
    let _span = span(|| conv_info("causal_conv", x, weight, 2));
    if state.is_some() && !is_one_sequence(spans, x.tensor) {
        return Err(Error::internal("a state of a convolution requires one span of all rows"));
    }
    match Implementation::of(x.tensor, cuda::is_supported(x, weight)) {
        Implementation::Kernel(driver) => return cuda::forward(driver, x, conv, spans, state),
        Implementation::Composed => return reference(x, conv, spans, state),
        Implementation::Cpu => {}
    }
    let ((rows, width), (channels, taps)) = (dims2(x.tensor)?, dims2(weight)?);
    let by_tap = by_tap(weight)?;
    let places = places(spans, rows);
    with_elem!(x.tensor.dtype(), T => {
        let data = read::<T>(x.tensor)?;
        let all = ConvRows { data: &data[x.start.min(data.len())..], stride: width, weight: &by_tap, channels, has_silu };
        let mut y = unwritten::<T>(rows * channels);
        let Some(state) = state else {
            all.forward(&mut y, &places, 0);
            return tensor(y, (rows, channels));
        };
        // The inputs of the state, then those of the span.
        let mut extended = read::<T>(state)?.to_vec();
        (0..rows).for_each(|row| extended.extend_from_slice(all.row(row, 0, channels)));
        let state_start = extended.len() - (taps - 1) * channels;
        let extended_rows = ConvRows { data: &extended, stride: channels, ..all };
        extended_rows.forward(&mut y, &places, taps - 1);
        update(state, |state: &mut [T]| state.copy_from_slice(&extended[state_start..]))?;
        tensor(y, (rows, channels))
    })
}

/// Writes the gradient of `x: [N, C]` to `dx: [N, C]`, given `conv: [C, W]` and `dy: [N, C]`, all
/// but the weight in the same dtype. Adds the gradient of the weight to `dweight: [C, W]` f32, on
/// the CPU also bf16.
///
/// # Errors
/// Fails if a tensor is not contiguous, the dtypes differ, or an operation of the device fails.
pub fn causal_conv_backward(
    x: ColumnView<'_>,
    conv: ConvWeight<'_>,
    dy: &Tensor,
    spans: &[Span],
    dweight: Option<&TensorMut>,
    dx: ColumnViewMut<'_>,
) -> Result<()> {
    let ConvWeight { weight, has_silu } = conv;
    let _span = span(|| conv_info("causal_conv_backward", x, weight, 3));
    match Implementation::of(x.tensor, cuda::is_supported(x, weight)) {
        Implementation::Kernel(driver) => {
            return cuda::backward(driver, [x, ColumnView::all(dy)], conv, spans, dweight, dx);
        }
        Implementation::Composed => return reference_backward(x, conv, dy, spans, dweight, dx),
        Implementation::Cpu => {}
    }
    let ((rows, width), (channels, taps)) = (dims2(x.tensor)?, dims2(weight)?);
    let (_, dx_width) = dims2(dx.tensor)?;
    let by_tap = by_tap(weight)?;
    let places = places(spans, rows);
    let parts: Vec<Vec<f32>> = with_elem!(x.tensor.dtype(), T => {
        let (data, dy) = (read::<T>(x.tensor)?, read::<T>(dy)?);
        let (data, dy): (&[T], &[T]) = (&data, &dy);
        let all = ConvRows { data: &data[x.start.min(data.len())..], stride: width, weight: &by_tap, channels, has_silu };
        update(dx.tensor, |to: &mut [T]| {
            let blocks = to.par_chunks_mut(ROWS * dx_width).enumerate();
            let of_block = |(block, to): (usize, &mut [T])| {
                let mut part = vec![0f32; if dweight.is_some() { taps * channels } else { 0 }];
                let to = BlockRows { data: to, stride: dx_width, start: dx.start, first: block * ROWS };
                all.backward(dy, &places, to, &mut part);
                part
            };
            blocks.map(of_block).collect()
        })
    })?;
    let Some(dweight) = dweight else { return Ok(()) };
    update_in_f32(dweight, |sums| {
        for part in &parts {
            for (c, sums) in sums.chunks_exact_mut(taps).enumerate() {
                sums.iter_mut().enumerate().for_each(|(w, sum)| *sum += part[w * channels + c]);
            }
        }
    })
}

/// Returns true if `spans` is one span of all rows of `x`.
pub(super) fn is_one_sequence(spans: &[Span], x: &Tensor) -> bool {
    matches!(spans, [span] if span.q_start == 0 && Some(&span.q_len) == x.dims().first())
}

/// Returns the trace info of a pass over `passes` tensors of the size of `x`.
fn conv_info(name: &'static str, x: ColumnView<'_>, weight: &Tensor, passes: usize) -> SpanInfo {
    let rows = x.tensor.dims().first().copied().unwrap_or_default();
    let taps = weight.dims().last().copied().unwrap_or_default();
    let bytes = passes * rows * x.len * x.tensor.dtype().size_in_bytes();
    SpanInfo::op(name).dims(&[rows, x.len, taps]).bytes(bytes)
}

/// The rows of the same span before and after a row.
#[derive(Debug, Clone, Copy)]
struct RowInSpan {
    before: usize,
    after: usize,
}

/// Returns the place of each of `rows` rows; none outside all spans.
fn places(spans: &[Span], rows: usize) -> Vec<Option<RowInSpan>> {
    let mut places = vec![None; rows];
    for span in spans {
        for (i, position) in places[span.q_start..][..span.q_len].iter_mut().enumerate() {
            *position = Some(RowInSpan { before: i, after: span.q_len - 1 - i });
        }
    }
    places
}

/// Returns the weight as `[W, C]` f32.
fn by_tap(weight: &Tensor) -> Result<Vec<f32>> {
    let (channels, taps) = dims2(weight)?;
    with_elem!(weight.dtype(), W => {
        let weight = read::<W>(weight)?;
        let weight: &[W] = &weight;
        Ok((0..taps * channels).map(|i| weight[i % channels * taps + i / channels].widen()).collect())
    })
}

/// Some rows of a column range that a task writes.
struct BlockRows<'a, T> {
    data: &'a mut [T],
    stride: usize,
    /// The first column.
    start: usize,
    /// The number of the first row.
    first: usize,
}

/// The inputs of a convolution: `data` begins with the first of its columns.
#[derive(Clone, Copy)]
struct ConvRows<'a, T> {
    data: &'a [T],
    stride: usize,
    /// The weight by taps, `[W, C]`.
    weight: &'a [f32],
    channels: usize,
    has_silu: bool,
}

impl<T: FloatElement> ConvRows<'_, T> {
    fn row(&self, row: usize, from: usize, len: usize) -> &[T] {
        &self.data[row * self.stride + from..][..len]
    }

    fn taps(&self) -> usize {
        self.weight.len() / self.channels.max(1)
    }

    /// Returns the weights of a tap from channel `from` on.
    fn weights(&self, tap: usize, from: usize, len: usize) -> &[f32] {
        &self.weight[tap * self.channels + from..][..len]
    }

    /// Writes the sums of `row`, which has `before` inputs before it, from channel `from` on.
    fn sums(&self, row: usize, before: usize, from: usize, sums: &mut [f32]) {
        sums.fill(0.0);
        let last = self.taps() - 1;
        for back in (0..=last.min(before)).rev() {
            let x = self.row(row - back, from, sums.len());
            add_tap(sums, x, self.weights(last - back, from, sums.len()));
        }
    }

    /// Writes the rows of `y: [N, C]`; row `n` is the row `n + extra` here, which has `extra` more
    /// inputs before it than its place says.
    fn forward(&self, y: &mut [T], places: &[Option<RowInSpan>], extra: usize) {
        let of_rows = y.par_chunks_mut(self.channels).zip(places).enumerate().with_min_len(4);
        of_rows.for_each(|(row, (y, position))| {
            let Some(position) = position else { return y.fill(T::default()) };
            let mut sums = [0f32; COLUMNS];
            for (i, y) in y.chunks_mut(COLUMNS).enumerate() {
                let sums = &mut sums[..y.len()];
                self.sums(row + extra, position.before + extra, i * COLUMNS, sums);
                if self.has_silu {
                    write_silu(y, sums);
                } else {
                    narrow(y, sums);
                }
            }
        });
    }

    /// Writes the gradients of a block of rows, and adds their part of the weight's gradient to
    /// `part: [W, C]` unless it is empty.
    fn backward(&self, dy: &[T], places: &[Option<RowInSpan>], to: BlockRows<'_, T>, part: &mut [f32]) {
        let (first, last) = (to.first, self.taps() - 1);
        let rows = to.data.len() / to.stride;
        // Rows after the block take part in the gradients of its last rows.
        let end = (first + rows + last).min(places.len());
        let mut ds = vec![0f32; (end - first) * COLUMNS];
        for from in (0..self.channels).step_by(COLUMNS) {
            let len = COLUMNS.min(self.channels - from);
            for (row, ds) in (first..end).zip(ds.chunks_exact_mut(COLUMNS)) {
                let Some(position) = places[row] else { continue };
                let (ds, dy) = (&mut ds[..len], &dy[row * self.channels + from..][..len]);
                if self.has_silu {
                    self.sums(row, position.before, from, ds);
                    times_slope(ds, dy);
                } else {
                    ds.iter_mut().zip(dy).for_each(|(ds, dy)| *ds = dy.widen());
                }
            }
            for (i, row) in to.data.chunks_exact_mut(to.stride).enumerate() {
                let dx = &mut row[to.start + from..][..len];
                let Some(position) = places[first + i] else {
                    dx.fill(T::default());
                    continue;
                };
                let mut sum = [0f32; COLUMNS];
                for ahead in 0..=last.min(position.after) {
                    let ds = &ds[(i + ahead) * COLUMNS..][..len];
                    add_tap(&mut sum[..len], ds, self.weights(last - ahead, from, len));
                }
                narrow(dx, &sum[..len]);
                if part.is_empty() {
                    continue;
                }
                for back in 0..=last.min(position.before) {
                    let sums = &mut part[(last - back) * self.channels + from..][..len];
                    add_tap(sums, self.row(first + i - back, from, len), &ds[i * COLUMNS..][..len]);
                }
            }
        }
    }
}

vectorized! {
    fn add_tap<T: FloatElement>(sums: &mut [f32], x: &[T], factors: &[f32]) {
        for ((sum, x), factor) in sums.iter_mut().zip(x).zip(factors) {
            *sum += x.widen() * factor;
        }
    }
}

vectorized! {
    fn write_silu<T: FloatElement>(y: &mut [T], sums: &[f32]) {
        for (y, sum) in y.iter_mut().zip(sums) {
            *y = T::nearest(Activation::Silu.value_and_slope(*sum).0);
        }
    }
}

vectorized! {
    /// Replaces sums by the gradients of them.
    fn times_slope<T: FloatElement>(sums: &mut [f32], dy: &[T]) {
        for (sum, dy) in sums.iter_mut().zip(dy) {
            *sum = dy.widen() * Activation::Silu.value_and_slope(*sum).1;
        }
    }
}

vectorized! {
    fn narrow<T: FloatElement>(to: &mut [T], from: &[f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = T::nearest(*from);
        }
    }
}
