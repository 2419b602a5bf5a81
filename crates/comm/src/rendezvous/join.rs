//! Joining of the processes: rank 0 registers them, the others find its port.

use std::net::{SocketAddr, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::connection_error::{ConnectionError, Refusal};
use super::framing::{Connection, prepare};
use super::handshake::connect;
use super::listener::{Arrival, Arrivals, Listener, resolve};
use super::message::{JoinRequest, Message, Peer};
use super::options::{Master, RendezvousOptions};
use super::roster::Roster;
use crate::error::{Error, ErrorCategory, Result};
use crate::units;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum time of a handshake. Rank 0 answers a greeting at once, except for a wrong secret.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that rank 0 may need beyond its own deadline to send the outcome.
const OUTCOME_TIMEOUT: Duration = Duration::from_secs(30);

/// Processes in ascending order of ranks, each with its connection (at rank 0; other processes have
/// only rank 0's).
pub(super) struct Joined {
    pub(super) peers: Vec<Peer>,
    pub(super) connections: Vec<Option<Connection>>,
}

/// Waits at rank 0 for all, compares them, and sends the outcome to all.
pub(super) fn register(listener: Listener, own: JoinRequest, options: &RendezvousOptions) -> Result<Joined> {
    let arrivals = listener.accept(options, own.world_size)?;
    let mut registration =
        Registration { roster: Roster::new(own), registered: Vec::new(), rejected: Vec::new() };
    registration.wait_for_all(&arrivals, options);
    let goes_on = options.elastic && registration.roster.lacks_ranks_only();
    let rejection = registration.roster.rejection(options.join_timeout, arrivals.refused());
    let rejection = rejection.filter(|_| !goes_on);
    if rejection.is_none() {
        registration.turn_away(&arrivals);
    }
    drop(arrivals);
    let Registration { roster, mut registered, mut rejected } = registration;
    if let Some(rejection) = rejection {
        let message = Message::Rejected(rejection.clone());
        for connection in registered.iter_mut().map(|(_, connection)| connection).chain(&mut rejected) {
            // A process that is gone needs no message.
            let _ = connection.sender.send(&message);
        }
        return Err(rejection.into());
    }
    let peers = roster.peers();
    registered.sort_by_key(|(rank, _)| *rank);
    for (_, connection) in &mut registered {
        let all = std::iter::once(Message::Accepted { processes: peers.len() });
        // The connection's reader detects a process that is gone by now.
        let _ = all
            .chain(peers.iter().cloned().map(Message::Peer))
            .try_for_each(|message| connection.sender.send(&message));
    }
    let others = registered.into_iter().map(|(_, connection)| Some(connection));
    Ok(Joined { peers, connections: std::iter::once(None).chain(others).collect() })
}

/// The roster, and the connections of joined processes.
struct Registration {
    roster: Roster,
    /// First rank and connection of each process on the roster except the own, in its order.
    registered: Vec<(usize, Connection)>,
    /// Connections of processes without a rank, which get the reason.
    rejected: Vec<Connection>,
}

impl Registration {
    fn wait_for_all(&mut self, arrivals: &Arrivals, options: &RendezvousOptions) {
        let until = Instant::now() + options.join_timeout;
        let mut end = until;
        while !self.is_complete() {
            let Some(arrival) = arrivals.next(end) else { return };
            self.register(arrival);
            if self.roster.has_conflicts() && end == until {
                end = until.min(Instant::now() + options.rejection_timeout);
            }
        }
    }

    /// Returns true if all have joined and none has gone again.
    fn is_complete(&mut self) -> bool {
        if self.roster.is_complete() {
            for at in (0..self.registered.len()).rev() {
                if self.registered[at].1.receiver.is_closed() {
                    self.registered.remove(at);
                    self.roster.remove(at + 1);
                }
            }
        }
        self.roster.is_complete()
    }

    /// Rejects processes that come after all ranks are taken.
    fn turn_away(&self, arrivals: &Arrivals) {
        while let Some(Arrival { request, mut connection }) = arrivals.next(Instant::now()) {
            let rejection = self.roster.too_late(&request);
            // A process that is gone needs no message.
            let _ = connection.sender.send(&Message::Rejected(rejection));
        }
    }

    fn register(&mut self, Arrival { request, connection }: Arrival) {
        let rank = request.peer.rank;
        match self.roster.overlapping(&request.peer) {
            // The process was restarted after a crash; the first one is gone.
            Some(other) if other > 0 && self.registered[other - 1].1.receiver.is_closed() => {
                self.roster.remove(other);
                self.registered.remove(other - 1);
                self.register(Arrival { request, connection });
            }
            Some(other) => {
                self.roster.add_duplicate(&request, other);
                self.rejected.push(connection);
            }
            None if self.roster.add(request) => self.registered.push((rank, connection)),
            None => self.rejected.push(connection),
        }
    }
}

/// Finds rank 0 from another process, sends the join request, and waits for the outcome.
pub(super) fn join(master: &Master, own: &JoinRequest, options: &RendezvousOptions) -> Result<Joined> {
    let mut connection = find(master, options)?;
    let until = Instant::now() + options.join_timeout + OUTCOME_TIMEOUT;
    let lost = |error: ConnectionError| {
        Error::new(ErrorCategory::Transient, "rendezvous failed: rank 0 disconnected before all ranks joined")
            .because(error.to_string())
            .hint("see the output of rank 0")
    };
    connection.sender.send(&Message::Join(own.clone())).map_err(lost)?;
    let out_of_place = || lost(ConnectionError::Malformed("an unexpected message"));
    let processes = match connection.receiver.receive(Some(until)).map_err(lost)? {
        Message::Accepted { processes } => processes,
        Message::Rejected(rejection) => return Err(rejection.into()),
        _ => return Err(out_of_place()),
    };
    let mut peers = Vec::new();
    let mut ranks = 0;
    for _ in 0..processes {
        match connection.receiver.receive(Some(until)).map_err(lost)? {
            Message::Peer(peer) if peer.rank == ranks || options.elastic && peer.rank > ranks => {
                ranks = peer.rank + peer.ranks_here;
                peers.push(peer);
            }
            _ => return Err(out_of_place()),
        }
    }
    if ranks != own.world_size && !options.elastic || !peers.contains(&own.peer) {
        return Err(out_of_place());
    }
    let mut connections = vec![Some(connection)];
    connections.resize_with(processes, || None);
    Ok(Joined { peers, connections })
}

/// Failure of one attempt to reach rank 0.
enum Attempt {
    /// No process of this run answers (yet).
    TryAgain(String),
    /// Another attempt cannot succeed.
    GiveUp(Error),
}

/// Tries the addresses and ports of rank 0 until rank 0 of this run answers.
fn find(master: &Master, options: &RendezvousOptions) -> Result<Connection> {
    let until = Instant::now() + options.join_timeout;
    let mut pause = Duration::from_millis(50);
    loop {
        let mut last = match resolve(&master.address) {
            Ok(ips) => {
                let addresses =
                    master.all_ports().flat_map(|port| ips.iter().map(move |ip| SocketAddr::new(*ip, port)));
                let mut last = String::new();
                for address in addresses {
                    match attempt(address, master, options, until) {
                        Ok(connection) => return Ok(connection),
                        Err(Attempt::GiveUp(error)) => return Err(error),
                        Err(Attempt::TryAgain(why)) => last = format!("{address}: {why}"),
                    }
                }
                last
            }
            Err(error) => error.to_string(),
        };
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            if let (Some(first), Some(end)) = (master.all_ports().next(), master.all_ports().last())
                && master.ports > 1
            {
                last += &format!(" (ports {first} to {end})");
            }
            let waited = units::duration(options.join_timeout.as_secs_f64());
            let what =
                format!("rendezvous failed: no answer from rank 0 at `{}` within {waited}", master.address);
            return Err(Error::new(ErrorCategory::Transient, what)
                .because(last)
                .hint("see the output of rank 0, or wait longer, in seconds: `FINETUNE_RDZV_TIMEOUT=900`"));
        }
        sleep(pause.min(left));
        pause = (2 * pause).min(Duration::from_secs(1));
    }
}

fn attempt(
    address: SocketAddr,
    master: &Master,
    options: &RendezvousOptions,
    until: Instant,
) -> Result<Connection, Attempt> {
    options.secret.suffices(&address).map_err(Attempt::GiveUp)?;
    let later = |error: std::io::Error| Attempt::TryAgain(error.to_string());
    let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(100));
    let stream = TcpStream::connect_timeout(&address, left.min(CONNECT_TIMEOUT)).map_err(later)?;
    prepare(&stream).map_err(later)?;
    let refusal = match connect(stream, &options.secret, &options.run, Instant::now() + HANDSHAKE_TIMEOUT) {
        Ok(connection) => return Ok(connection),
        Err(ConnectionError::Refused(refusal)) => refusal,
        Err(error) => return Err(Attempt::TryAgain(error.to_string())),
    };
    let error = Error::user(format!("rank 0 at {address} refused this process")).because(refusal.to_string());
    Err(match refusal {
        // Another run may use one of several ports.
        Refusal::Run => Attempt::TryAgain(refusal.to_string()),
        Refusal::Version { .. } if master.ports > 1 => Attempt::TryAgain(refusal.to_string()),
        Refusal::Version { .. } => Attempt::GiveUp(error.hint("start all processes with the same binary")),
        Refusal::NoSecret | Refusal::NoSecretAtRank0 | Refusal::Secret => Attempt::GiveUp(
            error.hint("give every process the same FINETUNE_RDZV_SECRET (or FINETUNE_RDZV_SECRET_FILE)"),
        ),
    })
}
