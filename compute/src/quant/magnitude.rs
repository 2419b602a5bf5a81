//! The largest magnitude of a block, which is its scale.

/// The largest magnitude of `values`.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2+fma"))]
pub(super) fn largest(values: &[f32]) -> f32 {
    f32::from_bits(largest_bits(values))
}

/// The bits of the largest magnitude. As whole numbers they are in the order of the magnitudes, infinities and then NaNs
/// last, and their maximum is vector code.
#[inline(always)]
pub(super) fn largest_bits(values: &[f32]) -> u32 {
    values.iter().fold(0, |max, value| max.max(value.abs().to_bits()))
}

/// Whether none of `values` is a NaN or an infinity.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2+fma"))]
pub(super) fn all_finite(values: &[f32]) -> bool {
    largest_bits(values) < f32::INFINITY.to_bits()
}
