//! The port of rank 0 while processes join, with limits on unauthenticated connections.
//!
//! It listens on exactly the master address. Every connection has its own thread and one deadline
//! for its whole handshake, so a slow one delays no other. The number of unauthenticated
//! connections is bounded; beyond it the oldest is closed, because an honest process needs
//! milliseconds. A wrong secret is answered late. Each reason for a refusal is logged once, further
//! ones are counted. When the rendezvous ends, the port is closed.

use std::collections::{BTreeSet, VecDeque};
use std::io::ErrorKind;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{Builder, JoinHandle, sleep};
use std::time::{Duration, Instant};

use super::auth::Secret;
use super::connection_error::{ConnectionError, Refusal};
use super::framing::{Connection, prepare};
use super::handshake::{accept, refuse};
use super::message::{JoinRequest, Message};
use super::options::{LogLine, Master, RendezvousOptions};
use crate::error::{Error, ErrorCategory, Result};
use crate::locks::locked;
use crate::threads;

/// Maximum time of a connection from its first byte to its join request.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay of the answer to a wrong secret.
const PENALTY: Duration = Duration::from_millis(500);
/// Maximum number of unauthenticated connections, beyond the processes that may all connect at
/// once.
const MAX_UNAUTHENTICATED: usize = 64;
const STACK_BYTES: usize = 256 << 10;
const POLL: Duration = Duration::from_millis(10);

/// The open port of rank 0.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    address: SocketAddr,
}

/// An authenticated process and its join request.
pub(super) struct Arrival {
    pub(super) request: JoinRequest,
    pub(super) connection: Connection,
}

impl Listener {
    /// Listens on the master address of `options` (or on its `bind`), on the first of its ports
    /// that is free; port 0 chooses any. Retries an unresolved name until the join timeout.
    ///
    /// # Errors
    /// [`ErrorCategory::User`] if the address is not one of this host, means all addresses, or is
    /// open to other hosts without a secret; [`ErrorCategory::Transient`] if no port is free or the
    /// name stays unknown.
    pub fn open(options: &RendezvousOptions) -> Result<Listener> {
        let Some(master) = &options.master else {
            return Err(Error::internal("a run of one process has no master address to listen on"));
        };
        let name = options.bind.as_ref().unwrap_or(&master.address);
        let ips = resolve_until(name, Instant::now() + options.join_timeout)?;
        if let Some(ip) = ips.iter().find(|ip| ip.is_unspecified()) {
            return Err(Error::user(format!("cannot listen on {ip}"))
                .because("it means all addresses of this host; accepted: the one that the other hosts use"));
        }
        if options.has_several_hosts && !master.is_loopback() && ips.iter().all(IpAddr::is_loopback) {
            return Err(Error::user(format!("cannot listen on `{name}` for other hosts"))
                .because(format!("on this host it means {}, which no other host reaches", ips[0]))
                .hint("set MASTER_ADDR to this host's IP address in every process"));
        }
        let mut failures = Vec::new();
        for port in master.all_ports() {
            for ip in &ips {
                let address = SocketAddr::new(*ip, port);
                options.secret.suffices(&address)?;
                match listen(address) {
                    Ok(listener) => return Ok(listener),
                    Err(error) => failures.push((address, error)),
                }
            }
        }
        Err(cannot_listen(master, &failures))
    }

    /// Address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts processes until the returned value is dropped.
    pub(super) fn accept(self, options: &RendezvousOptions, world_size: usize) -> Result<Arrivals> {
        let (sender, queue) = mpsc::channel();
        let acceptor = Arc::new(Acceptor {
            secret: options.secret.clone(),
            run: options.run.clone(),
            log: options.log.clone(),
            refused: Mutex::default(),
            unauthenticated: Mutex::default(),
            max_unauthenticated: MAX_UNAUTHENTICATED + world_size,
            closed: AtomicBool::new(false),
        });
        let (theirs, listener) = (acceptor.clone(), self.listener);
        let thread = threads::start("rendezvous", move || theirs.run(&listener, &sender))?;
        Ok(Arrivals { queue, acceptor, thread: Some(thread) })
    }
}

fn listen(address: SocketAddr) -> std::io::Result<Listener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    Ok(Listener { listener, address })
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

/// Resolves `name` to its addresses.
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

/// Resolves `name` with retries, because in a new cluster a name may be unknown for a while.
fn resolve_until(name: &str, until: Instant) -> Result<Vec<IpAddr>> {
    loop {
        match resolve(name) {
            Ok(ips) => return Ok(ips),
            Err(error) if Instant::now() >= until => {
                return Err(Error::new(
                    ErrorCategory::Transient,
                    format!("cannot find the master address `{name}`"),
                )
                .because(error.to_string())
                .hint(
                    "name a host that every process can resolve: `MASTER_ADDR=HOST` or `--master-addr HOST`",
                ));
            }
            Err(_) => sleep(Duration::from_millis(500).min(until.saturating_duration_since(Instant::now()))),
        }
    }
}

/// The joining processes, one after another.
pub(super) struct Arrivals {
    queue: mpsc::Receiver<Arrival>,
    acceptor: Arc<Acceptor>,
    thread: Option<JoinHandle<()>>,
}

impl Arrivals {
    /// Waits until `until` for the next process.
    pub(super) fn next(&self, until: Instant) -> Option<Arrival> {
        self.queue.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
    }

    /// Number of refused connections with the last reason, as text.
    pub(super) fn refused(&self) -> Option<String> {
        let refused = locked(&self.acceptor.refused);
        match refused.total {
            0 => None,
            1 => Some(format!("a connection was refused: {}", refused.last)),
            total => Some(format!("{total} connections were refused, the last: {}", refused.last)),
        }
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.acceptor.closed.store(true, Ordering::Relaxed);
        for (_, stream) in locked(&self.acceptor.unauthenticated).drain(..) {
            // It may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(thread) = self.thread.take() {
            // The thread has reported its own panic.
            let _ = thread.join();
        }
        let total = locked(&self.acceptor.refused).total;
        if total > 1 {
            (self.acceptor.log)(&format!("refused {total} connections to the rendezvous in total"));
        }
    }
}

/// State of the threads that accept processes.
struct Acceptor {
    secret: Secret,
    run: String,
    log: LogLine,
    refused: Mutex<Refused>,
    unauthenticated: Mutex<VecDeque<(u64, TcpStream)>>,
    max_unauthenticated: usize,
    closed: AtomicBool,
}

/// Counts of refused connections.
#[derive(Default)]
struct Refused {
    total: u64,
    last: String,
    logged: BTreeSet<String>,
}

impl Acceptor {
    fn run(self: &Arc<Self>, listener: &TcpListener, queue: &mpsc::Sender<Arrival>) {
        let mut number = 0;
        while !self.closed.load(Ordering::Relaxed) {
            match listener.accept() {
                Ok((stream, address)) => {
                    number += 1;
                    self.start(number, stream, address, queue.clone());
                }
                // No connection, or a system limit: neither ends the rendezvous.
                Err(_) => sleep(POLL),
            }
        }
    }

    #[allow(clippy::disallowed_methods, reason = "a peer without a thread is refused")]
    fn start(
        self: &Arc<Self>,
        number: u64,
        stream: TcpStream,
        address: SocketAddr,
        queue: mpsc::Sender<Arrival>,
    ) {
        let Ok(kept) = stream.try_clone() else { return };
        {
            let mut unauthenticated = locked(&self.unauthenticated);
            if unauthenticated.len() >= self.max_unauthenticated
                && let Some((_, oldest)) = unauthenticated.pop_front()
            {
                let _ = oldest.shutdown(Shutdown::Both);
            }
            unauthenticated.push_back((number, kept));
        }
        let acceptor = self.clone();
        let let_in = move || {
            acceptor.let_in(number, stream, address, &queue);
            acceptor.forget(number);
        };
        let name = format!("rendezvous {number}");
        if Builder::new().name(name).stack_size(STACK_BYTES).spawn(let_in).is_err() {
            self.forget(number);
        }
    }

    /// Removes a connection that is authenticated or closed.
    fn forget(&self, number: u64) {
        locked(&self.unauthenticated).retain(|(other, _)| *other != number);
    }

    /// Serves one connection from its first byte to its join request.
    fn let_in(&self, number: u64, stream: TcpStream, address: SocketAddr, queue: &mpsc::Sender<Arrival>) {
        let until = Instant::now() + HANDSHAKE_TIMEOUT;
        let Ok(own) = prepare(&stream).and_then(|()| stream.try_clone()) else { return };
        match accept(own, &self.secret, &self.run, until) {
            // A replayed handshake gets here, but cannot send authenticated messages.
            Ok(mut connection) => match connection.receiver.receive(Some(until)) {
                Ok(Message::Join(request)) => {
                    // Before the request is passed on: the end of the rendezvous closes all
                    // unauthenticated connections.
                    self.forget(number);
                    // The queue has no reader if the rendezvous has just ended.
                    drop(queue.send(Arrival { request, connection }));
                }
                Ok(_) => self.note(address, "it sent no join request"),
                Err(error) => self.note(address, &error.to_string()),
            },
            Err(error) => {
                self.note(address, &error.to_string());
                if let ConnectionError::Refused(refusal) = error {
                    if refusal == Refusal::Secret {
                        sleep(PENALTY);
                    }
                    refuse(&stream, refusal);
                }
            }
        }
    }

    /// Counts a refusal, and logs the first one of each reason.
    fn note(&self, address: SocketAddr, why: &str) {
        if self.closed.load(Ordering::Relaxed) {
            return;
        }
        let line = format!("{}: {why}", address.ip());
        let mut refused = locked(&self.refused);
        refused.total += 1;
        refused.last.clone_from(&line);
        if refused.logged.len() < 16 && refused.logged.insert(why.to_owned()) {
            drop(refused);
            (self.log)(&format!("refused a connection to the rendezvous from {line}"));
        }
    }
}
