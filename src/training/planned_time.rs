//! Planned and measured time of a step. The plan is the time model of `finetune plan` with the
//! speeds that this machine reaches for the run's own shapes.
//!
//! The speeds are measured after the result is published and the model dropped, within the planned
//! memory of the run, and only after runs for which a second or two does not matter.

use std::path::Path;

use super::output_folder::METRICS;
use crate::engine::RunSummary;
use crate::error::Result;
use crate::median::median;
use crate::ops::bench::{BenchShapes, ModelWidths};
use crate::planning::sizing::SizingRequest;
use crate::planning::sizing::hardware::Hardware;
use crate::planning::sizing::rates::ComputeRates;
use crate::planning::{LossPath, Plan};
use crate::report::metrics::{self, MetricsEntry};
use crate::report::timing::StepTiming;

/// Least total seconds of steps for a comparison.
const LEAST_SECS: f64 = 60.0;
/// Least number of steps for the median, without the slower first step.
const LEAST_STEPS: usize = 4;
/// Seconds of measurement for each operation.
const OP_SECS: f64 = 0.05;

/// Returns the planned and measured time of a step. None if the run was too short or an operation
/// cannot be measured now: its inputs may use half of the `spare` bytes, because results and
/// workspaces need memory too.
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

/// Returns the planned seconds of a step. The inputs of the measured operations use at most
/// `memory` bytes.
fn predicted(plan: &Plan, memory: u64) -> Result<Option<f64>> {
    let (config, recipe) = (&plan.base.config, &plan.recipe_of_ranks());
    let widths = ModelWidths {
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        heads: config.heads,
        vocab_size: config.vocab_size,
    };
    let (inputs, world) = (plan.inputs(), plan.world());
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
    // One rank measures with its own threads, after the others have ended.
    let rates = ComputeRates::measure(&shapes, &plan.engine.device, path)?;
    let hardware = Hardware::here(plan.world_size, rates.copy / 1e9, 0, plan.engine.device.is_cpu());
    let request = SizingRequest { timed: Some((&hardware, &rates)), ..request };
    Ok(request.time(recipe, &step).map(|time| time.total))
}
