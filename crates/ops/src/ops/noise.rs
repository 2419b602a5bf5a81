//! Uniform noise on the rows of a matrix, computed from (stream, token, column): recomputation,
//! resume and any split of a batch reproduce it. `y = x + bound · (2u − 1)` with u uniform in
//! [0, 1); the gradient of x is that of y. NEFTune (arXiv 2310.05914) adds it to embeddings.

pub(super) mod cases;
mod cuda;

use candle_core::Tensor;
use rayon::prelude::*;

use crate::backends::gpu;
use crate::error::{Error, Result};
use crate::rounding::Rounded;
use crate::runtime::copy::to_device;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, tensor, unwritten, with_elem};
use crate::runtime::deferred::issue_deferred;
use crate::runtime::rng::RngStream;
use crate::runtime::trace::{SpanInfo, span};

/// Noise of the tokens of a micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct Noise<'a> {
    /// The largest noise of each token, `[N]`.
    pub bounds: &'a [f32],
    /// Random stream, named by (seed, step).
    pub stream: RngStream,
    /// Index of the first row's token in the step's global batch.
    pub first_token: u64,
}

/// Adds `noise` to `x: [N, D]`: returns `[N, D]` in the same dtype.
///
/// # Errors
/// Fails if `x` is not a contiguous matrix of floating-point values with a bound for each row, or
/// an operation of the device fails.
pub fn add_noise(x: &Tensor, noise: Noise<'_>) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("add_noise").dims(x.dims()).moves(&[x, x]));
    let (rows, width) = dims2(x)?;
    if rows != noise.bounds.len() {
        return Err(Error::internal(format!("{rows} rows have {} bounds of noise", noise.bounds.len())));
    }
    if let Some(driver) = gpu::driver_of(x)
        && gpu::is_float(x.dtype())
    {
        return cuda::add_noise(driver, x, noise);
    }
    issue_deferred()?;
    if !x.device().is_cpu() {
        // candle has no such random numbers: the host computes them.
        let host = add_noise(&x.to_device(&candle_core::Device::Cpu)?, noise)?;
        return to_device(&host, x.device());
    }
    with_elem!(x.dtype(), T => {
        let x = read::<T>(x)?;
        let mut y = unwritten::<T>(rows * width);
        y.par_chunks_mut(width).zip(x.par_chunks(width)).enumerate().with_min_len(8).for_each(
            |(n, (y, x))| {
                let token = noise.stream.part(noise.first_token + n as u64);
                for (column, (y, x)) in y.iter_mut().zip(x).enumerate() {
                    let sign = 2.0 * token.uniform(column as u64) - 1.0;
                    *y = T::nearest(noise.bounds[n].mul_add(sign, x.widen()));
                }
            },
        );
        tensor(y, (rows, width))
    })
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn the_noise_belongs_to_the_token_and_stays_within_its_bound() -> Result<()> {
        let x = Tensor::zeros((64, 100), DType::F32, &Device::Cpu)?;
        let bounds: Vec<f32> = (0..64).map(|n| n as f32).collect();
        let noise = Noise { bounds: &bounds, stream: RngStream::new(1), first_token: 10 };
        let whole = add_noise(&x, noise)?.to_vec2::<f32>()?;
        let half = Noise { bounds: &bounds[32..], first_token: 42, ..noise };
        assert_eq!(add_noise(&x.narrow(0, 32, 32)?.contiguous()?, half)?.to_vec2::<f32>()?, whole[32..]);
        assert!(whole.iter().zip(&bounds).all(|(row, bound)| row.iter().all(|y| y.abs() <= *bound)));
        // Uniform: a mean of 0, and a mean square of a third of the bound's.
        let relative = |row: &[f32], bound: f32| row.iter().map(|y| f64::from(y / bound)).collect::<Vec<_>>();
        let all: Vec<f64> =
            whole.iter().zip(&bounds).skip(1).flat_map(|(row, b)| relative(row, *b)).collect();
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        let square = all.iter().map(|y| y * y).sum::<f64>() / all.len() as f64;
        assert!(mean.abs() < 0.03 && (square - 1.0 / 3.0).abs() < 0.02, "{mean} {square}");
        Ok(())
    }
}
