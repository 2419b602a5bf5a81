//! How the processes come together: rank 0 calls the roll, the others find its port.

use std::net::{SocketAddr, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::door::{Arrival, Arrivals, Door, resolve};
use super::handshake::{Failed, Link, Refusal, greet};
use super::message::{Hello, Message, Peer};
use super::roll::Roll;
use super::secret::Terms;
use super::wire::{Broken, prepare};
use crate::collective::launch::Master;
use crate::error::{Error, ErrorCategory, Result};
use crate::units;

const CONNECT: Duration = Duration::from_secs(3);
/// Rank 0 answers a greeting at once, but for a wrong proof.
const GREETING: Duration = Duration::from_secs(5);
/// What rank 0 may need beyond its own deadline to tell its verdict.
const SLACK: Duration = Duration::from_secs(30);

/// The processes in ascending order of ranks, each with its link (at rank 0; elsewhere rank 0 alone has one).
pub(super) struct Met {
    pub(super) peers: Vec<Peer>,
    pub(super) links: Vec<Option<Link>>,
}

/// Rank 0: waits for all, compares, and tells everyone the outcome.
pub(super) fn host(door: Door, own: Hello, run: &str, terms: &Terms) -> Result<Met> {
    let arrivals = door.attend(terms, run, own.world_size)?;
    let mut caller = Caller { roll: Roll::new(own), present: Vec::new(), others: Vec::new() };
    caller.call(&arrivals, terms);
    let verdict = caller.roll.verdict(terms.deadline.as_secs_f64(), arrivals.refused());
    if verdict.is_none() {
        caller.turn_away(&arrivals);
    }
    drop(arrivals);
    let Caller { roll, mut present, mut others } = caller;
    if let Some(rejection) = verdict {
        let message = Message::Rejected(rejection.clone());
        for link in present.iter_mut().map(|(_, link)| link).chain(&mut others) {
            // Whoever is gone need not hear it.
            let _ = link.sender.send(&message);
        }
        return Err(rejection.into());
    }
    let peers = roll.peers();
    present.sort_by_key(|(rank, _)| *rank);
    for (_, link) in &mut present {
        let all = std::iter::once(Message::Accepted { processes: peers.len() });
        // A process that is gone by now is noticed by the link's reader.
        let _ = all
            .chain(peers.iter().cloned().map(Message::Peer))
            .try_for_each(|message| link.sender.send(&message));
    }
    let links = std::iter::once(None).chain(present.into_iter().map(|(_, link)| Some(link))).collect();
    Ok(Met { peers, links })
}

/// The roll, and the links of those who came.
struct Caller {
    roll: Roll,
    /// First rank and link of each process on the roll but the own, in its order.
    present: Vec<(usize, Link)>,
    /// Links of those without a place, who shall hear why.
    others: Vec<Link>,
}

impl Caller {
    fn call(&mut self, arrivals: &Arrivals, terms: &Terms) {
        let until = Instant::now() + terms.deadline;
        let mut end = until;
        while !self.is_complete() {
            let Some(arrival) = arrivals.next(end) else { return };
            self.enter(arrival);
            if self.roll.has_faults() && end == until {
                end = until.min(Instant::now() + terms.grace);
            }
        }
    }

    /// Whether all have come and nobody has gone again.
    fn is_complete(&mut self) -> bool {
        if self.roll.is_complete() {
            for at in (0..self.present.len()).rev() {
                if self.present[at].1.receiver.is_closed() {
                    self.present.remove(at);
                    self.roll.strike(at + 1);
                }
            }
        }
        self.roll.is_complete()
    }

    /// Tells those who came when all places were taken.
    fn turn_away(&self, arrivals: &Arrivals) {
        while let Some(Arrival { hello, mut link }) = arrivals.next(Instant::now()) {
            let rejection = self.roll.late(&hello);
            // Whoever is gone need not hear it.
            let _ = link.sender.send(&Message::Rejected(rejection));
        }
    }

    fn enter(&mut self, Arrival { hello, link }: Arrival) {
        let rank = hello.peer.rank;
        match self.roll.twin_of(&hello.peer) {
            // Started again after a crash: the first one is gone.
            Some(twin) if twin > 0 && self.present[twin - 1].1.receiver.is_closed() => {
                self.roll.strike(twin);
                self.present.remove(twin - 1);
                self.enter(Arrival { hello, link });
            }
            Some(twin) => {
                self.roll.refuse_twin(&hello, twin);
                self.others.push(link);
            }
            None if self.roll.add(hello) => self.present.push((rank, link)),
            None => self.others.push(link),
        }
    }
}

/// Another process: finds rank 0, says what it is, and hears the outcome.
pub(super) fn join(master: &Master, own: &Hello, run: &str, terms: &Terms) -> Result<Met> {
    let mut link = find(master, run, terms)?;
    let until = Instant::now() + terms.deadline + SLACK;
    let gone = |broken: Broken| {
        Error::new(ErrorCategory::Transient, "cannot connect the ranks: rank 0 left before all had joined")
            .because(broken.to_string())
            .hint("look at what rank 0 prints")
    };
    link.sender.send(&Message::Hello(own.clone())).map_err(gone)?;
    let strange = || gone(Broken::Malformed("a message out of place"));
    let processes = match link.receiver.receive(Some(until)).map_err(gone)? {
        Message::Accepted { processes } => processes,
        Message::Rejected(rejection) => return Err(rejection.into()),
        _ => return Err(strange()),
    };
    let mut peers = Vec::new();
    let mut ranks = 0;
    for _ in 0..processes {
        match link.receiver.receive(Some(until)).map_err(gone)? {
            Message::Peer(peer) if peer.rank == ranks => {
                ranks += peer.ranks_here;
                peers.push(peer);
            }
            _ => return Err(strange()),
        }
    }
    if ranks != own.world_size || !peers.contains(&own.peer) {
        return Err(strange());
    }
    let mut links = vec![Some(link)];
    links.resize_with(processes, || None);
    Ok(Met { peers, links })
}

/// Why one attempt to reach rank 0 failed.
enum Attempt {
    /// Nobody of this run is there (yet).
    Later(String),
    /// Trying again changes nothing.
    Never(Error),
}

/// Tries the addresses and ports of rank 0 until one of them answers as rank 0 of this run.
fn find(master: &Master, run: &str, terms: &Terms) -> Result<Link> {
    let until = Instant::now() + terms.deadline;
    let mut pause = Duration::from_millis(50);
    loop {
        let mut last = match resolve(&master.address) {
            Ok(ips) => {
                let ports = (0..master.ports).map(|offset| master.port.saturating_add(offset));
                let addresses = ports.flat_map(|port| ips.iter().map(move |ip| SocketAddr::new(*ip, port)));
                let mut last = String::new();
                for address in addresses {
                    match attempt(address, master, run, terms, until) {
                        Ok(link) => return Ok(link),
                        Err(Attempt::Never(error)) => return Err(error),
                        Err(Attempt::Later(why)) => last = format!("{address}: {why}"),
                    }
                }
                last
            }
            Err(error) => error.to_string(),
        };
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            if master.ports > 1 {
                last +=
                    &format!(" (ports {} to {})", master.port, master.port.saturating_add(master.ports - 1));
            }
            let waited = units::duration(terms.deadline.as_secs_f64());
            return Err(Error::new(
                ErrorCategory::Transient,
                format!(
                    "cannot connect the ranks: no answer from rank 0 at `{}` within {waited}",
                    master.address
                ),
            )
            .because(last)
            .hint("look at what rank 0 prints, or wait longer: `FINETUNE_RDZV_TIMEOUT=900`"));
        }
        sleep(pause.min(left));
        pause = (2 * pause).min(Duration::from_secs(1));
    }
}

fn attempt(
    address: SocketAddr,
    master: &Master,
    run: &str,
    terms: &Terms,
    until: Instant,
) -> Result<Link, Attempt> {
    terms.secret.suffices(&address).map_err(Attempt::Never)?;
    let later = |error: std::io::Error| Attempt::Later(error.to_string());
    let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(100));
    let stream = TcpStream::connect_timeout(&address, left.min(CONNECT)).map_err(later)?;
    prepare(&stream).map_err(later)?;
    match greet(stream, &terms.secret, run, Instant::now() + GREETING) {
        Ok(link) => Ok(link),
        Err(Failed::Broken(broken)) => Err(Attempt::Later(broken.to_string())),
        // Another run may hold one of several ports.
        Err(Failed::Refused(refusal @ Refusal::Run)) => Err(Attempt::Later(refusal.to_string())),
        Err(Failed::Refused(refusal @ Refusal::Version(_))) if master.ports > 1 => {
            Err(Attempt::Later(refusal.to_string()))
        }
        Err(Failed::Refused(refusal)) => {
            let error =
                Error::user(format!("rank 0 at {address} refused this process")).because(refusal.to_string());
            Err(Attempt::Never(match refusal {
                Refusal::Version(_) => error.hint("start all processes with the same binary"),
                _ => error
                    .hint("give every process the same FINETUNE_RDZV_SECRET (or FINETUNE_RDZV_SECRET_FILE)"),
            }))
        }
    }
}
