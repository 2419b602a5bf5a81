//! Metrics endpoint, TensorBoard and program of a run by the recipe's `[log]`, and the peak speed
//! for `mfu` and `hfu`.

use std::cell::RefCell;
use std::path::{Path, absolute};
use std::rc::Rc;

use candle_core::DType;
use serde_json::{Map, Value};

use super::output_folder::{TENSORBOARD, last_name};
use crate::clock;
use crate::engine::PeakFlops;
use crate::error::{Error, Result};
use crate::loading::{EngineOptions, Trains};
use crate::planning::Plan;
use crate::planning::router_aux_loss::objective_cost;
use crate::planning::sizing::flops::{TokenFlops, TrainedWeights};
use crate::planning::sizing::hardware::called_by_driver;
use crate::planning::sizing::mean_lengths;
use crate::report::{
    EventWriter, LogCommand, MetricsEndpoint, PageServer, RunLabels, RunListeners, RunStart, Terminal,
    endpoint,
};
use crate::runtime::device;

/// Opens the metrics endpoint of `log.metrics_address`. It runs before loading, so that a run
/// without its endpoint does not start.
///
/// # Errors
/// The user's: the address cannot be bound.
pub(crate) fn listen(plan: &Plan, output: &Path, terminal: &Terminal) -> Result<Option<MetricsEndpoint>> {
    let Some(address) = plan.recipe.log.metrics_address else { return Ok(None) };
    let server = PageServer::bind(address.0, endpoint::PATH).map_err(|error| {
        error.during("cannot serve metrics (`log.metrics_address`)").hint(
            "write another port, such as `--set log.metrics_address=127.0.0.1:9465`; port 0 takes a free one",
        )
    })?;
    let whom = if server.is_open() { ", open to the network" } else { "" };
    let description = format!("metrics at {}{whom}", server.url());
    let labels = RunLabels { run: last_name(output, "finetune"), model: plan.base.source.name() };
    let endpoint = MetricsEndpoint::new(server, &labels)?;
    // Printed last: the page is available from here on.
    terminal.line(description);
    Ok(Some(endpoint))
}

/// Returns the listeners of the run in `output`, which resumes after `resumed` steps. A listener
/// that cannot start is left out with a warning.
pub(crate) fn listeners(
    plan: &Plan,
    output: &Path,
    resumed: Option<u64>,
    endpoint: Option<MetricsEndpoint>,
    terminal: &Terminal,
) -> RunListeners {
    let log = &plan.recipe.log;
    let mut listeners = RunListeners::default();
    if log.tensorboard {
        match EventWriter::create(&output.join(TENSORBOARD), resumed, log.every_steps) {
            Ok(events) => listeners.add(events),
            Err(error) => warn_of_missing("TensorBoard events", &error, terminal),
        }
    }
    if let Some(endpoint) = endpoint {
        listeners.add(endpoint);
    }
    listeners
}

fn warn_of_missing(what: &str, error: &Error, terminal: &Terminal) {
    terminal.warn(format!("no {what}: {}", error.in_one_line()));
}

/// The program of `log.command`. The run ends it when its result is complete on disk.
pub(crate) type SharedLogCommand = Rc<RefCell<LogCommand>>;

/// Starts the program of `log.command` for the run in `output`, which resumes after `resumed`
/// steps. None without such a program; if it cannot start, also a warning.
pub(crate) fn log_command(
    plan: &Plan,
    output: &Path,
    resumed: Option<u64>,
    terminal: &Terminal,
) -> Option<SharedLogCommand> {
    let command = plan.recipe.log.command.as_ref()?;
    match run_start(plan, output, resumed).and_then(|start| LogCommand::start(&command.0, &start)) {
        Ok(log) => Some(Rc::new(RefCell::new(log))),
        Err(error) => {
            warn_of_missing("lines for `log.command`", &error, terminal);
            None
        }
    }
}

fn run_start(plan: &Plan, output: &Path, resumed_step: Option<u64>) -> Result<RunStart> {
    Ok(RunStart {
        run: last_name(output, "finetune"),
        model: plan.base.source.name(),
        output: absolute(output).map_err(|e| Error::io("find", output, &e))?.display().to_string(),
        version: env!("CARGO_PKG_VERSION"),
        started: clock::now_as_text(),
        world_size: plan.world_size,
        total_steps: plan.total_steps,
        resumed_step,
        recipe: recipe_values(&plan.recipe.to_toml())?,
    })
}

/// Returns every key of a recipe as `section.key` with its value.
fn recipe_values(text: &str) -> Result<Map<String, Value>> {
    let failed = |why: String| Error::internal("the resolved recipe does not read back").because(why);
    let sections: Map<String, Value> = toml::from_str(text).map_err(|e| failed(e.to_string()))?;
    let keys = |(section, keys): (String, Value)| {
        let Value::Object(keys) = keys else { return Map::new() };
        keys.into_iter().map(|(key, value)| (format!("{section}.{key}"), value)).collect()
    };
    Ok(sections.into_iter().flat_map(keys).collect())
}

/// Returns the operations per token and the peak of all devices: `log.peak_tflops`, else the value
/// of the device table for the GPU. None if neither is known; the table has no CPUs, because their
/// vendors give no peak at the actual clock.
pub(crate) fn peak(plan: &Plan) -> Result<Option<PeakFlops>> {
    let Some(tflops) =
        plan.recipe.log.peak_tflops.map_or_else(|| table_tflops(&plan.engine), |own| Ok(Some(own)))?
    else {
        return Ok(None);
    };
    let descs = plan.base.descs(Trains::adapter_or_all(plan.adapter_setup.as_ref()), Some(&plan.engine))?;
    let (_, seen) = mean_lengths(&plan.train.dataset, plan.recipe.data.longest_row() as f64);
    let stored = plan.recompute.stored(plan.base.config.num_layers(), true);
    let trained = TrainedWeights::of(&plan.base.config, &descs, &stored);
    let flops = TokenFlops::new(&plan.base.config, trained, seen, &stored)
        .with_objective(objective_cost(&plan.recipe, &plan.base.config));
    let peak = tflops * 1e12 * plan.world_size as f64;
    Ok(Some(PeakFlops { model: flops.model(), hardware: flops.hardware(), peak }))
}

/// Returns the peak in TFLOP/s of the first rank's GPU in the compute dtype, from the device table.
fn table_tflops(engine: &EngineOptions) -> Result<Option<f64>> {
    let candle_core::DeviceLocation::Cuda { gpu_id } = engine.device.location() else { return Ok(None) };
    let Some(gpu) = device::gpus()?.into_iter().nth(gpu_id) else { return Ok(None) };
    let sheet = called_by_driver(&gpu.name)?;
    let tflops = sheet.map(|sheet| sheet.tflops(engine.dtype == DType::BF16));
    Ok(tflops.filter(|tflops| *tflops > 0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_is_flat_for_a_program() {
        let values = recipe_values(
            "[train]\nepochs = 1.0\nseed = 3\n[data]\ntrain = [\"a\", \"b\"]\nformat = \"auto\"\n",
        );
        let expected = serde_json::json!({
            "train.epochs": 1.0, "train.seed": 3, "data.train": ["a", "b"], "data.format": "auto",
        });
        assert_eq!(Value::Object(values.unwrap()), expected);
    }
}
