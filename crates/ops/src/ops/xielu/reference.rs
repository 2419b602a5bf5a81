//! xIELU in candle's primitives.

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::runtime::TensorMut;

/// The parts of xIELU, `[N, F]` f32 each.
struct Parts {
    /// The factors of the two curvatures.
    positive: Tensor,
    negative: Tensor,
    /// Derivatives of these.
    positive_slope: Tensor,
    negative_slope: Tensor,
}

/// Returns number `at` of a curve, `[1, 1]`.
fn number(curve: &Tensor, at: usize) -> Result<Tensor> {
    Ok(curve.narrow(0, at, 1)?.reshape((1, 1))?)
}

impl Parts {
    fn of(x: &Tensor, curve: &Tensor) -> Result<Self> {
        let zeros = x.zeros_like()?;
        let eps = number(curve, 3)?.broadcast_as(x.shape())?.contiguous()?;
        let (is_positive, is_below) = (x.gt(&zeros)?, x.lt(&eps)?);
        let clamped = is_below.where_cond(x, &eps)?;
        let grown = (clamped.exp()? - 1.0)?;
        let below = is_below.where_cond(&grown, &zeros)?;
        Ok(Parts {
            positive: is_positive.where_cond(&x.sqr()?, &zeros)?,
            negative: is_positive.where_cond(&zeros, &(grown - x)?)?,
            positive_slope: is_positive.where_cond(&(x * 2.0)?, &zeros)?,
            negative_slope: {
                let outside = is_below.where_cond(&zeros, &(zeros.ones_like()? * -1.0)?)?;
                is_positive.where_cond(&zeros, &(below + outside)?)?
            },
        })
    }

    /// Returns the sum of the parts by a curve's curvatures, plus `linear`.
    fn sum(curve: &Tensor, [positive, negative]: [&Tensor; 2], linear: &Tensor) -> Result<Tensor> {
        let positive = positive.broadcast_mul(&number(curve, 0)?)?;
        Ok(((positive + negative.broadcast_mul(&number(curve, 1)?)?)? + linear)?)
    }
}

/// The definition of [`super::xielu`].
pub(crate) fn reference(x: &Tensor, curve: &Tensor) -> Result<Tensor> {
    let wide = x.to_dtype(DType::F32)?;
    let parts = Parts::of(&wide, curve)?;
    let linear = wide.broadcast_mul(&number(curve, 2)?)?;
    Ok(Parts::sum(curve, [&parts.positive, &parts.negative], &linear)?.to_dtype(x.dtype())?)
}

/// The backward formula in candle's primitives, without the activated values.
pub(crate) fn reference_backward(
    x: &Tensor,
    dh: &Tensor,
    curve: &Tensor,
    dcurve: Option<&TensorMut>,
) -> Result<Tensor> {
    let (wide, dh) = (x.to_dtype(DType::F32)?, dh.to_dtype(DType::F32)?);
    let parts = Parts::of(&wide, curve)?;
    if let Some(dcurve) = dcurve {
        let sum = |part: &Tensor| -> Result<Tensor> { Ok((part * &dh)?.sum_all()?.reshape(1)?) };
        let sums = Tensor::cat(&[sum(&parts.positive)?, sum(&parts.negative)?], 0)?;
        dcurve.slice_set(&(sums + dcurve.to_dtype(DType::F32)?)?, 0, 0)?;
    }
    let linear = number(curve, 2)?.broadcast_as(wide.shape())?.contiguous()?;
    let slope = Parts::sum(curve, [&parts.positive_slope, &parts.negative_slope], &linear)?;
    Ok((dh * slope)?.to_dtype(x.dtype())?)
}
