//! Communication between joined processes: broadcasts of rank 0, leaving, and the first failure.
//!
//! All connections end at rank 0. One thread per connection reads. It never waits for a lock that
//! is held during a write, so a failure message is always read.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::connection_error::ConnectionError;
use super::framing::{Receiver, Sender};
use super::join::Joined;
use super::message::{MAX_TEXT, Message, Peer, printable};
use super::roster::named;
use crate::error::{Error, ErrorCategory, Result};
use crate::locks::locked;
use crate::threads;
use crate::units;

/// Maximum number of broadcasts by which rank 0 is ahead of another process.
const MAX_AHEAD: usize = 16;

/// The first failure of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Rank that failed.
    pub rank: usize,
    /// Name of its host.
    pub host: String,
    /// The rank's own reason, or the way its failure was detected.
    pub why: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} on {} failed: {}", self.rank, self.host, self.why)
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        Error::new(ErrorCategory::Transient, format!("rank {} on {} failed", failure.rank, failure.host))
            .because(failure.why)
    }
}

pub(super) type Hook = Box<dyn FnOnce(&Failure) + Send>;

/// Connections of one process to the others.
pub(super) struct Connections {
    pub(super) own: usize,
    pub(super) peers: Vec<Peer>,
    /// Senders by process; a process other than rank 0 has only the first.
    senders: Vec<Option<Mutex<Sender>>>,
    state: Mutex<State>,
    changed: Condvar,
    /// Held while a failure is sent: the connections are not closed before.
    sending_failure: Mutex<()>,
    /// Messages received from each process since the last check, and its last status.
    heard: Vec<Heard>,
    status: Mutex<Option<StatusLine>>,
}

/// Returns the status of this process's ranks in one line.
pub(super) type StatusLine = Box<dyn Fn() -> String + Send + Sync>;

/// Messages received from a process.
#[derive(Default)]
struct Heard {
    lately: AtomicBool,
    status: Mutex<String>,
}

#[derive(Default)]
struct State {
    failure: Option<Failure>,
    hooks: Vec<Hook>,
    /// Received broadcasts: name and bytes.
    broadcasts: VecDeque<(String, Vec<u8>)>,
    /// True for each process that has left.
    left: Vec<bool>,
    /// True while this end is closing: lost connections are no failure then.
    closing: bool,
}

impl std::fmt::Debug for Connections {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} of {}", self.own, self.peers.len())
    }
}

impl Connections {
    /// Starts to read from every connection.
    pub(super) fn start(own: usize, joined: Joined) -> Result<(Arc<Connections>, Vec<JoinHandle<()>>)> {
        let processes = joined.peers.len();
        let (mut senders, mut receivers) = (Vec::new(), Vec::new());
        for (process, connection) in joined.connections.into_iter().enumerate() {
            let halves = connection.map(|both| (Mutex::new(both.sender), (process, both.receiver)));
            let (sender, receiver) = halves.unzip();
            senders.push(sender);
            receivers.extend(receiver);
        }
        let state = State { left: vec![false; processes], ..State::default() };
        let (peers, state) = (joined.peers, Mutex::new(state));
        let connections = Arc::new(Connections {
            own,
            peers,
            senders,
            state,
            changed: Condvar::new(),
            sending_failure: Mutex::new(()),
            heard: (0..processes).map(|_| Heard::default()).collect(),
            status: Mutex::default(),
        });
        let mut readers = Vec::new();
        for (process, receiver) in receivers {
            let theirs = connections.clone();
            let name = format!("rendezvous peer {process}");
            let reader = threads::start(&name, move || theirs.read(process, receiver));
            readers.push(reader.inspect_err(|_| connections.close())?);
        }
        Ok((connections, readers))
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        locked(&self.state).failure.clone()
    }

    pub(super) fn on_failure(&self, hook: Hook) {
        let mut state = locked(&self.state);
        match state.failure.clone() {
            None => state.hooks.push(hook),
            Some(failure) => {
                drop(state);
                hook(&failure);
            }
        }
    }

    /// Records `failure` if it is the first, wakes all waits here and informs the other processes
    /// except `from`.
    pub(super) fn fail(&self, failure: Failure, from: Option<usize>) {
        if self.failure().is_some() {
            return;
        }
        let _sending = locked(&self.sending_failure);
        let mut state = locked(&self.state);
        if state.failure.is_some() || state.closing {
            return;
        }
        state.failure = Some(failure.clone());
        let hooks = std::mem::take(&mut state.hooks);
        drop(state);
        self.changed.notify_all();
        let news = Message::Failed { rank: failure.rank, why: failure.why.clone() };
        let hear = self.senders.iter().enumerate().filter(|(process, _)| Some(*process) != from);
        let hear: Vec<&Mutex<Sender>> = hear.filter_map(|(_, sender)| sender.as_ref()).collect();
        std::thread::scope(|scope| {
            // Separate threads: a process that reads nothing must not delay the others.
            for sender in hear {
                let news = &news;
                let send = move || drop(locked(sender).send(news));
                if threads::start_in(scope, "rendezvous news", None, send).is_err() {
                    send();
                }
            }
            hooks.into_iter().for_each(|hook| hook(&failure));
        });
    }

    /// Reads from one connection until it ends.
    fn read(&self, from: usize, mut receiver: Receiver) {
        loop {
            match receiver.receive(None) {
                Ok(message) => {
                    self.heard[from].lately.store(true, Ordering::Release);
                    if let Err(why) = self.take(from, message) {
                        return self.lose(from, &why);
                    }
                }
                Err(error) => return self.lose(from, &error),
            }
        }
    }

    /// Handles the end of a connection, or invalid data on it: a failure, unless the process has
    /// left.
    fn lose(&self, from: usize, why: &ConnectionError) {
        let closed = matches!(why, ConnectionError::Closed);
        if closed && locked(&self.state).left[from] {
            return;
        }
        let peer = &self.peers[from];
        let text = format!("the connection to it was lost ({why})");
        let failure = Failure { rank: peer.rank, host: peer.host.clone(), why: text };
        // A sender of invalid data still exists, and gets the reason before it is disconnected.
        self.fail(failure, closed.then_some(from));
        if let Some(sender) = &self.senders[from] {
            locked(sender).close();
        }
    }

    fn take(&self, from: usize, message: Message) -> Result<(), ConnectionError> {
        let mut state = locked(&self.state);
        match message {
            Message::Broadcast { name, bytes } if self.own != 0 && state.broadcasts.len() < MAX_AHEAD => {
                state.broadcasts.push_back((name, bytes));
            }
            Message::Failed { rank, why } => {
                drop(state);
                let holds = |peer: &Peer| (peer.rank..peer.rank + peer.ranks_here).contains(&rank);
                let process = self.peers.iter().position(holds);
                // Rank 0 forwards failures of any process; others report their own or rank 0's.
                let process = process.filter(|process| self.own != 0 || [0, from].contains(process));
                let peer = process.map(|process| &self.peers[process]);
                let peer = peer.ok_or(ConnectionError::Malformed("news of a rank that is not its own"))?;
                self.fail(Failure { rank, host: peer.host.clone(), why }, Some(from));
                return Ok(());
            }
            Message::Leave => state.left[from] = true,
            Message::Heartbeat { status } => {
                *locked(&self.heard[from].status) = status;
                return Ok(());
            }
            _ => return Err(ConnectionError::Malformed("an unexpected message")),
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Sends `bytes` from rank 0 to all others.
    pub(super) fn broadcast(&self, name: &str, bytes: &[u8]) -> Result<()> {
        if let Some(failure) = self.failure() {
            return Err(failure.into());
        }
        let message = Message::Broadcast { name: name.to_owned(), bytes: bytes.to_vec() };
        (1..self.peers.len()).for_each(|process| self.send(process, &message));
        Ok(())
    }

    /// Waits in another process for the broadcast `name` of rank 0.
    pub(super) fn receive_broadcast(&self, name: &str, until: Instant) -> Result<Vec<u8>> {
        let late = |_: &State| (0, format!("it did not broadcast `{name}`"));
        let mut state = self.wait(until, |state| !state.broadcasts.is_empty(), late)?;
        let (theirs, bytes) = state.broadcasts.pop_front().unwrap_or_default();
        drop(state);
        if theirs == name {
            return Ok(bytes);
        }
        let own = named(&self.peers[self.own]);
        Err(self.blame(0, format!("it broadcast `{theirs}`, {own} waits for `{name}`")))
    }

    /// Leaves the session after all others do.
    pub(super) fn leave(&self, until: Instant) -> Result<()> {
        // Rank 0 waits for all others, and each of them for rank 0.
        let awaited = if self.own == 0 { 1..self.peers.len() } else { 0..1 };
        if self.own != 0 {
            self.send(0, &Message::Leave);
        }
        let missing = |state: &State| awaited.clone().find(|process| !state.left[*process]);
        let late = |state: &State| (missing(state).unwrap_or(0), "it did not finish in time".to_owned());
        drop(self.wait(until, |state| missing(state).is_none(), late)?);
        if self.own == 0 {
            (1..self.peers.len()).for_each(|process| self.send(process, &Message::Leave));
        }
        Ok(())
    }

    /// Closes all connections, which ends the readers.
    pub(super) fn close(&self) {
        drop(locked(&self.sending_failure));
        locked(&self.state).closing = true;
        for sender in self.senders.iter().flatten() {
            locked(sender).close();
        }
        self.changed.notify_all();
    }

    /// Sends to a process; its reader detects a lost connection.
    fn send(&self, process: usize, message: &Message) {
        if let Some(sender) = &self.senders[process] {
            let _ = locked(sender).send(message);
        }
    }

    pub(super) fn report_status(&self, status: StatusLine) {
        *locked(&self.status) = Some(status);
    }

    /// Sends a heartbeat to every connected process.
    pub(super) fn beat(&self) {
        let status = locked(&self.status).as_ref().map_or_else(String::new, |status| status());
        let beat = Message::Heartbeat { status: printable(&status, MAX_TEXT) };
        (0..self.peers.len()).for_each(|process| self.send(process, &beat));
    }

    /// Returns true for each process from which a message arrived since the last call. Processes
    /// without a connection, or that have left, need not send.
    pub(super) fn heard(&self) -> Vec<bool> {
        let left = locked(&self.state).left.clone();
        let heard = self.heard.iter().zip(&self.senders).zip(left);
        heard
            .map(|((heard, sender), left)| {
                heard.lately.swap(false, Ordering::AcqRel) || left || sender.is_none()
            })
            .collect()
    }

    /// Handles `process`, from which no message arrived for `silence`.
    pub(super) fn is_silent(&self, process: usize, silence: Duration) {
        let silence = units::duration(silence.as_secs_f64());
        let last_status = locked(&self.heard[process].status).clone();
        let why =
            format!("it has sent no message for {silence}: its process is stopped, or its host is gone");
        let why = if last_status.is_empty() { why } else { format!("{why}; its last status: {last_status}") };
        self.blame(process, printable(&why, MAX_TEXT));
    }

    /// Waits for `time`; true if the session closes or has failed.
    pub(super) fn closes_within(&self, time: Duration) -> bool {
        let over = |state: &mut State| !state.closing && state.failure.is_none();
        let waited = self.changed.wait_timeout_while(locked(&self.state), time, over);
        let state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.closing || state.failure.is_some()
    }

    /// Makes `process` the first failure, unless one exists, and returns the first failure.
    fn blame(&self, process: usize, why: String) -> Error {
        let peer = &self.peers[process];
        self.fail(Failure { rank: peer.rank, host: peer.host.clone(), why: why.clone() }, None);
        match self.failure() {
            Some(failure) => failure.into(),
            None => Error::new(ErrorCategory::Transient, format!("{} failed", named(peer))).because(why),
        }
    }

    /// Waits until `done`, or a failure. At `until`, the process and reason of `late` become the
    /// failure.
    fn wait(
        &self,
        until: Instant,
        done: impl Fn(&State) -> bool,
        late: impl Fn(&State) -> (usize, String),
    ) -> Result<MutexGuard<'_, State>> {
        let mut state = locked(&self.state);
        loop {
            if done(&state) {
                return Ok(state);
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone().into());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let (process, why) = late(&state);
                drop(state);
                return Err(self.blame(process, why));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
