//! The largest magnitude of a block, which is its scale.

use crate::instruction_set::vectorized;

vectorized! {
    /// The largest magnitude of `values`.
    pub(super) fn largest(values: &[f32]) -> f32 {
        f32::from_bits(largest_bits(values))
    }
}

/// The bits of the largest magnitude. As whole numbers they are in the order of the magnitudes, infinities and then NaNs
/// last, and their maximum is vector code.
#[inline(always)]
pub(super) fn largest_bits(values: &[f32]) -> u32 {
    values.iter().fold(0, |max, value| max.max(value.abs().to_bits()))
}

vectorized! {
    /// Whether none of `values` is a NaN or an infinity.
    pub(super) fn all_finite(values: &[f32]) -> bool {
        largest_bits(values) < f32::INFINITY.to_bits()
    }
}
