//! A case of an op: one variant of it, compared with its reference.
//!
//! A case runs an op as the engine would (its form for the device, in f32 or bf16) and its
//! reference (candle's primitives on the CPU, in f32) on the same rounded inputs. The error of a
//! result is its largest deviation over the largest value of the reference, in f64. Every op lists
//! its cases in its own file `cases.rs`; [`super::selftest`] runs them all.
//!
//! Tolerances follow FlashAttention's rule. In bf16 they are twice (forward) or three times
//! (backward) the error of a plain bf16 implementation, which is at least the one rounding of its
//! result. In f32 they cover the difference between two orders of summation. Tests check the
//! references themselves with candle's autograd and finite differences.

use std::time::Instant;

use candle_core::{DType, Device, Shape, Tensor};

use crate::error::{Error, Result};
use crate::runtime::TensorMut;
use crate::runtime::rng::RngStream;

/// Half the distance between neighbouring bf16 numbers, relative: the maximum error of one
/// rounding.
const BF16_ROUNDING: f64 = 1.0 / 256.0;

/// The outcome of one case in one dtype.
#[derive(Debug, Clone)]
pub struct CaseOutcome {
    /// The function in `ops`.
    pub op: &'static str,
    /// The variant, shape or option.
    pub what: String,
    /// The dtype of the activations.
    pub dtype: DType,
    /// The largest deviation over the largest value of the reference; infinite for NaN or an error.
    pub error: f64,
    /// The maximum permitted `error`.
    pub tolerance: f64,
    /// True if `error` is within `tolerance`.
    pub passed: bool,
    /// The error of the op or its reference, if either failed.
    pub fault: Option<Error>,
    /// Seconds that op and reference took together.
    pub secs: f64,
}

/// The maximum error in each dtype; none if the case is redundant in that dtype.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tolerance {
    f32: Option<f64>,
    bf16: Option<f64>,
}

impl Tolerance {
    /// Tolerance of codes, which no rounding of activations changes.
    pub(super) const CODES: Self = Tolerance { f32: Some(1e-6), bf16: Some(1e-6) };
    /// Tolerance of a result that is rounded once and involves no sum.
    pub(super) const ROUNDED: Self = Tolerance { f32: Some(1e-6), bf16: Some(1.01 * BF16_ROUNDING) };
    /// Tolerance of a result that involves a sum.
    pub(super) const FORWARD: Self = Tolerance { f32: Some(4e-6), bf16: Some(2.0 * BF16_ROUNDING) };
    /// Tolerance of a gradient that involves a sum.
    pub(super) const BACKWARD: Self = Tolerance { f32: Some(1e-5), bf16: Some(3.0 * BF16_ROUNDING) };

    /// Returns the tolerance of a case that exists only in f32.
    pub(super) fn only_f32(self) -> Self {
        Tolerance { bf16: None, ..self }
    }

    /// Returns the tolerance of a case that mixes dtypes, which f32 activations would not.
    pub(super) fn only_bf16(self) -> Self {
        Tolerance { f32: None, ..self }
    }

    pub(super) fn dtypes(self) -> Vec<(DType, f64)> {
        let both = [(DType::F32, self.f32), (DType::BF16, self.bf16)];
        both.into_iter().filter_map(|(dtype, tolerance)| Some((dtype, tolerance?))).collect()
    }
}

/// Runs a case and returns its results with the expected ones.
pub(super) type Compare = Box<dyn Fn(&CaseRunner<'_>) -> Result<Vec<TensorPair>>>;

/// One op in one variant.
pub(super) struct OpCase {
    /// The function in `ops`.
    pub(super) op: &'static str,
    /// The variant, shape or option.
    pub(super) what: String,
    /// The maximum permitted error.
    pub(super) tolerance: Tolerance,
    /// Runs the op and its reference.
    pub(super) compare: Compare,
}

impl OpCase {
    /// Returns the variant `what` of the function `op`; `compare` runs it and its reference.
    pub(super) fn new(
        op: &'static str,
        what: impl Into<String>,
        tolerance: Tolerance,
        compare: impl Fn(&CaseRunner<'_>) -> Result<Vec<TensorPair>> + 'static,
    ) -> Self {
        OpCase { op, what: what.into(), tolerance, compare: Box::new(compare) }
    }

    /// Runs the case on `device`, in one dtype after another.
    pub(super) fn outcomes(self, device: &Device) -> impl Iterator<Item = CaseOutcome> {
        self.outcomes_from(device, 0)
    }

    /// Runs the case like [`Self::outcomes`], with inputs that begin `first` values after the start
    /// of their memory.
    pub(super) fn outcomes_from(self, device: &Device, first: usize) -> impl Iterator<Item = CaseOutcome> {
        let dtypes = self.tolerance.dtypes();
        let runner = move |dtype| CaseRunner { device, dtype, first };
        dtypes.into_iter().map(move |(dtype, tolerance)| self.outcome(&runner(dtype), tolerance))
    }

    fn outcome(&self, runner: &CaseRunner<'_>, tolerance: f64) -> CaseOutcome {
        let (start, dtype) = (Instant::now(), runner.dtype);
        let compared = (self.compare)(runner).and_then(|pairs| largest_error(&pairs));
        let (error, fault) = match compared {
            Ok(error) => (error, None),
            Err(fault) => (f64::INFINITY, Some(fault)),
        };
        CaseOutcome {
            op: self.op,
            what: self.what.clone(),
            dtype,
            error,
            tolerance,
            passed: error <= tolerance,
            fault,
            secs: start.elapsed().as_secs_f64(),
        }
    }
}

/// The device and dtype of a case; creates its inputs.
pub(super) struct CaseRunner<'a> {
    pub(super) device: &'a Device,
    pub(super) dtype: DType,
    /// Number of values before those of a tensor in its memory.
    pub(super) first: usize,
}

impl CaseRunner<'_> {
    /// Returns standard normal values in the dtype of the activations; only `name` determines them.
    pub(super) fn normal(&self, name: &str, shape: impl Into<Shape>) -> Result<OpPair> {
        self.normal_as(self.dtype, name, shape)
    }

    /// Returns the same in f32, the dtype of gradients and adapters.
    pub(super) fn normal_f32(&self, name: &str, shape: impl Into<Shape>) -> Result<OpPair> {
        self.normal_as(DType::F32, name, shape)
    }

    pub(super) fn normal_as(&self, dtype: DType, name: &str, shape: impl Into<Shape>) -> Result<OpPair> {
        let (shape, stream) = (shape.into(), RngStream::new(0).named(name));
        let values = (0..shape.elem_count() as u64).map(|i| stream.normal(i)).collect();
        self.twin(dtype, values, shape)
    }

    pub(super) fn twin(&self, dtype: DType, values: Vec<f32>, shape: impl Into<Shape>) -> Result<OpPair> {
        let rounded = Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?;
        // A copy, since ops write in place.
        let plain = rounded.to_dtype(DType::F32)?.copy()?;
        let here = self.behind(&rounded)?.to_device(self.device)?;
        Ok(OpPair { here: TensorMut::new(here), plain: TensorMut::new(plain) })
    }

    /// Returns the same values in memory that begins with `first` NaNs.
    fn behind(&self, values: &Tensor) -> Result<Tensor> {
        if self.first == 0 {
            return Ok(values.clone());
        }
        let before = Tensor::full(f32::NAN, self.first, &Device::Cpu)?.to_dtype(values.dtype())?;
        let memory = Tensor::cat(&[&before, &values.flatten_all()?], 0)?;
        Ok(memory.narrow(0, self.first, values.elem_count())?.reshape(values.shape())?)
    }
}

/// The same values twice, for an op and for its reference.
pub(super) struct OpPair {
    /// The values on the case's device, in its dtype.
    pub(super) here: TensorMut,
    /// The values on the CPU, in f32.
    pub(super) plain: TensorMut,
}

impl OpPair {
    /// Multiplies both by `factor`; they stay equal.
    pub(super) fn scaled(self, factor: f64) -> Result<Self> {
        let here = TensorMut::new((&*self.here * factor)?);
        let plain = TensorMut::new(here.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.copy()?);
        Ok(OpPair { here, plain })
    }

    /// Returns both for comparison, after op and reference wrote to them.
    pub(super) fn pair(self) -> TensorPair {
        TensorPair { got: self.here.into_tensor(), want: self.plain.into_tensor() }
    }
}

/// A result and its expected value.
pub(super) struct TensorPair {
    pub(super) got: Tensor,
    pub(super) want: Tensor,
}

impl TensorPair {
    pub(super) fn new(got: Tensor, want: Tensor) -> Self {
        TensorPair { got, want }
    }

    pub(super) fn scalars(got: f64, want: f64) -> Result<Self> {
        Ok(TensorPair { got: Tensor::new(&[got], &Device::Cpu)?, want: Tensor::new(&[want], &Device::Cpu)? })
    }

    /// Returns the largest deviation over the largest expected value, or the deviation itself if
    /// only zeros are expected.
    pub(super) fn error(&self) -> Result<f64> {
        if self.got.dims() != self.want.dims() {
            return Err(Error::internal("a result has another shape than its reference").because(format!(
                "found {:?}, wanted {:?}",
                self.got.dims(),
                self.want.dims()
            )));
        }
        let (got, want) = (in_f64(&self.got)?, in_f64(&self.want)?);
        let largest = want.iter().fold(0f64, |largest, x| largest.max(x.abs()));
        let deviations = got.iter().zip(&want).map(|(got, want)| (got - want).abs());
        // `f64::max` would drop a NaN.
        let error = deviations.fold(0f64, |error, x| if x > error || x.is_nan() { x } else { error });
        Ok(match () {
            () if !error.is_finite() => f64::INFINITY,
            () if largest > 0.0 => error / largest,
            () => error,
        })
    }
}

pub(super) fn in_f64(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
}

pub(super) fn largest_error(pairs: &[TensorPair]) -> Result<f64> {
    if pairs.is_empty() {
        return Err(Error::internal("a case of the self-test compares nothing"));
    }
    pairs.iter().try_fold(0f64, |largest, pair| Ok(largest.max(pair.error()?)))
}
