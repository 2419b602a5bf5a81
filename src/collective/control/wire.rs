//! Bytes of the control channel: frames, and the parsing and composing of their fields.
//!
//! A frame is a length (u32, big endian) and so many bytes: version, kind, fields, and on a sealed link a tag. Lengths
//! are capped before anything is allocated, memory grows only with bytes that have arrived, a text is UTF-8 without
//! control characters, and a field or byte too many is as malformed as one too few.

use std::io::{self, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Version of the protocol, the first byte of every frame.
pub(super) const VERSION: u8 = 1;

/// Bytes of a frame between ranks that know each other.
pub(super) const MAX_FRAME: usize = 1 << 20;

/// Bytes of a frame before that.
pub(super) const MAX_GREETING: usize = 256;

/// How long one write to a peer may take before the peer counts as lost.
const WRITE_PATIENCE: Duration = Duration::from_secs(5);

/// Why nothing more comes from a connection.
#[derive(Debug)]
pub(super) enum Broken {
    /// The other end closed it, or is gone.
    Closed,
    /// The deadline passed.
    Late,
    /// The bytes are not a frame of this protocol, or its tag is wrong.
    Malformed(&'static str),
    /// The system's error.
    Io(io::Error),
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Broken::Closed => write!(f, "the connection was closed"),
            Broken::Late => write!(f, "nothing came in time"),
            Broken::Malformed(what) => write!(f, "it sent {what}"),
            Broken::Io(error) => write!(f, "{error}"),
        }
    }
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe => Broken::Closed,
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Broken::Late,
            _ => Broken::Io(error),
        }
    }
}

/// The reading half of a connection; with a deadline no sequence of slow bytes outlasts it.
pub(super) struct Timed<'a> {
    pub(super) stream: &'a TcpStream,
    pub(super) until: Option<Instant>,
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(left)?;
        let mut stream = self.stream;
        stream.read(buffer)
    }
}

/// Prepares a connection: small frames leave at once, and a peer that takes none in is noticed.
pub(super) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(WRITE_PATIENCE))
}

/// Reads the bytes of one frame of up to `most` bytes.
pub(super) fn read_frame(stream: &mut impl Read, most: usize) -> Result<Vec<u8>, Broken> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length) as usize;
    if length > most {
        return Err(Broken::Malformed("a frame that is too long"));
    }
    let mut body = Vec::new();
    match stream.take(length as u64).read_to_end(&mut body)? {
        read if read == length => Ok(body),
        _ => Err(Broken::Closed),
    }
}

/// A frame of `body` ready to be written.
pub(super) fn framed(body: &[u8]) -> Vec<u8> {
    let mut frame = (body.len() as u32).to_be_bytes().to_vec();
    frame.extend(body);
    frame
}

/// Puts fields together.
pub(super) struct Composer(Vec<u8>);

impl Composer {
    /// Begins a body of `kind`.
    pub(super) fn new(kind: u8) -> Self {
        Composer(vec![VERSION, kind])
    }

    pub(super) fn byte(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }

    pub(super) fn number(mut self, value: u64) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    /// Bytes whose number the reader knows.
    pub(super) fn fixed(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    pub(super) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend((bytes.len() as u32).to_be_bytes());
        self.fixed(bytes)
    }

    /// A text, cut to `most` bytes, with spaces for control characters.
    pub(super) fn text(self, text: &str, most: usize) -> Self {
        self.bytes(plain(text, most).as_bytes())
    }

    pub(super) fn texts(self, texts: &[String], most: usize) -> Self {
        let counted = self.number(texts.len() as u64);
        texts.iter().fold(counted, |composer, text| composer.text(text, most))
    }

    pub(super) fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// `text` as it may travel: at most `most` bytes, without control characters.
pub(super) fn plain(text: &str, most: usize) -> String {
    let mut plain = String::new();
    for c in text.chars().map(|c| if c.is_control() { ' ' } else { c }) {
        if plain.len() + c.len_utf8() > most {
            break;
        }
        plain.push(c);
    }
    plain
}

/// Takes fields apart.
pub(super) struct Parser<'a>(&'a [u8]);

impl<'a> Parser<'a> {
    pub(super) fn new(body: &'a [u8]) -> Self {
        Parser(body)
    }

    pub(super) fn fixed(&mut self, length: usize) -> Result<&'a [u8], Broken> {
        let (taken, rest) =
            self.0.split_at_checked(length).ok_or(Broken::Malformed("a message cut short"))?;
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Broken> {
        let mut array = [0; N];
        array.copy_from_slice(self.fixed(N)?);
        Ok(array)
    }

    pub(super) fn byte(&mut self) -> Result<u8, Broken> {
        self.array().map(|[byte]: [u8; 1]| byte)
    }

    /// A number of at most `most`.
    pub(super) fn number(&mut self, most: u64) -> Result<u64, Broken> {
        match u64::from_be_bytes(self.array()?) {
            number if number <= most => Ok(number),
            _ => Err(Broken::Malformed("a number that is too large")),
        }
    }

    pub(super) fn count(&mut self, most: usize) -> Result<usize, Broken> {
        self.number(most as u64).map(|number| number as usize)
    }

    pub(super) fn bytes(&mut self, most: usize) -> Result<&'a [u8], Broken> {
        match u32::from_be_bytes(self.array()?) as usize {
            length if length <= most => self.fixed(length),
            _ => Err(Broken::Malformed("a field that is too long")),
        }
    }

    pub(super) fn text(&mut self, most: usize) -> Result<String, Broken> {
        let text = std::str::from_utf8(self.bytes(most)?)
            .map_err(|_| Broken::Malformed("a text that is not UTF-8"))?;
        if text.contains(char::is_control) {
            Err(Broken::Malformed("a text with control characters"))
        } else {
            Ok(text.to_owned())
        }
    }

    pub(super) fn texts(&mut self, count: usize, most: usize) -> Result<Vec<String>, Broken> {
        (0..self.count(count)?).map(|_| self.text(most)).collect()
    }

    /// Refuses bytes behind the last field.
    pub(super) fn end(&self) -> Result<(), Broken> {
        if self.0.is_empty() { Ok(()) } else { Err(Broken::Malformed("bytes behind a message")) }
    }
}
