//! A communicator of the library that cannot hang: every call returns at once, and its progress is
//! polled until it finishes, another rank fails or the deadline passes.
//!
//! A lock guards the handle, held for one such call at a time. So another thread can take the
//! handle and abort it at any moment, and no thread uses it afterwards.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::abort_threads::{self, AbortThreads};
use super::library::{NcclConfig, NcclFunctions, NcclLibrary, NcclStatus, RawComm, UniqueId};
use crate::collective::hang_watch::GPU_SWITCHES;
use crate::collective::rank_threads;
use crate::error::{Error, ErrorCategory, Result};
use crate::locks::locked;

/// Maximum time for the end of a communicator before it is aborted. In tests it is long enough to
/// distinguish an end that waits for it on a busy machine.
pub(super) const FAREWELL: Duration = Duration::from_secs(if cfg!(test) { 300 } else { 10 });

/// Words of NCCL for two ranks on one GPU: those before 2.30, and those since.
const ONE_GPU: [&str; 2] = ["Duplicate GPU detected", "Ranks are using the same GPU"];

/// Sends to other processes that a rank of this one has failed, with the reason in one line.
type NotifyPeers = Box<dyn Fn(usize, &str) + Send + Sync>;

/// Stops all communicators of this process at once, with the reason that later calls return. All
/// ranks that are threads of the process share one; the rendezvous session raises it after a
/// failure elsewhere.
pub struct AbortFlag {
    cause: OnceLock<Error>,
    raised: AtomicBool,
    /// Error of the first rank of this process that failed by itself.
    own: OnceLock<Error>,
    notify_peers: OnceLock<NotifyPeers>,
    communicators: Mutex<Vec<Weak<Communicator>>>,
    aborts: Arc<AbortThreads>,
}

impl std::fmt::Debug for AbortFlag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "an abort flag with {:?}", self.cause)
    }
}

impl AbortFlag {
    /// Creates a flag that is not raised. A process that holds it may wait forever for ranks whose
    /// communicators cannot be aborted.
    pub fn new() -> Arc<AbortFlag> {
        Self::limited(abort_threads::LIMIT, None)
    }

    /// Creates a flag that is not raised. If communicators cannot be aborted, `end` must end the
    /// process: with the error of its own rank that failed first, else with the cause.
    pub fn ending_by(end: fn(&Error)) -> Arc<AbortFlag> {
        Self::limited(abort_threads::LIMIT, Some(end))
    }

    /// Creates a flag with another `limit` on the wait for aborts.
    pub(super) fn limited(limit: Duration, end: Option<fn(&Error)>) -> Arc<AbortFlag> {
        Arc::new(AbortFlag {
            cause: OnceLock::new(),
            raised: AtomicBool::new(false),
            own: OnceLock::new(),
            notify_peers: OnceLock::new(),
            communicators: Mutex::default(),
            aborts: AbortThreads::new(limit, end),
        })
    }

    /// Sets the sender of failures to other processes. Only the first call has an effect.
    pub fn notify_peers_by(&self, notify: impl Fn(usize, &str) + Send + Sync + 'static) {
        self.notify_peers.get_or_init(|| Box::new(notify));
    }

    /// Aborts all communicators, which ends kernels that wait for other ranks. Waits for the aborts
    /// for a limited time. Returns the first cause, which stays.
    pub fn raise(&self, cause: Error) -> Error {
        let cause = self.start_raise(cause);
        self.aborts.wait();
        cause
    }

    /// Raises the flag for `rank` of this process, which failed by itself with `error`. Informs the
    /// other processes first: their ranks may wait for this one, and its aborts for theirs.
    pub(super) fn raise_own(&self, rank: usize, error: Error, cause: Error) {
        self.own.get_or_init(|| error);
        // Before the peers' answer, which has other words.
        let cause = self.keep(cause);
        if let Some(notify) = self.notify_peers.get() {
            notify(rank, &rank_threads::in_a_line(&cause));
        }
        self.raise(cause);
    }

    /// Starts what [`AbortFlag::raise`] does, and does not wait for the aborts.
    pub fn start_raise(&self, cause: Error) -> Error {
        let cause = self.keep(cause);
        // The lock lets a second caller wait for the aborts that the first one starts.
        let mut communicators = locked(&self.communicators);
        self.raised.store(true, Ordering::SeqCst);
        for communicator in communicators.drain(..).filter(|communicator| communicator.strong_count() > 0) {
            self.aborts.start(move || {
                if let Some(communicator) = communicator.upgrade() {
                    communicator.abort_here();
                }
            });
        }
        drop(communicators);
        self.aborts.watch(self.own.get().unwrap_or(&cause));
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

impl Handle {
    /// Aborts the communicator, which may block inside NCCL.
    fn abort(self, nccl: &NcclLibrary) {
        // SAFETY: this owns the handle, so no thread uses it after this. The status is irrelevant:
        // the communicator is gone.
        unsafe { (nccl.table.comm_abort)(self.0) };
    }
}

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
        let handle: &'static mut RawComm = Box::leak(Box::new(std::ptr::null_mut()));
        let mut config = NcclConfig::non_blocking();
        // SAFETY: `handle` is leaked, and the configuration is read before the call returns.
        let status = unsafe {
            (library.table.comm_init_rank_config)(&raw mut *handle, size, *id, rank, &raw mut config)
        };
        if status != NcclStatus::SUCCESS && status != NcclStatus::IN_PROGRESS || handle.is_null() {
            return Err(refused(library, "cannot make an NCCL communicator", status));
        }
        let made = Self::of(library, abort_flag, deadline, *handle);
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
        let slot = Box::leak(Box::new(std::ptr::null_mut::<std::ffi::c_void>())) as *mut RawComm;
        let mut config = NcclConfig::non_blocking();
        // SAFETY: as for `meet`; the handle is alive under the lock.
        self.call("the split", |table, comm| unsafe {
            (table.comm_split)(comm, color, rank, slot, &raw mut config)
        })?;
        // SAFETY: leaked above; the library no longer writes it.
        let comm = unsafe { slot.read_volatile() };
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
        self.start(what, call)?;
        // Also after a success, which NCCL may return before a message is on its stream
        // (https://github.com/NVIDIA/nccl/issues/1495).
        self.settle(what)
    }

    /// Makes one call, which may still run on return.
    fn start(&self, what: &str, call: impl FnOnce(&NcclFunctions, RawComm) -> NcclStatus) -> Result<()> {
        let handle = self.handle()?;
        let Some(comm) = handle.as_ref() else { return self.gone() };
        let status = call(&self.nccl.table, comm.0);
        drop(handle);
        match status {
            NcclStatus::SUCCESS | NcclStatus::IN_PROGRESS => Ok(()),
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
                        .because(format!("waited {} s for the other ranks", self.deadline.as_secs()))
                        .hint(format!("if no other rank failed, {GPU_SWITCHES}"));
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

    /// Aborts the communicator and waits for that for a limited time. Later calls return the cause
    /// of the flag.
    fn abort(&self) {
        let Some(handle) = locked(&self.handle).take() else { return };
        let (nccl, flag) = (Arc::clone(&self.nccl), &self.abort_flag);
        flag.aborts.start(move || handle.abort(&nccl));
        let stuck = Error::new(ErrorCategory::Transient, "an NCCL communicator cannot be aborted");
        flag.aborts.watch(flag.own.get().or(flag.cause.get()).unwrap_or(&stuck));
        flag.aborts.wait();
    }

    /// Aborts the communicator on this thread, also during a wait of another one.
    fn abort_here(&self) {
        let handle = locked(&self.handle).take();
        if let Some(handle) = handle {
            handle.abort(&self.nccl);
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
        refused(&self.nccl, format!("{what} failed in NCCL"), status)
    }

    /// Lets pending work finish on all ranks, for a bounded time.
    fn farewell(&self) -> Result<()> {
        // SAFETY: the handle is alive under the lock.
        self.start("the end", |table, comm| unsafe { (table.comm_finalize)(comm) })?;
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

/// Returns the error `what` of a call that NCCL refused with `status`.
fn refused(nccl: &NcclLibrary, what: impl Into<String>, status: NcclStatus) -> Error {
    let text = nccl.text(status, None);
    if status == NcclStatus::INVALID_USAGE && ONE_GPU.iter().any(|words| text.contains(words)) {
        let mig = "MIG instances of one card cannot be ranks of one run before NCCL 2.31";
        return Error::user("two ranks use the same GPU")
            .because(text)
            .because(format!("each rank needs its own GPU; {mig}, and this is {}", nccl.version()))
            .hint(
                "name another GPU for each rank with `--gpus`; `nvidia-smi -L` lists GPUs and MIG instances",
            );
    }
    let error = Error::new(ErrorCategory::Transient, what).because(text);
    match status {
        NcclStatus::REMOTE_ERROR => error.because("another rank stopped, or the network between them did"),
        _ => error.hint("set `NCCL_DEBUG=WARN` and run again to see why"),
    }
}

fn int(number: usize) -> Result<c_int> {
    c_int::try_from(number).map_err(|_| Error::internal(format!("rank or color {number} is too large")))
}
