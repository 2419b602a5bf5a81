//! Held-out loss, token accuracy and exact match.

use super::Engine;
use crate::data::Batch;
use crate::error::{Error, ErrorCategory, Result};
use crate::model::AdapterSwitch;
use crate::ops::cross_entropy::IGNORE;
use crate::runtime::thread_pool;

/// Sums over evaluated rows.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Evaluation {
    /// Σ −log p(target).
    pub loss_sum: f64,
    /// Number of targets.
    pub tokens: u64,
    /// Number of targets that had the largest logit.
    pub correct: u64,
    /// Number of rows with at least one target.
    pub rows: u64,
    /// Rows in which every target had the largest logit: greedy decoding gives exactly these
    /// tokens.
    pub exact: u64,
}

impl Evaluation {
    /// Mean loss per target, in nats.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.tokens.max(1) as f64
    }
    /// The perplexity, e^loss.
    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }
    /// Share of targets predicted, 0 to 1.
    pub fn token_accuracy(&self) -> f64 {
        self.correct as f64 / self.tokens.max(1) as f64
    }
    /// Share of rows predicted in full, 0 to 1.
    pub fn exact_match(&self) -> f64 {
        self.exact as f64 / self.rows.max(1) as f64
    }
}

impl Engine {
    /// Evaluates every batch, one per data rank at a time. Calls `seen` after each such round with
    /// the number of rows done so far. All ranks call it with the same batches.
    ///
    /// # Errors
    /// [`ErrorCategory::Diverged`] if the loss of any rank is not finite: the same error on every
    /// rank. A peer failed.
    pub fn evaluate(
        &self,
        batches: impl Iterator<Item = Batch>,
        mut seen: impl FnMut(u64),
    ) -> Result<Evaluation> {
        let (mut sums, mut rows) = (Evaluation::default(), 0);
        let mesh = self.store.mesh();
        let mut batches = batches.into_iter();
        while let Some(first) = batches.next() {
            let round: Vec<Batch> =
                std::iter::once(first).chain(batches.by_ref()).take(mesh.data_size()).collect();
            // A rank without a batch computes one without targets, because all ranks gather weights
            // together.
            match round.get(mesh.data_rank()) {
                Some(mine) => self.add_scores(mine, &mut sums)?,
                None => self.add_scores(&round[0].without_targets(), &mut sums)?,
            }
            // All ranks search for the cause together, because that gathers weights again.
            if let Some(rank) = self.store.first_rank(!sums.loss_sum.is_finite())? {
                return Err(self.evaluation_diverged(&round, rank, rows)?);
            }
            rows += round.iter().map(|batch| batch.num_samples as u64).sum::<u64>();
            seen(rows);
        }
        self.over_ranks(sums)
    }

    /// Returns the error for a loss of `rank` that is not finite, in `round`, which comes after
    /// `done` rows.
    fn evaluation_diverged(&self, round: &[Batch], rank: usize, done: u64) -> Result<Error> {
        let rows = |batches: &[Batch]| batches.iter().map(|batch| batch.num_samples as u64).sum::<u64>();
        let data_rank = self.store.mesh().data_rank_of(rank);
        let (before, batch) = (done + rows(&round[..data_rank]), &round[data_rank..=data_rank]);
        let location = self.first_non_finite(batch)?.location;
        let on_rank = if self.store.mesh().world().size() > 1 {
            format!(", which rank {rank} evaluated,")
        } else {
            String::new()
        };
        let (first, last) = (before + 1, before + rows(batch));
        let which = if first == last { format!("row {first}") } else { format!("rows {first} to {last}") };
        Ok(Error::new(ErrorCategory::Diverged, "the evaluation loss is not finite")
            .because(format!("the loss of {which}{on_rank} is NaN or infinite"))
            .because(format!("the first bad value is in {location}")))
    }

    fn over_ranks(&self, sums: Evaluation) -> Result<Evaluation> {
        let counts = [sums.tokens, sums.correct, sums.rows, sums.exact].map(|count| count as f64);
        let mut all = [sums.loss_sum, counts[0], counts[1], counts[2], counts[3]];
        self.store.sum("losses of the evaluation", &mut all)?;
        let [tokens, correct, rows, exact] = [all[1], all[2], all[3], all[4]].map(|count| count as u64);
        Ok(Evaluation { loss_sum: all[0], tokens, correct, rows, exact })
    }

    fn add_scores(&self, batch: &Batch, sums: &mut Evaluation) -> Result<()> {
        let score = || self.score(batch, AdapterSwitch::On);
        let mut scores = thread_pool::run_in_pool(&self.device, score)?.into_iter();
        for segment in &batch.samples {
            let targets = &batch.targets[segment.start..segment.start + segment.len];
            let count = targets.iter().filter(|&&target| target != IGNORE).count();
            let mut exact = count > 0;
            for score in scores.by_ref().take(count) {
                sums.loss_sum += f64::from(score.loss);
                sums.correct += u64::from(score.correct);
                exact &= score.correct;
            }
            sums.tokens += count as u64;
            sums.rows += u64::from(count > 0);
            sums.exact += u64::from(exact);
        }
        Ok(())
    }
}
