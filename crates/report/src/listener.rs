//! Whoever follows a run beside its own record: TensorBoard, a metrics endpoint, alarms.
//!
//! A listener gets every entry of `metrics.jsonl` in the moment that it is written, so that all of them tell the same
//! numbers. None of them can end a run: one that fails is named in one warning and hears no more.

use super::metrics::{EvalReport, MetricsEntry, SkippedStep, StepReport};
use crate::error::{Error, Result};

/// Follows a training run.
pub trait RunListener {
    /// What is lost when it fails, as in "no TensorBoard events".
    fn what(&self) -> &'static str;

    /// `done` steps of `total` are behind; the next is about to begin.
    ///
    /// # Errors
    /// It cannot go on.
    fn begin(&mut self, _done: u64, _total: u64) -> Result<()> {
        Ok(())
    }

    /// A step was taken.
    ///
    /// # Errors
    /// It cannot go on.
    fn step(&mut self, report: &StepReport) -> Result<()>;

    /// The model was evaluated on held-out rows.
    ///
    /// # Errors
    /// It cannot go on.
    fn eval(&mut self, _report: &EvalReport) -> Result<()> {
        Ok(())
    }

    /// A step diverged and updated nothing.
    ///
    /// # Errors
    /// It cannot go on.
    fn skipped(&mut self, _step: &SkippedStep) -> Result<()> {
        Ok(())
    }

    /// Something other than a step begins, which may take its time: an evaluation, a checkpoint, a roll-back.
    fn aside(&mut self) {}

    /// The run has ended in `error`.
    ///
    /// # Errors
    /// What it had to finish was not finished.
    fn failed(&mut self, _error: &Error) -> Result<()> {
        Ok(())
    }

    /// The steps are over, or a signal ended them.
    ///
    /// # Errors
    /// What it had to finish was not finished.
    fn end(&mut self) -> Result<()> {
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

    /// Adds those that there are.
    pub fn extend(&mut self, listeners: impl IntoIterator<Item = impl RunListener + 'static>) {
        listeners.into_iter().for_each(|listener| self.add(listener));
    }

    /// Tells all of them that the next step begins; a warning for each that failed.
    pub fn begin(&mut self, done: u64, total: u64) -> Vec<String> {
        self.each(|listener| listener.begin(done, total))
    }

    /// Hands `entry` to all of them; a warning for each that failed.
    pub fn hear(&mut self, entry: &MetricsEntry) -> Vec<String> {
        self.each(|listener| match entry {
            MetricsEntry::Step(report) => listener.step(report),
            MetricsEntry::Eval(report) => listener.eval(report),
            MetricsEntry::Skipped(step) => listener.skipped(step),
        })
    }

    /// Tells all of them that something other than a step begins.
    pub fn aside(&mut self) {
        self.0.iter_mut().for_each(|listener| listener.aside());
    }

    /// Tells all of them that the run has ended in `error`; a warning for each that failed.
    pub fn failed(&mut self, error: &Error) -> Vec<String> {
        self.each(|listener| listener.failed(error))
    }

    /// Tells all of them that the steps are over; a warning for each that failed.
    pub fn end(&mut self) -> Vec<String> {
        self.each(|listener| listener.end())
    }

    fn each(&mut self, mut tell: impl FnMut(&mut Box<dyn RunListener>) -> Result<()>) -> Vec<String> {
        let mut warnings = Vec::new();
        self.0.retain_mut(|listener| match tell(listener) {
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
