//! A communicator of the library that cannot hang: every call returns at once, and its progress is
//! polled until it finishes, another rank fails or the deadline passes.
//!
//! A lock guards the handle, held for one such call at a time. So another thread can take the
//! handle and abort it at any moment, and no thread uses it afterwards.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::library::{NcclConfig, NcclFunctions, NcclLibrary, NcclStatus, RawComm, UniqueId};
use crate::error::{Error, ErrorCategory, Result};
use crate::locks::locked;

/// Maximum time for the end of a communicator before it is aborted. In tests it is long enough to
/// distinguish an end that waits for it on a busy machine.
pub(super) const FAREWELL: Duration = Duration::from_secs(if cfg!(test) { 300 } else { 10 });

/// Stops all communicators of this process at once, with the reason that later calls return. All
/// ranks that are threads of the process share one; the rendezvous session raises it after a
/// failure elsewhere.
#[derive(Debug, Default)]
pub struct AbortFlag {
    cause: OnceLock<Error>,
    raised: AtomicBool,
    communicators: Mutex<Vec<Weak<Communicator>>>,
}

impl AbortFlag {
    /// Creates a flag that is not raised.
    pub fn new() -> Arc<AbortFlag> {
        Arc::default()
    }

    /// Aborts all communicators, which ends kernels that wait for other ranks. Returns the first
    /// cause, which stays.
    pub fn raise(&self, cause: Error) -> Error {
        let cause = self.keep(cause);
        self.raised.store(true, Ordering::SeqCst);
        self.communicators().iter().filter_map(Weak::upgrade).for_each(|communicator| communicator.abort());
        cause
    }

    /// Stores the cause of a later [`AbortFlag::raise`], without stopping anything yet.
    pub(super) fn keep(&self, cause: Error) -> Error {
        self.cause.get_or_init(|| cause).clone()
    }

    /// Returns an error if the flag is raised.
    ///
    /// # Errors
    /// The cause, if the flag was raised.
    pub fn check(&self) -> Result<()> {
        match self.cause.get() {
            Some(cause) if self.raised.load(Ordering::SeqCst) => Err(cause.clone()),
            _ => Ok(()),
        }
    }

    /// Communicators that are not yet dropped. A caller must hold only one of them at a time: the
    /// last reference ends its communicator, which waits for the others of its group to end.
    pub(super) fn communicators(&self) -> Vec<Weak<Communicator>> {
        let mut all = locked(&self.communicators);
        all.retain(|communicator| communicator.strong_count() > 0);
        all.clone()
    }
}

/// Handle of a communicator: an address that only the library reads.
struct Handle(RawComm);

// SAFETY: NCCL accepts calls on a communicator from any thread, one at a time, which the lock
// around the handle ensures.
unsafe impl Send for Handle {}

/// A communicator that cannot hang; see the module.
pub(super) struct Communicator {
    nccl: Arc<NcclLibrary>,
    abort_flag: Arc<AbortFlag>,
    deadline: Duration,
    /// `None` once aborted.
    handle: Mutex<Option<Handle>>,
}

impl Communicator {
    /// Connects `size` ranks under `id`. The GPU of this rank is current on this thread.
    pub(super) fn meet(
        library: &Arc<NcclLibrary>,
        abort_flag: &Arc<AbortFlag>,
        id: &UniqueId,
        (rank, size): (usize, usize),
        deadline: Duration,
    ) -> Result<Arc<Communicator>> {
        abort_flag.check()?;
        let (rank, size) = (int(rank)?, int(size)?);
        // The library may write it later, also after an error here.
        let place: &'static mut RawComm = Box::leak(Box::new(std::ptr::null_mut()));
        let mut config = NcclConfig::non_blocking();
        // SAFETY: `place` is leaked, and the configuration is read before the call returns.
        let status = unsafe {
            (library.table.comm_init_rank_config)(&raw mut *place, size, *id, rank, &raw mut config)
        };
        if status != NcclStatus::SUCCESS && status != NcclStatus::IN_PROGRESS || place.is_null() {
            return Err(Error::new(ErrorCategory::Transient, "cannot make an NCCL communicator")
                .because(library.text(status, None)));
        }
        let made = Self::of(library, abort_flag, deadline, *place);
        made.settled("the meeting of the ranks")
    }

    fn of(
        library: &Arc<NcclLibrary>,
        abort_flag: &Arc<AbortFlag>,
        deadline: Duration,
        comm: RawComm,
    ) -> Arc<Communicator> {
        let made = Arc::new(Communicator {
            nccl: Arc::clone(library),
            abort_flag: Arc::clone(abort_flag),
            deadline,
            handle: Mutex::new(Some(Handle(comm))),
        });
        let mut all = locked(&abort_flag.communicators);
        all.push(Arc::downgrade(&made));
        drop(all);
        // If the flag was raised meanwhile, this communicator was not on its list.
        if abort_flag.check().is_err() {
            made.abort();
        }
        made
    }

    /// Returns this new communicator when it is ready; aborts one that does not become ready.
    fn settled(self: Arc<Self>, what: &str) -> Result<Arc<Self>> {
        match self.settle(what) {
            Ok(()) => Ok(self),
            Err(error) => {
                self.abort();
                Err(error)
            }
        }
    }

    /// Creates the communicator of the ranks with the same `color`, in the order of `rank`.
    pub(super) fn split(self: &Arc<Self>, color: usize, rank: usize) -> Result<Arc<Communicator>> {
        let (color, rank) = (int(color)?, int(rank)?);
        // Filled when this communicator has settled (NCCL 2.23), or at once.
        let place = Box::leak(Box::new(std::ptr::null_mut::<std::ffi::c_void>())) as *mut RawComm;
        let mut config = NcclConfig::non_blocking();
        // SAFETY: as for `meet`; the handle is alive under the lock.
        self.call("the split", |table, comm| unsafe {
            (table.comm_split)(comm, color, rank, place, &raw mut config)
        })?;
        // SAFETY: leaked above; the library no longer writes it.
        let comm = unsafe { place.read_volatile() };
        if comm.is_null() {
            return Err(Error::internal("NCCL split a communicator and gave none"));
        }
        let made = Self::of(&self.nccl, &self.abort_flag, self.deadline, comm);
        made.settled("the split")
    }

    /// Makes one call and waits until it has finished or, for collectives, is on its stream.
    pub(super) fn call(
        &self,
        what: &str,
        call: impl FnOnce(&NcclFunctions, RawComm) -> NcclStatus,
    ) -> Result<()> {
        let handle = self.handle()?;
        let status = match handle.as_ref() {
            Some(handle) => call(&self.nccl.table, handle.0),
            None => return self.gone(),
        };
        drop(handle);
        match status {
            NcclStatus::SUCCESS => Ok(()),
            NcclStatus::IN_PROGRESS => self.settle(what),
            failed => Err(self.failed(what, failed)),
        }
    }

    /// Asks the library for a failure once, without waiting.
    pub(super) fn poll(&self) -> Result<NcclStatus> {
        let handle = self.handle()?;
        let Some(comm) = handle.as_ref() else { return self.gone().map(|()| NcclStatus::SUCCESS) };
        let mut state = NcclStatus::SUCCESS;
        // SAFETY: the handle is alive under the lock, the pointer is to a local.
        let status = unsafe { (self.nccl.table.comm_get_async_error)(comm.0, &raw mut state) };
        drop(handle);
        match (status, state) {
            (NcclStatus::SUCCESS, NcclStatus::SUCCESS | NcclStatus::IN_PROGRESS) => Ok(state),
            (NcclStatus::SUCCESS, failed) | (failed, _) => Err(self.failed("a collective", failed)),
        }
    }

    fn settle(&self, what: &str) -> Result<()> {
        let begin = Instant::now();
        let mut rounds = 0_u32;
        while self.poll()? == NcclStatus::IN_PROGRESS {
            if begin.elapsed() > self.deadline {
                let error =
                    Error::new(ErrorCategory::Transient, format!("{what} did not begin on all ranks"))
                        .because(format!("waited {} s for the other ranks", self.deadline.as_secs()));
                return Err(error);
            }
            rounds = rounds.saturating_add(1);
            if rounds < 1000 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        Ok(())
    }

    /// Aborts the communicator, also during a wait. Later calls return the cause of the flag.
    pub(super) fn abort(&self) {
        let handle = locked(&self.handle).take();
        if let Some(handle) = handle {
            // SAFETY: the handle was taken, so no thread uses it after this. The status is
            // irrelevant: the communicator is gone.
            unsafe { (self.nccl.table.comm_abort)(handle.0) };
        }
    }

    fn handle(&self) -> Result<MutexGuard<'_, Option<Handle>>> {
        self.abort_flag.check()?;
        Ok(locked(&self.handle))
    }

    fn gone(&self) -> Result<()> {
        self.abort_flag.check()?;
        Err(Error::new(ErrorCategory::Transient, "the NCCL communicator was aborted"))
    }

    fn failed(&self, what: &str, status: NcclStatus) -> Error {
        let error = Error::new(ErrorCategory::Transient, format!("{what} failed in NCCL"))
            .because(self.nccl.text(status, None));
        match status {
            NcclStatus::REMOTE_ERROR => {
                error.because("another rank stopped, or the network between them did")
            }
            _ => error.hint("set `NCCL_DEBUG=WARN` and run again to see why"),
        }
    }

    /// Lets pending work finish on all ranks, for a bounded time.
    fn farewell(&self) -> Result<()> {
        // SAFETY: the handle is alive under the lock.
        self.call("the end", |table, comm| match unsafe { (table.comm_finalize)(comm) } {
            // Polled below, with a shorter deadline.
            NcclStatus::IN_PROGRESS => NcclStatus::SUCCESS,
            status => status,
        })?;
        let begin = Instant::now();
        while self.poll()? == NcclStatus::IN_PROGRESS {
            if begin.elapsed() > FAREWELL {
                return Err(Error::new(ErrorCategory::Transient, "the NCCL communicator did not end"));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if std::thread::panicking() || self.farewell().is_err() {
            self.abort();
            return;
        }
        let handle = locked(&self.handle).take();
        if let Some(handle) = handle {
            // SAFETY: the communicator is finalized and its handle taken.
            unsafe { (self.nccl.table.comm_destroy)(handle.0) };
        }
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a communicator of {:?}", self.nccl)
    }
}

fn int(number: usize) -> Result<c_int> {
    c_int::try_from(number).map_err(|_| Error::internal(format!("rank or color {number} is too large")))
}
