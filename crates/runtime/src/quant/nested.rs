//! Double quantization: the scales of a tensor are quantized too.

use rayon::prelude::*;

use super::codes::{dynamic_signed, quantize_signed};
use super::runs::{RunMeaning, RunsView};

/// Scales that share an outer scale in double quantization.
pub const NESTED_BLOCK: usize = 256;

/// Returns a function that gives the scale of a block. A double-quantized scale is a code of the
/// signed dynamic map times the scale of its [`NESTED_BLOCK`] codes, plus the mean of the scales.
pub fn block_scales<'a>(runs: &RunsView<'a>, double_quant: bool) -> impl Fn(usize) -> f32 + use<'a> {
    let scales = runs.floats_of(RunMeaning::Scales);
    let codes = runs.bytes_of(RunMeaning::ScaleCodes);
    let outer = runs.floats_of(RunMeaning::NestedScales);
    let (map, mean) = (double_quant.then(dynamic_signed), runs.offset);
    move |block| match map {
        None => scales[block],
        Some(map) => map[usize::from(codes[block])] * outer[block / NESTED_BLOCK] + mean,
    }
}

/// Writes the codes of `scales` minus their mean, and their scales in `outer`; returns the mean.
///
/// # Panics
/// `codes` has another length than `scales`, or `outer` has not one value per [`NESTED_BLOCK`] of
/// them.
pub fn nest(scales: &[f32], codes: &mut [u8], outer: &mut [f32]) -> f32 {
    let mean = sum_as_torch(scales) / scales.len().max(1) as f32;
    nest_around(mean, scales, codes, outer);
    mean
}

/// Works like [`nest`] for a given number instead of the mean.
///
/// # Panics
/// The same as for [`nest`].
pub fn nest_around(mean: f32, scales: &[f32], codes: &mut [u8], outer: &mut [f32]) {
    assert_eq!(codes.len(), scales.len(), "one code a scale");
    assert_eq!(outer.len(), scales.len().div_ceil(NESTED_BLOCK), "one outer scale a block");
    let centred: Vec<f32> = scales.iter().map(|x| x - mean).collect();
    let blocks = centred.par_chunks(NESTED_BLOCK).zip(codes.par_chunks_mut(NESTED_BLOCK)).zip(outer);
    blocks.with_min_len(64).for_each(|((values, codes), outer)| *outer = quantize_signed(values, codes));
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
