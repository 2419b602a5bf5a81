//! The schedule that selects the steps of a run to trace, in the terms of PyTorch's profiler
//! schedule.

use crate::recipe::ProfileSection;

/// The tracing of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepTracing {
    /// The step is not traced.
    Off,
    /// The step is traced and discarded.
    Warmup,
    /// The step is traced and kept.
    Active,
}

/// Cycles of steps that wait, warm up and are active.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceSchedule {
    wait: u64,
    warmup: u64,
    active: u64,
    repeat: u64,
}

impl TraceSchedule {
    /// Returns the schedule of the recipe's section, or `None` if it traces no step.
    pub fn of(section: &ProfileSection) -> Option<Self> {
        let &ProfileSection { wait, warmup, active, repeat } = section;
        (active > 0).then_some(TraceSchedule { wait, warmup, active, repeat })
    }

    /// Returns the tracing of the step that follows `before` steps of this process.
    pub fn at(&self, before: u64) -> StepTracing {
        let quiet = self.wait.saturating_add(self.warmup);
        let cycle = quiet.saturating_add(self.active);
        if self.repeat > 0 && before / cycle >= self.repeat {
            return StepTracing::Off;
        }
        match before % cycle {
            position if position < self.wait => StepTracing::Off,
            position if position < quiet => StepTracing::Warmup,
            _ => StepTracing::Active,
        }
    }

    /// Returns the number of steps before the first one that is kept.
    pub(crate) fn first_active(&self) -> u64 {
        self.wait.saturating_add(self.warmup)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(wait: u64, warmup: u64, active: u64, repeat: u64) -> String {
        let schedule = TraceSchedule::of(&ProfileSection { wait, warmup, active, repeat }).expect("active");
        let letter = |step| match schedule.at(step) {
            StepTracing::Off => '.',
            StepTracing::Warmup => 'w',
            StepTracing::Active => 'A',
        };
        (0..12).map(letter).collect()
    }

    /// The same calls as `torch.profiler.schedule(wait=.., warmup=.., active=.., repeat=..)`.
    #[test]
    fn cycles_are_pytorchs() {
        assert_eq!(words(1, 1, 2, 1), ".wAA........");
        assert_eq!(words(1, 1, 2, 2), ".wAA.wAA....");
        assert_eq!(words(1, 1, 2, 0), ".wAA.wAA.wAA");
        assert_eq!(words(0, 0, 1, 1), "A...........");
        assert_eq!(words(0, 2, 1, 0), "wwAwwAwwAwwA");
        assert_eq!(words(u64::MAX, 1, 1, 1), "............");
        assert_eq!(TraceSchedule::of(&ProfileSection::default()), None);
    }
}
