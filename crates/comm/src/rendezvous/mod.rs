//! Connections between the processes of a run: their ranks, the check that all start the same run,
//! a few bytes for all (the id of an NCCL group), and failure messages. Never tensors.
//!
//! Rank 0 listens on the master address (`listener`), the others connect (`join`); a run of one
//! process opens no socket. Both ends prove that they have the run's secret (`auth`, `handshake`)
//! by Noise, of the crate `snow`; later messages are JSON in encrypted frames (`framing`,
//! `message`). No process continues before every rank has joined exactly once with the same digests
//! (`roster`). Then one thread per connection reads (`connections`), so that a failure, reported or
//! detected as a lost connection, reaches all processes at once. A stopped process, or one without
//! its host, is detected by its silence (`heartbeat`). Plain threads and sockets suffice for one
//! connection per process and a few kilobytes.
//!
//! A process is one end here, with any number of ranks; the program uses only its [`Session`].
//! Launchers determine the ranks, and the caller handles failures.

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
pub(crate) use message::MAX_WORLD;
pub use message::{JoinRequest, MAX_PAYLOAD, Peer};
pub use options::{LogLine, Master, RendezvousOptions, one_host_environment};
pub use session::{Messenger, Session, host_name};
