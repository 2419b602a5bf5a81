//! Tests of the kernels for formats of other tools: bit-identical to the CPU's values.

use candle_core::{DType, Device, Tensor};
use half::bf16;

use super::super::super::cases::{KEPT, grid, quantized};
use super::super::super::{Quantized, QuantizedRun};
use super::super::{Source, dequantize_whole};
use super::{with_run_shifted, written};
use crate::backends::gpu::emulator::Emulator;
use crate::error::Result;
use crate::ops::case::CaseRunner;
use crate::quant::{
    BlockType, GgmlFormat, GridCodes, GridFormat, GridZeros, QuantFormat, RunDtype, RunMeaning, ScaleDtype,
};

/// Compares a matrix with the CPU's values, in f32 and bf16, in a panel `shift` values behind a
/// multiple of 16 bytes. Any two NaNs are equal.
fn check(weight: &Quantized, shift: usize) -> Result<()> {
    let count = weight.shape.0 * weight.shape.1;
    let (mut exact, mut rounded) = (vec![0.0f32; count], vec![bf16::ZERO; count]);
    weight.with_view(|view| view.dequantize(0, &mut exact))?;
    weight.with_view(|view| view.dequantize(0, &mut rounded))?;
    for dtype in [DType::F32, DType::BF16] {
        let values = written(shift, count, dtype, |panel| {
            dequantize_whole(&Emulator, &Source::new(weight)?, &panel.reshape(weight.shape)?)
        })?;
        let wanted = |i: usize| if dtype == DType::BF16 { rounded[i].to_f32() } else { exact[i] };
        let differs = |(i, value): (usize, &u32)| {
            let (actual, wanted) = (f32::from_bits(*value), wanted(i));
            actual.to_bits() != wanted.to_bits() && !(actual.is_nan() && wanted.is_nan())
        };
        let wrong = values.iter().enumerate().find(|(i, value)| differs((*i, *value)));
        let wrong = wrong.map(|(i, value)| (i, f32::from_bits(*value), wanted(i)));
        assert_eq!(wrong, None, "{:?}, {dtype:?}: the first wrong value", weight.format);
    }
    Ok(())
}

fn matrix(format: QuantFormat, shape: (usize, usize)) -> Result<Quantized> {
    let runner = CaseRunner { device: &Device::Cpu, dtype: DType::F32, first: 0 };
    let [weight, _] = quantized(&runner, format, shape)?;
    Ok(weight)
}

/// Returns the grids of the op's cases, and the other kinds of scales, zeros, cells and codes.
fn grids() -> Vec<GridFormat> {
    let of_case = KEPT.into_iter().filter_map(|format| match format {
        QuantFormat::Grid(format) => Some(format),
        _ => None,
    });
    let bytes = GridFormat { zeros: GridZeros::Bytes, ..grid(GridCodes::Int8, [1, 16], ScaleDtype::F16) };
    let named = |codes| GridFormat { by_column: true, ..grid(codes, [1, 32], ScaleDtype::BF16) };
    let more = [
        bytes,
        GridFormat { by_column: true, ..bytes },
        named(GridCodes::E4m3),
        named(GridCodes::E2m1),
        GridFormat { zeros: GridZeros::AsScales, ..named(GridCodes::Int4) },
        grid(GridCodes::Int4, [1, 20], ScaleDtype::F32),
        // One scale for all, and cells beyond the matrix.
        grid(GridCodes::E4m3, [97, 512], ScaleDtype::BF16),
        grid(GridCodes::E4m3, [128, 128], ScaleDtype::F32),
    ];
    of_case.chain(more).collect()
}

/// More values than a block of threads writes, and not a multiple of its share: in rows of whole
/// groups of 8 values, and in others.
#[test]
fn grids_have_the_values_of_the_cpu() -> Result<()> {
    for format in grids() {
        for columns in [104, 106] {
            check(&matrix(QuantFormat::Grid(format), (97, columns))?, 0)?;
        }
    }
    Ok(())
}

/// Returns a matrix of these blocks whose bytes are all random, scales included.
fn blocks(kind: BlockType, shape: (usize, usize)) -> Result<Quantized> {
    let format = QuantFormat::Ggml(GgmlFormat { kind });
    let mut weight = matrix(format, shape)?;
    let size = kind.bytes();
    let random = |at: usize| (at.wrapping_mul(2_654_435_761) >> 11) as u8;
    // Exponents of MXFP4 in turn.
    let byte = |at: usize| match kind {
        BlockType::MXFP4 if at.is_multiple_of(size) => (at / size) as u8,
        _ => random(at),
    };
    let len = format.scheme().runs(shape.0 * shape.1)[0].elements;
    let bytes: Vec<u8> = (0..len).map(byte).collect();
    weight.runs[0].values = Tensor::from_vec(bytes, len, &Device::Cpu)?;
    Ok(weight)
}

fn block_types() -> impl Iterator<Item = BlockType> {
    BlockType::ALL.into_iter().filter(|kind| kind.is_quantized())
}

#[test]
fn blocks_have_the_values_of_the_cpu() -> Result<()> {
    block_types().try_for_each(|kind| check(&blocks(kind, (12, 768))?, 0))
}

#[test]
fn memory_of_any_alignment() -> Result<()> {
    let grids = grids().into_iter().map(|format| matrix(QuantFormat::Grid(format), (41, 104)));
    for weight in grids.chain(block_types().map(|kind| blocks(kind, (3, 256)))) {
        let weight = weight?;
        check(&weight, 1)?;
        for run in weight.runs.iter().filter(|run| run.meaning.dtype() == RunDtype::U8) {
            for shift in [1, 4] {
                check(&with_run_shifted(&weight, run.meaning, shift)?, 0)?;
            }
        }
    }
    Ok(())
}

/// Every number of 16 and of 8 bits as a scale, of every code of e4m3 and e2m1.
#[test]
fn all_scales_and_codes_of_floats() -> Result<()> {
    use ScaleDtype::{BF16, E4m3Over, E4m3Times, E8m0, F16};
    for scales in [F16, BF16, E8m0, E4m3Times, E4m3Over] {
        let rows = if scales.bytes() == 2 { 256 } else { 8 };
        let (shape, cells) = ((rows, 2048), rows * 256);
        for codes in [GridCodes::E4m3, GridCodes::E2m1] {
            let format = GridFormat { columns: shape.1, ..grid(codes, [1, 8], scales) };
            let bytes = |meaning, values: Vec<u8>| {
                let len = values.len();
                Ok(QuantizedRun { meaning, values: Tensor::from_vec(values, len, &Device::Cpu)? })
            };
            let count = shape.0 * shape.1 * codes.bits() / 8;
            // Codes in turn, those of neighbouring rows and cells at other places.
            let of_codes = (0..count).map(|at| (at + at / 256).wrapping_mul(37) as u8).collect();
            let of_scales = match scales.bytes() {
                2 => (0..cells).flat_map(|cell| (cell as u16).to_le_bytes()).collect(),
                _ => (0..cells).map(|cell| (cell + cell / 256) as u8).collect(),
            };
            let runs: Result<Vec<QuantizedRun>> =
                [bytes(RunMeaning::Codes, of_codes), bytes(RunMeaning::ScaleBytes, of_scales)]
                    .into_iter()
                    .collect();
            check(&Quantized { format: QuantFormat::Grid(format), shape, runs: runs?, offset: 3e-3 }, 0)?;
        }
    }
    Ok(())
}
