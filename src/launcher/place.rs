//! Position of a process among those of a run, as flags and variables of its command.

use std::ffi::OsString;

use crate::collective::launch::Launch;
use crate::rendezvous::Master;

/// Flags for the position of a process, each with a value.
const FLAGS: [&str; 4] = ["--world-size", "--rank", "--master-addr", "--master-port"];

/// Position of a process among those of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessPlace {
    /// Ranks of all processes.
    pub(super) world_size: usize,
    /// First rank of this process.
    pub(super) rank: usize,
    /// Address of rank 0.
    pub(super) master: Master,
    pub(super) local_rank: usize,
    pub(super) local_world_size: Option<usize>,
}

impl ProcessPlace {
    /// Returns the position in `launch`, whose processes meet at `master`.
    pub(super) fn of(launch: &Launch, master: Master) -> Self {
        let Launch { world_size, rank, local_rank, local_world_size, .. } = *launch;
        ProcessPlace { world_size, rank, master, local_rank, local_world_size }
    }

    /// Returns the position of the process with the index `index`, if each of the `count` ranks
    /// here gets a process.
    pub(super) fn of_one(&self, index: usize, count: usize) -> Self {
        ProcessPlace {
            rank: self.rank + index,
            local_rank: self.local_rank + index,
            local_world_size: Some(self.local_world_size.unwrap_or(count)),
            ..self.clone()
        }
    }

    /// Returns a command line with this position instead of the one in `words`.
    pub(crate) fn in_words(&self, words: &[OsString]) -> Vec<OsString> {
        let mut kept = without(words, &FLAGS);
        // A launcher may listen on the first of several ports.
        let port = if self.master.ports > 1 { self.master.port.saturating_add(1) } else { self.master.port };
        let values = [
            self.world_size.to_string(),
            self.rank.to_string(),
            self.master.address.clone(),
            port.to_string(),
        ];
        kept.extend(FLAGS.into_iter().zip(values).flat_map(|(flag, value)| [flag.into(), value.into()]));
        kept
    }

    /// Returns the variables that a launcher would set on this host.
    pub(crate) fn environment(&self) -> Vec<(&'static str, String)> {
        let mut variables = vec![("LOCAL_RANK", self.local_rank.to_string())];
        variables.extend(self.local_world_size.map(|size| ("LOCAL_WORLD_SIZE", size.to_string())));
        variables
    }
}

/// Returns `words` without `flags` and their values.
pub(super) fn without(words: &[OsString], flags: &[&str]) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let text = word.to_string_lossy();
        let flag = text.split_once('=').map_or(&*text, |(flag, _)| flag);
        if !flags.contains(&flag) {
            kept.push(word.clone());
        } else if !text.contains('=') {
            words.next();
        }
    }
    kept
}
