//! Bandwidth of all-reduce, all-gather and reduce-scatter by size, as defined by NCCL's own tests
//! (nccl-tests). Algorithm bandwidth is the bytes of the full data over the time. Bus bandwidth
//! counts the bytes that a ring sends over each link, so that it compares with the link's rate for
//! any number of ranks.

use std::time::Instant;

use candle_core::Device;
use serde::Serialize;

use super::rank_buffer::RankBuffer;
use super::{MeasuredRanks, on_ranks};
use crate::cli::CommunicationArgs;
use crate::collective::{Call, Collective};
use crate::error::{Error, Result};
use crate::runtime::device::wait_for;
use crate::units;

/// Measured collective, with the names of nccl-tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum MeasuredOp {
    /// Replaces the data of each rank by the sum.
    AllReduce,
    /// Concatenates the parts of all ranks.
    AllGather,
    /// Sums the data and leaves each rank its part.
    ReduceScatter,
}

const OPS: [MeasuredOp; 3] = [MeasuredOp::AllReduce, MeasuredOp::AllGather, MeasuredOp::ReduceScatter];

/// Calls are repeated until this many bytes have moved, within the two limits below.
const MOVED_BYTES: u64 = 256 << 20;
const LEAST_CALLS: u64 = 3;
const MOST_CALLS: u64 = 30;

impl MeasuredOp {
    fn name(self) -> &'static str {
        match self {
            MeasuredOp::AllReduce => "all_reduce",
            MeasuredOp::AllGather => "all_gather",
            MeasuredOp::ReduceScatter => "reduce_scatter",
        }
    }

    /// Returns the bytes that a ring sends over each link for each byte of the full data.
    fn sent_per_byte(self, ranks: usize) -> f64 {
        let part = (ranks as f64 - 1.0) / ranks as f64;
        if self == MeasuredOp::AllReduce { 2.0 * part } else { part }
    }
}

/// Time of one operation at one size.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct CollectiveTiming {
    op: MeasuredOp,
    /// Bytes of the full data: the requested size, rounded up to a multiple of the ranks.
    bytes: u64,
    /// Number of measured calls, after one checked call.
    calls: u64,
    /// Seconds of a call, as the mean over calls and ranks.
    secs: f64,
    /// Rates in 10^9 bytes per second.
    algbw_gbps: f64,
    busbw_gbps: f64,
}

impl CollectiveTiming {
    fn new(op: MeasuredOp, ranks: usize, bytes: u64, calls: u64, secs: f64) -> Self {
        let algbw_gbps = bytes as f64 / 1e9 / secs;
        let busbw_gbps = algbw_gbps * op.sent_per_byte(ranks);
        CollectiveTiming { op, bytes, calls, secs, algbw_gbps, busbw_gbps }
    }
}

/// Bandwidth of collectives between some ranks.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct CollectiveSpeeds {
    ranks: usize,
    /// Backend that connects the ranks.
    backend: &'static str,
    timings: Vec<CollectiveTiming>,
}

impl CollectiveSpeeds {
    /// Starts ranks and measures. Returns none in a process without rank 0.
    ///
    /// # Errors
    /// The ranks do not start, one fails, or a result is wrong.
    pub(crate) fn measure(args: &CommunicationArgs) -> Result<Option<Self>> {
        on_ranks(args, "measure collectives", Self::on_rank)
    }

    /// Measures on this rank; all ranks call it. Every result is checked before timing.
    pub(crate) fn on_rank(ranks: &MeasuredRanks, world: &dyn Collective, device: &Device) -> Result<Self> {
        let mut timings = Vec::new();
        for op in OPS {
            for bytes in &ranks.sizes {
                timings.push(time(op, *bytes, world, device)?);
            }
        }
        Ok(CollectiveSpeeds { ranks: world.size(), backend: ranks.backend, timings })
    }

    /// Formats the timings as a table.
    pub(crate) fn table(&self) -> String {
        let CollectiveSpeeds { ranks, backend, timings } = self;
        let mut text = format!(
            "{} over {backend}; GB/s are 10^9 bytes a second, bus bandwidth as nccl-tests define it\n\n\
             {:<14} {:>9} {:>6} {:>11} {:>12} {:>12}\n",
            units::exact(*ranks, "rank"),
            "collective",
            "data",
            "calls",
            "ms",
            "algorithm",
            "bus"
        );
        for timing in timings {
            let CollectiveTiming { op, bytes, calls, secs, algbw_gbps, busbw_gbps } = timing;
            let (name, bytes, ms) = (op.name(), units::bytes(*bytes), 1e3 * secs);
            let rates = format!("{algbw_gbps:>7.3} GB/s {busbw_gbps:>7.3} GB/s");
            text += &format!("{name:<14} {bytes:>9} {calls:>6} {ms:>11.4} {rates}\n");
        }
        text
    }
}

/// Returns small whole numbers, whose f32 sums are exact in any order for up to a thousand ranks.
fn pattern(index: usize) -> f32 {
    (index % 13 + 1) as f32
}

/// Input and output buffers of `op` on a rank.
struct OpData {
    op: MeasuredOp,
    input: RankBuffer,
    /// None if the result replaces the input.
    output: Option<RankBuffer>,
}

impl OpData {
    /// Creates buffers of `part` elements per rank. `value` is this rank's input at each index of
    /// the full data.
    fn new(
        op: MeasuredOp,
        world: &dyn Collective,
        part: usize,
        device: &Device,
        value: impl Fn(usize) -> f32,
    ) -> Result<Self> {
        let (full, start) = (part * world.size(), part * world.rank());
        let (input, output) = match op {
            MeasuredOp::AllReduce => (RankBuffer::filled(full, device, value)?, None),
            MeasuredOp::AllGather => {
                let shard = RankBuffer::filled(part, device, |index| value(start + index))?;
                (shard, Some(RankBuffer::zeros(full, device)?))
            }
            MeasuredOp::ReduceScatter => {
                (RankBuffer::filled(full, device, value)?, Some(RankBuffer::zeros(part, device)?))
            }
        };
        Ok(OpData { op, input, output })
    }

    fn call(&self, world: &dyn Collective) -> Result<()> {
        let call = Call::single("data of a measurement");
        let (input, output) = (self.input.memory(), self.result().memory());
        match self.op {
            MeasuredOp::AllReduce => world.all_reduce(call, input),
            MeasuredOp::AllGather => {
                let ticket = world.start_all_gather(call, input, output)?;
                world.finish(ticket)
            }
            MeasuredOp::ReduceScatter => world.reduce_scatter(call, input, output),
        }
    }

    fn result(&self) -> &RankBuffer {
        self.output.as_ref().unwrap_or(&self.input)
    }
}

/// Returns the correct value of `op` at `index` of a rank's result, if rank r passes `r + 1` times
/// the pattern.
fn expected(op: MeasuredOp, (rank, ranks): (usize, usize), part: usize, index: usize) -> f32 {
    let sum = (ranks * (ranks + 1) / 2) as f32;
    match op {
        MeasuredOp::AllReduce => sum * pattern(index),
        MeasuredOp::AllGather => (index / part + 1) as f32 * pattern(index),
        MeasuredOp::ReduceScatter => sum * pattern(rank * part + index),
    }
}

/// Refuses a wrong result.
fn check(op: MeasuredOp, rank_of_size: (usize, usize), part: usize, values: &[f32]) -> Result<()> {
    let wrong = |(at, value): (usize, &f32)| {
        let right = expected(op, rank_of_size, part, at);
        (value.to_bits() != right.to_bits()).then_some((at, *value, right))
    };
    let Some((at, value, right)) = values.iter().enumerate().find_map(wrong) else { return Ok(()) };
    let (rank, ranks) = rank_of_size;
    Err(Error::internal(format!("{} over {ranks} ranks gave a wrong result", op.name()))
        .because(format!("on rank {rank} element {at} of {} is {value}, expected {right}", values.len()))
        .hint(
            "measure with fewer ranks or other hosts until it is right, to find the link or library at fault",
        ))
}

/// Checks a call of `op` on about `bytes` bytes, then measures it.
fn time(op: MeasuredOp, bytes: u64, world: &dyn Collective, device: &Device) -> Result<CollectiveTiming> {
    let (rank, ranks) = (world.rank(), world.size());
    let part = (bytes as usize / size_of::<f32>()).div_ceil(ranks).max(1);
    let data = OpData::new(op, world, part, device, |index| (rank + 1) as f32 * pattern(index))?;
    data.call(world)?;
    check(op, (rank, ranks), part, &data.result().values::<f32>()?)?;
    drop(data);
    // Repeated sums would overflow, so the timed data is zero.
    let data = OpData::new(op, world, part, device, |_| 0.0)?;
    let bytes = (part * ranks * size_of::<f32>()) as u64;
    let calls = (MOVED_BYTES / bytes).clamp(LEAST_CALLS, MOST_CALLS);
    wait_for(device)?;
    world.barrier(Call::single("start of a measurement"))?;
    let started = Instant::now();
    for _ in 0..calls {
        data.call(world)?;
    }
    wait_for(device)?;
    let secs = RankBuffer::numbers(vec![started.elapsed().as_secs_f64()])?;
    world.all_reduce(Call::single("time of a measurement"), secs.memory())?;
    let total: f64 = secs.values::<f64>()?.iter().sum();
    Ok(CollectiveTiming::new(op, ranks, bytes, calls, total / (calls as usize * ranks) as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launcher::ranks::run_on_cpu;

    /// Formulas of nccl-tests' PERFORMANCE.md: S/t, times 2(n-1)/n or (n-1)/n.
    #[test]
    fn bandwidths_are_those_of_nccl_tests() {
        for (op, bus) in
            [(MeasuredOp::AllReduce, 3.0), (MeasuredOp::AllGather, 1.5), (MeasuredOp::ReduceScatter, 1.5)]
        {
            let timing = CollectiveTiming::new(op, 4, 4_000_000_000, 3, 2.0);
            assert_eq!((timing.algbw_gbps, timing.busbw_gbps), (2.0, bus));
        }
    }

    #[test]
    fn sizes_are_rounded_up_to_the_ranks() {
        let ranks = MeasuredRanks { backend: "threads", sizes: vec![4, 1024, 100_000] };
        let all = run_on_cpu(3, 1, |world| CollectiveSpeeds::on_rank(&ranks, &*world, &Device::Cpu)).unwrap();
        let bytes: Vec<u64> = all[0].timings.iter().map(|timing| timing.bytes).collect();
        assert_eq!(bytes, [[12, 1032, 100_008]; 3].concat());
        assert!(all[0].timings.iter().all(|timing| timing.secs > 0.0 && timing.calls == 30));
        // Every rank gets the same means.
        assert_eq!(all[0].timings, all[2].timings);
        assert_eq!(all[0].table().lines().count(), 3 + 9);
    }

    #[test]
    fn a_wrong_result_is_refused() {
        for op in OPS {
            let (part, rank_and_size) = (5, (1, 3));
            let len = if op == MeasuredOp::ReduceScatter { part } else { 3 * part };
            let mut values: Vec<f32> = (0..len).map(|at| expected(op, rank_and_size, part, at)).collect();
            check(op, rank_and_size, part, &values).unwrap();
            values[4] += 1.0;
            let error = check(op, rank_and_size, part, &values).unwrap_err();
            assert!(error.what().ends_with("over 3 ranks gave a wrong result"), "{error}");
            assert!(error.causes()[0].starts_with("on rank 1 element 4 of"), "{error}");
        }
        // Computed by hand: ranks pass 1, 2 and 3 times the pattern 1, 2, 3, ...
        assert_eq!(expected(MeasuredOp::AllReduce, (0, 3), 2, 3), 24.0);
        assert_eq!(expected(MeasuredOp::AllGather, (0, 3), 2, 3), 8.0);
        assert_eq!(expected(MeasuredOp::ReduceScatter, (1, 3), 2, 1), 24.0);
    }
}
