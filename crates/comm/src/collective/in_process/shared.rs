//! The lock around the [`WorldState`], sleeping and waking, and the end of all waits by a failure.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::injected_fault::{InjectedFault, InjectedFaultKind};
use super::pending_calls::{CallFingerprint, CallId, CallState, Payload, WaitCondition};
use super::state::{WaitingRank, WorldFailure, WorldState};
use crate::collective::{Op, Phase};
use crate::error::{Error, ErrorCategory, Result};
use crate::locks::locked;

/// Polls of the version before a rank sleeps, some tens of microseconds: enough for a peer with its
/// own core.
const SPINS: u32 = 1000;

/// State that the ranks of a world share.
#[derive(Debug)]
pub(super) struct SharedWorld {
    state: Mutex<WorldState>,
    /// Number of changes of the state, for spinning ranks.
    version: AtomicU64,
    /// Wakes each rank.
    wake: Vec<Condvar>,
    /// Wakes ranks that wait for `readers` to be 0 before they return a failure.
    unread: Condvar,
    timeout: Duration,
    faults: Vec<InjectedFault>,
    spins: u32,
}

impl SharedWorld {
    pub(super) fn new(size: usize, timeout: Duration, faults: Vec<InjectedFault>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        SharedWorld {
            state: Mutex::new(WorldState::new(size)),
            version: AtomicU64::new(0),
            wake: (0..size).map(|_| Condvar::new()).collect(),
            unread: Condvar::new(),
            timeout,
            faults,
            spins: if size <= cores { SPINS } else { 0 },
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, WorldState> {
        locked(&self.state)
    }

    /// Locks the state for a call of `rank`.
    ///
    /// # Errors
    /// The failure of the world, or a call of a rank that has left.
    pub(super) fn open(&self, rank: usize) -> Result<MutexGuard<'_, WorldState>> {
        let mut state = self.lock();
        state.driven(rank);
        if state.failure.is_some() {
            return Err(self.failed(state));
        }
        if state.ranks[rank].gone {
            return Err(Error::internal(format!("rank {rank} has left{}", state.in_phase(rank))));
        }
        Ok(state)
    }

    /// Posts `member`'s next call of `group`, which counts as `op` on `bytes` bytes of full data.
    pub(super) fn post(
        &self,
        (rank, group, member): (usize, usize, usize),
        (op, bytes): (Option<Op>, usize),
        print: CallFingerprint,
        payload: Payload,
    ) -> Result<CallId> {
        let mut state = self.open(rank)?;
        if let Some(op) = op {
            state.count(group, member, op, bytes, print.root == Some(member));
        }
        self.put_down(state, (group, member), print, payload)
    }

    /// Posts `rank`'s side of a message between two members of `group`, which counts in that group.
    pub(super) fn post_message(
        &self,
        (rank, group): (usize, usize),
        (from, to): (usize, usize),
        print: CallFingerprint,
        payload: Payload,
    ) -> Result<CallId> {
        let mut state = self.open(rank)?;
        let bytes = print.data.map_or(0, |(element, elements)| elements * element.bytes());
        let sends = print.op == Op::Send;
        state.count(group, if sends { from } else { to }, print.op, bytes, sends);
        let pair = state.pair(group, from, to);
        self.put_down(state, (pair, usize::from(!sends)), print, payload)
    }

    fn put_down(
        &self,
        mut state: MutexGuard<'_, WorldState>,
        (group, member): (usize, usize),
        print: CallFingerprint,
        payload: Payload,
    ) -> Result<CallId> {
        match state.post(group, member, print, payload) {
            Ok(call_id) => {
                self.changed(&state, call_id);
                Ok(call_id)
            }
            Err(failure) => {
                self.fail(&mut state, failure);
                Err(self.failed(state))
            }
        }
    }

    /// Records that `member` has reached `stage` of the call.
    pub(super) fn reach(&self, call_id: CallId, member: usize, stage: CallState) {
        let mut state = self.lock();
        state.entry(call_id).reach(member, stage);
        self.changed(&state, call_id);
    }

    /// Wakes the ranks whose condition is met after a change of the call.
    fn changed(&self, state: &WorldState, call_id: CallId) {
        self.version.fetch_add(1, Ordering::Release);
        for waiting in state.waiting.iter().filter(|waiting| waiting.call_id == call_id) {
            if state.missing(call_id, waiting.condition).next().is_none() {
                self.wake[waiting.rank].notify_all();
            }
        }
    }

    fn wake_all(&self) {
        self.version.fetch_add(1, Ordering::Release);
        self.wake.iter().for_each(Condvar::notify_all);
    }

    /// Returns with the lock when `condition` is met, even after a failure. So all ranks learn what
    /// they have agreed on (such as a NaN norm), and none reports only a failed peer.
    pub(super) fn wait(
        &self,
        rank: usize,
        call_id: CallId,
        condition: WaitCondition,
    ) -> Result<MutexGuard<'_, WorldState>> {
        let mut spins = self.spins;
        let mut deadline = None;
        let mut state = self.lock();
        loop {
            if state.missing(call_id, condition).next().is_none() {
                state.entry(call_id).end_wait(condition);
                return Ok(state);
            }
            if state.failure.is_some() {
                return Err(self.failed(state));
            }
            let gone = state.missing(call_id, condition).find(|rank| state.ranks[*rank].gone);
            if let Some(gone) = gone {
                let failure = state.left(gone, rank);
                self.fail(&mut state, failure);
            } else if spins > 0 {
                let version = self.version.load(Ordering::Relaxed);
                drop(state);
                spins = self.spin(version, spins);
                state = self.lock();
            } else {
                let deadline = *deadline.get_or_insert_with(|| Instant::now() + self.timeout);
                state = self.sleep(state, WaitingRank { rank, call_id, condition }, deadline);
            }
        }
    }

    /// Spins until the version changes; returns the remaining spins.
    fn spin(&self, version: u64, mut spins: u32) -> u32 {
        while spins > 0 && self.version.load(Ordering::Acquire) == version {
            std::hint::spin_loop();
            spins -= 1;
        }
        spins
    }

    /// Sleeps until woken; fails the world if no rank can wake it or the wait takes too long.
    fn sleep<'a>(
        &'a self,
        mut state: MutexGuard<'a, WorldState>,
        waiting: WaitingRank,
        deadline: Instant,
    ) -> MutexGuard<'a, WorldState> {
        state.waiting.push(waiting);
        let left = deadline.saturating_duration_since(Instant::now());
        if let Some(failure) = state.stuck() {
            self.fail(&mut state, failure);
        } else if left.is_zero() {
            let late = state.missing(waiting.call_id, waiting.condition).next().unwrap_or(waiting.rank);
            let failure = state.late(late, waiting.rank, self.timeout);
            self.fail(&mut state, failure);
        } else {
            let slept = self.wake[waiting.rank].wait_timeout(state, left);
            (state, _) = slept.unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(index) = state.waiting.iter().position(|other| *other == waiting) {
            state.waiting.swap_remove(index);
        }
        state
    }

    /// Records the failure if it is the first, and wakes all ranks.
    pub(super) fn fail(&self, state: &mut WorldState, failure: WorldFailure) {
        state.failure.get_or_insert(failure);
        self.wake_all();
    }

    /// Error of a failed world, after all reads of this rank's memory: no call starts one after a
    /// failure.
    fn failed<'a>(&'a self, mut state: MutexGuard<'a, WorldState>) -> Error {
        while state.readers > 0 {
            state = self.unread.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match &state.failure {
            Some(failure) => failure.error.clone(),
            None => Error::internal("no rank has failed"),
        }
    }

    /// Implements the method [`crate::collective::Collective::abort`].
    pub(super) fn abort(&self, rank: usize, why: &str) {
        let mut state = self.lock();
        if state.failure.is_none() && !state.ranks[rank].gone {
            let failure = state.aborted(rank, why);
            self.fail(&mut state, failure);
        }
    }

    /// Records that `rank` makes no more calls. It is a failure if another rank waits for it, or
    /// for a rank that only it could wake.
    pub(super) fn leave(&self, rank: usize) {
        let mut state = self.lock();
        state.ranks[rank].gone = true;
        let waits = |waiting: &&WaitingRank| {
            state.missing(waiting.call_id, waiting.condition).any(|late| late == rank)
        };
        let waiter = state.waiting.iter().find(waits).map(|waiting| waiting.rank);
        let failure = waiter.map(|waiter| state.left(rank, waiter)).or_else(|| state.stuck());
        match failure {
            Some(failure) => self.fail(&mut state, failure),
            // Spinning ranks check again.
            None => {
                self.version.fetch_add(1, Ordering::Release);
            }
        }
    }

    /// Implements the method [`crate::collective::Collective::enter`].
    pub(super) fn enter(&self, rank: usize, phase: Phase) -> Result<()> {
        let occurrence = self.open(rank)?.enter(rank, phase);
        let strikes = |fault: &&InjectedFault| {
            (fault.rank, fault.phase) == (rank, phase) && fault.strikes_at(occurrence)
        };
        let Some(fault) = self.faults.iter().find(strikes) else { return Ok(()) };
        match fault.kind {
            InjectedFaultKind::Error => {
                return Err(Error::new(ErrorCategory::Transient, format!("planted fault {fault}")));
            }
            InjectedFaultKind::Panic => panic!("planted fault {fault}"),
            InjectedFaultKind::Exit => {
                self.leave(rank);
                let what = format!("rank {rank} left in phase {}", phase.name());
                return Err(Error::internal(what).because(format!("planted fault {fault}")));
            }
            InjectedFaultKind::Device(failure) => failure.plan(),
            InjectedFaultKind::LateKernelFault => return Err(fault.late_kernel_fault()),
            kind => kind.hold_up(),
        }
        Ok(())
    }
}

/// Permission to read peers' memory, while it lives.
#[derive(Debug)]
pub(super) struct ReadGuard<'a>(&'a SharedWorld);

impl<'a> ReadGuard<'a> {
    /// Begins under the lock that showed the posted memory.
    ///
    /// # Errors
    /// The failure of the world, after which peers may have returned and write their memory.
    pub(super) fn start(shared: &'a SharedWorld, mut state: MutexGuard<'a, WorldState>) -> Result<Self> {
        if state.failure.is_some() {
            return Err(shared.failed(state));
        }
        state.readers += 1;
        Ok(ReadGuard(shared))
    }
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.readers -= 1;
        if state.readers == 0 && state.failure.is_some() {
            self.0.unread.notify_all();
        }
    }
}

/// Presence of a rank, which all its communicators share; after the last drop the rank has left.
#[derive(Debug)]
pub(super) struct RankHandle {
    pub(super) shared: Arc<SharedWorld>,
    pub(super) rank: usize,
}

impl Drop for RankHandle {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shared.abort(self.rank, "its thread panicked");
        }
        self.shared.leave(self.rank);
    }
}
