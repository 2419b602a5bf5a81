//! Cases of the root-mean-square norm.

use super::{NormKind, reference, reference_backward, rms_norm, rms_norm_backward};
use crate::error::Result;
use crate::ops::case::{CaseRunner, OpCase, OpPair, TensorPair, Tolerance};

/// Both kinds of weight, with another epsilon each.
pub(in crate::ops) const KINDS: [(NormKind, &str); 2] = [
    (NormKind { eps: 1e-6, unit_offset: false }, "weight"),
    (NormKind { eps: 1e-5, unit_offset: true }, "1 + weight"),
];

/// The cases of the norm and of its gradients.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = Vec::new();
    for (kind, name) in KINDS {
        // 37: not a multiple of the lanes.
        for width in [64, 37] {
            cases.push(OpCase::new(
                "rms_norm",
                format!("{name}, {width} wide"),
                Tolerance::FORWARD,
                move |runner| {
                    let (x, w) = (runner.normal("x", (19, width))?, runner.normal("w", width)?);
                    let got = rms_norm(&x.here, &w.here, kind)?;
                    Ok(vec![TensorPair::new(got, reference(&x.plain, &w.plain, kind)?)])
                },
            ));
            for (residual, dweight, extra) in [
                (false, false, ""),
                (true, false, ", residual"),
                (false, true, ", dweight"),
                (true, true, ", residual, dweight"),
            ] {
                let what = format!("{name}, {width} wide{extra}");
                cases.push(OpCase::new("rms_norm_backward", what, Tolerance::BACKWARD, move |runner| {
                    norm_backward(runner, kind, width, residual, dweight)
                }));
            }
        }
    }
    cases
}

fn norm_backward(
    runner: &CaseRunner<'_>,
    kind: NormKind,
    width: usize,
    residual: bool,
    dweight: bool,
) -> Result<Vec<TensorPair>> {
    let (x, w) = (runner.normal("x", (19, width))?, runner.normal("w", width)?);
    let dy = runner.normal("dy", (19, width))?;
    let around = residual.then(|| runner.normal("residual", (19, width))).transpose()?;
    let grad = dweight.then(|| runner.normal_f32("dweight", width)).transpose()?;
    let (here, plain) = (around.as_ref().map(|r| &*r.here), around.as_ref().map(|r| &*r.plain));
    let dw = (grad.as_ref().map(|g| &g.here), grad.as_ref().map(|g| &g.plain));
    let got = rms_norm_backward(&x.here, &w.here, &dy.here, here, dw.0, kind)?;
    let want = reference_backward(&x.plain, &w.plain, &dy.plain, plain, dw.1, kind)?;
    let mut pairs = vec![TensorPair::new(got, want)];
    pairs.extend(grad.map(OpPair::pair));
    Ok(pairs)
}
