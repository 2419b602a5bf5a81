//! The router's choice, forward and backward.

use candle_core::{D, DType, Tensor};
use rayon::prelude::*;

use super::cuda;
use super::order::{ExpertChoice, ExpertGroups, Router, RouterScores};
use crate::backends::gpu::{Route, are_floats};
use crate::error::Result;
use crate::rounding::Rounded;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, tensor, with_elem};
use crate::runtime::trace::{SpanInfo, span};

/// Chooses the experts of each token by `logits: [N, E]`: `[N, k]` u32, with weights in f32. The
/// choice is by score plus `bias`, `[E]` f32. Of equal experts the first ones count.
///
/// # Errors
/// Fails if `logits` is not a contiguous matrix of floating-point values, or an operation of the
/// device fails.
pub fn choose_experts(logits: &Tensor, bias: Option<&Tensor>, router: Router) -> Result<ExpertChoice> {
    let _span = span(|| SpanInfo::op("choose_experts").dims(logits.dims()).moves(&[logits]));
    match Route::of(logits, are_floats([logits.dtype()])) {
        Route::Kernel(driver) => return cuda::choose(driver, logits, bias, router),
        Route::Composed => return reference(logits, bias, router),
        Route::Cpu => {}
    }
    let (rows, experts) = dims2(logits)?;
    let k = router.chosen;
    let (mut ids, mut weights) = (vec![0u32; rows * k], vec![0f32; rows * k]);
    let bias = bias.map(read::<f32>).transpose()?;
    let bias: Option<&[f32]> = bias.as_deref();
    with_elem!(logits.dtype(), T => {
        let logits = read::<T>(logits)?;
        let of_rows = ids.par_chunks_mut(k).zip(weights.par_chunks_mut(k)).zip(logits.par_chunks(experts));
        of_rows.with_min_len(16).for_each_init(Vec::new, |values: &mut Vec<f32>, ((ids, weights), row)| {
            values.clear();
            values.extend(row.iter().map(|x| x.widen()));
            choose_of_row(values, bias, ids, weights, router);
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
            chosen.backward(values, router);
            for (d, value) in d.iter_mut().zip(values.iter()) {
                *d = T::nearest(*value);
            }
        });
        tensor(dlogits, (rows, experts))
    })
}

/// Chooses the experts of one token.
fn choose_of_row(
    logits: &mut [f32],
    bias: Option<&[f32]>,
    ids: &mut [u32],
    weights: &mut [f32],
    router: Router,
) {
    // A NaN anywhere makes NaNs of the weights, so that the loss shows it.
    let has_nan = logits.iter().any(|x| x.is_nan());
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let by_logit = bias.is_none() && router.groups.is_none();
    if by_logit && router.scores == RouterScores::Softmax {
        take_best(logits, ids, weights);
        weights.iter_mut().for_each(|weight| *weight = (*weight - largest).exp());
        let of_others = logits.iter().filter(|x| !x.is_nan()).map(|x| (x - largest).exp());
        let rest: f32 = if router.renormalize { 0.0 } else { of_others.sum() };
        let sum = if has_nan { f32::NAN } else { weights.iter().sum::<f32>() + rest };
        weights.iter_mut().for_each(|weight| *weight = *weight / sum * router.factor);
        return;
    }
    let mut keys = logits.to_vec();
    match router.scores {
        RouterScores::Sigmoid => logits.iter_mut().for_each(|x| *x = sigmoid(*x)),
        RouterScores::Softmax => {
            logits.iter_mut().for_each(|x| *x = (*x - largest).exp());
            let sum: f32 = logits.iter().sum();
            logits.iter_mut().for_each(|x| *x /= sum);
        }
    }
    let scores = &*logits;
    if !by_logit {
        keys.copy_from_slice(scores);
    }
    for (key, bias) in keys.iter_mut().zip(bias.into_iter().flatten()) {
        *key += bias;
    }
    if let Some(groups) = router.groups {
        keep_groups(&mut keys, groups);
    }
    take_best(&mut keys, ids, weights);
    for (id, weight) in ids.iter().zip(weights.iter_mut()) {
        *weight = scores[*id as usize];
    }
    let sum = match (has_nan, router.renormalize) {
        (true, _) => f32::NAN,
        (false, true) => weights.iter().sum::<f32>() + router.sum_offset,
        (false, false) => 1.0,
    };
    weights.iter_mut().for_each(|weight| *weight = *weight / sum * router.factor);
}

/// Makes NaNs of the keys outside the best groups.
fn keep_groups(keys: &mut [f32], ExpertGroups { count, chosen }: ExpertGroups) {
    let size = keys.len() / count;
    let score = |group: &[f32]| {
        let first_two = group.iter().fold([f32::NEG_INFINITY; 2], |[first, second], key| {
            if *key > first { [*key, first] } else { [first, second.max(*key)] }
        });
        first_two.into_iter().filter(|key| key.is_finite()).sum::<f32>()
    };
    let mut scores: Vec<f32> = keys.chunks(size).map(score).collect();
    let (mut best, mut found) = (vec![0; chosen], vec![0.0; chosen]);
    take_best(&mut scores, &mut best, &mut found);
    for (number, group) in keys.chunks_mut(size).enumerate() {
        if !best.contains(&(number as u32)) {
            group.fill(f32::NAN);
        }
    }
}

/// Writes the numbers and values of the largest keys, the first of equal ones, and makes NaNs of
/// these keys.
fn take_best(keys: &mut [f32], ids: &mut [u32], values: &mut [f32]) {
    for (at, (id, value)) in ids.iter_mut().zip(values.iter_mut()).enumerate() {
        let left = (0..keys.len()).filter(|e| !keys[*e].is_nan());
        let best = left.reduce(|best, e| if keys[e] > keys[best] { e } else { best });
        // Only NaNs are left: any experts.
        let (best, key) = best.map_or((at, f32::NAN), |best| (best, keys[best]));
        (*id, *value) = (best as u32, key);
        keys[best] = f32::NAN;
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// The chosen experts of one token, and the gradients of their weights.
struct ChosenRow<'a> {
    ids: &'a [u32],
    weights: &'a [f32],
    dweights: &'a [f32],
}

impl ChosenRow<'_> {
    /// Replaces the logits of the token by their gradients.
    fn backward(&self, logits: &mut [f32], router: Router) {
        let dot: f32 = self.weights.iter().zip(self.dweights).map(|(w, dw)| w * dw).sum();
        let around = if router.renormalize { dot / router.factor } else { 0.0 };
        let mut slopes = [1.0; super::MOST_CHOSEN];
        if router.scores == RouterScores::Sigmoid {
            for (slope, id) in slopes.iter_mut().zip(self.ids) {
                *slope = sigmoid(-logits[*id as usize]);
            }
        }
        if router.renormalize || router.scores == RouterScores::Sigmoid {
            logits.fill(0.0);
        } else {
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            logits.iter_mut().for_each(|x| *x = (*x - largest).exp());
            let sum: f32 = logits.iter().sum();
            logits.iter_mut().for_each(|x| *x *= -dot / sum);
        }
        for (((id, w), dw), slope) in self.ids.iter().zip(self.weights).zip(self.dweights).zip(slopes) {
            logits[*id as usize] += w * (dw - around) * slope;
        }
    }
}

/// The definition, in candle's primitives.
pub(crate) fn reference(logits: &Tensor, bias: Option<&Tensor>, router: Router) -> Result<ExpertChoice> {
    let logits = logits.to_dtype(DType::F32)?;
    let scores = match router.scores {
        RouterScores::Softmax => softmax(&logits)?,
        RouterScores::Sigmoid => logits.neg()?.exp()?.affine(1.0, 1.0)?.recip()?,
    };
    let keys = match bias {
        Some(bias) => scores.broadcast_add(bias)?,
        // Scores keep the order of their logits, which have fewer ties: sigmoids become 1.
        None if router.groups.is_none() => logits,
        None => scores.clone(),
    };
    let keys = match router.groups {
        None => keys,
        Some(ExpertGroups { count, chosen }) => {
            let (rows, experts) = keys.dims2()?;
            let by_group = keys.reshape((rows, count, experts / count))?;
            let (sorted, _) = by_group.sort_last_dim(false)?;
            let of_groups = sorted.narrow(2, 0, (experts / count).min(2))?.sum(2)?;
            let best = of_groups.arg_sort_last_dim(false)?.narrow(1, 0, chosen)?.contiguous()?;
            let kept =
                of_groups.zeros_like()?.scatter_add(&best, &best.ones_like()?.to_dtype(DType::F32)?, 1)?;
            // 0 for the best groups, else minus infinity.
            let mask = kept.log()?.unsqueeze(2)?;
            by_group.broadcast_add(&mask)?.reshape((rows, experts))?
        }
    };
    let ids = keys.arg_sort_last_dim(false)?.narrow(D::Minus1, 0, router.chosen)?.contiguous()?;
    let all = scores.gather(&ids, D::Minus1)?;
    let weights = if router.renormalize {
        let sum = all.sum_keepdim(D::Minus1)?.affine(1.0, f64::from(router.sum_offset))?;
        all.broadcast_div(&sum)?
    } else {
        all
    };
    Ok(ExpertChoice { ids, weights: (weights * f64::from(router.factor))? })
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
    let around = if router.renormalize { (&dot / f64::from(router.factor))? } else { dot.zeros_like()? };
    let chosen = (weights * dweights.broadcast_sub(&around)?)?;
    let (everywhere, chosen) = match router.scores {
        RouterScores::Sigmoid => {
            // 1 − sigmoid(x)
            let slopes = wide.gather(&choice.ids, D::Minus1)?.exp()?.affine(1.0, 1.0)?.recip()?;
            (wide.zeros_like()?, (chosen * slopes)?)
        }
        RouterScores::Softmax if router.renormalize => (wide.zeros_like()?, chosen),
        RouterScores::Softmax => (softmax(&wide)?.broadcast_mul(&dot)?.neg()?, chosen),
    };
    Ok(everywhere.scatter_add(&choice.ids, &chosen, D::Minus1)?.to_dtype(logits.dtype())?)
}

pub(super) fn softmax(logits: &Tensor) -> Result<Tensor> {
    let exp = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?.exp()?;
    Ok(exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// Both sigmoids are 1 in f32; only a bias makes the first of them the better one.
    #[test]
    fn saturated_sigmoids_are_chosen_by_their_logits() -> Result<()> {
        let logits = Tensor::new(&[[18f32, 20.0], [20.0, 18.0]], &Device::Cpu)?;
        let zeros = Tensor::new(&[0f32, 0.0], &Device::Cpu)?;
        let router = Router { scores: RouterScores::Sigmoid, ..Router::softmax(1, false) };
        let ids = |choice: ExpertChoice| -> Result<Vec<u32>> { Ok(choice.ids.flatten_all()?.to_vec1()?) };
        for (bias, wanted) in [(None, [1, 0]), (Some(&zeros), [0, 0])] {
            let choice = choose_experts(&logits, bias, router)?;
            assert_eq!(choice.weights.flatten_all()?.to_vec1::<f32>()?, [1.0, 1.0]);
            assert_eq!(ids(choice)?, wanted);
            assert_eq!(ids(reference(&logits, bias, router)?)?, wanted);
        }
        Ok(())
    }
}
