//! The kernels of products in fp8 on the emulator.

use candle_core::Device;

use super::*;
use crate::backends::gpu::emulator::{Emulator, EmulatorSchedule};
use crate::ops::case::{CaseRunner, TensorPair};
use crate::ops::matmul_fp8::{on_cpu, quantize_fp8};
use crate::ops::matmul_quantized::Weight;

/// Kernels and CPU make the same codes and scales, to the bit, of all kinds of numbers.
#[test]
fn codes_are_those_of_the_cpu() -> Result<()> {
    let kinds = (0..=u32::from(u16::MAX)).map(|high| f32::from_bits(high << 16 | 0x8000));
    let all: Vec<f32> = kinds.filter(|x| x.is_finite()).collect();
    for (dtype, width) in [(DType::F32, 64), (DType::BF16, 64), (DType::F32, 4097), (DType::BF16, 37)] {
        let rows = all.len() / width;
        let x = Tensor::from_slice(&all[..rows * width], (rows, width), &Device::Cpu)?.to_dtype(dtype)?;
        let factors: Vec<f32> = (0..width).map(|at| 0.5 + at as f32 / 7.0).collect();
        let factors = Tensor::from_vec(factors, width, &Device::Cpu)?;
        for factors in [None, Some(&factors)] {
            let cpu = quantize_fp8(ColumnView::all(&x), factors)?;
            let quantize = || quantize_fp8(ColumnView::all(&x), factors);
            let gpu = Emulator::run(EmulatorSchedule::default(), quantize).0?;
            assert_eq!(gpu.codes.to_vec2::<u8>()?, cpu.codes.to_vec2::<u8>()?, "{dtype:?} {width}");
            assert_eq!(gpu.scales.to_vec1::<f32>()?, cpu.scales.to_vec1::<f32>()?, "{dtype:?} {width}");
        }
    }
    Ok(())
}

#[test]
fn codes_are_transposed() -> Result<()> {
    for (rows, width) in [(16, 64), (80, 48), (208, 144)] {
        let runner = CaseRunner { device: &Device::Cpu, dtype: DType::F32, first: 0 };
        let x = quantize_fp8(ColumnView::all(&runner.normal("x", (rows, width))?.here), None)?;
        let turned = Emulator::run(EmulatorSchedule::default(), || transposed(&Emulator, &x)).0?;
        assert_eq!(turned.codes.to_vec2::<u8>()?, x.codes.t()?.contiguous()?.to_vec2::<u8>()?);
    }
    Ok(())
}

/// A GPU whose products take no scales of rows multiplies the sums by them: to the bit the same in
/// f32.
#[test]
fn scales_after_a_product_are_those_of_the_product() -> Result<()> {
    for (dtype, start) in [(DType::F32, 4), (DType::F32, 1), (DType::BF16, 8), (DType::BF16, 3)] {
        let runner = CaseRunner { device: &Device::Cpu, dtype, first: 0 };
        let weight = Fp8Rows::of(&[Weight::Dense(&runner.normal("weight", (48, 80))?.here)])?;
        for (form, k, n) in [(Transpose::Nt, 80, 48), (Transpose::Nn, 48, 80)] {
            let a = quantize_fp8(ColumnView::all(&runner.normal("a", (5, k))?.here), None)?;
            for addend in [Addend::Nothing, Addend::Destination] {
                let product = |scales_rows| {
                    let dst = runner.normal("dst", (5, n + 16))?.here;
                    let columns = ColumnViewMut { tensor: &dst, start, len: n };
                    matmul(&Emulator, columns, &a, &weight, form, addend, scales_rows)?;
                    Ok::<_, crate::error::Error>(dst.into_tensor())
                };
                let run = |scales_rows| Emulator::run(EmulatorSchedule::default(), || product(scales_rows)).0;
                let error = TensorPair::new(run(true)?, run(false)?).error()?;
                assert!(error <= 1e-6, "{dtype:?} {form:?} from {start}: {error:e}");
                // From a start that is not aligned, both products end in this kernel.
                let dst = runner.normal("dst", (5, n + 16))?.here;
                on_cpu(ColumnViewMut { tensor: &dst, start, len: n }, &a, &weight, form, addend)?;
                let error = TensorPair::new(run(false)?, dst.into_tensor()).error()?;
                let most = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
                assert!(error <= most, "{dtype:?} {form:?} from {start}, CPU: {error:e}");
                assert_eq!(Emulator::launched().contains("scale_fp8_bf16"), dtype == DType::BF16);
            }
        }
    }
    Ok(())
}
