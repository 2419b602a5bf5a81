//! Choice of the next token from logits, as transformers 5.24 defines it
//! (`generation/logits_process.py`).
//!
//! The order is that of `GenerationMixin._get_logits_processor` in transformers'
//! `generation/utils.py`: repetition penalty, temperature, top-k, top-p, min-p. A greedy choice
//! applies only the repetition penalty.

use candle_core::{D, Device, Tensor};
use rand::distr::Distribution;
use rand::distr::weighted::WeightedIndex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::error::{Error, ErrorCategory, Result};
use crate::runtime::rng::splitmix64;

/// Temperatures below this value choose the likeliest token.
const GREEDY_BELOW: f64 = 1e-7;

/// A source of next tokens for [`Engine::generate`](super::Engine::generate).
pub trait NextToken {
    /// Chooses a token from `logits`, one for each token of the vocabulary; `context` has the
    /// tokens so far.
    ///
    /// # Errors
    /// The logits are not finite numbers.
    fn choose(&mut self, logits: Vec<f32>, context: &[u32]) -> Result<u32>;
}

/// The settings of a choice; the default is greedy.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingOptions {
    /// The divisor of the logits, at least 0; 0 chooses the likeliest token.
    pub temperature: f64,
    /// Keep the N largest logits, and those equal to the smallest of them.
    pub top_k: Option<usize>,
    /// Keep the likeliest tokens that together have this probability, above 0 and at most 1.
    pub top_p: f64,
    /// Keep tokens of at least this share of the likeliest token's probability, 0 to 1.
    pub min_p: f64,
    /// The divisor of positive logits of tokens in the context, and the factor of negative ones;
    /// above 0.
    pub repetition_penalty: f64,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        SamplingOptions { temperature: 0.0, top_k: None, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 }
    }
}

impl SamplingOptions {
    /// Returns whether the sampler always chooses the likeliest token.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_BELOW
    }

    /// Applies the repetition penalty to the logits of the tokens in `context`, each once
    /// (`RepetitionPenaltyLogitsProcessor`).
    fn penalize(&self, logits: &mut [f32], context: &[u32]) {
        let penalty = self.repetition_penalty as f32;
        if penalty == 1.0 {
            return;
        }
        let mut seen = vec![false; logits.len()];
        for &id in context {
            let at = id as usize;
            // An embedding may have more rows than the output layer.
            if at < logits.len() && !std::mem::replace(&mut seen[at], true) {
                let logit = logits[at];
                let penalized = if logit < 0.0 { logit * penalty } else { logit / penalty };
                logits[at] = penalized.min(f32::MAX);
            }
        }
    }

    /// Sets the logits below the `top_k`-th largest to minus infinity (`TopKLogitsWarper`).
    fn keep_top_k(&self, logits: &mut [f32]) {
        let Some(k) = self.top_k.filter(|k| (1..logits.len()).contains(k)) else { return };
        let mut sorted = logits.to_vec();
        let (_, smallest, _) = sorted.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
        let smallest = *smallest;
        logits.iter_mut().filter(|logit| **logit < smallest).for_each(|logit| *logit = f32::NEG_INFINITY);
    }

    /// Sets the probabilities that top-p and min-p leave out to 0 (`TopPLogitsWarper`,
    /// `MinPLogitsWarper`).
    fn truncate(&self, probabilities: &mut [f32]) {
        if self.top_p < 1.0 {
            // The smallest accepted values of top-p are 0 in f32, which would keep no token.
            let top_p = self.top_p.max(f64::from(f32::MIN_POSITIVE)) as f32;
            let mut order: Vec<usize> = (0..probabilities.len()).collect();
            order.sort_by(|&a, &b| probabilities[b].total_cmp(&probabilities[a]));
            let mut sum = 0.0;
            for at in order {
                if sum >= top_p {
                    probabilities[at] = 0.0;
                } else {
                    sum += probabilities[at];
                }
            }
        }
        if self.min_p > 0.0 {
            let largest = probabilities.iter().copied().fold(0.0, f32::max);
            let least = self.min_p as f32 * largest;
            probabilities.iter_mut().filter(|share| **share < least).for_each(|share| *share = 0.0);
        }
    }
}

/// A sampler by [`SamplingOptions`], with the random numbers of one answer.
///
/// Equal options, seeds and logits choose equal tokens on every rank.
pub struct TokenSampler {
    options: SamplingOptions,
    random: StdRng,
}

impl TokenSampler {
    /// Creates a sampler whose random numbers depend only on `seed`.
    pub fn new(options: SamplingOptions, seed: u64) -> Self {
        TokenSampler { options, random: StdRng::seed_from_u64(seed) }
    }

    /// Creates a sampler that chooses the likeliest token.
    pub fn greedy() -> Self {
        Self::new(SamplingOptions::default(), 0)
    }

    /// Creates the sampler of answer `sample`, counted from 0. Its random numbers depend only on
    /// `seed` and `sample`: the first answer equals that of [`TokenSampler::new`].
    pub fn of_sample(options: SamplingOptions, seed: u64, sample: usize) -> Self {
        let seed = if sample == 0 { seed } else { splitmix64(splitmix64(seed).wrapping_add(sample as u64)) };
        Self::new(options, seed)
    }
}

impl NextToken for TokenSampler {
    fn choose(&mut self, mut logits: Vec<f32>, context: &[u32]) -> Result<u32> {
        check_finite(&logits)?;
        let options = &self.options;
        options.penalize(&mut logits, context);
        if options.is_greedy() {
            return Ok(Tensor::new(logits, &Device::Cpu)?.argmax(D::Minus1)?.to_scalar()?);
        }
        options.keep_top_k(&mut logits);
        let logits = (Tensor::new(logits, &Device::Cpu)? / options.temperature)?;
        let mut shares = candle_nn::ops::softmax_last_dim(&logits)?.to_vec1()?;
        options.truncate(&mut shares);
        draw(&shares, &mut self.random)
    }
}

/// Draws an index with a probability proportional to its weight.
fn draw(weights: &[f32], random: &mut impl Rng) -> Result<u32> {
    let weighted = WeightedIndex::new(weights)
        .map_err(|error| Error::internal(format!("the probabilities of the tokens: {error}")))?;
    Ok(weighted.sample(random) as u32)
}

fn check_finite(logits: &[f32]) -> Result<()> {
    if logits.iter().any(|&logit| logit.is_nan() || logit == f32::INFINITY) {
        return Err(Error::new(ErrorCategory::Diverged, "the model's logits are NaN or infinite")
            .hint(
                "a weight is NaN, infinite or too large for its dtype: download the model again, or train it again",
            ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 6] = [2.0, 1.5, 1.5, 0.5, -1.0, -3.0];
    const CONTEXT: [u32; 5] = [0, 4, 4, 0, 9];

    /// Returns the probabilities that `options` leave, normalized.
    fn probabilities(options: &SamplingOptions) -> Vec<f32> {
        let mut logits = LOGITS.to_vec();
        options.penalize(&mut logits, &CONTEXT);
        options.keep_top_k(&mut logits);
        let temperature = options.temperature;
        let largest = logits.iter().copied().fold(f32::MIN, f32::max);
        let powers: Vec<f64> =
            logits.iter().map(|&logit| (f64::from(logit - largest) / temperature).exp()).collect();
        let sum: f64 = powers.iter().sum();
        let mut shares: Vec<f32> = powers.iter().map(|power| (power / sum) as f32).collect();
        options.truncate(&mut shares);
        let kept: f32 = shares.iter().sum();
        shares.iter().map(|share| share / kept).collect()
    }

    /// The expected numbers come from this numpy script, which follows `logits_process.py` of
    /// transformers 5.24 in its order:
    ///
    /// ```text
    /// x = logits; x[ids] = where(x[ids] < 0, x[ids] * penalty, x[ids] / penalty)
    /// # above: ids is the set of the context
    /// x = x / temperature
    /// x = where(x < sort(x)[-top_k], -inf, x)
    /// o = argsort(x); drop = cumsum(softmax(x[o])) <= 1 - top_p
    /// drop[-1] = False; x[o[drop]] = -inf
    /// s = softmax(x); x = where(s < min_p * max(s), -inf, x)
    /// softmax(x)
    /// ```
    #[test]
    fn probabilities_are_those_of_transformers() {
        // Temperature, top-p, min-p, repetition penalty; top-k with 0 for none; the probabilities.
        let cases: [([f64; 4], usize, [f32; 6]); 15] = [
            ([1.0, 1.0, 0.0, 1.0], 0, [0.401169, 0.243321, 0.243321, 0.089513, 0.019973, 0.002703]),
            ([0.5, 1.0, 0.0, 1.0], 0, [0.559262, 0.205741, 0.205741, 0.027844, 0.001386, 0.000025]),
            ([1.0, 1.0, 0.0, 1.7], 0, [0.230198, 0.318133, 0.318133, 0.117035, 0.012968, 0.003534]),
            ([1.0, 1.0, 0.0, 0.5], 0, [0.828921, 0.068042, 0.068042, 0.025031, 0.009208, 0.000756]),
            ([1.0, 1.0, 0.0, 1.0], 2, [0.451863, 0.274069, 0.274069, 0.000000, 0.000000, 0.000000]),
            ([2.0, 1.0, 0.0, 1.0], 3, [0.390991, 0.304504, 0.304504, 0.000000, 0.000000, 0.000000]),
            ([1.0, 0.3, 0.0, 1.0], 0, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
            ([1.0, 0.7, 0.0, 1.0], 0, [0.451863, 0.274069, 0.274069, 0.000000, 0.000000, 0.000000]),
            ([1.5, 0.85, 0.0, 1.0], 0, [0.357023, 0.255818, 0.255818, 0.131341, 0.000000, 0.000000]),
            ([1.0, 1.0, 0.5, 1.0], 0, [0.451863, 0.274069, 0.274069, 0.000000, 0.000000, 0.000000]),
            ([0.5, 1.0, 0.7, 1.0], 0, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
            ([1.0, 0.9, 0.0, 1.0], 4, [0.451863, 0.274069, 0.274069, 0.000000, 0.000000, 0.000000]),
            ([1.0, 0.65, 0.3, 1.0], 0, [0.451863, 0.274069, 0.274069, 0.000000, 0.000000, 0.000000]),
            ([0.8, 0.95, 0.3, 1.3], 4, [0.344101, 0.327949, 0.327949, 0.000000, 0.000000, 0.000000]),
            ([1.7, 0.99, 0.6, 0.8], 5, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        ];
        for ([temperature, top_p, min_p, repetition_penalty], top_k, wanted) in cases {
            let top_k = (top_k > 0).then_some(top_k);
            let options = SamplingOptions { temperature, top_k, top_p, min_p, repetition_penalty };
            let found = probabilities(&options);
            for (found, wanted) in found.iter().zip(wanted) {
                assert!((found - wanted).abs() < 2e-6, "{options:?}: {found} for {wanted}");
                assert_eq!(*found == 0.0, wanted == 0.0, "{options:?}");
            }
        }
    }

    #[test]
    fn top_k_beyond_the_vocabulary_keeps_all_and_one_chooses_the_likeliest() -> Result<()> {
        let all = SamplingOptions { temperature: 1.0, ..SamplingOptions::default() };
        let many = SamplingOptions { top_k: Some(1000), ..all.clone() };
        assert_eq!(probabilities(&many), probabilities(&all));
        let one = SamplingOptions { top_k: Some(1), temperature: 5.0, ..all };
        let mut sampler = TokenSampler::new(one, 3);
        for _ in 0..100 {
            assert_eq!(sampler.choose(LOGITS.to_vec(), &[])?, 0);
        }
        Ok(())
    }

    /// The sampler draws from the probabilities above, not from others.
    #[test]
    fn a_sampler_draws_by_all_of_its_options() -> Result<()> {
        let options = SamplingOptions {
            temperature: 0.8,
            top_k: Some(4),
            top_p: 0.95,
            min_p: 0.3,
            repetition_penalty: 1.3,
        };
        let wanted = probabilities(&options);
        assert!(wanted.iter().filter(|share| **share == 0.0).count() >= 3, "{wanted:?}");
        let (mut sampler, mut counts) = (TokenSampler::new(options, 5), [0usize; 6]);
        for _ in 0..20_000 {
            counts[sampler.choose(LOGITS.to_vec(), &CONTEXT)? as usize] += 1;
        }
        for (count, share) in counts.iter().zip(wanted) {
            assert!((*count as f32 / 20_000.0 - share).abs() < 0.015, "{counts:?}");
            assert!(share > 0.0 || *count == 0, "{counts:?}");
        }
        Ok(())
    }

    #[test]
    fn a_repetition_penalty_changes_a_greedy_choice() -> Result<()> {
        let mut plain = TokenSampler::new(SamplingOptions::default(), 0);
        assert_eq!(plain.choose(LOGITS.to_vec(), &CONTEXT)?, 0);
        let penalized = SamplingOptions { repetition_penalty: 2.0, ..SamplingOptions::default() };
        assert_eq!(TokenSampler::new(penalized.clone(), 0).choose(LOGITS.to_vec(), &CONTEXT)?, 1);
        // A logit that overflows must not be an infinity, which would make all probabilities NaN.
        let tiny = SamplingOptions { repetition_penalty: 1e-38, temperature: 1.0, ..penalized };
        assert_eq!(TokenSampler::new(tiny, 0).choose(vec![1e5, 1.0], &[0])?, 0);
        Ok(())
    }

    /// These are the tokens of candle-transformers' `LogitsProcessor`, which chose them in earlier
    /// versions: users have recorded seeds.
    #[test]
    fn temperature_and_top_p_choose_as_candles_sampler() -> Result<()> {
        let cases = [
            (0.0, 1.0, "000000000000000000000000000000000000000000000000"),
            (1e-8, 0.5, "000000000000000000000000000000000000000000000000"),
            (0.7, 1.0, "001222100012031202120022200312120112020020220013"),
            (1.3, 0.6, "000111100001010101010011100101110111010010110011"),
            (1.0, 1e-60, "000000000000000000000000000000000000000000000000"),
        ];
        for (temperature, top_p, wanted) in cases {
            let options = SamplingOptions { temperature, top_p, ..SamplingOptions::default() };
            let mut sampler = TokenSampler::of_sample(options, 11, 0);
            for wanted in wanted.chars() {
                assert_eq!(Some(sampler.choose(LOGITS.to_vec(), &CONTEXT)?), wanted.to_digit(10));
            }
        }
        Ok(())
    }

    #[test]
    fn each_sample_has_random_numbers_of_its_own() -> Result<()> {
        let options = SamplingOptions { temperature: 2.0, ..SamplingOptions::default() };
        let drawn = |seed, sample| -> Result<Vec<u32>> {
            let mut sampler = TokenSampler::of_sample(options.clone(), seed, sample);
            (0..64).map(|_| sampler.choose(LOGITS.to_vec(), &[])).collect()
        };
        assert_eq!(drawn(3, 1)?, drawn(3, 1)?);
        let all = [drawn(3, 0)?, drawn(3, 1)?, drawn(3, 2)?, drawn(4, 0)?, drawn(4, 1)?];
        for (at, one) in all.iter().enumerate() {
            assert!(!all[..at].contains(one), "sample {at} is another's");
        }
        Ok(())
    }
}
