//! Cases of AdamW with moments in 8 bits.

use candle_core::{DType, Device, Tensor};

use super::{Int8State, STATE_BLOCK, adamw_int8};
use crate::error::Result;
use crate::ops::adamw::{self, AdamWStep};
use crate::ops::case::{CaseRunner, OpCase, TensorPair, Tolerance};
use crate::quant;
use crate::runtime::TensorMut;

/// The cases of the update.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    vec![OpCase::new("adamw_int8", "two updates", Tolerance::FORWARD.only_f32(), update)]
}

/// Two updates from zero moments. The reference is AdamW on the moments that the codes stand for.
fn update(runner: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
    const LEN: usize = 3 * STATE_BLOCK + 40;
    let param = runner.normal("param", LEN)?;
    let moments = [Int8State::zeros(LEN)?, Int8State::zeros(LEN)?];
    let mut step = AdamWStep {
        learning_rate: 0.02,
        betas: [0.9, 0.999],
        eps: 1e-8,
        weight_decay: 0.1,
        update: 1,
        grad_scale: 0.5,
    };
    for name in ["first", "second"] {
        let grad = runner.normal_f32(name, LEN)?;
        let [first, second] = [widened(&moments[0], true)?, widened(&moments[1], false)?].map(TensorMut::new);
        adamw::reference(&param.plain, &grad.plain, [&first, &second], &step)?;
        adamw_int8(&param.here, &grad.here, [&moments[0], &moments[1]], &step)?;
        step.update += 1;
    }
    Ok(vec![param.pair()])
}

fn widened(moment: &Int8State, signed: bool) -> Result<Tensor> {
    let map = if signed { quant::dynamic_signed() } else { quant::dynamic_unsigned() };
    let (codes, absmax) = (moment.codes.to_vec1::<u8>()?, moment.absmax.to_vec1::<f32>()?);
    let value = |(i, &code): (usize, &u8)| map[usize::from(code)] * absmax[i / STATE_BLOCK];
    let values: Vec<f32> = codes.iter().enumerate().map(value).collect();
    let len = values.len();
    Ok(Tensor::from_vec(values, len, &Device::Cpu)?.to_dtype(DType::F32)?)
}
