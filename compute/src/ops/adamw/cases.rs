//! Cases of AdamW.

use candle_core::DType;

use super::{AdamWStep, adamw, reference};
use crate::error::Result;
use crate::ops::case::{CaseRunner, OpCase, TensorPair, Tolerance};
use crate::runtime::rng::RngStream;

/// More elements than a task of AdamW.
const PARAMETERS: usize = 40_000;

/// The cases of the update.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let first = AdamWStep {
        learning_rate: 0.02,
        betas: [0.9, 0.999],
        eps: 1e-8,
        weight_decay: 0.0,
        update: 1,
        grad_scale: 1.0,
    };
    let variants = [
        (first, "first update"),
        (AdamWStep { weight_decay: 0.1, update: 7, grad_scale: 0.3, ..first }, "decay, clipping, update 7"),
        (AdamWStep { betas: [0.8, 0.95], eps: 1e-3, update: 1000, ..first }, "other betas, update 1000"),
    ];
    let case = |(options, what): (AdamWStep, &str)| {
        OpCase::new("adamw", what, Tolerance::FORWARD.only_f32(), move |runner| update(runner, &options))
    };
    variants.into_iter().map(case).collect()
}

fn update(runner: &CaseRunner<'_>, options: &AdamWStep) -> Result<Vec<TensorPair>> {
    let (param, grad) = (runner.normal("param", PARAMETERS)?, runner.normal("grad", PARAMETERS)?);
    let first = runner.normal("first", PARAMETERS)?.scaled(0.1)?;
    let stream = RngStream::new(0).named("second");
    let squares = (0..PARAMETERS as u64).map(|i| stream.uniform(i)).collect();
    let second = runner.twin(DType::F32, squares, PARAMETERS)?;
    adamw(&param.here, &grad.here, [&first.here, &second.here], options)?;
    reference(&param.plain, &grad.plain, [&first.plain, &second.plain], options)?;
    Ok(vec![param.pair(), first.pair(), second.pair()])
}
