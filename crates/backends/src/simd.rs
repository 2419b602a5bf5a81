//! Elementary functions that vectorize: branch-free bodies, inlined into loops that
//! [`crate::instruction_set`] compiles for AVX-512, AVX2 and plain x86-64 (and once for other
//! processors). No function uses an explicit fused multiply-add, so every version gives the same
//! bits.

/// Returns e^x to 2 ulp (Cephes `expf` polynomial) from −87.3 to 88.7; 0 below that, infinity
/// above; NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding 1.5 · 2^23 leaves the rounded integer in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 5e-1;
    let fraction = p * r * r + r + 1.0;
    // Multiplies by 2^n through the exponent. From 88.38 on n is 128, and 2^128 is not an f32,
    // although the result is. Outside the range these bits are unused.
    let value = f32::from_bits(fraction.to_bits().wrapping_add(shifted.to_bits() << 23));
    let value = if x < -87.3 { 0.0 } else { value };
    if x <= 88.7 { value } else { x + f32::INFINITY }
}

/// Returns 1 / (1 + e^−x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Returns tanh, by e^2x; absolute error 1e-7.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (1.0 + exp(2.0 * x))
}

/// Returns erfc, with a relative error of (1 + |x|) · 1e-6 up to x = 9 (W. H. Press et al.,
/// Numerical Recipes, `erfcc`).
#[inline(always)]
pub fn erfc(x: f32) -> f32 {
    let z = x.abs();
    let t = 1.0 / (1.0 + 0.5 * z);
    let mut p = 0.170_872_77;
    p = p * t - 0.822_152_23;
    p = p * t + 1.488_515_9;
    p = p * t - 1.135_204;
    p = p * t + 0.278_868_07;
    p = p * t - 0.186_288_06;
    p = p * t + 0.096_784_18;
    p = p * t + 0.374_091_96;
    p = p * t + 1.000_023_7;
    p = p * t - 1.265_512_2;
    let above = t * exp(p - z * z);
    if x < 0.0 { 2.0 - above } else { above }
}

/// Number of elements that these functions process at a time.
pub const LANES: usize = 16;

/// Replaces each element by `f` of it.
///
/// # Panics
/// Panics if the number of elements is not a multiple of [`LANES`].
#[inline(always)]
pub fn map_lanes(values: &mut [f32], f: impl Fn(f32) -> f32) {
    let (chunks, rest) = values.as_chunks_mut::<LANES>();
    assert!(rest.is_empty(), "{} elements are no whole vectors", rest.len());
    for chunk in chunks {
        // `array::map` would be a separate function, without the caller's instruction set.
        for value in chunk {
            *value = f(*value);
        }
    }
}

/// Replaces pairs of elements of two slices of one length, like [`map_lanes`].
#[inline(always)]
pub fn map_lanes2(a: &mut [f32], b: &mut [f32], f: impl Fn(f32, f32) -> (f32, f32)) {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks_mut::<LANES>(), b.as_chunks_mut::<LANES>());
    assert!(a.len() == b.len() && a_rest.is_empty() && b_rest.is_empty(), "no whole vectors");
    for (a, b) in a.iter_mut().zip(b) {
        for (a, b) in a.iter_mut().zip(b) {
            (*a, *b) = f(*a, *b);
        }
    }
}

/// Returns the largest element, −∞ for an empty slice; a NaN anywhere gives NaN.
#[inline(always)]
pub fn max(values: &[f32]) -> f32 {
    // A comparison with NaN is false, so the maximum drops it; track NaN separately.
    let mut is_nan = false;
    for value in values {
        is_nan |= value.is_nan();
    }
    if is_nan { f32::NAN } else { largest(values) }
}

/// Returns the largest element that is not NaN, −∞ if none exists.
#[inline(always)]
pub fn largest(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder().iter().fold(f32::NEG_INFINITY, |a, &b| larger(a, b));
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = larger(lanes[i], chunk[i]);
        }
    }
    larger(rest, fold_lanes(lanes, larger))
}

/// Returns Σ f(a) in 16 lanes, so the order of additions is the same for every instruction set.
#[inline(always)]
pub fn sum_of<T: Copy>(a: &[T], f: impl Fn(T) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let chunks = a.chunks_exact(LANES);
    let tail: f32 = chunks.remainder().iter().map(|&x| f(x)).sum();
    for x in chunks {
        for i in 0..LANES {
            lanes[i] += f(x[i]);
        }
    }
    fold_lanes(lanes, |a, b| a + b) + tail
}

/// Returns Σ f(a, b) in 16 lanes.
#[inline(always)]
pub fn sum_of2<T: Copy, U: Copy>(a: &[T], b: &[U], f: impl Fn(T, U) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(&x, &y)| f(x, y)).sum();
    for (x, y) in a_chunks.zip(b_chunks) {
        for i in 0..LANES {
            lanes[i] += f(x[i], y[i]);
        }
    }
    fold_lanes(lanes, |a, b| a + b) + tail
}

/// Combines all lanes in halves; sequentially, each step would wait for the previous one.
#[inline(always)]
fn fold_lanes(lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    // Unrolled by hand: a loop over the widths would go through memory.
    let mut eight = [0f32; 8];
    for i in 0..8 {
        eight[i] = f(lanes[i], lanes[i + 8]);
    }
    let mut four = [0f32; 4];
    for i in 0..4 {
        four[i] = f(eight[i], eight[i + 4]);
    }
    f(f(four[0], four[2]), f(four[1], four[3]))
}

/// Prefetches the cache line of an address, which may be invalid.
#[inline(always)]
pub fn prefetch<T>(_address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // A later version of Rust makes this call safe.
    #[allow(unused_unsafe)]
    // SAFETY: a prefetch has no effect on memory and never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(_address.cast());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere_and_keeps_special_values() {
        let check = |x: f32| {
            let (ours, exact) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((ours / exact - 1.0).abs() < 2.5e-7, "exp({x}) = {ours}, exactly {exact}");
        };
        let mut x = -87.3f32;
        while x < 88.7 {
            check(x);
            x += 0.0137;
        }
        // All numbers near the ends of the range, and where 2^n exceeds f32.
        for edge in [-87.3f32, -87.0, 88.0, 88.376, 88.7] {
            (edge.to_bits() - 5000..=edge.to_bits() + 5000)
                .map(f32::from_bits)
                .filter(|x| (-87.3..=88.7).contains(x))
                .for_each(check);
        }
        assert_eq!((exp(f32::next_down(-87.3)), exp(-88.0), exp(f32::MIN)), (0.0, 0.0, 0.0));
        for above in [f32::next_up(88.7), 89.0, 177.5, 1e10, f32::MAX] {
            assert_eq!(exp(above), f32::INFINITY, "{above}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        for nan in [0x7fc0_0000, 0x7f80_0001, 0x7fff_ffff, 0xffc0_0000, 0xffff_ffff].map(f32::from_bits) {
            assert!(exp(nan).is_nan(), "{:x}", nan.to_bits());
        }
    }

    #[test]
    fn erfc_is_close_everywhere_and_keeps_special_values() {
        // Exact values to 8 digits.
        for (x, exact) in [
            (-3.0, 1.999_977_909_503_001_4),
            (-0.5, 1.520_499_877_813_046_5),
            (0.0, 1.0),
            (0.25, 0.723_673_609_831_763),
            (1.0, 0.157_299_207_050_285_13),
            (2.0, 4.677_734_981_047_266e-3),
            (5.0, 1.537_459_794_428_035e-12),
            (8.0, 1.122_429_717_298_292_8e-29),
        ] {
            let ours = f64::from(erfc(x));
            assert!(
                (ours / exact - 1.0).abs() < 1e-6 * f64::from(1.0 + x.abs()),
                "erfc({x}) = {ours}, exactly {exact}"
            );
        }
        assert_eq!((erfc(f32::INFINITY), erfc(f32::NEG_INFINITY), erfc(1e30)), (0.0, 2.0, 0.0));
        assert!(erfc(f32::NAN).is_nan());
    }

    #[test]
    fn reductions() {
        let values: Vec<f32> = (0..101).map(|i| (i as f32 * 0.7).sin()).collect();
        let exact: f64 = values.iter().map(|&x| f64::from(x)).sum();
        assert!((f64::from(sum_of(&values, |x| x)) - exact).abs() < 1e-5);
        assert!(
            (sum_of2(&values, &values, |x, y| x * y) - values.iter().map(|x| x * x).sum::<f32>()).abs()
                < 1e-5
        );
        let exact = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        assert_eq!((max(&values), largest(&values)), (exact, exact));
        for at in [50, 99] {
            let mut with_nan = values.clone();
            with_nan[at] = f32::NAN;
            assert!(max(&with_nan).is_nan());
            assert!((largest(&with_nan) - exact).abs() < 0.01);
        }
        assert_eq!(largest(&[]), f32::NEG_INFINITY);
    }
}
