//! Cases of the gated activations.

use candle_core::Tensor;

use super::{Activation, glu, glu_backward, reference, reference_backward};
use crate::error::Result;
use crate::ops::case::{OpCase, TensorPair, Tolerance};

/// The cases of both activations.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = Vec::new();
    for activation in [Activation::Silu, Activation::GeluTanh] {
        for (spread, size) in [(1.0, "values about 1"), (20.0, "values about 20")] {
            let what = format!("{activation:?}, {size}");
            cases.push(OpCase::new("glu", &what, Tolerance::FORWARD, move |runner| {
                let x = runner.normal("gate_up", (13, 2 * 37))?.scaled(spread)?;
                let got = glu(&x.here, activation)?;
                Ok(vec![TensorPair::new(got, reference(&x.plain, activation)?)])
            }));
            cases.push(OpCase::new("glu_backward", &what, Tolerance::BACKWARD, move |runner| {
                let x = runner.normal("gate_up", (13, 2 * 37))?.scaled(spread)?;
                let dh = runner.normal("dh", (13, 37))?;
                let got = glu_backward(&x.here, &dh.here, activation)?;
                let want = reference_backward(&x.plain, &dh.plain, activation)?;
                let halves = |t: &Tensor, at| -> Result<Tensor> { Ok(t.narrow(1, at, 37)?.contiguous()?) };
                [0, 37]
                    .map(|at| Ok(TensorPair::new(halves(&got, at)?, halves(&want, at)?)))
                    .into_iter()
                    .collect()
            }));
        }
    }
    cases
}
