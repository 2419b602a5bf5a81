//! Position of a process among those of a run, as flags and variables of its command.

use std::ffi::OsString;

use crate::collective::launch::Launch;
use crate::rendezvous::Master;

/// Flags for the position of a process, each with a value.
const FLAGS: [&str; 4] = ["--world-size", "--rank", "--master-addr", "--master-port"];

/// Position of a process among those of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessPosition {
    /// Ranks of all processes.
    pub(super) world_size: usize,
    /// First rank of this process.
    pub(super) rank: usize,
    /// Address of rank 0.
    pub(super) master: Master,
    pub(super) local_rank: usize,
    pub(super) local_world_size: Option<usize>,
    /// Variables of the launch beside these numbers.
    pub(super) variables: Vec<(&'static str, String)>,
}

impl ProcessPosition {
    /// Returns the position in `launch`, whose processes meet at `master`.
    pub(super) fn of(launch: &Launch, master: Master) -> Self {
        let launch = Launch { master: Some(master.clone()), ..launch.clone() };
        let variables = launch.variables();
        let Launch { world_size, rank, local_rank, local_world_size, .. } = launch;
        ProcessPosition { world_size, rank, master, local_rank, local_world_size, variables }
    }

    /// Returns the position of the process with the index `index`, if each of the `count` ranks
    /// here gets a process.
    pub(super) fn of_one(&self, index: usize, count: usize) -> Self {
        ProcessPosition {
            rank: self.rank + index,
            local_rank: self.local_rank + index,
            local_world_size: Some(self.local_world_size.unwrap_or(count)),
            ..self.clone()
        }
    }

    /// Returns a command line with this position instead of the one in `words`.
    pub(crate) fn in_words(&self, words: &[OsString]) -> Vec<OsString> {
        let mut arguments = without(words, &FLAGS);
        let Master { address, port, .. } = &self.master;
        let values = [self.world_size.to_string(), self.rank.to_string(), address.clone(), port.to_string()];
        arguments.extend(FLAGS.into_iter().zip(values).flat_map(|(flag, value)| [flag.into(), value.into()]));
        arguments
    }

    /// Returns the variables that a launcher would set on this host.
    pub(crate) fn environment(&self) -> Vec<(&'static str, String)> {
        let mut variables = vec![("LOCAL_RANK", self.local_rank.to_string())];
        variables.extend(self.local_world_size.map(|size| ("LOCAL_WORLD_SIZE", size.to_string())));
        variables.extend(self.variables.clone());
        variables
    }
}

/// Returns `words` without `flags` and their values.
pub(super) fn without(words: &[OsString], flags: &[&str]) -> Vec<OsString> {
    let mut remaining = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let text = word.to_string_lossy();
        let flag = text.split_once('=').map_or(&*text, |(flag, _)| flag);
        if !flags.contains(&flag) {
            remaining.push(word.clone());
        } else if !text.contains('=') {
            words.next();
        }
    }
    remaining
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::collective::launch::{Flags, LocalRank};

    /// Detects the launch of a process with these flags and variables.
    fn launch(flags: &Flags, variables: &[(&'static str, String)]) -> Launch {
        let find = |name: &str| {
            let variable = variables.iter().find(|(other, _)| *other == name);
            variable.map(|(_, value)| OsString::from(value))
        };
        Launch::detect(flags, &find).expect("a launch")
    }

    /// torchrun's agent holds the first port, and names the run, so that two runs that use the same
    /// ports do not mix.
    #[test]
    fn what_a_launcher_says_reaches_the_process_of_a_rank() {
        let torchrun = [
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "0"),
            ("LOCAL_WORLD_SIZE", "1"),
            ("MASTER_ADDR", "node-0"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RUN_ID", "job7"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ];
        let torchrun = torchrun.map(|(name, value)| (name, value.to_owned()));
        let host = launch(&Flags { ranks_here: Some(4), ..Flags::default() }, &torchrun);
        let position = ProcessPosition::of(&host, host.master.clone().expect("an address")).of_one(1, 4);
        let words = position.in_words(&[]);
        let value = |flag: &str| {
            let at = words.iter().position(|word| word == flag).expect(flag) + 1;
            words[at].to_str().map(str::to_owned)
        };
        let number = |flag| value(flag).and_then(|text| text.parse().ok());
        let flags = Flags {
            ranks_here: Some(1),
            world_size: number("--world-size"),
            rank: number("--rank"),
            master_addr: value("--master-addr"),
            master_port: value("--master-port").and_then(|text| text.parse().ok()),
        };
        let process = launch(&flags, &position.environment());
        assert_eq!((process.rank, process.local_rank, process.world_size), (5, 1, 8));
        assert_eq!(process.host, Some(LocalRank { index: 1, count: 2 }));
        assert_eq!(process.run, "job7");
        assert_eq!(process.master, Some(Master { address: "node-0".to_owned(), port: 29_501, ports: 16 }));
        assert_eq!(process.master, host.master);
    }
}
