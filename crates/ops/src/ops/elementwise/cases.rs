//! Cases of sums and copies, element by element.

use candle_core::{DType, Shape, Tensor};

use super::{add, add_into, scaled, stack_rows, sums_of_squares};
use crate::error::Result;
use crate::ops::case::{CaseRunner, OpCase, OpPair, TensorPair, Tolerance, in_f64};
use crate::runtime::copy;

/// A shape with more elements than a chunk of `reduce`, and not a multiple of one.
const SQUARE: (usize, usize) = (131, 130);

/// Returns the cases of sums, and of the copies of `runtime`.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = vec![
        add_case("", SQUARE),
        OpCase::new("zero", "", Tolerance::ROUNDED, |runner| {
            let x = runner.normal("x", SQUARE)?;
            copy::zero(&x.here)?;
            Ok(vec![TensorPair::new(x.here.into_tensor(), x.plain.zeros_like()?)])
        }),
        scaled_case("", SQUARE),
        squares_case("three tensors", vec![SQUARE.into(), 5.into(), 40_003.into()]),
        stacked_case("", vec![3, 1, 8], 37),
        stacked_case("whole accesses", vec![16, 8], 2112),
    ];
    cases.extend(into_cases("", SQUARE));
    cases
}

/// Returns the case of a sum of two tensors of this shape.
pub(in crate::ops) fn add_case(what: &str, shape: (usize, usize)) -> OpCase {
    OpCase::new("add", what, Tolerance::ROUNDED, move |runner| {
        let (a, b) = (runner.normal("a", shape)?, runner.normal("b", shape)?);
        Ok(vec![TensorPair::new(add(&a.here, &b.here)?, (&*a.plain + &*b.plain)?)])
    })
}

/// Returns the case of a product of a tensor of this shape with a number.
pub(in crate::ops) fn scaled_case(what: &str, shape: (usize, usize)) -> OpCase {
    OpCase::new("scaled", what, Tolerance::ROUNDED, move |runner| {
        let x = runner.normal("x", shape)?;
        Ok(vec![TensorPair::new(scaled(&x.here, 0.22)?, x.plain.affine(0.22, 0.0)?)])
    })
}

/// Returns the case of matrices of these rows and this width, one under the other.
pub(in crate::ops) fn stacked_case(what: &str, rows: Vec<usize>, width: usize) -> OpCase {
    OpCase::new("stack_rows", what, Tolerance::ROUNDED, move |runner| {
        let all = rows.iter().map(|rows| runner.normal("x", (*rows, width)));
        let all = all.collect::<Result<Vec<_>>>()?;
        let here: Vec<&Tensor> = all.iter().map(|x| &*x.here).collect();
        let plain: Vec<&Tensor> = all.iter().map(|x| &*x.plain).collect();
        Ok(vec![TensorPair::new(stack_rows(&here)?, Tensor::cat(&plain, 0)?)])
    })
}

/// Returns the case of the sums of squares of tensors of these shapes.
pub(in crate::ops) fn squares_case(what: &str, shapes: Vec<Shape>) -> OpCase {
    OpCase::new("sums_of_squares", what, Tolerance::FORWARD, move |runner| {
        let all = shapes.iter().map(|shape| runner.normal("x", shape)).collect::<Result<Vec<_>>>()?;
        let here: Vec<&Tensor> = all.iter().map(|x| &*x.here).collect();
        let sums = sums_of_squares(&here, runner.device)?.read()?;
        let want = |x: &OpPair| -> Result<f64> { Ok(in_f64(&x.plain)?.iter().map(|x| x * x).sum()) };
        all.iter().zip(sums).map(|(x, sum)| TensorPair::scalars(sum, want(x)?)).collect()
    })
}

/// Returns the cases of sums and copies into tensors of this shape, of the same dtype and of
/// another.
pub(in crate::ops) fn into_cases(more: &str, shape: (usize, usize)) -> Vec<OpCase> {
    let mut cases = Vec::new();
    for (dtypes, tolerance, what) in [
        ([None, None], Tolerance::ROUNDED, "one dtype"),
        ([Some(DType::F32), None], Tolerance::ROUNDED.only_bf16(), "into f32"),
        ([None, Some(DType::F32)], Tolerance::ROUNDED.only_bf16(), "from f32"),
    ] {
        let what = format!("{what}{more}");
        let inputs = move |runner: &CaseRunner<'_>| -> Result<(OpPair, OpPair)> {
            let [dst, x] = dtypes.map(|dtype| dtype.unwrap_or(runner.dtype));
            Ok((runner.normal_as(dst, "dst", shape)?, runner.normal_as(x, "x", shape)?))
        };
        cases.push(OpCase::new("add_into", &what, tolerance, move |runner| {
            let (dst, x) = inputs(runner)?;
            add_into(&dst.here, &x.here)?;
            Ok(vec![TensorPair::new(dst.here.into_tensor(), (&*dst.plain + &*x.plain)?)])
        }));
        cases.push(OpCase::new("copy_into", &what, tolerance, move |runner| {
            let (dst, x) = inputs(runner)?;
            copy::copy_into(&dst.here, &x.here)?;
            Ok(vec![TensorPair::new(dst.here.into_tensor(), x.plain.into_tensor())])
        }));
    }
    cases
}
