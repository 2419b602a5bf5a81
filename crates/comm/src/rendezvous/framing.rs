//! Frames on a TCP connection and the encrypted messages inside them.
//!
//! A frame is a length (u16, big endian) and that many bytes, as section 13 of the Noise
//! specification proposes, so no frame exceeds the size of a Noise message. A reader sets the
//! largest frame that it accepts, and memory grows only with received bytes. After the handshake,
//! each frame is one Noise message that holds one [`Message`] as JSON. Its sequence number is the
//! nonce, so that a frame that was changed, dropped or sent again does not authenticate.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use snow::{HandshakeState, StatelessTransportState};
use socket2::{SockRef, TcpKeepalive};

use super::connection_error::ConnectionError;
use super::message::Message;

/// Size of the largest frame in bytes: that of the largest Noise message.
pub(super) const MAX_FRAME: usize = 65_535;

/// Bytes that authenticate a Noise message.
const TAG_BYTES: usize = 16;

/// Maximum time of one write before the peer counts as lost.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// The reading half of a connection; its deadline also bounds a sequence of slow bytes.
pub(super) struct DeadlineReader<'a> {
    pub(super) stream: &'a TcpStream,
    pub(super) until: Option<Instant>,
}

impl Read for DeadlineReader<'_> {
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

/// Keep-alive probes of an idle connection: time before the first, interval, and number; 14 s in
/// all.
const KEEP_ALIVE: (Duration, Duration, u32) = (Duration::from_secs(5), Duration::from_secs(3), 3);

/// Prepares a connection: small frames are sent at once, and a peer that reads nothing, or whose
/// host has disappeared, is detected, also while no data is sent, such as while processes join.
pub(super) fn prepare(stream: &TcpStream) -> io::Result<()> {
    let (time, interval, retries) = KEEP_ALIVE;
    let keep_alive = TcpKeepalive::new().with_time(time).with_interval(interval).with_retries(retries);
    SockRef::from(stream).set_tcp_keepalive(&keep_alive)?;
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))
}

/// Reads the bytes of one frame of up to `max` bytes.
pub(super) fn read_frame(stream: &mut impl Read, max: usize) -> Result<Vec<u8>, ConnectionError> {
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let length = usize::from(u16::from_be_bytes(length));
    if length > max {
        return Err(ConnectionError::Malformed("a frame that is too long"));
    }
    let mut body = Vec::new();
    let read = stream.take(length as u64).read_to_end(&mut body)?;
    if read == length { Ok(body) } else { Err(ConnectionError::Closed) }
}

/// Writes `body`, of at most [`MAX_FRAME`] bytes, as one frame.
pub(super) fn write_frame(mut stream: &TcpStream, body: &[u8]) -> io::Result<()> {
    let length = u16::try_from(body.len())
        .map_err(|_| io::Error::other(format!("{} bytes do not fit a frame", body.len())))?;
    stream.write_all(&[length.to_be_bytes().as_slice(), body].concat())
}

/// A connection with two authenticated ends.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) sender: Sender,
    pub(super) receiver: Receiver,
}

impl Connection {
    /// Creates the connection over `stream` with the keys of the finished `handshake`.
    pub(super) fn new(stream: TcpStream, handshake: HandshakeState) -> Result<Self, ConnectionError> {
        let noise = handshake.into_stateless_transport_mode().map_err(noise_error)?;
        let noise = Arc::new(noise);
        let sender = Sender { stream: stream.try_clone()?, noise: noise.clone(), nonce: 0 };
        Ok(Connection { sender, receiver: Receiver { stream, noise, nonce: 0 } })
    }
}

/// Converts an error of `snow` that no peer can cause.
pub(super) fn noise_error(error: snow::Error) -> ConnectionError {
    ConnectionError::Io(io::Error::other(error.to_string()))
}

/// The sending half.
#[derive(Debug)]
pub(super) struct Sender {
    stream: TcpStream,
    noise: Arc<StatelessTransportState>,
    nonce: u64,
}

impl Sender {
    /// Sends `message`; after an error the connection is closed.
    pub(super) fn send(&mut self, message: &Message) -> Result<(), ConnectionError> {
        let sent = self.seal(message).and_then(|frame| Ok(write_frame(&self.stream, &frame)?));
        sent.inspect_err(|_| self.close())
    }

    fn seal(&mut self, message: &Message) -> Result<Vec<u8>, ConnectionError> {
        let json = serde_json::to_vec(message).map_err(|error| io::Error::other(error.to_string()))?;
        let mut frame = vec![0; json.len() + TAG_BYTES];
        if frame.len() > MAX_FRAME {
            let text = format!("a message of {} bytes is too long to be sent", json.len());
            return Err(ConnectionError::Io(io::Error::other(text)));
        }
        self.noise.write_message(self.nonce, &json, &mut frame).map_err(noise_error)?;
        self.nonce += 1;
        Ok(frame)
    }

    /// Ends the connection in both directions, which also wakes its receiver.
    pub(super) fn close(&self) {
        // It may be closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// The receiving half.
#[derive(Debug)]
pub(super) struct Receiver {
    stream: TcpStream,
    noise: Arc<StatelessTransportState>,
    nonce: u64,
}

impl Receiver {
    /// Waits for the next message until `until`, or forever.
    pub(super) fn receive(&mut self, until: Option<Instant>) -> Result<Message, ConnectionError> {
        let frame = read_frame(&mut DeadlineReader { stream: &self.stream, until }, MAX_FRAME)?;
        let mut json = vec![0; frame.len()];
        let length = self.noise.read_message(self.nonce, &frame, &mut json);
        let length =
            length.map_err(|_| ConnectionError::Malformed("a message that does not authenticate"))?;
        self.nonce += 1;
        Message::parse(&json[..length])
    }

    /// Returns true if the other end has closed the connection.
    pub(super) fn is_closed(&self) -> bool {
        let mut byte = [0];
        let peeked = self.stream.set_nonblocking(true).and_then(|()| self.stream.peek(&mut byte));
        let blocking = self.stream.set_nonblocking(false);
        let alive = match peeked {
            Ok(read) => read > 0,
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        };
        !alive || blocking.is_err()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_looks_after_a_connection_that_is_silent() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(!SockRef::from(&stream).keepalive().unwrap());
        prepare(&stream).unwrap();
        let (time, interval, retries) = KEEP_ALIVE;
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), time);
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), interval);
        assert_eq!(socket.tcp_keepalive_retries().unwrap(), retries);
        assert!(time + interval * retries <= Duration::from_secs(15));
    }
}
