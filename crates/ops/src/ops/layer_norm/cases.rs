//! Cases of LayerNorm.

use candle_core::Tensor;

use super::{LayerNorm, LayerNormGradients, layer_norm, layer_norm_backward, reference, reference_backward};
use crate::error::Result;
use crate::ops::case::{CaseRunner, OpCase, OpPair, TensorPair, Tolerance};
use crate::ops::empty;
use crate::ops::matmul::{ColumnView, sum_rows_reference};
use crate::ops::rms_norm::NormKind;

/// The shape and the optional arguments of a case.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops) struct LayerNormCase {
    pub(in crate::ops) rows: usize,
    pub(in crate::ops) width: usize,
    pub(in crate::ops) unit_offset: bool,
    pub(in crate::ops) bias: bool,
    pub(in crate::ops) residual: bool,
    pub(in crate::ops) grads: bool,
    pub(in crate::ops) normed: bool,
}

/// Returns the cases of the norm and of its gradients.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = Vec::new();
    // 37 is not a multiple of the lanes.
    for (width, unit_offset, bias) in
        [(64, false, true), (37, false, true), (64, true, false), (37, true, true)]
    {
        for (residual, grads, normed) in [(false, false, false), (true, true, false), (true, true, true)] {
            let case = LayerNormCase { rows: 19, width, unit_offset, bias, residual, grads, normed };
            let [forward, backward] = case.cases();
            cases.extend((!residual).then_some(forward).into_iter().chain([backward]));
        }
    }
    cases
}

impl LayerNormCase {
    /// Returns the case of the norm, and that of its gradients.
    pub(in crate::ops) fn cases(self) -> [OpCase; 2] {
        let with = |has: bool, what| if has { what } else { "" };
        let what = format!(
            "{} wide{}{}",
            self.width,
            with(self.unit_offset, ", 1 + weight"),
            with(self.bias, ", bias")
        );
        let extras = [(self.residual, ", residual"), (self.grads, ", gradients"), (self.normed, ", normed")];
        let extras: String = extras.iter().map(|(has, what)| with(*has, what)).collect();
        [
            OpCase::new("layer_norm", what.clone(), Tolerance::FORWARD, move |runner| {
                let inputs = Inputs::new(self, runner)?;
                let got = layer_norm(&inputs.x.here, inputs.here())?;
                Ok(vec![TensorPair::new(got, reference(&inputs.x.plain, inputs.plain())?)])
            }),
            OpCase::new("layer_norm_backward", what + &extras, Tolerance::BACKWARD, move |runner| {
                self.backward(runner)
            }),
        ]
    }

    fn backward(self, runner: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let (shape, width) = ((self.rows, self.width), self.width);
        let inputs = Inputs::new(self, runner)?;
        let (x, dy) = (&inputs.x, runner.normal("dy", shape)?);
        let around = self.residual.then(|| runner.normal("residual", shape)).transpose()?;
        let grad = |name| self.grads.then(|| runner.normal_f32(name, width)).transpose();
        let (dweight, dbias) = (grad("dweight")?, grad("dbias")?);
        let like = |x: &Tensor| empty(self.rows, width, x.dtype(), x.device());
        let normed = self.normed.then(|| like(&x.here)).transpose()?;
        let grads = LayerNormGradients {
            weight: dweight.as_ref().map(|grad| &grad.here),
            bias: dbias.as_ref().map(|grad| &grad.here),
        };
        let residual = around.as_ref().map(|around| &*around.here);
        let got = layer_norm_backward(&x.here, inputs.here(), &dy.here, residual, grads, normed.as_ref())?;
        let residual = around.as_ref().map(|around| &*around.plain);
        let dweight_of_reference = dweight.as_ref().map(|grad| &grad.plain);
        let want = reference_backward(&x.plain, inputs.plain(), &dy.plain, residual, dweight_of_reference)?;
        if let Some(dbias) = &dbias {
            sum_rows_reference(&dbias.plain, ColumnView::all(&dy.plain))?;
        }
        let mut pairs = vec![TensorPair::new(got, want)];
        if let Some(normed) = normed {
            pairs.push(TensorPair::new(normed.into_tensor(), reference(&x.plain, inputs.plain())?));
        }
        pairs.extend([dweight, dbias].into_iter().flatten().map(OpPair::pair));
        Ok(pairs)
    }
}

/// The inputs of a case on the device and of its reference.
struct Inputs {
    x: OpPair,
    weight: OpPair,
    bias: Option<OpPair>,
    kind: NormKind,
}

impl Inputs {
    fn new(case: LayerNormCase, runner: &CaseRunner<'_>) -> Result<Self> {
        Ok(Inputs {
            x: runner.normal("x", (case.rows, case.width))?,
            weight: runner.normal("w", case.width)?,
            bias: case.bias.then(|| runner.normal("b", case.width)).transpose()?,
            kind: NormKind { eps: 1e-5, unit_offset: case.unit_offset },
        })
    }

    fn here(&self) -> LayerNorm<'_> {
        let bias = self.bias.as_ref().map(|bias| &*bias.here);
        LayerNorm { weight: &self.weight.here, bias, kind: self.kind }
    }

    fn plain(&self) -> LayerNorm<'_> {
        let bias = self.bias.as_ref().map(|bias| &*bias.plain);
        LayerNorm { weight: &self.weight.plain, bias, kind: self.kind }
    }
}
