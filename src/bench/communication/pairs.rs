//! Messages from every rank to every other, one pair at a time, and the slow pairs among them.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::Device;
use serde::Serialize;

use super::rank_buffer::RankBuffer;
use super::rank_location::{NETWORK, RankLocation};
use crate::collective::{Call, Collective};
use crate::error::Result;
use crate::runtime::clock;
use crate::runtime::device::wait_for;

/// Bytes of a message; on GPUs enough to saturate NVLink.
const CPU_BYTES: usize = 4 << 20;
const GPU_BYTES: usize = 64 << 20;

/// Measured messages of a pair, after one warm-up message; the fastest counts.
const MESSAGES: usize = 5;

/// Largest number of repeats for pairs that seem slow.
const SECOND_LOOKS: usize = 2;

/// A pair is slow if its rate is below this fraction of the median of its kind.
const SLOW: f64 = 0.5;

/// Speed from one rank to another.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct PairSpeed {
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// 10^9 bytes per second in messages of some megabytes.
    pub(crate) gbps: f64,
    /// Half the time of the shortest message and its answer.
    pub(crate) latency_us: f64,
    /// Kind of link.
    kind: &'static str,
    /// Name of the link reported by the hosts, then its expected rate in 10^9 bytes per second;
    /// none: unknown.
    expected: Option<String>,
    expected_gbps: Option<f64>,
    /// Median of the pairs of the same kind, in 10^9 bytes per second.
    median_gbps: f64,
    slow: bool,
}

/// Seconds of a large and of the shortest message, by sending and receiving rank: `[from * ranks +
/// to]`.
pub(crate) struct PairTimes {
    ranks: usize,
    bytes: usize,
    large: Vec<f64>,
    short: Vec<f64>,
}

impl PairTimes {
    /// Measures all pairs, then again those that seem slow, because a busy machine or network may
    /// delay a pair once. All ranks call it and get the same times.
    pub(crate) fn measure(world: &dyn Collective, device: &Device, places: &[RankLocation]) -> Result<Self> {
        let ranks = world.size();
        let all = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
        let all = all.filter(|(from, to)| from != to).collect();
        let mut times = Self::measure_pairs(world, device, &all)?;
        for _ in 0..SECOND_LOOKS {
            let slow = times.slow(places);
            if slow.is_empty() {
                break;
            }
            times.keep_faster(&Self::measure_pairs(world, device, &slow)?);
        }
        Ok(times)
    }

    /// Returns the slow pairs, which are the same on every rank.
    fn slow(&self, places: &[RankLocation]) -> BTreeSet<(usize, usize)> {
        let judged = self.judged(places, 1.0);
        judged.iter().filter(|pair| pair.slow).map(|pair| (pair.from, pair.to)).collect()
    }

    /// Keeps the smaller of the times here and in `again`. Its times of unmeasured pairs are 0.
    fn keep_faster(&mut self, again: &PairTimes) {
        let times = self.large.iter_mut().chain(&mut self.short);
        for (time, again) in times.zip(again.large.iter().chain(&again.short)) {
            if *again > 0.0 {
                *time = time.min(*again);
            }
        }
    }

    /// Measures `pairs` of sender and receiver, one at a time. All ranks call it.
    fn measure_pairs(
        world: &dyn Collective,
        device: &Device,
        pairs: &BTreeSet<(usize, usize)>,
    ) -> Result<Self> {
        let ranks = world.size();
        let bytes = if device.is_cpu() { CPU_BYTES } else { GPU_BYTES };
        let message = RankBuffer::zeros(bytes / size_of::<f32>(), device)?;
        let short = RankBuffer::zeros(1, device)?;
        let mut secs = vec![0.0; 2 * ranks * ranks];
        for from in 0..ranks {
            for to in (0..ranks).filter(|to| pairs.contains(&(from, *to))) {
                if world.rank() == from {
                    secs[from * ranks + to] = send(world, to, &message, &short, device)?;
                    secs[(ranks + from) * ranks + to] = send(world, to, &short, &short, device)? / 2.0;
                }
                if world.rank() == to {
                    answer(world, from, &message, &short)?;
                    answer(world, from, &short, &short)?;
                }
            }
            // Otherwise the next rank would begin during the last pairs of this one.
            world.barrier(Call::single("messages of a rank"))?;
        }
        // Each time comes from one rank; the others have zeroes there.
        let all = RankBuffer::numbers(secs)?;
        world.all_reduce(Call::single("times of messages"), all.memory())?;
        let mut large = all.values::<f64>()?;
        let short = large.split_off(ranks * ranks);
        Ok(PairTimes { ranks, bytes, large, short })
    }

    /// Returns the pairs with their judgement, slowest first. `copy` is the rate of a copy in
    /// memory, in 10^9 bytes per second.
    pub(crate) fn judged(&self, places: &[RankLocation], copy: f64) -> Vec<PairSpeed> {
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
        let mut by_kind: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        speeds.iter().for_each(|pair| by_kind.entry(pair.kind).or_default().push(pair.gbps));
        for pair in &mut speeds {
            let alike = by_kind.get(pair.kind).map_or(&[][..], Vec::as_slice);
            pair.median_gbps = alike.get(alike.len() / 2).copied().unwrap_or(pair.gbps);
            pair.slow = pair.gbps < SLOW * pair.median_gbps;
        }
        speeds
    }
}

/// Sends `message` to rank `to` and waits for its answer; returns the seconds of the fastest round
/// trip.
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
        let started = clock::now();
        world.send(call, to, message.memory())?;
        world.recv(call, to, answer.memory())?;
        wait_for(device)?;
        if number > 0 {
            fastest = fastest.min(clock::since(started).as_secs_f64());
        }
    }
    Ok(fastest)
}

/// Receives and answers the messages of [`send`].
fn answer(world: &dyn Collective, from: usize, message: &RankBuffer, answer: &RankBuffer) -> Result<()> {
    let call = Call::single("message of a measurement");
    for _ in 0..=MESSAGES {
        world.recv(call, from, message.memory())?;
        world.send(call, from, answer.memory())?;
    }
    Ok(())
}

/// Returns the warnings about slow pairs, each pair once, and about networks with less than half of
/// their expected rate. `pairs` are all, slowest first.
pub(crate) fn warnings(pairs: &[PairSpeed], places: &[RankLocation]) -> Vec<String> {
    let mut seen: BTreeSet<[usize; 2]> = BTreeSet::new();
    let slow = pairs.iter().filter(|pair| pair.slow);
    let once = slow.filter(|pair| seen.insert([pair.from.min(pair.to), pair.from.max(pair.to)]));
    let mut warnings: Vec<String> = once.map(|pair| pair.slow_text(pairs, places)).collect();
    let network = pairs.iter().find(|pair| pair.kind == NETWORK);
    warnings.extend(network.and_then(PairSpeed::network_warning));
    warnings
}

/// Returns a line for each kind of pairs with its median and expected rate, in order of first
/// appearance.
pub(crate) fn kinds(pairs: &[PairSpeed]) -> Vec<String> {
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    pairs.iter().filter(|pair| seen.insert(pair.kind)).map(PairSpeed::kind_text).collect()
}

impl PairSpeed {
    fn slow_text(&self, pairs: &[PairSpeed], places: &[RankLocation]) -> String {
        let PairSpeed { from, to, gbps, median_gbps, kind, .. } = self;
        let host = |rank: usize| places.get(rank).map_or("", |location| location.host.as_str());
        let back = pairs.iter().find(|pair| (pair.from, pair.to) == (*to, *from));
        let back = back.map_or_else(String::new, |back| format!(", back {:.3} GB/s", back.gbps));
        let share = 100.0 * gbps / median_gbps;
        format!(
            "SLOW: rank {from} ({}) to rank {to} ({}): {gbps:.3} GB/s, {share:.1} % of the median pair's over {kind}, \
             {median_gbps:.3} GB/s{back}",
            host(*from),
            host(*to)
        )
    }

    /// Returns the warning about the median of network pairs, which this pair holds.
    fn network_warning(&self) -> Option<String> {
        let (median, expected) = (self.median_gbps, self.expected_gbps?);
        let name = self.expected.as_ref()?;
        (median < SLOW * expected).then(|| {
            format!(
                "SLOW: the median pair over the network carries {median:.3} GB/s, under half of what {name} can \
                 ({expected:.3} GB/s): see whether ranks use another interface (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, \
                 OMPI_MCA_btl_tcp_if_include)"
            )
        })
    }

    fn kind_text(&self) -> String {
        let median = self.median_gbps;
        let beside = match (&self.expected, self.expected_gbps) {
            (Some(name), Some(expected)) => {
                format!("{:.0} % of {name} ({expected:.3} GB/s)", 100.0 * median / expected)
            }
            _ => "the expected rate is unknown: the driver reports no link speed".to_owned(),
        };
        format!("{}: the median pair carries {median:.3} GB/s, {beside}", self.kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::host_facts::LinkClass;

    /// Judges four ranks on two hosts with a 10 Gb/s network; `secs` are the times of messages of 1
    /// GB.
    fn judged(secs: impl Fn(usize, usize) -> f64) -> (Vec<PairSpeed>, Vec<RankLocation>) {
        let link = LinkClass { name: "10 Gb/s ethernet".to_owned(), gbytes_per_sec: 1.25 };
        let hosts = ["a", "a", "b", "b"];
        let places: Vec<RankLocation> =
            hosts.map(|host| RankLocation::of_host(host, Some(link.clone()))).into();
        let large = (0..16).map(|at| secs(at / 4, at % 4)).collect();
        let times = PairTimes { ranks: 4, bytes: 1_000_000_000, large, short: vec![1e-5; 16] };
        (times.judged(&places, 20.0), places)
    }

    /// Network pairs are not slow only because memory is faster.
    #[test]
    fn pairs_are_compared_with_their_kind() {
        let (pairs, places) = judged(|from, to| if from / 2 == to / 2 { 0.1 } else { 1.0 });
        assert_eq!(pairs.len(), 12);
        assert_eq!(warnings(&pairs, &places), [""; 0]);
        assert_eq!(
            kinds(&pairs),
            [
                "network: the median pair carries 1.000 GB/s, 80 % of 10 Gb/s ethernet (1.250 GB/s)",
                "memory: the median pair carries 10.000 GB/s, 50 % of memory of one host, as a copy there (20.000 GB/s)",
            ]
        );
    }

    #[test]
    fn a_slow_pair_is_named_once() {
        let (pairs, places) = judged(|from, to| match (from, to) {
            (3, 2) => 0.5,
            (2, 3) => 0.4,
            _ if from / 2 == to / 2 => 0.1,
            _ => 1.0,
        });
        assert_eq!(
            warnings(&pairs, &places),
            [
                "SLOW: rank 3 (b) to rank 2 (b): 2.000 GB/s, 20.0 % of the median pair's over memory, 10.000 GB/s, back \
              2.500 GB/s"
            ]
        );
        assert_eq!((pairs[0].kind, pairs[0].slow), (NETWORK, false));
    }

    /// A pair is slow only if every measurement is.
    #[test]
    fn the_faster_time_counts() {
        let host = RankLocation::of_host("a", None);
        let times =
            |large: [f64; 4]| PairTimes { ranks: 2, bytes: 1, large: large.into(), short: vec![0.0; 4] };
        let mut seen = times([0.0, 9.0, 1.0, 0.0]);
        assert_eq!(seen.slow(&[host.clone(), host.clone()]), [(0, 1)].into());
        seen.keep_faster(&times([0.0, 8.0, 0.0, 0.0]));
        assert_eq!(seen.large, [0.0, 8.0, 1.0, 0.0]);
        assert_eq!(seen.slow(&[host.clone(), host.clone()]), [(0, 1)].into());
        seen.keep_faster(&times([0.0, 1.5, 0.0, 0.0]));
        assert!(seen.slow(&[host.clone(), host]).is_empty());
    }

    #[test]
    fn a_network_under_half_of_its_speed_is_told() {
        let (pairs, places) = judged(|_, _| 2.0);
        let messages = warnings(&pairs, &places);
        assert_eq!(messages.len(), 1, "{messages:?}");
        assert!(
            messages[0].contains("0.500 GB/s, under half of what 10 Gb/s ethernet can (1.250 GB/s)"),
            "{messages:?}"
        );
    }
}
