//! What is said at the end of a run of where its time went: the table of a trace, and the bottlenecks that are clear.

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
use crate::runtime::device::free_bytes;
use crate::runtime::machine::host_memory;
use crate::units;

/// Values of the tensor that is copied to see how fast that is: 64 MiB, more than most caches hold.
const COPIED: usize = 16 << 20;
/// Rows and columns of the matrices that are multiplied to see how fast that is.
const MULTIPLIED: usize = 768;
/// How often each is done; the fastest counts.
const TIMES: usize = 4;
/// Bytes that both take at most.
const MEASURED_BYTES: u64 = 4 * (2 * COPIED + 3 * MULTIPLIED * MULTIPLIED) as u64;

/// Measures how fast `device` copies and multiplies if the steps of the run were traced and the `spare` bytes of its memory
/// suffice for that.
pub(crate) fn measure(summary: &RunSummary, device: &Device, spare: u64) -> Option<CopyAndProductRates> {
    summary.facts.trace.as_ref()?;
    (spare >= MEASURED_BYTES).then(|| rates(device).ok()).flatten()
}

/// Says where the time of a run went. In a run without a trace there is a word only where something is clear.
/// Without `rates` the rules that need them are not asked.
pub(crate) fn say(
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
        bottlenecks::find(&facts).into_iter().for_each(|found| terminal.warn(found.text));
        return;
    };
    terminal.line(table.text().trim_end());
    let folder = crate::profile::FOLDER;
    let steps = units::exact(table.steps, "step");
    terminal.line(format!("traced {steps}: {folder}/rank-*.json opens in ui.perfetto.dev"));
    if rates.is_none() {
        terminal.line(
            "not checked: memory-bound operations; the speed of this device was not measured, for which the run's own memory is too small",
        );
    }
    facts.rates = rates;
    let found = bottlenecks::find(&facts);
    if found.is_empty() {
        terminal.line("no bottleneck: none of the rules of docs/profiling.md holds");
    }
    found.into_iter().for_each(|found| terminal.warn(found.text));
}

/// Whether the memory there is would surely hold the activations of all blocks; none where they are kept.
fn fits_without_recompute(plan: &Plan) -> Option<bool> {
    if plan.recompute == Recompute::None {
        return None;
    }
    let device = &plan.engine.device;
    let memory = if device.is_cpu() {
        // All ranks of the plan, as if all were here.
        host_memory().map(|host| host.limit.min(host.available) / plan.ranks.max(1) as u64)
    } else {
        free_bytes(device)
    };
    // What one block keeps for its backward is a part of the plan's activations; no other keeps more.
    let blocks = plan.base.config.num_layers() as u64;
    let more = plan.memory.activations.saturating_mul(blocks.saturating_sub(1));
    Some(memory.is_some_and(|memory| more < memory))
}

/// How fast `device` copies and multiplies in f32, as operations of the engine do it.
fn rates(device: &Device) -> Result<CopyAndProductRates> {
    let zeros = |shape: (usize, usize)| TensorMut::zeros(shape, DType::F32, device);
    let (from, to) = (zeros((1, COPIED))?, zeros((1, COPIED))?);
    // Pages that were never written are not read from memory.
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
        device.synchronize()?;
        let start = clock::now();
        work()?;
        device.synchronize()?;
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
