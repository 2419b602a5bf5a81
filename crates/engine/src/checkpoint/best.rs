//! The best evaluation of a run. Checkpoints record it, and retention keeps its checkpoint.

use serde::{Deserialize, Serialize};

use crate::report::EvalReport;

/// The evaluation with the lowest loss so far, after the first step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BestEvaluation {
    /// The report of that evaluation. `checkpoint-<step>` holds its weights.
    pub report: EvalReport,
    /// Number of evaluations since then, none of them better.
    pub since: u64,
    /// The step of the last counted evaluation.
    pub evaluated: u64,
}

impl BestEvaluation {
    /// Returns whether a run with a patience of `patience` evaluations and the best evaluation
    /// `best` ends.
    pub fn is_out_of_patience(best: Option<&Self>, patience: Option<u64>) -> bool {
        best.zip(patience).is_some_and(|(best, patience)| best.since >= patience)
    }

    /// Counts the evaluation `report`, which replaces `best` if its loss is lower. Returns whether
    /// it did.
    pub fn count(best: &mut Option<Self>, report: &EvalReport) -> bool {
        let is_lower = |best: &Self| report.eval_loss < best.report.eval_loss;
        match best {
            // A resumed run may repeat an evaluation.
            Some(best) if best.evaluated >= report.step => false,
            // A NaN loss is never lower.
            Some(best) if !is_lower(best) => {
                best.since += 1;
                best.evaluated = report.step;
                false
            }
            _ => {
                *best = Some(BestEvaluation { report: report.clone(), since: 0, evaluated: report.step });
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_loss_is_the_best_and_the_first_of_equal_ones() {
        let mut best = None;
        let count = |best: &mut Option<BestEvaluation>, step, loss| {
            BestEvaluation::count(best, &EvalReport::new(step, loss, 10))
        };
        assert!(count(&mut best, 1, 3.0));
        assert!(!count(&mut best, 2, 3.0));
        assert!(!count(&mut best, 3, f64::NAN));
        assert_eq!(best.as_ref().map(|best| (best.report.step, best.since)), Some((1, 2)));
        assert!(count(&mut best, 4, 2.5));
        // Once more, after a resume.
        assert!(!count(&mut best, 4, 2.0));
        assert_eq!(best.map(|best| (best.report.step, best.since)), Some((4, 0)));
    }
}
