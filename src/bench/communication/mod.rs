//! Communication between ranks: collectives (`bench collectives`), and also every pair and the
//! clocks of the hosts (`doctor net`), over the memory of one process, MPI or NCCL.

mod clocks;
mod collectives;
pub(crate) mod net;
mod pairs;
mod rank_buffer;
mod rank_location;

pub(crate) use self::collectives::CollectiveSpeeds;

use candle_core::Device;

use crate::cli::{CommunicationArgs, Gpus};
use crate::collective::launch::LaunchSource;
use crate::collective::{Collective, Phase};
use crate::error::{Error, Result};
use crate::launcher::processes::{self, SplitRank};
use crate::launcher::ranks::{self, RankRequest, RankSetup};
use crate::runtime::device;
use crate::runtime::machine;
use crate::units;

/// Default data sizes in bytes: from 1 KiB to 64 MiB.
const SIZES: [u64; 9] = [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26];

/// Backend of the ranks, and sizes of the data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MeasuredRanks {
    /// Name of the backend for messages.
    backend: &'static str,
    /// Data size of each measurement in bytes.
    sizes: Vec<u64>,
}

/// Starts the ranks of `args` and of a launcher's environment and runs `measure` on each. Returns
/// the result of rank 0 in its process, none in others. Each of several GPUs has a process.
///
/// # Errors
/// The run has a single rank, the memory does not suffice, or a rank fails.
fn on_ranks<T: Send>(
    args: &CommunicationArgs,
    what: &'static str,
    measure: impl Fn(&MeasuredRanks, &dyn Collective, &Device) -> Result<T> + Sync,
) -> Result<Option<T>> {
    let sizes = if args.sizes.is_empty() { SIZES.to_vec() } else { args.sizes.clone() };
    let asked = |gpus, ranks| RankRequest { gpus, ranks, processes: &args.processes, purpose: what };
    let mut request = asked(args.gpus.as_ref(), args.ranks);
    let mut launch = ranks::launch(request)?;
    let is_free = launch.source == LaunchSource::Alone && args.gpus.is_none() && args.ranks.is_none();
    let all_gpus;
    if is_free {
        all_gpus = Gpus((0..device::gpus()?.len()).collect());
        request = if all_gpus.0.len() > 1 { asked(Some(&all_gpus), None) } else { asked(None, Some(2)) };
        launch = ranks::launch(request)?;
    }
    if launch.world_size < 2 {
        return Err(Error::user(format!("cannot {what} of a single rank"))
            .because(format!("the world size is 1, from {}", launch.source.name()))
            .hint("give `--ranks 2` or more, several `--gpus`, or start several processes with mpirun"));
    }
    if let Some(gpus) = request.gpus.filter(|gpus| gpus.0.len() > 1) {
        // The process of rank 0 prints.
        return processes::run(&SplitRank::on_gpus(gpus)?, &launch).map(|()| None);
    }
    let on_gpus = ranks::on_gpus(request)?;
    if !on_gpus {
        check_memory(what, &sizes, launch.ranks_here)?;
    }
    let backend = match (on_gpus, &launch.master) {
        (true, _) => "NCCL",
        (false, Some(_)) => "MPI",
        (false, None) => "the memory of one process",
    };
    let setup = RankSetup::open(launch, request)?;
    let ranks = MeasuredRanks { backend, sizes };
    setup.measure(&format!("{what} {:?}", ranks.sizes), |world, device| {
        world.enter(Phase::Meet)?;
        measure(&ranks, world, device)
    })
}

/// Refuses sizes for which the ranks of this process together need more than the available memory:
/// each holds the data, a part of it, and a copy to check.
fn check_memory(what: &str, sizes: &[u64], ranks_here: usize) -> Result<()> {
    let Some(memory) = machine::host_memory() else { return Ok(()) };
    let largest = sizes.iter().max().copied().unwrap_or_default();
    let needed = largest.saturating_mul(3).saturating_mul(ranks_here as u64);
    if needed <= memory.available {
        return Ok(());
    }
    let (needed, available) = (units::bytes(needed), units::bytes(memory.available));
    Err(Error::user(format!("cannot {what} of {ranks_here} ranks with {} of data", units::bytes(largest)))
        .because(format!("they need {needed} of memory, {available} available"))
        .hint("give smaller `--sizes` or fewer `--ranks`"))
}
