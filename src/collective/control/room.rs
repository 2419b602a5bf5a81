//! What happens between processes that have met: calls that all make, and the first failure.
//!
//! All connections end at rank 0. A call is a share from everyone to rank 0 and the parts back; shares carry a number
//! and a name, so two processes that call different things are told so instead of waiting for each other. One thread
//! per connection reads; it never waits for a lock that is held during a write, so news of a failure always gets in.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use super::handshake::{Receiver, Sender};
use super::meeting::Met;
use super::message::{Message, Peer, Round, Share};
use super::roll::named;
use super::wire::Broken;
use crate::collective::rank_threads::locked;
use crate::error::{Error, ErrorCategory, Result};

/// Calls that a process can be ahead of rank 0: one, and a farewell is no call.
const MOST_AHEAD: usize = 2;

/// The first failure of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Who failed.
    pub rank: usize,
    /// On which host.
    pub host: String,
    /// What it said, or how it was noticed.
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

/// One process's view of the others.
pub(super) struct Room {
    pub(super) own: usize,
    pub(super) peers: Vec<Peer>,
    /// By process; elsewhere than at rank 0 the first alone has one.
    senders: Vec<Option<Mutex<Sender>>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    failure: Option<Failure>,
    hooks: Vec<Hook>,
    /// At rank 0: shares that have come, by process.
    shares: Vec<VecDeque<Share>>,
    /// Elsewhere: parts that have come.
    parts: VecDeque<(u64, usize, Vec<u8>)>,
    /// Who has said farewell, by process.
    left: Vec<bool>,
    /// This end is closing: lost connections mean nothing any more.
    closing: bool,
}

impl std::fmt::Debug for Room {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} of {}", self.own, self.peers.len())
    }
}

impl Room {
    /// Begins to read from every link.
    pub(super) fn open(own: usize, met: Met) -> Result<(Arc<Room>, Vec<JoinHandle<()>>)> {
        let processes = met.peers.len();
        let (mut senders, mut receivers) = (Vec::new(), Vec::new());
        for (process, link) in met.links.into_iter().enumerate() {
            let (sender, receiver) =
                link.map(|link| (Mutex::new(link.sender), (process, link.receiver))).unzip();
            senders.push(sender);
            receivers.extend(receiver);
        }
        let state = State {
            shares: vec![VecDeque::new(); processes],
            left: vec![false; processes],
            ..State::default()
        };
        let (peers, state) = (met.peers, Mutex::new(state));
        let room = Arc::new(Room { own, peers, senders, state, changed: Condvar::new() });
        let mut readers = Vec::new();
        for (process, receiver) in receivers {
            let theirs = room.clone();
            let reader = Builder::new().name(format!("control {process}"));
            readers.push(reader.spawn(move || theirs.read(process, receiver)).map_err(|error| {
                room.close();
                Error::new(ErrorCategory::Transient, "cannot start a thread of the control channel")
                    .because(error.to_string())
            })?);
        }
        Ok((room, readers))
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

    /// Records `failure` unless there is one already, wakes everybody here and tells the other processes but `from`.
    pub(super) fn fail(&self, failure: Failure, from: Option<usize>) {
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
            // Each on its own: one that takes nothing in must not keep the news from the others.
            for sender in hear {
                let news = &news;
                let tell = move || drop(locked(sender).send(news));
                if Builder::new().spawn_scoped(scope, tell).is_err() {
                    tell();
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
                    if let Err(why) = self.take(from, message) {
                        return self.lose(from, &why);
                    }
                }
                Err(broken) => return self.lose(from, &broken),
            }
        }
    }

    /// A connection has ended, or is not to be believed any more: a failure, unless the process had said farewell.
    fn lose(&self, from: usize, why: &Broken) {
        let closed = matches!(why, Broken::Closed);
        if closed && locked(&self.state).left[from] {
            return;
        }
        let peer = &self.peers[from];
        let text = format!("the connection to it was lost ({why})");
        let failure = Failure { rank: peer.rank, host: peer.host.clone(), why: text };
        // Who sent nonsense is still there, and hears why before it is cut off.
        self.fail(failure, closed.then_some(from));
        if let Some(sender) = &self.senders[from] {
            locked(sender).close();
        }
    }

    fn take(&self, from: usize, message: Message) -> Result<(), Broken> {
        let mut state = locked(&self.state);
        match message {
            Message::Share(share) if self.own == 0 && state.shares[from].len() < MOST_AHEAD => {
                state.shares[from].push_back(share);
            }
            Message::Part { number, index, bytes }
                if self.own != 0 && state.parts.len() < self.peers.len() =>
            {
                state.parts.push_back((number, index, bytes));
            }
            Message::Failed { rank, why } => {
                drop(state);
                let holds = |peer: &&Peer| (peer.rank..peer.rank + peer.ranks_here).contains(&rank);
                let sent_by = self.peers.iter().position(|peer| holds(&peer));
                let peer =
                    sent_by.filter(|process| self.own != 0 || *process == from).map(|p| &self.peers[p]);
                let peer = peer.ok_or(Broken::Malformed("news of a rank that is not its own"))?;
                self.fail(Failure { rank, host: peer.host.clone(), why }, Some(from));
                return Ok(());
            }
            Message::Bye => state.left[from] = true,
            _ => return Err(Broken::Malformed("a message out of place")),
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Makes one call together with all other processes.
    pub(super) fn round(&self, share: Share, until: Instant) -> Result<Vec<Vec<u8>>> {
        if let Some(failure) = self.failure() {
            return Err(failure.into());
        }
        match self.own {
            0 => self.lead(share, until),
            _ => self.follow(share, until),
        }
    }

    fn lead(&self, own: Share, until: Instant) -> Result<Vec<Vec<u8>>> {
        let others = 1..self.peers.len();
        let all_in = |state: &State| others.clone().all(|process| !state.shares[process].is_empty());
        let mut state = match self.wait(until, all_in) {
            Ok(state) => state,
            Err(Stopped::Failed(failure)) => return Err(failure.into()),
            Err(Stopped::Late(state)) => {
                let missing = others.clone().find(|process| state.shares[*process].is_empty()).unwrap_or(0);
                drop(state);
                let why = format!("it did not come to {} `{}`", own.round.name(), own.what);
                return Err(self.blame(missing, why));
            }
        };
        let mut bytes = vec![own.bytes];
        for process in others.clone() {
            let Some(share) = state.shares[process].pop_front() else { continue };
            if (share.number, share.round, &share.what) != (own.number, own.round, &own.what) {
                drop(state);
                let call =
                    |round: Round, what: &str, number| format!("{} `{what}` (call {number})", round.name());
                let theirs = call(share.round, &share.what, share.number);
                let ours = call(own.round, &own.what, own.number);
                return Err(
                    self.blame(process, format!("it came to {theirs}, {} to {ours}", named(&self.peers[0])))
                );
            }
            bytes.push(share.bytes);
        }
        drop(state);
        if own.round != Round::Exchange {
            bytes.truncate(1);
        }
        let part = |(index, bytes): (usize, &Vec<u8>)| Message::Part {
            number: own.number,
            index,
            bytes: bytes.clone(),
        };
        let parts: Vec<Message> = bytes.iter().enumerate().map(part).collect();
        for sender in self.senders.iter().flatten() {
            let mut sender = locked(sender);
            // A lost connection is noticed by its reader.
            let _ = parts.iter().try_for_each(|part| sender.send(part));
        }
        Ok(bytes)
    }

    fn follow(&self, share: Share, until: Instant) -> Result<Vec<Vec<u8>>> {
        let (number, round, what) = (share.number, share.round, share.what.clone());
        self.send(0, &Message::Share(share));
        let expected = if round == Round::Exchange { self.peers.len() } else { 1 };
        let mut state = match self.wait(until, |state| state.parts.len() >= expected) {
            Ok(state) => state,
            Err(Stopped::Failed(failure)) => return Err(failure.into()),
            Err(Stopped::Late(state)) => {
                drop(state);
                return Err(self.blame(0, format!("it did not answer {} `{what}`", round.name())));
            }
        };
        let parts: Vec<_> = state.parts.drain(..).collect();
        drop(state);
        let in_order = parts.iter().enumerate().all(|(at, (n, index, _))| (*n, *index) == (number, at));
        if in_order && parts.len() == expected {
            Ok(parts.into_iter().map(|(_, _, bytes)| bytes).collect())
        } else {
            Err(self.blame(0, format!("it answered another call than {} `{what}`", round.name())))
        }
    }

    /// Says farewell when all others have.
    pub(super) fn leave(&self, until: Instant) -> Result<()> {
        let host = self.own == 0;
        if !host {
            self.send(0, &Message::Bye);
        }
        let gone =
            |state: &State| if host { state.left[1..].iter().all(|left| *left) } else { state.left[0] };
        match self.wait(until, gone) {
            Ok(state) => drop(state),
            Err(Stopped::Failed(failure)) => return Err(failure.into()),
            Err(Stopped::Late(state)) => {
                let missing = if host {
                    state.left[1..].iter().position(|left| !left).map_or(0, |at| at + 1)
                } else {
                    0
                };
                drop(state);
                return Err(self.blame(missing, "it did not come to the end".to_owned()));
            }
        }
        if host {
            (1..self.peers.len()).for_each(|process| self.send(process, &Message::Bye));
        }
        Ok(())
    }

    /// Closes all connections; the readers end.
    pub(super) fn close(&self) {
        locked(&self.state).closing = true;
        for sender in self.senders.iter().flatten() {
            locked(sender).close();
        }
        self.changed.notify_all();
    }

    /// Sends to a process; a lost connection is noticed by its reader.
    fn send(&self, process: usize, message: &Message) {
        if let Some(sender) = &self.senders[process] {
            let _ = locked(sender).send(message);
        }
    }

    /// Makes `process` the first failure, unless there is one, and returns what counts.
    fn blame(&self, process: usize, why: String) -> Error {
        let peer = &self.peers[process];
        self.fail(Failure { rank: peer.rank, host: peer.host.clone(), why: why.clone() }, None);
        match self.failure() {
            Some(failure) => failure.into(),
            None => Error::new(ErrorCategory::Transient, format!("{} failed", named(peer))).because(why),
        }
    }

    /// Waits until `done`, a failure, or `until`.
    fn wait(
        &self,
        until: Instant,
        done: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'_, State>, Stopped<'_>> {
        let mut state = locked(&self.state);
        loop {
            if done(&state) {
                return Ok(state);
            }
            if let Some(failure) = &state.failure {
                return Err(Stopped::Failed(failure.clone()));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Stopped::Late(state));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Why a wait ended early.
enum Stopped<'a> {
    Failed(Failure),
    Late(MutexGuard<'a, State>),
}
