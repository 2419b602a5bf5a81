//! Tests of the dequantizing kernels on ranges of any start, length and alignment: bit-identical to
//! the CPU's values.

mod repacked;

use candle_core::{DType, Device, Tensor};
use half::bf16;

use super::super::cases::{FORMATS, quantized};
use super::super::{Quantized, QuantizedRun};
use super::{Source, dequantize_from};
use crate::backends::gpu::emulator::{Emulator, EmulatorSchedule, Order};
use crate::error::Result;
use crate::ops::case::CaseRunner;
use crate::quant::{QuantFormat, RunMeaning};
use crate::recipe::enums::QuantKind;

/// A range of a matrix's values, and the offsets, in elements, of the panel and the codes from a
/// multiple of 16 bytes.
#[derive(Debug, Clone, Copy)]
struct ValueRange {
    start: usize,
    count: usize,
    panel_shift: usize,
    codes_shift: usize,
}

impl ValueRange {
    fn new(start: usize, count: usize) -> Self {
        ValueRange { start, count, panel_shift: 0, codes_shift: 0 }
    }
}

/// Spans several blocks of threads, and is not a multiple of a thread's share.
const SHAPE: (usize, usize) = (97, 106);

/// Returns the same values with a run of bytes in memory that begins `shift` bytes later.
fn with_run_shifted(weight: &Quantized, meaning: RunMeaning, shift: usize) -> Result<Quantized> {
    let shifted = |run: &QuantizedRun| -> Result<QuantizedRun> {
        if run.meaning != meaning || shift == 0 {
            return Ok(run.clone());
        }
        let front = Tensor::zeros(shift, DType::U8, &Device::Cpu)?;
        let values = Tensor::cat(&[&front, &run.values], 0)?.narrow(0, shift, run.values.elem_count())?;
        Ok(QuantizedRun { meaning: run.meaning, values })
    };
    let runs = weight.runs.iter().map(shifted).collect::<Result<_>>()?;
    Ok(Quantized { runs, ..weight.clone() })
}

/// Returns the kernel's values of the range as f32 bits, equal under two schedules.
fn dequantized(weight: &Quantized, range: ValueRange, dtype: DType) -> Result<Vec<u32>> {
    let weight = with_run_shifted(weight, RunMeaning::Codes, range.codes_shift)?;
    written(range.panel_shift, range.count, dtype, |panel| {
        dequantize_from(&Emulator, &Source::new(&weight)?, range.start, panel)
    })
}

/// Returns the values that `write` writes to a panel of `count` values, `shift` values behind a
/// multiple of 16 bytes, as f32 bits, equal under two schedules.
fn written(
    shift: usize,
    count: usize,
    dtype: DType,
    write: impl Fn(&Tensor) -> Result<()>,
) -> Result<Vec<u32>> {
    let mut both = Vec::new();
    for (order, late_copies) in [(Order::Forward, false), (Order::Reverse, true)] {
        let schedule = EmulatorSchedule { order, late_copies, counts: false };
        let memory = Tensor::zeros(shift + count, dtype, &Device::Cpu)?;
        let panel = memory.narrow(0, shift, count)?;
        let (done, _) = Emulator::run(schedule, || write(&panel));
        done?;
        let values = panel.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        both.push(values.into_iter().map(f32::to_bits).collect::<Vec<u32>>());
    }
    assert_eq!(both[0], both[1], "{shift}, {count}");
    Ok(both.swap_remove(0))
}

fn check(format: QuantFormat, range: ValueRange) -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let runner = CaseRunner { device: &Device::Cpu, dtype, first: 0 };
        let [weight, _] = quantized(&runner, format, SHAPE)?;
        let mut exact = vec![0.0; range.count];
        weight.with_view(|view| view.dequantize(range.start, &mut exact))?;
        let rounded = |x: f32| if dtype == DType::BF16 { bf16::from_f32(x).to_f32() } else { x };
        let wanted: Vec<u32> = exact.into_iter().map(|x| rounded(x).to_bits()).collect();
        let actual = dequantized(&weight, range, dtype)?;
        let wrong = actual.iter().zip(&wanted).position(|(actual, wanted)| actual != wanted);
        assert_eq!(wrong, None, "{format:?}, {range:?}, {dtype:?}: the first wrong value");
    }
    Ok(())
}

/// Returns the formats of the op's cases, and block sizes that are neither a power of two nor a
/// multiple of a thread's share.
fn formats() -> Vec<QuantFormat> {
    let plain = |kind, block_size| QuantFormat::of_kind(kind, block_size, false);
    let odd = [plain(QuantKind::Nf4, 72), plain(QuantKind::Nf4, 12), plain(QuantKind::Int8, 20)];
    FORMATS.into_iter().chain(odd).collect()
}

fn check_all(ranges: &[ValueRange]) -> Result<()> {
    formats().into_iter().try_for_each(|format| ranges.iter().try_for_each(|&range| check(format, range)))
}

/// Sixteen bytes at a time, except at the end.
#[test]
fn whole_matrices_and_their_ends() -> Result<()> {
    let all = SHAPE.0 * SHAPE.1;
    check_all(&[
        ValueRange::new(0, all),
        ValueRange::new(64, all - 64),
        ValueRange::new(4096, 13),
        ValueRange::new(8, 1),
    ])
}

#[test]
fn starts_in_the_middle_of_a_byte_or_a_group() -> Result<()> {
    let all = SHAPE.0 * SHAPE.1;
    check_all(&[ValueRange::new(3, all - 3), ValueRange::new(4, 5001), ValueRange::new(1, 1)])
}

#[test]
fn memory_that_is_not_aligned() -> Result<()> {
    for shift in [1, 4] {
        check_all(&[
            ValueRange { panel_shift: shift, ..ValueRange::new(0, 300) },
            ValueRange { codes_shift: shift, ..ValueRange::new(0, 300) },
        ])?;
    }
    Ok(())
}

/// Indices of 33 bits, in zeroed memory that the system allocates only when touched.
#[test]
fn values_behind_the_first_2_to_the_32() -> Result<()> {
    let block_size = 3 << 20;
    let range = ValueRange::new((1 << 32) + 8, 100);
    let values = range.start + range.count;
    let blocks = values.div_ceil(block_size);
    let scales: Vec<f32> = (0..blocks).map(|block| block as f32).collect();
    let run = |meaning, values| QuantizedRun { meaning, values };
    let weight = Quantized {
        format: QuantFormat::of_kind(QuantKind::Nf4, block_size, false),
        shape: (1, values),
        runs: vec![
            run(RunMeaning::Codes, Tensor::zeros(values / 2, DType::U8, &Device::Cpu)?),
            run(RunMeaning::Scales, Tensor::from_vec(scales, blocks, &Device::Cpu)?),
        ],
        offset: 0.0,
    };
    let first = weight.format.scheme().hint().table[0];
    let wanted = (first * (range.start / block_size) as f32).to_bits();
    for dtype in [DType::F32, DType::BF16] {
        let actual = dequantized(&weight, range, dtype)?;
        let wanted = if dtype == DType::BF16 {
            bf16::from_f32(f32::from_bits(wanted)).to_f32().to_bits()
        } else {
            wanted
        };
        assert!(actual.iter().all(|&bits| bits == wanted), "{dtype:?}: {actual:?}");
    }
    Ok(())
}
