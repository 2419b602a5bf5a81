//! Keeps the best weights of a run by its held-out loss, and ends the run early if that loss stops
//! improving.
//!
//! Each new best is saved at once as a checkpoint, and that checkpoint stays. At the end the run
//! also saves and evaluates the last step. It then reads the best weights back from their
//! checkpoint and publishes them. A run that is killed meanwhile resumes from the checkpoint of its
//! last step. So nothing is lost, although the result comes later than without `keep_best`.

use super::run_watch::RunWatch;
use super::{RunSummary, TrainLoop};
use crate::checkpoint::BestEvaluation;
use crate::collective::Phase;
use crate::error::{ErrorContext as _, Result};
use crate::report::EvalReport;

impl TrainLoop<'_> {
    /// Evaluates after a step before the last one if an evaluation is due. Returns whether the
    /// weights are the best so far and the run keeps the best.
    pub(super) fn evaluate_on_the_way(
        &mut self,
        done: &mut RunSummary,
        ends_epoch: bool,
        watch: &mut RunWatch,
    ) -> Result<bool> {
        if !self.options.evaluate.is_due(done.steps, ends_epoch) {
            return Ok(false);
        }
        let Some(report) = self.evaluate(done.steps)? else { return Ok(false) };
        self.warn(watch.after_evaluation(&report));
        if !self.options.keep_best {
            return Ok(false);
        }
        let is_best = BestEvaluation::count(&mut self.best, &report);
        done.last = Some(report);
        Ok(is_best)
    }

    /// Returns whether the held-out loss has not improved for `patience` evaluations.
    pub(super) fn is_out_of_patience(&self) -> bool {
        BestEvaluation::is_out_of_patience(self.best.as_ref(), self.options.patience)
    }

    /// Saves the last step if `is_save_due`, evaluates it, and publishes the best weights of the
    /// run.
    pub(super) fn end_with_best(
        &mut self,
        done: &mut RunSummary,
        watch: &mut RunWatch,
        is_save_due: bool,
    ) -> Result<()> {
        self.log_end_of_patience(done.steps);
        let saved = self.finish_saving();
        let saved = saved.and_then(|()| if is_save_due { self.save(done) } else { Ok(()) });
        let saved = saved.and_then(|()| self.finish_saving());
        // A rank that failed alone must not enter the collectives below.
        if saved.is_err() && self.trainer.engine.store.mesh().world().size() > 1 {
            return saved;
        }
        // A failed save does not prevent the result; its error came first, so it is returned.
        let published = self.publish_best(done, watch);
        saved.and(published)
    }

    /// Evaluates the last step, and publishes the weights of the best evaluation.
    fn publish_best(&mut self, done: &mut RunSummary, watch: &mut RunWatch) -> Result<()> {
        // A run that is out of patience has already evaluated its last step.
        if done.last.as_ref().is_none_or(|last| last.step != done.steps) {
            done.last = self.evaluate(done.steps)?;
            if let Some(last) = &done.last {
                self.warn(watch.after_evaluation(last));
                BestEvaluation::count(&mut self.best, last);
            }
        }
        done.after = self.return_to_best(done)?.or_else(|| done.last.clone());
        self.publish(done)
    }

    /// Prints that the run has ended early, if it has.
    fn log_end_of_patience(&self, steps: u64) {
        let total = self.steps.total_steps();
        let Some(best) = self.best.as_ref().filter(|_| self.is_out_of_patience() && steps < total) else {
            return;
        };
        let (step, loss, since) = (best.report.step, best.report.eval_loss, best.since);
        let evaluations =
            if since == 1 { "one evaluation".to_owned() } else { format!("{since} evaluations") };
        if let Some(reporter) = &self.reporter {
            reporter.terminal.line(format!(
                "ended early, after step {steps} of {total}: {evaluations} since step {step} did not get below its held-out \
                 loss of {loss:.4} (`eval.patience`)"
            ));
        }
    }

    /// Loads the weights of the best evaluation into the trainer, unless they are those of the last
    /// step, and returns that evaluation. If their checkpoint is missing or damaged, it warns and
    /// keeps the weights as they are.
    fn return_to_best(&mut self, done: &mut RunSummary) -> Result<Option<EvalReport>> {
        let best = self.best.as_ref().map(|best| best.report.clone());
        let Some(best) = best.filter(|best| best.step != done.steps) else { return Ok(None) };
        self.enter(Phase::Load)?;
        let back = (self.roll_back)(self.trainer, best.step..best.step + 1);
        let back = back.during(|| format!("cannot load the best weights from checkpoint-{}", best.step))?;
        if back.is_none() {
            self.warn([format!(
                "cannot load the best weights (checkpoint-{}, held-out loss {:.4}): it is missing or damaged; the result has the weights of the last step instead",
                best.step, best.eval_loss
            )]);
            done.lost_best = Some(best);
            return Ok(None);
        }
        Ok(Some(best))
    }
}
