//! Result of a run: published right after the last step, and completed with the final figures
//! afterwards.
//!
//! Nothing slow runs between the last step and the result. The final evaluation, the answers to
//! held-out questions and the measured speeds come later, and card and report are then updated.

use std::path::{Path, PathBuf};

use candle_core::Device;

use super::bottlenecks;
use super::card::card;
use super::output_folder::{CARD, REPORT, last_name};
use super::planned_time;
use super::report_page::ReportPage;
use super::train::TrainRun;
use super::weights_writer::weights_writer;
use crate::checkpoint::{KillPoint, RunFolder, SnapshotPart};
use crate::collective::{Call, Collective, Phase};
use crate::engine::{RunSummary, Trainer};
use crate::error::Result;
use crate::report::html::{AnsweredQuestion, HtmlReport};
use crate::report::memory::MemoryComparison;
use crate::report::timing::StepTiming;
use crate::weights::write_text;

impl TrainRun<'_> {
    /// Writes and publishes the result: each rank writes its share of the weights, then the first
    /// rank the other files. Returns the folder of the result on the first rank, none on others.
    ///
    /// # Errors
    /// Storage; a peer failed. If the result is sealed by then, the next run in the folder
    /// publishes it.
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
        // The card is small. The weights are sealed even if the card cannot be written.
        let described = card(plan, summary, self.title()).write(&result.join(CARD));
        folder.seal(world.size())?;
        let elsewhere = folder.publish(&[REPORT])?;
        KillPoint::Published.reach();
        described?;
        if let Some((target, taken)) = &elsewhere {
            let (path, names) = (target.display(), taken.join(", "));
            self.terminal.warn(format!(
                "{names} appeared during the run and would be overwritten: the result is in {path}"
            ));
        }
        let published = elsewhere.map_or_else(|| output.to_owned(), |(target, _)| target);
        let what = if plan.adapter_setup.is_some() { "adapter" } else { "model" };
        self.terminal.line(format!("{what} saved in {}", published.display()));
        let questions = self.showcase.answered(summary, [before, None]);
        let memory = self.planned.compare(plan, device, &summary.memory);
        self.report(summary, &questions, (memory, None), |page| {
            self.update((folder, &published), REPORT, &page.render())
        });
        Ok(Some(published))
    }

    /// Writes the text `name` of the result in `target`. If the file has changed since the run
    /// wrote it, it is kept with a warning.
    fn update(&self, (folder, target): (&RunFolder, &Path), name: &str, text: &str) -> Result<()> {
        if target != self.args.output() {
            return write_text(&target.join(name), text).map(drop);
        }
        if !folder.update_text(name, text)? {
            self.terminal.warn(format!(
                "{name} in {} has changed since the run wrote it: it is kept, without the final figures",
                target.display()
            ));
        }
        Ok(())
    }

    /// Completes card and report of the result in `target` with the final figures; returns the
    /// memory comparison. The model has been dropped, and the speed measurements use its memory.
    ///
    /// # Errors
    /// Storage: the card cannot be written; the card without the final figures stays.
    pub(crate) fn complete(
        &self,
        folder: &RunFolder,
        target: &Path,
        device: &Device,
        (summary, questions): (&RunSummary, &[AnsweredQuestion]),
    ) -> Result<MemoryComparison> {
        let (plan, output, terminal) = (self.plan, self.args.output(), self.terminal);
        let result = (folder, target);
        self.update(result, CARD, &card(plan, summary, self.title()).render())?;
        KillPoint::Described.reach();
        let spare = self.planned.spare(plan, device);
        let time = planned_time::compare(plan, summary, output, spare);
        let rates = bottlenecks::measure(summary, device, spare);
        KillPoint::Measured.reach();
        // Compares after measuring, to count the memory of the measurements too.
        let memory = self.planned.compare(plan, device, &summary.memory);
        time.iter().for_each(|time| terminal.line(format!("time: {time}")));
        let compared = (memory.clone(), time);
        self.report(summary, questions, compared, |page| self.update(result, REPORT, &page.render()));
        bottlenecks::print_analysis(plan, summary, rates, terminal);
        folder.complete()?;
        Ok(memory)
    }

    /// Writes the report of a run that a signal has stopped, and prints its time analysis. The
    /// model has been dropped.
    pub(crate) fn report_stop(
        &self,
        folder: &RunFolder,
        device: &Device,
        (summary, before): (&RunSummary, Option<&[String]>),
    ) {
        let plan = self.plan;
        let questions = self.showcase.answered(summary, [before, None]);
        let rates = bottlenecks::measure(summary, device, self.planned.spare(plan, device));
        let memory = self.planned.compare(plan, device, &summary.memory);
        self.report(summary, &questions, (memory, None), |page| folder.write_text(REPORT, &page.render()));
        bottlenecks::print_analysis(plan, summary, rates, self.terminal);
    }

    /// Makes the report of the run and passes it to `write`. An error of `write` is only a warning.
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

    /// Returns the title of card and report: the name of the output folder.
    pub(crate) fn title(&self) -> String {
        last_name(self.args.output(), "model")
    }
}
