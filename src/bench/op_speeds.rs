//! Table and JSON of the speed of every operation on one device.

use serde::Serialize;

use crate::error::Result;
use crate::ops::bench::{AlgorithmTiming, BenchShapes, DeviceRates, OpTiming, OpWork};
use crate::runtime::device::{self, DeviceChoice};
use crate::runtime::machine;
use crate::units;

/// Speeds of a device; those of operations are added one by one.
#[derive(Debug, Serialize)]
pub(crate) struct OpSpeeds {
    /// Model of the device, such as "NVIDIA H200".
    device: String,
    /// True on a CPU, false on a GPU.
    processor: bool,
    tokens: usize,
    max_seq_len: usize,
    /// Dtype of activations and weights, and of the product that gives `gemm_tflops`.
    dtype: &'static str,
    /// 10^9 bytes per second that a copy reads and writes.
    copy_gbps: f64,
    gemm_tflops: f64,
    /// 10^12 operations per second that the instructions of products reach in registers alone; none
    /// on a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_tflops: Option<f64>,
    ops: Vec<OpSpeed>,
    #[serde(skip)]
    rates: DeviceRates,
}

/// Speed of one operation, in bytes or in floating-point operations.
#[derive(Debug, Serialize)]
struct OpSpeed {
    op: &'static str,
    shape: String,
    dtype: &'static str,
    ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    gbps: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tflops: Option<f64>,
    /// Fraction of `copy_gbps` or `peak_tflops`; of `gemm_tflops` without a peak.
    share: f64,
    /// Peak bytes of a run on a GPU beside its inputs.
    #[serde(skip_serializing_if = "Option::is_none")]
    extra_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fastest_algorithm: Option<FastestAlgorithm>,
}

/// The fastest of the algorithms that a product was measured by.
#[derive(Debug, Serialize)]
struct FastestAlgorithm {
    /// Its number in the library's ranking, from 1; a run takes number 1.
    number: usize,
    ms: f64,
}

impl OpSpeeds {
    /// Creates the table with the rates of the device, without operations.
    ///
    /// # Errors
    /// The driver does not name its GPUs.
    pub(crate) fn new(choice: DeviceChoice, shapes: &BenchShapes, rates: DeviceRates) -> Result<Self> {
        let name = match choice {
            DeviceChoice::Cpu => machine::processor_name(),
            DeviceChoice::Gpu(index) => device::gpus()?.into_iter().nth(index).map(|gpu| gpu.name),
        };
        Ok(OpSpeeds {
            device: name.unwrap_or_else(|| choice.to_string()),
            processor: choice == DeviceChoice::Cpu,
            tokens: shapes.tokens,
            max_seq_len: shapes.max_seq_len,
            dtype: shapes.dtype.as_str(),
            copy_gbps: rates.copy_bytes / 1e9,
            gemm_tflops: rates.gemm_flops / 1e12,
            peak_tflops: rates.peak_flops.map(|flops| flops / 1e12),
            ops: Vec::new(),
            rates,
        })
    }

    /// Returns the head of the table.
    pub(crate) fn head(&self) -> String {
        let OpSpeeds { device, tokens, max_seq_len, dtype, copy_gbps, gemm_tflops, .. } = self;
        let peak = self.peak_tflops.map(|tflops| format!(", in registers alone {tflops:.3}"));
        let peak = peak.unwrap_or_default();
        format!(
            "{device}: copies {copy_gbps:.1} GB/s, {dtype} products {gemm_tflops:.3} TFLOP/s{peak}; \
             {tokens} tokens in rows of {max_seq_len} at most\n\n\
             {:<20} {:<48} {:<5} {:>10} {:>17} {:>8}\n",
            "operation", "shape", "dtype", "ms", "rate", "share"
        )
    }

    /// Adds the timing of one operation; returns its line of the table.
    pub(crate) fn add(&mut self, timing: OpTiming) -> String {
        let (rate, share) = (timing.per_sec(), self.rates.share(&timing));
        let OpTiming { op, shape, dtype, work, secs, extra_bytes, fastest } = timing;
        let (gbps, tflops, text) = match work {
            OpWork::Bytes(_) => (Some(rate / 1e9), None, format!("{:.1} GB/s   ", rate / 1e9)),
            OpWork::Flops(_) => (None, Some(rate / 1e12), format!("{:.3} TFLOP/s", rate / 1e12)),
        };
        let (ms, dtype) = (1e3 * secs, dtype.as_str());
        let extra = extra_bytes.map_or_else(String::new, |bytes| format!("  {} extra", units::bytes(bytes)));
        let fastest_algorithm = fastest
            .map(|AlgorithmTiming { index, secs }| FastestAlgorithm { number: index + 1, ms: 1e3 * secs });
        let fastest = fastest_algorithm.as_ref().map_or_else(String::new, |fastest| {
            format!("  fastest: algorithm {}, {:.3} ms", fastest.number, fastest.ms)
        });
        // Operands that are moved faster than a large copy stay in the processor's caches.
        let is_cached = gbps.is_some() && share > 1.0;
        let share_text = if is_cached { "cached".to_owned() } else { format!("{:.1} %", 100.0 * share) };
        let line = format!(
            "{op:<20} {shape:<48} {dtype:<5} {ms:>10.3} {text:>17} {share_text:>8}{extra}{fastest}\n"
        );
        self.ops.push(OpSpeed { op, shape, dtype, ms, gbps, tflops, share, extra_bytes, fastest_algorithm });
        line
    }
}
