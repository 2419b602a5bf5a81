//! Cases of xIELU.

use candle_core::{Device, Tensor};

use super::{reference, reference_backward, xielu, xielu_backward};
use crate::error::Result;
use crate::ops::case::{OpCase, TensorPair, Tolerance};
use crate::runtime::copy::to_device;

/// The curvatures, the slope at 0 and the bound of the exponent of a curve.
pub(in crate::ops) const CURVE: [f32; 4] = [0.8, 1.3, 0.5, -1e-6];

/// Returns a curve on `device`, `[4]`.
pub(in crate::ops) fn curve(device: &Device) -> Result<Tensor> {
    to_device(&Tensor::new(&CURVE, &Device::Cpu)?, device)
}

/// Returns the cases of xIELU.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = Vec::new();
    for (spread, size) in [(0.05, "values about 0.05"), (1.0, "values about 1"), (20.0, "values about 20")] {
        for (trained, shape) in [(true, (13, 37)), (false, (5, 64))] {
            let what = format!("{size}{}", if trained { ", trained" } else { "" });
            cases.extend(shaped(&what, spread, shape, trained));
        }
    }
    cases
}

/// Returns forward and backward of a matrix of this shape, times `spread`.
pub(in crate::ops) fn shaped(what: &str, spread: f64, shape: (usize, usize), trained: bool) -> [OpCase; 2] {
    [
        OpCase::new("xielu", what, Tolerance::FORWARD, move |runner| {
            let x = runner.normal("x", shape)?.scaled(spread)?;
            let got = xielu(&x.here, &curve(x.here.device())?)?;
            Ok(vec![TensorPair::new(got, reference(&x.plain, &curve(x.plain.device())?)?)])
        }),
        OpCase::new("xielu_backward", what, Tolerance::BACKWARD, move |runner| {
            let x = runner.normal("x", shape)?.scaled(spread)?;
            let (dh, dcurve) = (runner.normal("dh", shape)?, runner.normal_f32("dcurve", 2)?);
            let (here, plain) = (curve(x.here.device())?, curve(x.plain.device())?);
            let got = xielu_backward(&x.here, &dh.here, &here, trained.then_some(&dcurve.here))?;
            let want = reference_backward(&x.plain, &dh.plain, &plain, trained.then_some(&dcurve.plain))?;
            let h = TensorPair::new(dh.here.into_tensor(), reference(&x.plain, &plain)?);
            Ok(vec![TensorPair::new(got, want), h, dcurve.pair()])
        }),
    ]
}
