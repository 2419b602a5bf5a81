//! The result of a run: published as soon as the last step is done, and completed with the figures of the end afterwards.
//!
//! Nothing that takes long stands between the last step and the result. The report, the evaluation at the end, the answers to
//! held-out questions and the measured speeds come later; card and report get their figures then.

use std::path::{Path, PathBuf};

use candle_core::Device;

use super::bottlenecks;
use super::card::card;
use super::output_folder::{CARD, REPORT};
use super::planned_time;
use super::report_page::ReportPage;
use super::showcase;
use super::train::TrainRun;
use super::weights_writer::weights_writer;
use crate::checkpoint::{KillPoint, RunFolder, SnapshotPart};
use crate::collective::{Call, Collective, Phase};
use crate::engine::{RunSummary, Trainer};
use crate::error::Result;
use crate::planning::Plan;
use crate::report::html::{AnsweredQuestion, HtmlReport};
use crate::report::memory::MemoryComparison;
use crate::report::timing::StepTiming;
use crate::weights::write_text;

impl TrainRun<'_> {
    /// Writes the result and gives it its place: each rank writes its share of the weights, then the first rank what
    /// stands beside them. Returns where the result is, on the first rank.
    ///
    /// # Errors
    /// Storage; a peer failed. If the result is sealed by then, the next run in the folder publishes it.
    pub(crate) fn publish(
        &self,
        trainer: &Trainer,
        world: &dyn Collective,
        device: &Device,
        (summary, before): (&RunSummary, Option<&[String]>),
    ) -> Result<Option<PathBuf>> {
        world.enter(Phase::Output)?;
        let (plan, output) = (self.plan, self.args.output());
        let result = RunFolder::result(output);
        let write = weights_writer(plan, false, trainer)?;
        let written = write(&result, &trainer.snapshot(false)?, SnapshotPart::Tensors(world.rank()))?;
        RunFolder::part_written(output, (world.rank(), world.size()), written)?;
        world.barrier(Call { what: "the parts of the result", index: 0 })?;
        let (Some((folder, _)), 0) = (self.folder.get(), world.rank()) else { return Ok(None) };
        KillPoint::Written.reach();
        write(&result, &[], SnapshotPart::Rest)?;
        // The card is small. If it cannot be written, the weights are sealed all the same.
        let described = card(plan, summary, self.title()).write(&result.join(CARD));
        folder.seal(world.size())?;
        let elsewhere = folder.publish(&[REPORT])?;
        KillPoint::Published.reach();
        described?;
        if let Some((place, taken)) = &elsewhere {
            let (place, taken) = (place.display(), taken.join(", "));
            self.terminal.warn(format!(
                "{taken} came while the run was at work and would be overwritten: the result is in {place}"
            ));
        }
        let place = elsewhere.map_or_else(|| output.to_owned(), |(place, _)| place);
        self.terminal.line(format!("{} in {}", saved(plan), place.display()));
        let questions = showcase::answered(&self.showcase, summary, [before, None]);
        let memory = self.planned.compare(plan, device, &summary.memory);
        self.report(summary, &questions, (memory, None), |page| {
            self.update((folder, &place), REPORT, &page.render())
        });
        Ok(Some(place))
    }

    /// Writes the text `name` of the result in `place`. A file that has changed since the run wrote it stays, with a warning.
    fn update(&self, (folder, place): (&RunFolder, &Path), name: &str, text: &str) -> Result<()> {
        if place != self.args.output() {
            return write_text(&place.join(name), text).map(drop);
        }
        if !folder.update_text(name, text)? {
            self.terminal.warn(format!(
                "{name} in {} has changed since the run wrote it: it stays as it is, without the figures of the end",
                place.display()
            ));
        }
        Ok(())
    }

    /// Completes the card and the report of the result in `place` with the figures of the end; returns the memory. The model
    /// has been dropped: the speeds of this machine are measured in its memory.
    ///
    /// # Errors
    /// Storage: the card cannot be written; the one without the figures of the end stays.
    pub(crate) fn complete(
        &self,
        folder: &RunFolder,
        place: &Path,
        device: &Device,
        (summary, questions): (&RunSummary, &[AnsweredQuestion]),
    ) -> Result<MemoryComparison> {
        let (plan, output, terminal) = (self.plan, self.args.output(), self.terminal);
        let result = (folder, place);
        self.update(result, CARD, &card(plan, summary, self.title()).render())?;
        KillPoint::Described.reach();
        let spare = self.planned.spare(plan, device);
        let time = planned_time::compare(plan, summary, output, spare);
        let rates = bottlenecks::measure(summary, device, spare);
        KillPoint::Measured.reach();
        // With the memory that measuring took.
        let memory = self.planned.compare(plan, device, &summary.memory);
        time.iter().for_each(|time| terminal.line(format!("time: {time}")));
        let compared = (memory.clone(), time);
        self.report(summary, questions, compared, |page| self.update(result, REPORT, &page.render()));
        bottlenecks::say(plan, summary, rates, terminal);
        folder.complete()?;
        Ok(memory)
    }

    /// Leaves the report of a run that a signal has stopped, and prints where its time went. The model has been dropped.
    pub(crate) fn report_stop(
        &self,
        folder: &RunFolder,
        device: &Device,
        (summary, before): (&RunSummary, Option<&[String]>),
    ) {
        let plan = self.plan;
        let questions = showcase::answered(&self.showcase, summary, [before, None]);
        let rates = bottlenecks::measure(summary, device, self.planned.spare(plan, device));
        let memory = self.planned.compare(plan, device, &summary.memory);
        self.report(summary, &questions, (memory, None), |page| folder.write_text(REPORT, &page.render()));
        bottlenecks::say(plan, summary, rates, self.terminal);
    }

    /// Makes the report of the run and hands it to `write`. An error of `write` is a warning and ends no run.
    fn report(
        &self,
        summary: &RunSummary,
        questions: &[AnsweredQuestion],
        (memory, time): (MemoryComparison, Option<StepTiming>),
        write: impl FnOnce(&HtmlReport<'_>) -> Result<()>,
    ) {
        let (plan, secs) = (self.plan, self.secs());
        let (output, title) = (self.args.output(), self.title());
        let page = ReportPage { plan, summary, output, title: &title, secs, questions, memory, time };
        if let Err(error) = page.give(write) {
            self.terminal.warn(format!("no {REPORT}: {}", error.in_one_line()));
        }
    }

    /// The title of card and report: the name of the output folder.
    pub(crate) fn title(&self) -> String {
        let name = self.args.output().file_name();
        name.map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
    }
}

fn saved(plan: &Plan) -> &'static str {
    if plan.adapter_setup.is_some() { "adapter saved" } else { "model saved" }
}
