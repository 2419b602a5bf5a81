//! Addresses of messages: MPI delivers to processes, each of which holds as many ranks, and the tag
//! identifies the rank.
//!
//! A tag encodes the group, the sender's and the receiver's index in their processes, and whether
//! the message is a record or data. So groups need no MPI communicators, which MPI creates in a
//! blocking call and only for processes. MPI limits the size of tags; a group that exceeds it is
//! refused when it is created.

use std::ffi::c_int;

use crate::error::{Error, Result};

/// Kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MessageKind {
    /// Record of a rank's call.
    Record,
    /// Data of the call.
    Data,
}

/// Ranks of the world by process: `process * ranks_here + index`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tags {
    /// Ranks in each process.
    pub(super) ranks_here: usize,
    /// Largest tag that MPI accepts.
    pub(super) largest: c_int,
}

impl Tags {
    /// The process that holds `rank`.
    pub(super) fn process(self, rank: usize) -> usize {
        rank / self.ranks_here
    }

    /// Tag of messages from rank `from` to rank `to` in `group`, which [`Tags::check`] accepted.
    pub(super) fn tag(self, group: u64, load: MessageKind, from: usize, to: usize) -> c_int {
        let here = self.ranks_here as u64;
        let [from, to] = [from, to].map(|rank| rank as u64 % here);
        (((group * here + from) * here + to) * 2 + u64::from(load == MessageKind::Data)) as c_int
    }

    /// Refuses a group whose messages need tags that MPI does not accept.
    ///
    /// # Errors
    /// Too many groups for so many ranks in each process.
    pub(super) fn check(self, group: u64) -> Result<()> {
        let here = self.ranks_here as u64;
        let needed = group.saturating_add(1).saturating_mul(here * here * 2) - 1;
        if needed <= u64::from(self.largest.unsigned_abs()) {
            return Ok(());
        }
        Err(Error::user(format!("cannot give unique tags to the messages of {here} ranks in each process"))
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

    /// Between two processes, messages of different groups, kinds or ranks have different tags.
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

    /// The standard's minimum suffices for hsdp with 64 ranks in each process.
    #[test]
    fn the_smallest_limit_has_room_for_many_ranks() {
        let tags = Tags { ranks_here: 64, largest: 32_767 };
        (0..=3).for_each(|group| tags.check(group).unwrap());
        tags.check(4).unwrap_err();
        tags.check(u64::MAX).unwrap_err();
    }
}
