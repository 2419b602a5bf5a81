//! Cases of a router and of the rows of its experts.

use candle_core::{DType, Device, Tensor};

use super::{
    ExpertChoice, ExpertGroups, ExpertRows, Router, RouterScores, SUM_OFFSET, balance_experts,
    balance_reference, choice_reference, choice_reference_backward, choose_experts, choose_experts_backward,
    combine_reference, combine_rows, scale_reference, scale_reference_backward, scale_rows,
    scale_rows_backward,
};
use crate::error::Result;
use crate::ops::case::{CaseRunner, OpCase, OpPair, TensorPair, Tolerance};

/// The sizes of a case.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops) struct ExpertSizes {
    pub(in crate::ops) tokens: usize,
    pub(in crate::ops) experts: usize,
    pub(in crate::ops) chosen: usize,
    pub(in crate::ops) width: usize,
}

/// Returns the cases of both kinds of weights, and of one and of several experts a token.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = Vec::new();
    for (experts, chosen) in [(8, 2), (128, 8), (70, 1)] {
        let sizes = ExpertSizes { tokens: 37, experts, chosen, width: 40 };
        for renormalize in [false, true] {
            let weights = if renormalize { "renormalized" } else { "as they are" };
            let what = format!("{chosen} of {experts}, weights {weights}");
            cases.extend(router_cases(&what, sizes, Router::softmax(chosen, renormalize), false));
            let what = format!("{what}, sigmoids");
            cases.extend(router_cases(&what, sizes, router(sizes, renormalize, true, 2), true));
            let what = format!("{chosen} of {experts} in groups, weights {weights}");
            cases.extend(router_cases(&what, sizes, router(sizes, renormalize, false, 4), true));
        }
        cases.push(saturated_case(&format!("{chosen} of {experts}"), sizes));
        cases.extend(row_cases(&format!("{chosen} of {experts}"), sizes));
    }
    cases
}

/// Returns the choice of sigmoids without a bias, of which many are 1 in f32.
pub(in crate::ops) fn saturated_case(what: &str, sizes: ExpertSizes) -> OpCase {
    let router = Router { scores: RouterScores::Sigmoid, ..Router::softmax(sizes.chosen, false) };
    let what = format!("{what}, saturated sigmoids");
    OpCase::new("choose_experts", &what, Tolerance::FORWARD, move |runner| {
        let logits = runner.normal("logits", (sizes.tokens, sizes.experts))?.scaled(40.0)?;
        let got = choose_experts(&logits.here, None, router)?;
        let want = choice_reference(&logits.plain, None, router)?;
        Ok(vec![
            TensorPair::new(got.ids.to_dtype(DType::F64)?, want.ids.to_dtype(DType::F64)?),
            TensorPair::new(got.weights, want.weights),
        ])
    })
}

/// Returns a router over `groups` groups, of which the mean of the fewest possible and all are
/// chosen; without groups if they do not divide the experts.
pub(in crate::ops) fn router(
    ExpertSizes { experts, chosen, .. }: ExpertSizes,
    renormalize: bool,
    is_sigmoid: bool,
    groups: usize,
) -> Router {
    let fits = groups > 0 && experts.is_multiple_of(groups);
    let of_token = |fewest: usize| (fewest + groups) / 2;
    let groups =
        fits.then(|| ExpertGroups { count: groups, chosen: of_token(chosen.div_ceil(experts / groups)) });
    let scores = if is_sigmoid { RouterScores::Sigmoid } else { RouterScores::Softmax };
    let (factor, sum_offset) = if is_sigmoid { (2.0, 0.25) } else { (1.0, SUM_OFFSET) };
    Router { chosen, scores, renormalize, groups, factor, sum_offset }
}

/// Returns forward, backward and auxiliary loss of a router, whose choice may have a bias.
pub(in crate::ops) fn router_cases(
    what: &str,
    sizes: ExpertSizes,
    router: Router,
    has_bias: bool,
) -> [OpCase; 3] {
    let ExpertSizes { tokens, experts, chosen, .. } = sizes;
    let bias = move |runner: &CaseRunner<'_>| -> Result<Option<OpPair>> {
        has_bias.then(|| runner.normal_f32("bias", experts)).transpose()
    };
    [
        OpCase::new("choose_experts", what, Tolerance::FORWARD, move |runner| {
            let logits = runner.normal("logits", (tokens, experts))?;
            let bias = bias(runner)?;
            let got = choose_experts(&logits.here, bias.as_ref().map(|bias| &*bias.here), router)?;
            let want = choice_reference(&logits.plain, bias.as_ref().map(|bias| &*bias.plain), router)?;
            Ok(vec![
                TensorPair::new(got.ids.to_dtype(DType::F64)?, want.ids.to_dtype(DType::F64)?),
                TensorPair::new(got.weights, want.weights),
            ])
        }),
        OpCase::new("choose_experts_backward", what, Tolerance::BACKWARD, move |runner| {
            let logits = runner.normal("logits", (tokens, experts))?;
            let dweights = runner.normal_f32("dweights", (tokens, chosen))?;
            let bias = bias(runner)?;
            let want = choice_reference(&logits.plain, bias.as_ref().map(|bias| &*bias.plain), router)?;
            let got = choose_experts_backward(&logits.here, &here(&want, runner)?, &dweights.here, router)?;
            let want = choice_reference_backward(&logits.plain, &want, &dweights.plain, router)?;
            Ok(vec![TensorPair::new(got, want)])
        }),
        OpCase::new("balance_experts", what, Tolerance::BACKWARD, move |runner| {
            let logits = runner.normal("logits", (tokens, experts))?;
            let (pull, d) = (runner.normal_f32("pull", experts)?, runner.normal("d", (tokens, experts))?);
            let got = balance_experts(&logits.here, &pull.here, &d.here)?;
            let want = balance_reference(&logits.plain, &pull.plain, &d.plain)?;
            // Relative to the number of tokens, since the sum may be near zero.
            let of_token = |sum: f64| 1.0 + sum / tokens as f64;
            Ok(vec![TensorPair::scalars(of_token(got), of_token(want))?, d.pair()])
        }),
    ]
}

/// Returns the cases of the rows of a choice.
pub(in crate::ops) fn row_cases(what: &str, sizes: ExpertSizes) -> [OpCase; 3] {
    let ExpertSizes { tokens, experts, chosen, width } = sizes;
    let shape = (tokens * chosen, width);
    let chosen_rows = move |runner: &CaseRunner<'_>| -> Result<(ExpertChoice, [ExpertRows; 2])> {
        let logits = runner.normal_f32("logits", (tokens, experts))?;
        let plain = choice_reference(&logits.plain, None, Router::softmax(chosen, true))?;
        let choice = here(&plain, runner)?;
        let rows = [ExpertRows::of(&choice, experts)?, ExpertRows::of(&plain, experts)?];
        Ok((choice, rows))
    };
    let plain = |weights: &Tensor| -> Result<Tensor> { Ok(weights.to_device(&Device::Cpu)?) };
    [
        OpCase::new("scale_rows", what, Tolerance::ROUNDED, move |runner| {
            let (x, (choice, [rows, reference_rows])) = (runner.normal("x", shape)?, chosen_rows(runner)?);
            let got = scale_rows(&x.here, &choice.weights, &rows)?;
            Ok(vec![TensorPair::new(
                got,
                scale_reference(&x.plain, &plain(&choice.weights)?, &reference_rows)?,
            )])
        }),
        OpCase::new("scale_rows_backward", what, Tolerance::BACKWARD, move |runner| {
            let (x, dy) = (runner.normal("x", shape)?, runner.normal("dy", shape)?);
            let (choice, [rows, reference_rows]) = chosen_rows(runner)?;
            let got = scale_rows_backward(&x.here, &dy.here, &choice.weights, &rows)?;
            let want =
                scale_reference_backward(&x.plain, &dy.plain, &plain(&choice.weights)?, &reference_rows)?;
            Ok(vec![TensorPair::new(got, want), x.pair(), dy.pair()])
        }),
        OpCase::new("combine_rows", what, Tolerance::FORWARD, move |runner| {
            let (x, (_, [rows, reference_rows])) = (runner.normal("x", shape)?, chosen_rows(runner)?);
            let added = runner.normal("added", (tokens, width))?;
            let pair = |here: Option<&Tensor>, plain: Option<&Tensor>| -> Result<TensorPair> {
                let got = combine_rows(&x.here, &rows, here)?;
                Ok(TensorPair::new(got, combine_reference(&x.plain, &reference_rows, plain)?))
            };
            Ok(vec![pair(None, None)?, pair(Some(&added.here), Some(&added.plain))?])
        }),
    ]
}

/// Returns a choice on the device of a case.
fn here(choice: &ExpertChoice, runner: &CaseRunner<'_>) -> Result<ExpertChoice> {
    let on_device = |tensor: &Tensor| tensor.to_device(runner.device);
    Ok(ExpertChoice { ids: on_device(&choice.ids)?, weights: on_device(&choice.weights)? })
}
