//! Sections made of metrics.jsonl: results, loss and learning rate, speed, memory, time of a step,
//! ranks, evaluations, and skipped steps.

use std::borrow::Cow;
use std::collections::BTreeSet;

use super::chart::{Chart, Mark, Series, stacked};
use super::markup::{percent, section, short, table};
use crate::metrics::{EvalReport, MetricsEntry, SkippedStep, StepReport};
use crate::units;

/// Most ranks, evaluations and the like in a table.
const MAX_ROWS: usize = 40;
/// The parts of a step: name, class of colour, seconds.
type StepPartOf = (&'static str, &'static str, fn(&StepReport) -> f64);
const PARTS: [StepPartOf; 7] = [
    ("data", "s0", |r| r.data_secs),
    ("forward", "s1", |r| r.forward_secs),
    ("backward", "s2", |r| r.backward_secs),
    ("waiting for other ranks", "s3", |r| r.exposed_secs),
    ("update", "s4", |r| r.update_secs),
    ("saving", "s5", |r| r.save_secs),
    ("other", "s6", |r| r.other_secs),
];

/// The lines of metrics.jsonl by kind.
#[derive(Debug, Default)]
pub(super) struct Curves<'a> {
    steps: Vec<&'a StepReport>,
    evals: Vec<&'a EvalReport>,
    skipped: Vec<&'a SkippedStep>,
}

impl<'a> Curves<'a> {
    pub(super) fn of(entries: &'a [MetricsEntry]) -> Self {
        let mut curves = Curves::default();
        for entry in entries {
            match entry {
                MetricsEntry::Step(report) => curves.steps.push(report),
                MetricsEntry::Eval(report) => curves.evals.push(report),
                MetricsEntry::Skipped(skipped) => curves.skipped.push(skipped),
            }
        }
        curves
    }

    /// Returns name and value of the results of training.
    pub(super) fn results(&self) -> Vec<(&'static str, String)> {
        let mut results = Vec::new();
        let mut add = |name, before: Option<String>, after: Option<String>| match (before, after) {
            (None, None) => {}
            (Some(only), None) | (None, Some(only)) => results.push((name, only)),
            (Some(before), Some(after)) => results.push((name, format!("{before} → {after}"))),
        };
        let before = self.evals.iter().find(|report| report.step == 0);
        let after = self.evals.iter().rfind(|report| report.step > 0);
        let loss = |report: &&EvalReport| format!("{:.4}", report.eval_loss);
        add("held-out loss", before.map(loss), after.map(loss));
        let lowest = self.best().filter(|best| after.is_some_and(|after| best.step < after.step));
        let of_step = |report: &EvalReport| format!("{:.4} at step {}", report.eval_loss, report.step);
        add("lowest held-out loss", None, lowest.map(of_step));
        let exact = |report: &&EvalReport| report.eval_exact_match.map(percent);
        add("exact match, held out", before.and_then(exact), after.and_then(exact));
        let loss = |report: &&StepReport| format!("{:.4}", report.loss);
        let last = self.steps.last().filter(|_| self.steps.len() > 1);
        add("training loss", self.steps.first().map(loss), last.map(loss));
        results
    }

    /// Returns the evaluation with the lowest loss after training began, the first of equal ones.
    fn best(&self) -> Option<&'a EvalReport> {
        let trained = self.evals.iter().copied().filter(|r| r.step > 0 && r.eval_loss.is_finite());
        trained.min_by(|a, b| a.eval_loss.total_cmp(&b.eval_loss))
    }

    /// Iterates over the evaluations that curves show: some of very many.
    fn shown_evals(&self) -> impl Iterator<Item = &EvalReport> {
        let every = self.evals.len().div_ceil(10 * MAX_ROWS).max(1);
        self.evals.iter().step_by(every).copied()
    }

    fn line(&self, name: impl Into<Cow<'static, str>>, value: impl Fn(&StepReport) -> f64) -> Series {
        let points = self.steps.iter().map(|r| (r.step as f64, value(r)));
        Series::line(name, "a", points.filter(|(_, value)| value.is_finite()).collect())
    }

    fn chart(
        title: impl Into<Cow<'static, str>>,
        unit: &'static str,
        from_zero: bool,
        series: Vec<Series>,
    ) -> String {
        Chart { title: title.into(), unit, from_zero, series }.figure()
    }

    /// Returns charts of loss, learning rate and gradient norm, with the evaluations.
    pub(super) fn loss(&self) -> String {
        let held_out = self.shown_evals().map(|r| (r.step as f64, r.eval_loss)).collect();
        let held_out = Series { name: "held out".into(), class: "b", mark: Mark::Points, points: held_out };
        let best = self.best().map(|r| (r.step as f64, r.eval_loss)).into_iter().collect();
        let best = Series { name: "best held out".into(), class: "b", mark: Mark::Ring, points: best };
        let losses = vec![self.line("training", |r| r.loss), held_out, best];
        let is_preference = self.steps.iter().any(|r| r.objective.contains_key("rewards/chosen"));
        let unit = if is_preference { "" } else { "nats per token" };
        let mut all = vec![
            Self::chart("Loss", unit, false, losses),
            Self::chart("Learning rate", "", true, vec![self.line("learning rate", |r| r.learning_rate)]),
            Self::chart(
                "Gradient norm",
                "before clipping",
                true,
                vec![self.line("gradient norm", |r| r.grad_norm)],
            ),
        ];
        all.extend(self.objective_metrics());
        all.extend([self.eval_table(), self.skipped_steps()]);
        section("Loss and learning rate", &charts(&all))
    }

    /// A chart for each metric of the objective.
    fn objective_metrics(&self) -> impl Iterator<Item = String> + '_ {
        let names: BTreeSet<&String> = self.steps.iter().flat_map(|report| report.objective.keys()).collect();
        names.into_iter().map(|name| {
            let value = |report: &StepReport| report.objective.get(name).copied().unwrap_or(f64::NAN);
            let mut lines = vec![self.line(name.clone(), value)];
            let held_out =
                |report: &EvalReport| Some((report.step as f64, *report.eval_objective.get(name)?));
            let points: Vec<(f64, f64)> = self.shown_evals().filter_map(held_out).collect();
            if !points.is_empty() {
                lines.push(Series { name: "held out".into(), class: "b", mark: Mark::Points, points });
            }
            Self::chart(format!("Objective: {name}"), "", false, lines)
        })
    }

    /// Returns charts of tokens a second and of peak memory beside the `predicted` bytes, by step.
    pub(super) fn throughput_and_memory(&self, predicted: u64) -> String {
        let speed = vec![self.line("tokens", |r| r.tokens_per_sec)];
        let figures = [Self::chart("Throughput", "tokens per second", true, speed), self.memory(predicted)];
        let secs: f64 = self.steps.iter().map(|r| r.step_secs).filter(|secs| secs.is_finite()).sum();
        let tokens: u64 = self.steps.iter().map(|r| r.tokens).sum();
        let text = if secs > 0.0 {
            let mean = units::count((tokens as f64 / secs) as u64);
            let (tokens, secs) = (units::count(tokens), units::duration(secs));
            format!("<p>{mean} tokens a second on average: {tokens} tokens in {secs} of steps.</p>\n")
        } else {
            String::new()
        };
        section("Throughput and memory", &(text + &charts(&figures)))
    }

    fn memory(&self, predicted: u64) -> String {
        let most = self.steps.iter().map(|r| r.peak_bytes).max().unwrap_or(0);
        if most == 0 {
            return String::new();
        }
        let (unit, size) = byte_unit(most.max(predicted));
        let mut series = vec![self.line("peak so far", |r| r.peak_bytes as f64 / size)];
        if let (Some(first), Some(last)) = (self.steps.first(), self.steps.last())
            && predicted > 0
        {
            let level = predicted as f64 / size;
            let points = vec![(first.step as f64, level), (last.step as f64, level)];
            series.push(Series { name: "planned".into(), class: "plan", mark: Mark::Level, points });
        }
        Self::chart("Memory", unit, true, series)
    }

    /// Returns the mean time of each part of a step; empty for a run whose metrics hold no parts.
    pub(super) fn breakdown(&self) -> String {
        let total = |r: &StepReport| PARTS.iter().map(|(_, _, part)| part(r)).sum::<f64>();
        let measured: Vec<&StepReport> = self.steps.iter().copied().filter(|r| total(r) > 0.0).collect();
        if measured.is_empty() {
            return String::new();
        }
        let all: f64 = measured.iter().map(|r| total(r)).sum();
        let steps: Vec<f64> = measured.iter().map(|r| r.step as f64).collect();
        let (mut layers, mut rows) = (Vec::new(), Vec::new());
        for (name, class, part) in PARTS {
            let sum: f64 = measured.iter().map(|r| part(r)).sum();
            if sum > 0.0 {
                layers.push((name, class, measured.iter().map(|r| 1e3 * part(r)).collect()));
                let mean = format!("{:.2} ms", 1e3 * sum / measured.len() as f64);
                rows.push(vec![name.to_owned(), mean, percent(sum / all)]);
            }
        }
        let figure = Self::chart("Time of a step", "ms", true, stacked(&steps, layers));
        let means = table("Means over all steps", &["part", "a step", "share"], &rows);
        section("Where the time of a step went", &charts(&[figure, means]))
    }

    /// Returns the computing time of each rank, the slowest first; empty for a single rank.
    pub(super) fn ranks(&self) -> String {
        let size = self.steps.iter().map(|r| r.rank_secs.len()).max().unwrap_or(0);
        let measured = || self.steps.iter().filter(|r| r.rank_secs.len() == size);
        let all: f64 = measured().map(|r| r.step_secs).filter(|secs| secs.is_finite()).sum();
        if size < 2 || all <= 0.0 {
            return String::new();
        }
        let mut computed: Vec<(usize, f64)> =
            (0..size).map(|rank| (rank, measured().map(|r| r.rank_secs[rank]).sum())).collect();
        computed.sort_by(|one, other| other.1.total_cmp(&one.1).then(one.0.cmp(&other.0)));
        let row = |(rank, secs): &(usize, f64)| {
            let waited = (all - secs).max(0.0);
            vec![rank.to_string(), units::duration(*secs), units::duration(waited), percent(waited / all)]
        };
        let rows: Vec<Vec<String>> = computed.iter().take(MAX_ROWS).map(row).collect();
        let caption = if size > MAX_ROWS {
            format!("The {MAX_ROWS} slowest of {size} ranks")
        } else {
            format!("{size} ranks, the slowest first")
        };
        section("Ranks", &table(&caption, &["rank", "computed", "waited for others", "share waited"], &rows))
    }

    fn eval_table(&self) -> String {
        let dash = || "–".to_owned();
        let best = self.best();
        let is_best = |r: &EvalReport| best.is_some_and(|best| std::ptr::eq(best, r));
        let row = |r: &EvalReport| {
            vec![
                r.step.to_string(),
                format!("{:.4}{}", r.eval_loss, if is_best(r) { " (best)" } else { "" }),
                Some(r.eval_perplexity).filter(|value| value.is_finite()).map_or_else(dash, short),
                units::count(r.eval_tokens),
                r.eval_token_accuracy.map_or_else(dash, percent),
                r.eval_exact_match.map_or_else(dash, percent),
            ]
        };
        let header = ["step", "loss", "perplexity", "tokens", "token accuracy", "exact match"];
        // Keeps the first, the best and the newest: all evaluations of a long run would fill the
        // page.
        let newest = self.evals.len().saturating_sub(MAX_ROWS).max(1);
        let mut shown = Vec::new();
        for (at, report) in self.evals.iter().copied().enumerate() {
            if at == 0 || at >= newest || is_best(report) {
                shown.push(row(report));
            }
        }
        table("Evaluations on held-out rows", &header, &shown)
    }

    fn skipped_steps(&self) -> String {
        let row = |step: &&SkippedStep| {
            let done = step.back_to.map_or_else(|| "–".to_owned(), |saved| format!("checkpoint-{saved}"));
            vec![step.step.to_string(), step.skipped.clone(), done]
        };
        let rows: Vec<Vec<String>> = self.skipped.iter().take(MAX_ROWS).map(row).collect();
        table("Steps that diverged and updated nothing", &["step", "why", "back to"], &rows)
    }
}

/// Returns step and training loss of each step.
pub(super) fn training_loss(entries: &[MetricsEntry]) -> Vec<(f64, f64)> {
    Curves::of(entries).steps.iter().map(|report| (report.step as f64, report.loss)).collect()
}

/// Returns step and held-out loss of each evaluation.
pub(super) fn held_out_loss(entries: &[MetricsEntry]) -> Vec<(f64, f64)> {
    Curves::of(entries).evals.iter().map(|report| (report.step as f64, report.eval_loss)).collect()
}

/// Places figures side by side where the page is wide enough.
pub(super) fn charts(figures: &[String]) -> String {
    let all = figures.concat();
    if all.is_empty() { all } else { format!("<div class=\"charts\">\n{all}</div>\n") }
}

/// Returns the largest unit that `bytes` reach, and its size in bytes.
fn byte_unit(bytes: u64) -> (&'static str, f64) {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let fits = units.into_iter().find(|(_, power)| bytes >> power > 0);
    fits.map_or(("B", 1.0), |(name, power)| (name, (1_u64 << power) as f64))
}
