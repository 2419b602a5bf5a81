//! Cases of DoRA.

use candle_core::DType;

use super::{
    magnitude_backward, magnitude_backward_reference, scale_columns, scale_columns_reference, weight_norm,
    weight_norm_reference,
};
use crate::backends::gpu::has_kernels;
use crate::error::Result;
use crate::ops::case::{CaseRunner, OpCase, TensorPair, Tolerance};
use crate::ops::matmul::{ColumnView, ColumnViewMut};
use crate::ops::matmul_quantized::Weight;
use crate::ops::matmul_quantized::cases::{FORMATS, quantized};

/// Returns the cases of norms, magnitudes and their gradients.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    // An odd rank, and one whose products the tensor cores compute.
    let norms = [
        (false, "dense 70x40, r 3", 3),
        (true, "nf4 70x40, r 3", 3),
        (false, "dense 70x40, r 20", 20),
        (true, "nf4 70x40, r 20", 20),
    ];
    let norms = norms.into_iter().map(|(quantize, what, rank)| norm_case(what, quantize, (70, 40), rank));
    let mut cases: Vec<OpCase> = norms.collect();
    for accumulate in [false, true] {
        let what = if accumulate { "added" } else { "written" };
        cases.push(OpCase::new("scale_columns", what, Tolerance::ROUNDED, move |runner| {
            scaled(runner, 23, [6, 17, 8], accumulate)
        }));
    }
    cases.push(OpCase::new("magnitude_backward", "a column range", Tolerance::BACKWARD, |runner| {
        magnitudes(runner, 23, [6, 17, 8])
    }));
    cases
}

/// Returns the case of the row norms of a weight of this shape with an adapter of this rank.
pub(in crate::ops) fn norm_case(what: &str, quantize: bool, shape: (usize, usize), rank: usize) -> OpCase {
    OpCase::new("weight_norm", what, Tolerance::FORWARD, move |runner| {
        let (w, [here, plain]) = (runner.normal("w", shape)?, quantized(runner, FORMATS[0], shape)?);
        // Only kernels compute with factors in bf16.
        let dtype = if has_kernels(runner.device) { runner.dtype } else { DType::F32 };
        let factor = |name, shape: (usize, usize)| runner.normal_as(dtype, name, shape);
        let (a, b) = (factor("a", (rank, shape.1))?, factor("b", (shape.0, rank))?);
        let (here, plain) = if quantize {
            (Weight::Quantized(&here), Weight::Quantized(&plain))
        } else {
            (Weight::Dense(&w.here), Weight::Dense(&w.plain))
        };
        let got = weight_norm(here, &a.here, &b.here, 0.7)?;
        Ok(vec![TensorPair::new(got, weight_norm_reference(plain, &a.plain, &b.plain, 0.7)?)])
    })
}

/// Compares columns of a matrix, times their factors, written into columns of another, with
/// `margin` columns on both sides.
pub(in crate::ops) fn scaled(
    runner: &CaseRunner<'_>,
    rows: usize,
    [before, len, behind]: [usize; 3],
    accumulate: bool,
) -> Result<Vec<TensorPair>> {
    let (dst, x) =
        (runner.normal("dst", (rows, before + len + behind))?, runner.normal("x", (rows, len + 3))?);
    let factors = runner.normal_f32("factors", len)?;
    let dst_of = |tensor| ColumnViewMut { tensor, start: before, len };
    let x_of = |tensor| ColumnView { tensor, start: 2, len };
    scale_columns(dst_of(&dst.here), x_of(&x.here), &factors.here, accumulate)?;
    scale_columns_reference(dst_of(&dst.plain), x_of(&x.plain), &factors.plain, accumulate)?;
    Ok(vec![dst.pair()])
}

/// Compares the gradient of magnitudes from columns of dy, laid out as in [`scaled`].
pub(in crate::ops) fn magnitudes(
    runner: &CaseRunner<'_>,
    rows: usize,
    [before, len, behind]: [usize; 3],
) -> Result<Vec<TensorPair>> {
    let (grad, dy) = (runner.normal_f32("grad", len)?, runner.normal("dy", (rows, before + len + behind))?);
    let (x, norm) = (runner.normal("x", (rows, len))?, runner.normal_f32("norm", len)?);
    let range = |tensor| ColumnView { tensor, start: before, len };
    magnitude_backward(&grad.here, range(&dy.here), &x.here, &norm.here)?;
    magnitude_backward_reference(&grad.plain, range(&dy.plain), &x.plain, &norm.plain)?;
    Ok(vec![grad.pair()])
}
