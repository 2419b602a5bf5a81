//! Messages from every rank to every other, one pair at a time, and which of them are slow.

use std::time::Instant;

use candle_core::Device;
use serde::Serialize;

use super::rank_buffer::RankBuffer;
use super::rank_place::RankPlace;
use crate::collective::{Call, Collective};
use crate::error::Result;

/// Bytes of a message: on GPUs as many as fill NVLink.
const CPU_BYTES: usize = 4 << 20;
const GPU_BYTES: usize = 64 << 20;

/// Messages of a pair that are measured, after one that is not; the fastest counts.
const MESSAGES: usize = 5;

/// A pair is slow that carries less than this part of the median of the pairs of its kind.
const SLOW: f64 = 0.5;

/// What one rank sends another.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct PairSpeed {
    pub(super) from: usize,
    pub(super) to: usize,
    /// 10^9 bytes a second in messages of some megabytes.
    pub(super) gbps: f64,
    /// Half the time of the shortest message and its answer.
    pub(super) latency_us: f64,
    /// The kind of way.
    kind: &'static str,
    /// What the way is by what the hosts say, and what that should carry in 10^9 bytes a second; none: not known.
    expected: Option<String>,
    expected_gbps: Option<f64>,
    /// Of the pairs of the same kind, in 10^9 bytes a second.
    median_gbps: f64,
    slow: bool,
}

/// Seconds of a large message and of the shortest, by sending and receiving rank: `[from * ranks + to]`.
pub(super) struct PairTimes {
    ranks: usize,
    bytes: usize,
    large: Vec<f64>,
    short: Vec<f64>,
}

impl PairTimes {
    /// Measures all pairs, one at a time; all ranks call it and get the same.
    pub(super) fn measure(world: &dyn Collective, device: &Device) -> Result<Self> {
        let ranks = world.size();
        let bytes = if device.is_cpu() { CPU_BYTES } else { GPU_BYTES };
        let message = RankBuffer::zeros(bytes / size_of::<f32>(), device)?;
        let short = RankBuffer::zeros(1, device)?;
        let mut secs = vec![0.0; 2 * ranks * ranks];
        for from in 0..ranks {
            for to in (0..ranks).filter(|to| *to != from) {
                if world.rank() == from {
                    secs[from * ranks + to] = send(world, to, &message, &short, device)?;
                    secs[(ranks + from) * ranks + to] = send(world, to, &short, &short, device)? / 2.0;
                }
                if world.rank() == to {
                    answer(world, from, &message, &short)?;
                    answer(world, from, &short, &short)?;
                }
            }
            // Else the next rank would begin while the last pairs of this one are at it.
            world.barrier(Call::single("messages of a rank"))?;
        }
        // Each time is of one rank; the others have zeroes there.
        let all = RankBuffer::numbers(secs)?;
        world.all_reduce(Call::single("times of messages"), all.memory())?;
        let mut large = all.values::<f64>()?;
        let short = large.split_off(ranks * ranks);
        Ok(PairTimes { ranks, bytes, large, short })
    }

    /// The pairs with what is to be thought of them, slowest first; `copy` is what a copy in memory does, in 10^9 bytes a
    /// second.
    pub(super) fn judged(&self, places: &[RankPlace], copy: f64) -> Vec<PairSpeed> {
        let pairs = (0..self.ranks).flat_map(|from| (0..self.ranks).map(move |to| (from, to)));
        let mut speeds: Vec<PairSpeed> = pairs
            .filter(|(from, to)| from != to)
            .map(|(from, to)| {
                let way = places[from].way_to(&places[to], copy);
                let at = from * self.ranks + to;
                PairSpeed {
                    from,
                    to,
                    gbps: self.bytes as f64 / 1e9 / self.large[at].max(1e-9),
                    latency_us: 1e6 * self.short[at],
                    kind: way.kind,
                    expected_gbps: way.link.as_ref().map(|link| link.gbytes_per_sec),
                    expected: way.link.map(|link| link.name),
                    median_gbps: 0.0,
                    slow: false,
                }
            })
            .collect();
        speeds.sort_by(|one, other| one.gbps.total_cmp(&other.gbps));
        for at in 0..speeds.len() {
            let kind = speeds[at].kind;
            let alike: Vec<f64> =
                speeds.iter().filter(|pair| pair.kind == kind).map(|pair| pair.gbps).collect();
            let median = alike[alike.len() / 2];
            speeds[at].median_gbps = median;
            speeds[at].slow = speeds[at].gbps < SLOW * median;
        }
        speeds
    }
}

/// Sends `message` to rank `to` and waits for its answer; the seconds of the fastest time.
fn send(
    world: &dyn Collective,
    to: usize,
    message: &RankBuffer,
    answer: &RankBuffer,
    device: &Device,
) -> Result<f64> {
    let call = Call::single("message of a measurement");
    let mut fastest = f64::INFINITY;
    for number in 0..=MESSAGES {
        let started = Instant::now();
        world.send(call, to, message.memory())?;
        world.recv(call, to, answer.memory())?;
        device.synchronize()?;
        if number > 0 {
            fastest = fastest.min(started.elapsed().as_secs_f64());
        }
    }
    Ok(fastest)
}

/// The other side of [`send`].
fn answer(world: &dyn Collective, from: usize, message: &RankBuffer, answer: &RankBuffer) -> Result<()> {
    let call = Call::single("message of a measurement");
    for _ in 0..=MESSAGES {
        world.recv(call, from, message.memory())?;
        world.send(call, from, answer.memory())?;
    }
    Ok(())
}

impl PairSpeed {
    /// What people are told of a slow pair.
    pub(super) fn warning(&self, places: &[RankPlace]) -> Option<String> {
        let PairSpeed { from, to, gbps, median_gbps, kind, .. } = self;
        let host = |rank: usize| places.get(rank).map_or("", |place| place.host.as_str());
        let share = 100.0 * gbps / median_gbps;
        self.slow.then(|| {
            format!(
                "SLOW: rank {from} ({}) to rank {to} ({}) carries {gbps:.3} GB/s, {share:.0} % of the median of {kind} \
                 ({median_gbps:.3} GB/s)",
                host(*from),
                host(*to)
            )
        })
    }

    /// What the pairs of this one's kind carry, beside what they should, for people.
    pub(super) fn kind_text(&self) -> String {
        let median = self.median_gbps;
        let beside = match (&self.expected, self.expected_gbps) {
            (Some(name), Some(expected)) => {
                format!("{:.0} % of {name} ({expected:.3} GB/s)", 100.0 * median / expected)
            }
            _ => "what the link should carry is not known: its driver tells no speed".to_owned(),
        };
        format!("{}: the median pair carries {median:.3} GB/s, {beside}", self.kind)
    }

    /// Which pairs are compared with each other.
    pub(super) fn kind(&self) -> &'static str {
        self.kind
    }
}
