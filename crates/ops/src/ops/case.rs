//! A case of an op: one variant of it, as the engine would run it, beside what it should give.
//!
//! A case runs an op as the engine would (its form for the device, in f32 or bf16) and its reference (candle's
//! primitives on the CPU, in f32) on the same rounded inputs. The error of a result is its largest deviation over the
//! largest value of the reference, in f64. Every op lists its own cases in a file `cases.rs` of its own;
//! [`super::selftest`] runs them all.
//!
//! Tolerances follow FlashAttention's rule: in bf16 twice (forward) or three times (backward) what a plain bf16
//! implementation loses, which is at least the one rounding of its result; in f32 what differs between two orders of
//! summation. That the references are right is for the tests: candle's autograd and finite differences.

use std::time::Instant;

use candle_core::{DType, Device, Shape, Tensor};

use crate::error::{Error, Result};
use crate::runtime::TensorMut;
use crate::runtime::rng::RngStream;

/// Half the distance between neighbouring bf16 numbers, relative: the most that one rounding loses.
const BF16_ROUNDING: f64 = 1.0 / 256.0;

/// What one case came to in one dtype.
#[derive(Debug, Clone)]
pub struct CaseOutcome {
    /// The function in `ops`.
    pub op: &'static str,
    /// Which variant, shape or option of it.
    pub what: String,
    /// The dtype of the activations.
    pub dtype: DType,
    /// The largest deviation over the largest value of the reference; infinite for NaN or a refusal.
    pub error: f64,
    /// The most that `error` may be.
    pub tolerance: f64,
    /// Whether it is.
    pub passed: bool,
    /// Why there is nothing to compare, when the op or its reference refused.
    pub fault: Option<Error>,
    /// Seconds for both.
    pub secs: f64,
}

/// The most an error may be in each dtype; none where a case says nothing new in that dtype.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tolerance {
    f32: Option<f64>,
    bf16: Option<f64>,
}

impl Tolerance {
    /// A result that is rounded once and summed over nothing.
    pub(super) const ROUNDED: Self = Tolerance { f32: Some(1e-6), bf16: Some(1.01 * BF16_ROUNDING) };
    /// A result that is summed over something.
    pub(super) const FORWARD: Self = Tolerance { f32: Some(4e-6), bf16: Some(2.0 * BF16_ROUNDING) };
    /// A gradient, summed over something.
    pub(super) const BACKWARD: Self = Tolerance { f32: Some(1e-5), bf16: Some(3.0 * BF16_ROUNDING) };

    /// For what exists in f32 alone.
    pub(super) fn only_f32(self) -> Self {
        Tolerance { bf16: None, ..self }
    }

    /// For mixtures of dtypes, which in f32 are no mixtures.
    pub(super) fn only_bf16(self) -> Self {
        Tolerance { f32: None, ..self }
    }

    pub(super) fn dtypes(self) -> Vec<(DType, f64)> {
        let both = [(DType::F32, self.f32), (DType::BF16, self.bf16)];
        both.into_iter().filter_map(|(dtype, tolerance)| Some((dtype, tolerance?))).collect()
    }
}

/// What a case computes, beside what it should be.
pub(super) type Compare = Box<dyn Fn(&CaseRunner<'_>) -> Result<Vec<TensorPair>>>;

/// One op in one variant.
pub(super) struct OpCase {
    /// The function in `ops`.
    pub(super) op: &'static str,
    /// Which variant, shape or option of it.
    pub(super) what: String,
    /// The most that its errors may be.
    pub(super) tolerance: Tolerance,
    /// Runs the op and its reference.
    pub(super) compare: Compare,
}

impl OpCase {
    /// The variant `what` of the function `op`, which `compare` runs beside its reference.
    pub(super) fn new(
        op: &'static str,
        what: impl Into<String>,
        tolerance: Tolerance,
        compare: impl Fn(&CaseRunner<'_>) -> Result<Vec<TensorPair>> + 'static,
    ) -> Self {
        OpCase { op, what: what.into(), tolerance, compare: Box::new(compare) }
    }

    /// What it comes to on `device`, in one dtype after another.
    pub(super) fn outcomes(self, device: &Device) -> impl Iterator<Item = CaseOutcome> {
        self.outcomes_from(device, 0)
    }

    /// As [`Self::outcomes`], with inputs that begin `first` values behind the start of their memory.
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

/// Where a case runs; makes its inputs.
pub(super) struct CaseRunner<'a> {
    pub(super) device: &'a Device,
    pub(super) dtype: DType,
    /// What stands before the values of a tensor in its memory, in values.
    pub(super) first: usize,
}

impl CaseRunner<'_> {
    /// Standard normal values in the dtype of the activations; `name` alone decides them.
    pub(super) fn normal(&self, name: &str, shape: impl Into<Shape>) -> Result<OpPair> {
        self.normal_as(self.dtype, name, shape)
    }

    /// The same in f32, as gradients and adapters are.
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
        // A copy: ops write in place.
        let plain = rounded.to_dtype(DType::F32)?.copy()?;
        let here = self.behind(&rounded)?.to_device(self.device)?;
        Ok(OpPair { here: TensorMut::new(here), plain: TensorMut::new(plain) })
    }

    /// The same values in memory that begins with `first` others, which are no numbers.
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
    /// On the case's device, in its dtype.
    pub(super) here: TensorMut,
    /// On the CPU, in f32.
    pub(super) plain: TensorMut,
}

impl OpPair {
    /// Times `factor`, still the same values.
    pub(super) fn scaled(self, factor: f64) -> Result<Self> {
        let here = TensorMut::new((&*self.here * factor)?);
        let plain = TensorMut::new(here.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.copy()?);
        Ok(OpPair { here, plain })
    }

    /// To be compared, after both were written to.
    pub(super) fn pair(self) -> TensorPair {
        TensorPair { got: self.here.into_tensor(), want: self.plain.into_tensor() }
    }
}

/// A result and what it should be.
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

    /// The largest deviation over the largest value wanted; the deviation itself where only zeros are wanted.
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
        // Not `f64::max`, which drops a NaN.
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
