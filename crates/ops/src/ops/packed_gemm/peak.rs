//! What the instructions of a kernel reach in registers alone ([`super::register_sums`]), on all threads: no product of the
//! kernel is faster, whatever brings it its operands.

use std::hint::black_box;
use std::time::Instant;

use super::micro_kernel::MicroKernel;

/// Seconds of a run, beside which threads take no time to wake.
const RUN_SECS: f64 = 0.06;
/// Runs, of which the fastest counts: others have the processor for a while, too.
const RUNS: usize = 4;

/// Floating-point operations a second that products by `kernel` can reach at most, on all threads of the pool that the caller is in.
pub(in crate::ops) fn peak_flops(kernel: MicroKernel) -> f64 {
    let run = |rounds: u64| {
        let start = Instant::now();
        let flops = rayon::broadcast(|_| {
            let done = kernel.open().multiply_ones(rounds);
            // What nobody looks at, the compiler need not compute.
            black_box(&done.sums);
            done.flops
        });
        (flops.into_iter().sum::<u64>() as f64, start.elapsed().as_secs_f64())
    };
    // Brings the clocks up, too.
    let mut rounds = 1 << 10;
    let secs = loop {
        let (_, secs) = run(rounds);
        if secs >= RUN_SECS / 4.0 {
            break secs;
        }
        rounds *= 2;
    };
    rounds = (rounds as f64 * RUN_SECS / secs).ceil() as u64;
    let rates = (0..RUNS).map(|_| run(rounds)).map(|(flops, secs)| flops / secs);
    rates.fold(0.0, f64::max) / kernel.passes() as f64
}
