//! Cases of dropout.

use candle_core::{Device, Tensor};

use super::{Dropout, dropout};
use crate::error::Result;
use crate::ops::case::{OpCase, TensorPair, Tolerance};
use crate::runtime::rng::RngStream;

/// Returns the cases of dropout by its probability.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    [0.0, 0.1, 0.5].into_iter().map(|p| shaped(format!("p = {p}"), p, (33, 20))).collect()
}

/// Returns the case of a matrix of this shape.
pub(in crate::ops) fn shaped(what: String, p: f32, (rows, width): (usize, usize)) -> OpCase {
    OpCase::new("dropout", what, Tolerance::ROUNDED, move |runner| {
        let x = runner.normal("x", (rows, width))?;
        let site = Dropout { p, stream: RngStream::new(3).named("dropout"), first_token: 7 };
        let got = dropout(&x.here, site)?;
        let mask = mask(site, rows, width)?;
        Ok(vec![TensorPair::new(got, (&*x.plain * mask)?)])
    })
}

/// The definition of the mask: `keep / (1 − p)` of (stream, token, column).
fn mask(site: Dropout, rows: usize, width: usize) -> Result<Tensor> {
    let keep = |i: usize| {
        let (row, column) = ((i / width) as u64, (i % width) as u64);
        let dropped = site.stream.part(site.first_token + row).uniform(column) < site.p;
        if dropped { 0.0 } else { 1.0 / (1.0 - site.p) }
    };
    Ok(Tensor::from_vec((0..rows * width).map(keep).collect(), (rows, width), &Device::Cpu)?)
}
