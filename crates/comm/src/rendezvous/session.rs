//! One process's end of the rendezvous, from joining to leaving.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::connections::{Connections, Failure};
use super::heartbeat;
use super::join::{Joined, join, register};
use super::listener::Listener;
use super::message::{JoinRequest, MAX_PAYLOAD, MAX_TEXT, Peer, printable};
use super::options::RendezvousOptions;
use crate::error::{Error, Result};

/// One process's end of the rendezvous. Dropping it without [`Session::leave`] counts as a failure
/// for the others.
#[derive(Debug)]
pub struct Session {
    connections: Arc<Connections>,
    readers: Vec<JoinHandle<()>>,
    call_timeout: Duration,
}

impl Session {
    /// Joins the other processes of the run with `request`; returns when all have joined and agree.
    ///
    /// # Errors
    /// [`crate::error::ErrorCategory::User`] if secrets, world sizes, ranks or digests differ; the
    /// error names both sides and is the same in every process.
    /// [`crate::error::ErrorCategory::Transient`] if ranks are missing at the deadline or rank 0 is
    /// unreachable.
    pub fn join(request: JoinRequest, options: &RendezvousOptions) -> Result<Session> {
        match &options.master {
            Some(_) if request.peer.rank == 0 => Self::join_at(Listener::open(options)?, request, options),
            Some(master) => Self::start(request.peer.rank, join(master, &request, options)?, options),
            None => {
                let rank = request.peer.rank;
                let alone = Joined { peers: vec![request.peer], connections: vec![None] };
                Self::start(rank, alone, options)
            }
        }
    }

    /// Joins as the process of rank 0, with a listener that is already open.
    ///
    /// # Errors
    /// Same as [`Session::join`].
    pub fn join_at(listener: Listener, request: JoinRequest, options: &RendezvousOptions) -> Result<Session> {
        let rank = request.peer.rank;
        Self::start(rank, register(listener, request, options)?, options)
    }

    fn start(rank: usize, joined: Joined, options: &RendezvousOptions) -> Result<Session> {
        let own = joined.peers.iter().position(|peer| peer.rank == rank);
        let own = own.ok_or_else(|| Error::internal("this process is not among those that joined"))?;
        let (connections, mut readers) = Connections::start(own, joined)?;
        if connections.peers.len() > 1 {
            readers.push(heartbeat::start(&connections, options.silence_limit)?);
        }
        Ok(Session { connections, readers, call_timeout: options.call_timeout })
    }

    /// Processes of the run in ascending order of ranks; an elastic rendezvous may leave gaps.
    pub fn peers(&self) -> &[Peer] {
        &self.connections.peers
    }

    /// Index of this process in [`Session::peers`].
    pub fn process_index(&self) -> usize {
        self.connections.own
    }

    /// Sends the bytes (up to [`MAX_PAYLOAD`]) that `make` returns in the process of rank 0 to all.
    /// `name` describes them and is equal in all processes.
    ///
    /// # Errors
    /// The error of `make` (only there; the others wait until that process fails).
    /// [`crate::error::ErrorCategory::Transient`] if a process has failed, or rank 0 broadcasts
    /// other data or none within the options' `call_timeout`; it names the rank.
    pub fn broadcast(&self, name: &str, make: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
        if self.process_index() != 0 {
            return self.connections.receive_broadcast(name, Instant::now() + self.call_timeout);
        }
        let bytes = make()?;
        if bytes.len() > MAX_PAYLOAD {
            return Err(Error::internal(format!("cannot broadcast {} bytes of {name}", bytes.len()))
                .because(format!("accepted: up to {MAX_PAYLOAD}")));
        }
        self.connections.broadcast(name, &bytes)?;
        Ok(bytes)
    }

    /// Informs all processes that `rank`, one of this process's, has failed. Only the first failure
    /// of a run has an effect.
    pub fn fail(&self, rank: usize, why: &str) {
        self.messenger().fail(rank, why);
    }

    /// Returns a sender of failures for any thread; it keeps the session's connections, not the
    /// session.
    pub fn messenger(&self) -> Messenger {
        Messenger(Arc::clone(&self.connections))
    }

    /// Sends `status`, a line about the ranks of this process, to the other processes every few
    /// seconds. They report it if this process becomes silent.
    pub fn report_status(&self, status: impl Fn() -> String + Send + Sync + 'static) {
        self.connections.report_status(Box::new(status));
    }

    /// The first failure of the run in any process, if there is one.
    pub fn failure(&self) -> Option<Failure> {
        self.connections.failure()
    }

    /// Calls `hook` once with the first failure of the run, from the thread that receives it, or at
    /// once if it already happened. `hook` may abort waits elsewhere, but must not drop this value.
    pub fn on_failure(&self, hook: impl FnOnce(&Failure) + Send + 'static) {
        self.connections.on_failure(Box::new(hook));
    }

    /// Ends the session without a failure, after all processes have called it.
    ///
    /// # Errors
    /// [`crate::error::ErrorCategory::Transient`] if a process has failed, is gone, or does not
    /// call it within the options' `call_timeout`; it names the rank.
    pub fn leave(self) -> Result<()> {
        self.connections.leave(Instant::now() + self.call_timeout)
    }
}

/// Sender of failures, from [`Session::messenger`].
#[derive(Debug, Clone)]
pub struct Messenger(Arc<Connections>);

impl Messenger {
    /// Same as [`Session::fail`].
    pub fn fail(&self, rank: usize, why: &str) {
        let host = self.0.peers[self.0.own].host.clone();
        self.0.fail(Failure { rank, host, why: printable(why, MAX_TEXT) }, None);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.connections.close();
        for reader in self.readers.drain(..) {
            if reader.thread().id() != std::thread::current().id() {
                // The thread has reported its own panic.
                let _ = reader.join();
            }
        }
    }
}

/// Name of this host, for messages.
pub fn host_name() -> String {
    let mut name = [0_u8; 256];
    // SAFETY: the pointer and length are those of a buffer that outlives the call.
    let status = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(0);
    match std::str::from_utf8(&name[..end]) {
        Ok(name) if status == 0 && !name.is_empty() => printable(name, 255),
        _ => "an unnamed host".to_owned(),
    }
}
