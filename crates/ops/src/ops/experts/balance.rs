//! The auxiliary loss of a router, which balances the load of experts (Switch Transformers, arXiv
//! 2101.03961, equation 4).

use candle_core::{D, DType, Tensor};
use rayon::prelude::*;

use super::choice::softmax;
use super::cuda;
use crate::backends::gpu::{self, Route, are_floats};
use crate::backends::simd;
use crate::error::Result;
use crate::rounding::Rounded;
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, update, with_elem};
use crate::runtime::trace::{SpanInfo, span};

/// Returns Σ p · pull over all tokens, for p = softmax(logits), and adds its gradient to `dlogits`.
/// `logits` and `dlogits` are `[N, E]` in one dtype, `pull` is `[E]` f32. Waits for the device.
///
/// # Errors
/// Fails if a tensor is not contiguous, the dtypes differ, or an operation of the device fails.
pub fn balance_experts(logits: &Tensor, pull: &Tensor, dlogits: &TensorMut) -> Result<f64> {
    let _span =
        span(|| SpanInfo::op("balance_experts").dims(logits.dims()).moves(&[logits, dlogits, dlogits]));
    match Route::of(logits, are_floats([logits.dtype()])) {
        Route::Kernel(driver) => {
            let values: Vec<f32> = gpu::read(&*cuda::balance(driver, logits, pull, dlogits)?)?;
            return Ok(values.into_iter().map(f64::from).sum());
        }
        Route::Composed => return reference(logits, pull, dlogits),
        Route::Cpu => {}
    }
    let (rows, experts) = dims2(logits)?;
    let mut values = vec![0f32; rows];
    let pull = read::<f32>(pull)?;
    let pull: &[f32] = &pull;
    with_elem!(logits.dtype(), T => {
        let logits = read::<T>(logits)?;
        let logits: &[T] = &logits;
        update(dlogits, |dlogits: &mut [T]| {
            let of_rows = dlogits.par_chunks_mut(experts).zip(logits.par_chunks(experts)).zip(&mut values);
            of_rows.with_min_len(16).for_each_init(Vec::new, |p: &mut Vec<f32>, ((d, row), value)| {
                p.clear();
                p.extend(row.iter().map(|x| x.widen()));
                let largest = simd::largest(p);
                p.iter_mut().for_each(|x| *x = (*x - largest).exp());
                let sum: f32 = p.iter().sum();
                p.iter_mut().for_each(|x| *x /= sum);
                *value = p.iter().zip(pull).map(|(p, pull)| p * pull).sum();
                for ((d, p), pull) in d.iter_mut().zip(p.iter()).zip(pull) {
                    *d = T::nearest(d.widen() + p * (pull - *value));
                }
            });
        })
    })?;
    Ok(values.into_iter().map(f64::from).sum())
}

/// The definition, in candle's primitives.
pub(crate) fn reference(logits: &Tensor, pull: &Tensor, dlogits: &TensorMut) -> Result<f64> {
    let p = softmax(&logits.to_dtype(DType::F32)?)?;
    let values = p.broadcast_mul(pull)?.sum_keepdim(D::Minus1)?;
    let gradient = (&p * pull.broadcast_sub(&values)?)?;
    let sum = (dlogits.to_dtype(DType::F32)? + gradient)?.to_dtype(dlogits.dtype())?;
    dlogits.slice_set(&sum, 0, 0)?;
    Ok(f64::from(values.sum_all()?.to_scalar::<f32>()?))
}
