//! Generation with a key/value cache: the prompt in one pass, then one token at a time. Where the sequence's length
//! changes the rotary frequencies (dynamic, longrope), the cached keys are of another rotation: all tokens pass again.

use candle_core::Tensor;

use super::Engine;
use crate::error::{Error, ErrorCategory, Result};
use crate::model::{self, AdapterSwitch, BlockCache, BlockContext};
use crate::ops::attention::Span;
use crate::runtime::rng::RngStream;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0: the most likely token, always. Otherwise logits are divided by it.
    pub temperature: f64,
    /// Only the most likely tokens that together reach this probability take part; 1: all.
    pub top_p: f64,
    /// Seeds the choice.
    pub seed: u64,
}

impl Engine {
    /// Continues `prompt` by at most `max_new_tokens`; ends before a token of `stop`. Each token is handed to `emit`
    /// as it is made; `emit` ends the generation by returning false.
    pub fn generate(
        &self,
        prompt: &[u32],
        max_new_tokens: usize,
        sampling: Sampling,
        stop: &[u32],
        emit: &mut dyn FnMut(u32) -> Result<bool>,
    ) -> Result<Vec<u32>> {
        if prompt.is_empty() {
            return Err(
                Error::user("cannot generate from an empty prompt").hint("give a text with `--prompt`")
            );
        }
        let dtype = self.store.embed()?.dtype;
        let capacity = prompt.len() + max_new_tokens;
        let empty = || -> Result<Vec<BlockCache>> {
            (0..self.config.num_layers())
                .map(|_| BlockCache::new(&self.config, capacity, dtype, &self.device))
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
            let token = choose(&logits, sampling, made.len() as u64)?;
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

    /// Logits after `ids`, which follow the `past` tokens in the caches.
    fn next_logits(&self, ids: &[u32], past: usize, caches: &mut [BlockCache]) -> Result<Vec<f32>> {
        let spans = [Span { q_start: 0, q_len: ids.len(), k_start: 0, k_len: past + ids.len() }];
        let tables = self
            .config
            .ropes
            .iter()
            .map(|rope| rope.table(&spans, &self.device))
            .collect::<Result<Vec<_>>>()?;
        let adapter = AdapterSwitch::On;
        let context = BlockContext {
            spans: &spans,
            tables: &tables,
            attention: self.attention,
            adapter,
            dropout: None,
        };
        let mut x = self.store.embed()?.forward(&self.config, ids, adapter)?;
        for (layer, cache) in caches.iter_mut().enumerate() {
            let weights = self.store.block(layer, self.after(layer))?;
            (x, _) = model::forward(&self.config, layer, &weights, &x, &context, Some(cache))?;
        }
        let last: Tensor = x.narrow(0, ids.len() - 1, 1)?.contiguous()?;
        Ok(self.store.head()?.logits(&self.config, &last, adapter)?.flatten_all()?.to_vec1::<f32>()?)
    }
}

fn choose(logits: &[f32], sampling: Sampling, index: u64) -> Result<u32> {
    if logits.iter().any(|l| l.is_nan()) {
        return Err(Error::new(ErrorCategory::Diverged, "the model's logits are not numbers")
            .hint("check the weights with `finetune inspect`"));
    }
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if sampling.temperature <= 0.0 {
        return Ok(order.into_iter().min_by(by_logit).unwrap_or(0));
    }
    order.sort_unstable_by(by_logit);
    let max = f64::from(logits[order[0] as usize]);
    let weight = |&id: &u32| ((f64::from(logits[id as usize]) - max) / sampling.temperature).exp();
    let total: f64 = order.iter().map(weight).sum();
    let mut kept = 0.0;
    let nucleus = order.iter().position(|id| {
        kept += weight(id) / total;
        kept >= sampling.top_p
    });
    order.truncate(nucleus.map_or(order.len(), |last| last + 1));
    let mass: f64 = order.iter().map(weight).sum();
    let mut at = f64::from(RngStream::new(sampling.seed).named("generate").uniform(index)) * mass;
    for id in &order {
        at -= weight(id);
        if at < 0.0 {
            return Ok(*id);
        }
    }
    Ok(order[order.len() - 1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices() -> Result<()> {
        let logits = [0.0, 2.0, 1.0, 2.0];
        let greedy = Sampling { temperature: 0.0, top_p: 1.0, seed: 0 };
        assert_eq!(choose(&logits, greedy, 0)?, 1);
        let warm = Sampling { temperature: 1.0, top_p: 1.0, seed: 3 };
        let mut counts = [0usize; 4];
        for i in 0..20_000 {
            counts[choose(&logits, warm, i)? as usize] += 1;
        }
        let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        for (count, logit) in counts.iter().zip(logits) {
            assert!((*count as f64 / 20_000.0 - f64::from(logit).exp() / total).abs() < 0.015, "{counts:?}");
        }
        let narrow = Sampling { top_p: 0.5, ..warm };
        assert!((0..1000).all(|i| matches!(choose(&logits, narrow, i), Ok(1 | 3))));
        assert!(choose(&[0.0, f32::NAN], warm, 0).is_err());
        Ok(())
    }
}
