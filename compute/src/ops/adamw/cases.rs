//! Cases of AdamW.

use candle_core::DType;

use super::{AdamWPiece, AdamWStep, adamw, reference};
use crate::error::Result;
use crate::ops::case::{CaseRunner, OpCase, OpPair, TensorPair, Tolerance};
use crate::runtime::TensorMut;
use crate::runtime::rng::RngStream;

/// Pieces that are updated together: more elements than a task of AdamW, and no whole number of what a thread takes.
const PIECES: [usize; 3] = [40_000, 5, 4099];

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
    variants.into_iter().map(|(options, what)| shaped(what, &PIECES, options)).collect()
}

/// One update of pieces of these lengths.
pub(in crate::ops) fn shaped(what: &str, pieces: &[usize], options: AdamWStep) -> OpCase {
    let pieces = pieces.to_vec();
    OpCase::new("adamw", what, Tolerance::FORWARD.only_f32(), move |runner| update(runner, &pieces, &options))
}

/// A piece and what it holds.
struct Values {
    step: AdamWStep,
    param: OpPair,
    /// What is computed with, where that is not `param`.
    value: Option<TensorMut>,
    grad: OpPair,
    moments: [OpPair; 2],
}

impl Values {
    fn new(runner: &CaseRunner<'_>, len: usize, step: AdamWStep) -> Result<Self> {
        let stream = RngStream::new(0).named("second");
        let squares = (0..len as u64).map(|i| stream.uniform(i)).collect();
        let moments = [runner.normal("first", len)?.scaled(0.1)?, runner.twin(DType::F32, squares, len)?];
        // Short pieces are updated in their place alone.
        let value = (len > 64).then(|| TensorMut::zeros(len, DType::BF16, runner.device)).transpose()?;
        Ok(Values {
            step,
            param: runner.normal("param", len)?,
            value,
            grad: runner.normal("grad", len)?,
            moments,
        })
    }
}

/// The pieces differ in their learning rates, as with LoRA+.
fn update(runner: &CaseRunner<'_>, pieces: &[usize], options: &AdamWStep) -> Result<Vec<TensorPair>> {
    let step = |times: usize| AdamWStep { learning_rate: options.learning_rate * times as f64, ..*options };
    let values = pieces.iter().zip(1..).map(|(&len, times)| Values::new(runner, len, step(times)));
    let values = values.collect::<Result<Vec<_>>>()?;
    let pieces: Vec<_> = values
        .iter()
        .map(|Values { step, param, value, grad, moments: [first, second] }| AdamWPiece {
            param: &param.here,
            value: value.as_ref(),
            grad: &grad.here,
            moments: [&first.here, &second.here],
            step: *step,
        })
        .collect();
    adamw(&pieces)?;
    for Values { step, param, grad, moments: [first, second], .. } in &values {
        reference(&param.plain, &grad.plain, [&first.plain, &second.plain], step)?;
    }
    let mut pairs = Vec::new();
    for Values { param, value, moments: [first, second], .. } in values {
        if let Some(value) = value {
            // The rounded parameters to the bit.
            let rounded = param.here.to_dtype(DType::BF16)?.to_dtype(DType::F32)?;
            pairs.push(TensorPair::new(value.to_dtype(DType::F32)?, rounded));
        }
        pairs.extend([param.pair(), first.pair(), second.pair()]);
    }
    Ok(pairs)
}
