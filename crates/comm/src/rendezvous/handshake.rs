//! Mutual authentication of two processes, before any other message: Noise with a pre-shared key.
//!
//! ```text
//! process -> rank 0   greeting: protocol, version, digest of the run's name,
//!                     whether it has a secret (JSON)
//! process -> rank 0   Noise NNpsk0, first message
//! rank 0 -> process   accepted, or refused with the reason (JSON)
//! rank 0 -> process   Noise NNpsk0, second message
//! ```
//!
//! The greeting is plain text, so that a process of another version or run, or without a secret,
//! gets the reason of its refusal. It is the prologue of the Noise handshake, so an attacker
//! between the ends cannot change it. The pre-shared key is derived from the run's secret. Both
//! ends contribute a fresh Curve25519 key: a recorded handshake is useless, and recorded data stays
//! secret even if the secret leaks later. A refusal is not authenticated: an attacker who changes
//! the traffic can prevent a rendezvous, but not join it.

use std::io::{self, Read};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use snow::{Builder, HandshakeState};

use super::auth::Secret;
use super::connection_error::{ConnectionError, Refusal};
use super::framing::{Connection, DeadlineReader, noise_error, read_frame, write_frame};

/// Version of the protocol; other versions are refused.
const VERSION: u32 = 4;
const PROTOCOL: &str = "finetune rendezvous";
const NOISE: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";

/// Maximum bytes of a frame from an unauthenticated process.
const MAX_GREETING: usize = 256;

const OTHER_PROTOCOL: ConnectionError = ConnectionError::Malformed("something other than this protocol");

/// The first frame. Every version has its first two fields.
#[derive(Serialize, Deserialize)]
struct Greeting {
    protocol: String,
    version: u32,
    #[serde(default)]
    run: String,
    #[serde(default)]
    has_secret: bool,
}

/// Plain-text answer of rank 0.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Accepted,
    Refused(Refusal),
}

/// Converts the error of an unreadable Noise message to a fault of its sender.
fn from_peer(error: snow::Error) -> ConnectionError {
    if error == snow::Error::Decrypt { ConnectionError::Refused(Refusal::Secret) } else { OTHER_PROTOCOL }
}

/// Authenticates with rank 0 at the other end of `stream`.
pub(super) fn connect(
    stream: TcpStream,
    secret: &Secret,
    run: &str,
    until: Instant,
) -> Result<Connection, ConnectionError> {
    let greeting = Greeting {
        protocol: PROTOCOL.to_owned(),
        version: VERSION,
        run: run_digest(run),
        has_secret: secret.is_shared(),
    };
    let greeting = to_json(&greeting)?;
    let key = secret.pre_shared_key();
    let mut noise = builder(&key, &greeting).and_then(Builder::build_initiator).map_err(noise_error)?;
    write_frame(&stream, &greeting)?;
    write_noise(&stream, &mut noise)?;
    let mut reader = DeadlineReader { stream: &stream, until: Some(until) };
    match serde_json::from_slice(&read_frame(&mut reader, MAX_GREETING)?) {
        Ok(Answer::Accepted) => read_noise(&mut reader, &mut noise)?,
        Ok(Answer::Refused(refusal)) => return Err(ConnectionError::Refused(refusal)),
        Err(_) => return Err(OTHER_PROTOCOL),
    }
    Connection::new(stream, noise)
}

/// Authenticates a process that has connected to rank 0. The caller sends a refusal: see
/// [`refuse`].
pub(super) fn accept(
    stream: TcpStream,
    secret: &Secret,
    run: &str,
    until: Instant,
) -> Result<Connection, ConnectionError> {
    let mut reader = DeadlineReader { stream: &stream, until: Some(until) };
    let bytes = read_frame(&mut reader, MAX_GREETING)?;
    let greeting: Greeting = serde_json::from_slice(&bytes).map_err(|_| OTHER_PROTOCOL)?;
    if greeting.protocol != PROTOCOL {
        return Err(OTHER_PROTOCOL);
    }
    let refusal = if greeting.version != VERSION {
        Some(Refusal::Version { rank_0: VERSION, other: greeting.version })
    } else if greeting.run != run_digest(run) {
        Some(Refusal::Run)
    } else {
        match (greeting.has_secret, secret.is_shared()) {
            (false, true) => Some(Refusal::NoSecret),
            (true, false) => Some(Refusal::NoSecretAtRank0),
            _ => None,
        }
    };
    if let Some(refusal) = refusal {
        return Err(ConnectionError::Refused(refusal));
    }
    let key = secret.pre_shared_key();
    let mut noise = builder(&key, &bytes).and_then(Builder::build_responder).map_err(noise_error)?;
    read_noise(&mut reader, &mut noise)?;
    write_frame(&stream, &to_json(&Answer::Accepted)?)?;
    write_noise(&stream, &mut noise)?;
    Connection::new(stream, noise)
}

/// Sends the reason of a refusal to a connection.
pub(super) fn refuse(mut stream: &TcpStream, refusal: Refusal) {
    // A peer that is gone needs no reason.
    let _ = to_json(&Answer::Refused(refusal)).and_then(|answer| write_frame(stream, &answer));
    let _ = stream.shutdown(Shutdown::Write);
    // Unread bytes would turn the close into a reset, which can overtake the refusal.
    let _ = stream.set_read_timeout(Some(Duration::from_millis(100)));
    let _ = stream.read(&mut [0; MAX_GREETING]);
}

fn builder<'a>(key: &'a [u8; 32], prologue: &'a [u8]) -> Result<Builder<'a>, snow::Error> {
    Builder::new(NOISE.parse()?).psk(0, key)?.prologue(prologue)
}

fn write_noise(stream: &TcpStream, noise: &mut HandshakeState) -> Result<(), ConnectionError> {
    let mut message = [0; MAX_GREETING];
    let length = noise.write_message(&[], &mut message).map_err(noise_error)?;
    Ok(write_frame(stream, &message[..length])?)
}

fn read_noise(reader: &mut impl Read, noise: &mut HandshakeState) -> Result<(), ConnectionError> {
    let message = read_frame(reader, MAX_GREETING)?;
    noise.read_message(&message, &mut [0; MAX_GREETING]).map_err(from_peer)?;
    Ok(())
}

fn to_json(value: &impl Serialize) -> io::Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| io::Error::other(error.to_string()))
}

fn run_digest(run: &str) -> String {
    blake3::hash(run.as_bytes()).to_hex().to_string()
}
