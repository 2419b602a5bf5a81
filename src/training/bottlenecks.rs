//! Time analysis at the end of a run: the table of a trace, and clear bottlenecks.

use candle_core::{DType, Device};

use crate::engine::RunSummary;
use crate::error::Result;
use crate::ops::{Addend, ColumnView, ColumnViewMut, Transpose, matmul};
use crate::planning::Plan;
use crate::profile::bottlenecks::{self, CopyAndProductRates};
use crate::recipe::Recompute;
use crate::report::Terminal;
use crate::runtime::TensorMut;
use crate::runtime::clock;
use crate::runtime::copy::{copy_into, zero};
use crate::runtime::device::{free_bytes, wait_for};
use crate::runtime::machine::host_memory;
use crate::units;

/// Elements of the tensor that is copied to measure the copy rate: 64 MiB, more than most caches
/// hold.
const COPIED: usize = 16 << 20;
/// Rows and columns of the matrices that are multiplied to measure the product rate.
const MULTIPLIED: usize = 768;
/// Repeats of each measurement; the fastest counts.
const TIMES: usize = 4;
/// Largest number of bytes that both measurements need.
const MEASURED_BYTES: u64 = 4 * (2 * COPIED + 3 * MULTIPLIED * MULTIPLIED) as u64;

/// Measures the copy and product rates of `device` if the run traced steps and the `spare` bytes
/// suffice.
pub(crate) fn measure(summary: &RunSummary, device: &Device, spare: u64) -> Option<CopyAndProductRates> {
    summary.facts.trace.as_ref()?;
    (spare >= MEASURED_BYTES).then(|| rates(device).ok()).flatten()
}

/// Prints the time analysis of a run. Without a trace it prints only clear bottlenecks. Without
/// `rates` it skips the rules that need them.
pub(crate) fn print_analysis(
    plan: &Plan,
    summary: &RunSummary,
    rates: Option<CopyAndProductRates>,
    terminal: &Terminal,
) {
    let mut facts = summary.facts.clone();
    let device = &plan.engine.device;
    facts.on_gpu = !device.is_cpu();
    facts.fits_without_recompute = fits_without_recompute(plan);
    let Some(table) = &facts.trace else {
        bottlenecks::find(&facts).into_iter().for_each(|bottleneck| terminal.warn(bottleneck.text));
        return;
    };
    terminal.line(table.text().trim_end());
    let folder = crate::profile::FOLDER;
    let steps = units::exact(table.steps, "step");
    terminal.line(format!("traced {steps}: {folder}/rank-*.json opens in ui.perfetto.dev"));
    if rates.is_none() {
        terminal.line(
            "not checked: memory-bound operations, because the run's memory is too small to measure the speed of this device",
        );
    }
    facts.rates = rates;
    let warnings = bottlenecks::find(&facts);
    if warnings.is_empty() {
        terminal.line("no bottleneck: no rule of docs/profiling.md applies");
    }
    warnings.into_iter().for_each(|warning| terminal.warn(warning.text));
}

/// Returns whether the available memory surely holds the activations of all blocks; none if the run
/// keeps them already.
fn fits_without_recompute(plan: &Plan) -> Option<bool> {
    if plan.recompute == Recompute::None {
        return None;
    }
    let device = &plan.engine.device;
    let memory = if device.is_cpu() {
        // Assumes that all ranks of the plan are on this host.
        host_memory().map(|host| host.limit.min(host.available) / plan.world_size.max(1) as u64)
    } else {
        free_bytes(device)
    };
    // The plan's activations contain those that one block keeps for its backward, and no block
    // keeps more.
    let blocks = plan.base.config.num_layers() as u64;
    let more = plan.memory.activations.saturating_mul(blocks.saturating_sub(1));
    Some(memory.is_some_and(|memory| more < memory))
}

/// Measures how fast the engine's operations copy and multiply in f32 on `device`.
fn rates(device: &Device) -> Result<CopyAndProductRates> {
    let zeros = |shape: (usize, usize)| TensorMut::zeros(shape, DType::F32, device);
    let (from, to) = (zeros((1, COPIED))?, zeros((1, COPIED))?);
    // The system does not read pages from memory that were never written.
    [&from, &to].into_iter().try_for_each(zero)?;
    let copy_secs = fastest(device, || copy_into(&to, &from))?;
    let side = (MULTIPLIED, MULTIPLIED);
    let (a, b, dst) = (zeros(side)?, zeros(side)?, zeros(side)?);
    let (a, b) = (ColumnView::all(&a), ColumnView::all(&b));
    let product = || matmul(ColumnViewMut::all(&dst), a, b, Transpose::Nt, 1.0, Addend::Nothing);
    let product_secs = fastest(device, product)?;
    let (bytes, flops) = (2 * 4 * COPIED, 2 * MULTIPLIED.pow(3));
    Ok(CopyAndProductRates {
        copy_bytes: bytes as f64 / copy_secs,
        product_flops: flops as f64 / product_secs,
    })
}

fn fastest(device: &Device, work: impl Fn() -> Result<()>) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..TIMES {
        wait_for(device)?;
        let start = clock::now();
        work()?;
        wait_for(device)?;
        best = best.min(clock::since(start).as_secs_f64());
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::bottlenecks::RunFacts;
    use crate::profile::op_table::OpTable;

    #[test]
    fn nothing_is_measured_beyond_the_memory_of_the_run() {
        let traced = RunFacts { trace: Some(OpTable::default()), ..RunFacts::default() };
        let summary = |facts| RunSummary { facts, ..RunSummary::default() };
        let measured = |facts, spare| measure(&summary(facts), &Device::Cpu, spare).is_some();
        assert!(measured(traced.clone(), MEASURED_BYTES));
        assert!(!measured(traced, MEASURED_BYTES - 1));
        assert!(!measured(RunFacts::default(), u64::MAX), "a run without a trace asks no such rule");
    }
}
