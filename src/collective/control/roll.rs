//! The roll call of rank 0: every rank once, one world size, one binary, plan, data and model.

use super::message::{Hello, Peer, Rejection};
use crate::units;

/// Causes that one rejection lists.
const MOST_CAUSES: usize = 16;
/// Ranges of ranks that one cause lists.
const MOST_RANGES: usize = 16;
/// Characters of a digest that are shown.
const SHOWN: usize = 12;

/// What cannot be mended by waiting, gravest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    WorldSize,
    OutOfRange,
    Twice,
    Digest,
}

/// Who has come. The first is rank 0's own process.
pub(super) struct Roll {
    came: Vec<Hello>,
    faults: Vec<(Fault, String)>,
}

/// `rank 3 on b`, or `ranks 8-15 on b`.
pub(super) fn named(peer: &Peer) -> String {
    match peer.ranks_here {
        0 | 1 => format!("rank {} on {}", peer.rank, peer.host),
        n => format!("ranks {}-{} on {}", peer.rank, peer.rank.saturating_add(n - 1), peer.host),
    }
}

impl Roll {
    pub(super) fn new(own: Hello) -> Self {
        Roll { came: vec![own], faults: Vec::new() }
    }

    /// Whether something cannot be mended by waiting.
    pub(super) fn has_faults(&self) -> bool {
        !self.faults.is_empty()
    }

    /// Who has come already and holds a rank that `peer` holds too.
    pub(super) fn twin_of(&self, peer: &Peer) -> Option<usize> {
        let end = |peer: &Peer| peer.rank + peer.ranks_here;
        self.came.iter().position(|other| peer.rank < end(&other.peer) && other.peer.rank < end(peer))
    }

    /// Strikes out a process that is gone.
    pub(super) fn strike(&mut self, index: usize) {
        self.came.remove(index);
    }

    /// Notes that `hello` comes with a rank that `came[twin]` holds.
    pub(super) fn refuse_twin(&mut self, hello: &Hello, twin: usize) {
        let first = &self.came[twin].peer;
        let rank = first.rank.max(hello.peer.rank);
        let text = format!("rank {rank} came twice: {}, and {}", named(first), named(&hello.peer));
        self.faults.push((Fault::Twice, text));
    }

    /// Adds a process; false if it has no place among the ranks. Whoever has a place counts as come, at fault or not.
    pub(super) fn add(&mut self, hello: Hello) -> bool {
        let own = &self.came[0];
        let world = own.world_size;
        if hello.world_size != world {
            let text = format!(
                "{} was started with world size {world}, {} with {}",
                named(&own.peer),
                named(&hello.peer),
                hello.world_size
            );
            self.faults.push((Fault::WorldSize, text));
            return false;
        }
        let end = hello.peer.rank + hello.peer.ranks_here;
        if end > world {
            let text = format!("{} came; accepted: ranks 0 to {}", named(&hello.peer), world - 1);
            self.faults.push((Fault::OutOfRange, text));
            return false;
        }
        let names = own.digests.keys().chain(hello.digests.keys());
        let mut differing: Vec<&String> =
            names.filter(|name| own.digests.get(*name) != hello.digests.get(*name)).collect();
        differing.sort();
        differing.dedup();
        for name in differing {
            let of = |hello: &Hello| match hello.digests.get(name) {
                Some(digest) => format!(
                    "{}: {name} {}",
                    named(&hello.peer),
                    digest.chars().take(SHOWN).collect::<String>()
                ),
                None => format!("{}: no {name}", named(&hello.peer)),
            };
            self.faults.push((Fault::Digest, format!("{}, {}", of(own), of(&hello))));
        }
        self.came.push(hello);
        true
    }

    /// Whether every rank has come.
    pub(super) fn is_complete(&self) -> bool {
        let here: usize = self.came.iter().map(|hello| hello.peer.ranks_here).sum();
        here == self.came[0].world_size
    }

    /// Those who came, ascending.
    pub(super) fn peers(&self) -> Vec<Peer> {
        let mut peers: Vec<Peer> = self.came.iter().map(|hello| hello.peer.clone()).collect();
        peers.sort_by_key(|peer| peer.rank);
        peers
    }

    /// Why the meeting fails, if it does: a fault, or ranks that did not come within `secs`.
    pub(super) fn verdict(&self, secs: f64, refused: Option<String>) -> Option<Rejection> {
        if let Some((gravest, _)) = self.faults.iter().min_by_key(|(fault, _)| *fault) {
            let (what, hint) = match gravest {
                Fault::WorldSize => (
                    "the processes were started with different world sizes",
                    "start all processes with the same number of ranks",
                ),
                Fault::OutOfRange => {
                    ("a rank is outside the world", "start as many ranks as --world-size or WORLD_SIZE says")
                }
                Fault::Twice => ("a rank came twice", "give every process its own --rank or RANK"),
                Fault::Digest => (
                    "the processes are not about to run the same",
                    "start all processes with the same binary, recipe, data and model",
                ),
            };
            let causes = self.faults.iter().take(MOST_CAUSES).map(|(_, text)| text.clone()).collect();
            let what = format!("cannot connect the ranks: {what}");
            return Some(Rejection { users_fault: true, what, causes, hint: hint.to_owned() });
        }
        if self.is_complete() {
            return None;
        }
        let world = self.came[0].world_size;
        let here: usize = self.came.iter().map(|hello| hello.peer.ranks_here).sum();
        let came: Vec<String> = self.peers().iter().take(MOST_RANGES).map(named).collect();
        let more = if self.came.len() > MOST_RANGES { ", ..." } else { "" };
        let mut causes =
            vec![format!("missing: {}", self.missing()), format!("came: {}{more}", came.join(", "))];
        causes.extend(refused);
        Some(Rejection {
            users_fault: false,
            what: format!(
                "cannot connect the ranks: {here} of {world} joined within {}",
                units::duration(secs)
            ),
            causes,
            hint: "look at what the missing ranks print, or wait longer: `FINETUNE_RDZV_TIMEOUT=900`"
                .to_owned(),
        })
    }

    /// What a process hears that comes when all places are taken.
    pub(super) fn late(&self, hello: &Hello) -> Rejection {
        let twin = self
            .twin_of(&hello.peer)
            .map_or(String::new(), |twin| format!(": {}", named(&self.came[twin].peer)));
        Rejection {
            users_fault: true,
            what: "the ranks have met without this process".to_owned(),
            causes: vec![format!("{} came when its place was taken{twin}", named(&hello.peer))],
            hint: "give every process its own --rank or RANK".to_owned(),
        }
    }

    /// `rank 1`, `ranks 1, 4-7`.
    fn missing(&self) -> String {
        let mut next = 0;
        let mut gaps = Vec::new();
        let mut total = 0;
        let world = self.came[0].world_size;
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
        let more = if gaps.len() > MOST_RANGES { ", ..." } else { "" };
        gaps.truncate(MOST_RANGES);
        let noun = if total == 1 { "rank" } else { "ranks" };
        format!("{noun} {}{more}", gaps.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(rank: usize, ranks_here: usize, host: &str, plan: &str) -> Hello {
        let digests =
            [("plan", plan), ("binary", "00")].map(|(name, digest)| (name.to_owned(), digest.to_owned()));
        let peer = Peer { rank, ranks_here, host: host.to_owned() };
        Hello { peer, world_size: 8, digests: digests.into() }
    }

    fn verdict(roll: &Roll) -> String {
        let rejection = roll.verdict(300.0, None).unwrap();
        crate::error::Error::from(rejection).to_string()
    }

    #[test]
    fn complete_when_every_rank_came_once() {
        let mut roll = Roll::new(hello(0, 2, "a", "1"));
        for (rank, ranks_here) in [(6, 2), (2, 3)] {
            assert!(roll.add(hello(rank, ranks_here, "b", "1")) && !roll.is_complete());
        }
        let text = verdict(&roll);
        assert!(text.contains("7 of 8 came within 5 min 00 s") && text.contains("missing: rank 5"), "{text}");
        assert!(text.contains("came: ranks 0-1 on a, ranks 2-4 on b, ranks 6-7 on b"), "{text}");
        assert!(roll.add(hello(5, 1, "c", "1")) && roll.is_complete());
        assert_eq!(roll.verdict(300.0, None), None);
        assert_eq!(roll.peers().iter().map(|peer| peer.rank).collect::<Vec<_>>(), [0, 2, 5, 6]);
    }

    #[test]
    fn missing_ranks_are_listed_in_ranges() {
        let mut roll = Roll::new(hello(0, 1, "a", "1"));
        assert!(roll.add(hello(3, 1, "b", "1")));
        let text = crate::error::Error::from(roll.verdict(1.0, Some("x".to_owned())).unwrap()).to_string();
        assert!(text.contains("missing: ranks 1-2, 4-7\n") && text.contains("caused by: x"), "{text}");
    }

    #[test]
    fn twins_overlap() {
        let mut roll = Roll::new(hello(0, 2, "a", "1"));
        assert!(roll.add(hello(4, 2, "b", "1")));
        for (rank, ranks_here, twin) in
            [(1, 1, Some(0)), (2, 2, None), (3, 2, Some(1)), (5, 3, Some(1)), (6, 2, None)]
        {
            assert_eq!(roll.twin_of(&hello(rank, ranks_here, "c", "1").peer), twin, "{rank}");
        }
        roll.refuse_twin(&hello(5, 3, "c", "1"), 1);
        let text = verdict(&roll);
        assert!(text.contains("rank 5 came twice: ranks 4-5 on b, and ranks 5-7 on c"), "{text}");
    }

    #[test]
    fn differences_name_both_sides() {
        let mut roll = Roll::new(hello(0, 1, "a", "12ab34cd56ef7890"));
        assert!(roll.add(hello(3, 1, "b", "77fe")));
        let text = verdict(&roll);
        assert!(text.contains("rank 0 on a: plan 12ab34cd56ef, rank 3 on b: plan 77fe\n"), "{text}");
        assert!(!text.contains("binary 00"), "{text}");
        let mut other = hello(4, 1, "c", "12ab34cd56ef7890");
        other.digests.remove("plan");
        assert!(roll.add(other));
        assert!(verdict(&roll).contains("rank 4 on c: no plan"));
    }

    #[test]
    fn places_outside_the_world_are_refused() {
        let mut roll = Roll::new(hello(0, 1, "a", "1"));
        assert!(!roll.add(hello(7, 2, "b", "1")) && !roll.add(hello(8, 1, "c", "1")));
        let text = verdict(&roll);
        assert!(text.contains("ranks 7-8 on b came; accepted: ranks 0 to 7"), "{text}");
        let mut roll = Roll::new(hello(0, 1, "a", "1"));
        let other = Hello { world_size: 4, ..hello(1, 1, "b", "1") };
        assert!(!roll.add(other));
        assert!(verdict(&roll).contains("rank 0 on a was started with world size 8, rank 1 on b with 4"));
    }
}
