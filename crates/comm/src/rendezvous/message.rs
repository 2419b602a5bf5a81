//! Messages between authenticated processes: JSON by serde, validated and made printable on
//! arrival.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::connection_error::ConnectionError;
use crate::error::{Error, ErrorCategory};

/// Maximum number of ranks of a run.
pub(crate) const MAX_WORLD: usize = 65_536;

/// Maximum bytes of [`super::Session::broadcast`].
pub const MAX_PAYLOAD: usize = 8 << 10;

/// Maximum bytes of a text in a message.
pub(super) const MAX_TEXT: usize = 4 << 10;

/// Request of a joining process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JoinRequest {
    /// Its ranks and its host.
    pub peer: Peer,
    /// Ranks in all processes, by its own settings.
    pub world_size: usize,
    /// Hex digests of its run, by name (`binary`, `plan`, `data`, `model`). They must be equal in
    /// all processes.
    pub digests: BTreeMap<String, String>,
}

/// A process of the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    /// First rank of the process.
    pub rank: usize,
    /// Number of ranks that it holds.
    pub ranks_here: usize,
    /// Name of its host.
    pub host: String,
    /// Free bytes of its device with the least, for a plan that all processes share; none if they
    /// are unknown or not needed.
    pub free_bytes: Option<u64>,
}

impl Peer {
    fn is_valid(&self) -> bool {
        self.rank <= MAX_WORLD && (1..=MAX_WORLD).contains(&self.ranks_here)
    }
}

/// Reason of a failed rendezvous, which every process reports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Rejection {
    pub(super) users_fault: bool,
    pub(super) what: String,
    pub(super) causes: Vec<String>,
    pub(super) hint: String,
}

impl From<Rejection> for Error {
    fn from(rejection: Rejection) -> Self {
        let kind = if rejection.users_fault { ErrorCategory::User } else { ErrorCategory::Transient };
        let error = Error::new(kind, rejection.what);
        rejection.causes.into_iter().fold(error, Error::because).hint(rejection.hint)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Message {
    /// The first message to rank 0.
    Join(JoinRequest),
    /// All have joined; `processes` messages [`Message::Peer`] follow.
    Accepted { processes: usize },
    /// One process, in ascending order of ranks.
    Peer(Peer),
    /// The rendezvous failed.
    Rejected(Rejection),
    /// Bytes from rank 0 for all.
    Broadcast { name: String, bytes: Vec<u8> },
    /// `rank` has failed; rank 0 forwards it.
    Failed { rank: usize, why: String },
    /// The process is alive; `status` describes its ranks.
    Heartbeat { status: String },
    /// The sender ends its messages without a failure.
    Leave,
}

impl Message {
    /// Parses the message in `json`.
    pub(super) fn parse(json: &[u8]) -> Result<Message, ConnectionError> {
        let malformed = |_| ConnectionError::Malformed("something that is not a message");
        let mut value = serde_json::from_slice(json).map_err(malformed)?;
        make_printable(&mut value);
        let message = serde_json::from_value(value).map_err(malformed)?;
        let valid = match &message {
            Message::Join(request) => request.peer.is_valid() && request.world_size <= MAX_WORLD,
            Message::Peer(peer) => peer.is_valid(),
            _ => true,
        };
        if valid { Ok(message) } else { Err(ConnectionError::Malformed("invalid ranks")) }
    }
}

/// Makes every text in `value` printable; see [`printable`].
fn make_printable(value: &mut Value) {
    match value {
        Value::String(text) => *text = printable(text, MAX_TEXT),
        Value::Array(values) => values.iter_mut().for_each(make_printable),
        Value::Object(fields) => {
            let printed = std::mem::take(fields).into_iter().map(|(name, mut value)| {
                make_printable(&mut value);
                (printable(&name, MAX_TEXT), value)
            });
            *fields = printed.collect();
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Returns `text` in one line of at most `max` bytes, with spaces for control characters.
pub(super) fn printable(text: &str, max: usize) -> String {
    let mut line = String::new();
    for c in text.chars().map(|c| if c.is_control() { ' ' } else { c }) {
        if line.len() + c.len_utf8() > max {
            break;
        }
        line.push(c);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::super::framing::MAX_FRAME;
    use super::*;

    fn peer(rank: usize, ranks_here: usize) -> Peer {
        Peer { rank, ranks_here, host: "node-1".to_owned(), free_bytes: Some(u64::MAX) }
    }

    fn join(peer: Peer, world_size: usize) -> Message {
        let digests = BTreeMap::from([("plan".to_owned(), "12ab".to_owned())]);
        Message::Join(JoinRequest { peer, world_size, digests })
    }

    fn examples() -> Vec<Message> {
        vec![
            join(peer(3, 2), 8),
            Message::Accepted { processes: 4 },
            Message::Peer(peer(0, 1)),
            Message::Rejected(Rejection {
                users_fault: true,
                what: "no".to_owned(),
                causes: vec!["a".to_owned(), "b".to_owned()],
                hint: "do".to_owned(),
            }),
            Message::Broadcast { name: "id".to_owned(), bytes: vec![0, 255] },
            Message::Failed { rank: 2, why: "disk full".to_owned() },
            Message::Heartbeat { status: "rank 2 waits in phase backward".to_owned() },
            Message::Leave,
        ]
    }

    #[test]
    fn messages_come_back_and_every_cut_is_refused() {
        for message in examples() {
            let json = serde_json::to_vec(&message).unwrap();
            assert_eq!(Message::parse(&json).unwrap(), message);
            for end in 0..json.len() {
                assert!(Message::parse(&json[..end]).is_err(), "{message:?} cut at {end}");
            }
            assert!(Message::parse(&[json.as_slice(), b"{}"].concat()).is_err(), "{message:?} and more");
        }
    }

    #[test]
    fn ranks_that_cannot_be_are_refused() {
        let far = usize::MAX;
        for message in [
            join(peer(far, 1), 8),
            join(peer(0, far), 8),
            join(peer(0, 1), far),
            Message::Peer(peer(0, 0)),
            Message::Peer(peer(far, far)),
        ] {
            assert!(Message::parse(&serde_json::to_vec(&message).unwrap()).is_err(), "{message:?}");
        }
    }

    #[test]
    fn texts_come_without_control_characters_and_cut() {
        let why = format!("a\nb\u{1b}[31m{}", "\u{e9}".repeat(MAX_TEXT));
        let json = serde_json::to_vec(&Message::Failed { rank: 0, why }).unwrap();
        let Message::Failed { why, .. } = Message::parse(&json).unwrap() else { panic!("another kind") };
        assert!(why.starts_with("a b [31m\u{e9}") && why.len() <= MAX_TEXT);
        let json = String::from_utf8(serde_json::to_vec(&join(peer(0, 1), 1)).unwrap()).unwrap();
        let json = json.replace("plan", "pl\\u001ban").replace("node-1", "node\\n1");
        let Message::Join(request) = Message::parse(json.as_bytes()).unwrap() else { panic!("another kind") };
        assert_eq!((request.peer.host.as_str(), request.digests["pl an"].as_str()), ("node 1", "12ab"));
    }

    #[test]
    fn the_largest_messages_fit_a_frame() {
        let why = "\"".repeat(MAX_TEXT);
        let broadcast = Message::Broadcast { name: why.clone(), bytes: vec![255; MAX_PAYLOAD] };
        for message in [broadcast, Message::Failed { rank: MAX_WORLD, why }] {
            assert!(serde_json::to_vec(&message).unwrap().len() + 16 <= MAX_FRAME);
        }
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(4096))]
        #[test]
        fn no_changed_byte_panics(which in 0_usize..8, at in 0_usize..400, value in proptest::num::u8::ANY) {
            let mut json = serde_json::to_vec(&examples()[which]).unwrap();
            let at = at % json.len();
            json[at] = value;
            let _ = Message::parse(&json);
        }
    }
}
