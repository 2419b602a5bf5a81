//! Contents of a run's report: figures of the plan, of metrics.jsonl and of this process, and a few
//! rows.

use std::path::Path;

use candle_core::Device;

use super::masked_row::masked_row;
use super::output_folder::METRICS;
use crate::collective::{HeldBytes, Phase};
use crate::data::{Example, Tokenizer};
use crate::engine::RunSummary;
use crate::error::Result;
use crate::planning::{NCCL, PROCESS, Plan, process_bytes};
use crate::report::html::{AnsweredQuestion, HtmlReport, MaskedRow};
use crate::report::memory::{self, MemoryComparison, PhaseMemory};
use crate::report::metrics;
use crate::report::timing::StepTiming;
use crate::runtime::device;
use crate::units;

/// Number of training rows in the report.
const SHOWN_ROWS: usize = 3;
/// Largest number of tokens shown of a row.
const SHOWN_TOKENS: usize = 320;
/// Tokens shown before the first trained token of a longer row.
const LEAD_TOKENS: usize = 120;

/// Planned memory of a process, computed before its ranks load anything.
pub(crate) struct PlannedProcess {
    /// Ranks of this process.
    ranks: usize,
    /// Bytes of the process beside the plans of its ranks.
    shared: u64,
}

impl PlannedProcess {
    /// Plans a process of `ranks` ranks of `plan`. Only the plan of a single rank already counts
    /// the process itself.
    pub(crate) fn of(plan: &Plan, ranks: usize) -> Self {
        let counted = plan.memory.causes().iter().any(|(cause, _)| *cause == PROCESS);
        let shared = if counted || !plan.engine.device.is_cpu() { 0 } else { process_bytes() };
        PlannedProcess { ranks, shared }
    }

    /// Returns the bytes of the planned memory that are free now, after the model was dropped.
    /// Other work may use them without a peak above the plan.
    pub(crate) fn spare(&self, plan: &Plan, device: &Device) -> u64 {
        let planned = self.compare(plan, device, &[]).predicted();
        if device.is_cpu() {
            planned.saturating_sub(memory::current_bytes().unwrap_or(u64::MAX))
        } else {
            // The driver does not count the pool's memory as free, though the pool can use it
            // again.
            device::free_bytes(device).map_or(0, |free| free.min(planned))
        }
    }

    /// Compares the plan with the peak so far: of the tensors on a GPU, without NCCL's memory; of
    /// the process on a CPU.
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
            causes: plan.memory.causes().into_iter().filter(|(cause, _)| *cause != NCCL).collect(),
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

/// Inputs of the report of a run.
pub(crate) struct ReportPage<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) summary: &'a RunSummary,
    /// Output folder with metrics.jsonl.
    pub(crate) output: &'a Path,
    pub(crate) title: &'a str,
    /// Seconds of the whole run.
    pub(crate) secs: f64,
    pub(crate) questions: &'a [AnsweredQuestion],
    pub(crate) memory: MemoryComparison,
    /// Planned and measured time of a step, if both are known.
    pub(crate) time: Option<StepTiming>,
}

impl ReportPage<'_> {
    /// Passes the report, with the current contents of metrics.jsonl, to `take`.
    ///
    /// # Errors
    /// Those of `take`.
    pub(crate) fn give<T>(&self, take: impl FnOnce(&HtmlReport<'_>) -> Result<T>) -> Result<T> {
        let plan = self.plan;
        // Without a log the report has no curves.
        let entries = metrics::read(&self.output.join(METRICS)).unwrap_or_default();
        let tokenizer = &plan.dataset_loader.tokenizer;
        let shown = plan.train.dataset.examples().iter().take(SHOWN_ROWS);
        // A row that cannot be decoded is left out of the report only.
        let rows: Vec<MaskedRow> = shown.filter_map(|example| shown_row(example, tokenizer).ok()).collect();
        let mut data = vec![("Training", plan.train.dataset.report().to_string())];
        data.extend(plan.held_out.iter().map(|held_out| ("Held out", held_out.dataset.report().to_string())));
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
        let sets: Vec<&str> = plan.train.sources.iter().map(|source| source.id.as_str()).collect();
        let rows = units::exact(plan.train.dataset.report().rows, "row");
        format!("{} trained on {} ({rows}): {}.", plan.base.source.id, sets.join(", "), plan.method())
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
            plan.base.source.commit.as_ref().map(|commit| format!(" at {commit}")).unwrap_or_default();
        let device = if plan.engine.device.is_cpu() { "CPU" } else { "GPU" };
        let strategy =
            if plan.world_size > 1 { format!(", strategy {}", plan.strategy()) } else { String::new() };
        let mut figures = vec![
            ("model", format!("{}{commit}", plan.base.source.id)),
            ("method", plan.method().to_string()),
            ("trainable parameters", format!("{} of {}", units::count(trainable), units::count(all))),
            ("steps", format!("{} of {}", self.summary.steps, plan.total_steps)),
            ("ranks", format!("{} ({device}{strategy})", plan.world_size)),
            ("computed in", format!("{:?}", plan.engine.dtype)),
        ];
        figures.extend(self.time.map(|time| ("time of a step", time.to_string())));
        figures
    }
}

/// Returns the shown part of `example`: all of a short row, and the tokens around the first trained
/// one of a long row.
fn shown_row(example: &Example, tokenizer: &Tokenizer) -> Result<MaskedRow> {
    let first = example.trained.iter().skip(1).position(|trained| *trained).unwrap_or(0);
    let from = if example.ids.len() > SHOWN_TOKENS { first.saturating_sub(LEAD_TOKENS) } else { 0 };
    masked_row(example, tokenizer, from..from + SHOWN_TOKENS)
}
