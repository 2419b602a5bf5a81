//! Converts f32 to codes and scales, with bitsandbytes' rounding.

use rayon::prelude::*;

use super::magnitude::{all_finite, largest, largest_bits};
use super::{CodeKind, NESTED_BLOCK};
use crate::instruction_set::vectorized;

/// Values per thread task.
const TASK: usize = 1 << 14;

/// Quantizes finite `values`, a tensor or whole blocks of one, into `codes` and one scale per
/// block.
///
/// # Panics
/// `codes` or `absmax` differ from the lengths that [`super::QuantFormat`] gives for `values`.
pub fn quantize(kind: CodeKind, block_size: usize, values: &[f32], codes: &mut [u8], absmax: &mut [f32]) {
    assert_eq!(absmax.len(), values.len().div_ceil(block_size), "one scale a block");
    assert_eq!(codes.len(), (values.len() * kind.bits()).div_ceil(8), "codes of all values");
    let blocks = (TASK / block_size).max(1);
    // With an odd block size, blocks would share bytes, so one thread does all.
    let blocks = if kind.bits() == 4 && !(blocks * block_size).is_multiple_of(2) {
        absmax.len().max(1)
    } else {
        blocks
    };
    let bytes = (blocks * block_size * kind.bits()).div_ceil(8);
    values
        .par_chunks(blocks * block_size)
        .zip(codes.par_chunks_mut(bytes))
        .zip(absmax.par_chunks_mut(blocks))
        .for_each(|((values, codes), absmax)| match kind {
            CodeKind::NF4 | CodeKind::FP4 => four_bits(kind, block_size, values, codes, absmax),
            CodeKind::INT8 => {
                for ((values, codes), absmax) in blocks_of(block_size, values, codes).zip(absmax) {
                    *absmax = super::table::quantize(values, codes);
                }
            }
            CodeKind::Int8Rows => {
                for ((values, codes), absmax) in blocks_of(block_size, values, codes).zip(absmax) {
                    *absmax = largest(values);
                    // torch divides a number by a tensor in these two steps, which decide ties.
                    let factor = if *absmax > 0.0 { 1.0 / *absmax * 127.0 } else { 0.0 };
                    round_all(values, factor, codes);
                }
            }
        });
}

/// Index of the first value that is a NaN or an infinity.
pub fn first_not_finite(values: &[f32]) -> Option<usize> {
    let bad = |values: &[f32]| {
        if all_finite(values) { None } else { values.iter().position(|value| !value.is_finite()) }
    };
    let tasks = values.par_chunks(TASK).enumerate();
    tasks.find_map_first(|(i, values)| bad(values).map(|at| i * TASK + at))
}

fn blocks_of<'a>(
    block_size: usize,
    values: &'a [f32],
    codes: &'a mut [u8],
) -> impl Iterator<Item = (&'a [f32], &'a mut [u8])> {
    values.chunks(block_size).zip(codes.chunks_mut(block_size))
}

vectorized! {
    /// Rounds to integers, ties to even, as two's complement.
    fn round_all(values: &[f32], factor: f32, codes: &mut [u8]) {
        for (code, value) in codes.iter_mut().zip(values) {
            *code = (value * factor).round_ties_even() as i8 as u8;
        }
    }
}

vectorized! {
    /// Quantizes a run of blocks in one function: a call per block would cost as much as its work.
    fn four_bits(kind: CodeKind, block_size: usize, values: &[f32], codes: &mut [u8], absmax: &mut [f32]) {
        let ladder = CodeThresholds::new(kind);
        // One code per byte first, then two: whole blocks may end in the middle of a byte.
        let mut wide = vec![0u8; values.len()];
        for ((values, wide), absmax) in blocks_of(block_size, values, &mut wide).zip(absmax) {
            *absmax = f32::from_bits(largest_bits(values));
            // bitsandbytes multiplies by the reciprocal, whose last bit may differ from the
            // quotient's, but divides in the incomplete block at a tensor's end. The divisor is at
            // least this.
            let divisor = absmax.max(1e-38);
            if values.len() == block_size {
                let factor = 1.0 / divisor;
                places(values.iter().map(|value| value * factor), &ladder.midpoints, wide);
            } else {
                places(values.iter().map(|value| value / divisor), &ladder.midpoints, wide);
            }
        }
        if kind != CodeKind::NF4 {
            // NF4's codes ascend with their values.
            wide.iter_mut().for_each(|place| *place = ladder.by_place[usize::from(*place & 15)]);
        }
        pack(&wide, codes, ladder.zero);
    }
}

#[inline(always)]
fn pack(wide: &[u8], codes: &mut [u8], zero: u8) {
    let pairs = wide.chunks_exact(2);
    if let (Some(last), [odd]) = (codes.last_mut(), pairs.remainder()) {
        *last = odd << 4 | zero;
    }
    for (code, pair) in codes.iter_mut().zip(pairs) {
        *code = pair[0] << 4 | pair[1];
    }
}

/// Codes of a 4-bit kind in ascending order of their values, and the midpoints between them.
struct CodeThresholds {
    midpoints: [f32; 15],
    by_place: [u8; 16],
    /// Code of 0, which fills the last byte of an odd count.
    zero: u8,
}

impl CodeThresholds {
    fn new(kind: CodeKind) -> Self {
        let table = kind.table();
        let mut by_place: [u8; 16] = std::array::from_fn(|code| code as u8);
        by_place.sort_by(|&a, &b| table[usize::from(a)].total_cmp(&table[usize::from(b)]));
        let value = |place: usize| table[usize::from(by_place[place])];
        let midpoints = std::array::from_fn(|place| (value(place) + value(place + 1)) / 2.0);
        let zero = if kind == CodeKind::NF4 { 7 } else { 0 };
        CodeThresholds { midpoints, by_place, zero }
    }
}

/// Counts the midpoints below each value: its code's rank, the lower of two at a tie.
#[inline(always)]
fn places(values: impl Iterator<Item = f32>, midpoints: &[f32; 15], places: &mut [u8]) {
    for (place, scaled) in places.iter_mut().zip(values) {
        let mut below = 0u32;
        for midpoint in midpoints {
            below += u32::from(scaled > *midpoint);
        }
        *place = below as u8;
    }
}

/// Double quantization: writes the codes of `absmax` minus their mean, and their scales in `outer`;
/// returns the mean.
///
/// # Panics
/// `codes` has another length than `absmax`, or `outer` has not one value per [`NESTED_BLOCK`] of
/// them.
pub fn nest(absmax: &[f32], codes: &mut [u8], outer: &mut [f32]) -> f32 {
    let mean = sum_as_torch(absmax) / absmax.len().max(1) as f32;
    let centred: Vec<f32> = absmax.iter().map(|x| x - mean).collect();
    quantize(CodeKind::INT8, NESTED_BLOCK, &centred, codes, outer);
    mean
}

/// Lanes of a vector, and vectors that torch's sum adds in parallel.
const LANES: usize = 8;
const VECTORS: usize = 4;

/// The f32 sum of torch on a CPU, bit for bit (ATen's SumKernel.cpp: 4 vectors of 8 lanes in
/// parallel, each in a cascade of four levels). The mean shifts every scale, so another order would
/// give other codes.
fn sum_as_torch(values: &[f32]) -> f32 {
    const LEVELS: usize = 4;
    const WIDTH: usize = LANES * VECTORS;
    let rows = values.len() / WIDTH;
    let power = (rows.max(1).next_power_of_two().trailing_zeros() as usize / LEVELS).max(4);
    let mut levels = [[0f32; WIDTH]; LEVELS];
    for (i, row) in values.chunks_exact(WIDTH).enumerate() {
        levels[0].iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
        let done = i + 1;
        // A full level is added to the next one.
        let mut level = 1;
        while level < LEVELS && done.is_multiple_of(1 << (level * power)) {
            let (below, above) = levels.split_at_mut(level);
            above[0]
                .iter_mut()
                .zip(&mut below[level - 1])
                .for_each(|(sum, part)| *sum += std::mem::take(part));
            level += 1;
        }
    }
    let [mut sums, above @ ..] = levels;
    for level in above {
        sums.iter_mut().zip(level).for_each(|(sum, part)| *sum += part);
    }
    let mut rest = values[rows * WIDTH..].chunks_exact(LANES);
    for vector in &mut rest {
        sums.iter_mut().zip(vector).for_each(|(sum, value)| *sum += value);
    }
    for vector in 1..VECTORS {
        for lane in 0..LANES {
            sums[lane] += sums[vector * LANES + lane];
        }
    }
    let tail = rest.remainder().iter().fold(0f32, |sum, value| sum + value);
    sums[..LANES].iter().fold(tail, |sum, lane| sum + lane)
}
