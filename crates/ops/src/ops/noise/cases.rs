//! Cases of noise.

use candle_core::{Device, Tensor};

use super::{Noise, add_noise};
use crate::error::Result;
use crate::ops::case::{OpCase, TensorPair, Tolerance};
use crate::runtime::rng::RngStream;

/// Returns the cases of noise by its width.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    [20, 64, 4100].into_iter().map(|width| shaped(format!("{width} wide"), (33, width))).collect()
}

/// Returns the case of a matrix of this shape, whose rows have different bounds.
pub(in crate::ops) fn shaped(what: String, (rows, width): (usize, usize)) -> OpCase {
    OpCase::new("add_noise", what, Tolerance::ROUNDED, move |runner| {
        let x = runner.normal("x", (rows, width))?;
        let bounds: Vec<f32> = (0..rows).map(|n| 0.5 + 0.1 * n as f32).collect();
        let noise = Noise { bounds: &bounds, stream: RngStream::new(3).named("noise"), first_token: 7 };
        let got = add_noise(&x.here, noise)?;
        let defined = defined(noise, width)?;
        Ok(vec![TensorPair::new(got, (&*x.plain + defined)?)])
    })
}

/// The definition of the noise: `bound · (2u − 1)` of (stream, token, column).
fn defined(noise: Noise<'_>, width: usize) -> Result<Tensor> {
    let rows = noise.bounds.len();
    let value = |i: usize| {
        let (row, column) = (i / width, (i % width) as u64);
        let uniform = noise.stream.part(noise.first_token + row as u64).uniform(column);
        noise.bounds[row] * (2.0 * uniform - 1.0)
    };
    Ok(Tensor::from_vec((0..rows * width).map(value).collect(), (rows, width), &Device::Cpu)?)
}
