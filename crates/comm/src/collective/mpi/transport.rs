//! The MPI library of this process, shared by its ranks: non-blocking messages that are started and
//! tested, and the failure messages of ranks.
//!
//! Every MPI call is made under one lock and returns at once. So thread level `Serialized` suffices
//! for any number of ranks, another thread can report a failure while a rank's thread waits, and
//! each wait checks for failed peers and its deadline. A failure belongs to the process: the first
//! one ends the waits of all its ranks and is sent to the other processes once. Errors are returned
//! as codes: MPI's own handler, which ends the process, is disabled.

use std::ffi::{c_int, c_void};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::environment::Universe;
use mpi::ffi;
use mpi::traits::AsRaw;

use super::tags::Tags;
use crate::collective::launch::Launch;
use crate::error::{Error, ErrorCategory, Result};
use crate::locks::locked;

/// Tag of the failure communicator.
const TAG_FAILURE: c_int = 0;

/// Largest tag that every MPI library accepts (MPI 3.1, section 8.1.2).
const LEAST_LARGEST_TAG: c_int = 32_767;

/// Maximum length of a failed rank's reason in bytes.
const REASON_BYTES: usize = 1024;

/// Time that a failed rank gives MPI to send its reason; small messages need microseconds.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Handle of a communicator. It is freed when MPI ends: freeing is collective, and drops of a
/// failed rank must not wait for its peers.
#[derive(Clone, Copy)]
struct MpiComm(ffi::MPI_Comm);

// SAFETY: a handle is an address or a number that MPI created for the whole process;
// `MpiTransport::calls` guards its use.
unsafe impl Send for MpiComm {}
// SAFETY: as above.
unsafe impl Sync for MpiComm {}

/// See the module.
pub(super) struct MpiTransport {
    universe: ManuallyDrop<Universe>,
    calls: Mutex<()>,
    world: MpiComm,
    /// Carries only failures, so that no other message delays them.
    control: MpiComm,
    process: usize,
    processes: usize,
    pub(super) tags: Tags,
    pub(super) deadline: Duration,
    failure: OnceLock<Error>,
    raised: AtomicBool,
    /// True if a message was abandoned: then MPI must not be finalized.
    abandoned: AtomicBool,
}

impl MpiTransport {
    /// Starts MPI in this process, on the thread that will drop this value. The drop ends MPI,
    /// which waits for all processes.
    ///
    /// # Errors
    /// MPI was started before, does not support threads, or has other processes than `launch`.
    pub(super) fn start(launch: &Launch, deadline: Duration) -> Result<MpiTransport> {
        let cannot = || Error::user("cannot start MPI");
        let Some((universe, level)) = mpi::initialize_with_threading(Threading::Serialized) else {
            return Err(Error::internal("MPI is started a second time in this process"));
        };
        if level < Threading::Serialized {
            return Err(cannot()
                .because(format!("it supports thread level {level:?}; required: at least Serialized"))
                .hint("use an MPI library with thread support"));
        }
        let world = universe.world().as_raw();
        let mut control = MaybeUninit::uninit();
        let (mut process, mut processes) = (0, 0);
        // SAFETY: MPI is initialized, and the pointers are to locals of the types that MPI writes.
        let code = unsafe {
            ffi::MPI_Comm_set_errhandler(world, ffi::RSMPI_ERRORS_RETURN);
            ffi::MPI_Comm_rank(world, &mut process);
            ffi::MPI_Comm_size(world, &mut processes);
            ffi::MPI_Comm_dup(world, control.as_mut_ptr())
        };
        checked(code, "MPI_Comm_dup")?;
        let wire = MpiTransport {
            universe: ManuallyDrop::new(universe),
            calls: Mutex::new(()),
            world: MpiComm(world),
            // SAFETY: MPI_Comm_dup succeeded.
            control: MpiComm(unsafe { control.assume_init() }),
            process: usize::try_from(process).unwrap_or(0),
            processes: usize::try_from(processes).unwrap_or(1),
            tags: Tags { ranks_here: launch.ranks_here, largest: largest_tag(world) },
            deadline,
            failure: OnceLock::new(),
            raised: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
        };
        // Recorded as the failure, so that ending MPI does not wait for the other processes.
        wire.check(launch).map_err(|error| wire.fail(error))?;
        Ok(wire)
    }

    /// Checks that MPI's number and order of processes agree with `launch`.
    fn check(&self, launch: &Launch) -> Result<()> {
        let here = launch.ranks_here;
        let (first, size) = (self.process * here, self.processes * here);
        if (first, size) == (launch.rank, launch.world_size) {
            return self.tags.check(0);
        }
        let named = |first: usize, size: usize| match here {
            1 => format!("rank {first} of {size}"),
            _ => format!("ranks {first}-{} of {size}", first + here - 1),
        };
        Err(Error::user("cannot train over MPI")
            .because(format!("by {} this process is {}", launch.source.name(), named(launch.rank, launch.world_size)))
            .because(format!(
                "MPI started it as process {} of {}, which is {}",
                self.process,
                self.processes,
                named(first, size)
            ))
            .hint("start all processes with one `mpirun`, the same `--ranks` in each, without `--rank` and `--world-size`"))
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        locked(&self.calls)
    }

    /// Returns the failure of a rank, of this process or another, if there is one.
    pub(super) fn healthy(&self) -> Result<()> {
        match self.failure.get() {
            Some(failure) => Err(failure.clone()),
            None => self.look_for_failures(),
        }
    }

    /// Records the first failure and returns it.
    pub(super) fn fail(&self, error: Error) -> Error {
        self.failure.get_or_init(|| error).clone()
    }

    fn look_for_failures(&self) -> Result<()> {
        let mut status = MaybeUninit::<ffi::MPI_Status>::uninit();
        let mut found = 0;
        let mut reason = vec![0_u8; REASON_BYTES];
        let lock = self.lock();
        // SAFETY: as for every call here; a probed message exists, so receiving it does not wait.
        let source = unsafe {
            let code = ffi::MPI_Iprobe(
                ffi::RSMPI_ANY_SOURCE,
                TAG_FAILURE,
                self.control.0,
                &mut found,
                status.as_mut_ptr(),
            );
            checked(code, "MPI_Iprobe")?;
            if found == 0 {
                return Ok(());
            }
            let source = status.assume_init().MPI_SOURCE;
            let code = ffi::MPI_Recv(
                reason.as_mut_ptr().cast::<c_void>(),
                REASON_BYTES as c_int,
                ffi::RSMPI_UINT8_T,
                source,
                TAG_FAILURE,
                self.control.0,
                status.as_mut_ptr(),
            );
            checked(code, "MPI_Recv")?;
            source
        };
        drop(lock);
        let end = reason.iter().position(|byte| *byte == 0).unwrap_or(reason.len());
        let reason = String::from_utf8_lossy(&reason[..end]).into_owned();
        let mut lines = reason.lines();
        let what =
            lines.next().map_or_else(|| format!("a rank of process {source} failed"), ToOwned::to_owned);
        Err(self.fail(lines.fold(Error::new(ErrorCategory::Transient, what), Error::because)))
    }

    /// Ends the waits of this process's ranks with `news` and sends it to the other processes. Only
    /// the first call has an effect.
    pub(super) fn raise(&self, news: &Error) {
        if self.raised.swap(true, Ordering::SeqCst) {
            return;
        }
        self.fail(news.clone());
        let lines: Vec<&str> =
            std::iter::once(news.what()).chain(news.causes().iter().map(String::as_str)).collect();
        let why = lines.join("\n");
        let mut reason = vec![0_u8; REASON_BYTES];
        let end = why.len().min(REASON_BYTES);
        reason[..end].copy_from_slice(&why.as_bytes()[..end]);
        // MPI may read it until the process ends.
        let reason: &'static [u8] = Vec::leak(reason);
        let mut requests = Vec::new();
        for peer in (0..self.processes).filter(|peer| *peer != self.process) {
            let address = reason.as_ptr() as usize;
            if let Ok(request) = self.send_on(self.control, address, REASON_BYTES, peer, TAG_FAILURE) {
                requests.push(request);
            }
        }
        let begin = Instant::now();
        while begin.elapsed() < LAST_WORDS && !matches!(self.done(&mut requests), Ok(true) | Err(_)) {
            std::thread::yield_now();
        }
    }

    /// Records that messages were abandoned.
    pub(super) fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
    }

    /// Starts to send `bytes` bytes at `address`, which the caller keeps in place until the request
    /// finishes.
    pub(super) fn send(&self, address: usize, bytes: usize, process: usize, tag: c_int) -> Result<Request> {
        self.send_on(self.world, address, bytes, process, tag)
    }

    fn send_on(
        &self,
        comm: MpiComm,
        address: usize,
        bytes: usize,
        process: usize,
        tag: c_int,
    ) -> Result<Request> {
        let mut request = MaybeUninit::uninit();
        let _lock = self.lock();
        // SAFETY: the caller keeps the bytes in place until the request finishes (`Transfer`, or
        // forever).
        let code = unsafe {
            ffi::MPI_Isend(
                address as *const c_void,
                bytes as c_int,
                ffi::RSMPI_UINT8_T,
                process as c_int,
                tag,
                comm.0,
                request.as_mut_ptr(),
            )
        };
        checked(code, "MPI_Isend")?;
        // SAFETY: MPI_Isend succeeded.
        Ok(Request(unsafe { request.assume_init() }))
    }

    /// Starts to receive `bytes` bytes to `address`, which the caller keeps in place and does not
    /// access until the request finishes.
    pub(super) fn receive(
        &self,
        address: usize,
        bytes: usize,
        process: usize,
        tag: c_int,
    ) -> Result<Request> {
        let mut request = MaybeUninit::uninit();
        let _lock = self.lock();
        // SAFETY: the caller keeps the bytes in place and does not access them until the request
        // finishes (`Transfer`).
        let code = unsafe {
            ffi::MPI_Irecv(
                address as *mut c_void,
                bytes as c_int,
                ffi::RSMPI_UINT8_T,
                process as c_int,
                tag,
                self.world.0,
                request.as_mut_ptr(),
            )
        };
        checked(code, "MPI_Irecv")?;
        // SAFETY: MPI_Irecv succeeded.
        Ok(Request(unsafe { request.assume_init() }))
    }

    /// Returns true if all requests have finished; finished ones become null.
    pub(super) fn done(&self, requests: &mut [Request]) -> Result<bool> {
        let mut flag = 0;
        let _lock = self.lock();
        // SAFETY: `Request` is only its handle; the count is the slice's length.
        let code = unsafe {
            ffi::MPI_Testall(
                requests.len() as c_int,
                requests.as_mut_ptr().cast::<ffi::MPI_Request>(),
                &mut flag,
                ffi::RSMPI_STATUSES_IGNORE,
            )
        };
        checked(code, "MPI_Testall")?;
        Ok(flag != 0)
    }
}

impl Drop for MpiTransport {
    /// Ends MPI, which waits for all ranks. After a failure it does not: the launcher treats the
    /// exit of a rank that did not end MPI as the end of all.
    fn drop(&mut self) {
        let failed = self.failure.get().is_some() || self.abandoned.load(Ordering::SeqCst);
        if !failed && !std::thread::panicking() {
            // SAFETY: dropped here and nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.universe) };
        }
    }
}

/// A started message.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Request(ffi::MPI_Request);

// SAFETY: same as `MpiComm`.
unsafe impl Send for Request {}
// SAFETY: as above.
unsafe impl Sync for Request {}

/// Largest tag that this MPI library accepts.
fn largest_tag(world: ffi::MPI_Comm) -> c_int {
    let (mut value, mut found): (*const c_int, c_int) = (std::ptr::null(), 0);
    // SAFETY: MPI is initialized; the attribute's value is the address of an int that MPI keeps.
    unsafe {
        let key = ffi::MPI_TAG_UB as c_int;
        let code = ffi::MPI_Comm_get_attr(world, key, (&raw mut value).cast::<c_void>(), &mut found);
        if code == 0 && found != 0 && !value.is_null() { *value } else { LEAST_LARGEST_TAG }
    }
}

/// Error of a failed MPI call.
fn checked(code: c_int, function: &str) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // MPI_MAX_ERROR_STRING is 256 in Open MPI, 512 in MPICH.
    let mut text = [0_u8; 1024];
    let mut length = 0;
    // SAFETY: the buffer is longer than any text of MPI.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    let text = String::from_utf8_lossy(&text[..usize::try_from(length).unwrap_or(0).min(1024)]).into_owned();
    Err(Error::new(ErrorCategory::Transient, format!("{function} failed")).because(text))
}
