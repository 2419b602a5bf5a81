//! Loops that multiply in registers alone: as many sums as keep the multipliers busy and registers hold, and neither loads nor
//! stores. They multiply ones and add them up, so that the sums say how many there were.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::hint::black_box;

use super::f32_kernel::array;

/// What a loop has done in registers.
pub(super) struct RegisterSums {
    /// Its sums, lane by lane.
    pub(super) sums: Vec<f32>,
    /// Its multiplications and additions.
    pub(super) flops: u64,
}

/// The loop `$name` over `$sums` vectors of `$lanes` sums, each of which takes `$products` products of a lane that is `$one`.
macro_rules! register_loop {
    (
        $(#[$meta:meta])*
        $name:ident, $sums:expr, $lanes:literal, $products:literal,
        $one:expr, $splat:path, $madd:path, $store:path
    ) => {
        /// Ones that are multiplied and added up in registers, `rounds` times for each sum.
        $(#[$meta])*
        pub(super) fn $name(rounds: u64) -> RegisterSums {
            // Not known to the compiler, which would leave multiplications by one out.
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

/// Vectors of eight sums: with SSE2's 16 registers of four lanes two are left, elsewhere there are 32.
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

/// A multiplication and an addition for each lane, which come to the same where all that is multiplied are ones.
#[inline(always)]
fn multiply_add(x: [f32; 8], y: [f32; 8], mut sum: [f32; 8]) -> [f32; 8] {
    // Neither `array::from_fn` nor `zip`, which the dev profile does not inline.
    for (i, sum) in sum.iter_mut().enumerate() {
        // In two instructions, the product of what stays would be taken out of the loop.
        *sum = if array::FUSED { x[i].mul_add(y[i], *sum) } else { *sum * x[i] + y[i] };
    }
    sum
}
