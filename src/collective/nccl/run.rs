//! The ranks of a process on its GPUs: threads that meet, work and end together.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::communicator::Alarm;
use super::device::Device;
use super::library::{Library, UniqueId};
use super::{Meeting, Nccl, locked};
use crate::collective::Collective;
use crate::collective::threads::{self, Failed};
use crate::error::{Error, Result};

/// The ranks of one process among all.
#[derive(Debug, Clone, Copy)]
pub struct Crew {
    /// Rank 0's [`Library::unique_id`].
    pub id: UniqueId,
    /// The first rank of this process; the others follow.
    pub first: usize,
    /// Ranks of all processes.
    pub size: usize,
    /// How long a call may wait for other ranks.
    pub deadline: Duration,
}

/// Runs `work` for a rank on each of `devices`, in threads `rank-0`, `rank-1`, …, which meet each other and those of
/// other processes. `work` gets its place among `devices`.
///
/// # Errors
/// When a rank returns an error or panics, or `alarm` is raised from elsewhere, all communicators of the process are
/// aborted, which ends its peers' waits; the error is that of the rank that failed first, or the alarm's cause. What all
/// ranks of this process say alike is said once.
pub fn run_ranks<D: Device, T: Send>(
    library: &Arc<Library>,
    crew: &Crew,
    devices: Vec<D>,
    alarm: &Arc<Alarm>,
    work: impl Fn(usize, Arc<Nccl<D>>) -> Result<T> + Sync,
) -> Result<Vec<T>, Failed> {
    let first: OnceLock<(usize, Error, String)> = OnceLock::new();
    let rank = |place: usize, device: D| {
        let meeting =
            Meeting { id: crew.id, rank: crew.first + place, size: crew.size, deadline: crew.deadline };
        let mut end = None;
        let done = threads::caught(|| {
            let met = Arc::new(Nccl::connect(library, &meeting, device, alarm)?);
            work(place, Arc::clone(end.insert(met)))
        });
        if let Err(error) = &done
            && alarm.check().err().is_none_or(|cause| !threads::stems_from(error, &cause))
        {
            let at = end.as_ref().map(|end| locked(&end.member.place).clone()).unwrap_or_default();
            let why = threads::in_a_line(error);
            let news = at.news(meeting.rank, &why);
            first.get_or_init(|| {
                (meeting.rank, at.around(meeting.rank, error.clone()), threads::in_a_line(&news))
            });
            alarm.raise(news);
        }
        // Only now: communicators of a rank that failed were aborted, and do not wait for peers to end in order.
        drop(end);
        done
    };
    let results: Vec<Result<T>> = std::thread::scope(|scope| {
        let start = |(place, device)| {
            let rank = &rank;
            threads::start(scope, crew.first + place, move || rank(place, device))
                .map_err(|error| alarm.raise(error))
        };
        let started: Vec<_> = devices.into_iter().enumerate().map(start).collect();
        started.into_iter().map(threads::join).collect()
    });
    if results.iter().all(Result::is_ok) {
        return results.into_iter().collect::<Result<_>>().map_err(Failed::heard);
    }
    let errors: Vec<Error> = results.into_iter().filter_map(Result::err).collect();
    let heard = alarm.check().err().unwrap_or_else(|| errors[0].clone());
    let Some((rank, error, why)) = first.into_inner() else { return Err(Failed::heard(heard)) };
    let text = errors[0].to_string();
    let alike = errors.len() == crew.size
        && errors.len() > 1
        && errors.iter().all(|error| error.to_string() == text)
        && text != heard.to_string();
    if alike {
        return Err(Failed::of_all(rank, errors[0].clone()));
    }
    Err(Failed { error, own: Some((rank, why)) })
}

/// [`run_ranks`] on candle's devices, all of them GPUs.
///
/// # Errors
/// As there; a device is not a GPU, the driver gives no stream.
#[cfg(feature = "cuda")]
pub fn run_on_gpus<T: Send>(
    library: &Arc<Library>,
    crew: &Crew,
    devices: &[candle_core::Device],
    alarm: &Arc<Alarm>,
    work: impl Fn(usize, Arc<dyn Collective>) -> Result<T> + Sync,
) -> Result<Vec<T>, Failed> {
    let one = |device: &candle_core::Device| match device {
        candle_core::Device::Cuda(device) => super::Cuda::new(device),
        other => Err(Error::internal(format!("{:?} is no GPU", other.location()))),
    };
    let gpus = devices.iter().map(one).collect::<Result<Vec<_>>>().map_err(Failed::heard)?;
    run_ranks(library, crew, gpus, alarm, |place, end| work(place, end))
}

/// [`run_ranks`] on GPUs, which this build has none of.
///
/// # Errors
/// Always.
#[cfg(not(feature = "cuda"))]
pub fn run_on_gpus<T: Send>(
    library: &Arc<Library>,
    crew: &Crew,
    devices: &[candle_core::Device],
    _: &Arc<Alarm>,
    _: impl Fn(usize, Arc<dyn Collective>) -> Result<T> + Sync,
) -> Result<Vec<T>, Failed> {
    let what = format!("cannot run {} of {} ranks over {library:?}", devices.len(), crew.size);
    Err(Failed::heard(Error::internal(what).because("this build has no GPUs")))
}
