//! The figures of a run for Prometheus, under `/metrics`.
//!
//! They are those of `metrics.jsonl`. Each of its lines renews the whole page, so that all figures
//! of a page are of the same moment. A figure without a value yet is absent. [`FAMILIES`] is the
//! one table of names, which docs/monitoring.md repeats; units are those of Prometheus (seconds,
//! bytes, ratios from 0 to 1).

use std::collections::BTreeMap;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use prometheus::{CounterVec, GaugeVec, Opts, Registry, TextEncoder};

use super::listener::RunListener;
use super::metrics::{EvalReport, SkippedStep, StepReport};
use super::page_server::PageServer;
use crate::error::{Error, Result};

/// The path of the page.
pub const PATH: &str = "/metrics";

/// The kind of a figure: one that can fall, or one that only grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FamilyKind {
    /// The present value, which can fall.
    Gauge,
    /// It only grows, from 0 at the start of the process.
    Counter,
}

/// Figures of one name.
#[derive(Debug)]
pub struct FamilySpec {
    /// The name in Prometheus.
    pub name: &'static str,
    /// The kind: gauge or counter.
    pub kind: FamilyKind,
    /// The names of its labels.
    pub labels: &'static [&'static str],
    /// The description on the page.
    pub help: &'static str,
}

const fn gauge(name: &'static str, labels: &'static [&'static str], help: &'static str) -> FamilySpec {
    FamilySpec { name, kind: FamilyKind::Gauge, labels, help }
}

const fn counter(name: &'static str, help: &'static str) -> FamilySpec {
    FamilySpec { name, kind: FamilyKind::Counter, labels: &[], help }
}

/// All figures of the page.
pub const FAMILIES: [FamilySpec; 30] = [
    gauge(
        "finetune_run_info",
        &["run", "model", "version"],
        "always 1; the run, its model, and the version of finetune",
    ),
    gauge("finetune_planned_steps", &[], "steps of the whole run"),
    gauge("finetune_step", &[], "`step` of the last line"),
    gauge("finetune_last_step_timestamp_seconds", &[], "time of the last line, in seconds since 1970"),
    gauge(
        "finetune_eta_seconds",
        &[],
        "remaining steps times the mean time of a step since the start of the process, evaluations and saves included",
    ),
    gauge("finetune_epochs", &[], "`epoch`"),
    gauge("finetune_loss_nats", &[], "`loss`"),
    gauge("finetune_learning_rate", &[], "`learning_rate`"),
    gauge("finetune_gradient_norm", &[], "`grad_norm`"),
    gauge("finetune_step_tokens", &[], "`tokens` of the last step"),
    counter("finetune_tokens_total", "the sum of `tokens` over the steps of this process"),
    gauge("finetune_tokens_per_second", &[], "`tokens_per_sec`"),
    gauge("finetune_step_seconds", &[], "`step_secs`"),
    gauge(
        "finetune_step_part_seconds",
        &["part"],
        "`data_secs`, `forward_secs`, `backward_secs`, `exposed_secs`, `update_secs`, `save_secs`, `other_secs`, by `part`",
    ),
    gauge("finetune_rank_seconds", &["rank"], "`rank_secs`, by `rank`; only with several ranks"),
    gauge("finetune_peak_memory_bytes", &[], "`peak_bytes`"),
    gauge("finetune_mfu_ratio", &[], "`mfu`, where the peak of the devices is known"),
    gauge("finetune_hfu_ratio", &[], "`hfu`, likewise"),
    gauge(
        "finetune_objective",
        &["metric"],
        "`objective`, by `metric`; of objectives with metrics of their own",
    ),
    gauge("finetune_expert_load_ratio", &["expert"], "`expert_load`, by `expert`; of models with experts"),
    counter("finetune_steps_total", "steps that this process took"),
    counter("finetune_skipped_steps_total", "lines with `skipped`: steps that diverged and updated nothing"),
    gauge("finetune_rolled_back_to_step", &[], "`back_to` of the last line with `skipped`"),
    gauge("finetune_eval_step", &[], "`step` of the last evaluation"),
    gauge("finetune_eval_loss_nats", &[], "`eval_loss`"),
    gauge("finetune_eval_perplexity", &[], "`eval_perplexity`"),
    gauge("finetune_eval_tokens", &[], "`eval_tokens`"),
    gauge("finetune_eval_token_accuracy_ratio", &[], "`eval_token_accuracy`"),
    gauge("finetune_eval_exact_match_ratio", &[], "`eval_exact_match`"),
    gauge(
        "finetune_eval_objective",
        &["metric"],
        "`eval_objective`, by `metric`; of objectives with metrics of their own",
    ),
];

/// The labels that identify a run.
#[derive(Debug, Clone, Default)]
pub struct RunLabels {
    /// The name of its output folder.
    pub run: String,
    /// The model that it trains.
    pub model: String,
}

/// The figures, and the server that shows them.
pub struct MetricsEndpoint {
    server: PageServer,
    figures: RunFigures,
}

/// The figures as they are encoded.
struct RunFigures {
    registry: Registry,
    gauges: BTreeMap<&'static str, GaugeVec>,
    counters: BTreeMap<&'static str, CounterVec>,
    total: u64,
    /// The steps done when the process began, and the time of its start.
    begun: (u64, Instant),
}

impl MetricsEndpoint {
    /// Serves the figures of a run on `server`, at first only those of `labels`.
    ///
    /// # Errors
    /// An internal error: the table of names is malformed.
    pub fn new(server: PageServer, labels: &RunLabels) -> Result<Self> {
        let endpoint = MetricsEndpoint { server, figures: RunFigures::new(labels)? };
        endpoint.show()?;
        Ok(endpoint)
    }

    fn show(&self) -> Result<()> {
        self.server.show(self.figures.page()?);
        Ok(())
    }
}

impl RunListener for MetricsEndpoint {
    fn what(&self) -> &'static str {
        "figures for Prometheus"
    }

    fn begin(&mut self, done: u64, total: u64) -> Result<()> {
        self.figures.begin(done, total)?;
        self.show()
    }

    fn step(&mut self, report: &StepReport) -> Result<()> {
        self.figures.step(report)?;
        self.show()
    }

    fn eval(&mut self, report: &EvalReport) -> Result<()> {
        self.figures.eval(report)?;
        self.show()
    }

    fn skipped(&mut self, step: &SkippedStep) -> Result<()> {
        self.figures.skipped(step)?;
        self.show()
    }
}

impl RunFigures {
    fn new(labels: &RunLabels) -> Result<Self> {
        let (registry, mut gauges, mut counters) = (Registry::new(), BTreeMap::new(), BTreeMap::new());
        for FamilySpec { name, kind, labels, help } in &FAMILIES {
            let options = Opts::new(*name, *help);
            // A vector even without labels: it is absent from the page until it has a value.
            match kind {
                FamilyKind::Gauge => {
                    let family = GaugeVec::new(options, labels).map_err(malformed)?;
                    registry.register(Box::new(family.clone())).map_err(malformed)?;
                    gauges.insert(*name, family);
                }
                FamilyKind::Counter => {
                    let family = CounterVec::new(options, labels).map_err(malformed)?;
                    registry.register(Box::new(family.clone())).map_err(malformed)?;
                    family.get_metric_with_label_values::<&str>(&[]).map_err(malformed)?;
                    counters.insert(*name, family);
                }
            }
        }
        let figures = RunFigures { registry, gauges, counters, total: 0, begun: (0, Instant::now()) };
        figures.set_of("finetune_run_info", &[&labels.run, &labels.model, env!("CARGO_PKG_VERSION")], 1.0)?;
        Ok(figures)
    }

    fn begin(&mut self, done: u64, total: u64) -> Result<()> {
        (self.total, self.begun) = (total, (done, Instant::now()));
        self.set("finetune_planned_steps", total as f64)
    }

    fn step(&mut self, report: &StepReport) -> Result<()> {
        // Every field by its name: a new one does not compile until it is served.
        let StepReport {
            step,
            epoch,
            loss,
            learning_rate,
            grad_norm,
            tokens,
            step_secs,
            tokens_per_sec,
            peak_bytes,
            data_secs,
            forward_secs,
            backward_secs,
            exposed_secs,
            update_secs,
            save_secs,
            other_secs,
            rank_secs,
            mfu,
            hfu,
            objective,
            expert_load,
        } = report;
        let parts = [
            ("data", data_secs),
            ("forward", forward_secs),
            ("backward", backward_secs),
            ("exposed", exposed_secs),
            ("update", update_secs),
            ("save", save_secs),
            ("other", other_secs),
        ];
        for (part, secs) in parts {
            self.set_of("finetune_step_part_seconds", &[part], *secs)?;
        }
        for (rank, secs) in rank_secs.iter().enumerate() {
            self.set_of("finetune_rank_seconds", &[&rank.to_string()], *secs)?;
        }
        for (name, value) in objective {
            self.set_of("finetune_objective", &[name], *value)?;
        }
        for (expert, load) in expert_load.iter().enumerate() {
            self.set_of("finetune_expert_load_ratio", &[&expert.to_string()], *load)?;
        }
        self.set("finetune_epochs", *epoch)?;
        self.set("finetune_loss_nats", *loss)?;
        self.set("finetune_learning_rate", *learning_rate)?;
        self.set("finetune_gradient_norm", *grad_norm)?;
        self.set("finetune_step_tokens", *tokens as f64)?;
        self.set("finetune_tokens_per_second", *tokens_per_sec)?;
        self.set("finetune_step_seconds", *step_secs)?;
        self.set("finetune_peak_memory_bytes", *peak_bytes as f64)?;
        self.set_if("finetune_mfu_ratio", *mfu)?;
        self.set_if("finetune_hfu_ratio", *hfu)?;
        self.add("finetune_tokens_total", *tokens as f64)?;
        self.add("finetune_steps_total", 1.0)?;
        self.done(*step)
    }

    fn eval(&mut self, report: &EvalReport) -> Result<()> {
        let EvalReport {
            step,
            eval_loss,
            eval_perplexity,
            eval_tokens,
            eval_token_accuracy,
            eval_exact_match,
            eval_objective,
            // Texts are no figures.
            eval_samples: _,
        } = report;
        self.set("finetune_eval_step", *step as f64)?;
        self.set("finetune_eval_loss_nats", *eval_loss)?;
        self.set_if("finetune_eval_perplexity", Some(*eval_perplexity).filter(|value| value.is_finite()))?;
        for (name, value) in eval_objective {
            self.set_of("finetune_eval_objective", &[name], *value)?;
        }
        self.set("finetune_eval_tokens", *eval_tokens as f64)?;
        self.set_if("finetune_eval_token_accuracy_ratio", *eval_token_accuracy)?;
        self.set_if("finetune_eval_exact_match_ratio", *eval_exact_match)
    }

    fn skipped(&mut self, step: &SkippedStep) -> Result<()> {
        self.add("finetune_skipped_steps_total", 1.0)?;
        self.set_if("finetune_rolled_back_to_step", step.back_to.map(|step| step as f64))?;
        self.done(step.step)
    }

    /// Sets the figures that follow from the number of the last step.
    fn done(&mut self, step: u64) -> Result<()> {
        let (first, since) = self.begun;
        let each = since.elapsed().as_secs_f64() / step.saturating_sub(first).max(1) as f64;
        self.set("finetune_eta_seconds", each * self.total.saturating_sub(step) as f64)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.set("finetune_last_step_timestamp_seconds", now.as_secs_f64())?;
        self.set("finetune_step", step as f64)
    }

    fn set(&self, name: &str, value: f64) -> Result<()> {
        self.set_of(name, &[], value)
    }

    fn set_if(&self, name: &str, value: Option<f64>) -> Result<()> {
        value.map_or(Ok(()), |value| self.set(name, value))
    }

    fn set_of(&self, name: &str, labels: &[&str], value: f64) -> Result<()> {
        let family = self.gauges.get(name).ok_or_else(|| malformed(name))?;
        if !value.is_finite() {
            // An old figure could be mistaken for this step's; removing an absent one fails, which
            // is fine.
            let _ = family.remove_label_values(labels);
            return Ok(());
        }
        family.get_metric_with_label_values(labels).map_err(malformed)?.set(value);
        Ok(())
    }

    fn add(&self, name: &str, value: f64) -> Result<()> {
        let family = self.counters.get(name).ok_or_else(|| malformed(name))?;
        family.get_metric_with_label_values::<&str>(&[]).map_err(malformed)?.inc_by(value);
        Ok(())
    }

    /// Returns all figures as text.
    fn page(&self) -> Result<String> {
        TextEncoder::new().encode_to_string(&self.registry.gather()).map_err(malformed)
    }
}

fn malformed(why: impl ToString) -> Error {
    Error::internal("the table of figures for Prometheus is malformed").because(why.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> RunFigures {
        RunFigures::new(&RunLabels { run: "out".into(), model: "a \"b\"".into() }).unwrap()
    }

    fn value(page: &str, name: &str) -> Option<f64> {
        let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map(|value| value.parse().unwrap())
    }

    /// The names of the figures on a page.
    fn names(page: &str) -> Vec<&str> {
        page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect()
    }

    #[test]
    fn what_has_not_happened_is_not_there() {
        let page = figures().page().unwrap();
        assert!(page.contains("finetune_run_info{model=\"a \\\"b\\\"\",run=\"out\",version="), "{page}");
        assert_eq!(value(&page, "finetune_skipped_steps_total"), Some(0.0));
        assert_eq!(
            names(&page),
            [
                "finetune_run_info",
                "finetune_skipped_steps_total",
                "finetune_steps_total",
                "finetune_tokens_total"
            ]
        );
    }

    #[test]
    fn a_figure_that_is_not_finite_is_not_served() {
        let mut figures = figures();
        let step = |tokens_per_sec| StepReport { step: 1, tokens_per_sec, ..StepReport::default() };
        let served = |figures: &RunFigures| value(&figures.page().unwrap(), "finetune_tokens_per_second");
        figures.step(&step(3.5)).unwrap();
        assert_eq!(served(&figures), Some(3.5));
        // The figure of the step before could be mistaken for this one's.
        figures.step(&step(f64::INFINITY)).unwrap();
        assert_eq!(served(&figures), None);
        figures.step(&step(2.5)).unwrap();
        assert_eq!(served(&figures), Some(2.5));
    }

    #[test]
    fn all_that_is_declared_is_served_to_the_digit() {
        let mut figures = figures();
        figures.begin(2, 10).unwrap();
        let step = |step| StepReport {
            step,
            loss: 0.1 + 0.2,
            learning_rate: 1e-17,
            tokens: 7,
            peak_bytes: 1 << 40,
            save_secs: 0.5,
            rank_secs: vec![0.25, 1.0 / 3.0],
            mfu: Some(0.4),
            hfu: Some(0.5),
            objective: BTreeMap::from([("accuracy".to_owned(), 0.75)]),
            expert_load: vec![1.25, 0.75],
            ..StepReport::default()
        };
        (3..=5).for_each(|number| figures.step(&step(number)).unwrap());
        let eval = EvalReport {
            eval_token_accuracy: Some(0.5),
            eval_exact_match: Some(0.0),
            eval_objective: BTreeMap::from([("rewards/margins".to_owned(), 0.25)]),
            ..EvalReport::new(5, 2.5, 9)
        };
        figures.eval(&eval).unwrap();
        figures.skipped(&SkippedStep { step: 6, skipped: "loss".into(), back_to: Some(4) }).unwrap();
        let page = figures.page().unwrap();
        let mut declared = FAMILIES.map(|family| family.name);
        declared.sort_unstable();
        assert_eq!(names(&page), declared);
        for (name, expected) in [
            ("finetune_step", 6.0),
            ("finetune_planned_steps", 10.0),
            ("finetune_loss_nats", 0.1 + 0.2),
            ("finetune_learning_rate", 1e-17),
            ("finetune_tokens_total", 21.0),
            ("finetune_steps_total", 3.0),
            ("finetune_skipped_steps_total", 1.0),
            ("finetune_rolled_back_to_step", 4.0),
            ("finetune_peak_memory_bytes", (1_u64 << 40) as f64),
            ("finetune_step_part_seconds{part=\"save\"}", 0.5),
            ("finetune_rank_seconds{rank=\"1\"}", 1.0 / 3.0),
            ("finetune_eval_perplexity", 2.5_f64.exp()),
            ("finetune_eval_exact_match_ratio", 0.0),
        ] {
            assert_eq!(value(&page, name), Some(expected), "{name}\n{page}");
        }
        assert!(value(&page, "finetune_eta_seconds").unwrap() > 0.0);
    }
}
