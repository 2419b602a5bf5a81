//! What each rank of this process is doing, as it says at every phase, every call and every heartbeat between: what tells a
//! rank that works from one that hangs, and what an error says of where the others are.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::{Call, Collective, Phase};
use crate::rendezvous::locked;

/// The ranks of this process that are watched.
#[derive(Debug, Default)]
pub struct ProgressBoard(Mutex<Vec<Arc<RankProgress>>>);

impl ProgressBoard {
    /// What each rank does, a line for each.
    pub fn lines(&self) -> Vec<String> {
        self.ranks().iter().map(|rank| rank.to_string()).collect()
    }

    /// The ranks that have joined so far.
    pub(super) fn ranks(&self) -> Vec<Arc<RankProgress>> {
        locked(&self.0).clone()
    }

    pub(super) fn add(&self, rank: &Arc<RankProgress>) {
        locked(&self.0).push(Arc::clone(rank));
    }
}

/// What a rank did last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RankActivity {
    pub(super) phase: Phase,
    /// Its last call, if it has made one.
    pub(super) call: Option<(&'static str, Call)>,
    /// It is inside of that call: what it waits for are its peers.
    pub(super) waits: bool,
    /// Tokens of the micro-batch that it computes.
    pub(super) tokens: u64,
    /// Those of the largest micro-batch so far that it is done with.
    pub(super) tokens_passed: u64,
    /// The phases that it has been through, a bit each: many are over sooner than anybody looks.
    passed: u16,
}

impl RankActivity {
    /// Whether the rank has been through `phase` before.
    pub(super) fn has_passed(&self, phase: Phase) -> bool {
        self.passed & 1 << phase as u16 != 0
    }
}

/// One rank's place on the board.
#[derive(Debug)]
pub(super) struct RankProgress {
    rank: usize,
    /// Its end, for whoever ends its peers' waits. Not kept alive: a rank whose ends are gone has left.
    end: Weak<dyn Collective>,
    /// Counts signs of life.
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

    /// The rank's end, unless it has left.
    pub(super) fn end(&self) -> Option<Arc<dyn Collective>> {
        self.end.upgrade()
    }

    pub(super) fn activity(&self) -> RankActivity {
        *locked(&self.activity)
    }

    /// Signs of life so far.
    pub(super) fn beats(&self) -> u64 {
        self.beats.load(Ordering::Acquire)
    }

    /// A sign of life.
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

    /// It computes a micro-batch of so many tokens from now on.
    pub(super) fn expect_tokens(&self, tokens: usize) {
        let mut activity = locked(&self.activity);
        activity.tokens_passed = activity.tokens_passed.max(activity.tokens);
        activity.tokens = tokens as u64;
        drop(activity);
        self.beat();
    }

    /// It calls; without a name it is the rest of the call before.
    pub(super) fn begin_call(&self, call: Option<(&'static str, Call)>) {
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

    /// Its work is done, or has failed.
    pub(super) fn end_work(&self) {
        self.ended.store(true, Ordering::Release);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire) || self.end.strong_count() == 0
    }
}

impl fmt::Display for RankProgress {
    /// `rank 0 waits in phase backward: all-reduce of gradients of block 3`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RankActivity { phase, call, waits, .. } = self.activity();
        let rank = self.rank;
        let phase = phase.name();
        let named = call.map(|(action, call)| format!("{action} of {call}"));
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
