//! The largest magnitude of a block, which is its scale, and values that are not finite.

use rayon::prelude::*;

use crate::instruction_set::vectorized;

/// Values per thread task.
const TASK: usize = 1 << 14;

vectorized! {
    /// The largest magnitude of `values`.
    pub(super) fn largest(values: &[f32]) -> f32 {
        f32::from_bits(largest_bits(values))
    }
}

/// Bits of the largest magnitude. As integers, magnitudes keep their order, followed by infinities
/// and then NaNs, and their maximum vectorizes.
#[inline(always)]
pub(super) fn largest_bits(values: &[f32]) -> u32 {
    values.iter().fold(0, |max, value| max.max(value.abs().to_bits()))
}

vectorized! {
    /// Returns true if `values` contain no NaN and no infinity.
    fn all_finite(values: &[f32]) -> bool {
        largest_bits(values) < f32::INFINITY.to_bits()
    }
}

/// Index of the first value that is a NaN or an infinity.
pub fn first_not_finite(values: &[f32]) -> Option<usize> {
    let bad = |values: &[f32]| {
        if all_finite(values) { None } else { values.iter().position(|value| !value.is_finite()) }
    };
    let tasks = values.par_chunks(TASK).enumerate();
    tasks.find_map_first(|(i, values)| bad(values).map(|at| i * TASK + at))
}
