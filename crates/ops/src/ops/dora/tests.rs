//! Norms against their values in f64, on the CPU and by the kernels: of random weights, and of
//! weights that the update cancels.

use candle_core::{DType, Device, Tensor};

use super::weight_norm;
use crate::error::Result;
use crate::ops::matmul_quantized::Weight;
use crate::runtime::rng::RngStream;

/// The scale of updates, which f32 rounds.
const SCALE: f64 = 0.7;

/// A weight `[out, in]` and an adapter on it, by their values.
struct Adapted {
    out: usize,
    width: usize,
    rank: usize,
    w: Tensor,
    a: Tensor,
    b: Tensor,
}

/// Returns the values of a tensor in f64.
fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
}

/// Returns values rounded to `dtype`, in memory that begins with `first` other values.
fn placed(values: &[f32], shape: (usize, usize), dtype: DType, first: usize) -> Result<Tensor> {
    let memory: Vec<f32> = vec![f32::NAN; first].into_iter().chain(values.iter().copied()).collect();
    let memory = Tensor::from_vec(memory, first + values.len(), &Device::Cpu)?.to_dtype(dtype)?;
    Ok(memory.narrow(0, first, values.len())?.reshape(shape)?)
}

impl Adapted {
    /// Draws an update as large as `update` times the weight. If it cancels the weight, only the
    /// rounding of the weight remains of every third row, and little of the next. Of w, a and b,
    /// `first` values of another tensor are before each in its memory.
    fn new(
        [out, width, rank]: [usize; 3],
        [weights, factors]: [DType; 2],
        (update, cancels): (f64, bool),
        first: [usize; 3],
    ) -> Result<Self> {
        let draw = |name: &str, count: usize, std: f64| {
            RngStream::new(3).named(name).normals(0..count as u64, std as f32)
        };
        let a = placed(&draw("a", rank * width, 1.0), (rank, width), factors, first[1])?;
        let std = update / (rank as f64).sqrt() / SCALE;
        let b = placed(&draw("b", out * rank, std), (out, rank), factors, first[2])?;
        let noise = draw("w", out * width, 1.0);
        let mut adapted = Adapted { out, width, rank, w: a.clone(), a, b };
        let updates = adapted.updates()?;
        let left = |row: usize| [0.0, 0.05 * update, 0.7 * update][row % 3];
        let of_weight = |i: usize| {
            let noise = f64::from(noise[i]);
            let value = if cancels { left(i / width) * noise - updates[i] } else { noise };
            value as f32
        };
        let w: Vec<f32> = (0..out * width).map(of_weight).collect();
        adapted.w = placed(&w, (out, width), weights, first[0])?;
        Ok(adapted)
    }

    /// Returns the values of `s · B · A` in f64.
    fn updates(&self) -> Result<Vec<f64>> {
        let (a, b) = (values(&self.a)?, values(&self.b)?);
        let update = |row: usize, column: usize| {
            let of = |k: usize| b[row * self.rank + k] * a[k * self.width + column];
            SCALE * (0..self.rank).map(of).sum::<f64>()
        };
        Ok((0..self.out * self.width).map(|i| update(i / self.width, i % self.width)).collect())
    }

    /// Returns the largest relative error of a norm.
    fn error(&self) -> Result<f64> {
        let norms = values(&weight_norm(Weight::Dense(&self.w), &self.a, &self.b, SCALE)?)?;
        assert_eq!(norms.len(), self.out);
        let sums: Vec<f64> = values(&self.w)?.iter().zip(self.updates()?).map(|(w, u)| w + u).collect();
        let wanted = sums.chunks_exact(self.width).map(|row| row.iter().map(|x| x * x).sum::<f64>().sqrt());
        let errors = norms.iter().zip(wanted).map(|(norm, wanted)| ((norm - wanted) / wanted).abs());
        // `f64::max` would drop a NaN.
        Ok(errors.fold(0.0, |largest, error| if error > largest || error.is_nan() { error } else { largest }))
    }
}

/// Sizes of updates relative to the weight, and whether they cancel it.
const UPDATES: [(f64, bool); 5] = [(0.05, false), (1.0, false), (30.0, false), (0.05, true), (1.0, true)];

/// Checks weights and factors of these dtypes; `first` as for [`Adapted::new`].
fn check(shape: [usize; 3], dtypes: [DType; 2], first: [usize; 3]) -> Result<()> {
    for update in UPDATES {
        let error = Adapted::new(shape, dtypes, update, first)?.error()?;
        assert!(error < 1e-6, "{shape:?}, {dtypes:?}, {update:?}, {first:?}: {error:e}");
    }
    Ok(())
}

#[test]
fn the_cpu_has_the_norms_of_f64() -> Result<()> {
    for shape in [[70, 40, 3], [37, 520, 16], [5, 1500, 64]] {
        for weights in [DType::F32, DType::BF16] {
            check(shape, [weights, DType::F32], [0; 3])?;
        }
    }
    Ok(())
}

#[cfg(feature = "kernel-emu")]
mod emulated {
    use super::*;
    use crate::backends::gpu::emulator::{Emulator, EmulatorSchedule, Order};

    const BF16: [DType; 2] = [DType::BF16; 2];

    /// Checks the kernel of these dtypes under two schedules, and that a norm takes one launch.
    fn check_kernel(shape: [usize; 3], dtypes: [DType; 2], first: [usize; 3], kernel: &str) -> Result<()> {
        for (order, late_copies) in [(Order::Forward, false), (Order::Shuffled(5), true)] {
            let schedule = EmulatorSchedule { order, late_copies, counts: false };
            Emulator::run(schedule, || check(shape, dtypes, first)).0?;
            assert_eq!(Emulator::launched().into_iter().collect::<Vec<_>>(), [kernel]);
        }
        Ok(())
    }

    /// Rows and ranks that are not a multiple of a tile, and more columns than a block takes at
    /// once.
    #[test]
    fn tensor_cores_have_the_norms_of_f64() -> Result<()> {
        for shape in [[16, 64, 16], [37, 520, 16], [33, 72, 6], [20, 136, 40], [3, 8, 2]] {
            check_kernel(shape, BF16, [0; 3], "dora_norms_bf16_bf16")?;
        }
        Ok(())
    }

    /// Rows, ranks or addresses that do not allow accesses of 16 bytes.
    #[test]
    fn rows_that_are_not_aligned_have_the_norms_of_f64() -> Result<()> {
        for shape in [[17, 70, 4], [18, 64, 3], [1, 4, 1]] {
            check_kernel(shape, BF16, [0; 3], "dora_norms_bf16_bf16")?;
        }
        for first in [[1, 0, 0], [0, 1, 0], [0, 0, 1]] {
            check_kernel([17, 64, 4], BF16, first, "dora_norms_bf16_bf16")?;
        }
        Ok(())
    }

    #[test]
    fn factors_in_f32_have_the_norms_of_f64() -> Result<()> {
        for (shape, first) in [([18, 70, 3], [1; 3]), ([5, 300, 16], [0; 3])] {
            check_kernel(shape, [DType::BF16, DType::F32], first, "dora_norms_bf16_f32")?;
            check_kernel(shape, [DType::F32, DType::F32], first, "dora_norms_f32_f32")?;
        }
        Ok(())
    }
}
