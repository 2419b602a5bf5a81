//! State of a world of ranks, behind one lock: groups and their open calls, each rank's phase and
//! last call, waits, and the first failure.

use std::collections::{BTreeMap, VecDeque};
use std::thread::ThreadId;
use std::time::Duration;

use super::pending_calls::{CallFingerprint, CallId, CallState, Payload, PendingCall, WaitCondition};
use crate::collective::{Op, Phase, Traffic};
use crate::error::{Error, ErrorCategory};
use crate::units;

/// The group of all ranks.
pub(super) const WORLD: usize = 0;

/// A group of ranks that call together.
#[derive(Debug)]
pub(super) struct GroupState {
    /// Their ranks in the world, ascending.
    pub(super) ranks: Vec<usize>,
    /// Calls and traffic of each member.
    calls: Vec<u64>,
    pub(super) traffic: Vec<Traffic>,
    /// Group of each pair of members that has exchanged messages, by sender and receiver; its calls
    /// are the messages.
    pairs: BTreeMap<(usize, usize), usize>,
    /// True for the group of such a pair.
    is_pair: bool,
    /// Number of the first call in `entries`.
    first: u64,
    entries: VecDeque<PendingCall>,
}

impl GroupState {
    fn new(ranks: Vec<usize>) -> Self {
        let size = ranks.len();
        GroupState {
            ranks,
            calls: vec![0; size],
            traffic: vec![Traffic::default(); size],
            pairs: BTreeMap::new(),
            is_pair: false,
            first: 0,
            entries: VecDeque::new(),
        }
    }
}

/// State of one rank.
#[derive(Debug, Default)]
pub(super) struct RankState {
    pub(super) phase: Option<Phase>,
    last: Option<(CallId, CallFingerprint)>,
    /// Traffic over all groups.
    pub(super) traffic: Traffic,
    /// Number of entries into each phase.
    entered: [u64; Phase::ALL.len()],
    /// True if it makes no more calls.
    pub(super) gone: bool,
    thread: Option<ThreadId>,
}

/// A sleeping rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WaitingRank {
    pub(super) rank: usize,
    pub(super) call_id: CallId,
    pub(super) condition: WaitCondition,
}

/// The first failure, which ends all groups.
#[derive(Debug, Clone)]
pub(super) struct WorldFailure {
    /// Rank that failed.
    pub(super) rank: usize,
    /// True if the rank reported it itself, so that it may return a more detailed error.
    pub(super) own: bool,
    /// Error for all other ranks.
    pub(super) error: Error,
}

#[derive(Debug)]
pub(super) struct WorldState {
    pub(super) groups: Vec<GroupState>,
    pub(super) ranks: Vec<RankState>,
    pub(super) waiting: Vec<WaitingRank>,
    /// Number of ranks that read others' memory now, outside the lock.
    pub(super) readers: usize,
    pub(super) failure: Option<WorldFailure>,
    /// True if a rank calls from several threads: then a waiting thread does not mean that its rank
    /// waits.
    threads_vary: bool,
}

impl WorldState {
    pub(super) fn new(size: usize) -> Self {
        WorldState {
            groups: vec![GroupState::new((0..size).collect())],
            ranks: (0..size).map(|_| RankState::default()).collect(),
            waiting: Vec::new(),
            readers: 0,
            failure: None,
            threads_vary: false,
        }
    }

    /// An open call, which stays until each member has left it. Only a member that has not left may
    /// access it.
    pub(super) fn entry(&mut self, call_id: CallId) -> &mut PendingCall {
        let group = &mut self.groups[call_id.group];
        &mut group.entries[(call_id.number - group.first) as usize]
    }

    /// Ranks in the world that have not met `condition`.
    pub(super) fn missing(&self, call_id: CallId, condition: WaitCondition) -> impl Iterator<Item = usize> {
        let group = &self.groups[call_id.group];
        let entry = &group.entries[(call_id.number - group.first) as usize];
        entry.missing(condition).map(|member| group.ranks[member])
    }

    /// Records the thread of `rank`'s calls.
    pub(super) fn driven(&mut self, rank: usize) {
        let here = std::thread::current().id();
        self.threads_vary |= *self.ranks[rank].thread.get_or_insert(here) != here;
    }

    /// Records `member`'s next call of `group`.
    ///
    /// # Errors
    /// A peer's call of the same number differs.
    pub(super) fn post(
        &mut self,
        group: usize,
        member: usize,
        print: CallFingerprint,
        payload: Payload,
    ) -> Result<CallId, WorldFailure> {
        let of = &mut self.groups[group];
        let (rank, size) = (of.ranks[member], of.ranks.len());
        let call_id = CallId { group, number: of.calls[member] };
        of.calls[member] += 1;
        let index = (call_id.number - of.first) as usize;
        if index == of.entries.len() {
            of.entries.push_back(PendingCall::new(size, member, print));
        }
        let entry = &mut of.entries[index];
        self.ranks[rank].last = Some((call_id, print));
        let (first, theirs) = entry.first;
        if !theirs.matches(&print) {
            let first = of.ranks[first];
            return Err(self.mismatch(call_id, (rank, print), (first, theirs)));
        }
        entry.payloads[member] = payload;
        entry.reach(member, CallState::Posted);
        let is_split = print.op == Op::Split;
        if is_split && self.entry(call_id).missing(WaitCondition::All(CallState::Posted)).next().is_none() {
            self.part(call_id);
        }
        Ok(call_id)
    }

    /// Creates the groups of a split that all members have posted.
    fn part(&mut self, call_id: CallId) {
        let mut colors: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (member, payload) in self.entry(call_id).payloads.iter().enumerate() {
            if let Payload::Color(color) = payload {
                colors.entry(*color).or_default().push(member);
            }
        }
        let mut places = vec![(0, 0); self.groups[call_id.group].ranks.len()];
        for members in colors.into_values() {
            let ranks = members.iter().map(|member| self.groups[call_id.group].ranks[*member]).collect();
            for (index, member) in members.into_iter().enumerate() {
                places[member] = (self.groups.len(), index);
            }
            self.groups.push(GroupState::new(ranks));
        }
        self.entry(call_id).places = places;
    }

    /// The group whose calls are the messages from member `from` of `group` to member `to`.
    pub(super) fn pair(&mut self, group: usize, from: usize, to: usize) -> usize {
        let (next, of) = (self.groups.len(), &mut self.groups[group]);
        let pair = *of.pairs.entry((from, to)).or_insert(next);
        if pair == next {
            let ranks = vec![of.ranks[from], of.ranks[to]];
            self.groups.push(GroupState { is_pair: true, ..GroupState::new(ranks) });
        }
        pair
    }

    /// Records that a member has left the call; a call that all have left is removed.
    pub(super) fn leave(&mut self, call_id: CallId) {
        self.entry(call_id).leavers += 1;
        let group = &mut self.groups[call_id.group];
        while group.entries.front().is_some_and(|entry| entry.leavers == group.ranks.len()) {
            group.entries.pop_front();
            group.first += 1;
        }
    }

    pub(super) fn count(&mut self, group: usize, member: usize, op: Op, bytes: usize, is_root: bool) {
        let of = &mut self.groups[group];
        let (rank, size) = (of.ranks[member], of.ranks.len());
        of.traffic[member].count(op, bytes, size, is_root);
        self.ranks[rank].traffic.count(op, bytes, size, is_root);
    }

    /// Records that `rank` enters `phase`, and returns the number of its entries.
    pub(super) fn enter(&mut self, rank: usize, phase: Phase) -> u64 {
        let rank = &mut self.ranks[rank];
        rank.phase = Some(phase);
        rank.entered[phase as usize] += 1;
        rank.entered[phase as usize]
    }

    /// Text of the phase: ` in phase backward`, or empty before the first phase.
    pub(super) fn in_phase(&self, rank: usize) -> String {
        self.ranks[rank].phase.map_or(String::new(), |phase| format!(" in phase {}", phase.name()))
    }

    /// Text of the group: ` of the group of ranks 0, 2`, ` from rank 0 to rank 2` for messages, or
    /// empty for the world.
    fn of_group(&self, group: usize) -> String {
        if group == WORLD {
            return String::new();
        }
        let GroupState { ranks, is_pair, .. } = &self.groups[group];
        if *is_pair {
            return format!(" from rank {} to rank {}", ranks[0], ranks[1]);
        }
        let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
        format!(" of the group of ranks {}", ranks.join(", "))
    }

    fn last_call(&self, rank: usize) -> String {
        match self.ranks[rank].last {
            Some((call_id, print)) => {
                format!(
                    "its last call was no {}{}, {print}",
                    call_id.number + 1,
                    self.of_group(call_id.group)
                )
            }
            None => "it had made no call".to_owned(),
        }
    }

    /// Failure that `rank` reports.
    pub(super) fn aborted(&self, rank: usize, why: &str) -> WorldFailure {
        let error =
            Error::new(ErrorCategory::Transient, format!("rank {rank} failed{}", self.in_phase(rank)))
                .because(why)
                .because(format!("rank {rank}: {}", self.last_call(rank)));
        WorldFailure { rank, own: true, error }
    }

    /// Own error of the failed `rank`, with its phase and last call.
    pub(super) fn around(&self, rank: usize, error: Error) -> Error {
        let what = format!("rank {rank} failed{}", self.in_phase(rank));
        error.during(what).because(format!("rank {rank}: {}", self.last_call(rank)))
    }

    /// Failure of `rank`, which left while `waiter` waits for it.
    pub(super) fn left(&self, rank: usize, waiter: usize) -> WorldFailure {
        let error = Error::new(ErrorCategory::Transient, format!("rank {rank} left{}", self.in_phase(rank)))
            .because(format!("rank {rank}: {}", self.last_call(rank)))
            .because(format!("rank {waiter} waits for it: {}", self.last_call(waiter)));
        WorldFailure { rank, own: false, error }
    }

    fn mismatch(
        &self,
        call_id: CallId,
        (rank, print): (usize, CallFingerprint),
        (first, theirs): (usize, CallFingerprint),
    ) -> WorldFailure {
        let (number, of) = (call_id.number + 1, self.of_group(call_id.group));
        let error = Error::internal(format!("ranks {first} and {rank} do not make the same call"))
            .because(format!("rank {rank} calls {print} as its call no {number}{of}"))
            .because(format!("rank {first} calls {theirs}"));
        WorldFailure { rank, own: false, error }
    }

    /// Failure of `rank`, for which `waiter` has waited too long: a record of all ranks.
    pub(super) fn late(&self, rank: usize, waiter: usize, timeout: Duration) -> WorldFailure {
        let waited = units::duration(timeout.as_secs_f64());
        let what = format!("rank {waiter} waited {waited} for rank {rank}{}", self.in_phase(rank));
        let error = self.record().fold(Error::new(ErrorCategory::Transient, what), Error::because);
        WorldFailure { rank, own: false, error }
    }

    /// Failure if every rank sleeps or has left, and none can wake another: their calls are of
    /// different groups.
    pub(super) fn stuck(&self) -> Option<WorldFailure> {
        let sleeps = |rank: usize| {
            let mut own = self.waiting.iter().filter(|waiting| waiting.rank == rank);
            own.any(|waiting| self.missing(waiting.call_id, waiting.condition).next().is_some())
        };
        let ends =
            !self.threads_vary && (0..self.ranks.len()).all(|rank| self.ranks[rank].gone || sleeps(rank));
        let rank = self.waiting.first().filter(|_| ends)?.rank;
        let error = Error::internal("the ranks wait for one another in different calls");
        Some(WorldFailure { rank, own: false, error: self.record().fold(error, Error::because) })
    }

    /// Last action and traffic of each rank.
    fn record(&self) -> impl Iterator<Item = String> {
        self.ranks.iter().enumerate().map(|(rank, status)| {
            let sent = units::bytes(status.traffic.total_bytes());
            let doing = match (status.gone, self.waiting.iter().any(|waiting| waiting.rank == rank)) {
                (true, _) => "left",
                (false, true) => "waits",
                (false, false) => "computes",
            };
            let (phase, last) = (self.in_phase(rank), self.last_call(rank));
            format!("rank {rank} {doing}{phase}, {sent} sent; {last}")
        })
    }
}
