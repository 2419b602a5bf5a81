//! Progress of each rank of this process, updated at every phase, call and heartbeat. It
//! distinguishes working ranks from hung ones, and adds the state of the others to errors.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::{Call, Collective, Op, Phase};
use crate::locks::locked;

/// The watched ranks of this process.
#[derive(Debug, Default)]
pub struct ProgressBoard(Mutex<Vec<Arc<RankProgress>>>);

impl ProgressBoard {
    /// State of each rank, one line each.
    pub fn lines(&self) -> Vec<String> {
        self.ranks().iter().map(|rank| rank.to_string()).collect()
    }

    /// Ranks that have joined so far.
    pub(super) fn ranks(&self) -> Vec<Arc<RankProgress>> {
        locked(&self.0).clone()
    }

    pub(super) fn add(&self, rank: &Arc<RankProgress>) {
        locked(&self.0).push(Arc::clone(rank));
    }
}

/// Last activity of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RankActivity {
    pub(super) phase: Phase,
    /// Its last call, if it has made one.
    pub(super) call: Option<(Op, Call)>,
    /// True inside that call, while it waits for its peers.
    pub(super) waits: bool,
    /// Tokens of its current micro-batch.
    pub(super) tokens: u64,
    /// Tokens of the largest micro-batch that it has finished.
    pub(super) tokens_passed: u64,
    /// Completed phases, a bit each: many end between two looks.
    passed: u16,
}

impl RankActivity {
    /// Returns true if the rank has completed `phase` before.
    pub(super) fn has_passed(&self, phase: Phase) -> bool {
        self.passed & 1 << phase as u16 != 0
    }
}

/// Progress of one rank on the board.
#[derive(Debug)]
pub(super) struct RankProgress {
    rank: usize,
    /// Its communicator, for ending its peers' waits. Not kept alive: a rank without communicators
    /// has left.
    end: Weak<dyn Collective>,
    /// Number of updates.
    beats: AtomicU64,
    ended: AtomicBool,
    activity: Mutex<RankActivity>,
}

impl RankProgress {
    pub(super) fn new(end: &Arc<dyn Collective>) -> Arc<Self> {
        Arc::new(RankProgress {
            rank: end.rank(),
            end: Arc::downgrade(end),
            beats: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            activity: Mutex::new(RankActivity {
                phase: Phase::Meet,
                call: None,
                waits: false,
                tokens: 0,
                tokens_passed: 0,
                passed: 0,
            }),
        })
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// The rank's communicator, unless it has left.
    pub(super) fn end(&self) -> Option<Arc<dyn Collective>> {
        self.end.upgrade()
    }

    pub(super) fn activity(&self) -> RankActivity {
        *locked(&self.activity)
    }

    /// Number of updates so far.
    pub(super) fn beats(&self) -> u64 {
        self.beats.load(Ordering::Acquire)
    }

    /// Counts an update.
    pub(super) fn beat(&self) {
        self.beats.fetch_add(1, Ordering::Release);
    }

    pub(super) fn enter(&self, phase: Phase) {
        let mut activity = locked(&self.activity);
        activity.passed |= 1 << activity.phase as u16;
        activity.phase = phase;
        drop(activity);
        self.beat();
    }

    /// Starts a micro-batch of this many tokens.
    pub(super) fn expect_tokens(&self, tokens: usize) {
        let mut activity = locked(&self.activity);
        activity.tokens_passed = activity.tokens_passed.max(activity.tokens);
        activity.tokens = tokens as u64;
        drop(activity);
        self.beat();
    }

    /// Begins a call; without a name it continues the previous one.
    pub(super) fn begin_call(&self, call: Option<(Op, Call)>) {
        let mut activity = locked(&self.activity);
        activity.call = call.or(activity.call);
        activity.waits = true;
        drop(activity);
        self.beat();
    }

    pub(super) fn end_call(&self) {
        locked(&self.activity).waits = false;
        self.beat();
    }

    /// Records that its work has finished or failed.
    pub(super) fn end_work(&self) {
        self.ended.store(true, Ordering::Release);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire) || self.end.strong_count() == 0
    }
}

impl fmt::Display for RankProgress {
    /// Text of the state: `rank 0 waits in phase backward: all-reduce of gradients of block 3`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RankActivity { phase, call, waits, .. } = self.activity();
        let rank = self.rank;
        let phase = phase.name();
        let named = call.map(|(op, call)| format!("{op} of {call}"));
        match (self.has_ended(), waits, named) {
            (true, _, Some(call)) => {
                write!(f, "rank {rank} ended in phase {phase}; its last call was {call}")
            }
            (true, _, None) => write!(f, "rank {rank} ended in phase {phase}; it had made no call"),
            (_, true, Some(call)) => write!(f, "rank {rank} waits in phase {phase}: {call}"),
            (_, _, Some(call)) => write!(f, "rank {rank} is in phase {phase}; its last call was {call}"),
            (_, _, None) => write!(f, "rank {rank} is in phase {phase}; it has made no call"),
        }
    }
}
