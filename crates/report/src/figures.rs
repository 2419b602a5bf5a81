//! The figures of a step and of an evaluation, as lines for people.

use std::collections::BTreeMap;

use super::metrics::{EvalReport, StepReport};
use crate::units;

/// Returns the figures of a step, for one line.
pub(super) fn step_figures(report: &StepReport) -> String {
    let speed = report.speed().map(|speed| format!("  {} tok/s", units::count(speed as u64)));
    let StepReport { loss, learning_rate, grad_norm, .. } = report;
    let own: String =
        rewards(&report.objective).map(|(name, value)| format!("  {name} {value:.3}")).collect();
    format!("loss {loss:.4}{own}  lr {learning_rate:.2e}  norm {grad_norm:.3}{}", speed.unwrap_or_default())
}

/// Iterates over those metrics of an objective that tell whether it learns its preferences.
fn rewards(metrics: &BTreeMap<String, f64>) -> impl Iterator<Item = (&str, f64)> {
    let shown = ["rewards/accuracies", "rewards/margins", "accuracy", "margin"];
    shown.into_iter().filter_map(|name| Some((name, *metrics.get(name)?)))
}

/// Returns the figures of an evaluation, as one line.
pub(super) fn eval_figures(report: &EvalReport) -> String {
    let mut text = format!("eval at step {}: loss {:.4}", report.step, report.eval_loss);
    // Above this, a perplexity adds nothing to the loss.
    if report.eval_perplexity < 1e6 {
        text += &format!(", perplexity {:.2}", report.eval_perplexity);
    }
    for (name, value) in rewards(&report.eval_objective) {
        text += &format!(", {name} {value:.3}");
    }
    if let Some(accuracy) = report.eval_token_accuracy {
        text += &format!(", token accuracy {:.1} %", 100.0 * accuracy);
    }
    if let Some(exact) = report.eval_exact_match {
        text += &format!(", exact match {:.1} %", 100.0 * exact);
    }
    text
}
