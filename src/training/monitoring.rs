//! Metrics endpoint, TensorBoard and MLflow of a run by the recipe's `[log]`, and the peak speed
//! for `mfu` and `hfu`.

use std::path::Path;

use candle_core::DType;

use super::output_folder::TENSORBOARD;
use crate::address;
use crate::engine::PeakFlops;
use crate::error::{Error, Result};
use crate::loading::{EngineOptions, Trains};
use crate::objectives;
use crate::planning::Plan;
use crate::planning::sizing::flops::{TokenFlops, TrainedWeights};
use crate::planning::sizing::hardware::called_by_driver;
use crate::planning::sizing::mean_lengths;
use crate::report::{
    EventWriter, MetricsEndpoint, MlflowCredentials, MlflowLog, MlflowTarget, PageServer, RunLabels,
    RunListeners, Terminal, endpoint, mlflow,
};
use crate::runtime::device;

/// Opens the metrics endpoint of `log.metrics_address`. It runs before loading, so that a run
/// without its endpoint does not start. With `offline` the MLflow server must be on this machine.
///
/// # Errors
/// The user's: the address cannot be bound; the MLflow server is on another machine, or its proxy
/// has no address.
pub(crate) fn listen(
    plan: &Plan,
    output: &Path,
    offline: bool,
    terminal: &Terminal,
) -> Result<Option<MetricsEndpoint>> {
    if let Some(server) = &plan.recipe.log.mlflow {
        let is_here = address::http(&server.0).is_ok_and(|server| address::is_this_machine(&server));
        if offline && !is_here {
            return Err(Error::user(format!("cannot log to {} (`log.mlflow`)", server.0))
                .because("`--offline` uses only what is on this machine")
                .hint("remove `--offline`, or write `--set 'log.mlflow=\"\"'`"));
        }
        mlflow::agent(&server.0)?;
    }
    let Some(address) = plan.recipe.log.metrics_address else { return Ok(None) };
    let server = PageServer::bind(address.0, endpoint::PATH).map_err(|error| {
        error.during("cannot serve metrics (`log.metrics_address`)").hint(
            "write another port, such as `--set log.metrics_address=127.0.0.1:9465`; port 0 takes a free one",
        )
    })?;
    let whom = if server.is_open() { ", open to the network" } else { "" };
    let place = format!("metrics at {}{whom}", server.url());
    let labels = RunLabels { run: name_of(output), model: plan.base.found.name() };
    let endpoint = MetricsEndpoint::new(server, &labels)?;
    // Printed last: the page is available from here on.
    terminal.line(place);
    Ok(Some(endpoint))
}

/// Returns the name of a run, the name of its output folder.
fn name_of(output: &Path) -> String {
    output.file_name().map_or_else(|| "finetune".into(), |name| name.to_string_lossy().into_owned())
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
    let warn = |what: &str, error: &Error| terminal.warn(format!("no {what}: {}", error.in_one_line()));
    if log.tensorboard {
        match EventWriter::create(&output.join(TENSORBOARD), resumed, log.every_steps) {
            Ok(events) => listeners.add(events),
            Err(error) => warn("TensorBoard events", &error),
        }
    }
    if let Some(endpoint) = endpoint {
        listeners.add(endpoint);
    }
    if let Some(address) = &log.mlflow {
        match mlflow_target(plan, &address.0, name_of(output), resumed).and_then(MlflowLog::start) {
            Ok(log) => listeners.add(log),
            Err(error) => warn("figures for MLflow", &error),
        }
    }
    listeners
}

fn mlflow_target(plan: &Plan, server: &str, run: String, resumed: Option<u64>) -> Result<MlflowTarget> {
    let mut tags = vec![
        ("mlflow.source.name".to_owned(), "finetune".to_owned()),
        ("finetune.version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
    ];
    tags.extend(resumed.map(|step| ("finetune.resumed_after_step".to_owned(), step.to_string())));
    let experiment = plan.recipe.log.mlflow_experiment.clone();
    Ok(MlflowTarget {
        server: server.to_owned(),
        experiment: experiment.unwrap_or_else(|| "finetune".into()),
        run,
        tags,
        params: recipe_values(&plan.recipe.to_toml())?,
        credentials: MlflowCredentials::from_lookup(&|name| std::env::var(name).ok())?,
    })
}

/// Returns every key of a recipe as `section.key` with its value: strings without quotes, other
/// values in TOML.
fn recipe_values(text: &str) -> Result<Vec<(String, String)>> {
    let sections: toml::Table = toml::from_str(text)
        .map_err(|e| Error::internal("the resolved recipe does not read back").because(e.to_string()))?;
    let mut values = Vec::new();
    for (section, keys) in &sections {
        for (key, value) in keys.as_table().into_iter().flatten() {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            values.push((format!("{section}.{key}"), value));
        }
    }
    Ok(values)
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
    let (_, seen) = mean_lengths(&plan.train.0, plan.recipe.data.longest_row() as f64);
    let trained = TrainedWeights::of(&plan.base.config, &descs);
    let flops = TokenFlops::new(&plan.base.config, trained, seen, plan.recompute)
        .with_objective(objectives::objective(&plan.recipe.objective).cost());
    let peak = tflops * 1e12 * plan.ranks as f64;
    Ok(Some(PeakFlops { model: flops.model(), hardware: flops.hardware(), peak }))
}

/// Returns the peak in TFLOP/s of the first rank's GPU in the compute dtype, from the device table.
fn table_tflops(engine: &EngineOptions) -> Result<Option<f64>> {
    let index = match engine.device.location() {
        candle_core::DeviceLocation::Cuda { gpu_id } => gpu_id,
        _ => return Ok(None),
    };
    let Some(gpu) = device::gpus()?.into_iter().nth(index) else { return Ok(None) };
    let sheet = called_by_driver(&gpu.name)?;
    let tflops = sheet.map(|sheet| sheet.tflops(engine.dtype == DType::BF16));
    Ok(tflops.filter(|tflops| *tflops > 0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_is_flat_for_mlflow() {
        let values = recipe_values(
            "[train]\nepochs = 1.0\nseed = 3\n[data]\ntrain = [\"a\", \"b\"]\nformat = \"auto\"\n",
        );
        let expected = [
            ("train.epochs", "1.0"),
            ("train.seed", "3"),
            ("data.train", "[\"a\", \"b\"]"),
            ("data.format", "auto"),
        ];
        assert_eq!(values.unwrap(), expected.map(|(key, value)| (key.to_owned(), value.to_owned())));
    }
}
