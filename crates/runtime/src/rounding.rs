//! Rounding from f32 to the dtypes of weights and activations.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use half::bf16;

/// A type to which f32 numbers are rounded.
pub trait Rounded: Copy {
    /// The number of this type nearest to `value`, ties to even. The name is not `round`, because
    /// on a concrete type that would call `f32::round`.
    fn nearest(value: f32) -> Self;
}

impl Rounded for f32 {
    #[inline(always)]
    fn nearest(value: f32) -> Self {
        value
    }
}

impl Rounded for bf16 {
    /// Branch-free, so that loops vectorize; NaN stays NaN.
    #[inline(always)]
    fn nearest(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
        let quiet_nan = ((bits >> 16) | 0x40) as u16;
        bf16::from_bits(if value.is_nan() { quiet_nan } else { rounded })
    }
}

/// Rounds 16 values to bf16 like [`Rounded::nearest`] and returns them as f32 numbers.
///
/// # Safety
/// Callers outside of functions with these instructions check that the processor has AVX-512.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
pub fn nearest_avx512(x: __m512) -> __m512 {
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
    let rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), quiet);
    _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(0xffff_0000u32 as i32)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of every sign, exponent and upper fraction: representable, just above, at and near
    /// the middle between two.
    fn all_kinds() -> Vec<f32> {
        let lows = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff_u32];
        (0..=u32::from(u16::MAX)).flat_map(|high| lows.map(|low| f32::from_bits(high << 16 | low))).collect()
    }

    fn same(ours: bf16, theirs: bf16) -> bool {
        ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan()
    }

    #[test]
    fn nearest_is_to_even() {
        for x in all_kinds() {
            assert!(same(bf16::nearest(x), bf16::from_f32(x)), "{x}");
            assert_eq!(f32::nearest(x).to_bits(), x.to_bits());
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn avx512_rounds_as_one_value_at_a_time() {
        if !std::arch::is_x86_feature_detected!("avx512f") {
            eprintln!("SKIPPED: this processor has no AVX-512");
            return;
        }
        for sixteen in all_kinds().chunks_exact(16) {
            let mut rounded = [0f32; 16];
            // SAFETY: the processor has AVX-512, and both arrays hold 16 values.
            unsafe {
                _mm512_storeu_ps(rounded.as_mut_ptr(), nearest_avx512(_mm512_loadu_ps(sixteen.as_ptr())))
            };
            for (&x, wide) in sixteen.iter().zip(rounded) {
                assert_eq!(wide.to_bits() & 0xffff, 0, "{x}");
                assert!(same(bf16::from_bits((wide.to_bits() >> 16) as u16), bf16::from_f32(x)), "{x}");
            }
        }
    }
}
