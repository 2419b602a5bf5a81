//! A communicator that measures the time of communication. It also records its rank's progress, for
//! errors and hang detection.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use super::memory_marks::{HeldBytes, MemoryMarks};
use super::progress::{ProgressBoard, RankProgress};
use super::step_clock::{StepClock, StepPart, StepSecs};
use super::{Call, Collective, Op, Operation, Phase, Reduction, Ticket};
use candle_core::Device;

use crate::error::Result;
use crate::runtime::clock;
use crate::runtime::trace::{self, SpanInfo, SpanKind};

thread_local! {
    /// True if this thread is inside a call: a nested call of the backend is part of it.
    static IN_CALL: Cell<bool> = const { Cell::new(false) };
}

/// A communicator with a clock and the rank's progress. Groups split from it share both.
#[derive(Debug)]
pub struct TimedCollective {
    clock: Arc<StepClock>,
    memory: Arc<MemoryMarks>,
    progress: Arc<RankProgress>,
    inner: Arc<dyn Collective>,
}

impl TimedCollective {
    /// Wraps `inner` with a clock at 0.
    pub fn new(inner: Arc<dyn Collective>) -> Self {
        TimedCollective {
            clock: Arc::new(StepClock::start()),
            memory: Arc::default(),
            progress: RankProgress::new(&inner),
            inner,
        }
    }

    /// Wraps a rank of the world, whose progress is shown on `board`.
    pub fn watched(inner: Arc<dyn Collective>, board: &ProgressBoard) -> Self {
        let timed = TimedCollective::new(inner);
        board.add(&timed.progress);
        timed
    }

    /// Reader of the clock: the time inside calls (sending, summing, waiting for peers) and of each
    /// part of a step.
    pub fn clock(&self) -> CollectiveTimer {
        CollectiveTimer { clock: Arc::clone(&self.clock), memory: Arc::clone(&self.memory) }
    }

    /// Reader of the rank's phase.
    pub fn phases(&self) -> PhaseReader {
        PhaseReader(Arc::clone(&self.progress))
    }

    /// Guard whose drop ends the rank's work on the board.
    pub fn work_guard(&self) -> WorkGuard {
        WorkGuard(Arc::clone(&self.progress))
    }

    /// Makes a call, which may also send in the group `other`; without a name it continues the
    /// previous one.
    fn timed<R>(
        &self,
        named: Option<(Op, Call)>,
        other: Option<&dyn Collective>,
        call: impl FnOnce(&dyn Collective) -> R,
    ) -> R {
        let Some(_inside) = InCall::enter() else { return call(&*self.inner) };
        let sent = || self.inner.traffic().total_bytes() + other.map_or(0, |end| end.traffic().total_bytes());
        let mut span = trace::span(|| call_info(named)).map(|span| (span, sent()));
        let started = clock::now();
        self.progress.begin_call(named);
        let result = call(&*self.inner);
        self.progress.end_call();
        self.clock.add_call(clock::since(started));
        if let Some((span, before)) = &mut span {
            span.add_bytes(sent() - *before);
        }
        result
    }
}

/// Guard of a thread that is inside a call.
struct InCall;

impl InCall {
    /// None if the thread is inside a call already.
    fn enter() -> Option<Self> {
        // A second guard would end the outer call when it is dropped.
        if IN_CALL.replace(true) { None } else { Some(InCall) }
    }
}

impl Drop for InCall {
    fn drop(&mut self) {
        IN_CALL.set(false);
    }
}

/// Description of a call for a trace.
fn call_info(named: Option<(Op, Call)>) -> SpanInfo {
    let Some((op, call)) = named else { return SpanInfo::new(SpanKind::Collective, "wait for a call") };
    let info = SpanInfo::new(SpanKind::Collective, op.name()).detail(call.what);
    if call == Call::single(call.what) { info } else { info.index(call.index) }
}

/// Reader of the clock of a [`TimedCollective`].
#[derive(Debug, Clone)]
pub struct CollectiveTimer {
    clock: Arc<StepClock>,
    memory: Arc<MemoryMarks>,
}

impl CollectiveTimer {
    /// Time in calls so far.
    pub fn read(&self) -> Duration {
        self.clock.in_calls()
    }

    /// Seconds of each part since the last call of this.
    pub fn lap(&self) -> StepSecs {
        self.clock.lap()
    }

    /// Counts the time until the next phase in `part`.
    pub fn count_as(&self, part: StepPart) {
        self.clock.enter(part);
    }

    /// Starts to measure the memory of each phase, on `device` and the host.
    pub fn watch_memory(&self, device: &Device) {
        self.memory.watch(device);
    }

    /// The phases since then, with the known memory use of each.
    pub fn memory_by_phase(&self) -> Vec<(Phase, HeldBytes)> {
        self.memory.read()
    }
}

/// Reader of the phase of a [`TimedCollective`].
#[derive(Debug, Clone)]
pub struct PhaseReader(Arc<RankProgress>);

impl PhaseReader {
    /// The phase that was entered last; `Meet` before the first.
    pub fn read(&self) -> Phase {
        self.0.activity().phase
    }
}

/// Held while a rank works: its drop ends the watch over the rank.
#[derive(Debug)]
pub struct WorkGuard(Arc<RankProgress>);

impl Drop for WorkGuard {
    fn drop(&mut self) {
        self.0.end_work();
    }
}

impl Collective for TimedCollective {
    fn inner(&self) -> Option<&dyn Collective> {
        Some(&*self.inner)
    }

    fn call(&self, call: Call, operation: Operation<'_>) -> Result<Option<Ticket>> {
        let replicas = operation.reduction().and_then(Reduction::replicas);
        self.timed(Some((operation.op(), call)), replicas, |inner| inner.call(call, operation))
    }

    fn finish(&self, ticket: Ticket) -> Result<()> {
        self.timed(None, None, |inner| inner.finish(ticket))
    }

    fn open_reduction_stream(&self) -> Result<bool> {
        self.timed(None, None, |inner| inner.open_reduction_stream())
    }

    fn split(&self, color: usize) -> Result<Box<dyn Collective>> {
        let named = Some((Op::Split, Call::single("ranks")));
        Ok(Box::new(TimedCollective {
            clock: Arc::clone(&self.clock),
            memory: Arc::clone(&self.memory),
            progress: Arc::clone(&self.progress),
            inner: Arc::from(self.timed(named, None, |inner| inner.split(color))?),
        }))
    }

    fn enter(&self, phase: Phase) -> Result<()> {
        self.progress.enter(phase);
        self.clock.enter(phase.part());
        self.memory.enter(phase);
        trace::enter_phase(phase.name());
        self.inner.enter(phase)
    }

    fn heartbeat(&self) {
        self.progress.beat();
    }

    fn expect_tokens(&self, tokens: usize) {
        self.progress.expect_tokens(tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::SingleRank;

    /// Regression: the second of three nested calls was counted by itself, and so twice.
    #[test]
    fn a_call_within_a_call_ends_no_other() {
        let timed = TimedCollective::new(Arc::new(SingleRank));
        timed.timed(None, None, |_| {
            for _ in 0..3 {
                timed.timed(None, None, |_| assert!(IN_CALL.get()));
                assert!(IN_CALL.get(), "the call around it has ended");
            }
        });
        assert!(!IN_CALL.get(), "nothing ends the call");
    }
}
