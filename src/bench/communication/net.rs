//! `finetune doctor net`: measures collectives, every pair of ranks, and clocks, and warns about
//! problems.

use std::hint::black_box;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use candle_core::Device;
use serde::Serialize;

use super::clocks::{self, ClockSkew};
use super::collectives::CollectiveSpeeds;
use super::on_ranks;
use super::pairs::{self, PairSpeed, PairTimes};
use super::rank_location::RankLocation;
use crate::cli::CommunicationArgs;
use crate::collective::Collective;
use crate::doctor::host_facts::HostFacts;
use crate::error::Result;

/// Largest number of ranks for a table of all pairs. With more ranks only the slowest pairs are
/// listed.
const TABLE_RANKS: usize = 16;
const SLOWEST_SHOWN: usize = 10;

/// Measurements of the network between some ranks.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct NetworkReport {
    collectives: CollectiveSpeeds,
    /// Host of each rank.
    hosts: Vec<String>,
    /// Speed from every rank to every other, slowest first.
    pairs: Vec<PairSpeed>,
    clocks: Vec<ClockSkew>,
    /// Problems, as sentences.
    warnings: Vec<String>,
}

impl NetworkReport {
    /// Starts ranks and measures. Returns none in a process without rank 0.
    ///
    /// # Errors
    /// The ranks do not start, one fails, or a collective gives a wrong result.
    pub(crate) fn measure(args: &CommunicationArgs) -> Result<Option<Self>> {
        let facts = HostFacts::of_this_machine();
        on_ranks(args, "measure the network", |ranks, world, device| {
            let collectives = CollectiveSpeeds::on_rank(ranks, world, device)?;
            Self::on_rank(&facts, collectives, world, device)
        })
    }

    fn on_rank(
        facts: &HostFacts,
        collectives: CollectiveSpeeds,
        world: &dyn Collective,
        device: &Device,
    ) -> Result<Self> {
        let places = RankLocation::here(facts, !device.is_cpu()).share(world)?;
        let times = PairTimes::measure(world, device, &places)?;
        let clock = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let clocks = clocks::measure(world, &clock)?;
        let pairs = times.judged(&places, copy_rate());
        let slow = pairs::warnings(&pairs, &places);
        let skewed = clocks.iter().filter_map(|skew| skew.warning(&places[skew.rank].host));
        let warnings = slow.into_iter().chain(skewed).collect();
        let hosts = places.iter().map(|location| location.host.clone()).collect();
        Ok(NetworkReport { collectives, hosts, pairs, clocks, warnings })
    }

    /// Formats the report for a terminal.
    pub(crate) fn text(&self) -> String {
        let mut text = self.collectives.table() + "\n";
        text += &self.pair_table();
        pairs::kinds(&self.pairs).iter().for_each(|kind| text += &format!("{kind}\n"));
        let most = |secs: fn(&ClockSkew) -> f64| self.clocks.iter().map(secs).fold(0.0, f64::max);
        let (apart, unsure) = (most(|skew| skew.ahead_secs.abs()), most(|skew| skew.round_trip_secs / 2.0));
        text += &format!(
            "clocks: {:.3} ms apart at most, with an error of {:.3} ms\n",
            1e3 * apart,
            1e3 * unsure
        );
        if self.warnings.is_empty() {
            text += "no pair is slower than half of its kind's median, and no clock is off by a second\n";
        }
        self.warnings.iter().for_each(|warning| text += &format!("{warning}\n"));
        text
    }

    /// Formats the GB/s of every pair, or of the slowest.
    fn pair_table(&self) -> String {
        let ranks = self.hosts.len();
        if ranks > TABLE_RANKS {
            let mut text = "slowest pairs\n".to_owned();
            for PairSpeed { from, to, gbps, latency_us, .. } in self.pairs.iter().take(SLOWEST_SHOWN) {
                text += &format!("  rank {from} to rank {to}: {gbps:.3} GB/s, {latency_us:.1} us\n");
            }
            return text;
        }
        let mut text = format!("GB/s from (below) to{:>2}", "");
        (0..ranks).for_each(|to| text += &format!(" {to:>8}"));
        for from in 0..ranks {
            text += &format!("\nrank {from:<17}");
            for to in 0..ranks {
                let pair = self.pairs.iter().find(|pair| (pair.from, pair.to) == (from, to));
                text += &pair.map_or_else(|| format!(" {:>8}", "-"), |pair| format!(" {:>8.3}", pair.gbps));
            }
        }
        let latencies = self.pairs.iter().map(|pair| pair.latency_us);
        let (least, most) = (latencies.clone().fold(f64::INFINITY, f64::min), latencies.fold(0.0, f64::max));
        text + &format!("\nlatency: {least:.1} to {most:.1} us\n")
    }
}

/// Measures a copy in this host's memory on one thread, in 10^9 bytes per second. Messages between
/// ranks of one host are compared with it.
fn copy_rate() -> f64 {
    const BYTES: usize = 4 << 20;
    let (from, mut to) = (vec![1_u8; BYTES], vec![0_u8; BYTES]);
    let mut fastest = f64::INFINITY;
    for _ in 0..5 {
        let started = Instant::now();
        black_box(&mut to).copy_from_slice(black_box(&from));
        fastest = fastest.min(started.elapsed().as_secs_f64());
    }
    BYTES as f64 / 1e9 / fastest.max(1e-9)
}
