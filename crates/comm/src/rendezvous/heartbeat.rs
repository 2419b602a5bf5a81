//! Signs of life between processes that have joined. A process that has died is noticed at once, because its host closes its
//! connections; one that is stopped, or whose host or network is gone, only by its silence.
//!
//! Each process sends a heartbeat a few times in the time that may pass without one, from a thread of its own that nothing
//! else holds up. Time is counted by this thread's own looks, each of which counts little: a process that was stopped
//! itself does not take the others for silent when it goes on.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::connections::Connections;
use crate::error::Result;
use crate::threads;

/// Heartbeats in the time that may pass without one.
const BEATS: u32 = 6;

/// Sends heartbeats, and fails the process of which nothing is heard for `limit`, until the session closes.
pub(super) fn start(connections: &Arc<Connections>, limit: Duration) -> Result<JoinHandle<()>> {
    let theirs = Arc::clone(connections);
    let thread = threads::start("rendezvous heartbeat", move || run(&theirs, limit));
    thread.inspect_err(|_| connections.close())
}

fn run(connections: &Connections, limit: Duration) {
    let period = limit / BEATS;
    let mut silent = vec![Duration::ZERO; connections.peers.len()];
    let mut last = Instant::now();
    while !connections.closes_within(period) {
        connections.beat();
        let later = last.elapsed().min(2 * period);
        last = Instant::now();
        for (silent, heard) in silent.iter_mut().zip(connections.heard()) {
            *silent = if heard { Duration::ZERO } else { *silent + later };
        }
        // It was silent for up to a period before the first of these looks, and will be for another until the next.
        if let Some(process) = silent.iter().position(|silent| *silent + 2 * period > limit) {
            connections.is_silent(process, silent[process]);
        }
    }
}
