//! Divergence between two models that should compute the same: the evidence for a merge's
//! certificate; and the share of an adapter's change of the logits that a merged model has.

use candle_core::Tensor;
use rayon::prelude::*;

use super::Engine;
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::model::AdapterSwitch;
use crate::ops::cross_entropy::IGNORE;
use crate::runtime::copy::to_host_vec;

/// Number of positions whose logits of both models are in memory at once.
const ROWS: usize = 64;

/// Sums over the positions that were compared.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Comparison {
    /// Number of rows of data.
    pub rows: u64,
    /// Number of positions with a target.
    pub tokens: u64,
    /// Σ KL(first ‖ second) of the next token's distributions, in nats.
    pub kl_sum: f64,
    /// The largest KL divergence of one position, in nats.
    pub max_kl: f64,
    /// Number of positions at which both models have the same likeliest token.
    pub agreed: u64,
    /// Σ ⟨second − base, first − base⟩ of logits, each minus the mean over the vocabulary; 0
    /// without a base.
    pub effect_kept: f64,
    /// Σ ⟨first − base, first − base⟩ of the same; 0 without a base.
    pub effect: f64,
}

impl Comparison {
    /// Mean divergence per position, in nats.
    pub fn mean_kl(&self) -> f64 {
        self.kl_sum / self.tokens.max(1) as f64
    }

    /// Share of positions with the same likeliest token, 0 to 1.
    pub fn top1_agreement(&self) -> f64 {
        self.agreed as f64 / self.tokens.max(1) as f64
    }

    /// Share of the first model's distance from the base that the second one has, 1 if both are the
    /// same: the factor with which the change of the first best explains that of the second. `None`
    /// without a base, or if the first model is the base.
    pub fn kept_share(&self) -> Option<f64> {
        (self.effect > 0.0).then(|| self.effect_kept / self.effect)
    }
}

/// A model to compare: an engine, with or without its adapter.
#[derive(Clone, Copy)]
struct Compared<'a> {
    engine: &'a Engine,
    adapter: AdapterSwitch,
}

impl Engine {
    /// Compares the next-token distributions of this model with those of `other` at every target of
    /// `batches`.
    ///
    /// # Errors
    /// No row has a target, or a divergence is not finite: one of the models has broken weights.
    pub fn compare(&self, other: &Engine, batches: impl Iterator<Item = Batch>) -> Result<Comparison> {
        let [first, second] = [self, other].map(|engine| Compared { engine, adapter: AdapterSwitch::On });
        compare_all(&[first, second], batches)
    }

    /// Works like [`Engine::compare`], and also measures the share of this adapter's effect that
    /// `merged` has ([`Comparison::kept_share`]). The base is `base`, or this model without its
    /// adapter.
    ///
    /// # Errors
    /// The same as for [`Engine::compare`]; without `base`, the adapter replaces weights of the
    /// base.
    pub fn compare_effect(
        &self,
        merged: &Engine,
        base: Option<&Engine>,
        batches: impl Iterator<Item = Batch>,
    ) -> Result<Comparison> {
        let [first, second] = [self, merged].map(|engine| Compared { engine, adapter: AdapterSwitch::On });
        let own = Compared { engine: self, adapter: AdapterSwitch::Off };
        let base = base.map_or(own, |engine| Compared { engine, adapter: AdapterSwitch::On });
        compare_all(&[first, second, base], batches)
    }
}

/// Compares two models, and their effects over the third if it is given.
fn compare_all(models: &[Compared<'_>], batches: impl Iterator<Item = Batch>) -> Result<Comparison> {
    let mut sums = Comparison::default();
    for batch in batches {
        let hidden = models.iter().map(|model| model.engine.hidden(&batch, model.adapter));
        let hidden = hidden.collect::<Result<Vec<Tensor>>>()?;
        let counted: Vec<u32> =
            (0u32..).zip(&batch.targets).filter(|(_, target)| **target != IGNORE).map(|(n, _)| n).collect();
        for rows in counted.chunks(ROWS) {
            let logits = models.iter().zip(&hidden).map(|(model, hidden)| model.logits(hidden, rows));
            sums.add(&logits.collect::<Result<Vec<_>>>()?, rows.len())?;
        }
        sums.rows += batch.samples.len() as u64;
    }
    if sums.tokens == 0 {
        return Err(Error::user("cannot compare two models on this data")
            .because("no token of these rows is trained")
            .hint("`finetune data` shows the trained tokens of each row"));
    }
    if ![sums.kl_sum, sums.effect_kept, sums.effect].into_iter().all(f64::is_finite) {
        return Err(Error::user("cannot compare two models on this data")
            .because("their distributions hold a NaN or an infinity: one of them has broken weights"));
    }
    Ok(sums)
}

impl Compared<'_> {
    /// Returns the logits of some rows of `hidden`, row by row.
    fn logits(&self, hidden: &Tensor, rows: &[u32]) -> Result<Vec<f32>> {
        let ids = Tensor::from_slice(rows, rows.len(), hidden.device())?;
        let part = hidden.index_select(&ids, 0)?;
        let engine = self.engine;
        let logits = engine.store.head()?.logits(&engine.config, &part, self.adapter)?;
        to_host_vec(&logits)
    }
}

impl Comparison {
    /// Adds the logits of `rows` positions by each model.
    fn add(&mut self, logits: &[Vec<f32>], rows: usize) -> Result<()> {
        let [first, second, base @ ..] = logits else {
            return Err(Error::internal("fewer than two models are compared"));
        };
        if logits.iter().any(|logits| logits.len() != first.len()) {
            return Err(Error::internal("models of different vocabularies are compared"));
        }
        let vocab = first.len() / rows.max(1);
        let pairs = first.par_chunks_exact(vocab).zip(second.par_chunks_exact(vocab));
        let compared: Vec<(f64, bool)> =
            pairs.clone().map(|(p, q)| (divergence(p, q), top(p) == top(q))).collect();
        for (kl, same) in compared {
            self.tokens += 1;
            self.kl_sum += kl;
            self.max_kl = self.max_kl.max(kl);
            self.agreed += u64::from(same);
        }
        if let Some(base) = base.first() {
            let effects = pairs.zip(base.par_chunks_exact(vocab));
            let effects: Vec<[f64; 2]> = effects.map(|((p, q), base)| effects_over(base, p, q)).collect();
            for [survived, all] in effects {
                self.effect_kept += survived;
                self.effect += all;
            }
        }
        Ok(())
    }
}

/// Returns ⟨q − base, p − base⟩ and ⟨p − base, p − base⟩, each difference minus its mean: a shift
/// of all logits is no effect.
fn effects_over(base: &[f32], p: &[f32], q: &[f32]) -> [f64; 2] {
    let [mut ps, mut qs, mut products, mut squares] = [0f64; 4];
    for ((base, p), q) in base.iter().zip(p).zip(q) {
        let [p, q] = [p, q].map(|logit| f64::from(*logit) - f64::from(*base));
        (ps, qs) = (ps + p, qs + q);
        (products, squares) = (products + p * q, squares + p * p);
    }
    let count = base.len().max(1) as f64;
    [products - ps * qs / count, squares - ps * ps / count]
}

/// Returns KL(softmax(p) ‖ softmax(q)) in nats, in f64.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_sum = |logits: &[f32]| {
        let max = logits.iter().fold(f32::NEG_INFINITY, |max, &l| max.max(l));
        f64::from(max) + logits.iter().map(|&l| f64::from(l - max).exp()).sum::<f64>().ln()
    };
    let (p_sum, q_sum) = (log_sum(p), log_sum(q));
    let term = |(&p, &q): (&f32, &f32)| {
        let log_p = f64::from(p) - p_sum;
        log_p.exp() * (log_p - (f64::from(q) - q_sum))
    };
    // Rounding may give a tiny negative number if both are equal.
    p.iter().zip(q).map(term).sum::<f64>().max(0.0)
}

fn top(logits: &[f32]) -> usize {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    best.map_or(0, |(token, _)| token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_is_the_definition() {
        // p = (1/4, 3/4), q = (1/2, 1/2), each by logits with a shift that must not matter.
        let (p, q) = ([5.0f32, 5.0 + 3f32.ln()], [-2.0f32, -2.0]);
        let expected = 0.25 * 0.5f64.ln() + 0.75 * 1.5f64.ln();
        assert!((divergence(&p, &q) - expected).abs() < 1e-6);
        assert_eq!(divergence(&p, &p), 0.0);
        assert_eq!((top(&p), top(&q)), (1, 0));
    }

    /// The second model has a quarter of the first one's change and something else, both with
    /// shifts of all logits.
    #[test]
    fn shares_are_the_definition() {
        let base = vec![1.0f32, 2.0, 3.0, 4.0];
        let plus = |change: [f32; 4]| base.iter().zip(change).map(|(a, b)| a + b).collect::<Vec<f32>>();
        let first = plus([5.0 + 2.0, 5.0 - 2.0, 5.0, 5.0]);
        let second = plus([0.5 - 7.0, -0.5 - 7.0, 1.5 - 7.0, -1.5 - 7.0]);
        let mut sums = Comparison::default();
        sums.add(&[first.clone(), second, base.clone()], 1).expect("compared");
        assert_eq!((sums.effect, sums.effect_kept), (8.0, 2.0));
        assert_eq!(sums.kept_share(), Some(0.25));
        let share = |second: &[f32]| {
            let mut sums = Comparison::default();
            sums.add(&[first.clone(), second.to_vec(), base.clone()], 1).expect("compared");
            sums.kept_share()
        };
        assert_eq!([share(&first), share(&base)], [Some(1.0), Some(0.0)]);
        let mut none = Comparison::default();
        none.add(&[base.clone(), first.clone(), base], 1).expect("compared");
        assert_eq!(none.kept_share(), None);
    }
}
