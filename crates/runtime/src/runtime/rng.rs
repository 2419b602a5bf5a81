//! Counter-based random numbers: each is a hash of (key, index), so any part of a stream can be
//! generated anywhere, in any order, and again. Dropout, initial weights, sampling and shuffling
//! use it.
//!
//! The hash is SplitMix64's finalizer (Steele, Lea & Flood 2014, doi:10.1145/2660193.2660195) with
//! a third round, which suffices as a keyed mixer for these uses; it is no cipher.

use std::ops::Range;

use rayon::prelude::*;

/// A stream of random numbers for one purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RngStream(u64);

impl RngStream {
    /// State of the stream, for kernels that draw from it.
    pub fn state(self) -> u64 {
        self.0
    }

    /// The stream of a run's seed.
    pub fn new(seed: u64) -> Self {
        RngStream(mix(seed ^ 0x5851_f42d_4c95_7f2d))
    }

    /// A sub-stream; different `part`s are independent.
    #[must_use]
    pub fn part(self, part: u64) -> Self {
        RngStream(mix(self.0.wrapping_add(mix(part.wrapping_add(GOLDEN_GAMMA)))))
    }

    /// A sub-stream with a text as its name, such as a parameter's name.
    #[must_use]
    pub fn named(self, name: &str) -> Self {
        // FNV-1a is stable over versions and platforms; std's hasher is not.
        let hash = name
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        self.part(hash)
    }

    /// 64 random bits at `index`.
    #[inline(always)]
    pub fn bits(self, index: u64) -> u64 {
        mix(self.0 ^ index.wrapping_mul(GOLDEN_GAMMA))
    }

    /// Uniform in [0, 1) at `index`, 24 bits.
    #[inline(always)]
    pub fn uniform(self, index: u64) -> f32 {
        (self.bits(index) >> 40) as f32 * (1.0 / (1 << 24) as f32)
    }

    /// Standard normal at `index` (Box–Muller).
    pub fn normal(self, index: u64) -> f32 {
        let bits = self.bits(index);
        let u = ((bits >> 32) as f64 + 1.0) / 4_294_967_297.0;
        let v = (bits & 0xffff_ffff) as f64 / 4_294_967_296.0;
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }
}

impl RngStream {
    /// [`RngStream::normal`] at `indices`, each times `std`, on all threads.
    pub fn normals(self, indices: Range<u64>, std: f32) -> Vec<f32> {
        indices.into_par_iter().map(|index| std * self.normal(index)).collect()
    }
}

/// Increment of SplitMix64's state.
pub const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's finalizer: the output for a state.
#[inline(always)]
pub fn splitmix64(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// SplitMix64's finalizer with a third round.
#[inline(always)]
fn mix(z: u64) -> u64 {
    let z = splitmix64(z).wrapping_mul(0xd6e8_feb8_6659_fd93);
    z ^ (z >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_and_independence() {
        let n = 200_000;
        let stream = RngStream::new(7).named("w");
        let other = RngStream::new(7).named("v");
        let (mut mean, mut square, mut cross) = (0f64, 0f64, 0f64);
        for i in 0..n {
            let (x, y) = (f64::from(stream.normal(i)), f64::from(other.normal(i)));
            mean += x;
            square += x * x;
            cross += x * y;
        }
        let n = n as f64;
        assert!((mean / n).abs() < 0.01 && (square / n - 1.0).abs() < 0.01 && (cross / n).abs() < 0.01);
        let uniform: f64 = (0..100_000).map(|i| f64::from(stream.uniform(i))).sum::<f64>() / 1e5;
        assert!((uniform - 0.5).abs() < 0.005);
        assert_eq!(stream.bits(3), RngStream::new(7).named("w").bits(3));
    }
}
