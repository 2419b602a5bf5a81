//! Held-out loss, and token accuracy and exact match or the objective's own metrics.

use super::Engine;
use super::reference::part_with_loss;
use crate::data::Batch;
use crate::data::batch::local_micro_batches;
use crate::error::{Error, ErrorCategory, Result};
use crate::model::AdapterSwitch;
use crate::objectives::{Evaluation, Objective, ObjectiveInput, StepTotals};
use crate::runtime::thread_pool;

impl Engine {
    /// Evaluates every batch, one per data rank at a time. `reference` returns the log-probability
    /// of each sample of a batch under the objective's reference, if it has one; all ranks call it
    /// together. Calls `seen` after each such round with the number of rows done so far. All ranks
    /// call it with the same batches.
    ///
    /// # Errors
    /// [`ErrorCategory::Diverged`] if the loss of any rank is not finite: the same error on every
    /// rank. A peer failed.
    pub fn evaluate(
        &self,
        objective: &dyn Objective,
        batches: &[Batch],
        reference: impl Fn(&Batch) -> Result<Option<Vec<f64>>>,
        mut seen: impl FnMut(u64),
    ) -> Result<Evaluation> {
        let mesh = self.store.mesh();
        let own = local_micro_batches(batches, mesh.data_rank(), mesh.data_size());
        let totals = self.with_drift(StepTotals::of(batches), objective, &own, &reference)?;
        let (mut sums, mut rows) = (Evaluation::default(), 0);
        self.in_rounds(batches, |round, mine| {
            let mine = part_with_loss(objective, mine);
            let reference = reference(&mine)?;
            let work = || self.evaluate_batch(objective, &mine, reference.as_deref(), totals);
            sums.add(thread_pool::run_in_pool(&self.device, work)?)?;
            // All ranks search for the cause together, because that gathers weights again.
            if let Some(rank) = self.store.first_rank(!sums.loss_sum.is_finite())? {
                return Err(self.evaluation_diverged(round, rank, rows)?);
            }
            rows += round.iter().map(|batch| batch.num_samples as u64).sum::<u64>();
            seen(rows);
            Ok(())
        })?;
        let mut values = sums.values();
        self.store.sum("losses of the evaluation", &mut values)?;
        sums.set(&values);
        sums.metrics.extend(objective.derived(&sums.metrics));
        Ok(Evaluation { divisor: objective.denominator(&totals), ..sums })
    }

    /// Calls `work` with each round of batches, one for each data rank, and the batch of this rank:
    /// one without targets if the last round has none for it, because all ranks gather weights
    /// together.
    pub(super) fn in_rounds(
        &self,
        batches: &[Batch],
        mut work: impl FnMut(&[Batch], &Batch) -> Result<()>,
    ) -> Result<()> {
        let mesh = self.store.mesh();
        let own = local_micro_batches(batches, mesh.data_rank(), mesh.data_size());
        batches.chunks(mesh.data_size()).zip(&own).try_for_each(|(round, mine)| work(round, mine))
    }

    fn evaluate_batch(
        &self,
        objective: &dyn Objective,
        batch: &Batch,
        reference: Option<&[f64]>,
        totals: StepTotals,
    ) -> Result<Evaluation> {
        let (config, hidden) = (&self.config, &self.hidden(batch, AdapterSwitch::On)?);
        let input = ObjectiveInput { config, hidden, batch, scale: 1.0, totals, reference, dropout: None };
        let head = self.store.head()?;
        objective.evaluate(&head, input)
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
}
