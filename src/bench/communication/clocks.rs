//! Clock differences between the ranks' hosts. Rank 0 requests the time of each rank and assumes
//! that the answer was made in the middle of the round trip, as NTP does. The shortest of several
//! round trips counts.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::rank_buffer::RankBuffer;
use crate::collective::{Call, Collective};
use crate::error::{Error, Result};

/// Largest accepted difference in seconds. Above it logs of hosts cannot be compared, and tokens
/// and certificates begin to fail.
const MOST_SECS: f64 = 1.0;

const ROUND_TRIPS: usize = 8;

/// Clock of a rank relative to that of rank 0.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ClockSkew {
    pub(crate) rank: usize,
    /// Seconds that the clock is ahead of rank 0.
    pub(crate) ahead_secs: f64,
    /// Seconds of the round trip; the error of the difference is at most half of it.
    pub(crate) round_trip_secs: f64,
}

impl ClockSkew {
    /// Returns a warning if the difference is too large; `host` is the rank's host.
    pub(crate) fn warning(&self, host: &str) -> Option<String> {
        let ClockSkew { rank, ahead_secs, .. } = self;
        let far = ahead_secs.abs();
        let word = if *ahead_secs > 0.0 { "ahead of" } else { "behind" };
        (far > MOST_SECS).then(|| {
            format!(
                "CLOCK: the clock of rank {rank} ({host}) is {far:.1} s {word} that of rank 0; run NTP or chrony on all hosts"
            )
        })
    }
}

/// Measures the clock of every rank. `clock` reads the time since 1970. Returns one result for each
/// other rank on rank 0, and none on others.
pub(crate) fn measure(world: &dyn Collective, clock: &dyn Fn() -> Duration) -> Result<Vec<ClockSkew>> {
    let call = Call::single("times of clocks");
    let nanos = || u64::try_from(clock().as_nanos()).unwrap_or(u64::MAX).to_le_bytes().to_vec();
    let mut skews = Vec::new();
    for rank in 1..world.size() {
        if world.rank() == rank {
            for _ in 0..ROUND_TRIPS {
                world.recv(call, 0, RankBuffer::numbers(vec![0_u8; 8])?.memory())?;
                world.send(call, 0, RankBuffer::numbers(nanos())?.memory())?;
            }
        }
        if world.rank() == 0 {
            skews.push(ask(world, rank, clock)?);
        }
    }
    Ok(skews)
}

/// Measures the clock of `rank` on rank 0.
fn ask(world: &dyn Collective, rank: usize, clock: &dyn Fn() -> Duration) -> Result<ClockSkew> {
    let call = Call::single("times of clocks");
    let mut best: Option<ClockSkew> = None;
    for _ in 0..ROUND_TRIPS {
        let (question, answer) = (RankBuffer::numbers(vec![0_u8; 8])?, RankBuffer::numbers(vec![0_u8; 8])?);
        let (asked, started) = (clock(), Instant::now());
        world.send(call, rank, question.memory())?;
        world.recv(call, rank, answer.memory())?;
        let trip = started.elapsed();
        let bytes = <[u8; 8]>::try_from(answer.values::<u8>()?)
            .map_err(|_| Error::internal("a time came in another length"))?;
        let theirs = i128::from(u64::from_le_bytes(bytes));
        let own = i128::try_from((asked + trip / 2).as_nanos()).unwrap_or(i128::MAX);
        let skew = ClockSkew {
            rank,
            ahead_secs: theirs.saturating_sub(own) as f64 / 1e9,
            round_trip_secs: trip.as_secs_f64(),
        };
        if best.as_ref().is_none_or(|best| skew.round_trip_secs < best.round_trip_secs) {
            best = Some(skew);
        }
    }
    best.ok_or_else(|| Error::internal("no clock was asked"))
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use super::*;
    use crate::launcher::ranks::run_on_cpu;

    /// One clock is an hour ahead, one an hour behind.
    #[test]
    fn clocks_that_differ_are_found() {
        let skews = run_on_cpu(4, 1, |world| {
            let rank = world.rank();
            let clock = || {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
                match rank {
                    1 => now + Duration::from_secs(3600),
                    2 => now - Duration::from_secs(3600),
                    _ => now,
                }
            };
            measure(&*world, &clock)
        })
        .unwrap();
        assert!(skews[1..].iter().all(Vec::is_empty));
        let minutes: Vec<f64> = skews[0].iter().map(|skew| (skew.ahead_secs / 60.0).round()).collect();
        assert_eq!(minutes, [60.0, -60.0, 0.0]);
        let warnings: Vec<Option<String>> = skews[0].iter().map(|skew| skew.warning("node-7")).collect();
        let text = warnings[0].as_ref().unwrap();
        assert!(text.contains("rank 1 (node-7) is 3600.0 s ahead of that of rank 0; run NTP"), "{text}");
        assert!(
            warnings[1].as_ref().is_some_and(|text| text.contains("3600.0 s behind that")),
            "{warnings:?}"
        );
        assert_eq!(warnings[2], None);
    }
}
