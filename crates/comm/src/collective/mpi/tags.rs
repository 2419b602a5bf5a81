//! How a message reaches its rank: MPI delivers to processes, each of which holds as many ranks; the tag says the rest.
//!
//! A tag is a number made of the group, the sender's and the receiver's place in their processes, and whether the
//! message is a record or data. So groups need no communicators of their own, which MPI would make in a call that
//! blocks and for processes alone. MPI says how large tags may be; what does not fit is refused when a group is made.

use std::ffi::c_int;

use crate::error::{Error, Result};

/// What a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MessageKind {
    /// The call that a rank makes.
    Record,
    /// What the call moves.
    Data,
}

/// The ranks of the world by process: `process * ranks_here + place`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tags {
    /// Ranks in each process.
    pub(super) ranks_here: usize,
    /// The largest tag that MPI takes.
    pub(super) largest: c_int,
}

impl Tags {
    /// The process that holds `rank`.
    pub(super) fn process(self, rank: usize) -> usize {
        rank / self.ranks_here
    }

    /// The tag of what rank `from` sends to rank `to` in `group`, which [`Tags::check`] accepted.
    pub(super) fn tag(self, group: u64, load: MessageKind, from: usize, to: usize) -> c_int {
        let here = self.ranks_here as u64;
        let [from, to] = [from, to].map(|rank| rank as u64 % here);
        (((group * here + from) * here + to) * 2 + u64::from(load == MessageKind::Data)) as c_int
    }

    /// Refuses a group whose messages would need tags that MPI does not take.
    ///
    /// # Errors
    /// It is one group too many for so many ranks in each process.
    pub(super) fn check(self, group: u64) -> Result<()> {
        let here = self.ranks_here as u64;
        let needed = group.saturating_add(1).saturating_mul(here * here * 2) - 1;
        if needed <= u64::from(self.largest.unsigned_abs()) {
            return Ok(());
        }
        Err(Error::user(format!("cannot tell apart the messages of {here} ranks in each process"))
            .because(format!(
                "group {group} of the ranks needs tags up to {needed}; this MPI library accepts up to {}",
                self.largest
            ))
            .hint("start more processes with fewer `--ranks` in each"))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Between two processes, no two messages that are not for the same rank in the same call have one tag.
    #[test]
    fn tags_differ_by_group_load_sender_and_receiver_and_fit() {
        let tags = Tags { ranks_here: 3, largest: 5 * 3 * 3 * 2 - 1 };
        let mut seen = BTreeSet::new();
        for group in 0..5 {
            tags.check(group).unwrap();
            for (from, to) in (3..6).flat_map(|from| (9..12).map(move |to| (from, to))) {
                assert_eq!((tags.process(from), tags.process(to)), (1, 3));
                for load in [MessageKind::Record, MessageKind::Data] {
                    let tag = tags.tag(group, load, from, to);
                    assert!((0..=tags.largest).contains(&tag) && seen.insert(tag), "{tag}");
                }
            }
        }
        assert_eq!(seen.len(), 5 * 9 * 2);
        let error = tags.check(5).unwrap_err();
        assert_eq!(error.kind().exit_code(), 1);
        assert_eq!(
            error.causes(),
            ["group 5 of the ranks needs tags up to 107; this MPI library accepts up to 89"]
        );
    }

    /// The least that the standard grants has room for hsdp with 64 ranks in each process.
    #[test]
    fn the_smallest_limit_has_room_for_many_ranks() {
        let tags = Tags { ranks_here: 64, largest: 32_767 };
        (0..=3).for_each(|group| tags.check(group).unwrap());
        tags.check(4).unwrap_err();
        tags.check(u64::MAX).unwrap_err();
    }
}
