//! Divergence between two models that should compute the same: the evidence for a merge's
//! certificate.

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
}

impl Engine {
    /// Compares the next-token distributions of this model with those of `other` at every target of
    /// `batches`.
    ///
    /// # Errors
    /// No row has a target, or a divergence is not finite: one of the models has broken weights.
    pub fn compare(&self, other: &Engine, batches: impl Iterator<Item = Batch>) -> Result<Comparison> {
        let mut sums = Comparison::default();
        for batch in batches {
            let both = [self.hidden(&batch, AdapterSwitch::On)?, other.hidden(&batch, AdapterSwitch::On)?];
            let counted: Vec<u32> = (0u32..)
                .zip(&batch.targets)
                .filter(|(_, target)| **target != IGNORE)
                .map(|(n, _)| n)
                .collect();
            for chunk in counted.chunks(ROWS) {
                self.add_chunk(other, &both, chunk, &mut sums)?;
            }
            sums.rows += batch.segments.len() as u64;
        }
        if sums.tokens == 0 {
            return Err(Error::user("cannot compare two models on this data").because("no row has a target"));
        }
        if !sums.kl_sum.is_finite() {
            return Err(Error::user("cannot compare two models on this data")
                .because("their distributions hold a NaN or an infinity: one of them has broken weights"));
        }
        Ok(sums)
    }

    fn add_chunk(
        &self,
        other: &Engine,
        hidden: &[Tensor; 2],
        rows: &[u32],
        sums: &mut Comparison,
    ) -> Result<()> {
        let logits = |engine: &Engine, hidden: &Tensor| -> Result<Vec<f32>> {
            let ids = Tensor::from_slice(rows, rows.len(), hidden.device())?;
            let part = hidden.index_select(&ids, 0)?;
            let logits = engine.store.head()?.logits(&engine.config, &part, AdapterSwitch::On)?;
            to_host_vec(&logits)
        };
        let (first, second) = (logits(self, &hidden[0])?, logits(other, &hidden[1])?);
        if first.len() != second.len() {
            return Err(Error::internal("two models of different vocabularies are compared"));
        }
        let vocab = first.len() / rows.len().max(1);
        let pairs = first.par_chunks_exact(vocab).zip(second.par_chunks_exact(vocab));
        let compared: Vec<(f64, bool)> = pairs.map(|(p, q)| (divergence(p, q), top(p) == top(q))).collect();
        for (kl, same) in compared {
            sums.tokens += 1;
            sums.kl_sum += kl;
            sums.max_kl = sums.max_kl.max(kl);
            sums.agreed += u64::from(same);
        }
        Ok(())
    }
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
}
