//! Cases of RMSNorm.

use candle_core::Tensor;

use super::{NormKind, reference, reference_backward, rms_norm, rms_norm_backward};
use crate::error::Result;
use crate::ops::case::{CaseRunner, OpCase, OpPair, TensorPair, Tolerance};
use crate::ops::empty;

/// Both kinds of weight, each with a different epsilon.
pub(in crate::ops) const KINDS: [(NormKind, &str); 2] = [
    (NormKind { eps: 1e-6, unit_offset: false }, "weight"),
    (NormKind { eps: 1e-5, unit_offset: true }, "1 + weight"),
];

/// The optional arguments of a backward.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::ops) struct Extras {
    pub(in crate::ops) residual: bool,
    pub(in crate::ops) dweight: bool,
    pub(in crate::ops) normed: bool,
}

/// Returns the cases of the norm and of its gradients.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = Vec::new();
    for (kind, name) in KINDS {
        // 37 is not a multiple of the lanes.
        for width in [64, 37] {
            cases.push(forward_case(format!("{name}, {width} wide"), kind, (19, width)));
            for ([residual, dweight, normed], extra) in [
                ([false, false, false], ""),
                ([true, false, false], ", residual"),
                ([false, true, false], ", dweight"),
                ([true, false, true], ", residual, normed"),
                ([true, true, true], ", residual, dweight, normed"),
            ] {
                let what = format!("{name}, {width} wide{extra}");
                cases.push(backward_case(what, kind, (19, width), Extras { residual, dweight, normed }));
            }
        }
    }
    cases
}

/// Returns the case of the norm of a matrix of this shape.
pub(in crate::ops) fn forward_case(what: String, kind: NormKind, shape: (usize, usize)) -> OpCase {
    OpCase::new("rms_norm", what, Tolerance::FORWARD, move |runner| {
        let (x, w) = (runner.normal("x", shape)?, runner.normal("w", shape.1)?);
        let got = rms_norm(&x.here, &w.here, kind)?;
        Ok(vec![TensorPair::new(got, reference(&x.plain, &w.plain, kind)?)])
    })
}

/// Returns the case of its gradients.
pub(in crate::ops) fn backward_case(
    what: String,
    kind: NormKind,
    shape: (usize, usize),
    extras: Extras,
) -> OpCase {
    OpCase::new("rms_norm_backward", what, Tolerance::BACKWARD, move |runner| {
        norm_backward(runner, kind, shape, extras)
    })
}

fn norm_backward(
    runner: &CaseRunner<'_>,
    kind: NormKind,
    shape: (usize, usize),
    Extras { residual, dweight, normed }: Extras,
) -> Result<Vec<TensorPair>> {
    let width = shape.1;
    let (x, w) = (runner.normal("x", shape)?, runner.normal("w", width)?);
    let dy = runner.normal("dy", shape)?;
    let around = residual.then(|| runner.normal("residual", shape)).transpose()?;
    let grad = dweight.then(|| runner.normal_f32("dweight", width)).transpose()?;
    let (here, plain) = (around.as_ref().map(|r| &*r.here), around.as_ref().map(|r| &*r.plain));
    let dw = (grad.as_ref().map(|g| &g.here), grad.as_ref().map(|g| &g.plain));
    let like = |x: &Tensor| empty(shape.0, width, x.dtype(), x.device());
    let normed = normed.then(|| like(&x.here)).transpose()?;
    let got = rms_norm_backward(&x.here, &w.here, &dy.here, here, dw.0, normed.as_ref(), kind)?;
    let want = reference_backward(&x.plain, &w.plain, &dy.plain, plain, dw.1, kind)?;
    let mut pairs = vec![TensorPair::new(got, want)];
    if let Some(normed) = normed {
        pairs.push(TensorPair::new(normed.into_tensor(), reference(&x.plain, &w.plain, kind)?));
    }
    pairs.extend(grad.map(OpPair::pair));
    Ok(pairs)
}
