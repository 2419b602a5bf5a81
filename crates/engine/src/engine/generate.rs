//! Generation with a key/value cache: the prompt in one pass, then one token at a time. If the
//! sequence's length changes the rotary frequencies (dynamic, longrope), the cached keys have
//! another rotation, and all tokens pass again.

use candle_core::{DType, Device, Tensor};

use super::Engine;
use super::sampling::NextToken;
use crate::error::{Error, Result};
use crate::model::{self, AdapterSwitch, BlockCache};
use crate::ops::attention::Span;
use crate::runtime::copy::to_host_vec;
use crate::runtime::device::free_bytes;
use crate::runtime::machine::host_memory;
use crate::units;

impl Engine {
    /// Continues `prompt` by at most `max_new_tokens` tokens that `sampler` chooses; ends before a
    /// token of `stop`. It passes each new token to `emit`, which ends the generation by returning
    /// false.
    ///
    /// A sampler has its own generator, seeded at its creation: equal seeds choose equal tokens on
    /// every rank.
    ///
    /// # Errors
    /// The prompt is empty, the memory does not suffice for the cache, the logits are not finite
    /// numbers, or `emit` fails.
    pub fn generate(
        &self,
        prompt: &[u32],
        max_new_tokens: usize,
        sampler: &mut impl NextToken,
        stop: &[u32],
        emit: &mut dyn FnMut(u32) -> Result<bool>,
    ) -> Result<Vec<u32>> {
        if prompt.is_empty() {
            return Err(
                Error::user("cannot generate from an empty prompt").hint("give a text with `--prompt`")
            );
        }
        let dtype = self.store.embed()?.dtype;
        let capacity = prompt.len().saturating_add(max_new_tokens);
        self.check_cache(capacity, dtype)?;
        let empty = || -> Result<Vec<BlockCache>> {
            (0..self.config.num_layers())
                .map(|layer| BlockCache::new(&self.config, layer, capacity, dtype, &self.device))
                .collect()
        };
        let mut caches = empty()?;
        let mut made = Vec::new();
        let mut all = prompt.to_vec();
        let mut past = 0;
        while made.len() < max_new_tokens {
            if past > 0 && self.config.ropes.iter().any(|rope| rope.differs(past, all.len())) {
                (caches, past) = (empty()?, 0);
            }
            let logits = self.next_logits(&all[past..], past, &mut caches)?;
            past = all.len();
            let token = sampler.choose(logits, &all)?;
            if stop.contains(&token) {
                break;
            }
            made.push(token);
            if !emit(token)? {
                break;
            }
            all.push(token);
        }
        Ok(made)
    }

    /// Checks that the memory suffices for the caches of `capacity` tokens.
    fn check_cache(&self, capacity: usize, dtype: DType) -> Result<()> {
        let caches = (0..self.config.num_layers())
            .map(|layer| BlockCache::bytes(&self.config, layer, capacity, dtype));
        let needed = caches.fold(0, u64::saturating_add);
        let available = match self.device {
            Device::Cpu => host_memory().map(|memory| memory.limit),
            _ => free_bytes(&self.device),
        };
        // If the available memory is unknown, the address space is the limit.
        let available = available.unwrap_or(isize::MAX as u64);
        if needed <= available {
            return Ok(());
        }
        Err(Error::user(format!("cannot keep the keys, values and states of {capacity} tokens"))
            .because(format!("they need {}; {} available", units::bytes(needed), units::bytes(available)))
            .hint("give a smaller `--max-new-tokens`"))
    }

    /// Returns the logits after `ids`, which follow the `past` tokens in the caches.
    fn next_logits(&self, ids: &[u32], past: usize, caches: &mut [BlockCache]) -> Result<Vec<f32>> {
        let span = Span { q_start: 0, q_len: ids.len(), k_start: 0, k_len: past + ids.len() };
        let layout = self.layout_of(vec![span])?;
        let context = self.evaluation_context(&layout, AdapterSwitch::On);
        let (mut x, mut carried) = self.store.embed()?.forward(&self.config, ids, context.adapter)?;
        for (layer, cache) in caches.iter_mut().enumerate() {
            let weights = self.store.block(layer, self.after(layer))?;
            (x, _) = model::forward(&self.config, layer, &weights, &x, &context, &mut carried, Some(cache))?;
        }
        let last: Tensor = x.narrow(0, ids.len() - 1, 1)?.contiguous()?;
        let logits = self.store.head()?.logits(&self.config, &last, context.adapter)?;
        to_host_vec(&logits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{SamplingOptions, TokenSampler};

    const LOGITS: [f32; 4] = [0.0, 2.0, 1.0, 2.0];

    /// Returns a sampler of temperature 1.
    fn warm(seed: u64, top_p: f64) -> TokenSampler {
        TokenSampler::new(SamplingOptions { temperature: 1.0, top_p, ..SamplingOptions::default() }, seed)
    }

    /// Returns `count` tokens chosen from [`LOGITS`].
    fn chosen(mut sampler: TokenSampler, count: usize) -> Result<Vec<u32>> {
        (0..count).map(|_| sampler.choose(LOGITS.to_vec(), &[])).collect()
    }

    #[test]
    fn the_lowest_of_the_likeliest_tokens_is_the_greedy_choice() -> Result<()> {
        assert_eq!(chosen(TokenSampler::greedy(), 3)?, [1; 3]);
        Ok(())
    }

    #[test]
    fn tokens_are_as_frequent_as_their_probabilities() -> Result<()> {
        let mut counts = [0usize; 4];
        for token in chosen(warm(3, 1.0), 20_000)? {
            counts[token as usize] += 1;
        }
        let total: f64 = LOGITS.iter().map(|&l| f64::from(l).exp()).sum();
        for (count, logit) in counts.iter().zip(LOGITS) {
            assert!((*count as f64 / 20_000.0 - f64::from(logit).exp() / total).abs() < 0.015, "{counts:?}");
        }
        let narrow = chosen(warm(3, 0.5), 1000)?;
        assert!(narrow.iter().all(|token| matches!(token, 1 | 3)), "{narrow:?}");
        Ok(())
    }

    #[test]
    fn equal_seeds_choose_equal_tokens() -> Result<()> {
        let warm = |seed| chosen(warm(seed, 1.0), 64);
        assert_eq!(warm(7)?, warm(7)?);
        assert_ne!(warm(7)?, warm(8)?);
        Ok(())
    }

    #[test]
    fn logits_that_are_not_numbers_are_refused() {
        for broken in [f32::NAN, f32::INFINITY] {
            for mut sampler in [TokenSampler::greedy(), warm(0, 1.0)] {
                assert!(sampler.choose(vec![0.0, broken], &[]).is_err());
            }
        }
    }
}
