//! The router's choice, forward and backward.

use candle_core::{D, DType, Tensor};
use rayon::prelude::*;

use super::cuda;
use super::order::{ExpertChoice, Router};
use crate::error::Result;
use crate::ops::gpu::{Route, are_floats};
use crate::rounding::Rounded;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, tensor, with_elem};
use crate::runtime::trace::{SpanInfo, span};

/// Chooses the experts of each token by `logits: [N, E]`: `[N, k]` u32, with weights in f32. Of
/// equal logits the first ones count.
///
/// # Errors
/// Fails if `logits` is not a contiguous matrix of floating-point values, or an operation of the
/// device fails.
pub fn choose_experts(logits: &Tensor, router: Router) -> Result<ExpertChoice> {
    let _span = span(|| SpanInfo::op("choose_experts").dims(logits.dims()).moves(&[logits]));
    match Route::of(logits, are_floats([logits.dtype()])) {
        Route::Kernel(driver) => return cuda::choose(driver, logits, router),
        Route::Composed => return reference(logits, router),
        Route::Cpu => {}
    }
    let (rows, experts) = dims2(logits)?;
    let k = router.chosen;
    let (mut ids, mut weights) = (vec![0u32; rows * k], vec![0f32; rows * k]);
    with_elem!(logits.dtype(), T => {
        let logits = read::<T>(logits)?;
        let of_rows = ids.par_chunks_mut(k).zip(weights.par_chunks_mut(k)).zip(logits.par_chunks(experts));
        of_rows.with_min_len(16).for_each_init(Vec::new, |values, ((ids, weights), row)| {
            values.clear();
            values.extend(row.iter().map(|x| x.widen()));
            choose_of_row(values, ids, weights, router.renormalize);
        });
        Ok(ExpertChoice { ids: tensor(ids, (rows, k))?, weights: tensor(weights, (rows, k))? })
    })
}

/// Returns the gradient of the logits, `[N, E]` in their dtype, given `dweights: [N, k]` f32, the
/// gradient of the weights of `choice`.
///
/// # Errors
/// Fails if a tensor is not contiguous, or an operation of the device fails.
pub fn choose_experts_backward(
    logits: &Tensor,
    choice: &ExpertChoice,
    dweights: &Tensor,
    router: Router,
) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("choose_experts_backward").dims(logits.dims()).moves(&[logits, logits]));
    match Route::of(logits, are_floats([logits.dtype()])) {
        Route::Kernel(driver) => return cuda::choose_backward(driver, logits, choice, dweights, router),
        Route::Composed => return reference_backward(logits, choice, dweights, router),
        Route::Cpu => {}
    }
    let (rows, experts) = dims2(logits)?;
    let k = router.chosen;
    let (ids, weights, dweights) =
        (read::<u32>(&choice.ids)?, read::<f32>(&choice.weights)?, read::<f32>(dweights)?);
    with_elem!(logits.dtype(), T => {
        let logits = read::<T>(logits)?;
        let mut dlogits = vec![T::default(); rows * experts];
        let chosen = ids.par_chunks(k).zip(weights.par_chunks(k)).zip(dweights.par_chunks(k));
        let of_rows = dlogits.par_chunks_mut(experts).zip(logits.par_chunks(experts)).zip(chosen);
        of_rows.with_min_len(16).for_each_init(Vec::new, |values, ((d, row), ((ids, weights), dweights))| {
            values.clear();
            values.extend(row.iter().map(|x| x.widen()));
            let chosen = ChosenRow { ids, weights, dweights };
            chosen.backward(values, router.renormalize);
            for (d, value) in d.iter_mut().zip(values.iter()) {
                *d = T::nearest(*value);
            }
        });
        tensor(dlogits, (rows, experts))
    })
}

/// Chooses the experts of one token.
fn choose_of_row(logits: &mut [f32], ids: &mut [u32], weights: &mut [f32], renormalize: bool) {
    // A NaN anywhere makes NaNs of the weights, so that the loss shows it.
    let has_nan = logits.iter().any(|x| x.is_nan());
    let mut largest = f32::NEG_INFINITY;
    for (at, (id, weight)) in ids.iter_mut().zip(weights.iter_mut()).enumerate() {
        let left = (0..logits.len()).filter(|e| !logits[*e].is_nan());
        let best = left.reduce(|best, e| if logits[e] > logits[best] { e } else { best });
        // Only NaNs are left: any experts.
        let (best, logit) = best.map_or((at, f32::NAN), |best| (best, logits[best]));
        if at == 0 {
            largest = logit;
        }
        (*id, *weight) = (best as u32, (logit - largest).exp());
        logits[best] = f32::NAN;
    }
    let of_others = logits.iter().filter(|x| !x.is_nan()).map(|x| (x - largest).exp());
    let rest: f32 = if renormalize { 0.0 } else { of_others.sum() };
    let sum = if has_nan { f32::NAN } else { weights.iter().sum::<f32>() + rest };
    weights.iter_mut().for_each(|weight| *weight /= sum);
}

/// The chosen experts of one token, and the gradients of their weights.
struct ChosenRow<'a> {
    ids: &'a [u32],
    weights: &'a [f32],
    dweights: &'a [f32],
}

impl ChosenRow<'_> {
    /// Replaces the logits of the token by their gradients.
    fn backward(&self, logits: &mut [f32], renormalize: bool) {
        let dot: f32 = self.weights.iter().zip(self.dweights).map(|(w, dw)| w * dw).sum();
        if renormalize {
            logits.fill(0.0);
        } else {
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            logits.iter_mut().for_each(|x| *x = (*x - largest).exp());
            let sum: f32 = logits.iter().sum();
            logits.iter_mut().for_each(|x| *x *= -dot / sum);
        }
        let around = if renormalize { dot } else { 0.0 };
        for ((id, w), dw) in self.ids.iter().zip(self.weights).zip(self.dweights) {
            logits[*id as usize] += w * (dw - around);
        }
    }
}

/// The definition, in candle's primitives.
pub(crate) fn reference(logits: &Tensor, router: Router) -> Result<ExpertChoice> {
    let logits = logits.to_dtype(DType::F32)?;
    let ids = logits.arg_sort_last_dim(false)?.narrow(D::Minus1, 0, router.chosen)?.contiguous()?;
    let all = softmax(&logits)?.gather(&ids, D::Minus1)?;
    let weights = if router.renormalize { all.broadcast_div(&all.sum_keepdim(D::Minus1)?)? } else { all };
    Ok(ExpertChoice { ids, weights })
}

/// The backward formula in candle's primitives.
pub(crate) fn reference_backward(
    logits: &Tensor,
    choice: &ExpertChoice,
    dweights: &Tensor,
    router: Router,
) -> Result<Tensor> {
    let (wide, weights) = (logits.to_dtype(DType::F32)?, &choice.weights);
    let dot = (weights * dweights)?.sum_keepdim(D::Minus1)?;
    let (everywhere, around) = if router.renormalize {
        (wide.zeros_like()?, dot)
    } else {
        (softmax(&wide)?.broadcast_mul(&dot)?.neg()?, dot.zeros_like()?)
    };
    let chosen = (weights * dweights.broadcast_sub(&around)?)?;
    Ok(everywhere.scatter_add(&choice.ids, &chosen, D::Minus1)?.to_dtype(logits.dtype())?)
}

pub(super) fn softmax(logits: &Tensor) -> Result<Tensor> {
    let exp = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?.exp()?;
    Ok(exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?)
}
