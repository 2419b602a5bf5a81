//! Listeners of a run: TensorBoard, a metrics endpoint, alerts and more.
//!
//! A listener gets every entry of `metrics.jsonl` when it is written, so that all of them have the
//! same numbers. No listener can end a run: one that fails causes one warning and gets no more
//! events.

use super::metrics::{EvalReport, MetricsEntry, SkippedStep, StepReport};
use crate::error::{Error, Result};

/// The end of a run.
#[derive(Debug, Clone, Copy)]
pub enum RunEnd<'a> {
    /// It is complete.
    Finished,
    /// A signal stopped it.
    Stopped,
    /// It failed with this error.
    Failed(&'a Error),
}

/// Receives the events of a training run.
pub trait RunListener {
    /// Names the output that a failure loses, such as "TensorBoard events".
    fn what(&self) -> &'static str;

    /// Called before the next step, after `done` steps of `total`.
    ///
    /// # Errors
    /// The listener cannot go on.
    fn begin(&mut self, _done: u64, _total: u64) -> Result<()> {
        Ok(())
    }

    /// Called after a step.
    ///
    /// # Errors
    /// The listener cannot go on.
    fn step(&mut self, report: &StepReport) -> Result<()>;

    /// Called after an evaluation on held-out rows.
    ///
    /// # Errors
    /// The listener cannot go on.
    fn eval(&mut self, _report: &EvalReport) -> Result<()> {
        Ok(())
    }

    /// Called after a step that diverged and updated nothing.
    ///
    /// # Errors
    /// The listener cannot go on.
    fn skipped(&mut self, _step: &SkippedStep) -> Result<()> {
        Ok(())
    }

    /// Called before other work that may take long: an evaluation, a checkpoint, a roll-back.
    fn pause_step_timer(&mut self) {}

    /// Called at the end of the run. A listener that waits here calls `pulse` meanwhile, so that
    /// the run does not count as hung.
    ///
    /// # Errors
    /// The listener could not finish its work.
    fn end(&mut self, _end: RunEnd<'_>, _pulse: &dyn Fn()) -> Result<()> {
        Ok(())
    }
}

/// All listeners of a run.
#[derive(Default)]
pub struct RunListeners(Vec<Box<dyn RunListener>>);

impl RunListeners {
    /// Adds one more.
    pub fn add(&mut self, listener: impl RunListener + 'static) {
        self.0.push(Box::new(listener));
    }

    /// Adds the given listeners.
    pub fn extend(&mut self, listeners: impl IntoIterator<Item = impl RunListener + 'static>) {
        listeners.into_iter().for_each(|listener| self.add(listener));
    }

    /// Calls `begin` on all listeners; returns a warning for each that failed.
    pub fn begin(&mut self, done: u64, total: u64) -> Vec<String> {
        self.each(|listener| listener.begin(done, total))
    }

    /// Passes `entry` to all listeners; returns a warning for each that failed.
    pub fn hear(&mut self, entry: &MetricsEntry) -> Vec<String> {
        self.each(|listener| match entry {
            MetricsEntry::Step(report) => listener.step(report),
            MetricsEntry::Eval(report) => listener.eval(report),
            MetricsEntry::Skipped(step) => listener.skipped(step),
        })
    }

    /// Calls `pause_step_timer` on all listeners.
    pub fn pause_step_timer(&mut self) {
        self.0.iter_mut().for_each(|listener| listener.pause_step_timer());
    }

    /// Calls `end` on all listeners; returns a warning for each that failed.
    pub fn end(&mut self, end: RunEnd<'_>, pulse: &dyn Fn()) -> Vec<String> {
        self.each(|listener| listener.end(end, pulse))
    }

    fn each(&mut self, mut call: impl FnMut(&mut Box<dyn RunListener>) -> Result<()>) -> Vec<String> {
        let mut warnings = Vec::new();
        self.0.retain_mut(|listener| match call(listener) {
            Ok(()) => true,
            Err(error) => {
                warnings.push(format!("no more {}: {}", listener.what(), error.in_one_line()));
                false
            }
        });
        warnings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Second(std::rc::Rc<std::cell::Cell<u64>>);

    impl RunListener for Second {
        fn what(&self) -> &'static str {
            "counting"
        }

        fn step(&mut self, report: &StepReport) -> Result<()> {
            self.0.set(self.0.get() + 1);
            match report.step {
                2 => Err(Error::user("cannot count past one")),
                _ => Ok(()),
            }
        }
    }

    #[test]
    fn a_listener_that_fails_is_named_once_and_hears_no_more() {
        let heard = std::rc::Rc::default();
        let mut all = RunListeners::default();
        all.add(Second(std::rc::Rc::clone(&heard)));
        let entry = |step| MetricsEntry::Step(StepReport { step, ..StepReport::default() });
        assert_eq!(all.begin(0, 3), [""; 0]);
        assert_eq!(all.hear(&entry(1)), [""; 0]);
        assert_eq!(all.hear(&entry(2)), ["no more counting: cannot count past one"]);
        assert_eq!(all.hear(&entry(3)), [""; 0]);
        assert_eq!(heard.get(), 2);
    }
}
