//! Where a rank's time goes: the seconds of each part of a step, by the phases that the rank enters, and the time inside
//! collectives among them. Every instant belongs to one part, so the parts add up to the wall time.
//!
//! What is measured is the time of the rank's thread. A GPU computes beside it: there a part is the time of starting its
//! kernels, and the wait for them shows where the host reads a result, which is the update.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::Phase;
use crate::rendezvous::locked;
use crate::runtime::clock;

/// What the time of a run goes into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepPart {
    /// Rows are taken.
    Data,
    /// Forward through embedding and blocks; the head's loss with its gradient, which are computed together.
    Forward,
    /// Backward through blocks and embedding, recomputed forwards included.
    Backward,
    /// Gradients are set to zero, measured and clipped, and the optimizer updates.
    Update,
    /// Checkpoints, as far as training waits for them.
    Save,
    /// Evaluation on held-out rows, which is no part of a step.
    Evaluation,
    /// All that is none of these.
    Other,
}

/// How many parts there are.
const PARTS: usize = 7;

impl StepPart {
    /// Whether time inside collectives is told apart from the rest of this part. A rank that waits for its peers' saving
    /// waits for storage, not for a link.
    fn has_exposed(self) -> bool {
        !matches!(self, StepPart::Save | StepPart::Evaluation | StepPart::Other)
    }
}

impl Phase {
    /// What the time of this phase counts as.
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
    /// Inside collectives while rows were taken, forward, backward and in the update: communication that nothing hid.
    pub exposed: f64,
}

impl StepSecs {
    /// Seconds of `part`, without those inside collectives where these are told apart.
    pub fn of(&self, part: StepPart) -> f64 {
        self.parts[part as usize]
    }
}

/// The clock of a rank.
#[derive(Debug)]
pub(super) struct StepClock {
    /// Nanoseconds inside calls so far.
    in_calls: AtomicU64,
    lap: Mutex<Lap>,
}

#[derive(Debug)]
struct Lap {
    part: StepPart,
    /// When the part began, or was read last.
    since: Duration,
    /// Nanoseconds inside calls at that moment.
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

    /// From now on time counts as `part`'s.
    pub(super) fn enter(&self, part: StepPart) {
        let mut lap = locked(&self.lap);
        lap.count(self.in_calls.load(Ordering::Relaxed));
        lap.part = part;
    }

    /// The seconds since the last call of this, or the start.
    pub(super) fn lap(&self) -> StepSecs {
        let mut lap = locked(&self.lap);
        lap.count(self.in_calls.load(Ordering::Relaxed));
        std::mem::take(&mut lap.secs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parts add up to the wall time, and what is inside calls is told apart but where storage is waited for.
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
