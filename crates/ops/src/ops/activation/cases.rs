//! Cases of the activations without a gate.

use super::{PlainActivation, activate, activate_backward, reference, reference_backward};
use crate::ops::case::{OpCase, TensorPair, Tolerance};

/// Every activation, once.
pub(in crate::ops) const KINDS: [PlainActivation; 3] =
    [PlainActivation::Relu2, PlainActivation::Gelu, PlainActivation::GeluTanh];

/// Returns the cases of all activations.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = Vec::new();
    for activation in KINDS {
        for (spread, size) in [(1.0, "values about 1"), (20.0, "values about 20")] {
            cases.extend(shaped(&format!("{activation:?}, {size}"), activation, spread, (13, 37)));
        }
    }
    cases
}

/// Returns forward and backward of a matrix of this shape, times `spread`.
pub(in crate::ops) fn shaped(
    what: &str,
    activation: PlainActivation,
    spread: f64,
    shape: (usize, usize),
) -> [OpCase; 2] {
    [
        OpCase::new("activate", what, Tolerance::FORWARD, move |runner| {
            let x = runner.normal("x", shape)?.scaled(spread)?;
            Ok(vec![TensorPair::new(activate(&x.here, activation)?, reference(&x.plain, activation)?)])
        }),
        OpCase::new("activate_backward", what, Tolerance::BACKWARD, move |runner| {
            let x = runner.normal("x", shape)?.scaled(spread)?;
            let dh = runner.normal("dh", shape)?;
            let got = activate_backward(&x.here, &dh.here, activation)?;
            let want = reference_backward(&x.plain, &dh.plain, activation)?;
            let h = TensorPair::new(dh.here.into_tensor(), reference(&x.plain, activation)?);
            Ok(vec![TensorPair::new(got, want), h])
        }),
    ]
}
