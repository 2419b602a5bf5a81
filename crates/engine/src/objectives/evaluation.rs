//! Sums over evaluated rows.

use super::MetricSum;
use crate::error::Result;

/// Sums over evaluated rows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Evaluation {
    /// The summed loss: Σ −log p(target), unless the objective has another.
    pub loss_sum: f64,
    /// Divisor of the summed loss: the number of targets, unless the objective has its own.
    pub divisor: f64,
    /// Number of targets.
    pub tokens: u64,
    /// Number of targets that had the largest logit.
    pub correct: u64,
    /// Number of rows with at least one target; 0 for an objective that compares no single rows.
    pub rows: u64,
    /// Rows in which every target had the largest logit: greedy decoding gives exactly these
    /// tokens.
    pub exact: u64,
    /// The objective's own metrics; cross-entropy has none.
    pub metrics: Vec<MetricSum>,
}

impl Evaluation {
    /// Returns the mean loss: per target, in nats, unless the objective has its own divisor.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.divisor.max(1.0)
    }

    /// Returns the perplexity, e^loss.
    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }

    /// Returns the share of targets predicted, 0 to 1.
    pub fn token_accuracy(&self) -> f64 {
        self.correct as f64 / self.tokens.max(1) as f64
    }

    /// Returns the share of rows predicted in full, 0 to 1.
    pub fn exact_match(&self) -> f64 {
        self.exact as f64 / self.rows.max(1) as f64
    }

    /// Returns true if the figures of single rows count: token accuracy, exact match, perplexity.
    pub fn has_row_figures(&self) -> bool {
        self.metrics.is_empty()
    }

    /// Adds the sums of another micro-batch of the same objective.
    ///
    /// # Errors
    /// The metrics of `other` have other names: an internal error.
    pub(crate) fn add(&mut self, other: Evaluation) -> Result<()> {
        self.loss_sum += other.loss_sum;
        self.tokens += other.tokens;
        self.correct += other.correct;
        self.rows += other.rows;
        self.exact += other.exact;
        MetricSum::add_all(&mut self.metrics, other.metrics)
    }

    /// Returns all sums, for a sum over ranks.
    pub(crate) fn values(&self) -> Vec<f64> {
        let counts = [self.tokens, self.correct, self.rows, self.exact].map(|count| count as f64);
        [self.loss_sum].into_iter().chain(counts).chain(MetricSum::values(&self.metrics)).collect()
    }

    /// Replaces all sums, in the order of [`Evaluation::values`].
    pub(crate) fn set(&mut self, values: &[f64]) {
        if let [loss_sum, tokens, correct, rows, exact, metrics @ ..] = values {
            self.loss_sum = *loss_sum;
            let counts = [tokens, correct, rows, exact].map(|count| *count as u64);
            [self.tokens, self.correct, self.rows, self.exact] = counts;
            MetricSum::set_all(&mut self.metrics, metrics);
        }
    }
}
