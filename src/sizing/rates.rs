//! How fast a device computes: from the table of devices, or from what `finetune bench ops --json` measured on it.

use std::path::Path;

use candle_core::Device;
use serde::{Deserialize, Serialize};

use super::flops::{ATTENTION, TokenFlops};
use super::hardware::DeviceSheet;
use crate::error::input_file;
use crate::error::{Error, Result};
use crate::ops::bench::{BenchShapes, DeviceRates, OpTiming, OpWork};

/// Part of the memory's speed that kernels reach.
const OF_MEMORY: f64 = 0.8;

/// Operations and bytes a second that training reaches.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ComputeRates {
    /// Operations a second of the blocks' products.
    pub linear: f64,
    /// Of the output layer with its loss, where it is frozen.
    pub head: f64,
    /// The same where something of it trains.
    pub trained_head: f64,
    /// Of attention, forward and backward.
    pub attention: f64,
    /// Bytes a second of what only reads and writes; none where `linear` has it in it already.
    pub elementwise: Option<f64>,
    /// Bytes a second of the optimizer's update.
    pub update: f64,
    /// The same with states in 8 bits, whose codes take their time on a processor.
    pub update_int8: f64,
    /// Bytes a second that a copy reads and writes.
    pub copy: f64,
    /// Operations a second of a product alone, at best: what MFU is a part of.
    pub peak: f64,
}

/// The operations that rates are made of.
const MEASURED: [&str; 7] =
    ["matmul", "linear_cross_entropy", "attention", "attention_backward", "glu", "adamw", "adamw_int8"];

/// How the shape of the loss ends whose output layer trains.
const TRAINED_HEAD: &str = "trained";

/// What `finetune bench ops --json` prints, as far as it is used.
#[derive(Deserialize)]
struct CalibrationFile {
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

impl ComputeRates {
    /// Those of the table: all of a step at the part of the peak that good trainers reach.
    pub fn of_sheet(device: &DeviceSheet, bf16: bool) -> Self {
        let peak = device.tflops(bf16) * 1e12;
        let reached = peak * device.efficiency;
        let copy = device.memory_gbps * 1e9;
        let update = copy * OF_MEMORY;
        ComputeRates {
            linear: reached,
            head: reached,
            trained_head: reached,
            attention: reached,
            elementwise: None,
            update,
            update_int8: update,
            copy,
            peak,
        }
    }

    /// Those in a file that `finetune bench ops --json` wrote.
    ///
    /// # Errors
    /// The user's: it cannot be read, or is something else; operations are missing.
    pub fn measured(path: &Path) -> Result<Self> {
        let text = input_file::read_text("read", path)?;
        let refused = |why: String| {
            Error::user(format!("cannot use the calibration {} (`--calibration`)", path.display()))
                .because(why)
                .hint("write one on the machine with `finetune bench ops --model MODEL --json > FILE`")
        };
        let measured: CalibrationFile = serde_json::from_str(&text).map_err(|e| refused(e.to_string()))?;
        measured.rates().map_err(refused)
    }

    /// Those that `device` reaches now, at the shapes of a run, of whose output layer something trains if `trains_head`.
    ///
    /// # Errors
    /// An operation cannot be measured, for want of memory or because it fails.
    pub fn measure(shapes: &BenchShapes, device: &Device, trains_head: bool) -> Result<Self> {
        let DeviceRates { copy_bytes, gemm_flops } = shapes.device_rates(device)?;
        // The gradient of an output layer's weight may be larger than all that a run with adapters holds.
        let wanted =
            |op: &str, shape: &str| MEASURED.contains(&op) && (trains_head || !shape.ends_with(TRAINED_HEAD));
        let ops = shapes.timings(device, wanted);
        let ops = ops.map(|timing| timing.map(CalibrationOp::from)).collect::<Result<Vec<_>>>()?;
        let measured = CalibrationFile { copy_gbps: copy_bytes / 1e9, gemm_tflops: gemm_flops / 1e12, ops };
        measured.rates().map_err(|why| Error::internal("cannot tell how fast this device is").because(why))
    }

    /// Those of each of `ranks` ranks that share what was measured.
    #[must_use]
    pub fn shared_by(self, ranks: usize) -> Self {
        let part = |rate: f64| rate / ranks as f64;
        ComputeRates {
            linear: part(self.linear),
            head: part(self.head),
            trained_head: part(self.trained_head),
            attention: part(self.attention),
            elementwise: self.elementwise.map(part),
            update: part(self.update),
            update_int8: part(self.update_int8),
            copy: part(self.copy),
            peak: part(self.peak),
        }
    }

    /// Seconds of a token's products and attention.
    pub fn seconds(&self, flops: &TokenFlops) -> f64 {
        let linear = (flops.linear + flops.recomputed) / self.linear;
        let head = if flops.trains_head { self.trained_head } else { self.head };
        linear + flops.head / head + flops.attention / self.attention
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

impl CalibrationFile {
    /// What training reaches by these figures; what is missing where one is.
    fn rates(&self) -> Result<ComputeRates, String> {
        let rate = |op: &str, has: &str| {
            let rates: Vec<f64> = self.matching(op, has).filter_map(|op| op.tflops).collect();
            harmonic_mean(&rates).map(|rate| rate * 1e12)
        };
        let bandwidth = |op: &str| {
            let rates: Vec<f64> = self.matching(op, "").filter_map(|op| op.gbps).collect();
            harmonic_mean(&rates).map(|rate| rate * 1e9)
        };
        // Measured over the values of one layer, which a cache may hold; those of all layers it does not.
        let update = |op: &str| bandwidth(op).unwrap_or(f64::INFINITY).min(self.copy_gbps * 1e9);
        let missing = |op: &str| format!("it has no figure of {op}");
        let forward = rate("attention", "").ok_or_else(|| missing("attention"))?;
        let backward = rate("attention_backward", "").ok_or_else(|| missing("attention_backward"))?;
        let head = rate("linear_cross_entropy", "frozen").ok_or_else(|| missing("linear_cross_entropy"))?;
        Ok(ComputeRates {
            linear: rate("matmul", "").ok_or_else(|| missing("matmul"))?,
            head,
            // Where it was not measured, nothing of it trains, or the figures are of an earlier version.
            trained_head: rate("linear_cross_entropy", TRAINED_HEAD).unwrap_or(head),
            attention: ATTENTION / (1.0 / forward + (ATTENTION - 1.0) / backward),
            elementwise: Some(bandwidth("glu").ok_or_else(|| missing("glu"))?),
            update: update("adamw"),
            update_int8: update("adamw_int8"),
            copy: self.copy_gbps * 1e9,
            peak: self.gemm_tflops * 1e12,
        })
    }

    fn matching<'a>(&'a self, op: &'a str, has: &'a str) -> impl Iterator<Item = &'a CalibrationOp> {
        self.ops.iter().filter(move |measured| measured.op == op && measured.shape.contains(has))
    }
}

/// The rate of doing as much at each of these rates; none of none.
fn harmonic_mean(rates: &[f64]) -> Option<f64> {
    let secs: f64 = rates.iter().map(|rate| 1.0 / rate).sum();
    (secs.is_finite() && secs > 0.0).then(|| rates.len() as f64 / secs)
}
