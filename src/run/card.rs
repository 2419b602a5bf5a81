//! What a run says of itself at its end: the model card and the report.

use std::path::Path;
use std::time::Instant;

use super::output_folder::{METRICS, REPORT};
use crate::checkpoint::RunFolder;
use crate::engine::RunSummary;
use crate::error::Result;
use crate::plan::Plan;
use crate::report::card::{Artifact, Card, CardBase, CardData};
use crate::report::html::HtmlReport;
use crate::report::metrics;
use crate::setup::ResolvedSource;
use crate::units;

/// The model card of the run of `plan`.
pub(super) fn card(plan: &Plan, summary: &RunSummary, title: String) -> Card {
    let sets = |found: &[ResolvedSource], rows: usize| -> Vec<CardData> {
        let data = |found: &ResolvedSource| CardData {
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

/// Writes the report of the run, with what `metrics.jsonl` in `output` holds.
pub(super) fn html(
    plan: &Plan,
    summary: &RunSummary,
    output: &Path,
    title: &str,
    started: Instant,
) -> Result<()> {
    // Without a log there is a report without curves.
    let entries = metrics::read(&output.join(METRICS)).unwrap_or_default();
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
