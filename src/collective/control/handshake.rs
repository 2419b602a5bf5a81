//! How two ends prove to each other that they know the secret, before anything else is said.
//!
//! ```text
//! client -> rank 0   magic, nonce, digest of the run's name, whether it has a secret
//! rank 0 -> client   magic, nonce                                  or Refused(reason)
//! client -> rank 0   HMAC-SHA256(secret, "client" + both above)
//! rank 0 -> client   HMAC-SHA256(secret, "server" + both above)    or Refused(reason)
//! ```
//!
//! The nonces make a recorded handshake worthless; both proofs cover every byte of the first two messages, so that
//! nobody between can change version or terms. Afterwards each direction has its own key, made of the same bytes, and
//! every frame carries a tag over its place in the sequence. This gives authenticity, not secrecy: what travels here
//! (digests, host names, the id of an NCCL group) is no secret. A refusal itself is not proven: whoever can change the
//! traffic can stop the meeting, not join it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};

use super::message::Message;
use super::secret::Secret;
use super::wire::{Broken, Composer, MAX_FRAME, MAX_GREETING, Parser, Timed, VERSION, framed, read_frame};

const MAGIC: &[u8; 8] = b"finetune";
const TAG: usize = 32;

const HELLO: u8 = 1;
const CHALLENGE: u8 = 2;
const PROOF: u8 = 3;
const WELCOME: u8 = 4;
const REFUSED: u8 = 5;

/// Why rank 0 does not let a connection in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Refusal {
    /// The other end speaks the version that is named.
    Version(u8),
    /// It belongs to another run.
    Run,
    /// It has no secret, rank 0 has one.
    NoSecret,
    /// It has a secret, rank 0 has none.
    NoSecretHere,
    /// Its proof is wrong.
    Secret,
}

impl Refusal {
    fn code(self) -> u8 {
        match self {
            Refusal::Version(_) => 1,
            Refusal::Run => 2,
            Refusal::NoSecret => 3,
            Refusal::NoSecretHere => 4,
            Refusal::Secret => 5,
        }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refusal::Version(version) => {
                write!(f, "the other end speaks version {version} of the control channel, this one {VERSION}")
            }
            Refusal::Run => write!(f, "it belongs to another run"),
            Refusal::NoSecret => write!(f, "rank 0 was started with a secret, the other process without"),
            Refusal::NoSecretHere => {
                write!(f, "rank 0 was started without a secret, the other process with one")
            }
            Refusal::Secret => write!(f, "its secret is not the one of rank 0"),
        }
    }
}

/// Why a handshake failed.
#[derive(Debug)]
pub(super) enum Failed {
    Broken(Broken),
    Refused(Refusal),
}

impl From<Broken> for Failed {
    fn from(broken: Broken) -> Self {
        Failed::Broken(broken)
    }
}

impl From<std::io::Error> for Failed {
    fn from(error: std::io::Error) -> Self {
        Failed::Broken(error.into())
    }
}

/// A connection whose two ends have proven themselves.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) sender: Sender,
    pub(super) receiver: Receiver,
}

/// Key and place in the sequence of one direction.
struct Sequence {
    key: [u8; TAG],
    count: u64,
}

impl std::fmt::Debug for Sequence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} frames", self.count)
    }
}

impl Sequence {
    fn next(&mut self, body: &[u8]) -> Hmac<Sha256> {
        let mut mac = keyed(&self.key);
        mac.update(&self.count.to_be_bytes());
        mac.update(body);
        self.count += 1;
        mac
    }
}

/// The sending half.
#[derive(Debug)]
pub(super) struct Sender {
    stream: TcpStream,
    sequence: Sequence,
}

impl Sender {
    /// Sends `message`; after an error the link is of no more use.
    pub(super) fn send(&mut self, message: &Message) -> Result<(), Broken> {
        let mut body = message.compose();
        let tag = self.sequence.next(&body).finalize().into_bytes();
        body.extend(tag);
        let sent = self.stream.write_all(&framed(&body));
        sent.map_err(Broken::from).inspect_err(|_| self.close())
    }

    /// Ends the connection in both directions, which also wakes its receiver.
    pub(super) fn close(&self) {
        // It may be closed already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

/// The receiving half.
#[derive(Debug)]
pub(super) struct Receiver {
    stream: TcpStream,
    sequence: Sequence,
}

impl Receiver {
    /// The next message, waiting until `until` or for ever.
    pub(super) fn receive(&mut self, until: Option<Instant>) -> Result<Message, Broken> {
        let body = read_frame(&mut Timed { stream: &self.stream, until }, MAX_FRAME)?;
        let split = body.len().checked_sub(TAG).ok_or(Broken::Malformed("a frame without a tag"))?;
        let (message, tag) = body.split_at(split);
        let mac = self.sequence.next(message);
        mac.verify_slice(tag).map_err(|_| Broken::Malformed("a frame with a wrong tag"))?;
        Message::parse(message)
    }

    /// Whether the other end has closed the connection.
    pub(super) fn is_closed(&self) -> bool {
        let mut byte = [0];
        let peeked = self.stream.set_nonblocking(true).and_then(|()| self.stream.peek(&mut byte));
        let blocking = self.stream.set_nonblocking(false);
        let alive = match peeked {
            Ok(read) => read > 0,
            Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
        };
        !alive || blocking.is_err()
    }
}

/// The client's side.
pub(super) fn greet(stream: TcpStream, secret: &Secret, run: &str, until: Instant) -> Result<Link, Failed> {
    let hello = Composer::new(HELLO)
        .fixed(MAGIC)
        .fixed(&nonce()?)
        .fixed(&run_digest(run))
        .byte(u8::from(secret.is_shared()))
        .finish();
    (&stream).write_all(&framed(&hello))?;
    let challenge = answer(&stream, until, CHALLENGE)?;
    let mut parser = Parser::new(&challenge[2..]);
    if parser.fixed(MAGIC.len())? != MAGIC {
        return Err(Broken::Malformed("something else than the control channel").into());
    }
    parser.fixed(TAG)?;
    parser.end()?;
    let transcript = [hello, challenge].concat();
    let proof = Composer::new(PROOF).fixed(&tag(secret, b"client", &transcript)).finish();
    (&stream).write_all(&framed(&proof))?;
    let welcome = answer(&stream, until, WELCOME)?;
    match hmac(secret, b"server", &transcript).verify_slice(&welcome[2..]) {
        Ok(()) => Ok(link(stream, secret, &transcript, End::Client)?),
        Err(_) => Err(Failed::Refused(Refusal::Secret)),
    }
}

/// Rank 0's side. A refusal is returned, not yet said: see [`refuse`].
pub(super) fn admit(stream: TcpStream, secret: &Secret, run: &str, until: Instant) -> Result<Link, Failed> {
    let hello = read_frame(&mut Timed { stream: &stream, until: Some(until) }, MAX_GREETING)?;
    let mut parser = Parser::new(&hello);
    let (version, kind) = (parser.byte()?, parser.byte()?);
    if kind != HELLO || parser.fixed(MAGIC.len())? != MAGIC {
        return Err(Broken::Malformed("something else than the control channel").into());
    }
    if version != VERSION {
        return Err(Failed::Refused(Refusal::Version(version)));
    }
    parser.fixed(TAG)?;
    let (their_run, theirs) = (parser.array()?, parser.byte()?);
    parser.end()?;
    if their_run != run_digest(run) {
        return Err(Failed::Refused(Refusal::Run));
    }
    match (theirs != 0, secret.is_shared()) {
        (false, true) => return Err(Failed::Refused(Refusal::NoSecret)),
        (true, false) => return Err(Failed::Refused(Refusal::NoSecretHere)),
        _ => {}
    }
    let challenge = Composer::new(CHALLENGE).fixed(MAGIC).fixed(&nonce()?).finish();
    (&stream).write_all(&framed(&challenge))?;
    let transcript = [hello, challenge].concat();
    let proof = read_frame(&mut Timed { stream: &stream, until: Some(until) }, MAX_GREETING)?;
    let proven = proof.strip_prefix(&[VERSION, PROOF]).is_some_and(|proof| {
        let mac = hmac(secret, b"client", &transcript);
        mac.verify_slice(proof).is_ok()
    });
    if !proven {
        return Err(Failed::Refused(Refusal::Secret));
    }
    let welcome = Composer::new(WELCOME).fixed(&tag(secret, b"server", &transcript)).finish();
    (&stream).write_all(&framed(&welcome))?;
    Ok(link(stream, secret, &transcript, End::Server)?)
}

/// Says to a connection why it is not let in.
pub(super) fn refuse(mut stream: &TcpStream, refusal: Refusal) {
    // Whoever does not listen need not hear it.
    let _ = stream.write_all(&framed(&Composer::new(REFUSED).byte(refusal.code()).finish()));
    let _ = stream.shutdown(std::net::Shutdown::Write);
    // Unread bytes would turn the close into a reset, which can overtake the refusal.
    let _ = stream.set_read_timeout(Some(std::time::Duration::from_millis(100)));
    let _ = stream.read(&mut [0; MAX_GREETING]);
}

/// The answer of rank 0, which is of `kind` or a refusal. Starts with version and kind.
fn answer(stream: &TcpStream, until: Instant, kind: u8) -> Result<Vec<u8>, Failed> {
    let body = read_frame(&mut Timed { stream, until: Some(until) }, MAX_GREETING)?;
    match body.as_slice() {
        [version, REFUSED, code] => Err(match code {
            1 => Failed::Refused(Refusal::Version(*version)),
            2 => Failed::Refused(Refusal::Run),
            3 => Failed::Refused(Refusal::NoSecret),
            4 => Failed::Refused(Refusal::NoSecretHere),
            5 => Failed::Refused(Refusal::Secret),
            _ => Failed::Broken(Broken::Malformed("a refusal of an unknown kind")),
        }),
        [VERSION, found, ..] if *found == kind => Ok(body),
        _ => Err(Broken::Malformed("something else than the control channel").into()),
    }
}

enum End {
    Client,
    Server,
}

fn link(stream: TcpStream, secret: &Secret, transcript: &[u8], end: End) -> std::io::Result<Link> {
    let sequence = |label: &[u8]| Sequence { key: tag(secret, label, transcript), count: 0 };
    let (to_server, to_client) = (sequence(b"frames to server"), sequence(b"frames to client"));
    let (sending, receiving) = match end {
        End::Client => (to_server, to_client),
        End::Server => (to_client, to_server),
    };
    let sender = Sender { stream: stream.try_clone()?, sequence: sending };
    Ok(Link { sender, receiver: Receiver { stream, sequence: receiving } })
}

fn nonce() -> std::io::Result<[u8; TAG]> {
    let mut nonce = [0; TAG];
    getrandom::fill(&mut nonce).map_err(|error| std::io::Error::other(error.to_string()))?;
    Ok(nonce)
}

fn run_digest(run: &str) -> [u8; 16] {
    let digest: [u8; 32] = Sha256::digest(run.as_bytes()).into();
    let mut half = [0; 16];
    half.copy_from_slice(&digest[..16]);
    half
}

fn tag(secret: &Secret, label: &[u8], transcript: &[u8]) -> [u8; TAG] {
    hmac(secret, label, transcript).finalize().into_bytes().into()
}

/// The label ends with a byte that is in none, so no label with its transcript reads as another's.
fn hmac(secret: &Secret, label: &[u8], transcript: &[u8]) -> Hmac<Sha256> {
    let mut mac = keyed(secret.key());
    mac.update(label);
    mac.update(&[0]);
    mac.update(transcript);
    mac
}

fn keyed(key: &[u8]) -> Hmac<Sha256> {
    match Hmac::new_from_slice(key) {
        Ok(mac) => mac,
        Err(_) => unreachable!("HMAC takes a key of any length"),
    }
}
