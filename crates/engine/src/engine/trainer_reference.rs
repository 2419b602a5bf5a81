//! Log-probabilities of a trainer's samples under the reference of its objective.

use super::Trainer;
use super::reference::{DataUse, Reference};
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::model::AdapterSwitch;

impl Trainer {
    /// Returns the log-probability of each sample of a micro-batch under the objective's reference;
    /// `None` for an objective without one. All ranks call it together.
    pub(super) fn reference_of(&self, batch: &Batch, data: DataUse) -> Result<Option<Vec<f64>>> {
        match &self.reference {
            _ if !self.objective.has_reference() => Ok(None),
            Reference::Precomputed(stored) => stored.of(batch, data).map(Some),
            Reference::AdapterOff => {
                self.engine.sample_log_probs(&*self.objective, batch, AdapterSwitch::Off).map(Some)
            }
        }
    }

    /// Returns the log-probability of each of `examples` examples under the model as it is now, as
    /// the objective compares it. `batches` has every example once, and all ranks call this with
    /// the same ones. Calls `seen` with the number of samples done so far.
    ///
    /// # Errors
    /// A tensor operation failed; a peer failed.
    pub fn reference_log_probs(
        &self,
        batches: &[Batch],
        examples: usize,
        mut seen: impl FnMut(u64),
    ) -> Result<Vec<f64>> {
        let (mut log_probs, mut done) = (vec![0.0; examples], 0);
        self.engine.in_rounds(batches, |round, mine| {
            let of_samples = self.engine.sample_log_probs(&*self.objective, mine, AdapterSwitch::On)?;
            // A rank without a batch has one without targets, whose log-probabilities are 0.
            for (sample, log_prob) in mine.samples.iter().zip(of_samples) {
                let unknown = || Error::internal("a sample is of no example");
                *log_probs.get_mut(sample.example as usize).ok_or_else(unknown)? += log_prob;
            }
            done += round.iter().map(|batch| batch.num_samples as u64).sum::<u64>();
            seen(done);
            Ok(())
        })?;
        // Each example has its value on one rank and 0 on the others.
        self.engine.store.sum("log-probabilities of the reference", &mut log_probs)?;
        Ok(log_probs)
    }
}
