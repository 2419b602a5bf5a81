//! Work of each rank of a training run, from loading the weights to writing the result.

use std::cell::OnceCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use candle_core::Device;

use super::alerts::{self, ALERTS};
use super::device_failure::explained;
use super::earlier::EarlierRun;
use super::monitoring::{self, SharedLogCommand};
use super::output_folder::{METRICS, OutputFolder, RECIPE, lies_in};
use super::reference::{ReferenceRun, batches_in_order, with_reference};
use super::report_page::PlannedProcess;
use super::rollback::roll_back;
use super::showcase::Showcase;
use super::smaller_micro_batch::OomRetry;
use super::space;
use super::trainer::trainer;
use super::weights_writer::weights_writer;
use crate::checkpoint::{
    self, BestEvaluation, KillPoint, Retention, RunFolder, RunRecord, SaveThreads, SavedCheckpoint, Saver,
    SaverOptions, TrainingState,
};
use crate::cli::TrainArgs;
use crate::collective::{Call, Collective, CollectiveTimer, Phase, TimedCollective};
use crate::data;
use crate::engine::{NanPolicy, Reporter, RunOptions, RunSummary, TrainLoop, Trainer};
use crate::error::{Error, ErrorCategory, Result};
use crate::loading::BaseCheck;
use crate::locks::locked;
use crate::planning::Plan;
use crate::profile::{Profiler, TraceSchedule};
use crate::report::ui::{RunView, restore_screen};
use crate::report::{MetricsEndpoint, MetricsLog, RunEnd, Terminal};
use crate::runtime::fault_signals::before_exit;
use crate::units;
use crate::weights::DigestTask;

/// State that all ranks of a process share.
pub(crate) struct TrainRun<'a> {
    pub(crate) args: &'a TrainArgs,
    pub(crate) plan: &'a Plan,
    pub(crate) showcase: Showcase,
    pub(crate) planned: PlannedProcess,
    pub(crate) resumed: Option<&'a SavedCheckpoint>,
    /// Result of comparing the base with that of the checkpoint or adapter, before the weights were
    /// read.
    pub(crate) base_check: Option<BaseCheck>,
    /// Output folder and its record. The process of the first rank sets them after all processes
    /// have joined.
    pub(crate) folder: &'a OnceLock<(RunFolder, RunRecord)>,
    /// Metrics endpoint, set in the same process, if the recipe has one.
    pub(crate) metrics: Mutex<Option<MetricsEndpoint>>,
    pub(crate) stop: &'a AtomicBool,
    pub(crate) writers: &'a SaveThreads,
    pub(crate) terminal: &'a Terminal,
    pub(crate) started: Instant,
    /// Figures from before the run was resumed.
    pub(crate) earlier: EarlierRun,
    /// Set if a smaller micro-batch may help.
    pub(crate) too_large: OomRetry,
}

impl TrainRun<'_> {
    /// Claims the folder `output_folder` for this run, in the process of the first rank and after
    /// all processes have joined. A run that is refused before leaves nothing in it.
    ///
    /// # Errors
    /// Those of [`OutputFolder::claim`]; the metrics endpoint cannot be opened.
    pub(crate) fn claim(&self, output_folder: OutputFolder) -> Result<()> {
        let endpoint = monitoring::listen(self.plan, self.args.output(), self.terminal)?;
        *locked(&self.metrics) = endpoint;
        let claimed = output_folder.claim(self.args, self.plan, self.resumed)?;
        self.folder.get_or_init(|| claimed);
        Ok(())
    }

    /// Runs one rank; the first rank prints and writes for all.
    ///
    /// # Errors
    /// The error that ended the rank; a device error names the phase and settings that may help.
    pub(crate) fn rank(&self, timed: TimedCollective, device: &Device) -> Result<()> {
        let (clock, phases) = (timed.clock(), timed.phases());
        let done = self.timed_rank(Arc::new(timed), clock, device);
        done.map_err(|error| {
            self.too_large.record(&error, phases.read());
            explained(error, self.plan, phases.read())
        })
    }

    fn timed_rank(&self, world: Arc<dyn Collective>, clock: CollectiveTimer, device: &Device) -> Result<()> {
        let log = OnceCell::new();
        let done = self.work(Arc::clone(&world), clock, device, &log);
        let end = match &done {
            Ok(()) => RunEnd::Finished,
            Err(error) if error.kind() == ErrorCategory::SavedAndStopped => RunEnd::Stopped,
            Err(error) => RunEnd::Failed(error),
        };
        self.end_log(&log, end, &*world);
        done
    }

    /// Ends the program of `log.command` unless it has ended. This may take 30 s.
    fn end_log(&self, log: &OnceCell<SharedLogCommand>, end: RunEnd<'_>, world: &dyn Collective) {
        let ended = log.get().map_or(Ok(()), |log| log.borrow_mut().end(end, &|| world.heartbeat()));
        if let Err(error) = ended {
            let why = error.in_one_line();
            self.terminal.warn(format!("the program of `log.command` may miss lines of this run: {why}"));
        }
    }

    /// Does the work of a rank. The first rank puts the program of `log.command` into `log`.
    fn work(
        &self,
        world: Arc<dyn Collective>,
        clock: CollectiveTimer,
        device: &Device,
        log: &OnceCell<SharedLogCommand>,
    ) -> Result<()> {
        let (plan, terminal) = (self.plan, self.terminal);
        let first = world.rank() == 0;
        if first {
            clock.watch_memory(device);
        }
        world.enter(Phase::Meet)?;
        world.barrier(Call { what: "the start", index: 0 })?;
        world.enter(Phase::Load)?;
        let trainer = self.load(Arc::clone(&world), device)?;
        if let (Some((folder, record)), true) = (self.folder.get(), first) {
            folder.begin(record.clone(), &[METRICS, ALERTS])?;
            folder.write_text(RECIPE, &plan.recipe_text())?;
        }
        let mut trainer = self.with_reference(trainer, &*world)?;
        let tokenizer = &plan.dataset_loader.tokenizer;
        let before = self.showcase.answers_beside_evaluations(&trainer.engine, tokenizer)?;
        if first {
            let took = units::duration(self.started.elapsed().as_secs_f64());
            terminal.detail(format!("ready to train after {took}"));
        }
        // A resumed run starts from trained weights, so these are no answers of the base.
        let before = self.resumed.is_none().then_some(&before[..]);
        let published_in = OnceLock::new();
        let publish = |trainer: &Trainer, summary: &RunSummary| {
            let published = self.publish(trainer, &*world, device, (&self.whole(summary.clone()), before))?;
            published.map_or(Ok(()), |published| {
                published_in.set(published).map_err(|_| Error::internal("the result was published twice"))
            })
        };
        let summary = self.whole(self.train(&mut trainer, &*world, (clock, log), &publish)?);
        if summary.stopped {
            drop(trainer);
            if let (Some((folder, _)), true) = (self.folder.get(), first) {
                self.report_stop(folder, device, (&summary, before));
            }
            return Err(self.stopped(&summary));
        }
        KillPoint::Evaluated.reach();
        world.enter(Phase::Output)?;
        let after = self.showcase.answers_beside_evaluations(&trainer.engine, tokenizer)?;
        drop(trainer);
        if let (Some((folder, _)), Some(published_in)) = (self.folder.get(), published_in.get()) {
            let questions = self.showcase.answered(&summary, [before, Some(&after)]);
            let memory = self.complete(folder, published_in, device, (&summary, &questions))?;
            self.showcase.show(&questions, &summary, terminal);
            // Waiting for the program is no time of the run.
            let secs = self.secs();
            self.end_log(log, RunEnd::Finished, &*world);
            self.close(&summary, published_in, secs, &memory);
        }
        Ok(())
    }

    /// Adds the figures from before the run was resumed to the summary.
    fn whole(&self, mut summary: RunSummary) -> RunSummary {
        summary.before = summary.before.or_else(|| self.earlier.before.clone());
        summary
    }

    /// Returns the seconds of the whole run, with those before it was resumed.
    pub(crate) fn secs(&self) -> f64 {
        self.earlier.secs + self.started.elapsed().as_secs_f64()
    }

    fn load(&self, world: Arc<dyn Collective>, device: &Device) -> Result<Trainer> {
        let first = world.rank() == 0;
        let loading = Instant::now();
        // The first rank saves the identity of the base, for which it needs the digest.
        let digest = if first { self.plan.base.start_digest()? } else { None };
        let trainer = trainer(self.plan, self.resumed, world, device)?;
        if let (Some(bytes), true) = (self.plan.bytes_read(), first) {
            let secs = loading.elapsed().as_secs_f64();
            let rate = units::bytes((bytes as f64 / secs.max(1e-9)) as u64);
            let text_of =
                |done: &str| format!("weights: {} {done} in {secs:.2} s, {rate}/s", units::bytes(bytes));
            match self.plan.base.format {
                Some(format) if format.is_kept() => self.terminal.line(text_of("read and kept packed")),
                Some(_) => self.terminal.line(text_of("read and quantized")),
                None => self.terminal.detail(text_of("read")),
            }
        }
        digest.map_or(Ok(()), |digest| self.finish_digest(digest))?;
        Ok(trainer)
    }

    /// Returns the trainer with the reference of its objective.
    fn with_reference(&self, trainer: Trainer, world: &dyn Collective) -> Result<Trainer> {
        let checkpoint_parent = self.resumed.and_then(|saved| saved.folder.parent());
        let run = ReferenceRun {
            plan: self.plan,
            from: checkpoint_parent.unwrap_or(self.args.output()),
            is_resumed: self.resumed.is_some(),
            folder: self.folder.get().map(|(folder, _)| folder),
            terminal: self.terminal,
        };
        with_reference(&run, trainer, world)
    }

    /// Compares the base once more, by the digest of every byte.
    fn finish_digest(&self, digest: DigestTask) -> Result<()> {
        let waiting = Instant::now();
        self.plan.finish_digest(digest)?;
        let waited = units::duration(waiting.elapsed().as_secs_f64());
        self.terminal.detail(format!("the digest of the weights was ready {waited} after loading"));
        let check = self.plan.check_base(self.resumed, self.args.force_base)?;
        // An uncertain result has already been printed.
        check
            .filter(|_| self.base_check == Some(BaseCheck::Same))
            .iter()
            .for_each(|check| check.print(self.terminal));
        Ok(())
    }

    fn train(
        &self,
        trainer: &mut Trainer,
        world: &dyn Collective,
        (clock, log): (CollectiveTimer, &OnceCell<SharedLogCommand>),
        publish: &dyn Fn(&Trainer, &RunSummary) -> Result<()>,
    ) -> Result<RunSummary> {
        let (plan, output) = (self.plan, self.args.output());
        let first = world.rank() == 0;
        let saver = self.saver(trainer, first)?;
        let mut sampler = plan.sampler()?;
        let state = self.resumed.map(|saved| &saved.state);
        if let Some(state) = state {
            sampler.seek(data::Cursor { epoch: state.epoch, index: state.index })?;
        }
        let (fingerprint, base) = (plan.fingerprint(), plan.identity()?);
        TrainLoop {
            trainer,
            steps: &mut sampler,
            held_out: plan.held_out.iter().flat_map(|rows| batches_in_order(plan, &rows.dataset)).collect(),
            best: self.best_so_far(output, first),
            reporter: if first { Some(self.reporter(state, log)?) } else { None },
            saver,
            state: &|moment| TrainingState {
                schema: checkpoint::SCHEMA,
                step: moment.step,
                epoch: moment.cursor.epoch,
                index: moment.cursor.index,
                tokens: moment.tokens,
                ranks: world.size(),
                base: Some(base.clone()),
                micro_batches: Some(plan.micro_batches()),
                best: moment.best,
                chat_template_date: plan.dataset_loader.date().map(|date| date.to_rfc3339()),
                fingerprint: fingerprint.clone(),
            },
            roll_back: &|trainer, steps| roll_back(plan, output, trainer, steps),
            publish,
            samples: &|engine| self.showcase.samples(engine, &plan.dataset_loader.tokenizer),
            stop: self.stop,
            clock,
            profiler: TraceSchedule::of(&plan.recipe.profile)
                .map(|schedule| Profiler::new(schedule, output, world.rank(), world.size())),
            options: RunOptions {
                save: plan.recipe.checkpoint.save_steps,
                evaluate: plan.recipe.eval.interval(),
                eval_at_end: plan.recipe.eval.at_end,
                keep_best: plan.recipe.eval.keeps_best(),
                patience: plan.recipe.eval.patience,
                every_steps: plan.recipe.log.every_steps,
                nan: NanPolicy { on_nan: plan.recipe.train.on_nan, limit: plan.recipe.train.nan_limit },
                peak: monitoring::peak(plan)?,
            },
        }
        .run(state.map_or(0, |state| state.tokens))
    }

    /// Returns the best evaluation before this run was resumed, if it keeps the best and their
    /// checkpoint is in its folder `output`. The checkpoint of a last step comes before its
    /// evaluation, which is counted here if the run continues after all.
    fn best_so_far(&self, output: &Path, first: bool) -> Option<BestEvaluation> {
        let saved = self.resumed.filter(|_| self.plan.recipe.eval.keeps_best())?;
        let is_there = |best: &&BestEvaluation| {
            lies_in(saved, output) && checkpoint::path_of(output, best.report.step).is_dir()
        };
        let mut best = saved.state.best.as_ref().filter(is_there).cloned();
        if let (Some(lost), None, true) = (&saved.state.best, &best, first) {
            self.terminal.warn(format!(
                "the best weights so far, of step {} (held-out loss {:.4}), are in no checkpoint in {}: the best is chosen from \
                 here on",
                lost.report.step,
                lost.report.eval_loss,
                output.display()
            ));
        }
        if let Some(report) = &self.earlier.at_checkpoint {
            BestEvaluation::count(&mut best, report);
        }
        best
    }

    /// Creates the saver of a rank's part of checkpoints.
    fn saver(&self, trainer: &Trainer, first: bool) -> Result<Saver<'_>> {
        let (plan, output) = (self.plan, self.args.output());
        let settings = &plan.recipe.checkpoint;
        let options = SaverOptions {
            output: output.to_owned(),
            retention: Retention { last: settings.keep_last, every: settings.keep_every },
            in_background: settings.async_save,
            bytes: space::saved(plan)?.checkpoint,
            write_weights: weights_writer(plan, true, trainer)?,
        };
        let mut saver = Saver::new(options, first, self.writers);
        if let Some(saved) = self.resumed.filter(|saved| first && lies_in(saved, output)) {
            saver.catch_up(&saved.state);
        }
        Ok(saver)
    }

    fn reporter(
        &self,
        state: Option<&TrainingState>,
        log: &OnceCell<SharedLogCommand>,
    ) -> Result<Reporter<'_>> {
        let output = self.args.output();
        let path = output.join(METRICS);
        let metrics = match state {
            Some(state) => MetricsLog::resume(&path, state.step)?,
            None => MetricsLog::create(&path)?,
        };
        if let Some(text) = metrics.moved_aside() {
            self.terminal.warn(text);
        }
        let endpoint = locked(&self.metrics).take();
        let resumed = state.map(|state| state.step);
        let mut listeners = monitoring::listeners(self.plan, output, resumed, endpoint, self.terminal);
        if self.args.ui {
            before_exit(restore_screen);
            listeners.extend(RunView::open(self.terminal, &self.title()));
        }
        match alerts::start(self.plan, output, &self.title(), self.terminal) {
            Ok(alerts) => listeners.extend(alerts),
            Err(error) => self.terminal.warn(format!("no alerts: {}", error.in_one_line())),
        }
        if let Some(started) = monitoring::log_command(self.plan, output, resumed, self.terminal) {
            listeners.add(Rc::clone(log.get_or_init(|| started)));
        }
        Ok(Reporter { terminal: self.terminal, metrics, listeners })
    }
}
