//! Cases of quantized weights, of DoRA, and of the optimizer's 8-bit state.

use candle_core::{DType, Device, Tensor};

use super::{CaseRunner, SelftestCase, TensorPair, Tolerance};
use crate::error::Result;
use crate::ops::adamw::{self, AdamWStep};
use crate::ops::adamw_int8::{Int8State, STATE_BLOCK, adamw_int8};
use crate::ops::dora;
use crate::ops::matmul::{ColumnView, ColumnViewMut, Transpose};
use crate::ops::matmul_quantized::{Quantized, QuantizedRun, Weight, matmul_weight, quantized_reference};
use crate::quant::{self, CodeKind, QuantFormat, RunMeaning};
use crate::runtime::TensorMut;
use crate::runtime::rng::RngStream;

pub(super) fn cases() -> Vec<SelftestCase> {
    let mut cases = products();
    cases.extend(magnitudes());
    cases.push(SelftestCase::new("adamw_int8", "two updates", Tolerance::FORWARD.only_f32(), update));
    cases
}

/// A quantized matrix of normal values on the device, and on the host.
fn quantized(bench: &CaseRunner<'_>, format: QuantFormat, shape: (usize, usize)) -> Result<[Quantized; 2]> {
    let (n, stream) = (shape.0 * shape.1, RngStream::new(0).named("quantized"));
    let values: Vec<f32> = (0..n as u64).map(|i| stream.normal(i)).collect();
    let (mut codes, mut absmax) = (vec![0u8; format.code_bytes(n)], vec![0f32; format.blocks(n)]);
    quant::quantize(format.kind, format.block_size, &values, &mut codes, &mut absmax);
    let on = |device: &Device| -> Result<Quantized> {
        let run = |meaning, values| QuantizedRun { meaning, values };
        let bytes = |bytes: &[u8]| Tensor::from_slice(bytes, bytes.len(), device);
        let floats = |floats: &[f32]| Tensor::from_slice(floats, floats.len(), device);
        let mut runs = vec![run(RunMeaning::Codes, bytes(&codes)?)];
        let mut offset = 0.0;
        if format.double_quant {
            let mut nested = vec![0u8; absmax.len()];
            let mut outer = vec![0f32; absmax.len().div_ceil(quant::NESTED_BLOCK)];
            offset = quant::nest(&absmax, &mut nested, &mut outer);
            runs.push(run(RunMeaning::ScaleCodes, bytes(&nested)?));
            runs.push(run(RunMeaning::NestedScales, floats(&outer)?));
        } else {
            runs.push(run(RunMeaning::Scales, floats(&absmax)?));
        }
        Ok(Quantized { format, shape, runs, offset })
    };
    Ok([on(bench.device)?, on(&Device::Cpu)?])
}

const FORMATS: [QuantFormat; 6] = [
    QuantFormat { kind: CodeKind::Nf4, block_size: 64, double_quant: true },
    QuantFormat { kind: CodeKind::Nf4, block_size: 64, double_quant: false },
    QuantFormat { kind: CodeKind::Fp4, block_size: 128, double_quant: true },
    QuantFormat { kind: CodeKind::Int8, block_size: 64, double_quant: false },
    QuantFormat { kind: CodeKind::Int8Rows, block_size: 72, double_quant: false },
    // The last block is a short one.
    QuantFormat { kind: CodeKind::Nf4, block_size: 4096, double_quant: false },
];

fn products() -> Vec<SelftestCase> {
    let mut cases = Vec::new();
    for format in FORMATS {
        let QuantFormat { kind, block_size, double_quant } = format;
        let name = format!("{} {block_size}{}", kind.name(), if double_quant { " nested" } else { "" });
        // Rows that are no multiple of a block; more columns than a panel.
        for (shape, what) in [((53, 72), "53x72"), ((48, 41), "48x41"), ((600, 2100), "600x2100")] {
            for (form, accumulate) in [(Transpose::Nt, false), (Transpose::Nn, true)] {
                let what =
                    format!("{name}, {form:?} {what}{}", if accumulate { ", accumulated" } else { "" });
                let tolerance = if accumulate { Tolerance::BACKWARD } else { Tolerance::FORWARD };
                cases.push(SelftestCase::new("matmul_weight", what, tolerance, move |bench| {
                    let [here, plain] = quantized(bench, format, shape)?;
                    let (k, n) = if form == Transpose::Nt { (shape.1, shape.0) } else { shape };
                    let (a, dst) = (bench.normal("a", (7, k + 3))?, bench.normal("dst", (7, n + 5))?);
                    let a_of = |tensor| ColumnView { tensor, start: 2, len: k };
                    let dst_of = |tensor| ColumnViewMut { tensor, start: 4, len: n };
                    matmul_weight(
                        dst_of(&dst.here),
                        a_of(&a.here),
                        Weight::Quantized(&here),
                        form,
                        accumulate,
                    )?;
                    quantized_reference(dst_of(&dst.plain), a_of(&a.plain), &plain, form, accumulate)?;
                    Ok(vec![dst.pair()])
                }));
            }
        }
    }
    cases
}

fn magnitudes() -> Vec<SelftestCase> {
    let mut cases = Vec::new();
    for quantize in [false, true] {
        let what = if quantize { "nf4 70x40" } else { "dense 70x40" };
        cases.push(SelftestCase::new("weight_norm", what, Tolerance::FORWARD, move |bench| {
            let (w, [here, plain]) = (bench.normal("w", (70, 40))?, quantized(bench, FORMATS[0], (70, 40))?);
            let (a, b) = (bench.normal_f32("a", (3, 40))?, bench.normal_f32("b", (70, 3))?);
            let (here, plain) = if quantize {
                (Weight::Quantized(&here), Weight::Quantized(&plain))
            } else {
                (Weight::Dense(&w.here), Weight::Dense(&w.plain))
            };
            let got = dora::weight_norm(here, &a.here, &b.here, 0.7)?;
            Ok(vec![TensorPair::new(got, dora::weight_norm_reference(plain, &a.plain, &b.plain, 0.7)?)])
        }));
    }
    for accumulate in [false, true] {
        let what = if accumulate { "added" } else { "written" };
        cases.push(SelftestCase::new("scale_columns", what, Tolerance::ROUNDED, move |bench| {
            let (dst, x) = (bench.normal("dst", (23, 31))?, bench.normal("x", (23, 20))?);
            let factors = bench.normal_f32("factors", 17)?;
            let dst_of = |tensor| ColumnViewMut { tensor, start: 6, len: 17 };
            let x_of = |tensor| ColumnView { tensor, start: 2, len: 17 };
            dora::scale_columns(dst_of(&dst.here), x_of(&x.here), &factors.here, accumulate)?;
            dora::scale_columns_reference(dst_of(&dst.plain), x_of(&x.plain), &factors.plain, accumulate)?;
            Ok(vec![dst.pair()])
        }));
    }
    cases.push(SelftestCase::new("magnitude_backward", "a column range", Tolerance::BACKWARD, |bench| {
        let (grad, dy) = (bench.normal_f32("grad", 17)?, bench.normal("dy", (23, 31))?);
        let (x, norm) = (bench.normal("x", (23, 17))?, bench.normal_f32("norm", 17)?);
        let range = |tensor| ColumnView { tensor, start: 6, len: 17 };
        dora::magnitude_backward(&grad.here, range(&dy.here), &x.here, &norm.here)?;
        dora::magnitude_backward_reference(&grad.plain, range(&dy.plain), &x.plain, &norm.plain)?;
        Ok(vec![grad.pair()])
    }));
    cases
}

/// Two updates from zero moments. The reference is AdamW on the moments that the codes stand for.
fn update(bench: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
    const LEN: usize = 3 * STATE_BLOCK + 40;
    let param = bench.normal("param", LEN)?;
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
        let grad = bench.normal_f32(name, LEN)?;
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
