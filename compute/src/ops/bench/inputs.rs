//! The inputs of what is measured: numbers that are the same in every run, and as many sets of them as no cache holds.

use std::cell::Cell;

use candle_core::{DType, Device, Shape, Tensor};

use super::OpWork;
use crate::error::{Error, Result};
use crate::ops::rotary::RotaryTable;
use crate::runtime::TensorMut;
use crate::runtime::copy::zero;
use crate::runtime::rng::RngStream;

/// Different numbers of an input; a larger one repeats them. Drawing billions would take longer than any op.
const DIFFERENT: usize = 1 << 20;

/// Bytes that the sets of an op's inputs take in turn move together: more than the caches of processors and GPUs hold.
const BEYOND_CACHES: u64 = 256 << 20;

/// The most sets.
const MOST_SETS: u64 = 16;

/// Makes the inputs of one op on a device.
pub(super) struct BenchInputs<'a> {
    pub(super) device: &'a Device,
    /// Of the activations and weights.
    pub(super) dtype: DType,
    sets: usize,
}

impl<'a> BenchInputs<'a> {
    pub(super) fn new(device: &'a Device, dtype: DType, work: OpWork) -> Self {
        let sets = match work {
            OpWork::Bytes(bytes) => BEYOND_CACHES.div_ceil(bytes.max(1)).min(MOST_SETS),
            // A product reads what it reads many times.
            OpWork::Flops(_) => 1,
        };
        BenchInputs { device, dtype, sets: sets as usize }
    }

    /// One of `make` for each set, which is told its number.
    pub(super) fn sets<T>(&self, make: impl Fn(usize) -> Result<T>) -> Result<Rotation<T>> {
        let items = (0..self.sets).map(make).collect::<Result<Vec<T>>>()?;
        Ok(Rotation { items, at: Cell::new(0) })
    }

    /// Standard normal values times `std`, of the activations' dtype.
    pub(super) fn normal(&self, std: f32, shape: impl Into<Shape>) -> Result<TensorMut> {
        self.normal_as(self.dtype, std, shape)
    }

    /// The same in another dtype.
    pub(super) fn normal_as(&self, dtype: DType, std: f32, shape: impl Into<Shape>) -> Result<TensorMut> {
        self.filled(dtype, shape.into(), |stream, count| stream.normals(0..count, std))
    }

    /// Ones and minus ones: what a norm neither shrinks nor grows, however often its result is its input again.
    pub(super) fn signs(&self, shape: impl Into<Shape>) -> Result<TensorMut> {
        let sign = |bits: u64| if bits & 1 == 0 { 1.0 } else { -1.0 };
        self.filled(self.dtype, shape.into(), |stream, count| {
            (0..count).map(|i| sign(stream.bits(i))).collect()
        })
    }

    /// Zeros in f32, as gradients and state begin.
    pub(super) fn zeros(&self, shape: impl Into<Shape>) -> Result<TensorMut> {
        let zeros = TensorMut::zeros(shape, DType::F32, self.device)?;
        // Written, as a run's gradients are: the first write makes the pages.
        zero(&zeros)?;
        Ok(zeros)
    }

    /// Angles of `tokens` tokens, `pairs` each: any, for a rotation takes the same time by every one.
    pub(super) fn rotary_table(&self, tokens: usize, pairs: usize) -> Result<RotaryTable> {
        let angles = RngStream::new(0).named("angles").normals(0..(tokens * pairs) as u64, 1.0);
        let table = |f: fn(f32) -> f32| {
            let values: Vec<f32> = angles.iter().map(|&angle| f(angle)).collect();
            Tensor::from_vec(values, (tokens, pairs), self.device)
        };
        Ok(RotaryTable { cos: table(f32::cos)?, sin: table(f32::sin)? })
    }

    /// The first of the values that `draw` gives, over and over.
    fn filled(
        &self,
        dtype: DType,
        shape: Shape,
        draw: impl Fn(RngStream, u64) -> Vec<f32>,
    ) -> Result<TensorMut> {
        let count = shape.elem_count();
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

/// Sets of inputs, taken in turn.
pub(super) struct Rotation<T> {
    items: Vec<T>,
    at: Cell<usize>,
}

impl<T> Rotation<T> {
    /// The next set.
    ///
    /// # Errors
    /// There is none at all.
    pub(super) fn next(&self) -> Result<&T> {
        let at = self.at.get();
        self.at.set((at + 1) % self.items.len().max(1));
        self.items.get(at).ok_or_else(|| Error::internal("an op is measured on no inputs"))
    }
}

/// `count` token ids below `vocab`, others for each `set`.
pub(super) fn token_ids(count: usize, vocab: usize, set: usize) -> Vec<u32> {
    let stream = RngStream::new(set as u64).named("ids");
    (0..count as u64).map(|i| (stream.bits(i) % vocab as u64) as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_come_in_turn_and_are_as_many_as_no_cache_holds() -> Result<()> {
        let inputs = |work| BenchInputs::new(&Device::Cpu, DType::BF16, work);
        let taken = |work| -> Result<Vec<usize>> {
            let sets = inputs(work).sets(Ok)?;
            (0..5).map(|_| sets.next().copied()).collect()
        };
        assert_eq!(taken(OpWork::Bytes(100 << 20))?, [0, 1, 2, 0, 1]);
        assert_eq!(taken(OpWork::Bytes(1 << 30))?, [0; 5]);
        assert_eq!(taken(OpWork::Flops(1))?, [0; 5]);
        assert_eq!(inputs(OpWork::Bytes(1)).sets, 16);
        Ok(())
    }

    /// Of an input with more values than are drawn, all are written, the last ones too.
    #[test]
    fn a_large_input_repeats_its_values() -> Result<()> {
        let inputs = BenchInputs::new(&Device::Cpu, DType::BF16, OpWork::Flops(1));
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
