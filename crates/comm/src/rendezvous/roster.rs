//! Processes that have joined rank 0: every rank once, with the same world size, binary, plan, data
//! and model.

use std::time::Duration;

use super::message::{JoinRequest, Peer, Rejection, printable};
use crate::units;

/// Maximum number of causes of a rejection, and bytes of each, so that it fits a message.
const MAX_CAUSES: usize = 16;
const MAX_CAUSE: usize = 1 << 10;
/// Maximum number of ranges of ranks in one cause.
const MAX_RANGES: usize = 16;
/// Displayed characters of a digest.
const DIGEST_CHARS: usize = 12;

/// A conflict that waiting cannot resolve, most severe first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Conflict {
    WorldSize,
    OutOfRange,
    Duplicate,
    Digest,
}

/// The joined processes; the first is rank 0's own.
pub(super) struct Roster {
    joined: Vec<JoinRequest>,
    conflicts: Vec<(Conflict, String)>,
}

/// Text of a process: `rank 3 on b`, or `ranks 8-15 on b`.
pub(super) fn named(peer: &Peer) -> String {
    match peer.ranks_here {
        0 | 1 => format!("rank {} on {}", peer.rank, peer.host),
        n => format!("ranks {}-{} on {}", peer.rank, peer.rank.saturating_add(n - 1), peer.host),
    }
}

impl Roster {
    pub(super) fn new(own: JoinRequest) -> Self {
        Roster { joined: vec![own], conflicts: Vec::new() }
    }

    /// Returns true if a conflict exists that waiting cannot resolve.
    pub(super) fn has_conflicts(&self) -> bool {
        !self.conflicts.is_empty()
    }

    /// Index of the joined process that shares a rank with `peer`.
    pub(super) fn overlapping(&self, peer: &Peer) -> Option<usize> {
        let end = |peer: &Peer| peer.rank + peer.ranks_here;
        self.joined.iter().position(|other| peer.rank < end(&other.peer) && other.peer.rank < end(peer))
    }

    /// Removes a process that is gone.
    pub(super) fn remove(&mut self, index: usize) {
        self.joined.remove(index);
    }

    /// Records that `request` has a rank of process `other` of the roster.
    pub(super) fn add_duplicate(&mut self, request: &JoinRequest, other: usize) {
        let first = &self.joined[other].peer;
        let rank = first.rank.max(request.peer.rank);
        let text = format!("rank {rank} joined twice: {}, and {}", named(first), named(&request.peer));
        self.conflicts.push((Conflict::Duplicate, text));
    }

    /// Adds a process; false if its ranks are outside the world. A process inside counts as joined,
    /// even in conflict.
    pub(super) fn add(&mut self, request: JoinRequest) -> bool {
        let own = &self.joined[0];
        let world = own.world_size;
        if request.world_size != world {
            let text = format!(
                "{} was started with world size {world}, {} with {}",
                named(&own.peer),
                named(&request.peer),
                request.world_size
            );
            self.conflicts.push((Conflict::WorldSize, text));
            return false;
        }
        let end = request.peer.rank + request.peer.ranks_here;
        if end > world {
            let text = format!("{} joined; accepted: ranks 0 to {}", named(&request.peer), world - 1);
            self.conflicts.push((Conflict::OutOfRange, text));
            return false;
        }
        let names = own.digests.keys().chain(request.digests.keys());
        let mut differing: Vec<&String> =
            names.filter(|name| own.digests.get(*name) != request.digests.get(*name)).collect();
        differing.sort();
        differing.dedup();
        for name in differing {
            let of = |request: &JoinRequest| match request.digests.get(name) {
                Some(digest) => format!(
                    "{}: {name} {}",
                    named(&request.peer),
                    digest.chars().take(DIGEST_CHARS).collect::<String>()
                ),
                None => format!("{}: no {name}", named(&request.peer)),
            };
            self.conflicts.push((Conflict::Digest, format!("{}, {}", of(own), of(&request))));
        }
        self.joined.push(request);
        true
    }

    /// Returns true if every rank has joined.
    pub(super) fn is_complete(&self) -> bool {
        let here: usize = self.joined.iter().map(|request| request.peer.ranks_here).sum();
        here == self.joined[0].world_size
    }

    /// Returns true if missing ranks are the only reason that the run cannot start.
    pub(super) fn lacks_ranks_only(&self) -> bool {
        self.conflicts.is_empty() && !self.is_complete()
    }

    /// Joined processes in ascending order.
    pub(super) fn peers(&self) -> Vec<Peer> {
        let mut peers: Vec<Peer> = self.joined.iter().map(|request| request.peer.clone()).collect();
        peers.sort_by_key(|peer| peer.rank);
        peers
    }

    /// The rejection, if the rendezvous fails: a conflict, or ranks that did not join within
    /// `timeout`.
    pub(super) fn rejection(&self, timeout: Duration, refused: Option<String>) -> Option<Rejection> {
        if let Some((gravest, _)) = self.conflicts.iter().min_by_key(|(conflict, _)| *conflict) {
            let (what, hint) = match gravest {
                Conflict::WorldSize => (
                    "the processes were started with different world sizes",
                    "start all processes with the same number of ranks",
                ),
                Conflict::OutOfRange => {
                    ("a rank is outside the world", "start as many ranks as --world-size or WORLD_SIZE says")
                }
                Conflict::Duplicate => ("a rank joined twice", "give every process its own --rank or RANK"),
                Conflict::Digest => (
                    "the processes start different runs",
                    "start all processes with the same binary, recipe, data and model",
                ),
            };
            let causes =
                self.conflicts.iter().take(MAX_CAUSES).map(|(_, text)| printable(text, MAX_CAUSE)).collect();
            let what = format!("rendezvous failed: {what}");
            return Some(Rejection { users_fault: true, what, causes, hint: hint.to_owned() });
        }
        if self.is_complete() {
            return None;
        }
        let world = self.joined[0].world_size;
        let here: usize = self.joined.iter().map(|request| request.peer.ranks_here).sum();
        let joined: Vec<String> = self.peers().iter().take(MAX_RANGES).map(named).collect();
        let more = if self.joined.len() > MAX_RANGES { ", ..." } else { "" };
        let mut causes =
            vec![format!("missing: {}", self.missing()), format!("joined: {}{more}", joined.join(", "))];
        causes.extend(refused);
        Some(Rejection {
            users_fault: false,
            what: format!(
                "rendezvous failed: {here} of {world} ranks joined within {}",
                units::duration(timeout.as_secs_f64())
            ),
            causes: causes.iter().map(|text| printable(text, MAX_CAUSE)).collect(),
            hint:
                "see the output of the missing ranks, or wait longer, in seconds: `FINETUNE_RDZV_TIMEOUT=900`"
                    .to_owned(),
        })
    }

    /// Rejection of a process that comes after all ranks are taken.
    pub(super) fn too_late(&self, request: &JoinRequest) -> Rejection {
        let holder = self
            .overlapping(&request.peer)
            .map_or(String::new(), |other| format!(": {}", named(&self.joined[other].peer)));
        Rejection {
            users_fault: true,
            what: "rendezvous failed: the run has started without this process".to_owned(),
            causes: vec![format!("{} joined after its rank was taken{holder}", named(&request.peer))],
            hint: "give every process its own --rank or RANK".to_owned(),
        }
    }

    /// Text of the missing ranks: `rank 1`, `ranks 1, 4-7`.
    fn missing(&self) -> String {
        let mut next = 0;
        let mut gaps = Vec::new();
        let mut total = 0;
        let world = self.joined[0].world_size;
        let ends = self.peers().into_iter().map(|peer| (peer.rank, peer.rank + peer.ranks_here));
        for (start, end) in ends.chain([(world, world)]) {
            if start > next {
                total += start - next;
                gaps.push(if start - next == 1 {
                    format!("{next}")
                } else {
                    format!("{next}-{}", start - 1)
                });
            }
            next = next.max(end);
        }
        let more = if gaps.len() > MAX_RANGES { ", ..." } else { "" };
        gaps.truncate(MAX_RANGES);
        let noun = if total == 1 { "rank" } else { "ranks" };
        format!("{noun} {}{more}", gaps.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(rank: usize, ranks_here: usize, host: &str, plan: &str) -> JoinRequest {
        let digests =
            [("plan", plan), ("binary", "00")].map(|(name, digest)| (name.to_owned(), digest.to_owned()));
        let peer = Peer { rank, ranks_here, host: host.to_owned(), free_bytes: None };
        JoinRequest { peer, world_size: 8, digests: digests.into() }
    }

    fn rejection(roster: &Roster) -> String {
        let rejection = roster.rejection(Duration::from_secs(300), None).unwrap();
        crate::error::Error::from(rejection).to_string()
    }

    #[test]
    fn complete_when_every_rank_joined_once() {
        let mut roster = Roster::new(request(0, 2, "a", "1"));
        for (rank, ranks_here) in [(6, 2), (2, 3)] {
            assert!(roster.add(request(rank, ranks_here, "b", "1")) && !roster.is_complete());
        }
        let text = rejection(&roster);
        assert!(
            text.contains("7 of 8 ranks joined within 5 min 00 s") && text.contains("missing: rank 5"),
            "{text}"
        );
        assert!(text.contains("joined: ranks 0-1 on a, ranks 2-4 on b, ranks 6-7 on b"), "{text}");
        assert!(roster.add(request(5, 1, "c", "1")) && roster.is_complete());
        assert_eq!(roster.rejection(Duration::from_secs(300), None), None);
        assert_eq!(roster.peers().iter().map(|peer| peer.rank).collect::<Vec<_>>(), [0, 2, 5, 6]);
    }

    #[test]
    fn missing_ranks_are_listed_in_ranges() {
        let mut roster = Roster::new(request(0, 1, "a", "1"));
        assert!(roster.add(request(3, 1, "b", "1")));
        let text = crate::error::Error::from(
            roster.rejection(Duration::from_secs(1), Some("x".to_owned())).unwrap(),
        )
        .to_string();
        assert!(text.contains("missing: ranks 1-2, 4-7\n") && text.contains("caused by: x"), "{text}");
    }

    #[test]
    fn duplicates_overlap() {
        let mut roster = Roster::new(request(0, 2, "a", "1"));
        assert!(roster.add(request(4, 2, "b", "1")));
        for (rank, ranks_here, other) in
            [(1, 1, Some(0)), (2, 2, None), (3, 2, Some(1)), (5, 3, Some(1)), (6, 2, None)]
        {
            assert_eq!(roster.overlapping(&request(rank, ranks_here, "c", "1").peer), other, "{rank}");
        }
        roster.add_duplicate(&request(5, 3, "c", "1"), 1);
        let text = rejection(&roster);
        assert!(text.contains("rank 5 joined twice: ranks 4-5 on b, and ranks 5-7 on c"), "{text}");
    }

    #[test]
    fn differences_name_both_sides() {
        let mut roster = Roster::new(request(0, 1, "a", "12ab34cd56ef7890"));
        assert!(roster.add(request(3, 1, "b", "77fe")));
        let text = rejection(&roster);
        assert!(text.contains("rank 0 on a: plan 12ab34cd56ef, rank 3 on b: plan 77fe\n"), "{text}");
        assert!(!text.contains("binary 00"), "{text}");
        let mut other = request(4, 1, "c", "12ab34cd56ef7890");
        other.digests.remove("plan");
        assert!(roster.add(other));
        assert!(rejection(&roster).contains("rank 4 on c: no plan"));
    }

    #[test]
    fn places_outside_the_world_are_refused() {
        let mut roster = Roster::new(request(0, 1, "a", "1"));
        assert!(!roster.add(request(7, 2, "b", "1")) && !roster.add(request(8, 1, "c", "1")));
        let text = rejection(&roster);
        assert!(text.contains("ranks 7-8 on b joined; accepted: ranks 0 to 7"), "{text}");
        let mut roster = Roster::new(request(0, 1, "a", "1"));
        let other = JoinRequest { world_size: 4, ..request(1, 1, "b", "1") };
        assert!(!roster.add(other));
        assert!(rejection(&roster).contains("rank 0 on a was started with world size 8, rank 1 on b with 4"));
    }
}
