//! The data of the full-screen view: a curve of bounded length, the last steps, the best
//! evaluation.

use std::collections::VecDeque;
use std::time::Instant;

use crate::metrics::{EvalReport, StepReport};
use crate::printable;

/// Most points of a curve: more than a screen has columns.
const POINTS: usize = 1024;
/// Steps over which the view sums the parts of the time.
pub(super) const RECENT: usize = 20;

/// A curve over all steps of a run. When it has too many points, it replaces neighbours by their
/// mean.
#[derive(Debug, Clone)]
pub(super) struct LossCurve {
    points: Vec<(f64, f64)>,
    /// Steps in a point.
    stride: u64,
    /// The sums of the steps that are not a point yet; `count` is their number.
    open: (f64, f64),
    count: u64,
}

impl Default for LossCurve {
    fn default() -> Self {
        LossCurve { points: Vec::new(), stride: 1, open: (0.0, 0.0), count: 0 }
    }
}

impl LossCurve {
    pub(super) fn add(&mut self, step: u64, loss: f64) {
        self.open = (self.open.0 + step as f64, self.open.1 + loss);
        self.count += 1;
        if self.count < self.stride {
            return;
        }
        let count = self.count as f64;
        self.points.push((self.open.0 / count, self.open.1 / count));
        (self.open, self.count) = ((0.0, 0.0), 0);
        if self.points.len() >= POINTS {
            let mean = |pair: &[(f64, f64)]| {
                let count = pair.len() as f64;
                let sum = |of: fn(&(f64, f64)) -> f64| pair.iter().map(of).sum::<f64>() / count;
                (sum(|point| point.0), sum(|point| point.1))
            };
            self.points = self.points.chunks(2).map(mean).collect();
            self.stride *= 2;
        }
    }

    pub(super) fn points(&self) -> &[(f64, f64)] {
        &self.points
    }
}

/// The progress of a run.
#[derive(Debug, Clone)]
pub(super) struct ScreenFigures {
    pub(super) title: String,
    pub(super) first: u64,
    pub(super) total: u64,
    pub(super) started: Instant,
    pub(super) curve: LossCurve,
    pub(super) evals: Vec<(f64, f64)>,
    /// Step and loss of the best evaluation after training began, the first of equal ones.
    pub(super) best: Option<(u64, f64)>,
    pub(super) last: Option<StepReport>,
    pub(super) recent: VecDeque<StepReport>,
    pub(super) is_stopping: bool,
}

impl ScreenFigures {
    pub(super) fn new(title: &str) -> Self {
        ScreenFigures {
            title: printable(title).into_owned(),
            first: 0,
            total: 0,
            started: Instant::now(),
            curve: LossCurve::default(),
            evals: Vec::new(),
            best: None,
            last: None,
            recent: VecDeque::new(),
            is_stopping: false,
        }
    }

    pub(super) fn begin(&mut self, done: u64, total: u64) {
        (self.first, self.total, self.started) = (done, total, Instant::now());
    }

    pub(super) fn step(&mut self, report: &StepReport) {
        self.curve.add(report.step, report.loss);
        self.recent.push_back(report.clone());
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        self.last = Some(report.clone());
    }

    pub(super) fn eval(&mut self, report: &EvalReport) {
        self.evals.push((report.step as f64, report.eval_loss));
        let (step, loss) = (report.step, report.eval_loss);
        if step > 0 && loss.is_finite() && self.best.is_none_or(|(_, best)| loss < best) {
            self.best = Some((step, loss));
        }
        if self.evals.len() >= POINTS {
            let mut nth = 0;
            self.evals.retain(|_| {
                nth += 1;
                nth % 2 == 0
            });
        }
    }

    /// Returns the last step done.
    pub(super) fn done(&self) -> u64 {
        self.last.as_ref().map_or(self.first, |report| report.step)
    }

    /// Returns the seconds left after `passed` seconds; none before the first step.
    pub(super) fn secs_left(&self, passed: f64) -> Option<f64> {
        let (done, left) = (self.done() - self.first, self.total.saturating_sub(self.done()));
        (done > 0).then(|| passed / done as f64 * left as f64)
    }
}
