//! How fast every op is at the shapes of a model: the time of a run, what it must at least read and write or multiply, and
//! how fast the same device copies and multiplies in the same process; of a CPU, how fast its instructions multiply at all.
//!
//! Ops run as the engine runs them: one call after another, a GPU waited for at the end of a batch of them (`timer`). Inputs
//! that a cache could hold are there several times and taken in turn (`inputs`). Bytes are those that any implementation
//! must move, each input read once and each result written once, so that a share of the copy rate says what is left to
//! gain. What is measured at which shape stands in the other files.

mod activations;
mod attention;
mod inputs;
mod parameters;
mod products;
mod timer;

use candle_core::{DType, Device};

use self::inputs::BenchInputs;
use self::timer::MeasuringTime;
use super::rotary::Heads;
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
    /// Those of Qwen3-8B, which are Llama-3-8B's but for the MLP and the vocabulary.
    pub const QWEN3_8B: Self = ModelWidths {
        hidden_size: 4096,
        intermediate_size: 12_288,
        heads: Heads { num_heads: 32, num_kv_heads: 8, head_dim: 128 },
        vocab_size: 151_936,
    };
}

/// What ops are measured on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BenchShapes {
    /// The model's part of the shapes.
    pub widths: ModelWidths,
    /// N, the tokens of a micro-batch.
    pub tokens: usize,
    /// The most tokens of a row; attention stays within a row.
    pub max_seq_len: usize,
    /// The dtype of activations and weights: bf16 or f32. State of an optimizer and gradients of parameters are f32.
    pub dtype: DType,
    /// Seconds that an op is measured for, three runs at least; one that takes over two seconds runs once.
    pub secs: f64,
    /// Bytes that the inputs of one op may take together; an op that needs more is an error.
    pub memory: u64,
}

/// What a run of an op is measured by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpWork {
    /// Bytes that must be read and written.
    Bytes(u64),
    /// Floating-point operations of its products.
    Flops(u64),
}

/// What one op came to.
#[derive(Debug, Clone, PartialEq)]
pub struct OpTiming {
    /// The function in `ops`.
    pub op: &'static str,
    /// The shape of what it ran on, and its variant.
    pub shape: String,
    /// The dtype of what it reads.
    pub dtype: DType,
    /// What one run has to do.
    pub work: OpWork,
    /// Seconds of one run, the median.
    pub secs: f64,
    /// The most bytes that a run takes beside its inputs, its results among them; none on a CPU.
    pub extra_bytes: Option<u64>,
}

impl OpTiming {
    /// Bytes or floating-point operations a second.
    pub fn per_sec(&self) -> f64 {
        let (OpWork::Bytes(count) | OpWork::Flops(count)) = self.work;
        count as f64 / self.secs
    }
}

/// What the device reaches at copying and multiplying, by which ops are judged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceRates {
    /// Bytes a second that a copy reads and writes.
    pub copy_bytes: f64,
    /// Floating-point operations a second of the product of `gate_proj`, in the dtype of the activations.
    pub gemm_flops: f64,
    /// Those that the instructions of products in this dtype reach in registers alone; none on a GPU.
    pub peak_flops: Option<f64>,
}

impl DeviceRates {
    /// The part of the rate for its kind of work that an op reaches; of multiplying that is the peak, where it is known.
    pub fn share(&self, timing: &OpTiming) -> f64 {
        let rate = match timing.work {
            OpWork::Bytes(_) => self.copy_bytes,
            OpWork::Flops(_) => self.peak_flops.unwrap_or(self.gemm_flops),
        };
        timing.per_sec() / rate
    }
}

impl BenchShapes {
    /// The names of all ops that are measured.
    pub fn op_names(&self) -> Vec<&'static str> {
        let mut names: Vec<&str> = self.ops().map(|op| op.op).collect();
        names.dedup();
        names
    }

    /// Measures how fast `device` copies and multiplies.
    ///
    /// # Errors
    /// The device or [`BenchShapes::memory`] has not enough memory, or an operation of the device fails.
    pub fn device_rates(&self, device: &Device) -> Result<DeviceRates> {
        let copy = parameters::copy(device, self.memory)?;
        let gemm = products::gate_proj(self);
        // The product first: it brings the clocks up.
        let gemm_flops = gemm.measure(device, self)?.per_sec();
        let peak_flops = device.is_cpu().then(|| products::peak_flops(self.dtype));
        Ok(DeviceRates { gemm_flops, peak_flops, copy_bytes: copy.measure(device, self)?.per_sec() })
    }

    /// Measures the ops that are `wanted` by their name and shape on `device`, one by one as the iterator is asked; the inputs of an op are freed before
    /// those of the next are made.
    pub fn timings<'a>(
        &'a self,
        device: &'a Device,
        wanted: impl Fn(&str, &str) -> bool + 'a,
    ) -> impl Iterator<Item = Result<OpTiming>> + 'a {
        self.ops().filter(move |op| wanted(op.op, &op.shape)).map(move |op| op.measure(device, self))
    }

    fn ops(&self) -> impl Iterator<Item = TimedOp> + use<> {
        let lists = [products::ops, attention::ops, activations::ops, parameters::ops];
        lists.map(|ops| ops(self)).into_iter().flatten()
    }

    /// Bytes of `elements` activations.
    fn bytes(&self, elements: usize) -> usize {
        elements * self.dtype.size_in_bytes()
    }
}

/// Runs an op once, on inputs of its own.
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
    /// The function `op` on what `shape` says, which must move `bytes` bytes.
    fn moving(
        bytes: usize,
        (op, shape, dtype): (&'static str, String, DType),
        prepare: impl Fn(&BenchInputs<'_>) -> Result<Repeat> + 'static,
    ) -> Self {
        TimedOp { op, shape, dtype, work: OpWork::Bytes(bytes as u64), prepare: Box::new(prepare) }
    }

    /// The same for an op whose products take `flops` floating-point operations.
    fn multiplying(
        flops: u64,
        (op, shape, dtype): (&'static str, String, DType),
        prepare: impl Fn(&BenchInputs<'_>) -> Result<Repeat> + 'static,
    ) -> Self {
        TimedOp { op, shape, dtype, work: OpWork::Flops(flops), prepare: Box::new(prepare) }
    }

    fn measure(&self, device: &Device, shapes: &BenchShapes) -> Result<OpTiming> {
        let measured = || -> Result<_> {
            let repeat = (self.prepare)(&BenchInputs::new(device, shapes, self.work))?;
            let secs = MeasuringTime::of_secs(shapes.secs).secs_of_a_call(device, &repeat)?;
            Ok((secs, bytes_taken_by(device, repeat)?))
        };
        let (secs, extra_bytes) =
            measured().during(|| format!("cannot measure {} ({})", self.op, self.shape))?;
        let TimedOp { op, dtype, work, .. } = *self;
        Ok(OpTiming { op, shape: self.shape.clone(), dtype, work, secs, extra_bytes })
    }
}
