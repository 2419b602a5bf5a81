//! Stochastic rounding of parameters that are stored only in bf16: an update computes in f32 and
//! rounds the result at random, up or down with the probability that makes the expected value exact
//! (arXiv 2010.06192). With rounding to nearest, every update smaller than half the distance
//! between two bf16 numbers would be lost.
//!
//! The random bits are a hash of (stream, index of the value in its bucket), as in dropout: the
//! same for any partition of the parameters over ranks and tasks.

use half::bf16;

use crate::rounding::Rounded;
use crate::runtime::rng::RngStream;

/// Values that are widened, updated and rounded at a time.
pub(super) const RUN: usize = 256;

/// Values that share one hash, 16 bits each.
const PER_HASH: usize = 4;

/// The source of the random bits of a range of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StochasticRounding {
    /// Random stream, named by (seed, step, bucket).
    pub stream: RngStream,
    /// The index of the first value in its bucket, a multiple of 4.
    pub first: u64,
}

impl StochasticRounding {
    /// Returns the source for values that begin at index `first` of a bucket.
    pub fn new(stream: RngStream, first: u64) -> Self {
        debug_assert!(first.is_multiple_of(PER_HASH as u64), "random bits from place {first}");
        StochasticRounding { stream, first }
    }

    /// Returns the source for the values from the `start`th on; `start` is a multiple of 4.
    #[must_use]
    pub fn offset(self, start: usize) -> Self {
        Self::new(self.stream, self.first + start as u64)
    }

    /// Returns the random bits of the first `len` values, at most [`RUN`].
    #[inline(always)]
    pub(super) fn noise(self, len: usize) -> Noise {
        let mut noise: Noise = [[0; PER_HASH]; RUN / PER_HASH];
        for (noise, index) in noise[..len.div_ceil(PER_HASH)].iter_mut().zip(self.first / PER_HASH as u64..) {
            let bits = self.stream.bits(index);
            *noise = [bits as u16, (bits >> 16) as u16, (bits >> 32) as u16, (bits >> 48) as u16];
        }
        noise
    }
}

/// Random bits for each value of a run.
pub(super) type Noise = [[u16; PER_HASH]; RUN / PER_HASH];

/// Rounds a value: the bits below bf16's carry if they and the random bits sum to one bf16 unit. A
/// value that is not finite is rounded to nearest.
#[inline(always)]
pub(super) fn round(value: f32, noise: u16) -> bf16 {
    let bits = value.to_bits();
    let rounded = bf16::from_bits((bits.wrapping_add(u32::from(noise)) >> 16) as u16);
    if value.is_finite() { rounded } else { bf16::nearest(value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded(values: &[f32], rounding: StochasticRounding) -> Vec<bf16> {
        let noise = rounding.noise(values.len());
        values.iter().zip(noise.as_flattened()).map(|(value, noise)| round(*value, *noise)).collect()
    }

    fn rounding(first: u64) -> StochasticRounding {
        StochasticRounding::new(RngStream::new(3).named("test"), first)
    }

    #[test]
    fn the_mean_is_the_value() {
        for value in [1.0f32, 1.001, -1.003_9, 3.2e-20, 1.5e-39, -0.0] {
            let (mut sum, mut count) = (0f64, 0u32);
            let unit = (f64::from(value.abs()) / 64.0).max(1e-40);
            for i in 0..400 {
                for got in rounded(&[value; RUN], rounding(i * RUN as u64)) {
                    let got = f64::from(got.to_f32());
                    assert!((got - f64::from(value)).abs() <= unit, "{got} for {value}");
                    sum += got;
                    count += 1;
                }
            }
            let error = (sum / f64::from(count) - f64::from(value)).abs();
            assert!(error <= unit / 64.0, "{value}: off by {error:e}");
        }
    }

    #[test]
    fn numbers_of_bf16_and_what_is_not_finite_stay() {
        let values = [1.0f32, -3.5, 0.0, f32::INFINITY, f32::NEG_INFINITY, 65_280.0];
        for first in (0..4000).step_by(4) {
            let got: Vec<f32> = rounded(&values, rounding(first)).iter().map(|x| x.to_f32()).collect();
            assert_eq!(got, values);
        }
        assert!(rounded(&[f32::NAN], rounding(0))[0].is_nan());
        // A NaN whose payload is in the truncated bits.
        assert!(rounded(&[f32::from_bits(0x7f80_0001)], rounding(0))[0].is_nan());
    }

    #[test]
    fn bits_belong_to_the_place_of_a_value() {
        let values: Vec<f32> = (0..RUN).map(|i| (i as f32).sin()).collect();
        let whole = rounded(&values, rounding(1024));
        let rest = rounded(&values[60..200], rounding(1024).offset(60));
        assert_eq!(rest, whole[60..200]);
        assert_ne!(rounded(&values, rounding(2048)), whole);
    }
}
