//! Time of a rank by part of a step, from the phases that it enters, and the time inside
//! collectives. Every instant belongs to one part, so the parts sum to the wall time.
//!
//! It measures the rank's thread. A GPU runs in parallel: there a part is the time to launch its
//! kernels, and the wait for them counts in the part that reads a result, which is the update.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::Phase;
use crate::locks::locked;
use crate::runtime::clock;

/// Part of a run's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepPart {
    /// Reading of rows.
    Data,
    /// Forward through embedding and blocks; the head's loss with its gradient, in one computation.
    Forward,
    /// Backward through blocks and embedding, including recomputed forwards.
    Backward,
    /// Zeroing, norm and clipping of gradients, and the optimizer's update.
    Update,
    /// Checkpoints, while training waits for them.
    Save,
    /// Evaluation on held-out rows, outside of steps.
    Evaluation,
    /// All other time.
    Other,
}

/// Number of parts.
const PARTS: usize = 7;

impl StepPart {
    /// True if time inside collectives is counted separately in this part. A rank that waits for
    /// its peers' saves waits for storage, not for a link.
    fn has_exposed(self) -> bool {
        !matches!(self, StepPart::Save | StepPart::Evaluation | StepPart::Other)
    }
}

impl Phase {
    /// Part that the time of this phase counts in.
    pub fn part(self) -> StepPart {
        match self {
            Phase::Data => StepPart::Data,
            Phase::Forward | Phase::Loss => StepPart::Forward,
            Phase::Backward => StepPart::Backward,
            Phase::Norm | Phase::Update | Phase::AllGatherParams => StepPart::Update,
            Phase::Save => StepPart::Save,
            Phase::Evaluate => StepPart::Evaluation,
            Phase::Meet | Phase::Load | Phase::Report | Phase::Output => StepPart::Other,
        }
    }
}

/// Seconds by part.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepSecs {
    parts: [f64; PARTS],
    /// Seconds inside collectives during data, forward, backward and update: exposed communication.
    pub exposed: f64,
}

impl StepSecs {
    /// Seconds of `part`, without collectives if they are counted separately.
    pub fn of(&self, part: StepPart) -> f64 {
        self.parts[part as usize]
    }
}

/// Clock of a rank.
#[derive(Debug)]
pub(super) struct StepClock {
    /// Nanoseconds inside calls so far.
    in_calls: AtomicU64,
    lap: Mutex<Lap>,
}

#[derive(Debug)]
struct Lap {
    part: StepPart,
    /// Begin of the part, or time of the last reading.
    since: Duration,
    /// Nanoseconds inside calls at that time.
    in_calls: u64,
    secs: StepSecs,
}

impl Lap {
    fn count(&mut self, in_calls: u64) {
        let now = clock::now();
        let secs = (now - self.since).as_secs_f64();
        let exposed = if self.part.has_exposed() {
            Duration::from_nanos(in_calls - self.in_calls).as_secs_f64().min(secs)
        } else {
            0.0
        };
        self.secs.parts[self.part as usize] += secs - exposed;
        self.secs.exposed += exposed;
        (self.since, self.in_calls) = (now, in_calls);
    }
}

impl StepClock {
    pub(super) fn start() -> Self {
        let lap = Lap { part: StepPart::Other, since: clock::now(), in_calls: 0, secs: StepSecs::default() };
        StepClock { in_calls: AtomicU64::new(0), lap: Mutex::new(lap) }
    }

    pub(super) fn add_call(&self, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.in_calls.fetch_add(nanos, Ordering::Relaxed);
    }

    pub(super) fn in_calls(&self) -> Duration {
        Duration::from_nanos(self.in_calls.load(Ordering::Relaxed))
    }

    /// Counts the time from now on in `part`.
    pub(super) fn enter(&self, part: StepPart) {
        let mut lap = locked(&self.lap);
        lap.count(self.in_calls.load(Ordering::Relaxed));
        lap.part = part;
    }

    /// Seconds since the last call of this, or since the start.
    pub(super) fn lap(&self) -> StepSecs {
        let mut lap = locked(&self.lap);
        lap.count(self.in_calls.load(Ordering::Relaxed));
        std::mem::take(&mut lap.secs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts sum to the wall time, and time in calls is separate except in waits for storage.
    #[test]
    fn parts_add_up() {
        let clock = StepClock::start();
        let begin = locked(&clock.lap).since;
        let pause = Duration::from_millis(2);
        for part in [StepPart::Data, StepPart::Forward, StepPart::Save, StepPart::Forward] {
            clock.enter(part);
            std::thread::sleep(2 * pause);
            clock.add_call(pause);
        }
        let secs = clock.lap();
        let wall = (locked(&clock.lap).since - begin).as_secs_f64();
        let sum = secs.parts.iter().sum::<f64>() + secs.exposed;
        assert!((sum - wall).abs() < 1e-9, "{sum} of {wall}");
        assert!((secs.exposed - 3.0 * pause.as_secs_f64()).abs() < 1e-9, "{secs:?}");
        assert!(secs.of(StepPart::Save) >= 2.0 * pause.as_secs_f64(), "{secs:?}");
        assert!(secs.of(StepPart::Forward) >= 2.0 * pause.as_secs_f64(), "{secs:?}");
        assert_eq!(secs.of(StepPart::Backward), 0.0);
        let again = clock.lap();
        assert_eq!((again.of(StepPart::Data), again.exposed), (0.0, 0.0), "each is told once");
    }
}
