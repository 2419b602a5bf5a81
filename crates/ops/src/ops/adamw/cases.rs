//! Cases of AdamW.

use candle_core::{DType, Device};
use half::bf16;

use super::{AdamWPiece, AdamWStep, adamw, reference};
use crate::error::Result;
use crate::ops::case::{CaseRunner, OpCase, OpPair, TensorPair, Tolerance};
use crate::ops::stochastic_rounding::{self, RUN, StochasticRounding};
use crate::runtime::TensorMut;
use crate::runtime::copy::to_host_vec;
use crate::runtime::rng::RngStream;

/// Lengths of pieces updated together: more elements than a task of AdamW, and not a multiple of a
/// thread's share.
const PIECES: [usize; 3] = [40_000, 5, 4099];

/// The first update, without decay or clipping.
pub(in crate::ops) const FIRST: AdamWStep = AdamWStep {
    learning_rate: 0.02,
    betas: [0.9, 0.999],
    eps: 1e-8,
    weight_decay: 0.0,
    update: 1,
    grad_scale: 1.0,
};

/// The cases of the update.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let variants = [
        (FIRST, "first update"),
        (AdamWStep { weight_decay: 0.1, update: 7, grad_scale: 0.3, ..FIRST }, "decay, clipping, update 7"),
        (AdamWStep { betas: [0.8, 0.95], eps: 1e-3, update: 1000, ..FIRST }, "other betas, update 1000"),
    ];
    let mut cases: Vec<_> =
        variants.into_iter().map(|(options, what)| shaped(what, &PIECES, options)).collect();
    cases.push(bf16_case("adamw", &PIECES, moment_in_f32, adamw));
    cases
}

fn moment_in_f32(len: usize, device: &Device) -> Result<TensorMut> {
    TensorMut::zeros(len, DType::F32, device)
}

/// Returns the rounding of a case for values that begin at `first`.
pub(in crate::ops) fn rounding(first: u64) -> StochasticRounding {
    StochasticRounding::new(RngStream::new(0).named("rounding"), first)
}

/// Returns the case of two updates of bf16 parameters, with gradients in bf16 or f32. The results
/// must equal, bit for bit, updates in f32 that are rounded to bf16 afterwards.
pub(in crate::ops) fn bf16_case<M>(
    op: &'static str,
    pieces: &[usize],
    moment: fn(usize, &Device) -> Result<M>,
    update: fn(&[AdamWPiece<'_, M>]) -> Result<()>,
) -> OpCase
where
    M: 'static,
{
    let lengths = pieces.to_vec();
    OpCase::new(op, "parameters in bf16 alone", Tolerance::ROUNDED.only_bf16(), move |runner| {
        let mut pairs = Vec::new();
        for (i, &len) in lengths.iter().enumerate() {
            pairs.push(TensorPair::scalars(differing(runner, (len, i), moment, update)?, 0.0)?);
        }
        Ok(pairs)
    })
}

/// Counts the values of piece `i` that differ between updates in bf16 and updates in f32 with
/// rounding afterwards.
fn differing<M>(
    runner: &CaseRunner<'_>,
    (len, i): (usize, usize),
    moment: fn(usize, &Device) -> Result<M>,
    update: fn(&[AdamWPiece<'_, M>]) -> Result<()>,
) -> Result<f64> {
    let step = AdamWStep { learning_rate: 1e-3, weight_decay: 0.1, grad_scale: 0.5, ..FIRST };
    let param = runner.normal("param", len)?.here;
    let rounding = rounding(4096 * i as u64 + 8);
    let moments = || -> Result<[M; 2]> { Ok([moment(len, runner.device)?, moment(len, runner.device)?]) };
    let (of_bf16, of_f32) = (moments()?, moments()?);
    let mut count = 0.0;
    for (update_number, name) in (1..).zip(["first", "second"]) {
        let step = AdamWStep { update: update_number, ..step };
        let grad = runner.normal_as([DType::BF16, DType::F32][i % 2], name, len)?.here;
        let (wide, wide_grad) =
            (TensorMut::new(param.to_dtype(DType::F32)?.copy()?), grad.to_dtype(DType::F32)?);
        for (param, grad, [first, second]) in [(&param, &*grad, &of_bf16), (&wide, &wide_grad, &of_f32)] {
            update(&[AdamWPiece { param, value: None, rounding, grad, moments: [first, second], step }])?;
        }
        let mut rounded = vec![bf16::ZERO; len];
        let values = to_host_vec::<f32>(&wide)?;
        for (at, (to, values)) in rounded.chunks_mut(RUN).zip(values.chunks(RUN)).enumerate() {
            let noise = rounding.offset(at * RUN).noise(values.len());
            let all = to.iter_mut().zip(values).zip(noise.as_flattened());
            all.for_each(|((to, value), noise)| *to = stochastic_rounding::round(*value, *noise));
        }
        let updated = to_host_vec::<bf16>(&param)?;
        count += updated.iter().zip(&rounded).filter(|(a, b)| a.to_bits() != b.to_bits()).count() as f64;
    }
    Ok(count)
}

/// Returns the case of one update of pieces of these lengths.
pub(in crate::ops) fn shaped(what: &str, pieces: &[usize], options: AdamWStep) -> OpCase {
    let pieces = pieces.to_vec();
    OpCase::new("adamw", what, Tolerance::FORWARD.only_f32(), move |runner| update(runner, &pieces, &options))
}

/// The tensors of one piece.
struct Values {
    step: AdamWStep,
    param: OpPair,
    /// The bf16 copy used in forward and backward, if it differs from `param`.
    value: Option<TensorMut>,
    grad: OpPair,
    moments: [OpPair; 2],
}

impl Values {
    fn new(runner: &CaseRunner<'_>, len: usize, step: AdamWStep) -> Result<Self> {
        let stream = RngStream::new(0).named("second");
        let squares = (0..len as u64).map(|i| stream.uniform(i)).collect();
        let moments = [runner.normal("first", len)?.scaled(0.1)?, runner.twin(DType::F32, squares, len)?];
        // Short pieces have no bf16 copy.
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

/// Runs the update; the pieces differ in their learning rates, as with LoRA+.
fn update(runner: &CaseRunner<'_>, pieces: &[usize], options: &AdamWStep) -> Result<Vec<TensorPair>> {
    let step = |times: usize| AdamWStep { learning_rate: options.learning_rate * times as f64, ..*options };
    let values = pieces.iter().zip(1..).map(|(&len, times)| Values::new(runner, len, step(times)));
    let values = values.collect::<Result<Vec<_>>>()?;
    let pieces: Vec<_> = values
        .iter()
        .map(|Values { step, param, value, grad, moments: [first, second] }| AdamWPiece {
            param: &param.here,
            value: value.as_ref(),
            rounding: rounding(0),
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
            // The rounded parameters must match bit for bit.
            let rounded = param.here.to_dtype(DType::BF16)?.to_dtype(DType::F32)?;
            pairs.push(TensorPair::new(value.to_dtype(DType::F32)?, rounded));
        }
        pairs.extend([param.pair(), first.pair(), second.pair()]);
    }
    Ok(pairs)
}
