//! The compute speed of a device, from the table of devices or from `finetune bench ops --json`.

use std::path::Path;

use candle_core::{DType, Device};
use serde::Deserialize;

use super::figure_range::FigureRange;
use super::flops::{ATTENTION, TokenFlops};
use super::hardware::DeviceSheet;
use crate::error::input_file;
use crate::error::{Error, Result};
use crate::ops::bench::{BenchShapes, DeviceRates, OpTiming, OpWork};
use crate::planning::LossPath;

/// Part of the memory's speed that kernels reach.
const OF_MEMORY: f64 = 0.8;

/// The operations and bytes a second that training reaches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ComputeRates {
    /// Operations a second of the blocks' products.
    pub linear: f64,
    /// Operations a second of the output layer with its loss.
    pub head: HeadRates,
    /// Operations a second of attention, forward and backward.
    pub attention: f64,
    /// Bytes a second of elementwise operations; none if `linear` already includes them.
    pub elementwise: Option<f64>,
    /// Bytes a second of the optimizer's update.
    pub update: f64,
    /// The same with 8-bit states, whose codes cost time on a processor.
    pub update_int8: f64,
    /// Bytes a second that a copy reads and writes.
    pub copy: f64,
    /// Operations a second of a product alone, at best: the denominator of MFU.
    pub peak: f64,
}

/// The operations that the rates are computed from.
const MEASURED: [&str; 7] = ["matmul", LOSS, "attention", "attention_backward", "glu", "adamw", "adamw_int8"];

/// The output layer with its loss.
const LOSS: &str = "linear_cross_entropy";

/// Returns the suffix of the loss's shape that `bench ops` measures for this path. The match is
/// partial: `bench ops` measures a chunk with a soft-cap, but without an adapter or trained rows.
/// It measures a trained weight without a soft-cap.
fn measured_as(path: LossPath) -> &'static str {
    match path {
        LossPath::Frozen => ", frozen",
        LossPath::Chunked => ", soft-cap",
        LossPath::Trained => ", trained",
    }
}

/// Operations a second of the output layer with its loss, by path.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadRates {
    frozen: f64,
    chunked: f64,
    trained: f64,
}

impl HeadRates {
    /// Builds the rates from the rate of each path.
    fn of(rate: impl Fn(LossPath) -> f64) -> Self {
        let [frozen, chunked, trained] = [LossPath::Frozen, LossPath::Chunked, LossPath::Trained].map(rate);
        HeadRates { frozen, chunked, trained }
    }

    /// Returns the rate of `path`.
    pub fn by(self, path: LossPath) -> f64 {
        match path {
            LossPath::Frozen => self.frozen,
            LossPath::Chunked => self.chunked,
            LossPath::Trained => self.trained,
        }
    }
}

/// The measurements of `finetune bench ops --json`, and their device.
#[derive(Debug)]
pub struct Calibration {
    /// The measured speeds.
    pub rates: ComputeRates,
    of: MeasuredDevice,
}

/// The part of the output of `finetune bench ops --json` that the planner uses.
#[derive(Deserialize)]
struct CalibrationFile {
    #[serde(flatten)]
    of: MeasuredDevice,
    #[serde(flatten)]
    figures: MeasuredFigures,
}

#[derive(Debug, Deserialize)]
struct MeasuredDevice {
    device: String,
    /// True for a processor, false for a GPU.
    processor: bool,
    tokens: usize,
    dtype: String,
}

#[derive(Deserialize)]
struct MeasuredFigures {
    copy_gbps: f64,
    gemm_tflops: f64,
    ops: Vec<CalibrationOp>,
}

#[derive(Deserialize)]
struct CalibrationOp {
    op: String,
    shape: String,
    tflops: Option<f64>,
    gbps: Option<f64>,
}

impl Calibration {
    /// Reads a file that `finetune bench ops --json` wrote.
    ///
    /// # Errors
    /// The user's: the file cannot be read, has another format, or misses operations.
    pub fn read(path: &Path) -> Result<Self> {
        let text = input_file::read_text("read", path)?;
        let refused = |why: String| {
            Self::refusal(path)
                .because(why)
                .hint("write one on the machine with `finetune bench ops --model MODEL --json > FILE`")
        };
        let CalibrationFile { of, figures } =
            serde_json::from_str(&text).map_err(|e| refused(e.to_string()))?;
        figures.refusal().map_or(Ok(()), |why| Err(refused(why)))?;
        Ok(Calibration { rates: figures.rates().map_err(refused)?, of })
    }

    /// Checks that the measurements are for `dtype` and for a processor or a GPU, as `processor`
    /// says.
    ///
    /// # Errors
    /// The user's: they are for another dtype or kind of device.
    pub fn check(&self, path: &Path, dtype: DType, processor: bool) -> Result<()> {
        let called = |processor: bool| if processor { "a processor" } else { "a GPU" };
        let MeasuredDevice { device, dtype: measured, .. } = &self.of;
        if self.of.processor != processor {
            let (of, planned) = (called(self.of.processor), called(processor));
            return Err(Self::refusal(path)
                .because(format!("it was measured on {of}, {device}, and the plan is for {planned}"))
                .hint("measure on the machine that the plan is for"));
        }
        if *measured != dtype.as_str() {
            let dtype = dtype.as_str();
            return Err(Self::refusal(path)
                .because(format!("it was measured in {measured}, and the plan computes in {dtype}"))
                .hint(format!(
                    "measure with `finetune bench ops --dtype {dtype}`, or plan with `--set model.dtype={measured}`"
                )));
        }
        Ok(())
    }

    /// Returns the source, such as `AMD EPYC 9R14, f32, 4096 tokens`.
    pub fn source(&self) -> String {
        let MeasuredDevice { device, dtype, tokens, .. } = &self.of;
        let device: String = device.chars().filter(|c| !c.is_control()).collect();
        format!("{device}, {dtype}, {tokens} tokens")
    }

    fn refusal(path: &Path) -> Error {
        Error::user(format!("cannot use the calibration {} (`--calibration`)", path.display()))
    }
}

impl ComputeRates {
    /// Returns the rates of the table: all of a step runs at the part of the peak that good
    /// trainers reach.
    pub fn of_sheet(device: &DeviceSheet, bf16: bool) -> Self {
        let peak = device.tflops(bf16) * 1e12;
        let reached = peak * device.efficiency;
        let copy = device.memory_gbps * 1e9;
        let update = copy * OF_MEMORY;
        ComputeRates {
            linear: reached,
            head: HeadRates::of(|_| reached),
            attention: reached,
            elementwise: None,
            update,
            update_int8: update,
            copy,
            peak,
        }
    }

    /// Measures `device` at the shapes of a run, whose loss takes `path` through the output layer.
    ///
    /// # Errors
    /// An operation fails, or needs more memory than available.
    pub fn measure(shapes: &BenchShapes, device: &Device, path: LossPath) -> Result<Self> {
        let DeviceRates { copy_bytes, gemm_flops, .. } = shapes.device_rates(device)?;
        // Only this path: the gradient of an output layer's weight may exceed the memory of a run
        // with adapters.
        let wanted = |op: &str, shape: &str| {
            MEASURED.contains(&op) && (op != LOSS || shape.ends_with(measured_as(path)))
        };
        let ops = shapes.timings(device, 1, wanted);
        let ops = ops.map(|timing| timing.map(CalibrationOp::from)).collect::<Result<Vec<_>>>()?;
        let measured = MeasuredFigures { copy_gbps: copy_bytes / 1e9, gemm_tflops: gemm_flops / 1e12, ops };
        measured
            .rates()
            .map_err(|why| Error::internal("cannot measure the speed of this device").because(why))
    }

    /// Returns the rates of each of `ranks` ranks that share the measured device.
    #[must_use]
    pub(crate) fn shared_by(self, ranks: usize) -> Self {
        let part = |rate: f64| rate / ranks as f64;
        ComputeRates {
            linear: part(self.linear),
            head: HeadRates::of(|path| part(self.head.by(path))),
            attention: part(self.attention),
            elementwise: self.elementwise.map(part),
            update: part(self.update),
            update_int8: part(self.update_int8),
            copy: part(self.copy),
            peak: part(self.peak),
        }
    }

    /// Returns the seconds of a token's products and attention.
    pub fn seconds(&self, flops: &TokenFlops) -> f64 {
        let linear = (flops.linear + flops.recomputed + flops.objective) / self.linear;
        linear + flops.head / self.head.by(flops.loss_path) + flops.attention / self.attention
    }
}

impl From<OpTiming> for CalibrationOp {
    fn from(timing: OpTiming) -> Self {
        let rate = timing.per_sec();
        let (gbps, tflops) = match timing.work {
            OpWork::Bytes(_) => (Some(rate / 1e9), None),
            OpWork::Flops(_) => (None, Some(rate / 1e12)),
        };
        CalibrationOp { op: timing.op.to_owned(), shape: timing.shape, tflops, gbps }
    }
}

/// The possible measured speeds, in 10^9 bytes or 10^12 operations a second.
const MEASURABLE: FigureRange = FigureRange::new(1e-9, 1e9);

impl MeasuredFigures {
    /// Returns the reason for which a required figure is impossible; none if all are possible.
    fn refusal(&self) -> Option<String> {
        let whole = [("copy_gbps", self.copy_gbps), ("gemm_tflops", self.gemm_tflops)];
        let whole = whole.map(|(name, value)| (name.to_owned(), value));
        let ops = self.ops.iter().filter(|op| MEASURED.contains(&&*op.op)).flat_map(|op| {
            let figures = [("tflops", op.tflops), ("gbps", op.gbps)];
            figures.into_iter().filter_map(|(key, value)| Some((format!("{key} of {}", op.op), value?)))
        });
        whole.into_iter().chain(ops).find_map(|(name, value)| MEASURABLE.refusal(&name, value))
    }

    /// Returns the rates by these figures; else the missing operation.
    fn rates(&self) -> Result<ComputeRates, String> {
        let mean = |op: &str, end: &str, figure: fn(&CalibrationOp) -> Option<f64>| {
            let measured = self.ops.iter().filter(|timing| timing.op == op && timing.shape.ends_with(end));
            harmonic_mean(&measured.filter_map(figure).collect::<Vec<_>>())
        };
        let rate = |op: &str, end: &str| mean(op, end, |op| op.tflops).map(|rate| rate * 1e12);
        let bandwidth = |op: &str| mean(op, "", |op| op.gbps).map(|rate| rate * 1e9);
        // Measured over one layer, which may fit a cache; the values of all layers do not.
        let update = |op: &str| bandwidth(op).unwrap_or(f64::INFINITY).min(self.copy_gbps * 1e9);
        let missing = |op: &str| format!("it has no figure of {op}");
        let forward = rate("attention", "").ok_or_else(|| missing("attention"))?;
        let backward = rate("attention_backward", "").ok_or_else(|| missing("attention_backward"))?;
        let any_head = rate(LOSS, "").ok_or_else(|| missing(LOSS))?;
        Ok(ComputeRates {
            linear: rate("matmul", "").ok_or_else(|| missing("matmul"))?,
            // A run measures only its own path, and earlier versions measured fewer paths.
            head: HeadRates::of(|path| rate(LOSS, measured_as(path)).unwrap_or(any_head)),
            attention: ATTENTION / (1.0 / forward + (ATTENTION - 1.0) / backward),
            elementwise: Some(bandwidth("glu").ok_or_else(|| missing("glu"))?),
            update: update("adamw"),
            update_int8: update("adamw_int8"),
            copy: self.copy_gbps * 1e9,
            peak: self.gemm_tflops * 1e12,
        })
    }
}

/// Returns the rate of equal amounts of work at each of these rates; none for an empty list.
fn harmonic_mean(rates: &[f64]) -> Option<f64> {
    let secs: f64 = rates.iter().map(|rate| 1.0 / rate).sum();
    (secs.is_finite() && secs > 0.0).then(|| rates.len() as f64 / secs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelConfig;
    use crate::ops::attention::Heads;
    use crate::ops::bench::ModelWidths;
    use crate::planning::sizing::flops::TrainedWeights;
    use crate::recipe::Recompute;

    /// Figures in the form of `bench ops --json`, with these rates of the loss.
    fn figures(losses: &[(&str, f64)]) -> MeasuredFigures {
        let op = |op: &str, shape: String, tflops: Option<f64>, gbps: Option<f64>| CalibrationOp {
            op: op.into(),
            shape,
            tflops,
            gbps,
        };
        let mut ops: Vec<CalibrationOp> = ["matmul", "attention", "attention_backward"]
            .map(|name| op(name, "8x16 to 24, gate_proj".into(), Some(0.4), None))
            .into();
        ops.push(op("glu", "8x48, silu".into(), None, Some(20.0)));
        ops.extend(
            losses.iter().map(|(way, rate)| op(LOSS, format!("8x16 to 32, {way}"), Some(*rate), None)),
        );
        MeasuredFigures { copy_gbps: 20.0, gemm_tflops: 0.5, ops }
    }

    #[test]
    fn the_output_layer_has_the_speed_of_its_path() -> crate::error::Result<()> {
        let text = r#"{"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}"#;
        let config = ModelConfig::from_json(text, "config.json")?;
        let flops = |loss_path| {
            let trained = TrainedWeights { branches: Some(0), recomputed: 0, loss_path };
            TokenFlops::new(&config, trained, 8.0, &Recompute::None.stored(1, true))
        };
        let (frozen, capped, trained) = ("frozen", "soft-cap", "trained");
        let rates = figures(&[(frozen, 0.4), (capped, 0.2), (trained, 0.3)]).rates().unwrap();
        let (n, h) = (flops(LossPath::Frozen), 32.0 * 16.0);
        let others = rates.seconds(&n) - 4.0 * h / 0.4e12;
        for (path, secs) in [
            (LossPath::Frozen, 4.0 * h / 0.4e12),
            (LossPath::Chunked, 4.0 * h / 0.2e12),
            (LossPath::Trained, 6.0 * h / 0.3e12),
        ] {
            let seconds = rates.seconds(&flops(path)) - others;
            assert!((seconds / secs - 1.0).abs() < 1e-6, "{path:?}: {seconds:e}, not {secs:e}");
        }
        // Files of earlier versions have fewer paths.
        let earlier = figures(&[(frozen, 0.4)]).rates().unwrap();
        assert_eq!(earlier.head, HeadRates { frozen: 0.4e12, chunked: 0.4e12, trained: 0.4e12 });
        assert_eq!(figures(&[]).rates().unwrap_err(), "it has no figure of linear_cross_entropy");
        Ok(())
    }

    /// `bench ops` uses the names that this file reads.
    #[test]
    fn every_path_is_measured() -> crate::error::Result<()> {
        let heads = Heads { num_heads: 2, num_kv_heads: 1, head_dim: 8 };
        let widths = ModelWidths { hidden_size: 16, intermediate_size: 24, heads, vocab_size: 40 };
        let shapes =
            BenchShapes { widths, tokens: 8, max_seq_len: 4, dtype: DType::F32, secs: 0.0, memory: u64::MAX };
        for path in [LossPath::Frozen, LossPath::Chunked, LossPath::Trained] {
            assert!(ComputeRates::measure(&shapes, &Device::Cpu, path)?.head.by(path) > 0.0);
        }
        Ok(())
    }
}
