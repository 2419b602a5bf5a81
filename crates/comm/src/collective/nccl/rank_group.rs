//! Ranks of a process on its GPUs: threads that connect, work and end together.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::communicator::AbortFlag;
use super::device::GpuStreams;
use super::library::{NcclLibrary, UniqueId};
use super::{Nccl, NcclRankInfo, locked};
use crate::collective::Collective;
use crate::collective::rank_threads;
use crate::collective::rank_threads::RankFailure;
use crate::error::{Error, ErrorCategory, Result};

/// Ranks of one process among all.
#[derive(Debug, Clone, Copy)]
pub struct GroupInfo {
    /// Rank 0's [`NcclLibrary::unique_id`].
    pub id: UniqueId,
    /// First rank of this process; the others follow.
    pub first: usize,
    /// Number of ranks of all processes.
    pub size: usize,
    /// Maximum time that a call waits for other ranks.
    pub deadline: Duration,
}

/// Runs `work` for a rank on each of `devices`, in threads `rank-0`, `rank-1`, …, connected with
/// each other and those of other processes. `work` gets the index in `devices`.
///
/// # Errors
/// If a rank returns an error or panics, or `abort_flag` is raised from elsewhere, all
/// communicators of the process are aborted, which ends its peers' waits. `abort_flag` sends a
/// rank's own error to the other processes before. The result is the error of the rank that failed
/// first, or the flag's cause. An error that all ranks of this process share is returned once.
pub fn run_ranks<D: GpuStreams, T: Send>(
    library: &Arc<NcclLibrary>,
    group_info: &GroupInfo,
    devices: Vec<D>,
    abort_flag: &Arc<AbortFlag>,
    work: impl Fn(usize, Arc<Nccl<D>>) -> Result<T> + Sync,
) -> Result<Vec<T>, RankFailure> {
    let first: OnceLock<(usize, Error, String)> = OnceLock::new();
    let rank = |local_rank: usize, device: D| {
        let rank_info = NcclRankInfo {
            id: group_info.id,
            rank: group_info.first + local_rank,
            size: group_info.size,
            deadline: group_info.deadline,
        };
        let mut end = None;
        let done = rank_threads::caught(|| {
            let met = Arc::new(Nccl::connect(library, &rank_info, device, abort_flag)?);
            work(local_rank, Arc::clone(end.insert(met)))
        });
        // A stop on request, which all ranks make together, is no failure.
        if let Err(error) = &done
            && error.kind() != ErrorCategory::SavedAndStopped
            && abort_flag.check().err().is_none_or(|cause| !rank_threads::stems_from(error, &cause))
        {
            let at = end.as_ref().map(|end| locked(&end.member.status).clone()).unwrap_or_default();
            let why = rank_threads::in_a_line(error);
            let news = at.news(rank_info.rank, &why);
            let (rank, error) = (rank_info.rank, at.around(rank_info.rank, error.clone()));
            first.get_or_init(|| (rank, error.clone(), rank_threads::in_a_line(&news)));
            abort_flag.raise_own(rank, error, news);
        }
        // Only now: communicators of a failed rank were aborted, and do not wait for peers.
        drop(end);
        done
    };
    let results: Vec<Result<T>> = std::thread::scope(|scope| {
        let start = |(local_rank, device)| {
            let rank = &rank;
            rank_threads::start(scope, group_info.first + local_rank, move || rank(local_rank, device))
                .map_err(|error| abort_flag.raise(error))
        };
        let started: Vec<_> = devices.into_iter().enumerate().map(start).collect();
        started.into_iter().map(rank_threads::join).collect()
    });
    if results.iter().all(Result::is_ok) {
        return results.into_iter().collect::<Result<_>>().map_err(RankFailure::heard);
    }
    let errors: Vec<Error> = results.into_iter().filter_map(Result::err).collect();
    let heard = abort_flag.check().err().unwrap_or_else(|| errors[0].clone());
    let Some((rank, error, why)) = first.into_inner() else { return Err(RankFailure::heard(heard)) };
    let text = errors[0].to_string();
    let alike = errors.len() == group_info.size
        && errors.len() > 1
        && errors.iter().all(|error| error.to_string() == text)
        && text != heard.to_string();
    if alike {
        return Err(RankFailure::of_all(rank, errors[0].clone()));
    }
    Err(RankFailure { error, own: Some((rank, why)) })
}

/// [`run_ranks`] on candle's devices, all of them GPUs.
///
/// # Errors
/// Same as [`run_ranks`]; also if a device is not a GPU or the driver refuses to create a stream.
#[cfg(feature = "cuda")]
pub fn run_on_gpus<T: Send>(
    library: &Arc<NcclLibrary>,
    group_info: &GroupInfo,
    devices: &[candle_core::Device],
    abort_flag: &Arc<AbortFlag>,
    work: impl Fn(usize, Arc<dyn Collective>) -> Result<T> + Sync,
) -> Result<Vec<T>, RankFailure> {
    let one = |device: &candle_core::Device| match device {
        candle_core::Device::Cuda(device) => super::Cuda::new(device),
        other => Err(Error::internal(format!("{:?} is no GPU", other.location()))),
    };
    let gpus = devices.iter().map(one).collect::<Result<Vec<_>>>().map_err(RankFailure::heard)?;
    crate::runtime::device::share_pools(devices).map_err(RankFailure::heard)?;
    run_ranks(library, group_info, gpus, abort_flag, |local_rank, end| work(local_rank, end))
}

/// Stand-in of [`run_ranks`] for a build without GPU support.
///
/// # Errors
/// Always.
#[cfg(not(feature = "cuda"))]
pub fn run_on_gpus<T: Send>(
    library: &Arc<NcclLibrary>,
    group_info: &GroupInfo,
    devices: &[candle_core::Device],
    _: &Arc<AbortFlag>,
    _: impl Fn(usize, Arc<dyn Collective>) -> Result<T> + Sync,
) -> Result<Vec<T>, RankFailure> {
    let what = format!("cannot run {} of {} ranks over {library:?}", devices.len(), group_info.size);
    Err(RankFailure::heard(Error::internal(what).because("this build has no GPUs")))
}
