//! Heartbeats between joined processes. A dead process is detected at once, because its host closes
//! its connections; a stopped one, or one without host or network, only by its silence.
//!
//! Each process sends several heartbeats within the silence limit, from a separate thread that
//! nothing else delays. Each look of this thread advances its time only a little, so a process that
//! was itself stopped does not treat the others as silent when it continues.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::connections::Connections;
use crate::error::Result;
use crate::threads;

/// Number of heartbeats within the silence limit.
const BEATS: u32 = 6;

/// Sends heartbeats, and fails a process that is silent for `limit`, until the session closes.
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
        // It was silent up to one period before the first look, and will be for one more until the
        // next.
        if let Some(process) = silent.iter().position(|silent| *silent + 2 * period > limit) {
            connections.is_silent(process, silent[process]);
        }
    }
}
