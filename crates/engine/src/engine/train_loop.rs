//! The training loop: steps, evaluations and checkpoints, until the data or the user ends it.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use super::nan_policy::{DivergedSteps, NanPolicy};
use super::run_watch::RunWatch;
use super::save_schedule::SaveSchedule;
use super::{Engine, Evaluation, PeakFlops, Trainer};
use crate::checkpoint::{BestEvaluation, KillPoint, Saver, TrainingState};
use crate::collective::{CollectiveTimer, HeldBytes, Phase, StepPart, StepSecs};
use crate::data::{Batch, Cursor, Step, StepSource};
use crate::error::{Error, ErrorCategory, ErrorContext as _, Result};
use crate::objectives::{ExpertLoad, MetricSum};
use crate::ops::matmul_quantized::PanelAhead;
use crate::profile::Profiler;
use crate::profile::bottlenecks::RunFacts;
use crate::recipe::StepInterval;
use crate::recipe::enums::OnNan;
use crate::report::{
    EvalReport, HeldOutAnswer, MetricsEntry, MetricsLog, RunEnd, RunListeners, SkippedStep, StepReport,
    Terminal, memory,
};
use crate::runtime::clock;
use crate::runtime::device::peak_bytes;
use crate::runtime::trace::{self, SpanInfo, span};

/// The intervals and limits of a run.
#[derive(Debug, Clone, Copy)]
pub struct RunOptions {
    /// Interval of checkpoints.
    pub save: StepInterval,
    /// Interval of evaluations between the first step and the last.
    pub evaluate: StepInterval,
    /// True if held-out rows are evaluated after the last step. They are always evaluated before
    /// the first.
    pub eval_at_end: bool,
    /// True if the result has the weights of the best evaluation.
    pub keep_best: bool,
    /// Consecutive evaluations without a new best after which the run ends.
    pub patience: Option<u64>,
    /// Number of steps between progress lines.
    pub every_steps: u64,
    /// Policy for steps that diverge.
    pub nan: NanPolicy,
    /// Operations of a token and peak of the devices; `None` if the peak is unknown.
    pub peak: Option<PeakFlops>,
}

/// The outputs of a run.
pub struct Reporter<'a> {
    /// Progress on the terminal, for people.
    pub terminal: &'a Terminal,
    /// The numbers of each step, in metrics.jsonl.
    pub metrics: MetricsLog,
    /// Listeners that get the same numbers at the same time.
    pub listeners: RunListeners,
}

impl Reporter<'_> {
    /// Writes `entry` to metrics.jsonl, and passes it to the listeners.
    fn log(&mut self, entry: &MetricsEntry) -> Result<()> {
        self.metrics.append(entry)?;
        let warnings = self.listeners.hear(entry);
        warnings.into_iter().for_each(|text| self.terminal.warn(text));
        Ok(())
    }
}

/// Progress of a run at a point that can be saved and restored.
#[derive(Debug, Clone)]
pub struct Progress {
    /// Number of steps done.
    pub step: u64,
    /// Position of the next step in the data.
    pub cursor: Cursor,
    /// Tokens trained on so far.
    pub tokens: u64,
    /// The best evaluation so far, if the run keeps the best.
    pub best: Option<BestEvaluation>,
}

/// Summary of a run.
#[derive(Debug, Clone, Default)]
pub struct RunSummary {
    /// Number of steps done, including those of earlier runs.
    pub steps: u64,
    /// Number of tokens trained on, including those of earlier runs.
    pub tokens: u64,
    /// Loss of the last step.
    pub last_loss: Option<f64>,
    /// Evaluation before the first step.
    pub before: Option<EvalReport>,
    /// Evaluation of the resulting weights.
    pub after: Option<EvalReport>,
    /// Evaluation of the last step's weights, if the run keeps the best.
    pub last: Option<EvalReport>,
    /// The best evaluation, if its weights are lost.
    pub lost_best: Option<EvalReport>,
    /// True if a signal ended the run early, after a checkpoint.
    pub stopped: bool,
    /// Time by cause, without earlier runs.
    pub facts: RunFacts,
    /// Peak memory of this process in each phase of its first rank.
    pub memory: Vec<(Phase, HeldBytes)>,
}

/// The type of [`TrainLoop::roll_back`].
pub(super) type RollBack<'a> = dyn Fn(&mut Trainer, Range<u64>) -> Result<Option<u64>> + 'a;

/// Everything that the training loop needs.
pub struct TrainLoop<'a> {
    /// The model that learns.
    pub trainer: &'a mut Trainer,
    /// The steps of the run, in order.
    pub steps: &'a mut dyn StepSource,
    /// The held-out micro-batches.
    pub held_out: Vec<Batch>,
    /// The best evaluation so far, including the run before a resume.
    pub best: Option<BestEvaluation>,
    /// The outputs of the run; only one rank has them.
    pub reporter: Option<Reporter<'a>>,
    /// Saves checkpoints into the output folder.
    pub saver: Saver<'a>,
    /// Returns the training state that a checkpoint of this progress records.
    pub state: &'a dyn Fn(Progress) -> TrainingState,
    /// Restores the trainer from the run's newest checkpoint of one of these steps, and returns
    /// that step, or `None` if no such checkpoint exists. All ranks call it.
    pub roll_back: &'a RollBack<'a>,
    /// Writes and publishes the result of a run that has done all its steps. All ranks call it
    /// before any work that may fail or be killed.
    pub publish: &'a dyn Fn(&Trainer, &RunSummary) -> Result<()>,
    /// Returns the model's answers to held-out rows, a part of each evaluation. All ranks call it.
    pub samples: &'a dyn Fn(&Engine) -> Result<Vec<HeldOutAnswer>>,
    /// True if a signal asks the run to save and end.
    pub stop: &'a AtomicBool,
    /// Time spent in collectives.
    pub clock: CollectiveTimer,
    /// Tracer of some of the steps; `None` traces no step.
    pub profiler: Option<Profiler>,
    /// The intervals and limits of the run.
    pub options: RunOptions,
}

impl TrainLoop<'_> {
    /// Runs to the end. `tokens` is the number of tokens trained on before; not 0 after a resume.
    ///
    /// # Errors
    /// The error of a step, an evaluation or a save. Earlier checkpoints stay.
    pub fn run(mut self, tokens: u64) -> Result<RunSummary> {
        let done = self.run_steps(tokens);
        if let Err(error) = &done {
            self.notify_end(RunEnd::Failed(error));
        }
        done
    }

    fn run_steps(&mut self, tokens: u64) -> Result<RunSummary> {
        let total = self.steps.total_steps();
        let mut done = RunSummary { steps: self.steps.steps_done(), tokens, ..RunSummary::default() };
        self.begin(&mut done, total)?;
        let mut watch = RunWatch::new(self.trainer.engine.store.trainable_entries());
        let mut diverged = DivergedSteps::new(self.options.nan);
        let mut saves = SaveSchedule::new(self.options.save);
        let begun = done.steps;
        self.warn(done.before.as_ref().and_then(|before| watch.after_evaluation(before)));
        // The time before the first step belongs to no step.
        self.clock.lap();
        while !self.is_out_of_patience()
            && let Some(step) = self.next_step(total)?
        {
            let (result, agreed) = self.step(&step, &mut watch, &saves)?;
            done.steps += 1;
            done.tokens += step.tokens;
            match result {
                Ok(mut report) => {
                    diverged.updated();
                    done.facts.add_step(&report);
                    done.last_loss = Some(report.loss);
                    report.step = done.steps;
                    self.enter(Phase::Report)?;
                    self.report(&report, done.steps == total)?;
                    self.warn(watch.after_step(&report, &self.trainer.engine.store));
                    watch.check_alive(&report)?;
                }
                Err(error) => self.handle_divergence(done.steps, &error, &mut diverged)?,
            }
            // The end of a run has its own order.
            let goes_on = done.steps < total;
            let ends_epoch = self.steps.cursor().index == 0 && goes_on;
            let is_best = goes_on && self.evaluate_on_the_way(&mut done, ends_epoch, &mut watch)?;
            let stop = agreed.asked_to_stop && goes_on;
            let is_due = self.options.save.is_due(done.steps, ends_epoch);
            if is_due || agreed.is_save_late && goes_on || stop || is_best {
                self.save(&done)?;
                saves.saved(done.steps);
                diverged.saved();
            }
            if stop {
                done.stopped = true;
                break;
            }
        }
        self.finish(&mut done.facts);
        self.warn(watch.at_end(&self.trainer.engine.store));
        let has_moved = done.steps > begun;
        if self.options.keep_best && !done.stopped {
            let is_save_due = has_moved && !saves.has_saved(done.steps);
            self.end_with_best(&mut done, &mut watch, is_save_due)?;
        } else {
            self.end(&mut done, &mut watch, has_moved && self.options.save.is_due_at_end())?;
        }
        self.warn_about_problems();
        self.notify_end(if done.stopped { RunEnd::Stopped } else { RunEnd::Finished });
        done.memory = self.clock.memory_by_phase();
        Ok(done)
    }

    /// Publishes the result of a run that has done all its steps, saves its last checkpoint if
    /// `is_save_due`, and evaluates the result. A run that was stopped has already saved.
    fn end(&mut self, done: &mut RunSummary, watch: &mut RunWatch, is_save_due: bool) -> Result<()> {
        // At most one snapshot is in memory. A failed save does not prevent the result.
        let saved = self.finish_saving();
        if done.stopped {
            return saved;
        }
        let published = self.publish(done);
        saved.and(published)?;
        if is_save_due {
            self.save(done)?;
        }
        if self.options.eval_at_end {
            done.after = self.evaluate(done.steps)?;
            self.warn(done.after.as_ref().and_then(|after| watch.after_evaluation(after)));
        }
        self.finish_saving()
    }

    /// Waits for the save in progress.
    pub(super) fn finish_saving(&mut self) -> Result<()> {
        if self.saver.is_saving() {
            self.pause_step_timer();
            // From here on the run waits for storage.
            self.enter(Phase::Save)?;
        }
        self.saver.finish(self.trainer.engine.store.mesh().world())
    }

    /// Publishes the result of all steps.
    pub(super) fn publish(&mut self, done: &mut RunSummary) -> Result<()> {
        KillPoint::LastStep.reach();
        self.pause_step_timer();
        done.memory = self.clock.memory_by_phase();
        (self.publish)(self.trainer, done)
    }

    /// Warns about the saver's problems that do not end the run.
    fn warn_about_problems(&mut self) {
        let notes = self.saver.take_notes();
        self.warn(notes);
        self.warn(PanelAhead::warning().map(str::to_owned));
        self.warn(self.trainer.graph_warning().map(str::to_owned));
    }

    /// Does the work before the first step: an evaluation and a rehearsal of the longest
    /// micro-batch.
    fn begin(&mut self, done: &mut RunSummary, total: u64) -> Result<()> {
        self.notify(|listeners| listeners.begin(done.steps, total));
        if done.steps == 0 {
            done.before = self.evaluate(0)?;
        }
        if let Some(reporter) = &self.reporter {
            reporter.terminal.train_start(done.steps, total);
        }
        self.rehearse()
    }

    /// Computes the longest micro-batch of the run once if the first step has only shorter ones. So
    /// a run that does not fit in memory fails at once and not hours later. The order of steps does
    /// not change.
    fn rehearse(&mut self) -> Result<()> {
        let Some(next) = self.steps.widest_of_next_step() else { return Ok(()) };
        let Some(longest) = self.steps.longest_micro_batch() else { return Ok(()) };
        if longest.len() <= next {
            return Ok(());
        }
        self.enter(Phase::Data)?;
        let done = self.trainer.rehearse(&longest);
        done.during(|| format!("cannot compute the longest micro-batch, {} tokens", longest.len()))
    }

    /// Continues after step `step`, which ended in `error` and updated nothing, by the recipe's
    /// policy.
    fn handle_divergence(&mut self, step: u64, error: &Error, diverged: &mut DivergedSteps) -> Result<()> {
        let counted = diverged.count(error)?;
        self.pause_step_timer();
        let (back_to, done) = if self.options.nan.on_nan == OnNan::Rollback {
            // From here on the run waits for storage.
            self.enter(Phase::Load)?;
            // The newest checkpoint may still be in progress.
            self.saver.finish(self.trainer.engine.store.mesh().world())?;
            let saved = (self.roll_back)(self.trainer, 0..step);
            let saved = saved.during(|| format!("cannot roll back from step {step}"))?;
            let none = || error.clone().because("this run has no checkpoint yet to roll back to");
            let saved = saved.ok_or_else(none)?;
            let goes_on = format!("continues with the rows after step {step}");
            (Some(saved), format!("rolled back to checkpoint-{saved}, {goes_on}"))
        } else {
            (None, "skipped without an update".to_owned())
        };
        self.trainer.skip_to(step);
        let why = error.causes().first().cloned().unwrap_or_default();
        self.enter(Phase::Report)?;
        self.warn([format!("step {step} diverged: {why}; {done} ({counted})")]);
        match &mut self.reporter {
            Some(reporter) => reporter.log(&SkippedStep { step, skipped: why, back_to }.into()),
            None => Ok(()),
        }
    }

    pub(super) fn warn(&self, texts: impl IntoIterator<Item = String>) {
        if let Some(reporter) = &self.reporter {
            texts.into_iter().for_each(|text| reporter.terminal.warn(text));
        }
    }

    /// Calls the listeners, and warns about those that failed.
    fn notify(&mut self, what: impl FnOnce(&mut RunListeners) -> Vec<String>) {
        let warnings = self.reporter.as_mut().map(|reporter| what(&mut reporter.listeners));
        self.warn(warnings.unwrap_or_default());
    }

    /// Tells the listeners the end of the run. A listener may wait for a program or a server, which
    /// is no hang.
    fn notify_end(&mut self, end: RunEnd<'_>) {
        let world = self.trainer.engine.store.mesh().world();
        let Some(reporter) = &mut self.reporter else { return };
        let warnings = reporter.listeners.end(end, &|| world.heartbeat());
        self.warn(warnings);
    }

    /// Excludes the following work from step time.
    fn pause_step_timer(&mut self) {
        if let Some(reporter) = &mut self.reporter {
            reporter.listeners.pause_step_timer();
        }
    }

    pub(super) fn save(&mut self, done: &RunSummary) -> Result<()> {
        let (step, tokens, best) = (done.steps, done.tokens, self.best.clone());
        let moment = Progress { step, cursor: self.steps.cursor(), tokens, best };
        self.pause_step_timer();
        self.enter(Phase::Save)?;
        let world = self.trainer.engine.store.mesh().world();
        // At most one snapshot is in memory.
        self.saver.finish(world)?;
        self.saver.save((self.state)(moment), self.trainer.snapshot(true)?, world)
    }

    /// Runs a step. Returns its report without its number, or the divergence after which the run
    /// may continue, and what the ranks agreed on after it.
    fn step(
        &mut self,
        step: &Step,
        watch: &mut RunWatch,
        saves: &SaveSchedule,
    ) -> Result<(Result<StepReport>, StepAgreement)> {
        let (started, waited) = (clock::now(), self.clock.read());
        self.saver.check(self.trainer.engine.store.mesh().world())?;
        self.warn_about_problems();
        let outcome = match self.trainer.step(step) {
            Err(error) if !self.may_skip(&error) => return Err(error),
            result => result,
        };
        let secs = clock::since(started).as_secs_f64();
        let computed = secs - (self.clock.read() - waited).as_secs_f64();
        let mut agreed = self.agree(computed, watch, outcome.is_ok(), saves.is_late())?;
        let parts = self.clock.lap();
        let tokens_per_sec = step.tokens as f64 / secs;
        let report = outcome.map(|result| StepReport {
            epoch: step.epoch,
            loss: result.loss,
            learning_rate: result.learning_rate,
            grad_norm: result.grad_norm,
            objective: result
                .metrics
                .iter()
                .filter_map(|metric| Some((metric.name.to_owned(), metric.mean()?)))
                .chain(self.of_experts(&result.experts))
                .collect(),
            expert_load: result
                .experts
                .relative()
                .into_iter()
                .map(|load| (load * 1e3).round() / 1e3)
                .collect(),
            tokens: step.tokens,
            step_secs: secs,
            tokens_per_sec,
            peak_bytes: self.peak_bytes(),
            rank_secs: std::mem::take(&mut agreed.rank_secs),
            mfu: self.options.peak.map(|peak| peak.mfu(tokens_per_sec)),
            hfu: self.options.peak.map(|peak| peak.hfu(tokens_per_sec)),
            ..in_parts(&parts)
        });
        Ok((report, agreed))
    }

    /// Returns the metrics of experts by name: the largest and the smallest load of an expert, and
    /// the loss that balances them, if the run has one.
    fn of_experts(&self, experts: &ExpertLoad) -> Vec<(String, f64)> {
        let loads = experts.relative();
        if loads.is_empty() {
            return Vec::new();
        }
        let (least, most) = loads
            .iter()
            .fold((f64::INFINITY, 0.0f64), |(least, most), load| (least.min(*load), most.max(*load)));
        let mut metrics = vec![("expert_load_max".to_owned(), most), ("expert_load_min".to_owned(), least)];
        if self.trainer.options.router_aux_loss > 0.0 {
            metrics.push(("router_aux_loss".to_owned(), experts.balance));
        }
        metrics
    }

    /// Returns the peak memory of the device, or of the process on a CPU, in bytes.
    fn peak_bytes(&self) -> u64 {
        let _span = span(|| SpanInfo::memory("read what is held"));
        peak_bytes(&self.trainer.engine.device).unwrap_or_else(memory::peak_bytes)
    }

    /// Returns whether the run continues after a step that ended in `error`. All ranks decide
    /// alike, because their losses and norms are the same.
    fn may_skip(&self, error: &Error) -> bool {
        error.kind() == ErrorCategory::Diverged && self.options.nan.on_nan != OnNan::Stop
    }

    pub(super) fn enter(&self, phase: Phase) -> Result<()> {
        self.trainer.engine.store.mesh().world().enter(phase)
    }

    /// Exchanges what all ranks must know after a step. Signals reach ranks at different times, so
    /// all stop if any has seen one. `is_late`, a due checkpoint, counts on the first rank only.
    /// Ranks also share the seconds that each computed. If the step `updated`, they share the
    /// tensors that had a gradient for the first time.
    fn agree(
        &self,
        computed: f64,
        watch: &mut RunWatch,
        updated: bool,
        is_late: bool,
    ) -> Result<StepAgreement> {
        let store = &self.trainer.engine.store;
        let world = store.mesh().world();
        let has_gradients = if updated { store.has_gradients(watch.unreached())? } else { Vec::new() };
        let flag = |is_set: bool| f64::from(u8::from(is_set));
        let mut sums = vec![0.0; 2 + world.size()];
        sums[0] = flag(self.stop.load(Ordering::Relaxed));
        sums[1] = flag(is_late && world.rank() == 0);
        sums[2 + world.rank()] = computed;
        sums.extend(has_gradients.iter().map(|has| flag(*has)));
        store.sum("signals and times", &mut sums)?;
        let reached = sums.split_off(2 + world.size());
        if updated {
            watch.reach(&reached.iter().map(|ranks| *ranks > 0.0).collect::<Vec<_>>());
        }
        let rank_secs = if world.size() > 1 { sums.split_off(2) } else { Vec::new() };
        Ok(StepAgreement { asked_to_stop: sums[0] > 0.0, is_save_late: sums[1] > 0.0, rank_secs })
    }

    /// Ends the progress and the trace; adds the last save's time and the table of the trace to
    /// `facts`.
    fn finish(&mut self, facts: &mut RunFacts) {
        // The last save comes after the last step's report.
        facts.add_save(self.clock.lap().of(StepPart::Save));
        if let Some(reporter) = &self.reporter {
            reporter.terminal.train_finish();
        }
        let sent = self.trainer.engine.store.mesh().traffic().total_bytes();
        match self.profiler.take().map(|profiler| profiler.finish(sent)) {
            Some(Ok(table)) => facts.trace = Some(table),
            Some(Err(error)) => self.warn([error.in_one_line()]),
            None => {}
        }
    }

    /// Returns the next step of `total`, if any. All time from here on counts as that step's.
    fn next_step(&mut self, total: u64) -> Result<Option<Step>> {
        let done = self.steps.steps_done();
        if let Some(profiler) = &mut self.profiler
            && done < total
        {
            let sent = self.trainer.engine.store.mesh().traffic().total_bytes();
            let begun = profiler.begin_step(done + 1, sent);
            self.warn(begun.err().map(|error| error.in_one_line()));
        }
        self.enter(Phase::Data)?;
        let step = self.steps.next_step()?;
        // The trainer first sets gradients to zero.
        self.clock.count_as(StepPart::Update);
        trace::enter_phase("zero gradients");
        Ok(step)
    }

    fn report(&mut self, report: &StepReport, last: bool) -> Result<()> {
        let Some(reporter) = &mut self.reporter else { return Ok(()) };
        reporter.log(&report.clone().into())?;
        if last || report.step.is_multiple_of(self.options.every_steps) {
            reporter.terminal.train_step(report);
        }
        Ok(())
    }

    pub(super) fn evaluate(&mut self, step: u64) -> Result<Option<EvalReport>> {
        if self.held_out.is_empty() {
            return Ok(None);
        }
        self.pause_step_timer();
        self.enter(Phase::Evaluate)?;
        let evaluation = self.trainer.evaluate(&self.held_out);
        let evaluation = evaluation.during(|| format!("cannot evaluate after step {step}"))?;
        let eval_samples = (self.samples)(&self.trainer.engine)?;
        let report = EvalReport { eval_samples, ..evaluation.report(step) };
        self.enter(Phase::Report)?;
        if let Some(reporter) = &mut self.reporter {
            reporter.terminal.eval(&report);
            reporter.log(&report.clone().into())?;
        }
        Ok(Some(report))
    }
}

/// The facts that all ranks know after a step.
struct StepAgreement {
    /// True if a signal has asked any rank to stop.
    asked_to_stop: bool,
    /// True if a checkpoint is due by the first rank's clock.
    is_save_late: bool,
    /// Seconds that each rank computed; empty if the run has one rank.
    rank_secs: Vec<f64>,
}

/// Returns a report that has only the seconds of each part.
fn in_parts(secs: &StepSecs) -> StepReport {
    StepReport {
        data_secs: secs.of(StepPart::Data),
        forward_secs: secs.of(StepPart::Forward),
        backward_secs: secs.of(StepPart::Backward),
        exposed_secs: secs.exposed,
        update_secs: secs.of(StepPart::Update),
        save_secs: secs.of(StepPart::Save),
        other_secs: secs.of(StepPart::Other),
        ..StepReport::default()
    }
}

impl Evaluation {
    /// Returns the report of an evaluation after step `step`, as it is logged.
    pub fn report(&self, step: u64) -> EvalReport {
        let report = EvalReport::new(step, self.loss(), self.tokens);
        if self.has_row_figures() {
            return EvalReport {
                eval_token_accuracy: Some(self.token_accuracy()),
                eval_exact_match: Some(self.exact_match()),
                ..report
            };
        }
        let mean = |metric: &MetricSum| Some((metric.name.to_owned(), metric.mean()?));
        let eval_objective = self.metrics.iter().filter_map(mean).collect();
        EvalReport { eval_perplexity: f64::NAN, eval_objective, ..report }
    }
}
