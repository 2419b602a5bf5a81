//! Dropout with a mask computed from (stream, token, column): recomputation, resume and any split
//! of a batch reproduce it without a stored mask. `y = x · keep / (1 − p)`; the backward is the
//! same operation on the gradient.

pub(super) mod cases;
mod cuda;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use crate::backends::gpu;
use crate::error::Result;
use crate::rounding::Rounded;
use crate::runtime::copy::to_device;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, tensor, unwritten, with_elem};
use crate::runtime::deferred::issue_deferred;
use crate::runtime::rng::RngStream;
use crate::runtime::trace::{SpanInfo, span};

/// One dropout site in one step.
#[derive(Debug, Clone, Copy)]
pub struct Dropout {
    /// Probability that a value is zeroed, in [0, 1).
    pub p: f32,
    /// Random stream, named by (seed, step, layer, site).
    pub stream: RngStream,
    /// Index of the first row's token in the step's global batch.
    pub first_token: u64,
}

/// Zeroes elements of `x: [N, D]` by the mask of `site` and scales the others up: returns `[N, D]`
/// in the same dtype.
///
/// # Errors
/// Fails if `x` is not a contiguous matrix of floating-point values, or an operation of the device
/// fails.
pub fn dropout(x: &Tensor, site: Dropout) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("dropout").dims(x.dims()).moves(&[x, x]));
    if let Some(driver) = gpu::driver_of(x)
        && gpu::is_float(x.dtype())
    {
        return cuda::dropout(driver, x, site);
    }
    issue_deferred()?;
    let (rows, width) = dims2(x)?;
    if !x.device().is_cpu() {
        let mut mask = vec![0f32; rows * width];
        mask.par_chunks_mut(width).enumerate().for_each(|(n, row)| mask_row(row, site, n));
        let mask = to_device(&Tensor::from_vec(mask, (rows, width), &Device::Cpu)?, x.device())?;
        return Ok((x.to_dtype(DType::F32)? * mask)?.to_dtype(x.dtype())?);
    }
    with_elem!(x.dtype(), T => {
        let x = read::<T>(x)?;
        let mut y = unwritten::<T>(rows * width);
        y.par_chunks_mut(width).zip(x.par_chunks(width)).enumerate().with_min_len(8).for_each_init(
            || vec![0f32; width],
            |mask, (n, (y, x))| {
                mask_row(mask, site, n);
                for ((y, x), keep) in y.iter_mut().zip(x).zip(mask.iter()) {
                    *y = T::nearest(x.widen() * keep);
                }
            },
        );
        tensor(y, (rows, width))
    })
}

fn mask_row(row: &mut [f32], site: Dropout, n: usize) {
    let scale = 1.0 / (1.0 - site.p);
    let token = site.stream.part(site.first_token + n as u64);
    for (column, keep) in row.iter_mut().enumerate() {
        *keep = if token.uniform(column as u64) < site.p { 0.0 } else { scale };
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn the_mask_belongs_to_the_token_not_to_the_batch() -> Result<()> {
        let x = Tensor::ones((64, 100), DType::F32, &Device::Cpu)?;
        let site = Dropout { p: 0.3, stream: RngStream::new(1), first_token: 10 };
        let whole = dropout(&x, site)?.to_vec2::<f32>()?;
        let half = dropout(&x.narrow(0, 32, 32)?.contiguous()?, Dropout { first_token: 42, ..site })?;
        assert_eq!(half.to_vec2::<f32>()?, whole[32..]);
        let share = whole.iter().flatten().filter(|&&y| y > 0.0).count() as f64 / 6400.0;
        assert!((share - 0.7).abs() < 0.03, "{share}");
        assert!(whole.iter().flatten().all(|&y| y == 0.0 || y == 1.0 / (1.0 - 0.3f32)));
        Ok(())
    }
}
