//! Cases of AdamW with moments in 8 bits.

use candle_core::{DType, Device, Tensor};

use super::{AdamWPiece, Int8State, STATE_BLOCK, adamw_int8};
use crate::error::Result;
use crate::ops::adamw::{self, AdamWStep};
use crate::ops::case::{CaseRunner, OpCase, TensorPair, Tolerance};
use crate::quant;
use crate::runtime::TensorMut;

/// Returns the cases of the update.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    const PIECES: [usize; 2] = [3 * STATE_BLOCK + 40, STATE_BLOCK];
    let in_bf16 = adamw::cases::bf16_case("adamw_int8", &PIECES, Int8State::zeros, adamw_int8);
    vec![shaped("two updates", &PIECES), in_bf16]
}

/// Returns the case of pieces of these lengths.
pub(in crate::ops) fn shaped(what: &str, pieces: &[usize]) -> OpCase {
    let pieces = pieces.to_vec();
    OpCase::new("adamw_int8", what, Tolerance::FORWARD.only_f32(), move |runner| update(runner, &pieces))
}

/// Runs two updates of pieces from zero moments. The reference is AdamW on the dequantized moments.
fn update(runner: &CaseRunner<'_>, lengths: &[usize]) -> Result<Vec<TensorPair>> {
    let mut step = AdamWStep { weight_decay: 0.1, grad_scale: 0.5, ..adamw::cases::FIRST };
    let params = lengths.iter().map(|&len| runner.normal("param", len)).collect::<Result<Vec<_>>>()?;
    let values = lengths.iter().map(|&len| TensorMut::zeros(len, DType::BF16, runner.device));
    let values = values.collect::<Result<Vec<_>>>()?;
    let zeros = |len| Int8State::zeros(len, runner.device);
    let moments = lengths.iter().map(|&len| Ok([zeros(len)?, zeros(len)?])).collect::<Result<Vec<_>>>()?;
    for name in ["first", "second"] {
        let grads = lengths.iter().map(|&len| runner.normal_f32(name, len)).collect::<Result<Vec<_>>>()?;
        for ((param, grad), [first, second]) in params.iter().zip(&grads).zip(&moments) {
            let [first, second] = [widened(first, true)?, widened(second, false)?].map(TensorMut::new);
            adamw::reference(&param.plain, &grad.plain, [&first, &second], &step)?;
        }
        let all = params.iter().zip(&values).zip(&grads).zip(&moments);
        let pieces: Vec<_> = all
            .map(|(((param, value), grad), [first, second])| AdamWPiece {
                param: &param.here,
                value: Some(value),
                rounding: adamw::cases::rounding(0),
                grad: &grad.here,
                moments: [first, second],
                step,
            })
            .collect();
        adamw_int8(&pieces)?;
        step.update += 1;
    }
    let mut pairs = Vec::new();
    for (param, value) in params.into_iter().zip(values) {
        // The rounded parameters must match bit for bit.
        let rounded = param.here.to_dtype(DType::BF16)?.to_dtype(DType::F32)?;
        pairs.extend([TensorPair::new(value.to_dtype(DType::F32)?, rounded), param.pair()]);
    }
    Ok(pairs)
}

fn widened(moment: &Int8State, signed: bool) -> Result<Tensor> {
    let map = if signed { quant::dynamic_signed() } else { quant::dynamic_unsigned() };
    let (codes, absmax) = (moment.codes.to_vec1::<u8>()?, moment.absmax.to_vec1::<f32>()?);
    let value = |(i, &code): (usize, &u8)| map[usize::from(code)] * absmax[i / STATE_BLOCK];
    let values: Vec<f32> = codes.iter().enumerate().map(value).collect();
    let len = values.len();
    Ok(Tensor::from_vec(values, len, &Device::Cpu)?.to_dtype(DType::F32)?)
}
