//! Serves one page of text over HTTP, read-only, for Prometheus.
//!
//! The run hands over a whole page and goes on; a client gets the last one. One thread accepts.
//! Each connection has its own thread for at most five seconds, so that a slow or silent client
//! blocks neither the run nor other clients. The crate `httparse` parses request heads, as in ureq;
//! small server crates (tiny_http) bound neither the head of a request nor the time for it.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::locks::locked;
use crate::threads;

/// Time limit for a request and its answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most bytes of a request's head, and most that the server reads behind it.
const MOST_BYTES: usize = 16 << 10;
/// Most headers of a request.
const MOST_HEADERS: usize = 64;
/// Most connections at a time; more are closed at once.
const MOST_CLIENTS: usize = 16;
/// Pause after a failed accept, as when the process has no file descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// The content type (Prometheus text exposition).
const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Serves a page until it is dropped.
#[derive(Debug)]
pub struct PageServer {
    address: SocketAddr,
    path: &'static str,
    shared: Arc<SharedPage>,
    thread: Option<JoinHandle<()>>,
}

/// The state that the run and the threads of the server share.
#[derive(Debug, Default)]
struct SharedPage {
    text: Mutex<Arc<str>>,
    stop: AtomicBool,
}

/// An answer without its page: status line, further headers, text.
struct PageAnswer {
    status: &'static str,
    headers: &'static str,
    text: Arc<str>,
    with_body: bool,
}

impl PageServer {
    /// Listens at `address` and serves an empty page at `path`.
    ///
    /// # Errors
    /// `User` if the port is in use or the address is not this machine's.
    pub fn bind(address: SocketAddr, path: &'static str) -> Result<Self> {
        let refused = |e: io::Error| Error::user_or_limit(format!("cannot listen at {address}"), &e);
        let listener = TcpListener::bind(address).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        let shared = Arc::new(SharedPage::default());
        let page = Arc::clone(&shared);
        let thread = threads::start("metrics", move || accept(&listener, path, &page))?;
        Ok(PageServer { address, path, shared, thread: Some(thread) })
    }

    /// Returns the address of the page.
    pub fn url(&self) -> String {
        format!("http://{}{}", self.address, self.path)
    }

    /// Returns whether other machines may reach it.
    pub fn is_open(&self) -> bool {
        !self.address.ip().is_loopback()
    }

    /// Replaces the page by `text`.
    pub fn show(&self, text: String) {
        *locked(&self.shared.text) = text.into();
    }
}

impl Drop for PageServer {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // A connection wakes the accepting thread.
        let mut own = self.address;
        if own.ip().is_unspecified() {
            own.set_ip(match own {
                SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            });
        }
        let woken = TcpStream::connect_timeout(&own, Duration::from_secs(1)).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            // The thread returns nothing.
            let _ = thread.join();
        }
    }
}

fn accept(listener: &TcpListener, path: &'static str, shared: &Arc<SharedPage>) {
    let clients = Arc::new(());
    loop {
        let accepted = listener.accept();
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        let Ok((stream, _)) = accepted else {
            std::thread::sleep(PAUSE);
            continue;
        };
        // Each client holds one more.
        if Arc::strong_count(&clients) > MOST_CLIENTS {
            continue;
        }
        let (page, client) = (Arc::clone(shared), Arc::clone(&clients));
        let answer = move || {
            // A client that went away gets no answer.
            let _ = serve(&stream, path, &page);
            drop(client);
        };
        // Without a thread the connection is closed, as for too many clients.
        drop(threads::start("metrics client", answer));
    }
}

/// Reads a request and answers it.
fn serve(mut stream: &TcpStream, path: &str, shared: &SharedPage) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let (mut head, mut piece) = (Vec::new(), [0; 1024]);
    let answer = loop {
        let count = read_until(stream, &mut piece, deadline)?;
        if count == 0 {
            return Ok(());
        }
        head.extend_from_slice(&piece[..count]);
        let page = || Arc::clone(&locked(&shared.text));
        if let Some(answer) = answer(&head, path, page) {
            break answer;
        }
    };
    stream.set_write_timeout(Some(left(deadline)?))?;
    let PageAnswer { status, headers, text, with_body } = answer;
    let mut bytes = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {TEXT_FORMAT}\r\nContent-Length: {}\r\n{headers}Connection: close\r\n\r\n",
        text.len()
    );
    if with_body {
        bytes.push_str(&text);
    }
    stream.write_all(bytes.as_bytes())?;
    stream.shutdown(Shutdown::Write)?;
    // Closing with unread bytes would discard the answer.
    let mut rest = 0;
    while rest < MOST_BYTES {
        match read_until(stream, &mut piece, deadline)? {
            0 => break,
            count => rest += count,
        }
    }
    Ok(())
}

fn read_until(mut stream: &TcpStream, piece: &mut [u8], deadline: Instant) -> io::Result<usize> {
    stream.set_read_timeout(Some(left(deadline)?))?;
    stream.read(piece)
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Returns the answer to the request that begins with `head`; none while the head is incomplete.
fn answer(head: &[u8], path: &str, page: impl FnOnce() -> Arc<str>) -> Option<PageAnswer> {
    let answer = |status, text: &str| {
        Some(PageAnswer { status, headers: "", text: format!("{text}\n").into(), with_body: true })
    };
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(head) {
        Ok(httparse::Status::Partial) if head.len() < MOST_BYTES => return None,
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            return answer("431 Request Header Fields Too Large", "the request is too long");
        }
        Err(_) => return answer("400 Bad Request", "this is not an HTTP request"),
    }
    let (method, target) = (request.method.unwrap_or_default(), request.path.unwrap_or_default());
    if target.split('?').next() != Some(path) {
        let mut answer = answer("404 Not Found", &format!("only {path} is available"))?;
        answer.with_body = method != "HEAD";
        return Some(answer);
    }
    match method {
        "GET" | "HEAD" => {
            Some(PageAnswer { status: "200 OK", headers: "", text: page(), with_body: method == "GET" })
        }
        _ => answer("405 Method Not Allowed", "only GET and HEAD are allowed")
            .map(|answer| PageAnswer { headers: "Allow: GET, HEAD\r\n", ..answer }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server() -> PageServer {
        let server = PageServer::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), "/metrics").unwrap();
        server.show("a 1\n".into());
        server
    }

    fn ask(server: &PageServer, request: &str) -> String {
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn the_page_is_read_and_nothing_else() {
        let server = server();
        assert!(!server.is_open());
        let page = ask(&server, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert_eq!(
            page,
            "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: 4\r\n\
             Connection: close\r\n\r\na 1\n"
        );
        server.show("a 2\n".into());
        assert!(ask(&server, "GET /metrics?x=1 HTTP/1.0\r\n\r\n").ends_with("\r\n\r\na 2\n"));
        let head = ask(&server, "HEAD /metrics HTTP/1.1\r\n\r\n");
        assert!(head.contains("Content-Length: 4\r\n") && head.ends_with("\r\n\r\n"), "{head}");
        for (request, status) in [
            ("GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
            ("GET /metrics/x HTTP/1.1\r\n\r\n", "404 Not Found"),
            ("POST /metrics HTTP/1.1\r\nContent-Length: 2\r\n\r\nab", "405 Method Not Allowed"),
            ("DELETE /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
            ("nonsense\r\n\r\n", "400 Bad Request"),
        ] {
            let answer = ask(&server, request);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{request}: {answer}");
        }
        let long = format!("GET /metrics HTTP/1.1\r\nX: {}", "x".repeat(MOST_BYTES));
        assert!(ask(&server, &long).starts_with("HTTP/1.1 431 "));
    }

    #[test]
    fn a_client_that_says_nothing_holds_up_no_other_and_no_end() {
        let server = server();
        let silent: Vec<TcpStream> =
            (0..MOST_CLIENTS - 2).map(|_| TcpStream::connect(server.address).unwrap()).collect();
        assert!(ask(&server, "GET /metrics HTTP/1.1\r\n\r\n").ends_with("a 1\n"));
        let address = server.address;
        drop(server);
        TcpListener::bind(address).unwrap();
        drop(silent);
    }

    #[test]
    fn a_port_in_use_is_an_error_of_the_user() {
        let server = server();
        let error = PageServer::bind(server.address, "/metrics").unwrap_err();
        assert_eq!(error.kind(), crate::error::ErrorCategory::User);
        assert!(error.to_string().contains(&format!("cannot listen at {}", server.address)), "{error}");
    }
}
