//! The speed of every op at the shapes of a model: the time of a run, and the bytes that it must
//! read and write or the operations of its products. The reference is the device's own rate of
//! copying and multiplying in the same process, on a CPU also the peak of its instructions.
//!
//! Ops run as the engine runs them: one call after another, with a wait for the GPU only after a
//! batch of calls (`timer`). Inputs that could fit a cache exist in several sets, used in rotation
//! (`inputs`). Bytes count each input read once and each result written once, the minimum of any
//! implementation, so the share of the copy rate shows the remaining potential. The other files
//! define the measured ops and their shapes.

mod activations;
mod attention;
mod delta;
mod experts;
mod inputs;
mod parameters;
mod products;
mod timer;

use candle_core::{DType, Device};

use self::inputs::BenchInputs;
use self::timer::MeasuringTime;
use super::rotary::Heads;
use crate::backends::gpu::choose_algorithm;
use crate::error::{ErrorContext, Result};
use crate::runtime::device::bytes_taken_by;

/// The widths of a model, by their names in config.json.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelWidths {
    /// D, the width of the activations between blocks.
    pub hidden_size: usize,
    /// F, the width inside the MLP.
    pub intermediate_size: usize,
    /// Heads of queries, of keys and values, and their width.
    pub heads: Heads,
    /// V, the rows of the embedding and of the output layer.
    pub vocab_size: usize,
}

impl ModelWidths {
    /// The widths of Qwen3-8B; Llama-3-8B differs only in the MLP and the vocabulary.
    pub const QWEN3_8B: Self = ModelWidths {
        hidden_size: 4096,
        intermediate_size: 12_288,
        heads: Heads { num_heads: 32, num_kv_heads: 8, head_dim: 128 },
        vocab_size: 151_936,
    };
}

/// Settings of a measurement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BenchShapes {
    /// The widths of the model.
    pub widths: ModelWidths,
    /// N, the number of tokens of a micro-batch.
    pub tokens: usize,
    /// Maximum number of tokens of a row; attention stays within a row.
    pub max_seq_len: usize,
    /// The dtype of activations and weights: bf16 or f32. Optimizer state and parameter gradients
    /// are f32.
    pub dtype: DType,
    /// Seconds to measure an op, with at least three runs; an op that takes over two seconds runs
    /// once.
    pub secs: f64,
    /// Bytes available for the inputs of one op; an op that needs more fails.
    pub memory: u64,
}

/// The minimum work of one run of an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpWork {
    /// Bytes that must be read and written.
    Bytes(u64),
    /// Floating-point operations of its products.
    Flops(u64),
}

/// The measurement of one op.
#[derive(Debug, Clone, PartialEq)]
pub struct OpTiming {
    /// The function in `ops`.
    pub op: &'static str,
    /// The shape and variant of the measured inputs.
    pub shape: String,
    /// The dtype of the inputs.
    pub dtype: DType,
    /// The minimum work of one run.
    pub work: OpWork,
    /// Median seconds of one run.
    pub secs: f64,
    /// Peak bytes of a run beside its inputs, including its results; none on a CPU.
    pub extra_bytes: Option<u64>,
    /// The fastest of the measured algorithms of a product; none if only one was measured.
    pub fastest: Option<AlgorithmTiming>,
}

/// The measurement of one of the algorithms that a library has for a product.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AlgorithmTiming {
    /// Its place in the library's ranking, from 0.
    pub index: usize,
    /// Median seconds of one run.
    pub secs: f64,
}

impl OpTiming {
    /// Returns bytes or floating-point operations per second.
    pub fn per_sec(&self) -> f64 {
        let (OpWork::Bytes(count) | OpWork::Flops(count)) = self.work;
        count as f64 / self.secs
    }
}

/// The measured copy and multiply rates of a device, the reference for all ops.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceRates {
    /// Bytes per second that a copy reads and writes.
    pub copy_bytes: f64,
    /// Floating-point operations per second of the product of `gate_proj`, in the dtype of the
    /// activations.
    pub gemm_flops: f64,
    /// Peak floating-point operations per second of the multiply instructions for this dtype, in
    /// registers alone; none on a GPU.
    pub peak_flops: Option<f64>,
}

impl DeviceRates {
    /// Returns the part of the device's rate that an op reaches. The reference of products is the
    /// peak if it is known.
    pub fn share(&self, timing: &OpTiming) -> f64 {
        let rate = match timing.work {
            OpWork::Bytes(_) => self.copy_bytes,
            OpWork::Flops(_) => self.peak_flops.unwrap_or(self.gemm_flops),
        };
        timing.per_sec() / rate
    }
}

impl BenchShapes {
    /// Returns the names of all measured ops.
    pub fn op_names(&self) -> Vec<&'static str> {
        let mut names: Vec<&str> = self.ops().map(|op| op.op).collect();
        names.dedup();
        names
    }

    /// Measures the copy and multiply rates of `device`.
    ///
    /// # Errors
    /// Fails if the device or [`BenchShapes::memory`] has not enough memory, or an operation of the
    /// device fails.
    pub fn device_rates(&self, device: &Device) -> Result<DeviceRates> {
        let copy = parameters::copy(device, self.memory)?;
        let gemm = products::gate_proj(self);
        // The product runs first to raise the clock rates.
        let gemm_flops = gemm.measure(device, self)?.per_sec();
        let peak_flops = device.is_cpu().then(|| products::peak_flops(self.dtype));
        Ok(DeviceRates { gemm_flops, peak_flops, copy_bytes: copy.measure(device, self)?.per_sec() })
    }

    /// Measures the `wanted` ops, selected by name and shape, on `device`, lazily one by one. The
    /// inputs of an op are freed before those of the next are allocated. The product of two dense
    /// matrices on a GPU runs by each of the first `algorithms` of the library's ranking.
    pub fn timings<'a>(
        &'a self,
        device: &'a Device,
        algorithms: usize,
        wanted: impl Fn(&str, &str) -> bool + 'a,
    ) -> impl Iterator<Item = Result<OpTiming>> + 'a {
        self.ops().filter(move |op| wanted(op.op, &op.shape)).map(move |op| {
            let algorithms = if op.op == "matmul" { algorithms } else { 1 };
            op.measure_algorithms(device, self, algorithms)
        })
    }

    fn ops(&self) -> impl Iterator<Item = TimedOp> + use<> {
        let lists =
            [products::ops, attention::ops, delta::ops, activations::ops, experts::ops, parameters::ops];
        lists.map(|ops| ops(self)).into_iter().flatten()
    }

    /// Returns the bytes of `elements` activations.
    fn bytes(&self, elements: usize) -> usize {
        elements * self.dtype.size_in_bytes()
    }
}

/// Runs an op once, on prepared inputs.
type Repeat = Box<dyn Fn() -> Result<()>>;

/// Makes the inputs of an op.
type Prepare = Box<dyn Fn(&BenchInputs<'_>) -> Result<Repeat>>;

/// An op at one shape.
struct TimedOp {
    op: &'static str,
    shape: String,
    dtype: DType,
    work: OpWork,
    prepare: Prepare,
}

impl TimedOp {
    /// Returns the function `op` on inputs of this shape, which must move `bytes` bytes.
    fn moving(
        bytes: usize,
        (op, shape, dtype): (&'static str, String, DType),
        prepare: impl Fn(&BenchInputs<'_>) -> Result<Repeat> + 'static,
    ) -> Self {
        TimedOp { op, shape, dtype, work: OpWork::Bytes(bytes as u64), prepare: Box::new(prepare) }
    }

    /// Returns an op whose products take `flops` floating-point operations.
    fn multiplying(
        flops: u64,
        (op, shape, dtype): (&'static str, String, DType),
        prepare: impl Fn(&BenchInputs<'_>) -> Result<Repeat> + 'static,
    ) -> Self {
        TimedOp { op, shape, dtype, work: OpWork::Flops(flops), prepare: Box::new(prepare) }
    }

    fn measure(&self, device: &Device, shapes: &BenchShapes) -> Result<OpTiming> {
        self.measure_algorithms(device, shapes, 1)
    }

    fn measure_algorithms(
        &self,
        device: &Device,
        shapes: &BenchShapes,
        algorithms: usize,
    ) -> Result<OpTiming> {
        let TimedOp { op, dtype, work, .. } = *self;
        let measured = || -> Result<_> {
            let repeat = (self.prepare)(&BenchInputs::new(device, shapes, work))?;
            let time = MeasuringTime::of_secs(shapes.secs);
            let secs = time.secs_of_a_call(device, &repeat)?;
            let mut fastest = AlgorithmTiming { index: 0, secs };
            for index in 1..algorithms {
                choose_algorithm(device, index)?;
                let secs = time.secs_of_a_call(device, &repeat)?;
                if secs < fastest.secs {
                    fastest = AlgorithmTiming { index, secs };
                }
            }
            let fastest = (algorithms > 1).then_some(fastest);
            if fastest.is_some() {
                choose_algorithm(device, 0)?;
            }
            let extra_bytes = bytes_taken_by(device, repeat)?;
            Ok(OpTiming { op, shape: self.shape.clone(), dtype, work, secs, extra_bytes, fastest })
        };
        measured().during(|| format!("cannot measure {op} ({})", self.shape))
    }
}

#[cfg(all(test, feature = "kernel-emu"))]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::backends::gpu::{Arg, Driver, Gemm, Kernel, LaunchShape, with_host_driver};
    use finetune_core::locks::locked;

    /// A driver that computes nothing and records the places of algorithms.
    #[derive(Debug, Default)]
    struct Recorder {
        index: Mutex<usize>,
        multiplied_by: Mutex<Vec<usize>>,
    }

    impl Driver for Recorder {
        fn launch(&self, _: &Kernel, _: LaunchShape, _: &[Arg]) -> Result<()> {
            Ok(())
        }

        fn gemm(&self, _: &Gemm) -> Result<()> {
            let factor = *locked(&self.index);
            locked(&self.multiplied_by).push(factor);
            Ok(())
        }

        fn choose_algorithm(&self, index: usize) -> Result<()> {
            *locked(&self.index) = index;
            Ok(())
        }
    }

    /// Returns the timing of a product, the places of the algorithms that ran, in their order, and
    /// at the end the place that is left chosen.
    fn measured(name: &str, algorithms: usize) -> (OpTiming, Vec<usize>) {
        let heads = Heads { num_heads: 2, num_kv_heads: 1, head_dim: 16 };
        let widths = ModelWidths { hidden_size: 32, intermediate_size: 64, heads, vocab_size: 32 };
        let shapes = BenchShapes {
            widths,
            tokens: 8,
            max_seq_len: 8,
            dtype: DType::F32,
            secs: 1e-6,
            memory: u64::MAX,
        };
        let driver: &'static Recorder = Box::leak(Box::default());
        let timing = with_host_driver(driver, || {
            let first = shapes.timings(&Device::Cpu, algorithms, |op, _| op == name).next();
            first.expect("a product of that name").expect("the driver does nothing")
        });
        let mut places = locked(&driver.multiplied_by).clone();
        places.dedup();
        places.push(*locked(&driver.index));
        (timing, places)
    }

    #[test]
    fn a_product_runs_by_each_algorithm() {
        let (timing, places) = measured("matmul", 3);
        assert_eq!(places, [0, 1, 2, 0]);
        let fastest = timing.fastest.expect("several algorithms were measured");
        assert!(fastest.index < 3 && fastest.secs <= timing.secs, "{timing:?}");
    }

    #[test]
    fn one_algorithm_is_no_comparison() {
        for (name, algorithms) in [("matmul", 1), ("matmul_weight_plus_low_rank", 3)] {
            let (timing, places) = measured(name, algorithms);
            assert_eq!((timing.fastest, places), (None, vec![0, 0]), "{name}");
        }
    }
}
