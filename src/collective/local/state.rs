//! All that the ranks of a world know of one another, behind one lock: groups and their open calls, what each rank
//! does, who waits for what, and the first failure.

use std::collections::{BTreeMap, VecDeque};
use std::thread::ThreadId;
use std::time::Duration;

use super::calls::{Action, Entry, Fingerprint, Load, Need, Stage, Turn};
use crate::collective::{Op, Phase, Traffic};
use crate::error::{Error, Kind};
use crate::units;

/// The group of all ranks.
pub(super) const WORLD: usize = 0;

/// Ranks that call together.
#[derive(Debug)]
pub(super) struct Group {
    /// Their ranks in the world, ascending.
    pub(super) ranks: Vec<usize>,
    /// Of each member: calls made, and what they sent.
    calls: Vec<u64>,
    pub(super) traffic: Vec<Traffic>,
    /// Number of the first call in `entries`.
    first: u64,
    entries: VecDeque<Entry>,
}

impl Group {
    fn new(ranks: Vec<usize>) -> Self {
        let size = ranks.len();
        Group {
            ranks,
            calls: vec![0; size],
            traffic: vec![Traffic::default(); size],
            first: 0,
            entries: VecDeque::new(),
        }
    }
}

/// One rank.
#[derive(Debug, Default)]
pub(super) struct Rank {
    pub(super) phase: Option<Phase>,
    last: Option<(Turn, Fingerprint)>,
    /// Over all groups.
    pub(super) traffic: Traffic,
    /// How often it entered each phase.
    entered: [u64; Phase::ALL.len()],
    /// It makes no more calls.
    pub(super) gone: bool,
    thread: Option<ThreadId>,
}

/// A rank asleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) rank: usize,
    pub(super) turn: Turn,
    pub(super) need: Need,
}

/// The first failure; it ends all groups.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    /// Whose it is.
    pub(super) rank: usize,
    /// It said so itself, so there may be an error of its own that says more.
    pub(super) own: bool,
    /// What all other ranks get.
    pub(super) error: Error,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) groups: Vec<Group>,
    pub(super) ranks: Vec<Rank>,
    pub(super) waiting: Vec<Waiting>,
    /// Ranks that read others' memory at this moment, outside the lock.
    pub(super) readers: usize,
    pub(super) failure: Option<Failure>,
    /// Some rank calls from several threads: that one of them waits does not say that the rank does.
    threads_vary: bool,
}

impl State {
    pub(super) fn new(size: usize) -> Self {
        State {
            groups: vec![Group::new((0..size).collect())],
            ranks: (0..size).map(|_| Rank::default()).collect(),
            waiting: Vec::new(),
            readers: 0,
            failure: None,
            threads_vary: false,
        }
    }

    /// An open call; it stays until each member has left it, so a member that has not may index.
    pub(super) fn entry(&mut self, turn: Turn) -> &mut Entry {
        let group = &mut self.groups[turn.group];
        &mut group.entries[(turn.number - group.first) as usize]
    }

    /// Members that keep `need` from being met, by their ranks in the world.
    pub(super) fn missing(&self, turn: Turn, need: Need) -> impl Iterator<Item = usize> {
        let group = &self.groups[turn.group];
        let entry = &group.entries[(turn.number - group.first) as usize];
        entry.missing(need).map(|member| group.ranks[member])
    }

    /// Notes which thread makes `rank`'s calls.
    pub(super) fn driven(&mut self, rank: usize) {
        let here = std::thread::current().id();
        self.threads_vary |= *self.ranks[rank].thread.get_or_insert(here) != here;
    }

    /// Puts down `member`'s next call of `group`.
    ///
    /// # Errors
    /// When a peer's call of the same number is another one.
    pub(super) fn post(
        &mut self,
        group: usize,
        member: usize,
        print: Fingerprint,
        load: Load,
    ) -> Result<Turn, Failure> {
        let of = &mut self.groups[group];
        let (rank, size) = (of.ranks[member], of.ranks.len());
        let turn = Turn { group, number: of.calls[member] };
        of.calls[member] += 1;
        let place = (turn.number - of.first) as usize;
        if place == of.entries.len() {
            of.entries.push_back(Entry::new(size, member, print));
        }
        let entry = &mut of.entries[place];
        self.ranks[rank].last = Some((turn, print));
        let (first, theirs) = entry.first;
        if theirs != print {
            let first = of.ranks[first];
            return Err(self.mismatch(turn, (rank, print), (first, theirs)));
        }
        entry.loads[member] = load;
        entry.reached[member] = Stage::Posted;
        let is_split = print.action == Action::Split;
        if is_split && self.entry(turn).missing(Need::All(Stage::Posted)).next().is_none() {
            self.part(turn);
        }
        Ok(turn)
    }

    /// Makes the groups of a split that all members have posted.
    fn part(&mut self, turn: Turn) {
        let mut colors: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (member, load) in self.entry(turn).loads.iter().enumerate() {
            if let Load::Color(color) = load {
                colors.entry(*color).or_default().push(member);
            }
        }
        let mut places = vec![(0, 0); self.groups[turn.group].ranks.len()];
        for members in colors.into_values() {
            let ranks = members.iter().map(|member| self.groups[turn.group].ranks[*member]).collect();
            for (place, member) in members.into_iter().enumerate() {
                places[member] = (self.groups.len(), place);
            }
            self.groups.push(Group::new(ranks));
        }
        self.entry(turn).places = places;
    }

    /// A member needs the call no more; a call that all have left is forgotten.
    pub(super) fn leave(&mut self, turn: Turn) {
        self.entry(turn).leavers += 1;
        let group = &mut self.groups[turn.group];
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

    /// `rank` enters `phase`, for the returned time.
    pub(super) fn enter(&mut self, rank: usize, phase: Phase) -> u64 {
        let rank = &mut self.ranks[rank];
        rank.phase = Some(phase);
        rank.entered[phase as usize] += 1;
        rank.entered[phase as usize]
    }

    /// ` in phase backward`, or nothing before the first phase.
    pub(super) fn in_phase(&self, rank: usize) -> String {
        self.ranks[rank].phase.map_or(String::new(), |phase| format!(" in phase {}", phase.name()))
    }

    /// ` of the group of ranks 0, 2`, or nothing for the world.
    fn of_group(&self, group: usize) -> String {
        if group == WORLD {
            return String::new();
        }
        let ranks: Vec<String> = self.groups[group].ranks.iter().map(usize::to_string).collect();
        format!(" of the group of ranks {}", ranks.join(", "))
    }

    fn last_call(&self, rank: usize) -> String {
        match self.ranks[rank].last {
            Some((turn, print)) => {
                format!("its last call was no {}{}, {print}", turn.number + 1, self.of_group(turn.group))
            }
            None => "it had made no call".to_owned(),
        }
    }

    /// `rank` says that it failed.
    pub(super) fn aborted(&self, rank: usize, why: &str) -> Failure {
        let error = Error::new(Kind::Transient, format!("rank {rank} failed{}", self.in_phase(rank)))
            .because(why)
            .because(format!("rank {rank}: {}", self.last_call(rank)));
        Failure { rank, own: true, error }
    }

    /// The own error of `rank`, which failed, with its place around it.
    pub(super) fn around(&self, rank: usize, error: Error) -> Error {
        let what = format!("rank {rank} failed{}", self.in_phase(rank));
        error.during(what).because(format!("rank {rank}: {}", self.last_call(rank)))
    }

    /// `rank` is gone while `waiter` waits for it.
    pub(super) fn left(&self, rank: usize, waiter: usize) -> Failure {
        let error = Error::new(Kind::Transient, format!("rank {rank} left{}", self.in_phase(rank)))
            .because(format!("rank {rank}: {}", self.last_call(rank)))
            .because(format!("rank {waiter} waits for it: {}", self.last_call(waiter)));
        Failure { rank, own: false, error }
    }

    fn mismatch(
        &self,
        turn: Turn,
        (rank, print): (usize, Fingerprint),
        (first, theirs): (usize, Fingerprint),
    ) -> Failure {
        let (number, of) = (turn.number + 1, self.of_group(turn.group));
        let error = Error::internal(format!("ranks {first} and {rank} do not make the same call"))
            .because(format!("rank {rank} calls {print} as its call no {number}{of}"))
            .because(format!("rank {first} calls {theirs}"));
        Failure { rank, own: false, error }
    }

    /// `waiter` gives up on `rank`: the flight record.
    pub(super) fn late(&self, rank: usize, waiter: usize, timeout: Duration) -> Failure {
        let waited = units::duration(timeout.as_secs_f64());
        let what = format!("rank {waiter} waited {waited} for rank {rank}{}", self.in_phase(rank));
        let error = self.record().fold(Error::new(Kind::Transient, what), Error::because);
        Failure { rank, own: false, error }
    }

    /// Every rank sleeps or is gone, and none can wake another: their calls are of different groups.
    pub(super) fn stuck(&self) -> Option<Failure> {
        let sleeps = |rank: usize| {
            let mut own = self.waiting.iter().filter(|waiting| waiting.rank == rank);
            own.any(|waiting| self.missing(waiting.turn, waiting.need).next().is_some())
        };
        let ends =
            !self.threads_vary && (0..self.ranks.len()).all(|rank| self.ranks[rank].gone || sleeps(rank));
        let rank = self.waiting.first().filter(|_| ends)?.rank;
        let error = Error::internal("the ranks wait for one another in different calls");
        Some(Failure { rank, own: false, error: self.record().fold(error, Error::because) })
    }

    /// What each rank did last, and how much it sent.
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
