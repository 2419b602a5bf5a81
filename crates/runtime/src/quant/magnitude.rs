//! The largest magnitude of a block, which is its scale.

use crate::instruction_set::vectorized;

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
    pub(super) fn all_finite(values: &[f32]) -> bool {
        largest_bits(values) < f32::INFINITY.to_bits()
    }
}
