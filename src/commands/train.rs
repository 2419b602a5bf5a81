//! `finetune` without a verb: from the recipe to a trained model on disk.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use candle_core::Device;
use chrono::{DateTime, FixedOffset};

use super::output_folder::{CARD, METRICS, OutputFolder, RECIPE, REPORT, date_text, parse_date};
use super::ranks::{self, RankSetup};
use super::showcase::{self, Question};
use super::{say_base, signals, terminal};
use crate::checkpoint::{
    self, RunFolder, RunRecord, SaveThreads, SavedCheckpoint, Saver, SaverOptions, SnapshotPart,
    TrainingState,
};
use crate::cli::TrainArgs;
use crate::collective::launch::Launch;
use crate::collective::{Call, Collective, CollectiveTimer, Phase, TimedCollective};
use crate::data::{self, Batch};
use crate::engine::{Reporter, RunOptions, RunSummary, TrainLoop, Trainer};
use crate::error::{Error, ErrorCategory, Result};
use crate::plan::{Plan, WorldSize};
use crate::recipe::Recipe;
use crate::report::card::{Artifact, Card, CardBase, CardData};
use crate::report::html::HtmlReport;
use crate::report::{EventWriter, MetricsLog, Terminal, Verbosity, metrics};
use crate::setup::Resolver;
use crate::units;

/// Trains.
pub(super) fn run(args: &TrainArgs) -> Result<()> {
    let started = Instant::now();
    let launch = ranks::launch(args)?;
    let terminal = match launch.rank {
        0 => terminal(&args.common),
        _ => Terminal::stderr(Verbosity::Quiet),
    };
    let recipe = Recipe::load(&args.layers(&super::working_folder()?)?)?;
    let ranks = RankSetup::open(launch, args)?;
    let Launch { rank: first_rank, world_size: all, local_world_size: local, .. } = ranks.launch;
    let first = first_rank == 0;
    let found = (!args.dry_run).then(|| OutputFolder::prepare(args, first, &terminal)).transpose()?;
    let finder = Resolver::new(args.common.offline, &terminal)?;
    let finder = if args.dry_run { finder.leaving_weights() } else { finder };
    let recorded = found.as_ref().map_or(Ok(None), OutputFolder::date)?;
    let resolve = |recipe, now| {
        let resumed = found.as_ref().and_then(|found| found.resumed.as_ref());
        Plan::resolve(recipe, &finder, ranks.device(), WorldSize { all, local }, resumed, now)
    };
    let mut plan = resolve(recipe.clone(), recorded.unwrap_or_else(now))?;
    if let (Some(own), Some(OutputFolder { resumed: None, .. })) = (plan.rows.date(), &found) {
        let agreed = agree_on_date(&ranks, own)?;
        if agreed != own {
            plan = resolve(recipe, agreed)?;
        }
    }
    let resumed = found.as_ref().and_then(|found| found.resumed.as_ref());
    if let Some(check) = plan.check_base(resumed, args.force_base)? {
        say_base(&terminal, &check);
    }
    say(&plan, &terminal);
    let Some(mut found) = found else { return terminal.data(plan.recipe.to_toml()) };
    let resumed = found.resumed.take();
    if let Some(saved) = &resumed {
        plan.resume(saved)?;
    }
    let folder = first.then(|| found.claim(args, &plan, resumed.as_ref())).transpose()?;
    let stop = signals::watch()?;
    // Dropped when all ranks have ended.
    let writers = SaveThreads::default();
    let run = TrainRun {
        args,
        questions: showcase::questions(args, &plan)?,
        plan: &plan,
        resumed: resumed.as_ref(),
        folder: folder.as_ref(),
        stop: &stop,
        writers: &writers,
        terminal: &terminal,
        started,
    };
    ranks.run(&plan, |world, device| run.rank(world, device))
}

fn now() -> DateTime<FixedOffset> {
    chrono::Local::now().fixed_offset()
}

/// The moment that rank 0 took for the chat template, for all processes; `own` where there is one process.
fn agree_on_date(ranks: &RankSetup, own: DateTime<FixedOffset>) -> Result<DateTime<FixedOffset>> {
    let agreed = ranks.agree("the date of the chat template", || Ok(date_text(own).into_bytes()))?;
    parse_date(&String::from_utf8_lossy(&agreed))
}

/// What all ranks share.
struct TrainRun<'a> {
    args: &'a TrainArgs,
    plan: &'a Plan,
    questions: Vec<Question>,
    resumed: Option<&'a SavedCheckpoint>,
    /// The output folder, and what it says of the run; the process of the first rank has them.
    folder: Option<&'a (RunFolder, RunRecord)>,
    stop: &'a AtomicBool,
    writers: &'a SaveThreads,
    terminal: &'a Terminal,
    started: Instant,
}

impl TrainRun<'_> {
    /// What one rank does; the first one speaks and writes for all.
    fn rank(&self, world: Arc<dyn Collective>, device: &Device) -> Result<()> {
        let timed = TimedCollective::new(world);
        let clock = timed.clock();
        let world: Arc<dyn Collective> = Arc::new(timed);
        let (plan, output, terminal) = (self.plan, self.args.output.as_path(), self.terminal);
        let first = world.rank() == 0;
        world.enter(Phase::Meet)?;
        world.barrier(Call { what: "the start", index: 0 })?;
        world.enter(Phase::Load)?;
        let mut trainer = self.load(Arc::clone(&world), device)?;
        if let (Some((folder, record)), true) = (self.folder, first) {
            folder.begin(record.clone(), &[METRICS])?;
            folder.write_text(RECIPE, &plan.recipe.to_toml())?;
        }
        let before = showcase::answers(&self.questions, &trainer.engine, &plan.rows.tokenizer)?;
        if first {
            let took = units::duration(self.started.elapsed().as_secs_f64());
            terminal.detail(format!("ready to train after {took}"));
        }
        let summary = self.train(&mut trainer, &*world, clock)?;
        if summary.stopped {
            return Err(stopped(&summary, output));
        }
        world.enter(Phase::Output)?;
        self.write(&trainer, &*world)?;
        let after = showcase::answers(&self.questions, &trainer.engine, &plan.rows.tokenizer)?;
        if let (Some((folder, _)), true) = (self.folder, first) {
            self.publish(folder, &summary)?;
            showcase::show(&self.questions, [&before, &after], &summary, terminal);
        }
        Ok(())
    }

    /// Adds card and report to the weights, and gives all of it its place in the output folder.
    fn publish(&self, folder: &RunFolder, summary: &RunSummary) -> Result<()> {
        let (plan, output, terminal) = (self.plan, self.args.output.as_path(), self.terminal);
        let name = output.file_name();
        let title = name.map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned());
        let result = RunFolder::result(output);
        card(plan, summary, title.clone()).write(&result.join(CARD))?;
        html(plan, summary, output, &title, self.started)?;
        let elsewhere = folder.publish()?;
        if let Some((place, taken)) = &elsewhere {
            let (place, taken) = (place.display(), taken.join(", "));
            terminal.warn(format!(
                "{taken} came while the run was at work and would be overwritten: the result is in {place}"
            ));
        }
        let place = elsewhere.map_or_else(|| output.to_owned(), |(place, _)| place);
        terminal.line(format!("{} in {}", finished(plan), place.display()));
        Ok(())
    }

    fn load(&self, world: Arc<dyn Collective>, device: &Device) -> Result<Trainer> {
        let first = world.rank() == 0;
        let loading = Instant::now();
        let trainer = self.plan.trainer(self.resumed, world, device)?;
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
        Ok(trainer)
    }

    /// Writes the trained weights, to be published: each rank its share, then the first what stands beside.
    fn write(&self, trainer: &Trainer, world: &dyn Collective) -> Result<()> {
        let result = RunFolder::result(&self.args.output);
        let write = self.plan.writer(false, trainer)?;
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
            write_weights: plan.writer(true, trainer)?,
        };
        let first = world.rank() == 0;
        let saver = Saver::new(options, first, self.writers)?;
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
            stop: self.stop,
            clock,
            options: RunOptions {
                save_steps: settings.save_steps,
                eval_steps: plan.recipe.eval.steps,
                eval_at_end: plan.recipe.eval.at_end,
                every_steps: plan.recipe.log.every_steps,
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
        let events = output.join("tensorboard");
        let wanted = self.plan.recipe.log.tensorboard;
        let tensorboard = wanted.then(|| EventWriter::create(&events, state.map(|s| s.step))).transpose()?;
        Ok(Reporter { terminal: self.terminal, metrics, tensorboard })
    }
}

fn stopped(summary: &RunSummary, output: &Path) -> Error {
    let folder = output.join(format!("checkpoint-{}", summary.steps));
    Error::new(ErrorCategory::SavedAndStopped, format!("stopped by a signal after step {}", summary.steps))
        .because(format!("the run is saved in {}", folder.display()))
        .hint("the same command with `--resume` goes on from there")
}

/// Everything a person should know before the first step.
fn say(plan: &Plan, terminal: &Terminal) {
    let commit = plan.base.found.commit.as_ref().map(|commit| format!(" at {commit}")).unwrap_or_default();
    terminal.line(format!("model {}{commit}", plan.base.found.id));
    terminal.line(format!("data: {}", plan.train.0.report()));
    if let Some((held_out, _)) = &plan.held_out {
        terminal.line(format!("held out: {}", held_out.report()));
    }
    terminal.line(plan.describe());
}

fn finished(plan: &Plan) -> &'static str {
    if plan.adapter_setup.is_some() { "adapter saved" } else { "model saved" }
}

fn held_out_batches(plan: &Plan) -> Vec<Batch> {
    let Some((held_out, _)) = &plan.held_out else { return Vec::new() };
    let tokens = plan.recipe.train.micro_batch_size * plan.recipe.data.max_seq_len;
    data::batch::in_order(held_out.examples(), tokens).collect()
}

fn card(plan: &Plan, summary: &RunSummary, title: String) -> Card {
    let sets = |found: &[crate::setup::ResolvedSource], rows: usize| -> Vec<CardData> {
        let data = |found: &crate::setup::ResolvedSource| CardData {
            name: if found.on_hub { found.id.clone() } else { last_name(&found.id) },
            on_hub: found.on_hub,
            rows: rows as u64,
        };
        found.iter().map(data).collect()
    };
    let found = &plan.base.found;
    Card {
        title,
        artifact: if plan.adapter_setup.is_some() { Artifact::Adapter } else { Artifact::Model },
        base: match (&plan.base.files, found.on_hub) {
            (None, _) => CardBase::Scratch,
            (_, true) => CardBase::Hub { id: found.id.clone(), commit: found.commit.clone() },
            (_, false) => CardBase::Folder { name: last_name(&found.id) },
        },
        tag: plan.method().tag().into(),
        method: plan.method().to_string(),
        train_data: sets(&plan.train.1, plan.train.0.report().rows),
        eval_data: plan.held_out.as_ref().map(|(d, found)| sets(found, d.report().rows)).unwrap_or_default(),
        recipe: plan.recipe.to_toml(),
        steps: summary.steps,
        tokens: summary.tokens,
        trainable_params: plan.parameters().0,
        final_train_loss: summary.last_loss,
        before: summary.before.clone(),
        after: summary.after.clone(),
        chat: plan.rows.template.is_some(),
    }
}

/// Paths of this machine do not belong into a card.
fn last_name(id: &str) -> String {
    Path::new(id).file_name().map_or_else(|| id.to_owned(), |name| name.to_string_lossy().into_owned())
}

fn html(plan: &Plan, summary: &RunSummary, output: &Path, title: &str, started: Instant) -> Result<()> {
    let entries = metrics::read(&output.join(METRICS))?;
    let (trainable, all) = plan.parameters();
    let loss = |report: &Option<crate::report::EvalReport>| {
        report.as_ref().map_or_else(|| "–".to_owned(), |report| format!("{:.4}", report.eval_loss))
    };
    let figures = [
        ("model", plan.base.found.id.clone()),
        ("method", plan.method().to_string()),
        ("trainable parameters", format!("{} of {}", units::count(trainable), units::count(all))),
        ("steps", summary.steps.to_string()),
        ("tokens", units::count(summary.tokens)),
        ("held-out loss before", loss(&summary.before)),
        ("held-out loss after", loss(&summary.after)),
        ("time", units::duration(started.elapsed().as_secs_f64())),
        ("memory planned", units::bytes(plan.memory.total())),
        ("memory peak", units::bytes(crate::report::memory::peak_bytes())),
    ];
    let recipe = plan.recipe.to_toml();
    HtmlReport { title, figures: &figures, recipe: &recipe, entries: &entries }
        .write(&RunFolder::result(output).join(REPORT))
}
