//! How the processes of a run find each other and stay in touch: who is there, whether all are about to run the same,
//! a few bytes that all need (the id of an NCCL group), and the news that one has failed. Never tensors.
//!
//! Rank 0 listens on the master address (`listener`), the others connect (`join`); a run of one process opens no socket.
//! Both ends prove that they know the run's secret (`auth`, `handshake`) by Noise, of the crate `snow`; what they say
//! afterwards is JSON in encrypted frames (`framing`, `message`). Nobody goes on before every rank has joined exactly
//! once with the same digests (`roster`). Then one thread per connection reads (`connections`), so that a failure, told
//! or seen as a lost connection, reaches everybody at once whatever the rest is doing; one that is stopped, or whose
//! host is gone, is noticed by the silence (`heartbeat`). Plain threads and sockets: there
//! are as many connections as processes, and they carry a few kilobytes.
//!
//! A process is one end here, whatever number of ranks it holds; its [`Session`] is all that the program sees. Who the
//! ranks are is for launchers to say; what to do about a failure is the caller's business.

mod auth;
mod connection_error;
mod connections;
mod framing;
mod handshake;
mod heartbeat;
mod join;
mod listener;
mod message;
mod options;
mod roster;
mod session;

pub use auth::Secret;
pub use connections::Failure;
pub use listener::Listener;
pub use message::{JoinRequest, MAX_PAYLOAD, MAX_WORLD, Peer};
pub use options::{LogLine, Master, RendezvousOptions};
pub use session::{Messenger, Session, host_name};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks data that are whole at every instant, so that a panic elsewhere does not spoil them.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
