//! Experts by the kernels of `kernels/experts.cu`.

use candle_core::{DType, Tensor};

use super::order::{ExpertChoice, ExpertRows, Router, RouterScores};
use crate::backends::gpu::{Driver, In, InOut, LaunchShape, Out, kernels, number};
use crate::error::Result;
use crate::ops::matmul::empty;
use crate::runtime::TensorMut;

/// Threads per block.
const THREADS: u32 = 256;
/// Tokens per block of the router's kernels: one for each warp.
const TOKENS: usize = 8;

/// Returns the settings of a router as its kernels read them: flags (1: renormalized, 2: scores are
/// sigmoids), groups and groups of a token (0: no groups).
fn settings(router: Router) -> Result<[u32; 3]> {
    let sigmoid = router.scores == RouterScores::Sigmoid;
    let [groups, of_token] = router.groups.map_or([0; 2], |groups| [groups.count, groups.chosen]);
    let flags = u32::from(router.renormalize) | u32::from(sigmoid) << 1;
    Ok([flags, number(groups)?, number(of_token)?])
}

pub(super) fn choose(
    driver: &dyn Driver,
    logits: &Tensor,
    bias: Option<&Tensor>,
    router: Router,
) -> Result<ExpertChoice> {
    let ((tokens, experts), k) = (logits.dims2()?, router.chosen);
    let ids = TensorMut::zeros((tokens, k), DType::U32, logits.device())?;
    let weights = empty(tokens, k, DType::F32, logits.device())?;
    let shape = LaunchShape::line(tokens.div_ceil(TOKENS), THREADS);
    let (rows, experts, k) = (number(tokens)?, number(experts)?, number(k)?);
    macro_rules! launch {
        ($kernel:ident) => {{
            let (logits, bias) = (In::all(logits)?, In::optional(bias)?);
            let (ids, weights) = (Out::all(&ids)?, Out::all(&weights)?);
            let [flags, groups, of_token] = settings(router)?;
            let (factor, offset) = (router.factor, router.sum_offset);
            kernels::$kernel(
                driver, shape, logits, bias, ids, weights, rows, experts, k, flags, groups, of_token, factor,
                offset,
            )?
        }};
    }
    if logits.dtype() == DType::BF16 {
        launch!(choose_experts_bf16)
    } else {
        launch!(choose_experts_f32)
    }
    Ok(ExpertChoice { ids: ids.into_tensor(), weights: weights.into_tensor() })
}

pub(super) fn choose_backward(
    driver: &dyn Driver,
    logits: &Tensor,
    choice: &ExpertChoice,
    dweights: &Tensor,
    router: Router,
) -> Result<Tensor> {
    let (tokens, experts) = logits.dims2()?;
    let dlogits = empty(tokens, experts, logits.dtype(), logits.device())?;
    let shape = LaunchShape::line(tokens.div_ceil(TOKENS), THREADS);
    let (rows, experts, k) = (number(tokens)?, number(experts)?, number(router.chosen)?);
    macro_rules! launch {
        ($kernel:ident) => {{
            let (ids, weights) = (In::all(&choice.ids)?, In::all(&choice.weights)?);
            let (logits, dweights, d) = (In::all(logits)?, In::all(dweights)?, Out::all(&dlogits)?);
            let ([flags, ..], factor) = (settings(router)?, router.factor);
            kernels::$kernel(
                driver, shape, logits, ids, weights, dweights, d, rows, experts, k, flags, factor,
            )?
        }};
    }
    if logits.dtype() == DType::BF16 {
        launch!(choose_experts_backward_bf16)
    } else {
        launch!(choose_experts_backward_f32)
    }
    Ok(dlogits.into_tensor())
}

/// Returns the value of each token, `[N]` f32, and adds the gradients.
pub(super) fn balance(
    driver: &dyn Driver,
    logits: &Tensor,
    pull: &Tensor,
    dlogits: &TensorMut,
) -> Result<TensorMut> {
    let (tokens, experts) = logits.dims2()?;
    let values = TensorMut::zeros(tokens, DType::F32, logits.device())?;
    let shape = LaunchShape::line(tokens.div_ceil(TOKENS), THREADS);
    let (rows, experts) = (number(tokens)?, number(experts)?);
    macro_rules! launch {
        ($kernel:ident) => {{
            let (logits, pull) = (In::all(logits)?, In::all(pull)?);
            let (d, values) = (InOut::all(dlogits)?, Out::all(&values)?);
            kernels::$kernel(driver, shape, logits, pull, d, values, rows, experts)?
        }};
    }
    if logits.dtype() == DType::BF16 {
        launch!(balance_experts_bf16)
    } else {
        launch!(balance_experts_f32)
    }
    Ok(values)
}

pub(super) fn scale(driver: &dyn Driver, x: &Tensor, weights: &Tensor, rows: &ExpertRows) -> Result<Tensor> {
    let (count, width) = x.dims2()?;
    let y = empty(count, width, x.dtype(), x.device())?;
    let shape = LaunchShape::line(count, THREADS);
    macro_rules! launch {
        ($kernel:ident) => {{
            let (weights, copies) = (In::all(weights)?, In::all(rows.copies_on_device())?);
            kernels::$kernel(driver, shape, In::all(x)?, weights, copies, Out::all(&y)?, number(width)?)?
        }};
    }
    if x.dtype() == DType::BF16 {
        launch!(scale_rows_bf16)
    } else {
        launch!(scale_rows_f32)
    }
    Ok(y.into_tensor())
}

pub(super) fn scale_backward(
    driver: &dyn Driver,
    x: &TensorMut,
    dy: &TensorMut,
    weights: &Tensor,
    rows: &ExpertRows,
) -> Result<Tensor> {
    let (count, width) = x.dims2()?;
    let (tokens, k) = weights.dims2()?;
    let dweights = empty(tokens, k, DType::F32, x.device())?;
    let shape = LaunchShape::line(count, THREADS);
    macro_rules! launch {
        ($kernel:ident) => {{
            let (weights, copies) = (In::all(weights)?, In::all(rows.copies_on_device())?);
            let (x, dy, dweights) = (InOut::all(x)?, InOut::all(dy)?, Out::all(&dweights)?);
            kernels::$kernel(driver, shape, x, dy, weights, copies, dweights, number(width)?)?
        }};
    }
    if x.dtype() == DType::BF16 {
        launch!(scale_rows_backward_bf16)
    } else {
        launch!(scale_rows_backward_f32)
    }
    Ok(dweights.into_tensor())
}

pub(super) fn combine(
    driver: &dyn Driver,
    x: &Tensor,
    rows: &ExpertRows,
    added: Option<&Tensor>,
) -> Result<Tensor> {
    let places = rows.places_on_device();
    let ((tokens, k), (_, width)) = (places.dims2()?, x.dims2()?);
    let y = empty(tokens, width, x.dtype(), x.device())?;
    let shape = LaunchShape::line(tokens, THREADS);
    macro_rules! launch {
        ($kernel:ident) => {{
            let (x, places, added, y) = (In::all(x)?, In::all(places)?, In::optional(added)?, Out::all(&y)?);
            kernels::$kernel(driver, shape, x, places, added, y, number(width)?, number(k)?)?
        }};
    }
    if x.dtype() == DType::BF16 {
        launch!(combine_rows_bf16)
    } else {
        launch!(combine_rows_f32)
    }
    Ok(y.into_tensor())
}
