//! The messages of a sealed link: a closed list, each with its fixed fields.

use std::collections::BTreeMap;

use super::wire::{Broken, Composer, Parser, VERSION};
use crate::collective::launch::MAX_WORLD;
use crate::error::{Error, ErrorCategory};

/// Bytes that one process may give to [`super::Control::exchange`] or broadcast.
pub const MAX_SHARE: usize = 64 << 10;

const MAX_HOST: usize = 255;
const MAX_DIGESTS: usize = 16;
const MAX_NAME: usize = 64;
const MAX_DIGEST: usize = 128;
const MAX_TEXT: usize = 4 << 10;
const MAX_CAUSES: usize = 64;

/// What a process says of itself when it comes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) peer: Peer,
    pub(super) world_size: usize,
    /// Name (plan, binary, data, model) to hex digest.
    pub(super) digests: BTreeMap<String, String>,
}

/// A process of the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Its first rank.
    pub rank: usize,
    /// How many ranks it holds.
    pub ranks_here: usize,
    /// The name of its host.
    pub host: String,
}

/// A call that all processes make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Round {
    Exchange,
    Broadcast,
    Barrier,
}

impl Round {
    pub(super) fn name(self) -> &'static str {
        match self {
            Round::Exchange => "exchange",
            Round::Broadcast => "broadcast",
            Round::Barrier => "barrier",
        }
    }
}

/// One process's part in a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) number: u64,
    pub(super) round: Round,
    pub(super) what: String,
    pub(super) bytes: Vec<u8>,
}

/// Why a meeting came to nothing, as every process reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
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

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
    /// To rank 0, first of all.
    Hello(Hello),
    /// The meeting is complete: so many [`Message::Peer`]s follow.
    Accepted { processes: usize },
    /// One process, in ascending order of ranks.
    Peer(Peer),
    /// The meeting came to nothing.
    Rejected(Rejection),
    /// To rank 0.
    Share(Share),
    /// From rank 0: the share of process `index`.
    Part { number: u64, index: usize, bytes: Vec<u8> },
    /// `rank` has failed; rank 0 passes it on.
    Failed { rank: usize, why: String },
    /// Nothing more will come, and this is no failure.
    Bye,
}

impl Message {
    pub(super) fn compose(&self) -> Vec<u8> {
        match self {
            Message::Hello(hello) => {
                let composer = peer(Composer::new(16), &hello.peer).number(hello.world_size as u64);
                let composer = composer.number(hello.digests.len() as u64);
                let digest = |composer: Composer, (name, digest): (&String, &String)| {
                    composer.text(name, MAX_NAME).text(digest, MAX_DIGEST)
                };
                hello.digests.iter().fold(composer, digest)
            }
            Message::Accepted { processes } => Composer::new(17).number(*processes as u64),
            Message::Peer(of) => peer(Composer::new(18), of),
            Message::Rejected(r) => {
                let causes = &r.causes[..r.causes.len().min(MAX_CAUSES)];
                let composer = Composer::new(19).byte(u8::from(r.users_fault)).text(&r.what, MAX_TEXT);
                composer.texts(causes, MAX_TEXT).text(&r.hint, MAX_TEXT)
            }
            Message::Share(share) => Composer::new(20)
                .number(share.number)
                .byte(share.round as u8)
                .text(&share.what, MAX_NAME)
                .bytes(&share.bytes),
            Message::Part { number, index, bytes } => {
                Composer::new(21).number(*number).number(*index as u64).bytes(bytes)
            }
            Message::Failed { rank, why } => Composer::new(22).number(*rank as u64).text(why, MAX_TEXT),
            Message::Bye => Composer::new(23),
        }
        .finish()
    }

    pub(super) fn parse(body: &[u8]) -> Result<Message, Broken> {
        let mut parser = Parser::new(body);
        if parser.byte()? != VERSION {
            return Err(Broken::Malformed("a message of another version"));
        }
        let kind = parser.byte()?;
        let p = &mut parser;
        let message = match kind {
            16 => Message::Hello(Hello {
                peer: parse_peer(p)?,
                world_size: p.count(MAX_WORLD)?,
                digests: parse_digests(p)?,
            }),
            17 => Message::Accepted { processes: p.count(MAX_WORLD)? },
            18 => Message::Peer(parse_peer(p)?),
            19 => Message::Rejected(Rejection {
                users_fault: parse_bool(p)?,
                what: p.text(MAX_TEXT)?,
                causes: p.texts(MAX_CAUSES, MAX_TEXT)?,
                hint: p.text(MAX_TEXT)?,
            }),
            20 => Message::Share(Share {
                number: p.number(u64::MAX)?,
                round: parse_round(p)?,
                what: p.text(MAX_NAME)?,
                bytes: p.bytes(MAX_SHARE)?.to_vec(),
            }),
            21 => Message::Part {
                number: p.number(u64::MAX)?,
                index: p.count(MAX_WORLD)?,
                bytes: p.bytes(MAX_SHARE)?.to_vec(),
            },
            22 => Message::Failed { rank: p.count(MAX_WORLD)?, why: p.text(MAX_TEXT)? },
            23 => Message::Bye,
            _ => return Err(Broken::Malformed("a message of an unknown kind")),
        };
        parser.end().map(|()| message)
    }
}

fn peer(composer: Composer, peer: &Peer) -> Composer {
    composer.number(peer.rank as u64).number(peer.ranks_here as u64).text(&peer.host, MAX_HOST)
}

fn parse_peer(p: &mut Parser<'_>) -> Result<Peer, Broken> {
    let peer = Peer { rank: p.count(MAX_WORLD)?, ranks_here: p.count(MAX_WORLD)?, host: p.text(MAX_HOST)? };
    match peer.ranks_here {
        0 => Err(Broken::Malformed("a process without ranks")),
        _ => Ok(peer),
    }
}

fn parse_digests(p: &mut Parser<'_>) -> Result<BTreeMap<String, String>, Broken> {
    let count = p.count(MAX_DIGESTS)?;
    let mut digests = BTreeMap::new();
    for _ in 0..count {
        let (name, digest) = (p.text(MAX_NAME)?, p.text(MAX_DIGEST)?);
        if digests.last_key_value().is_some_and(|(last, _)| *last >= name) {
            return Err(Broken::Malformed("digests out of order"));
        }
        digests.insert(name, digest);
    }
    Ok(digests)
}

fn parse_bool(p: &mut Parser<'_>) -> Result<bool, Broken> {
    match p.byte()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Broken::Malformed("a truth value that is none")),
    }
}

fn parse_round(p: &mut Parser<'_>) -> Result<Round, Broken> {
    let rounds = [Round::Exchange, Round::Broadcast, Round::Barrier];
    rounds.get(usize::from(p.byte()?)).copied().ok_or(Broken::Malformed("a call of an unknown kind"))
}

#[cfg(test)]
mod tests {
    use super::super::wire::{MAX_FRAME, framed, read_frame};
    use super::*;

    fn examples() -> Vec<Message> {
        let peer = Peer { rank: 3, ranks_here: 2, host: "node-1".to_owned() };
        let digests = BTreeMap::from([("plan".to_owned(), "12ab".to_owned())]);
        vec![
            Message::Hello(Hello { peer: peer.clone(), world_size: 8, digests }),
            Message::Accepted { processes: 4 },
            Message::Peer(peer),
            Message::Rejected(Rejection {
                users_fault: true,
                what: "no".to_owned(),
                causes: vec!["a".to_owned(), "b".to_owned()],
                hint: "do".to_owned(),
            }),
            Message::Share(Share {
                number: 7,
                round: Round::Barrier,
                what: "end".to_owned(),
                bytes: vec![0, 255],
            }),
            Message::Part { number: 7, index: 1, bytes: vec![1; 300] },
            Message::Failed { rank: 2, why: "disk full".to_owned() },
            Message::Bye,
        ]
    }

    #[test]
    fn messages_come_back_and_every_cut_is_refused() {
        for message in examples() {
            let body = message.compose();
            assert_eq!(Message::parse(&body).unwrap(), message);
            for end in 0..body.len() {
                assert!(Message::parse(&body[..end]).is_err(), "{message:?} cut at {end}");
            }
            let longer = [body.as_slice(), &[0]].concat();
            assert!(Message::parse(&longer).is_err(), "{message:?} with a byte more");
        }
    }

    #[test]
    fn texts_travel_without_control_characters_and_cut() {
        let why = format!("a\nb\u{1b}[31m{}", "\u{e9}".repeat(MAX_TEXT));
        let body = Message::Failed { rank: 0, why }.compose();
        let Message::Failed { why, .. } = Message::parse(&body).unwrap() else { panic!("another kind") };
        assert!(why.starts_with("a b [31m\u{e9}") && why.len() <= MAX_TEXT);
        let raw = Composer::new(22).number(0).bytes(b"a\nb").finish();
        assert!(Message::parse(&raw).is_err());
    }

    #[test]
    fn every_message_fits_a_frame() {
        let most = Message::Share(Share {
            number: 0,
            round: Round::Exchange,
            what: "x".repeat(MAX_NAME),
            bytes: vec![0; MAX_SHARE],
        });
        let texts = vec!["x".repeat(MAX_TEXT); 2 * MAX_CAUSES];
        let what = "x".repeat(MAX_TEXT);
        let rejected = Message::Rejected(Rejection {
            users_fault: false,
            what: what.clone(),
            causes: texts,
            hint: what,
        });
        for message in [most, rejected] {
            assert!(message.compose().len() + 32 <= MAX_FRAME);
            assert!(Message::parse(&message.compose()).is_ok());
        }
    }

    /// R31's frames, fewer: random bodies and changed bytes of good ones.
    #[test]
    fn a_million_random_frames_do_no_harm() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        let good: Vec<Vec<u8>> = examples().iter().map(Message::compose).collect();
        let mut parsed = 0;
        for _ in 0..1_000_000 {
            let mut body = good[random() % good.len()].clone();
            for _ in 0..1 + random() % 4 {
                let at = random() % body.len();
                body[at] = random() as u8;
            }
            body.truncate(1 + random() % (2 * body.len()));
            parsed += usize::from(Message::parse(&body).is_ok());
        }
        assert!((1..1_000_000).contains(&parsed), "{parsed} were messages");
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(4096))]
        #[test]
        fn no_bytes_panic(body in proptest::collection::vec(proptest::num::u8::ANY, 0..200), kind in 14_u8..26) {
            let _ = Message::parse(&body);
            let known = [&[VERSION, kind], body.as_slice()].concat();
            if let Ok(message) = Message::parse(&known) {
                proptest::prop_assert_eq!(message.compose(), known);
            }
            let _ = read_frame(&mut body.as_slice(), MAX_FRAME);
        }

        #[test]
        fn no_changed_byte_panics(which in 0_usize..8, at in 0_usize..400, value in proptest::num::u8::ANY) {
            let mut body = examples()[which].compose();
            let at = at % body.len();
            body[at] = value;
            if let Ok(message) = Message::parse(&body) {
                proptest::prop_assert_eq!(message.compose(), body.clone());
            }
            let frame = framed(&body);
            proptest::prop_assert_eq!(read_frame(&mut frame.as_slice(), MAX_FRAME).unwrap(), body);
        }
    }
}
