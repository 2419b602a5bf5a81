//! How long a step should have taken, beside how long it took: the model of `finetune plan` at the speeds that this machine
//! reaches for the run's own shapes.
//!
//! The speeds are measured when the result is in its place and the model has been dropped, within the memory that the run
//! was planned to hold, and only after runs that were long enough for a second or two not to matter.

use std::path::Path;

use super::output_folder::METRICS;
use crate::engine::RunSummary;
use crate::error::Result;
use crate::median::median;
use crate::ops::bench::{BenchShapes, ModelWidths};
use crate::planning::sizing::SizingRequest;
use crate::planning::sizing::hardware::Hardware;
use crate::planning::sizing::rates::ComputeRates;
use crate::planning::{LossPath, Plan, WorldSize};
use crate::report::metrics::{self, MetricsEntry};
use crate::report::timing::StepTiming;

/// Seconds of steps from which on a run is compared.
const LEAST_SECS: f64 = 60.0;
/// Steps that the median is taken of, at least; the first one, which is slower, is left out.
const LEAST_STEPS: usize = 4;
/// Seconds that each operation is measured for.
const OP_SECS: f64 = 0.05;

/// The time of a step by the model and by the clock; none where the run was too short to ask, or an operation cannot be
/// measured now: its inputs may take half of the `spare` bytes, for results and workspaces need memory, too.
pub(crate) fn compare(plan: &Plan, summary: &RunSummary, output: &Path, spare: u64) -> Option<StepTiming> {
    if summary.facts.step_secs < LEAST_SECS {
        return None;
    }
    let entries = metrics::read(&output.join(METRICS)).ok()?;
    let steps = entries.iter().filter_map(|entry| match entry {
        MetricsEntry::Step(report) => Some(report.step_secs),
        _ => None,
    });
    let secs: Vec<f64> = steps.skip(1).collect();
    if secs.len() < LEAST_STEPS {
        return None;
    }
    let measured = median(secs.iter().copied())?;
    Some(StepTiming { predicted: predicted(plan, spare / 2).ok()??, measured, steps: secs.len() })
}

/// Seconds of a step as the plan counts it; the inputs of what is measured for that take `memory` bytes at most.
fn predicted(plan: &Plan, memory: u64) -> Result<Option<f64>> {
    let (config, recipe) = (&plan.base.config, &plan.recipe_of_ranks());
    let widths = ModelWidths {
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        heads: config.heads,
        vocab_size: config.vocab_size,
    };
    let world = WorldSize::on_one_host(plan.ranks);
    let inputs = plan.inputs();
    let request = SizingRequest {
        typed: recipe,
        recipe,
        inputs,
        world,
        timed: None,
        speeds: None,
        prices: &[],
        steps: Some(plan.total_steps),
        steps_of_epoch: None,
        held_out_tokens: 0,
    };
    let load = request.workload(recipe);
    let shapes = BenchShapes {
        widths,
        tokens: (load.tokens as usize).max(1),
        max_seq_len: (load.row as usize).max(1),
        dtype: plan.engine.dtype,
        secs: OP_SECS,
        memory,
    };
    let step = request.step(recipe)?;
    let path = LossPath::of(config, &step.descs);
    // By a rank and with its threads, the others being done.
    let rates = ComputeRates::measure(&shapes, &plan.engine.device, path)?;
    let hardware = Hardware::here(plan.ranks, rates.copy / 1e9, 0, plan.engine.device.is_cpu());
    let request = SizingRequest { timed: Some((&hardware, &rates)), ..request };
    Ok(request.time(recipe, &step).map(|time| time.total))
}
