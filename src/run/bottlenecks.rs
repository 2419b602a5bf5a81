//! What is said at the end of a run of where its time went: the table of a trace, and the bottlenecks that are clear.

use candle_core::{DType, Device};

use crate::engine::RunSummary;
use crate::error::Result;
use crate::ops::{Addend, ColumnView, ColumnViewMut, Transpose, matmul};
use crate::plan::Plan;
use crate::profile::bottlenecks::{self, CopyAndProductRates};
use crate::recipe::Recompute;
use crate::report::Terminal;
use crate::runtime::TensorMut;
use crate::runtime::clock;
use crate::runtime::copy::{copy_into, zero};
use crate::runtime::device::free_bytes;
use crate::runtime::machine::host_memory;

/// Values of the tensor that is copied to see how fast that is: 64 MiB, more than most caches hold.
const COPIED: usize = 16 << 20;
/// Rows and columns of the matrices that are multiplied to see how fast that is.
const MULTIPLIED: usize = 768;
/// How often each is done; the fastest counts.
const TIMES: usize = 4;
/// What is measured takes so many times less than the memory that is free.
const ROOM: u64 = 8;

/// Says where the time of a run went. In a run without a trace there is a word only where something is clear.
pub(super) fn say(plan: &Plan, summary: &RunSummary, terminal: &Terminal) {
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
    terminal.line(format!("traced {} steps: {folder}/rank-*.json opens in ui.perfetto.dev", table.steps));
    // Without it a rule is not asked.
    facts.rates = has_room(device).then(|| rates(device).ok()).flatten();
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

fn has_room(device: &Device) -> bool {
    let free = if device.is_cpu() { host_memory().map(|host| host.available) } else { free_bytes(device) };
    free.is_some_and(|free| free > ROOM * 4 * COPIED as u64)
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
