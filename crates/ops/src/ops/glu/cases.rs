//! Cases of the gated activations.

use candle_core::Tensor;

use super::{Activation, glu, glu_backward, reference, reference_backward};
use crate::error::Result;
use crate::ops::case::{OpCase, TensorPair, Tolerance};

/// Returns the cases of all activations.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = Vec::new();
    let all = [Activation::Silu, Activation::GeluTanh, Activation::Sigmoid, Activation::ClampedSilu];
    for activation in all {
        for (spread, size) in [(1.0, "values about 1"), (20.0, "values about 20")] {
            cases.extend(shaped(&format!("{activation:?}, {size}"), activation, spread, (13, 37)));
        }
    }
    cases
}

/// Returns forward and backward of gates of this shape, times `spread`.
pub(in crate::ops) fn shaped(
    what: &str,
    activation: Activation,
    spread: f64,
    (rows, half): (usize, usize),
) -> [OpCase; 2] {
    [
        OpCase::new("glu", what, Tolerance::FORWARD, move |runner| {
            let x = runner.normal("gate_up", (rows, 2 * half))?.scaled(spread)?;
            let got = glu(&x.here, activation)?;
            Ok(vec![TensorPair::new(got, reference(&x.plain, activation)?)])
        }),
        OpCase::new("glu_backward", what, Tolerance::BACKWARD, move |runner| {
            let x = runner.normal("gate_up", (rows, 2 * half))?.scaled(spread)?;
            let dh = runner.normal("dh", (rows, half))?;
            let got = glu_backward(&x.here, &dh.here, activation)?;
            let want = reference_backward(&x.plain, &dh.plain, activation)?;
            let halves = |t: &Tensor, at| -> Result<Tensor> { Ok(t.narrow(1, at, half)?.contiguous()?) };
            let gradient =
                |at| -> Result<TensorPair> { Ok(TensorPair::new(halves(&got, at)?, halves(&want, at)?)) };
            let product = TensorPair::new(dh.here.into_tensor(), reference(&x.plain, activation)?);
            Ok(vec![gradient(0)?, gradient(half)?, product])
        }),
    ]
}
