//! Cases of products in fp8.

use candle_core::{DType, Tensor};

use super::{Fp8Rows, matmul_fp8, quantize_fp8, quantize_reference, reference};
use crate::error::Result;
use crate::ops::case::{CaseRunner, OpCase, TensorPair, Tolerance};
use crate::ops::matmul::{Addend, ColumnView, ColumnViewMut, Transpose};
use crate::ops::matmul_quantized::Weight;
use crate::ops::matmul_quantized::look_up;
use crate::quant::E4M3;
use crate::runtime::copy::to_device;

/// Returns the cases of codes and of their products.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = Vec::new();
    for (shape, what) in [((5, 48), "5x48"), ((3, 4112), "3x4112"), ((4, 37), "4x37")] {
        for (with_factors, named) in [(false, ""), (true, ", factors")] {
            let name = format!("{what}{named}");
            cases.push(OpCase::new("quantize_fp8", name, Tolerance::CODES, move |runner| {
                codes_case(runner, shape, with_factors)
            }));
        }
    }
    for (shape, what) in [((32, 48), "32x48"), ((80, 208), "80x208")] {
        for (form, accumulate) in [(Transpose::Nt, false), (Transpose::Nn, true)] {
            let added = if accumulate { ", accumulated" } else { "" };
            let name = format!("{form:?} 7x{what}{added}");
            let tolerance = if accumulate { Tolerance::BACKWARD } else { Tolerance::FORWARD };
            cases.push(OpCase::new("matmul_fp8", name, tolerance, move |runner| {
                Ok(vec![product(runner, shape, 7, form, accumulate)?])
            }));
        }
    }
    cases
}

/// Compares codes and scales of columns of a wider matrix. A row is of zeros, and one of large and
/// small values.
pub(in crate::ops) fn codes_case(
    runner: &CaseRunner<'_>,
    shape: (usize, usize),
    with_factors: bool,
) -> Result<Vec<TensorPair>> {
    let (rows, width) = shape;
    let plain = runner.normal("x", (rows, width + 3))?.plain;
    let sizes: Vec<f32> = (0..rows).map(|row| [1.0, 0.0, 1e-5, 3e4][row % 4]).collect();
    let sizes = Tensor::from_vec(sizes, (rows, 1), plain.device())?;
    let spread = plain.broadcast_mul(&sizes)?.flatten_all()?.to_vec1()?;
    let x = runner.twin(runner.dtype, spread, (rows, width + 3))?;
    let factors = runner.normal_f32("factors", width)?;
    let [here, there] = [&factors.here, &factors.plain].map(|factors| with_factors.then_some(&**factors));
    let columns = |tensor| ColumnView { tensor, start: 2, len: width };
    let got = quantize_fp8(columns(&x.here), here)?;
    let (codes, scales) = quantize_reference(columns(&x.plain), there)?;
    let bytes = to_device(&got.codes, codes.device())?.to_dtype(DType::U32)?;
    let values = look_up(&E4M3, &bytes.flatten_all()?, codes.device())?.reshape(shape)?;
    let relative = to_device(&got.scales, codes.device())?.div(&scales.flatten_all()?)?;
    let ones = relative.ones_like()?;
    Ok(vec![TensorPair::new(values, codes), TensorPair::new(relative, ones)])
}

/// Compares the product of `rows` rows with a matrix of this shape, with extra columns beside the
/// activations.
pub(in crate::ops) fn product(
    runner: &CaseRunner<'_>,
    shape: (usize, usize),
    rows: usize,
    form: Transpose,
    accumulate: bool,
) -> Result<TensorPair> {
    let weight = runner.normal("weight", shape)?;
    let [here, plain] = [&weight.here, &weight.plain].map(|weight| Fp8Rows::of(&[Weight::Dense(weight)]));
    let (k, n) = if form == Transpose::Nt { (shape.1, shape.0) } else { shape };
    let (a, dst) = (runner.normal("a", (rows, k + 3))?, runner.normal("dst", (rows, n + 8))?);
    let a_of = |tensor| ColumnView { tensor, start: 2, len: k };
    let dst_of = |tensor| ColumnViewMut { tensor, start: 8, len: n };
    let addend = Addend::destination_if(accumulate);
    matmul_fp8(dst_of(&dst.here), a_of(&a.here), &here?, form, addend)?;
    reference(dst_of(&dst.plain), a_of(&a.plain), &plain?, form, addend)?;
    Ok(dst.pair())
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;
    use crate::ops::matmul;
    use crate::runtime::rng::RngStream;

    /// The error of fp8 itself: 3 bits of fraction in each operand.
    #[test]
    fn a_product_is_near_that_of_the_values() -> Result<()> {
        let runner = CaseRunner { device: &Device::Cpu, dtype: DType::F32, first: 0 };
        let (x, w) = (runner.normal("x", (9, 512))?.here, runner.normal("w", (64, 512))?.here);
        let fp8 = Fp8Rows::of(&[Weight::Dense(&w)])?;
        for (form, a, n) in
            [(Transpose::Nt, &x, 64), (Transpose::Nn, &runner.normal("dy", (9, 64))?.here, 512)]
        {
            let [got, want] = [(); 2].map(|()| crate::ops::empty(9, n, DType::F32, &Device::Cpu));
            let (got, want) = (got?, want?);
            matmul_fp8(ColumnViewMut::all(&got), ColumnView::all(a), &fp8, form, Addend::Nothing)?;
            let (to, by) = (ColumnViewMut::all(&want), ColumnView::all(&w));
            matmul::reference(to, ColumnView::all(a), by, form, 1.0, Addend::Nothing)?;
            let error = TensorPair::new(got.into_tensor(), want.into_tensor()).error()?;
            assert!((0.002..0.06).contains(&error), "{form:?}: {error}");
        }
        Ok(())
    }

    /// Whole numbers up to 7 are exact in e4m3, if each row has a 7: the products are those of the
    /// matrices, and dx is the gradient by candle's tape.
    #[test]
    fn exact_values_have_the_products_and_gradients_of_the_tape() -> Result<()> {
        let whole = |name: &str, rows: usize, width: usize| -> Result<Tensor> {
            let stream = RngStream::new(3).named(name);
            let value = |at: u64| {
                if at.is_multiple_of(width as u64) { 7.0 } else { (stream.bits(at) % 15) as f32 - 7.0 }
            };
            Ok(Tensor::from_vec(
                (0..(rows * width) as u64).map(value).collect(),
                (rows, width),
                &Device::Cpu,
            )?)
        };
        let (x, w, dy) = (Var::from_tensor(&whole("x", 5, 48)?)?, whole("w", 32, 48)?, whole("dy", 5, 32)?);
        let y = x.matmul(&w.t()?)?;
        let grads = (&y * &dy)?.sum_all()?.backward()?;
        let fp8 = Fp8Rows::of(&[Weight::Dense(&w)])?;
        for (form, a, want) in [(Transpose::Nt, x.as_tensor(), Some(&y)), (Transpose::Nn, &dy, grads.get(&x))]
        {
            let want = want.expect("the tape has a gradient");
            let got = crate::ops::empty(5, want.dim(1)?, DType::F32, &Device::Cpu)?;
            matmul_fp8(ColumnViewMut::all(&got), ColumnView::all(a), &fp8, form, Addend::Nothing)?;
            assert_eq!(got.to_vec2::<f32>()?, want.to_vec2::<f32>()?, "{form:?}");
        }
        Ok(())
    }

    /// A NaN or an infinity is in the product of its row alone.
    #[test]
    fn what_is_not_finite_shows() -> Result<()> {
        for fault in [f32::NAN, f32::INFINITY] {
            let mut values = vec![1f32; 3 * 16];
            values[16 + 5] = fault;
            let x = Tensor::from_vec(values, (3, 16), &Device::Cpu)?;
            let fp8 = Fp8Rows::of(&[Weight::Dense(&Tensor::ones((16, 16), DType::F32, &Device::Cpu)?)])?;
            let y = crate::ops::empty(3, 16, DType::F32, &Device::Cpu)?;
            let (to, x) = (ColumnViewMut::all(&y), ColumnView::all(&x));
            matmul_fp8(to, x, &fp8, Transpose::Nt, Addend::Nothing)?;
            for (row, y) in y.to_vec2::<f32>()?.into_iter().enumerate() {
                assert_eq!(y.iter().all(|y| y.is_finite()), row != 1, "{fault}: {y:?}");
            }
        }
        Ok(())
    }

    /// Rows of stacked matrices are those of each.
    #[test]
    fn a_stack_has_the_rows_of_its_parts() -> Result<()> {
        let runner = CaseRunner { device: &Device::Cpu, dtype: DType::BF16, first: 0 };
        let (first, second) =
            (runner.normal("first", (16, 32))?.here, runner.normal("second", (48, 32))?.here);
        let both = Fp8Rows::of(&[Weight::Dense(&first), Weight::Dense(&second)])?;
        let alone = Fp8Rows::of(&[Weight::Dense(&second)])?;
        let part = both.rows(16, 48)?;
        assert_eq!(part.codes.to_vec2::<u8>()?, alone.codes.to_vec2::<u8>()?);
        assert_eq!(part.scales.to_vec1::<f32>()?, alone.scales.to_vec1::<f32>()?);
        assert_eq!(Fp8Rows::bytes(64, 32), 64 * 32 + 64 * 4);
        Ok(())
    }
}
