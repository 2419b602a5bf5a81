//! End of a connection: the other end is gone, violates the protocol, or is refused by rank 0.

use std::io;

use serde::{Deserialize, Serialize};

/// Reason for the end of a connection.
#[derive(Debug)]
pub(super) enum ConnectionError {
    /// The other end closed it or is gone.
    Closed,
    /// The deadline passed.
    TimedOut,
    /// The other end sent invalid data, or data that does not authenticate.
    Malformed(&'static str),
    /// Rank 0 refuses it.
    Refused(Refusal),
    /// The system's error.
    Io(io::Error),
}

impl std::fmt::Display for ConnectionError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ConnectionError::Closed => write!(f, "the connection was closed"),
            ConnectionError::TimedOut => write!(f, "it timed out"),
            ConnectionError::Malformed(what) => write!(f, "it sent {what}"),
            ConnectionError::Refused(refusal) => write!(f, "{refusal}"),
            ConnectionError::Io(error) => write!(f, "{error}"),
        }
    }
}

impl From<io::Error> for ConnectionError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe => ConnectionError::Closed,
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ConnectionError::TimedOut,
            _ => ConnectionError::Io(error),
        }
    }
}

/// Reason of rank 0 for refusing a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Refusal {
    /// The two ends use different versions.
    Version { rank_0: u32, other: u32 },
    /// The process belongs to another run.
    Run,
    /// The process has no secret, but rank 0 has one.
    NoSecret,
    /// The process has a secret, but rank 0 has none.
    NoSecretAtRank0,
    /// The secrets differ.
    Secret,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refusal::Version { rank_0, other } => write!(
                f,
                "rank 0 uses version {rank_0} of the rendezvous protocol, the joining process version {other}"
            ),
            Refusal::Run => write!(f, "the joining process belongs to another run"),
            Refusal::NoSecret => write!(f, "rank 0 was started with a secret, the joining process without"),
            Refusal::NoSecretAtRank0 => {
                write!(f, "rank 0 was started without a secret, the joining process with one")
            }
            Refusal::Secret => write!(f, "the secret of the joining process differs from that of rank 0"),
        }
    }
}
