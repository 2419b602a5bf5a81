//! How the processes of a run over several hosts go on after a failure: those that come again within the time that a
//! rendezvous has (`FINETUNE_RDZV_TIMEOUT`) share the run's ranks out anew. The global batch stays: each of fewer ranks takes
//! more micro-batches of it. The host of rank 0, where all meet, must be among them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::Duration;

use super::ranks::{join_request, rendezvous_options};
use crate::collective::launch::Launch;
use crate::error::Result;
use crate::rendezvous::{Master, Peer, Session};
use crate::report::Terminal;

/// The place of a process among those that are left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ElasticPlace {
    /// Ranks of all that are left.
    world_size: usize,
    /// The first rank of this process.
    rank: usize,
    /// Where rank 0 listens.
    master: Master,
    local_rank: usize,
    local_world_size: Option<usize>,
}

/// How far apart processes of a run begin to meet.
const SKEW: Duration = Duration::from_secs(60);

/// Meets the other processes of `launch` again; the place to go on at if some are missing, else none: the old one.
///
/// # Errors
/// Rank 0 does not answer.
pub(crate) fn meet(launch: &Launch, terminal: &Terminal) -> Result<Option<ElasticPlace>> {
    let mut options = rendezvous_options(launch)?;
    options.elastic = true;
    // Others' children may have waited as long themselves for one that failed before it had joined them.
    options.join_timeout = 2 * options.join_timeout + SKEW;
    // Who comes too late finds those who went on without it, and must not be taken for one of them.
    options.run += ", between two tries";
    let session = Session::join(join_request(launch, BTreeMap::new()), &options)?;
    let place = ElasticPlace::among(session.peers(), session.process_index(), launch);
    session.leave()?;
    if let (Some(place), 0) = (&place, launch.rank) {
        terminal.warn(format!(
            "{} of {} ranks came again: the run goes on with them, and the same global batch",
            place.world_size, launch.world_size
        ));
    }
    Ok(place)
}

/// Flags that say the place of a process, each with a value.
const FLAGS: [&str; 4] = ["--world-size", "--rank", "--master-addr", "--master-port"];

impl ElasticPlace {
    /// The place of the process with index `own` among `peers`; none if all are there.
    fn among(peers: &[Peer], own: usize, launch: &Launch) -> Option<Self> {
        let ranks = |peers: &[Peer]| peers.iter().map(|peer| peer.ranks_here).sum::<usize>();
        let world_size = ranks(peers);
        let master = launch.master.clone().filter(|_| world_size < launch.world_size)?;
        let Launch { local_rank, local_world_size, .. } = *launch;
        Some(ElasticPlace { world_size, rank: ranks(&peers[..own]), master, local_rank, local_world_size })
    }

    /// The words of a command line with this place instead of the one that they name.
    pub(crate) fn in_words(&self, words: Vec<OsString>) -> Vec<OsString> {
        let mut kept = Vec::new();
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let text = word.to_string_lossy();
            if FLAGS.contains(&&*text) {
                words.next();
            } else if !FLAGS
                .iter()
                .any(|flag| text.strip_prefix(flag).is_some_and(|rest| rest.starts_with('=')))
            {
                kept.push(word);
            }
        }
        // The first of several ports may be a launcher's own.
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

    /// What a launcher would say of this host.
    pub(crate) fn environment(&self) -> Vec<(&'static str, String)> {
        let mut variables = vec![("LOCAL_RANK", self.local_rank.to_string())];
        variables.extend(self.local_world_size.map(|size| ("LOCAL_WORLD_SIZE", size.to_string())));
        variables
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::launch::LaunchSource;

    fn launch(rank: usize) -> Launch {
        Launch {
            source: LaunchSource::Torchrun,
            rank,
            ranks_here: 2,
            local_rank: 0,
            local_world_size: Some(2),
            world_size: 8,
            host: None,
            master: Some(Master { address: "node-0".to_owned(), port: 29_500, ports: 16 }),
            run: String::new(),
        }
    }

    fn peers(ranks: &[usize]) -> Vec<Peer> {
        ranks.iter().map(|rank| Peer { rank: *rank, ranks_here: 2, host: "h".to_owned() }).collect()
    }

    #[test]
    fn those_that_are_left_close_the_ranks() {
        assert_eq!(ElasticPlace::among(&peers(&[0, 2, 4, 6]), 1, &launch(2)), None);
        let place = ElasticPlace::among(&peers(&[0, 4, 6]), 2, &launch(6)).unwrap();
        assert_eq!((place.world_size, place.rank), (6, 4));
    }

    #[test]
    fn a_new_place_replaces_the_one_that_was_typed() {
        let place = ElasticPlace::among(&peers(&[0, 4, 6]), 1, &launch(4)).unwrap();
        let words = "--gpus 0-1 --rank 4 --world-size=8 --master-addr node-0 --master-port 29500 --resume";
        let words = place.in_words(words.split(' ').map(OsString::from).collect());
        let words: Vec<String> = words.into_iter().map(|word| word.into_string().unwrap()).collect();
        assert_eq!(
            words.join(" "),
            "--gpus 0-1 --resume --world-size 6 --rank 2 --master-addr node-0 --master-port 29501"
        );
        assert_eq!(
            place.environment(),
            [("LOCAL_RANK", "0".to_owned()), ("LOCAL_WORLD_SIZE", "2".to_owned())]
        );
    }
}
