//! The minimum speed of a download. A hub that sends a byte now and then never stalls, and never
//! ends.

use std::fmt;
use std::io::{self, Read};
use std::time::{Duration, Instant};

use super::options::LeastSpeed;

/// Bytes that arrived, and the time spent waiting for them, since the last check of the speed.
pub(super) struct SpeedWatch {
    least: LeastSpeed,
    bytes: u64,
    waited: Duration,
}

/// The error of a body that arrives more slowly than the minimum speed.
#[derive(Debug)]
pub(super) struct TooSlow {
    bytes: u64,
    waited: Duration,
    least: LeastSpeed,
}

impl fmt::Display for TooSlow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TooSlow { bytes, waited, least } = self;
        let secs = waited.as_secs_f64();
        write!(
            f,
            "the hub sent {bytes} bytes in {secs:.1} s ({:.1} bytes/s); the minimum is {} bytes/s over {} s",
            *bytes as f64 / secs,
            least.bytes_per_sec,
            least.over.as_secs_f64()
        )
    }
}

impl std::error::Error for TooSlow {}

impl SpeedWatch {
    pub(super) fn new(least: LeastSpeed) -> Self {
        SpeedWatch { least, bytes: 0, waited: Duration::ZERO }
    }

    /// Returns `body` with its speed watched. The watch keeps its state, so that many short bodies
    /// are judged as one.
    pub(super) fn over<R: Read>(&mut self, body: R) -> WatchedBody<'_, R> {
        WatchedBody { body, watch: self, slow: None }
    }

    /// Counts bytes that took `waited` to arrive; returns the error once they prove too slow.
    fn count(&mut self, bytes: u64, waited: Duration) -> Option<TooSlow> {
        self.bytes += bytes;
        self.waited += waited;
        if self.waited < self.least.over {
            return None;
        }
        let SpeedWatch { least, bytes, waited } = std::mem::replace(self, Self::new(self.least));
        let needed = least.bytes_per_sec as f64 * waited.as_secs_f64();
        ((bytes as f64) < needed).then_some(TooSlow { bytes, waited, least })
    }
}

/// A body whose `read` fails with [`TooSlow`] if it is too slow.
pub(super) struct WatchedBody<'w, R> {
    body: R,
    watch: &'w mut SpeedWatch,
    /// The error for the next read: the bytes of this one go to the caller first.
    slow: Option<TooSlow>,
}

impl<R: Read> Read for WatchedBody<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Some(slow) = self.slow.take() {
            return Err(io::Error::other(slow));
        }
        let begun = Instant::now();
        let count = self.body.read(buffer)?;
        self.slow = self.watch.count(count as u64, begun.elapsed());
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn watch() -> SpeedWatch {
        SpeedWatch::new(LeastSpeed { bytes_per_sec: 1024, over: 60 * SECOND })
    }

    #[test]
    fn the_mean_over_a_minute_counts() {
        let mut fast = watch();
        assert!((0..600).all(|_| fast.count(1024, SECOND).is_none()));
        // A pause of 50 s and a piece that makes up for it.
        let mut uneven = watch();
        assert!(
            (0..20).all(|_| uneven.count(0, 50 * SECOND).or(uneven.count(70_000, 10 * SECOND)).is_none())
        );
        let mut slow = watch();
        let warnings: Vec<TooSlow> = (0..120).filter_map(|_| slow.count(1, 2 * SECOND)).collect();
        assert_eq!(warnings.len(), 4, "once a minute of 240 s");
        assert_eq!(
            warnings[0].to_string(),
            "the hub sent 30 bytes in 60.0 s (0.5 bytes/s); the minimum is 1024 bytes/s over 60 s"
        );
    }

    #[test]
    fn what_was_read_comes_before_the_verdict() {
        let mut watch = SpeedWatch::new(LeastSpeed { bytes_per_sec: u64::MAX, over: Duration::ZERO });
        let mut body = watch.over(&b"abc"[..]);
        let mut buffer = [0; 8];
        assert_eq!(body.read(&mut buffer).unwrap(), 3);
        assert!(body.read(&mut buffer).unwrap_err().get_ref().unwrap().is::<TooSlow>());
    }
}
