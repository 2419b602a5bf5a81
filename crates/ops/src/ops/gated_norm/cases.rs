//! Cases of the gated RMSNorm.

use super::{gated_rms_norm, gated_rms_norm_backward, reference, reference_backward};
use crate::error::Result;
use crate::ops::case::{CaseRunner, OpCase, TensorPair, Tolerance};
use crate::ops::matmul::{ColumnView, ColumnViewMut};
use crate::runtime::TensorMut;

const EPS: f64 = 1e-5;

/// The sizes of a case.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops) struct GatedNormCase {
    pub(in crate::ops) rows: usize,
    pub(in crate::ops) heads: usize,
    pub(in crate::ops) width: usize,
    /// Columns of the buffers of z and dz besides those of the gates.
    pub(in crate::ops) margin: usize,
    pub(in crate::ops) trained: bool,
    /// True if the weight is f32 beside bf16 activations.
    pub(in crate::ops) f32_weight: bool,
}

/// Returns the cases of norm and gradients.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = Vec::new();
    for (heads, width) in [(3, 64), (2, 37), (1, 128)] {
        for (trained, f32_weight) in [(true, false), (false, false), (true, true)] {
            let case = GatedNormCase { rows: 70, heads, width, margin: 13, trained, f32_weight };
            let extra = if trained { ", dweight" } else { "" };
            let kind = if f32_weight { ", f32 weight" } else { "" };
            cases.extend(case.cases(&format!("{heads} heads of {width}{extra}{kind}")));
        }
    }
    cases
}

impl GatedNormCase {
    /// Returns forward and backward.
    pub(in crate::ops) fn cases(self, what: &str) -> [OpCase; 2] {
        let of = |tolerance: Tolerance| if self.f32_weight { tolerance.only_bf16() } else { tolerance };
        [
            OpCase::new("gated_rms_norm", what, of(Tolerance::FORWARD), move |runner| self.forward(runner)),
            OpCase::new("gated_rms_norm_backward", what, of(Tolerance::BACKWARD), move |runner| {
                self.backward(runner)
            }),
        ]
    }

    fn gates(self, tensor: &TensorMut) -> ColumnView<'_> {
        ColumnView { tensor, start: self.margin / 2, len: self.heads * self.width }
    }

    fn inputs(self, runner: &CaseRunner<'_>) -> Result<[crate::ops::case::OpPair; 3]> {
        let width = self.heads * self.width;
        let x = runner.normal("x", (self.rows, width))?;
        let z = runner.normal("z", (self.rows, width + self.margin))?;
        let dtype = if self.f32_weight { candle_core::DType::F32 } else { runner.dtype };
        Ok([x, z, runner.normal_as(dtype, "w", self.width)?])
    }

    fn forward(self, runner: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let [x, z, w] = self.inputs(runner)?;
        let got = gated_rms_norm(&x.here, self.gates(&z.here), &w.here, EPS)?;
        Ok(vec![TensorPair::new(got, reference(&x.plain, self.gates(&z.plain), &w.plain, EPS)?)])
    }

    fn backward(self, runner: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let [x, z, w] = self.inputs(runner)?;
        let width = self.heads * self.width;
        let dy = runner.normal("dy", (self.rows, width))?;
        let dz = runner.normal("dz", (self.rows, width + self.margin))?;
        let dweight = runner.normal_f32("dweight", self.width)?;
        let trained = |grad| self.trained.then_some(grad);
        let to = |tensor| ColumnViewMut { tensor, start: self.margin - self.margin / 2, len: width };
        let (gates, dw) = (self.gates(&z.here), trained(&dweight.here));
        let got = gated_rms_norm_backward(&x.here, gates, &w.here, &dy.here, dw, EPS, to(&dz.here))?;
        let (gates, dw) = (self.gates(&z.plain), trained(&dweight.plain));
        let want = reference_backward(&x.plain, gates, &w.plain, &dy.plain, dw, EPS, to(&dz.plain))?;
        Ok(vec![TensorPair::new(got, want), dz.pair(), dweight.pair()])
    }
}
