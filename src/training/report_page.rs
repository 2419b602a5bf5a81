//! What a run tells its report: the figures of the plan, of metrics.jsonl and of this process, and a few rows.

use std::path::Path;

use candle_core::Device;

use super::masked_row::masked_row;
use super::output_folder::METRICS;
use crate::collective::{HeldBytes, Phase};
use crate::data::{Example, Tokenizer};
use crate::engine::RunSummary;
use crate::error::Result;
use crate::planning::{PROCESS, Plan, process_bytes};
use crate::report::html::{AnsweredQuestion, HtmlReport, MaskedRow};
use crate::report::memory::{self, MemoryComparison, PhaseMemory};
use crate::report::metrics;
use crate::report::timing::StepTiming;
use crate::runtime::device;
use crate::units;

/// Training rows that are shown.
const SHOWN_ROWS: usize = 3;
/// Tokens of a row that are shown.
const SHOWN_TOKENS: usize = 320;
/// Those of them that stand before the first one that is trained, where a row is too long to be shown whole.
const LEAD_TOKENS: usize = 120;

/// What a process was planned to hold, asked before its ranks load anything.
pub(crate) struct PlannedProcess {
    /// Ranks of this process.
    ranks: usize,
    /// Bytes beside what the plan of a rank counts.
    shared: u64,
}

impl PlannedProcess {
    /// Of a process of `ranks` ranks of `plan`. What such a process holds itself is in the plan of a single rank alone.
    pub(crate) fn of(plan: &Plan, ranks: usize) -> Self {
        let counted = plan.memory.causes().iter().any(|(cause, _)| *cause == PROCESS);
        let shared = if counted || !plan.engine.device.is_cpu() { 0 } else { process_bytes() };
        PlannedProcess { ranks, shared }
    }

    /// Bytes of the planned memory that are free now, after the model was dropped: something else may take them without
    /// raising the peak above the plan.
    pub(crate) fn spare(&self, plan: &Plan, device: &Device) -> u64 {
        let planned = self.compare(plan, device, &[]).predicted();
        if device.is_cpu() {
            planned.saturating_sub(memory::current_bytes().unwrap_or(u64::MAX))
        } else {
            // What the pool keeps serves the next request, and is not counted as free by the driver.
            device::free_bytes(device).map_or(0, |free| free.min(planned))
        }
    }

    /// Beside the most that was held so far: on a GPU what its tensors took, on a CPU what the process did.
    pub(crate) fn compare(
        &self,
        plan: &Plan,
        device: &Device,
        by_phase: &[(Phase, HeldBytes)],
    ) -> MemoryComparison {
        let on_host = device.is_cpu();
        let ranks = if on_host { self.ranks as u64 } else { 1 };
        let of_phase = |(phase, held): &(Phase, HeldBytes)| PhaseMemory {
            name: phase.name(),
            planned: plan.memory.in_phase(*phase, on_host).saturating_mul(ranks).saturating_add(self.shared),
            host: held.host,
            device: held.device,
        };
        MemoryComparison {
            phases: by_phase.iter().map(of_phase).collect(),
            causes: plan.memory.causes(),
            ranks,
            shared: self.shared,
            host: plan.memory.host,
            peak: if on_host {
                Some(memory::peak_bytes()).filter(|bytes| *bytes > 0)
            } else {
                device::peak_bytes(device)
            },
        }
    }
}

/// What the report of a run is made of.
pub(crate) struct ReportPage<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) summary: &'a RunSummary,
    /// The output folder, where metrics.jsonl lies.
    pub(crate) output: &'a Path,
    pub(crate) title: &'a str,
    /// Seconds of the whole run.
    pub(crate) secs: f64,
    pub(crate) questions: &'a [AnsweredQuestion],
    pub(crate) memory: MemoryComparison,
    /// The time of a step by plan and by the clock, where both are known.
    pub(crate) time: Option<StepTiming>,
}

impl ReportPage<'_> {
    /// Hands the report, with what metrics.jsonl holds by now, to `take`.
    ///
    /// # Errors
    /// Those of `take`.
    pub(crate) fn give<T>(&self, take: impl FnOnce(&HtmlReport<'_>) -> Result<T>) -> Result<T> {
        let plan = self.plan;
        // Without a log there is a report without curves.
        let entries = metrics::read(&self.output.join(METRICS)).unwrap_or_default();
        let tokenizer = &plan.rows.tokenizer;
        let shown = plan.train.0.examples().iter().take(SHOWN_ROWS);
        // A row that cannot be shown was still trained on.
        let rows: Vec<MaskedRow> = shown.filter_map(|example| shown_row(example, tokenizer).ok()).collect();
        let mut data = vec![("Training", plan.train.0.report().to_string())];
        data.extend(plan.held_out.iter().map(|(set, _)| ("Held out", set.report().to_string())));
        take(&HtmlReport {
            title: self.title,
            summary: &self.in_a_sentence(),
            notice: self.summary.stopped.then(|| {
                let (done, all) = (self.summary.steps, plan.total_steps);
                format!(
                    "Stopped as asked after step {done} of {all}; the same command with --resume goes on."
                )
            }),
            headline: &self.headline(),
            figures: &self.figures(),
            questions: self.questions,
            rows: &rows,
            data: &data,
            memory: self.memory.clone(),
            recipe: &plan.portable_recipe().to_toml(),
            entries: &entries,
        })
    }

    fn in_a_sentence(&self) -> String {
        let plan = self.plan;
        let sets: Vec<&str> = plan.train.1.iter().map(|found| found.id.as_str()).collect();
        let rows = units::exact(plan.train.0.report().rows, "row");
        format!("{} trained on {} ({rows}): {}.", plan.base.found.id, sets.join(", "), plan.method())
    }

    fn headline(&self) -> Vec<(&'static str, String)> {
        let peak = self.memory.peak.map_or_else(|| "not measured".to_owned(), units::bytes);
        vec![
            ("tokens", units::count(self.summary.tokens)),
            ("time", units::duration(self.secs)),
            ("peak memory", peak),
        ]
    }

    fn figures(&self) -> Vec<(&'static str, String)> {
        let plan = self.plan;
        let (trainable, all) = plan.parameters();
        let commit =
            plan.base.found.commit.as_ref().map(|commit| format!(" at {commit}")).unwrap_or_default();
        let device = if plan.engine.device.is_cpu() { "CPU" } else { "GPU" };
        let strategy = if plan.ranks > 1 { format!(", strategy {}", plan.strategy()) } else { String::new() };
        let mut figures = vec![
            ("model", format!("{}{commit}", plan.base.found.id)),
            ("method", plan.method().to_string()),
            ("trainable parameters", format!("{} of {}", units::count(trainable), units::count(all))),
            ("steps", format!("{} of {}", self.summary.steps, plan.total_steps)),
            ("ranks", format!("{} ({device}{strategy})", plan.ranks)),
            ("computed in", format!("{:?}", plan.engine.dtype)),
        ];
        figures.extend(self.time.map(|time| ("time of a step", time.to_string())));
        figures
    }
}

/// The part of `example` that is shown: all of a short row, of a long one what is around its first trained token.
fn shown_row(example: &Example, tokenizer: &Tokenizer) -> Result<MaskedRow> {
    let first = example.trained.iter().skip(1).position(|trained| *trained).unwrap_or(0);
    let from = if example.ids.len() > SHOWN_TOKENS { first.saturating_sub(LEAD_TOKENS) } else { 0 };
    masked_row(example, tokenizer, from..from + SHOWN_TOKENS)
}
