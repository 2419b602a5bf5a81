//! Continues a run on several hosts after a failure. The processes that join again within the
//! rendezvous timeout (`FINETUNE_RDZV_TIMEOUT`) get new ranks. The global batch does not change:
//! fewer ranks take more micro-batches each. The host of rank 0 must be among them, because all
//! processes join there.

use std::collections::BTreeMap;
use std::time::Duration;

use super::process_position::ProcessPosition;
use super::ranks::{join_request, rendezvous_options};
use crate::collective::launch::Launch;
use crate::error::Result;
use crate::rendezvous::{Peer, Session};
use crate::report::Terminal;

/// Longest time between the first and the last process that starts to join.
const SKEW: Duration = Duration::from_secs(60);

/// Joins the other processes of `launch` again. Returns the new position if some are missing, or
/// none to keep the old one.
///
/// # Errors
/// Rank 0 does not answer.
pub(crate) fn meet(launch: &Launch, terminal: &Terminal) -> Result<Option<ProcessPosition>> {
    let mut options = rendezvous_options(launch)?;
    options.elastic = true;
    // Other processes' children may have waited as long for one that failed before it joined.
    options.join_timeout = 2 * options.join_timeout + SKEW;
    // A late process finds the others continuing without it, and must not join their run.
    options.run += ", between two tries";
    let session = Session::join(join_request(launch, BTreeMap::new()), &options)?;
    let process_position = among(session.peers(), session.process_index(), launch);
    session.leave()?;
    if let (Some(process_position), 0) = (&process_position, launch.rank) {
        terminal.warn(format!(
            "{} of {} ranks joined again: the run continues with them and the same global batch",
            process_position.world_size, launch.world_size
        ));
    }
    Ok(process_position)
}

/// Returns the position of the process with index `own` among `peers`; none if no process is
/// missing.
fn among(peers: &[Peer], own: usize, launch: &Launch) -> Option<ProcessPosition> {
    let ranks = |peers: &[Peer]| peers.iter().map(|peer| peer.ranks_here).sum::<usize>();
    let world_size = ranks(peers);
    let master = launch.master.clone().filter(|_| world_size < launch.world_size)?;
    Some(ProcessPosition { world_size, rank: ranks(&peers[..own]), ..ProcessPosition::of(launch, master) })
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::collective::launch::LaunchSource;
    use crate::rendezvous::Master;

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
        let peer = |rank: &usize| Peer { rank: *rank, ranks_here: 2, host: "h".to_owned(), free_bytes: None };
        ranks.iter().map(peer).collect()
    }

    #[test]
    fn those_that_are_left_close_the_ranks() {
        assert_eq!(among(&peers(&[0, 2, 4, 6]), 1, &launch(2)), None);
        let joined = among(&peers(&[0, 4, 6]), 2, &launch(6)).unwrap();
        assert_eq!((joined.world_size, joined.rank), (6, 4));
    }

    #[test]
    fn a_new_place_replaces_the_one_that_was_typed() {
        let moved = among(&peers(&[0, 4, 6]), 1, &launch(4)).unwrap();
        let words = "--gpus 0-1 --rank 4 --world-size=8 --master-addr node-0 --master-port 29500 --resume";
        let words = moved.in_words(&words.split(' ').map(OsString::from).collect::<Vec<_>>());
        let words: Vec<String> = words.into_iter().map(|word| word.into_string().unwrap()).collect();
        assert_eq!(
            words.join(" "),
            "--gpus 0-1 --resume --world-size 6 --rank 2 --master-addr node-0 --master-port 29500"
        );
        assert_eq!(
            moved.environment(),
            [
                ("LOCAL_RANK", "0"),
                ("LOCAL_WORLD_SIZE", "2"),
                ("TORCHELASTIC_RUN_ID", ""),
                ("FINETUNE_RDZV_PORTS", "16")
            ]
            .map(|(name, value)| (name, value.to_owned()))
        );
    }
}
