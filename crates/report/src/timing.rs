//! The measured time of a step, beside the predicted one.

use std::fmt;

/// The time of a step, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepTiming {
    /// Predicted by a model of the step, at speeds measured on this machine.
    pub predicted: f64,
    /// Measured by the clock: the median over [`StepTiming::steps`].
    pub measured: f64,
    /// Number of measured steps.
    pub steps: usize,
}

impl fmt::Display for StepTiming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StepTiming { predicted, measured, steps } = *self;
        let difference = 100.0 * (measured / predicted - 1.0);
        write!(
            f,
            "{predicted:.3} s a step predicted, {measured:.3} s measured (median of {steps}), difference {difference:+.1} %"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_as_memory_does() {
        let timing = StepTiming { predicted: 2.0, measured: 2.5, steps: 40 };
        assert_eq!(
            timing.to_string(),
            "2.000 s a step predicted, 2.500 s measured (median of 40), difference +25.0 %"
        );
    }
}
