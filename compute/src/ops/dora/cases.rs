//! Cases of DoRA.

use super::{
    magnitude_backward, magnitude_backward_reference, scale_columns, scale_columns_reference, weight_norm,
    weight_norm_reference,
};
use crate::ops::case::{OpCase, TensorPair, Tolerance};
use crate::ops::matmul::{ColumnView, ColumnViewMut};
use crate::ops::matmul_quantized::Weight;
use crate::ops::matmul_quantized::cases::{FORMATS, quantized};

/// The cases of norms, magnitudes and their gradients.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = Vec::new();
    for quantize in [false, true] {
        let what = if quantize { "nf4 70x40" } else { "dense 70x40" };
        cases.push(OpCase::new("weight_norm", what, Tolerance::FORWARD, move |runner| {
            let (w, [here, plain]) =
                (runner.normal("w", (70, 40))?, quantized(runner, FORMATS[0], (70, 40))?);
            let (a, b) = (runner.normal_f32("a", (3, 40))?, runner.normal_f32("b", (70, 3))?);
            let (here, plain) = if quantize {
                (Weight::Quantized(&here), Weight::Quantized(&plain))
            } else {
                (Weight::Dense(&w.here), Weight::Dense(&w.plain))
            };
            let got = weight_norm(here, &a.here, &b.here, 0.7)?;
            Ok(vec![TensorPair::new(got, weight_norm_reference(plain, &a.plain, &b.plain, 0.7)?)])
        }));
    }
    for accumulate in [false, true] {
        let what = if accumulate { "added" } else { "written" };
        cases.push(OpCase::new("scale_columns", what, Tolerance::ROUNDED, move |runner| {
            let (dst, x) = (runner.normal("dst", (23, 31))?, runner.normal("x", (23, 20))?);
            let factors = runner.normal_f32("factors", 17)?;
            let dst_of = |tensor| ColumnViewMut { tensor, start: 6, len: 17 };
            let x_of = |tensor| ColumnView { tensor, start: 2, len: 17 };
            scale_columns(dst_of(&dst.here), x_of(&x.here), &factors.here, accumulate)?;
            scale_columns_reference(dst_of(&dst.plain), x_of(&x.plain), &factors.plain, accumulate)?;
            Ok(vec![dst.pair()])
        }));
    }
    cases.push(OpCase::new("magnitude_backward", "a column range", Tolerance::BACKWARD, |runner| {
        let (grad, dy) = (runner.normal_f32("grad", 17)?, runner.normal("dy", (23, 31))?);
        let (x, norm) = (runner.normal("x", (23, 17))?, runner.normal_f32("norm", 17)?);
        let range = |tensor| ColumnView { tensor, start: 6, len: 17 };
        magnitude_backward(&grad.here, range(&dy.here), &x.here, &norm.here)?;
        magnitude_backward_reference(&grad.plain, range(&dy.plain), &x.plain, &norm.plain)?;
        Ok(vec![grad.pair()])
    }));
    cases
}
