//! What each rank of a training run does, from loading the weights to the files that it leaves.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use candle_core::Device;

use super::alarms::{self, ALERTS};
use super::bottlenecks;
use super::card::card;
use super::device_failure::explained;
use super::monitoring;
use super::output_folder::{CARD, METRICS, OutputFolder, RECIPE, REPORT, date_text, lies_in};
use super::planned_time;
use super::report_page::{PlannedProcess, ReportPage};
use super::rollback::roll_back;
use super::showcase::{self, Showcase};
use super::smaller_micro_batch::TooLarge;
use super::space;
use super::trainer::trainer;
use super::weights_writer::weights_writer;
use crate::checkpoint::{
    self, RunFolder, RunRecord, SaveThreads, SavedCheckpoint, Saver, SaverOptions, SnapshotPart,
    TrainingState,
};
use crate::cli::TrainArgs;
use crate::collective::{Call, Collective, CollectiveTimer, Phase, TimedCollective};
use crate::data::{self, Batch};
use crate::engine::{NanPolicy, Reporter, RunOptions, RunSummary, TrainLoop, Trainer};
use crate::error::{Error, ErrorCategory, Result};
use crate::plan::Plan;
use crate::profile::{Profiler, TraceSchedule};
use crate::report::html::{AnsweredQuestion, HtmlReport};
use crate::report::memory::MemoryComparison;
use crate::report::timing::StepTiming;
use crate::report::ui::{RunView, restore_screen};
use crate::report::{MetricsEndpoint, MetricsLog, Terminal};
use crate::runtime::fault_signals::before_exit;
use crate::setup::BaseCheck;
use crate::units;
use crate::weights::DigestTask;

/// What all ranks share.
pub(crate) struct TrainRun<'a> {
    pub(crate) args: &'a TrainArgs,
    pub(crate) plan: &'a Plan,
    pub(crate) showcase: Showcase,
    pub(crate) planned: PlannedProcess,
    pub(crate) resumed: Option<&'a SavedCheckpoint>,
    /// What came of comparing the base with that of the checkpoint or adapter before its weights were read.
    pub(crate) base_check: Option<BaseCheck>,
    /// The output folder, and what it says of the run; the process of the first rank has them once all processes have met.
    pub(crate) folder: &'a OnceLock<(RunFolder, RunRecord)>,
    /// Where it serves its figures, likewise, if it does.
    pub(crate) metrics: Mutex<Option<MetricsEndpoint>>,
    pub(crate) stop: &'a AtomicBool,
    pub(crate) writers: &'a SaveThreads,
    pub(crate) terminal: &'a Terminal,
    pub(crate) started: Instant,
    /// Whether a smaller micro-batch is worth a try.
    pub(crate) too_large: TooLarge,
}

impl TrainRun<'_> {
    /// Makes the folder that was `found` this run's, in the process of the first rank and once all processes have met: a
    /// run that is refused before leaves nothing in it.
    ///
    /// # Errors
    /// As [`OutputFolder::claim`]; its figures cannot be served where the recipe says.
    pub(crate) fn claim(&self, found: OutputFolder) -> Result<()> {
        let offline = self.args.common.offline;
        let endpoint = monitoring::listen(self.plan, &self.args.output, offline, self.terminal)?;
        *self.metrics.lock().unwrap_or_else(PoisonError::into_inner) = endpoint;
        let claimed = found.claim(self.args, self.plan, self.resumed)?;
        self.folder.get_or_init(|| claimed);
        Ok(())
    }

    /// What one rank does; the first one speaks and writes for all.
    ///
    /// # Errors
    /// Whatever ends its work; what the device fails at with the phase and what would help.
    pub(crate) fn rank(&self, timed: TimedCollective, device: &Device) -> Result<()> {
        let (clock, phases) = (timed.clock(), timed.phases());
        let done = self.timed_rank(Arc::new(timed), clock, device);
        done.map_err(|error| {
            self.too_large.note(&error, phases.read());
            explained(error, self.plan, phases.read())
        })
    }

    fn timed_rank(&self, world: Arc<dyn Collective>, clock: CollectiveTimer, device: &Device) -> Result<()> {
        let (plan, output, terminal) = (self.plan, self.args.output.as_path(), self.terminal);
        let first = world.rank() == 0;
        if first {
            clock.watch_memory(device);
        }
        world.enter(Phase::Meet)?;
        world.barrier(Call { what: "the start", index: 0 })?;
        world.enter(Phase::Load)?;
        let mut trainer = self.load(Arc::clone(&world), device)?;
        if let (Some((folder, record)), true) = (self.folder.get(), first) {
            folder.begin(record.clone(), &[METRICS, ALERTS])?;
            folder.write_text(RECIPE, &plan.recipe.to_toml())?;
        }
        let before = showcase::answers(&self.showcase, &trainer.engine, &plan.rows.tokenizer)?;
        if first {
            let took = units::duration(self.started.elapsed().as_secs_f64());
            terminal.detail(format!("ready to train after {took}"));
        }
        let summary = self.train(&mut trainer, &*world, clock)?;
        // A run that goes on began with what it had learned: that is no answer of the base.
        let before = self.resumed.is_none().then_some(&before[..]);
        if summary.stopped {
            if let (Some((folder, _)), true) = (self.folder.get(), first) {
                let questions = showcase::answered(&self.showcase, [before, None]);
                let memory = self.planned.compare(plan, device, &summary.memory);
                self.report(&summary, &questions, (memory, None), |page| {
                    folder.write_text(REPORT, &page.render())
                });
                bottlenecks::say(plan, &summary, terminal);
            }
            return Err(stopped(&summary, output));
        }
        world.enter(Phase::Output)?;
        self.write(&trainer, &*world)?;
        let after = showcase::answers(&self.showcase, &trainer.engine, &plan.rows.tokenizer)?;
        if let (Some((folder, _)), true) = (self.folder.get(), first) {
            let questions = showcase::answered(&self.showcase, [before, Some(&after)]);
            self.publish(folder, &summary, &questions, device)?;
            // It measures copies and products, whose memory is none of the run's peak.
            bottlenecks::say(plan, &summary, terminal);
            showcase::show(&self.showcase, &questions, &summary, terminal);
        }
        Ok(())
    }

    /// Adds card and report to the weights, and gives all of it its place in the output folder.
    fn publish(
        &self,
        folder: &RunFolder,
        summary: &RunSummary,
        questions: &[AnsweredQuestion],
        device: &Device,
    ) -> Result<()> {
        let (plan, output, terminal) = (self.plan, self.args.output.as_path(), self.terminal);
        let result = RunFolder::result(output);
        card(plan, summary, self.title()).write(&result.join(CARD))?;
        let memory = self.planned.compare(plan, device, &summary.memory);
        // It measures operations, whose memory is none of the run's peak.
        let time = planned_time::compare(plan, summary, output);
        let compared = (memory.clone(), time);
        self.report(summary, questions, compared, |page| page.write(&result.join(REPORT)));
        let elsewhere = folder.publish()?;
        if let Some((place, taken)) = &elsewhere {
            let (place, taken) = (place.display(), taken.join(", "));
            terminal.warn(format!(
                "{taken} came while the run was at work and would be overwritten: the result is in {place}"
            ));
        }
        let place = elsewhere.map_or_else(|| output.to_owned(), |(place, _)| place);
        terminal.line(format!("{} in {}", finished(plan), place.display()));
        terminal.line(format!("memory: {memory}"));
        time.iter().for_each(|time| terminal.line(format!("time: {time}")));
        Ok(())
    }

    /// Makes the report of the run and hands it to `write`; what keeps it from its place is said and ends no run.
    fn report(
        &self,
        summary: &RunSummary,
        questions: &[AnsweredQuestion],
        (memory, time): (MemoryComparison, Option<StepTiming>),
        write: impl FnOnce(&HtmlReport<'_>) -> Result<()>,
    ) {
        let (plan, started) = (self.plan, self.started);
        let (output, title) = (self.args.output.as_path(), self.title());
        let page = ReportPage { plan, summary, output, title: &title, started, questions, memory, time };
        if let Err(error) = page.give(write) {
            self.terminal.warn(format!("no {REPORT}: {}", error.in_one_line()));
        }
    }

    /// What card and report are called: the name of the output folder.
    fn title(&self) -> String {
        let name = self.args.output.file_name();
        name.map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
    }

    fn load(&self, world: Arc<dyn Collective>, device: &Device) -> Result<Trainer> {
        let first = world.rank() == 0;
        let loading = Instant::now();
        // What is saved says of what model it is: the first rank saves that.
        let digest = if first { self.plan.base.start_digest()? } else { None };
        let trainer = trainer(self.plan, self.resumed, world, device)?;
        if let (Some(bytes), true) = (self.plan.bytes_read(), first) {
            let secs = loading.elapsed().as_secs_f64();
            let rate = units::bytes((bytes as f64 / secs.max(1e-9)) as u64);
            let said =
                |done: &str| format!("weights: {} {done} in {secs:.2} s, {rate}/s", units::bytes(bytes));
            match self.plan.base.format {
                Some(_) => self.terminal.line(said("read and quantized")),
                None => self.terminal.detail(said("read")),
            }
        }
        digest.map_or(Ok(()), |digest| self.finish_digest(digest))?;
        Ok(trainer)
    }

    /// Compares the base once more, by every byte.
    fn finish_digest(&self, digest: DigestTask) -> Result<()> {
        let waiting = Instant::now();
        self.plan.finish_digest(digest)?;
        let waited = units::duration(waiting.elapsed().as_secs_f64());
        self.terminal.detail(format!("the digest of the weights was ready {waited} after them"));
        let check = self.plan.check_base(self.resumed, self.args.force_base)?;
        // What was not sure before is said already.
        check
            .filter(|_| self.base_check == Some(BaseCheck::Same))
            .iter()
            .for_each(|check| check.say(self.terminal));
        Ok(())
    }

    /// Writes the trained weights, to be published: each rank its share, then the first what stands beside.
    fn write(&self, trainer: &Trainer, world: &dyn Collective) -> Result<()> {
        let result = RunFolder::result(&self.args.output);
        let write = weights_writer(self.plan, false, trainer)?;
        write(&result, &trainer.snapshot(false)?, SnapshotPart::Tensors(world.rank()))?;
        world.barrier(Call { what: "the parts of the result", index: 0 })?;
        if world.rank() == 0 {
            write(&result, &[], SnapshotPart::Rest)?;
        }
        Ok(())
    }

    fn train(
        &self,
        trainer: &mut Trainer,
        world: &dyn Collective,
        clock: CollectiveTimer,
    ) -> Result<RunSummary> {
        let (plan, output) = (self.plan, self.args.output.as_path());
        let settings = &plan.recipe.checkpoint;
        let options = SaverOptions {
            output: output.to_owned(),
            keep_last: settings.keep_last,
            in_background: settings.async_save,
            bytes: space::checkpoint_bytes(plan)?,
            write_weights: weights_writer(plan, true, trainer)?,
        };
        let first = world.rank() == 0;
        let mut saver = Saver::new(options, first, self.writers);
        if let Some(saved) = self.resumed.filter(|saved| first && lies_in(saved, output)) {
            saver.catch_up(&saved.state);
        }
        let mut sampler = plan.sampler()?;
        let state = self.resumed.map(|saved| &saved.state);
        if let Some(state) = state {
            sampler.seek(data::Cursor { epoch: state.epoch, index: state.index })?;
        }
        let (fingerprint, base) = (plan.fingerprint(), plan.identity()?);
        TrainLoop {
            trainer,
            sampler: &mut sampler,
            held_out: held_out_batches(plan),
            reporter: if first { Some(self.reporter(state)?) } else { None },
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
                chat_template_date: plan.rows.date().map(date_text),
                fingerprint: fingerprint.clone(),
            },
            roll_back: &|trainer, step| roll_back(plan, output, trainer, step),
            stop: self.stop,
            clock,
            profiler: TraceSchedule::of(&plan.recipe.profile)
                .map(|schedule| Profiler::new(schedule, output, world.rank(), world.size())),
            options: RunOptions {
                save_steps: settings.save_steps,
                eval_steps: plan.recipe.eval.steps,
                eval_at_end: plan.recipe.eval.at_end,
                every_steps: plan.recipe.log.every_steps,
                nan: NanPolicy { on_nan: plan.recipe.train.on_nan, limit: plan.recipe.train.nan_limit },
                peak: monitoring::peak(plan)?,
            },
        }
        .run(state.map_or(0, |state| state.tokens))
    }

    fn reporter(&self, state: Option<&TrainingState>) -> Result<Reporter<'_>> {
        let output = self.args.output.as_path();
        let path = output.join(METRICS);
        let metrics = match state {
            Some(state) => MetricsLog::resume(&path, state.step)?,
            None => MetricsLog::create(&path)?,
        };
        if let Some(text) = metrics.note() {
            self.terminal.warn(text);
        }
        let endpoint = self.metrics.lock().unwrap_or_else(PoisonError::into_inner).take();
        let resumed = state.map(|state| state.step);
        let mut listeners = monitoring::listeners(self.plan, output, resumed, endpoint, self.terminal);
        if self.args.ui {
            before_exit(restore_screen);
            listeners.extend(RunView::open(self.terminal, &self.title()));
        }
        match alarms::start(self.plan, output, &self.title(), self.terminal) {
            Ok(alerts) => listeners.extend(alerts),
            Err(error) => self.terminal.warn(format!("no alarms: {}", error.in_one_line())),
        }
        Ok(Reporter { terminal: self.terminal, metrics, listeners })
    }
}

fn stopped(summary: &RunSummary, output: &Path) -> Error {
    let folder = output.join(format!("checkpoint-{}", summary.steps));
    Error::new(ErrorCategory::SavedAndStopped, format!("stopped by a signal after step {}", summary.steps))
        .because(format!("the run is saved in {}", folder.display()))
        .hint("the same command with `--resume` goes on from there")
}

fn finished(plan: &Plan) -> &'static str {
    if plan.adapter_setup.is_some() { "adapter saved" } else { "model saved" }
}

fn held_out_batches(plan: &Plan) -> Vec<Batch> {
    let Some((held_out, _)) = &plan.held_out else { return Vec::new() };
    let tokens = plan.recipe.train.micro_batch_rows() * plan.recipe.data.max_seq_len;
    data::batch::in_order(held_out.examples(), tokens).collect()
}
