//! The peak rate of a kernel's instructions in registers alone ([`super::register_sums`]), on all
//! threads: an upper bound for every product of the kernel.

use std::hint::black_box;
use std::time::Instant;

use super::micro_kernel::MicroKernel;

/// Seconds of a run, long compared with the wake-up of threads.
const RUN_SECS: f64 = 0.06;
/// Number of runs; the fastest counts, since other processes interrupt some.
const RUNS: usize = 4;

/// Returns the peak floating-point operations per second of products by `kernel`, on all threads of
/// the caller's pool.
pub fn peak_flops(kernel: MicroKernel) -> f64 {
    let run = |rounds: u64| {
        let start = Instant::now();
        let flops = rayon::broadcast(|_| {
            let done = kernel.open().multiply_ones(rounds);
            // Prevents the compiler from removing the unused sums.
            black_box(&done.sums);
            done.flops
        });
        (flops.into_iter().sum::<u64>() as f64, start.elapsed().as_secs_f64())
    };
    // This loop also raises the clock rates.
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
