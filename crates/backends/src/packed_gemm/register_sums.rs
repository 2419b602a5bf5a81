//! Loops that multiply in registers alone: enough sums to keep the multipliers busy, as far as
//! registers allow, and no loads or stores. They multiply ones and add them up, so that the sums
//! give the number of multiplications.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::hint::black_box;

use super::f32_kernel::array;

/// The result of a loop in registers.
pub(super) struct RegisterSums {
    /// The sums, lane by lane.
    pub(super) sums: Vec<f32>,
    /// The number of multiplications and additions.
    pub(super) flops: u64,
}

/// Defines the loop `$name` over `$sums` vectors of `$lanes` sums, each of which adds `$products`
/// products per lane of `$one`.
macro_rules! register_loop {
    (
        $(#[$meta:meta])*
        $name:ident, $sums:expr, $lanes:literal, $products:literal,
        $one:expr, $splat:path, $madd:path, $store:path
    ) => {
        /// Multiplies ones and adds them up in registers, `rounds` times for each sum.
        $(#[$meta])*
        pub(super) fn $name(rounds: u64) -> RegisterSums {
            // Hidden from the compiler, which would remove multiplications by one.
            let one = $splat(black_box($one));
            let mut sums = [$splat(0.0); $sums];
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = $madd(one, one, *sum);
                }
            }
            let mut lanes = vec![0f32; $sums * $lanes];
            for (lanes, sum) in lanes.chunks_exact_mut($lanes).zip(sums) {
                // SAFETY: as many values as the vector has.
                unsafe { $store(lanes.as_mut_ptr(), sum) };
            }
            RegisterSums { flops: rounds * (lanes.len() * $products * 2) as u64, sums: lanes }
        }
    };
}

#[cfg(target_arch = "x86_64")]
register_loop!(
    #[target_feature(enable = "avx512f,avx512bf16")]
    avx512_bf16,
    16,
    16,
    2,
    TWO_ONES,
    _mm512_set1_ps,
    add_pairs,
    _mm512_storeu_ps
);
#[cfg(target_arch = "x86_64")]
register_loop!(
    #[target_feature(enable = "avx512f")]
    avx512,
    16,
    16,
    1,
    1.0,
    _mm512_set1_ps,
    _mm512_fmadd_ps,
    _mm512_storeu_ps
);
#[cfg(target_arch = "x86_64")]
register_loop!(
    #[target_feature(enable = "avx2,fma")]
    avx2,
    12,
    8,
    1,
    1.0,
    _mm256_set1_ps,
    _mm256_fmadd_ps,
    _mm256_storeu_ps
);
register_loop!(baseline, BASELINE_SUMS, 8, 1, 1.0, array::splat, multiply_add, array::store);

/// Two bf16 ones, as the bits of an f32.
#[cfg(target_arch = "x86_64")]
pub(super) const TWO_ONES: f32 = f32::from_bits(0x3f80_3f80);

/// Vectors of eight sums: SSE2 has 16 registers of four lanes, two of which are reserved; other
/// architectures have 32.
const BASELINE_SUMS: usize = if cfg!(target_arch = "x86_64") { 7 } else { 12 };

/// Adds the products of pairs of bf16 numbers, given as the bits of f32.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn add_pairs(x: __m512, y: __m512, sum: __m512) -> __m512 {
    // SAFETY: vectors of the same bits.
    unsafe {
        let x = std::mem::transmute::<__m512, __m512bh>(x);
        let y = std::mem::transmute::<__m512, __m512bh>(y);
        _mm512_dpbf16_ps(sum, x, y)
    }
}

/// Multiplies and adds in each lane; fused and separate forms are equal if all factors are ones.
#[inline(always)]
fn multiply_add(x: [f32; 8], y: [f32; 8], mut sum: [f32; 8]) -> [f32; 8] {
    // The dev profile does not inline `array::from_fn` and `zip`.
    for (i, sum) in sum.iter_mut().enumerate() {
        // As two instructions, the compiler would move a loop-invariant product out of the loop.
        *sum = if array::FUSED { x[i].mul_add(y[i], *sum) } else { *sum * x[i] + y[i] };
    }
    sum
}
