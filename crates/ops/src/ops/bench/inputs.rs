//! Inputs of the measured ops: the same numbers in every run, in enough sets to exceed every cache.

use std::cell::Cell;

use candle_core::{DType, Device, Shape, Tensor};

use super::{BenchShapes, OpWork, Repeat};
use crate::error::{Error, Result};
use crate::ops::rotary::RotaryTable;
use crate::runtime::TensorMut;
use crate::runtime::copy::zero;
use crate::runtime::rng::RngStream;
use crate::units;

/// Number of distinct values of an input; a larger input repeats them. Drawing billions would take
/// longer than any op.
const DIFFERENT: usize = 1 << 20;

/// Total bytes of an op's sets of inputs: more than the caches of processors and GPUs hold.
const BEYOND_CACHES: u64 = 256 << 20;

/// Maximum number of sets.
const MOST_SETS: u64 = 16;

/// Makes the inputs of one op on a device.
pub(super) struct BenchInputs<'a> {
    pub(super) device: &'a Device,
    /// Dtype of the activations and weights.
    pub(super) dtype: DType,
    sets: usize,
    /// Bytes still available.
    left: Cell<u64>,
}

impl<'a> BenchInputs<'a> {
    pub(super) fn new(device: &'a Device, shapes: &BenchShapes, work: OpWork) -> Self {
        let BenchShapes { dtype, memory, .. } = *shapes;
        let sets = match work {
            OpWork::Bytes(bytes) => {
                BEYOND_CACHES.div_ceil(bytes.max(1)).min(MOST_SETS).min((memory / bytes.max(1)).max(1))
            }
            // A product reads its operands many times, so caches do not distort its time.
            OpWork::Flops(_) => 1,
        };
        BenchInputs { device, dtype, sets: sets as usize, left: Cell::new(memory) }
    }

    /// Subtracts the memory of `count` values from the budget.
    ///
    /// # Errors
    /// Fails if all inputs together exceed the budget.
    fn take(&self, count: usize, dtype: DType) -> Result<()> {
        let bytes = (count as u64).saturating_mul(dtype.size_in_bytes() as u64);
        let left = self.left.get().checked_sub(bytes).ok_or_else(|| too_large(bytes, self.left.get()))?;
        self.left.set(left);
        Ok(())
    }

    /// Calls `make` with the number of each set, and returns the sets.
    pub(super) fn sets<T>(&self, make: impl Fn(usize) -> Result<T>) -> Result<Rotation<T>> {
        let items = (0..self.sets).map(make).collect::<Result<Vec<T>>>()?;
        Ok(Rotation { items, at: Cell::new(0) })
    }

    /// Returns standard normal values times `std`, in the dtype of the activations.
    pub(super) fn normal(&self, std: f32, shape: impl Into<Shape>) -> Result<TensorMut> {
        self.normal_as(self.dtype, std, shape)
    }

    /// Returns the same in another dtype.
    pub(super) fn normal_as(&self, dtype: DType, std: f32, shape: impl Into<Shape>) -> Result<TensorMut> {
        self.filled(dtype, shape.into(), |stream, count| stream.normals(0..count, std))
    }

    /// Returns random ones and minus ones: a norm keeps their magnitude, however often its result
    /// becomes its input.
    pub(super) fn signs(&self, shape: impl Into<Shape>) -> Result<TensorMut> {
        let sign = |bits: u64| if bits & 1 == 0 { 1.0 } else { -1.0 };
        self.filled(self.dtype, shape.into(), |stream, count| {
            (0..count).map(|i| sign(stream.bits(i))).collect()
        })
    }

    /// Returns zeros in f32, the initial gradients and optimizer state.
    pub(super) fn zeros(&self, shape: impl Into<Shape>) -> Result<TensorMut> {
        let shape = shape.into();
        self.take(shape.elem_count(), DType::F32)?;
        let zeros = TensorMut::zeros(shape, DType::F32, self.device)?;
        // Write them, as a run does with its gradients: the first write allocates the pages.
        zero(&zeros)?;
        Ok(zeros)
    }

    /// Returns random angles of `tokens` tokens, `pairs` each; the time of a rotation does not
    /// depend on them.
    pub(super) fn rotary_table(&self, tokens: usize, pairs: usize) -> Result<RotaryTable> {
        let angles = RngStream::new(0).named("angles").normals(0..(tokens * pairs) as u64, 1.0);
        let table = |f: fn(f32) -> f32| {
            let values: Vec<f32> = angles.iter().map(|&angle| f(angle)).collect();
            Tensor::from_vec(values, (tokens, pairs), self.device)
        };
        Ok(RotaryTable { cos: table(f32::cos)?, sin: table(f32::sin)?, interleaved: false })
    }

    /// Returns a tensor of the first values from `draw`, repeated.
    fn filled(
        &self,
        dtype: DType,
        shape: Shape,
        draw: impl Fn(RngStream, u64) -> Vec<f32>,
    ) -> Result<TensorMut> {
        let count = shape.elem_count();
        self.take(count, dtype)?;
        let drawn = draw(RngStream::new(0).named("inputs"), count.min(DIFFERENT) as u64);
        let drawn = Tensor::from_vec(drawn, count.min(DIFFERENT), &Device::Cpu)?.to_dtype(dtype)?;
        let drawn = drawn.to_device(self.device)?;
        let whole = TensorMut::zeros(count, dtype, self.device)?;
        for start in (0..count).step_by(DIFFERENT) {
            whole.slice_set(&drawn.narrow(0, 0, DIFFERENT.min(count - start))?, 0, start)?;
        }
        Ok(TensorMut::new(whole.reshape(shape)?))
    }
}

/// Returns the error of inputs of `bytes` bytes if `left` bytes are available.
pub(super) fn too_large(bytes: u64, left: u64) -> Error {
    Error::user("cannot allocate the inputs of an operation").because(format!(
        "they need {}; {} available",
        units::bytes(bytes),
        units::bytes(left)
    ))
}

/// Sets of inputs, used in rotation.
pub(super) struct Rotation<T> {
    items: Vec<T>,
    at: Cell<usize>,
}

impl<T> Rotation<T> {
    /// Returns the next set.
    ///
    /// # Errors
    /// Fails if no set exists.
    pub(super) fn next(&self) -> Result<&T> {
        let at = self.at.get();
        self.at.set((at + 1) % self.items.len().max(1));
        self.items.get(at).ok_or_else(|| Error::internal("a measured op has no inputs"))
    }
}

impl<T: 'static> Rotation<T> {
    /// Returns the call of `op` with the next set, as the result of a preparation.
    pub(super) fn calls(self, op: impl Fn(&T) -> Result<()> + 'static) -> Result<Repeat> {
        Ok(Box::new(move || op(self.next()?)))
    }
}

/// Returns `count` token ids below `vocab`, different for each `set`.
pub(super) fn token_ids(count: usize, vocab: usize, set: usize) -> Vec<u32> {
    let stream = RngStream::new(set as u64).named("ids");
    (0..count as u64).map(|i| (stream.bits(i) % vocab as u64) as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::bench::ModelWidths;

    fn shapes(memory: u64) -> BenchShapes {
        let widths = ModelWidths::QWEN3_8B;
        BenchShapes { widths, tokens: 1, max_seq_len: 1, dtype: DType::BF16, secs: 0.0, memory }
    }

    #[test]
    fn sets_come_in_turn_and_are_as_many_as_no_cache_holds() -> Result<()> {
        let inputs = |work| BenchInputs::new(&Device::Cpu, &shapes(u64::MAX), work);
        let five_sets = |work| -> Result<Vec<usize>> {
            let sets = inputs(work).sets(Ok)?;
            (0..5).map(|_| sets.next().copied()).collect()
        };
        assert_eq!(five_sets(OpWork::Bytes(100 << 20))?, [0, 1, 2, 0, 1]);
        assert_eq!(five_sets(OpWork::Bytes(1 << 30))?, [0; 5]);
        assert_eq!(five_sets(OpWork::Flops(1))?, [0; 5]);
        assert_eq!(inputs(OpWork::Bytes(1)).sets, 16);
        assert_eq!(BenchInputs::new(&Device::Cpu, &shapes(250), OpWork::Bytes(100)).sets, 2);
        assert_eq!(BenchInputs::new(&Device::Cpu, &shapes(50), OpWork::Bytes(100)).sets, 1);
        Ok(())
    }

    #[test]
    fn inputs_keep_to_their_memory() -> Result<()> {
        let shapes = shapes(2 * 100 + 4 * 50);
        let inputs = BenchInputs::new(&Device::Cpu, &shapes, OpWork::Flops(1));
        inputs.normal(1.0, 100)?;
        inputs.zeros(40)?;
        let refused = inputs.signs(21).map(drop).expect_err("10 values of 4 bytes are left");
        assert!(refused.to_string().contains("42 B; 40 B available"), "{refused}");
        inputs.zeros(10).map(drop)
    }

    /// An input with more values than are drawn is filled to the end.
    #[test]
    fn a_large_input_repeats_its_values() -> Result<()> {
        let inputs = BenchInputs::new(&Device::Cpu, &shapes(u64::MAX), OpWork::Flops(1));
        let values = inputs.normal(0.5, (3, DIFFERENT / 2 + 1))?.flatten_all()?.to_dtype(DType::F32)?;
        let values = values.to_vec1::<f32>()?;
        assert_eq!(values[..values.len() - DIFFERENT], values[DIFFERENT..]);
        let square = values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32;
        assert!((square - 0.25).abs() < 0.01, "{square}");
        let signs = inputs.signs(1000)?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        assert!(signs.iter().all(|x| x.abs() == 1.0) && signs.iter().sum::<f32>().abs() < 200.0);
        Ok(())
    }
}
