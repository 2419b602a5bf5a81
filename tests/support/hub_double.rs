//! A test double of a Hugging Face hub in this process: the part of its protocol that `finetune`
//! uses, with faults.
//!
//! `HubDouble::start(repos)` listens on 127.0.0.1 and serves the given repositories. `url()` is the
//! value for `HF_ENDPOINT`; `requests()` lists the requests so far. A [`Fault`] spoils matching
//! requests a number of times. Commit hashes follow from the contents. A test binary includes this
//! file by its path (tests/lib/main.rs).

#![allow(dead_code)] // Each test binary uses a part of it.
#![allow(clippy::unwrap_used)] // A failure of the double is a failure of the test.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sha1::{Digest, Sha1};
use sha2::Sha256;

const MAX_CONNECTIONS: usize = 64;

/// Access to the files of a repository.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Public.
    Open,
    /// Requires the token `good` for files (401 or 403 otherwise), but not for the description.
    Gated { good: &'static str },
    /// Requires the token `good`; without it the repository does not exist.
    Private { good: &'static str },
}

#[derive(Clone)]
struct Blob {
    bytes: Vec<u8>,
    is_lfs: bool,
}

/// A repository that the double serves.
#[derive(Clone)]
pub(crate) struct RepoDouble {
    prefix: &'static str,
    id: String,
    revision: String,
    access: Access,
    files: BTreeMap<String, Blob>,
    extra_names: Vec<String>,
}

impl RepoDouble {
    /// Creates a model with the single revision `main`.
    pub(crate) fn model(id: &str) -> Self {
        Self::new("models", id)
    }

    /// Creates a data set with the single revision `main`.
    pub(crate) fn dataset(id: &str) -> Self {
        Self::new("datasets", id)
    }

    fn new(prefix: &'static str, id: &str) -> Self {
        RepoDouble {
            prefix,
            id: id.to_owned(),
            revision: "main".to_owned(),
            access: Access::Open,
            files: BTreeMap::new(),
            extra_names: Vec::new(),
        }
    }

    /// Renames its single revision from `main`.
    pub(crate) fn revision(mut self, revision: &str) -> Self {
        self.revision = revision.to_owned();
        self
    }

    /// Sets its access.
    pub(crate) fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Adds a small file, whose ETag is git's hash.
    pub(crate) fn file(mut self, name: &str, bytes: impl AsRef<[u8]>) -> Self {
        self.files.insert(name.to_owned(), Blob { bytes: bytes.as_ref().to_vec(), is_lfs: false });
        self
    }

    /// Adds a large file, whose `X-Linked-ETag` is its sha256.
    pub(crate) fn lfs(mut self, name: &str, bytes: impl AsRef<[u8]>) -> Self {
        self.files.insert(name.to_owned(), Blob { bytes: bytes.as_ref().to_vec(), is_lfs: true });
        self
    }

    /// Lists a file name without a file.
    pub(crate) fn only_listed(mut self, name: &str) -> Self {
        self.extra_names.push(name.to_owned());
        self
    }

    /// Returns the commit of the revision: 40 hex digits that follow from names and contents.
    pub(crate) fn commit(&self) -> String {
        let mut sum = Sha1::new();
        for (name, blob) in &self.files {
            sum.update(name);
            sum.update(etag(blob));
        }
        format!("{:x}", sum.finalize())
    }

    fn path(&self) -> String {
        if self.prefix == "models" { self.id.clone() } else { format!("{}/{}", self.prefix, self.id) }
    }
}

fn etag(blob: &Blob) -> String {
    if blob.is_lfs {
        format!("{:x}", Sha256::digest(&blob.bytes))
    } else {
        let mut sum = Sha1::new_with_prefix(format!("blob {}\0", blob.bytes.len()));
        sum.update(&blob.bytes);
        format!("{:x}", sum.finalize())
    }
}

/// A way to spoil the answer to a request.
#[derive(Clone)]
pub(crate) enum Spoil {
    /// Answers with this status and these headers instead.
    Status(u16, Vec<(&'static str, String)>),
    /// Announces the full length of the body and breaks off after this many bytes.
    BreakAfter(usize),
    /// Announces and sends only this many bytes of the body.
    Shorten(usize),
    /// Appends this many bytes to the body.
    Lengthen(usize),
    /// Changes the first byte of the body.
    Damage,
    /// Ignores `Range` and sends the whole file.
    IgnoreRange,
    /// Sends this body.
    Body(Vec<u8>),
    /// Sends this body, announced as compressed by gzip.
    Gzip(Vec<u8>),
    /// Replaces headers of the same name; an empty value removes one.
    Headers(Vec<(&'static str, String)>),
    /// Closes the connection without an answer.
    Close,
    /// Stops after this many bytes of the body and keeps the connection open.
    StallAfter(usize),
    /// Sends head and body a byte at a time, with this pause before each.
    Drip(Duration),
    /// Sends only the body this way.
    DripBody(Duration),
}

/// Spoils the next `times` requests whose line (such as `GET /a/b/resolve/<commit>/config.json`)
/// contains all of `of`.
#[derive(Clone)]
pub(crate) struct Fault {
    of: Vec<String>,
    times: usize,
    spoil: Spoil,
}

impl Fault {
    pub(crate) fn new(of: &[&str], times: usize, spoil: Spoil) -> Self {
        Fault { of: of.iter().map(|&text| text.to_owned()).collect(), times, spoil }
    }
}

/// A received request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    /// The `Host` header.
    pub(crate) host: String,
    pub(crate) range: Option<String>,
    pub(crate) authorization: Option<String>,
}

impl Request {
    fn line(&self) -> String {
        format!("{} {}", self.method, self.path)
    }
}

struct State {
    repos: Vec<RepoDouble>,
    faults: Mutex<Vec<Fault>>,
    requests: Mutex<Vec<Request>>,
    /// Request lines with the number of body bytes sent.
    sent: Mutex<Vec<(String, usize)>>,
    stop: AtomicBool,
    connections: AtomicUsize,
    redirect_to: Option<String>,
}

/// The hub; dropping it stops it.
pub(crate) struct HubDouble {
    url: String,
    state: Arc<State>,
    listener: Option<std::thread::JoinHandle<()>>,
}

impl HubDouble {
    /// Serves these repositories, with each file directly from the hub.
    pub(crate) fn start(repos: Vec<RepoDouble>) -> Self {
        Self::launch(repos, false)
    }

    /// Serves them with large files behind a redirect to another host name, like the live hub with
    /// its CDN.
    pub(crate) fn start_with_cdn(repos: Vec<RepoDouble>) -> Self {
        Self::launch(repos, true)
    }

    fn launch(repos: Vec<RepoDouble>, has_cdn: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(State {
            repos,
            faults: Mutex::default(),
            requests: Mutex::default(),
            sent: Mutex::default(),
            stop: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            redirect_to: has_cdn.then(|| format!("http://localhost:{port}/cdn")),
        });
        let shared = Arc::clone(&state);
        let thread = std::thread::spawn(move || accept(&listener, &shared));
        HubDouble { url: format!("http://127.0.0.1:{port}"), state, listener: Some(thread) }
    }

    /// Returns the address, for `HF_ENDPOINT`.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Adds a fault; the first unused one that matches a request applies.
    pub(crate) fn fault(&self, fault: Fault) {
        self.state.faults.lock().unwrap().push(fault);
    }

    /// Returns all requests since the start or the last [`HubDouble::forget`], in order.
    pub(crate) fn requests(&self) -> Vec<Request> {
        self.state.requests.lock().unwrap().clone()
    }

    /// Forgets requests and faults.
    pub(crate) fn forget(&self) {
        self.state.requests.lock().unwrap().clear();
        self.state.sent.lock().unwrap().clear();
        self.state.faults.lock().unwrap().clear();
    }

    /// Returns the body bytes sent since the start or the last [`HubDouble::forget`], for requests
    /// whose line contains this text.
    pub(crate) fn bytes_sent(&self, text: &str) -> usize {
        let sent = self.state.sent.lock().unwrap();
        sent.iter().filter(|(line, _)| line.contains(text)).map(|(_, bytes)| bytes).sum()
    }

    /// Returns the number of requests whose line contains this text.
    pub(crate) fn count(&self, text: &str) -> usize {
        self.requests().iter().filter(|request| request.line().contains(text)).count()
    }
}

impl Drop for HubDouble {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
        // The thread blocks in accept; one connection wakes it.
        let _ = TcpStream::connect(self.url.trim_start_matches("http://"));
        if let Some(thread) = self.listener.take() {
            let _ = thread.join();
        }
    }
}

fn accept(listener: &TcpListener, state: &Arc<State>) {
    for stream in listener.incoming() {
        if state.stop.load(Ordering::SeqCst) {
            return;
        }
        let Ok(stream) = stream else { continue };
        if state.connections.fetch_add(1, Ordering::SeqCst) >= MAX_CONNECTIONS {
            state.connections.fetch_sub(1, Ordering::SeqCst);
            continue;
        }
        let state = Arc::clone(state);
        std::thread::spawn(move || {
            // A client that disconnects is no error of the double.
            let _ = serve(stream, &state);
            state.connections.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

struct Reply {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    /// Bytes of the body that are actually sent.
    sent: usize,
}

impl Reply {
    fn new(status: u16, headers: Vec<(&'static str, String)>, body: Vec<u8>) -> Self {
        Reply { status, headers, sent: body.len(), body }
    }

    fn set(&mut self, name: &'static str, value: String) {
        self.headers.retain(|(known, _)| !known.eq_ignore_ascii_case(name));
        if !value.is_empty() {
            self.headers.push((name, value));
        }
    }
}

fn serve(mut stream: TcpStream, state: &State) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(300)))?;
    let Some(request) = read_request(&stream)? else { return Ok(()) };
    state.requests.lock().unwrap().push(request.clone());
    let spoil = take_fault(state, &request.line());
    let ignores_range = matches!(spoil, Some(Spoil::IgnoreRange));
    let stalls = matches!(spoil, Some(Spoil::StallAfter(_)));
    let range = request.range.as_deref().filter(|_| !ignores_range);
    let mut reply = answer(state, &request, range);
    // Applies to head and body.
    let mut drips = [None; 2];
    match spoil {
        None | Some(Spoil::IgnoreRange) => {}
        Some(Spoil::Close) => return Ok(()),
        Some(Spoil::Status(status, headers)) => reply = Reply::new(status, headers, b"no".to_vec()),
        Some(Spoil::Drip(pause)) => drips = [Some(pause); 2],
        Some(Spoil::DripBody(pause)) => drips = [None, Some(pause)],
        Some(Spoil::BreakAfter(sent) | Spoil::StallAfter(sent)) => reply.sent = sent.min(reply.body.len()),
        Some(Spoil::Shorten(length)) => {
            reply = Reply::new(reply.status, reply.headers, reply.body[..length].to_vec())
        }
        Some(Spoil::Lengthen(by)) => {
            reply.body.extend(vec![b'x'; by]);
            reply.sent = reply.body.len();
        }
        Some(Spoil::Damage) => reply.body[0] ^= 1,
        Some(Spoil::Body(body)) => reply = Reply::new(reply.status, reply.headers, body),
        Some(Spoil::Gzip(body)) => {
            reply = Reply::new(reply.status, reply.headers, body);
            reply.set("Content-Encoding", "gzip".to_owned());
        }
        Some(Spoil::Headers(headers)) => headers.into_iter().for_each(|(name, value)| reply.set(name, value)),
    }
    let mut head = format!("HTTP/1.1 {} Status\r\nConnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    if !reply.headers.iter().any(|(name, _)| *name == "Content-Length") {
        head.push_str(&format!("Content-Length: {}\r\n", reply.body.len()));
    }
    head.push_str("\r\n");
    drip(&mut stream, head.as_bytes(), drips[0])?;
    if request.method != "HEAD" {
        match drips[1] {
            None => send(&mut stream, &reply.body[..reply.sent], &request.line(), state)?,
            pause => drip(&mut stream, &reply.body[..reply.sent], pause)?,
        }
    }
    stream.flush()?;
    if !stalls {
        stream.shutdown(std::net::Shutdown::Write)?;
    }
    // Wait until the client closes: closing with unread input would reset the connection before the
    // client has read the answer.
    std::io::copy(&mut stream.take(1 << 16), &mut std::io::sink()).map(|_| ())
}

/// Sends bytes at once, or with a pause before each until the client closes.
fn drip(stream: &mut TcpStream, bytes: &[u8], pause: Option<Duration>) -> std::io::Result<()> {
    let Some(pause) = pause else { return stream.write_all(bytes) };
    for byte in bytes {
        std::thread::sleep(pause);
        stream.write_all(&[*byte])?;
    }
    Ok(())
}

/// Sends a body in pieces, and counts the bytes sent before the client closed.
fn send(stream: &mut TcpStream, body: &[u8], line: &str, state: &State) -> std::io::Result<()> {
    for piece in body.chunks(1 << 14) {
        stream.write_all(piece)?;
        state.sent.lock().unwrap().push((line.to_owned(), piece.len()));
    }
    Ok(())
}

fn read_request(stream: &TcpStream) -> std::io::Result<Option<Request>> {
    let mut lines = BufReader::new(stream.take(1 << 16)).lines();
    let Some(first) = lines.next().transpose()? else { return Ok(None) };
    let mut words = first.split(' ');
    let (Some(method), Some(path)) = (words.next(), words.next()) else { return Ok(None) };
    let mut request = Request {
        method: method.to_owned(),
        path: path.to_owned(),
        host: String::new(),
        range: None,
        authorization: None,
    };
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(':') else { break };
        let value = value.trim().to_owned();
        match name.to_ascii_lowercase().as_str() {
            "host" => request.host = value,
            "range" => request.range = Some(value),
            "authorization" => request.authorization = Some(value),
            _ => {}
        }
    }
    Ok(Some(request))
}

fn take_fault(state: &State, line: &str) -> Option<Spoil> {
    let mut faults = state.faults.lock().unwrap();
    let fault =
        faults.iter_mut().find(|fault| fault.times > 0 && fault.of.iter().all(|text| line.contains(text)))?;
    fault.times -= 1;
    Some(fault.spoil.clone())
}

fn answer(state: &State, request: &Request, range: Option<&str>) -> Reply {
    let token = request.authorization.as_deref().and_then(|value| value.strip_prefix("Bearer "));
    let path = percent_decoded(request.path.trim_start_matches('/'));
    let path = path.as_str();
    if let Some(digest) = path.strip_prefix("cdn/") {
        let all = state.repos.iter().flat_map(|repo| repo.files.values());
        return match all.into_iter().find(|blob| etag(blob) == digest) {
            Some(blob) => content(blob, range, Vec::new()),
            None => refusal(404, "", ""),
        };
    }
    for repo in &state.repos {
        let allowed = match repo.access {
            Access::Open => true,
            Access::Gated { good } | Access::Private { good } => token == Some(good),
        };
        let is_private = matches!(repo.access, Access::Private { .. });
        if is_private && !allowed {
            continue;
        }
        if let Some(revision) = path.strip_prefix(&format!("api/{}/{}/revision/", repo.prefix, repo.id)) {
            let known = revision == repo.revision || revision == repo.commit();
            return if known { describe(repo) } else { refusal(404, "RevisionNotFound", "Invalid rev id") };
        }
        let Some(rest) = path.strip_prefix(&format!("{}/resolve/", repo.path())) else { continue };
        // A revision may contain slashes, so match from the front.
        let served = [repo.revision.clone(), repo.commit()];
        let known =
            served.iter().find_map(|revision| rest.strip_prefix(revision.as_str())?.strip_prefix('/'));
        if !allowed {
            let status = if token.is_some() { 403 } else { 401 };
            return refusal(status, "GatedRepo", "Access to this repository is restricted.");
        }
        let Some(file) = known else { return refusal(404, "RevisionNotFound", "Invalid rev id") };
        return match repo.files.get(file) {
            Some(blob) => file_reply(state, repo, blob, range),
            None => refusal(404, "EntryNotFound", "Entry not found"),
        };
    }
    // The live hub answers 401 to anonymous requests for missing repositories.
    refusal(if token.is_some() { 404 } else { 401 }, "RepoNotFound", "Repository not found")
}

fn percent_decoded(path: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = path.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let escaped =
            tail.get(..2).and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        rest = match (byte, escaped) {
            (b'%', Some(value)) => {
                bytes.push(value);
                &tail[2..]
            }
            _ => {
                bytes.push(byte);
                tail
            }
        };
    }
    String::from_utf8(bytes).unwrap()
}

fn describe(repo: &RepoDouble) -> Reply {
    let names = repo.files.keys().chain(&repo.extra_names);
    let siblings: Vec<_> = names.map(|name| serde_json::json!({ "rfilename": name })).collect();
    let gated = match repo.access {
        Access::Gated { .. } => serde_json::json!("manual"),
        _ => serde_json::json!(false),
    };
    let body = serde_json::json!({
        "_id": "0", "id": repo.id, "modelId": repo.id, "sha": repo.commit(), "private": false, "gated": gated,
        "disabled": false, "tags": [], "siblings": siblings,
    });
    Reply::new(200, vec![("Content-Type", "application/json".to_owned())], body.to_string().into_bytes())
}

fn file_reply(state: &State, repo: &RepoDouble, blob: &Blob, range: Option<&str>) -> Reply {
    let digest = etag(blob);
    let mut headers = vec![("X-Repo-Commit", repo.commit())];
    if !blob.is_lfs {
        headers.push(("ETag", format!("\"{digest}\"")));
        return content(blob, range, headers);
    }
    headers.push(("X-Linked-ETag", format!("\"{digest}\"")));
    headers.push(("X-Linked-Size", blob.bytes.len().to_string()));
    match &state.redirect_to {
        Some(cdn) => {
            headers.push(("Location", format!("{cdn}/{digest}")));
            Reply::new(302, headers, b"Found".to_vec())
        }
        None => {
            headers.push(("ETag", "\"an-etag-of-the-storage\"".to_owned()));
            content(blob, range, headers)
        }
    }
}

fn content(blob: &Blob, range: Option<&str>, mut headers: Vec<(&'static str, String)>) -> Reply {
    let size = blob.bytes.len();
    headers.push(("Accept-Ranges", "bytes".to_owned()));
    let bounds = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let Some((first, last)) = bounds else { return Reply::new(200, headers, blob.bytes.clone()) };
    let first: usize = first.parse().unwrap();
    let last = last.parse().unwrap_or(size.saturating_sub(1)).min(size.saturating_sub(1));
    if first >= size {
        headers.push(("Content-Range", format!("bytes */{size}")));
        return Reply::new(416, headers, Vec::new());
    }
    headers.push(("Content-Range", format!("bytes {first}-{last}/{size}")));
    Reply::new(206, headers, blob.bytes[first..=last].to_vec())
}

fn refusal(status: u16, code: &str, message: &str) -> Reply {
    let mut headers = Vec::new();
    if !code.is_empty() {
        headers.push(("X-Error-Code", code.to_owned()));
        headers.push(("X-Error-Message", message.to_owned()));
    }
    Reply::new(status, headers, message.as_bytes().to_vec())
}
