//! Metrics as sums and counts.

use crate::error::{Error, Result};

/// A metric of an objective, summed over micro-batches and ranks. Its value is the mean.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MetricSum {
    /// The metric's name in reports.
    pub name: &'static str,
    /// The sum so far.
    pub sum: f64,
    /// Number of summed values, the divisor of the mean.
    pub count: f64,
}

impl MetricSum {
    /// Returns the mean; `None` without a value.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0.0).then(|| self.sum / self.count)
    }

    /// Adds the metrics of another micro-batch to `sums`.
    ///
    /// # Errors
    /// They have other names: an internal error.
    pub(crate) fn add_all(sums: &mut Vec<MetricSum>, others: Vec<MetricSum>) -> Result<()> {
        if sums.is_empty() {
            *sums = others;
            return Ok(());
        }
        let names = |metrics: &[MetricSum]| metrics.iter().map(|metric| metric.name).collect::<Vec<_>>();
        let (mine, theirs) = (names(sums), names(&others));
        if mine != theirs {
            return Err(Error::internal("an objective's metrics change between micro-batches")
                .because(format!("{mine:?}, then {theirs:?}")));
        }
        for (sum, other) in sums.iter_mut().zip(others) {
            sum.sum += other.sum;
            sum.count += other.count;
        }
        Ok(())
    }

    /// Returns sums and counts, for a sum over ranks.
    pub(crate) fn values(metrics: &[MetricSum]) -> impl Iterator<Item = f64> + '_ {
        metrics.iter().flat_map(|metric| [metric.sum, metric.count])
    }

    /// Replaces sums and counts, in the order of [`MetricSum::values`].
    pub(crate) fn set_all(metrics: &mut [MetricSum], values: &[f64]) {
        for (metric, values) in metrics.iter_mut().zip(values.chunks_exact(2)) {
            (metric.sum, metric.count) = (values[0], values[1]);
        }
    }
}
