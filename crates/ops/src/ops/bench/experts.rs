//! A router and the rows of its experts, measured by the values that they read and write, at the
//! sizes of Qwen3-30B-A3B: 8 of 128 experts, each 768 wide.

use candle_core::DType;

use super::inputs::BenchInputs;
use super::{BenchShapes, TimedOp};
use crate::error::Result;
use crate::ops::experts::{
    ExpertChoice, ExpertRows, Router, RouterScores, SUM_OFFSET, balance_experts, choose_experts,
    choose_experts_backward, combine_rows, scale_rows, scale_rows_backward,
};

const EXPERTS: usize = 128;
const ROUTER: Router = Router {
    chosen: 8,
    scores: RouterScores::Softmax,
    renormalize: true,
    groups: None,
    factor: 1.0,
    sum_offset: SUM_OFFSET,
};
const WIDTH: usize = 768;
const F32_BYTES: usize = 4;

pub(super) fn ops(shapes: &BenchShapes) -> Vec<TimedOp> {
    vec![
        chosen(shapes),
        chosen_backward(shapes),
        balanced(shapes),
        scaled(shapes),
        scaled_backward(shapes),
        combined(shapes),
    ]
}

/// Returns the experts of each token by random logits.
fn choice(inputs: &BenchInputs<'_>, tokens: usize) -> Result<ExpertChoice> {
    choose_experts(&*inputs.normal(1.0, (tokens, EXPERTS))?, None, ROUTER)
}

fn chosen(shapes: &BenchShapes) -> TimedOp {
    let n = shapes.tokens;
    let what = ("choose_experts", format!("{n}x{EXPERTS}, {} each", ROUTER.chosen), shapes.dtype);
    let bytes = shapes.bytes(n * EXPERTS) + 2 * F32_BYTES * n * ROUTER.chosen;
    TimedOp::moving(bytes, what, move |inputs| {
        let logits = inputs.sets(|_| inputs.normal(1.0, (n, EXPERTS)))?;
        logits.calls(move |logits| choose_experts(logits, None, ROUTER).map(drop))
    })
}

fn chosen_backward(shapes: &BenchShapes) -> TimedOp {
    let n = shapes.tokens;
    let what = ("choose_experts_backward", format!("{n}x{EXPERTS}, {} each", ROUTER.chosen), shapes.dtype);
    // Renormalized weights alone determine the gradient.
    let bytes = shapes.bytes(n * EXPERTS) + 3 * F32_BYTES * n * ROUTER.chosen;
    TimedOp::moving(bytes, what, move |inputs| {
        let dweights = inputs.normal_as(DType::F32, 1.0, (n, ROUTER.chosen))?;
        let sets = inputs.sets(|_| {
            let logits = inputs.normal(1.0, (n, EXPERTS))?;
            let choice = choose_experts(&logits, None, ROUTER)?;
            Ok((logits, choice))
        })?;
        sets.calls(move |(logits, choice)| {
            choose_experts_backward(logits, choice, &dweights, ROUTER).map(drop)
        })
    })
}

fn balanced(shapes: &BenchShapes) -> TimedOp {
    let n = shapes.tokens;
    let what = ("balance_experts", format!("{n}x{EXPERTS}"), shapes.dtype);
    TimedOp::moving(shapes.bytes(3 * n * EXPERTS) + F32_BYTES * (n + EXPERTS), what, move |inputs| {
        let pull = inputs.normal_as(DType::F32, 1e-3, EXPERTS)?;
        let sets = inputs.sets(|_| {
            let one = || inputs.normal(1.0, (n, EXPERTS));
            Ok([one()?, one()?])
        })?;
        sets.calls(move |[logits, d]| balance_experts(logits, &pull, d).map(drop))
    })
}

fn scaled(shapes: &BenchShapes) -> TimedOp {
    let (n, rows) = (shapes.tokens, shapes.tokens * ROUTER.chosen);
    let what = ("scale_rows", format!("{rows}x{WIDTH}"), shapes.dtype);
    TimedOp::moving(shapes.bytes(2 * rows * WIDTH) + 2 * F32_BYTES * rows, what, move |inputs| {
        let choice = choice(inputs, n)?;
        let order = ExpertRows::of(&choice, EXPERTS)?;
        let x = inputs.sets(|_| inputs.normal(1.0, (rows, WIDTH)))?;
        x.calls(move |x| scale_rows(x, &choice.weights, &order).map(drop))
    })
}

/// Times the backward in place, with weights of 1 that keep the values.
fn scaled_backward(shapes: &BenchShapes) -> TimedOp {
    let (n, rows) = (shapes.tokens, shapes.tokens * ROUTER.chosen);
    let what = ("scale_rows_backward", format!("{rows}x{WIDTH}"), shapes.dtype);
    TimedOp::moving(shapes.bytes(4 * rows * WIDTH) + 3 * F32_BYTES * rows, what, move |inputs| {
        let choice = choice(inputs, n)?;
        let order = ExpertRows::of(&choice, EXPERTS)?;
        let weights = choice.weights.ones_like()?;
        let sets = inputs.sets(|_| {
            let one = || inputs.normal(1.0, (rows, WIDTH));
            Ok([one()?, one()?])
        })?;
        sets.calls(move |[x, dy]| scale_rows_backward(x, dy, &weights, &order).map(drop))
    })
}

fn combined(shapes: &BenchShapes) -> TimedOp {
    let (n, rows, d) = (shapes.tokens, shapes.tokens * ROUTER.chosen, shapes.widths.hidden_size);
    let what = ("combine_rows", format!("{rows}x{d}"), shapes.dtype);
    TimedOp::moving(shapes.bytes((rows + 2 * n) * d) + F32_BYTES * rows, what, move |inputs| {
        let order = ExpertRows::of(&choice(inputs, n)?, EXPERTS)?;
        let sets = inputs.sets(|_| Ok((inputs.normal(1.0, (rows, d))?, inputs.normal(1.0, (n, d))?)))?;
        sets.calls(move |(x, added)| combine_rows(x, &order, Some(added)).map(drop))
    })
}
