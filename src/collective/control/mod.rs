//! The control channel between the processes of a run: who is there, whether all are about to run the same, small
//! bytes that all need (the id of an NCCL group), and the news that one has failed. Never tensors.
//!
//! Rank 0 listens on the master address, the others connect; a run of one process opens no socket. Ends prove to each
//! other that they know a secret (`handshake`), frames are capped and carry tags (`wire`, `message`), the door of rank 0
//! keeps strangers from doing harm (`door`, `secret`), and nobody goes on before every rank has come exactly once with
//! the same digests (`meeting`, `roll`). Then one thread per connection reads (`room`), so that a failure, told or seen
//! as a lost connection, reaches everybody at once whatever the rest is doing. Plain threads and sockets: there are as
//! many connections as processes, and they carry a few kilobytes.
//!
//! A process is one end here, whatever number of ranks it holds. What to do about a failure is the caller's business;
//! silent hangs of a process that lives are for a later heartbeat.

mod door;
mod handshake;
mod meeting;
mod message;
mod roll;
mod room;
mod secret;
mod wire;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use door::Door;
pub use message::{MAX_SHARE, Peer};
pub use room::Failure;
pub use secret::{Notice, Secret, Terms};

use super::launch::Launch;
use super::rank_threads::locked;
use crate::error::{Error, Result};
use meeting::Met;
use message::{Hello, Round, Share};
use room::Room;

/// What a process says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The name of its host, for messages and for what is done once per host.
    pub host: String,
    /// What it is about to run, as hex digests by name (`binary`, `plan`, `data`, `model`); up to 16 of them. All
    /// processes must have the same.
    pub digests: BTreeMap<String, String>,
}

impl Identity {
    /// The identity of a process on this host.
    pub fn here(digests: BTreeMap<String, String>) -> Self {
        Identity { host: host_name(), digests }
    }
}

/// One process's end of the channel. Dropping it without [`Control::leave`] counts as a failure for the others.
#[derive(Debug)]
pub struct Control {
    room: Arc<Room>,
    /// The number of the next call; held during a call.
    turn: Mutex<u64>,
    readers: Vec<JoinHandle<()>>,
    patience: Duration,
}

impl Control {
    /// Meets the other processes of `launch`; returns when all are there and agree.
    ///
    /// # Errors
    /// [`crate::error::ErrorCategory::User`] when secrets, world sizes, ranks or digests do not fit together, with both sides named, the same
    /// in every process; [`crate::error::ErrorCategory::Transient`] when ranks are missing at the deadline or rank 0 cannot be reached.
    pub fn meet(launch: &Launch, identity: &Identity, terms: &Terms) -> Result<Control> {
        match &launch.master {
            Some(_) if launch.rank == 0 => Self::meet_at(Door::open(launch, terms)?, launch, identity, terms),
            Some(master) => {
                let met = meeting::join(master, &hello(launch, identity), &launch.run, terms)?;
                Self::begin(launch, met, terms)
            }
            None => {
                let met = Met { peers: vec![hello(launch, identity).peer], links: vec![None] };
                Self::begin(launch, met, terms)
            }
        }
    }

    /// [`Control::meet`] for the process of rank 0, at a door that is open already.
    ///
    /// # Errors
    /// As [`Control::meet`].
    pub fn meet_at(door: Door, launch: &Launch, identity: &Identity, terms: &Terms) -> Result<Control> {
        let met = meeting::host(door, hello(launch, identity), &launch.run, terms)?;
        Self::begin(launch, met, terms)
    }

    fn begin(launch: &Launch, met: Met, terms: &Terms) -> Result<Control> {
        let own = met.peers.iter().position(|peer| peer.rank == launch.rank);
        let own = own.ok_or_else(|| Error::internal("this process is not among those that met"))?;
        let (room, readers) = Room::open(own, met)?;
        Ok(Control { room, turn: Mutex::new(0), readers, patience: terms.patience })
    }

    /// The processes of the run, ascending by rank.
    pub fn peers(&self) -> &[Peer] {
        &self.room.peers
    }

    /// The place of this process among [`Control::peers`].
    pub fn process(&self) -> usize {
        self.room.own
    }

    /// Whether this process is the first of its host: the one to do what is done once per host.
    pub fn is_first_of_host(&self) -> bool {
        let host = &self.peers()[self.process()].host;
        self.peers()[..self.process()].iter().all(|peer| peer.host != *host)
    }

    /// Gives the bytes that `make` makes in the process of rank 0 to all. `what` names the call, the same everywhere.
    ///
    /// # Errors
    /// What `make` returns (only there; the others wait until that process fails); as [`Control::exchange`].
    pub fn broadcast(&self, what: &str, make: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
        let bytes = if self.process() == 0 { make()? } else { Vec::new() };
        let mut parts = self.round(Round::Broadcast, what, bytes)?;
        Ok(parts.pop().unwrap_or_default())
    }

    /// Gives every process the bytes of every process (up to [`MAX_SHARE`] each, meant for a few kilobytes), in the
    /// order of [`Control::peers`].
    ///
    /// # Errors
    /// [`crate::error::ErrorCategory::Transient`] when a process has failed, is gone, makes another call, or does not come to this one within
    /// the terms' patience; the rank is named.
    pub fn exchange(&self, what: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.round(Round::Exchange, what, bytes)
    }

    /// Returns when all processes have called it.
    ///
    /// # Errors
    /// As [`Control::exchange`].
    pub fn barrier(&self, what: &str) -> Result<()> {
        self.round(Round::Barrier, what, Vec::new()).map(drop)
    }

    /// Tells all processes that `rank`, one of this process's, has failed. The first failure of a run counts; a later
    /// one changes nothing.
    pub fn fail(&self, rank: usize, why: &str) {
        let host = self.peers()[self.process()].host.clone();
        self.room.fail(Failure { rank, host, why: wire::plain(why, 4096) }, None);
    }

    /// The first failure of the run, if there is one: this process's or another's.
    pub fn failure(&self) -> Option<Failure> {
        self.room.failure()
    }

    /// Calls `hook` once with the first failure of the run, from the thread that learns of it, or at once if there is
    /// one already: the place to abort what is waiting elsewhere. It must not drop this value.
    pub fn on_failure(&self, hook: impl FnOnce(&Failure) + Send + 'static) {
        self.room.on_failure(Box::new(hook));
    }

    /// Ends the channel without anybody's failure, when all processes have called it.
    ///
    /// # Errors
    /// As [`Control::exchange`].
    pub fn leave(self) -> Result<()> {
        self.room.leave(Instant::now() + self.patience)
    }

    fn round(&self, round: Round, what: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        if bytes.len() > MAX_SHARE {
            return Err(Error::internal(format!("cannot {} {} bytes of {what}", round.name(), bytes.len()))
                .because(format!("accepted: up to {MAX_SHARE}")));
        }
        let mut turn = locked(&self.turn);
        let share = Share { number: *turn, round, what: wire::plain(what, 64), bytes };
        *turn += 1;
        self.room.round(share, Instant::now() + self.patience)
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.room.close();
        for reader in self.readers.drain(..) {
            if reader.thread().id() != std::thread::current().id() {
                // A panic there has been reported by its own thread.
                let _ = reader.join();
            }
        }
    }
}

fn hello(launch: &Launch, identity: &Identity) -> Hello {
    let host = identity.host.clone();
    let peer = Peer { rank: launch.rank, ranks_here: launch.ranks_here, host };
    Hello { peer, world_size: launch.world_size, digests: identity.digests.clone() }
}

/// The name of this host.
fn host_name() -> String {
    let mut name = [0_u8; 256];
    // SAFETY: the pointer and length are those of a buffer that outlives the call.
    let status = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(0);
    match std::str::from_utf8(&name[..end]) {
        Ok(name) if status == 0 && !name.is_empty() => wire::plain(name, 255),
        _ => "an unnamed host".to_owned(),
    }
}
