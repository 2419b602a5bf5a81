//! The port of rank 0 while the processes come: who is let in, and how little the rest can do.
//!
//! It listens on exactly the master address. Every connection has its own thread and a deadline for all of its
//! handshake, so a slow one stalls nobody; there is a cap on those that have not proven themselves, and beyond it the
//! oldest goes, because an honest process needs milliseconds. A wrong proof is answered late. Each reason for a refusal
//! is noticed once, the rest is counted. When the meeting ends, the port is closed.

use std::collections::{BTreeSet, VecDeque};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{Builder, JoinHandle, sleep};
use std::time::{Duration, Instant};

use super::handshake::{Failed, Link, admit, refuse};
use super::message::{Hello, Message};
use super::secret::{Notice, Secret, Terms};
use super::wire::prepare;
use crate::collective::launch::{Launch, Master};
use crate::collective::rank_threads::locked;
use crate::error::{Error, ErrorCategory, Result};

/// For one connection from its first byte to what it says of itself.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Before a wrong proof is answered.
const PENALTY: Duration = Duration::from_millis(500);
/// Connections that have not proven themselves, beyond the processes that may all come at once.
const MOST_STRANGERS: usize = 64;
const STACK_BYTES: usize = 256 << 10;
const POLL: Duration = Duration::from_millis(10);

/// The open port of rank 0.
#[derive(Debug)]
pub struct Door {
    listener: TcpListener,
    address: SocketAddr,
}

/// A process that has proven itself and said what it is.
pub(super) struct Arrival {
    pub(super) hello: Hello,
    pub(super) link: Link,
}

impl Door {
    /// Listens on the master address of `launch` (or on `terms.bind`), on the first of its ports that is free; port 0
    /// takes any. A name that cannot be resolved yet is tried until the deadline of `terms`.
    ///
    /// # Errors
    /// [`ErrorCategory::User`] when the address is not one of this host, stands for all addresses, or is open to other hosts and
    /// there is no secret; [`ErrorCategory::Transient`] when no port is free or the name stays unknown.
    pub fn open(launch: &Launch, terms: &Terms) -> Result<Door> {
        let Some(master) = &launch.master else {
            return Err(Error::internal("a run of one process has no master address to listen on"));
        };
        let name = terms.bind.as_ref().unwrap_or(&master.address);
        let ips = resolve_until(name, Instant::now() + terms.deadline)?;
        if let Some(ip) = ips.iter().find(|ip| ip.is_unspecified()) {
            return Err(Error::user(format!("cannot listen on {ip}")).because(
                "it stands for all addresses of this host; accepted: the one that the other hosts use",
            ));
        }
        let several_hosts = launch.host.is_some_and(|host| host.count > 1);
        if several_hosts && !master.is_loopback() && ips.iter().all(IpAddr::is_loopback) {
            return Err(Error::user(format!("cannot listen on `{name}` for other hosts"))
                .because(format!("on this host it means {}, which no other host reaches", ips[0]))
                .hint("set MASTER_ADDR to this host's IP address in every process"));
        }
        let mut failures = Vec::new();
        for offset in 0..master.ports {
            for ip in &ips {
                let address = SocketAddr::new(*ip, master.port.saturating_add(offset));
                terms.secret.suffices(&address)?;
                match listen(address) {
                    Ok(door) => return Ok(door),
                    Err(error) => failures.push((address, error)),
                }
            }
        }
        Err(cannot_listen(master, &failures))
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Lets processes in until the returned value is dropped.
    pub(super) fn attend(self, terms: &Terms, run: &str, world_size: usize) -> Result<Arrivals> {
        let (sender, queue) = mpsc::channel();
        let guard = Arc::new(Guard {
            secret: terms.secret.clone(),
            run: run.to_owned(),
            notice: terms.notice.clone(),
            refused: Mutex::default(),
            strangers: Mutex::default(),
            most_strangers: MOST_STRANGERS + world_size,
            closed: AtomicBool::new(false),
        });
        let (theirs, listener) = (guard.clone(), self.listener);
        let thread = Builder::new().name("door".to_owned()).spawn(move || theirs.accept(&listener, &sender));
        let thread = thread.map_err(|error| {
            Error::new(ErrorCategory::Transient, "cannot start the thread that lets ranks in")
                .because(error.to_string())
        })?;
        Ok(Arrivals { queue, guard, thread: Some(thread) })
    }
}

fn listen(address: SocketAddr) -> std::io::Result<Door> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    Ok(Door { listener, address })
}

fn cannot_listen(master: &Master, failures: &[(SocketAddr, std::io::Error)]) -> Error {
    let foreign = failures.iter().all(|(_, error)| error.kind() == ErrorKind::AddrNotAvailable);
    let denied = failures.iter().any(|(_, error)| error.kind() == ErrorKind::PermissionDenied);
    let kind = if foreign || denied { ErrorCategory::User } else { ErrorCategory::Transient };
    let error = Error::new(kind, format!("cannot listen on the master address `{}`", master.address));
    let shown = failures.iter().take(4).map(|(address, error)| format!("{address}: {error}"));
    let error = shown.fold(error, Error::because);
    if foreign {
        error.hint("start rank 0 on that host, or name an address of this one: `FINETUNE_RDZV_BIND=ADDRESS`")
    } else {
        error.hint("stop the other process, or set another MASTER_PORT in every process")
    }
}

/// The addresses that `name` stands for.
pub(super) fn resolve(name: &str) -> std::io::Result<Vec<IpAddr>> {
    let found = (name, 0).to_socket_addrs()?;
    let mut ips: Vec<IpAddr> = Vec::new();
    for address in found {
        if !ips.contains(&address.ip()) {
            ips.push(address.ip());
        }
    }
    if ips.is_empty() { Err(ErrorKind::NotFound.into()) } else { Ok(ips) }
}

/// In a new cluster a name may take a while to be known.
fn resolve_until(name: &str, until: Instant) -> Result<Vec<IpAddr>> {
    loop {
        match resolve(name) {
            Ok(ips) => return Ok(ips),
            Err(error) if Instant::now() >= until => {
                return Err(Error::new(
                    ErrorCategory::Transient,
                    format!("cannot find the master address `{name}`"),
                )
                .because(error.to_string()));
            }
            Err(_) => sleep(Duration::from_millis(500).min(until.saturating_duration_since(Instant::now()))),
        }
    }
}

/// Those who come.
pub(super) struct Arrivals {
    queue: mpsc::Receiver<Arrival>,
    guard: Arc<Guard>,
    thread: Option<JoinHandle<()>>,
}

impl Arrivals {
    /// The next to come before `until`.
    pub(super) fn next(&self, until: Instant) -> Option<Arrival> {
        self.queue.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
    }

    /// How many connections were refused, and the last one's reason.
    pub(super) fn refused(&self) -> Option<String> {
        let refused = locked(&self.guard.refused);
        match refused.total {
            0 => None,
            1 => Some(format!("a connection was refused: {}", refused.last)),
            total => Some(format!("{total} connections were refused, the last: {}", refused.last)),
        }
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.guard.closed.store(true, Ordering::Relaxed);
        for (_, stream) in locked(&self.guard.strangers).drain(..) {
            // It may be closed already.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by its own thread.
            let _ = thread.join();
        }
        let total = locked(&self.guard.refused).total;
        if total > 1 {
            (self.guard.notice)(&format!("{total} connections to the control channel were refused in all"));
        }
    }
}

/// What all threads at the door share.
struct Guard {
    secret: Secret,
    run: String,
    notice: Notice,
    refused: Mutex<Refused>,
    strangers: Mutex<VecDeque<(u64, TcpStream)>>,
    most_strangers: usize,
    closed: AtomicBool,
}

#[derive(Default)]
struct Refused {
    total: u64,
    last: String,
    noticed: BTreeSet<String>,
}

impl Guard {
    fn accept(self: &Arc<Self>, listener: &TcpListener, queue: &mpsc::Sender<Arrival>) {
        let mut number = 0;
        while !self.closed.load(Ordering::Relaxed) {
            match listener.accept() {
                Ok((stream, address)) => {
                    number += 1;
                    self.begin(number, stream, address, queue.clone());
                }
                // Nobody is there, or the system is short of something: neither ends the meeting.
                Err(_) => sleep(POLL),
            }
        }
    }

    fn begin(
        self: &Arc<Self>,
        number: u64,
        stream: TcpStream,
        address: SocketAddr,
        queue: mpsc::Sender<Arrival>,
    ) {
        let Ok(kept) = stream.try_clone() else { return };
        {
            let mut strangers = locked(&self.strangers);
            if strangers.len() >= self.most_strangers
                && let Some((_, oldest)) = strangers.pop_front()
            {
                let _ = oldest.shutdown(std::net::Shutdown::Both);
            }
            strangers.push_back((number, kept));
        }
        let guard = self.clone();
        let attend = move || {
            guard.attend(number, stream, address, &queue);
            guard.forget(number);
        };
        if Builder::new().name(format!("caller {number}")).stack_size(STACK_BYTES).spawn(attend).is_err() {
            self.forget(number);
        }
    }

    /// The connection is no stranger any more.
    fn forget(&self, number: u64) {
        locked(&self.strangers).retain(|(other, _)| *other != number);
    }

    /// One connection, from its first byte to its hello.
    fn attend(&self, number: u64, stream: TcpStream, address: SocketAddr, queue: &mpsc::Sender<Arrival>) {
        let until = Instant::now() + HANDSHAKE;
        let Ok(own) = prepare(&stream).and_then(|()| stream.try_clone()) else { return };
        match admit(own, &self.secret, &self.run, until) {
            Ok(mut link) => {
                // Before it is passed on: the end of the meeting cuts off all strangers.
                self.forget(number);
                match link.receiver.receive(Some(until)) {
                    // Nobody listens to the queue any more when the meeting has just ended.
                    Ok(Message::Hello(hello)) => drop(queue.send(Arrival { hello, link })),
                    Ok(_) => self.note(address, "it did not say what it is"),
                    Err(broken) => self.note(address, &broken.to_string()),
                }
            }
            Err(Failed::Broken(broken)) => self.note(address, &broken.to_string()),
            Err(Failed::Refused(refusal)) => {
                self.note(address, &refusal.to_string());
                if refusal == super::handshake::Refusal::Secret {
                    sleep(PENALTY);
                }
                refuse(&stream, refusal);
            }
        }
    }

    /// Counts a refusal, and tells the first of its reason.
    fn note(&self, address: SocketAddr, why: &str) {
        if self.closed.load(Ordering::Relaxed) {
            return;
        }
        let line = format!("{}: {why}", address.ip());
        let mut refused = locked(&self.refused);
        refused.total += 1;
        refused.last.clone_from(&line);
        if refused.noticed.len() < 16 && refused.noticed.insert(why.to_owned()) {
            drop(refused);
            (self.notice)(&format!("refused a connection to the control channel from {line}"));
        }
    }
}
