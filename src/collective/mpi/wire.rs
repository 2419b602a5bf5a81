//! The MPI library of this process, as far as the backend uses it: messages that are started, tested and never waited
//! for inside MPI, splits, and the word of a failed rank.
//!
//! Every call to MPI is made under one lock and returns at once (splits apart, on which all ranks have agreed before).
//! So thread level `Serialized` is enough, another thread can raise the alarm while the rank's thread waits, and each
//! wait here looks for a failed peer and at its deadline. Errors come back as codes: MPI's own handler, which
//! ends the process, is switched off.

use std::ffi::{c_int, c_void};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::environment::Universe;
use mpi::ffi;
use mpi::traits::AsRaw;

use crate::collective::Memory;
use crate::collective::record::Whereabouts;
use crate::error::{Error, Kind, Result};

/// Tags of messages. A failure has its own communicator as well, so that no group's messages are in its way.
pub(super) const TAG_RECORD: c_int = 1;
pub(super) const TAG_DATA: c_int = 2;
const TAG_FAILURE: c_int = 3;

/// Counts are C ints in MPI 3: longer messages go in pieces.
const MESSAGE_BYTES: usize = 1 << 30;

/// What a failed rank says is cut to this.
const REASON_BYTES: usize = 1024;

/// How long a failed rank gives MPI to take its last words; small messages take it microseconds.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A communicator's handle. It is freed when MPI ends: freeing is collective, and nothing that a failed rank drops
/// may wait for its peers.
#[derive(Clone, Copy)]
pub(super) struct Comm(ffi::MPI_Comm);

// SAFETY: a handle is an address or a number that MPI gave out for the whole process; it is used under `Wire::calls`.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// See the module.
pub(super) struct Wire {
    universe: ManuallyDrop<Universe>,
    calls: Mutex<()>,
    world: Comm,
    /// Carries failures only.
    control: Comm,
    pub(super) rank: usize,
    pub(super) size: usize,
    deadline: Duration,
    failure: OnceLock<Error>,
    raised: AtomicBool,
    /// A message was left behind: MPI must not be asked to end in order.
    abandoned: AtomicBool,
    pub(super) place: Mutex<Whereabouts>,
}

impl Wire {
    /// Starts MPI in this process.
    pub(super) fn start(deadline: Duration) -> Result<Wire> {
        let cannot = || Error::user("cannot start MPI");
        let Some((universe, level)) = mpi::initialize_with_threading(Threading::Serialized) else {
            return Err(Error::internal("MPI is started a second time in this process"));
        };
        if level < Threading::Serialized {
            return Err(cannot()
                .because(format!("it supports thread level {level:?}, at least Serialized is needed"))
                .hint("use an MPI library that was built with threads"));
        }
        let world = universe.world().as_raw();
        let mut control = MaybeUninit::uninit();
        let (mut rank, mut size) = (0, 0);
        // SAFETY: MPI is initialized, the pointers are to locals of the types that MPI writes.
        let code = unsafe {
            ffi::MPI_Comm_set_errhandler(world, ffi::RSMPI_ERRORS_RETURN);
            ffi::MPI_Comm_rank(world, &mut rank);
            ffi::MPI_Comm_size(world, &mut size);
            ffi::MPI_Comm_dup(world, control.as_mut_ptr())
        };
        checked(code, "MPI_Comm_dup")?;
        Ok(Wire {
            universe: ManuallyDrop::new(universe),
            calls: Mutex::new(()),
            world: Comm(world),
            // SAFETY: MPI_Comm_dup succeeded.
            control: Comm(unsafe { control.assume_init() }),
            rank: usize::try_from(rank).unwrap_or(0),
            size: usize::try_from(size).unwrap_or(1),
            deadline,
            failure: OnceLock::new(),
            raised: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            place: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of the world, for the world's group.
    pub(super) fn world(&self) -> Comm {
        self.world
    }

    /// The group of the ranks of `comm` that give the same `color`, by their rank there. All of them call it.
    pub(super) fn split(&self, comm: Comm, color: usize, rank: usize) -> Result<Comm> {
        let int = |number: usize| {
            c_int::try_from(number)
                .map_err(|_| Error::internal(format!("color or rank {number} is too large")))
        };
        let (color, rank) = (int(color)?, int(rank)?);
        let mut made = MaybeUninit::uninit();
        let _lock = self.lock();
        // SAFETY: the communicator is valid, `made` is written on success.
        let code = unsafe { ffi::MPI_Comm_split(comm.0, color, rank, made.as_mut_ptr()) };
        checked(code, "MPI_Comm_split")?;
        // SAFETY: MPI_Comm_split succeeded.
        Ok(Comm(unsafe { made.assume_init() }))
    }

    /// The failure of this or another rank, if there is one.
    pub(super) fn healthy(&self) -> Result<()> {
        match self.failure.get() {
            Some(failure) => Err(failure.clone()),
            None => self.look_for_failures(),
        }
    }

    /// Remembers the first failure and gives it back.
    pub(super) fn fail(&self, error: Error) -> Error {
        self.failure.get_or_init(|| error).clone()
    }

    fn look_for_failures(&self) -> Result<()> {
        let mut status = MaybeUninit::<ffi::MPI_Status>::uninit();
        let mut found = 0;
        let mut reason = vec![0_u8; REASON_BYTES];
        let lock = self.lock();
        // SAFETY: as for every call here; a message that was probed is there, so receiving it does not wait.
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
        let what = lines.next().map_or_else(|| format!("rank {source} failed"), ToOwned::to_owned);
        Err(self.fail(lines.fold(Error::new(Kind::Transient, what), Error::because)))
    }

    /// Where this rank is.
    pub(super) fn place(&self) -> Whereabouts {
        self.place.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Tells all ranks of the world that this one has failed.
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
        for peer in (0..self.size).filter(|peer| *peer != self.rank) {
            if let Ok(request) =
                self.send(self.control, reason.as_ptr() as usize, REASON_BYTES, peer, TAG_FAILURE)
            {
                requests.push(request);
            }
        }
        let begin = Instant::now();
        while begin.elapsed() < LAST_WORDS && !matches!(self.done(&mut requests), Ok(true) | Err(_)) {
            std::thread::yield_now();
        }
    }

    fn send(&self, comm: Comm, address: usize, bytes: usize, peer: usize, tag: c_int) -> Result<Request> {
        let mut request = MaybeUninit::uninit();
        let _lock = self.lock();
        // SAFETY: the caller keeps the bytes in place until the request is done (`Transfer`, or for ever).
        let code = unsafe {
            ffi::MPI_Isend(
                address as *const c_void,
                bytes as c_int,
                ffi::RSMPI_UINT8_T,
                peer as c_int,
                tag,
                comm.0,
                request.as_mut_ptr(),
            )
        };
        checked(code, "MPI_Isend")?;
        // SAFETY: MPI_Isend succeeded.
        Ok(Request(unsafe { request.assume_init() }))
    }

    fn receive(&self, comm: Comm, address: usize, bytes: usize, peer: usize, tag: c_int) -> Result<Request> {
        let mut request = MaybeUninit::uninit();
        let _lock = self.lock();
        // SAFETY: the caller keeps the bytes in place and to itself until the request is done (`Transfer`).
        let code = unsafe {
            ffi::MPI_Irecv(
                address as *mut c_void,
                bytes as c_int,
                ffi::RSMPI_UINT8_T,
                peer as c_int,
                tag,
                comm.0,
                request.as_mut_ptr(),
            )
        };
        checked(code, "MPI_Irecv")?;
        // SAFETY: MPI_Irecv succeeded.
        Ok(Request(unsafe { request.assume_init() }))
    }

    /// Whether all are done; those that are become null.
    fn done(&self, requests: &mut [Request]) -> Result<bool> {
        let mut flag = 0;
        let _lock = self.lock();
        // SAFETY: `Request` is its handle alone; the number is that of the slice.
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

impl Drop for Wire {
    /// Ends MPI in order, which waits for all ranks; after a failure it is left to the launcher, which takes the exit of a
    /// rank that did not end MPI as the end of all.
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
struct Request(ffi::MPI_Request);

// SAFETY: as `Comm`.
unsafe impl Send for Request {}
// SAFETY: as above.
unsafe impl Sync for Request {}

/// Messages that belong together, with the memory that MPI reads and writes until they are done. Memory of messages that
/// never were is leaked: MPI may still write it.
pub(super) struct Transfer {
    wire: Arc<Wire>,
    comm: Comm,
    tag: c_int,
    requests: Vec<Request>,
    /// The peer of each request, ranks of `comm`, and whether it is a receive.
    peers: Vec<(usize, bool)>,
    memory: Vec<Memory>,
    scratch: Vec<u64>,
}

impl Transfer {
    /// Nothing started yet; `memory` and `scratch` are what the messages will read and write.
    pub(super) fn new(
        wire: &Arc<Wire>,
        comm: Comm,
        tag: c_int,
        memory: Vec<Memory>,
        scratch: Vec<u64>,
    ) -> Self {
        Transfer {
            wire: Arc::clone(wire),
            comm,
            tag,
            requests: Vec::new(),
            peers: Vec::new(),
            memory,
            scratch,
        }
    }

    /// Where the scratch begins.
    pub(super) fn scratch(&mut self) -> usize {
        self.scratch.as_mut_ptr() as usize
    }

    /// Starts to send what is at `address`, inside the memory of this transfer.
    pub(super) fn send(&mut self, address: usize, bytes: usize, peer: usize) -> Result<()> {
        self.start(address, bytes, peer, false)
    }

    /// Starts to receive to `address`, inside the memory of this transfer.
    pub(super) fn receive(&mut self, address: usize, bytes: usize, peer: usize) -> Result<()> {
        self.start(address, bytes, peer, true)
    }

    fn start(&mut self, address: usize, bytes: usize, peer: usize, receive: bool) -> Result<()> {
        for at in (0..bytes).step_by(MESSAGE_BYTES) {
            let piece = MESSAGE_BYTES.min(bytes - at);
            let (wire, comm, tag) = (&self.wire, self.comm, self.tag);
            let request = if receive {
                wire.receive(comm, address + at, piece, peer, tag)
            } else {
                wire.send(comm, address + at, piece, peer, tag)
            };
            self.requests.push(request.map_err(|error| wire.fail(error))?);
            self.peers.push((peer, receive));
        }
        Ok(())
    }

    /// Waits for all messages and gives the scratch back.
    ///
    /// # Errors
    /// A rank failed or did not answer in time: `late` makes the error from the silent peers.
    pub(super) fn finish(mut self, late: impl FnOnce(&[usize], Duration) -> Error) -> Result<Vec<u64>> {
        let begin = Instant::now();
        let mut rounds = 0_u32;
        loop {
            if self.wire.done(&mut self.requests).map_err(|error| self.wire.fail(error))? {
                self.requests.clear();
                return Ok(std::mem::take(&mut self.scratch));
            }
            rounds = rounds.saturating_add(1);
            if rounds.is_multiple_of(64) {
                self.wire.healthy()?;
                if begin.elapsed() > self.wire.deadline {
                    let silent = self.silent();
                    return Err(self.wire.fail(late(&silent, self.wire.deadline)));
                }
            }
            // Ranks may outnumber cores: a peer that waits for this core must get it.
            if rounds < 4096 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// The peers whose messages have not come, or who have not taken theirs.
    fn silent(&mut self) -> Vec<usize> {
        let mut silent = Vec::new();
        for (request, (peer, receive)) in self.requests.iter_mut().zip(&self.peers) {
            let done = self.wire.done(std::slice::from_mut(request)).unwrap_or(false);
            if !done && *receive && !silent.contains(peer) {
                silent.push(*peer);
            }
        }
        silent
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if !self.requests.is_empty() {
            self.wire.abandoned.store(true, Ordering::SeqCst);
            std::mem::forget(std::mem::take(&mut self.memory));
            std::mem::forget(std::mem::take(&mut self.scratch));
        }
    }
}

/// The error of an MPI call that did not succeed.
fn checked(code: c_int, function: &str) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // MPI_MAX_ERROR_STRING is 256 in Open MPI, 512 in MPICH.
    let mut text = [0_u8; 1024];
    let mut length = 0;
    // SAFETY: the buffer is longer than any text of MPI's.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    let text = String::from_utf8_lossy(&text[..usize::try_from(length).unwrap_or(0).min(1024)]).into_owned();
    Err(Error::new(Kind::Transient, format!("{function} failed")).because(text))
}
