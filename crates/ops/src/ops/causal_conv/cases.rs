//! Cases of the causal convolution.

use super::{ConvWeight, causal_conv, causal_conv_backward, reference, reference_backward};
use crate::error::Result;
use crate::ops::attention::Span;
use crate::ops::case::{CaseRunner, OpCase, OpPair, TensorPair, Tolerance};
use crate::ops::matmul::{ColumnView, ColumnViewMut};

/// The sizes of a case.
#[derive(Debug, Clone)]
pub(in crate::ops) struct ConvCase {
    /// Tokens of each sequence.
    pub(in crate::ops) lengths: Vec<usize>,
    /// Rows outside all sequences, after each of them.
    pub(in crate::ops) gap: usize,
    pub(in crate::ops) channels: usize,
    pub(in crate::ops) taps: usize,
    /// Columns of the buffers besides the channels.
    pub(in crate::ops) margin: usize,
    pub(in crate::ops) trained: bool,
    pub(in crate::ops) has_silu: bool,
}

/// Returns sequences of these lengths, with a gap of rows after each.
pub(in crate::ops) fn packed(lengths: &[usize], gap: usize) -> Vec<Span> {
    let starts = lengths.iter().scan(0, |end, len| {
        *end += len + gap;
        Some(*end - len - gap)
    });
    starts.zip(lengths).map(|(start, len)| Span::sequence(start, *len)).collect()
}

/// Returns the cases of packed sequences and of a generation.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = Vec::new();
    for (lengths, gap, channels, taps, trained, has_silu) in [
        (&[1usize, 70, 3, 2][..], 0, 40, 4, true, true),
        (&[150], 0, 520, 4, true, true),
        (&[5, 66], 2, 37, 2, false, true),
        (&[9, 1], 4, 24, 4, true, true),
        (&[2, 71, 1], 1, 33, 3, true, false),
        (&[80, 5], 0, 36, 4, true, false),
    ] {
        let case = ConvCase { lengths: lengths.to_vec(), gap, channels, taps, margin: 11, trained, has_silu };
        let silu = if has_silu { "" } else { ", without SiLU" };
        cases.extend(case.cases(&format!("rows of {lengths:?}, {channels} channels, {taps} taps{silu}")));
    }
    cases
}

impl ConvCase {
    /// Returns forward, generation and backward.
    pub(in crate::ops) fn cases(self, what: &str) -> [OpCase; 3] {
        let (forward, generation, backward) = (self.clone(), self.clone(), self);
        [
            OpCase::new("causal_conv", what, Tolerance::FORWARD, move |runner| forward.forward(runner)),
            OpCase::new("causal_conv", format!("{what}, state"), Tolerance::FORWARD, move |runner| {
                generation.generation(runner)
            }),
            OpCase::new("causal_conv_backward", what, Tolerance::BACKWARD, move |runner| {
                backward.backward(runner)
            }),
        ]
    }

    fn rows(&self) -> usize {
        self.lengths.iter().map(|len| len + self.gap).sum()
    }

    fn inputs(&self, runner: &CaseRunner<'_>) -> Result<[OpPair; 2]> {
        let x = runner.normal("x", (self.rows(), self.channels + self.margin))?;
        Ok([x, runner.normal("w", (self.channels, self.taps))?])
    }

    fn view<'a>(&self, tensor: &'a candle_core::Tensor) -> ColumnView<'a> {
        ColumnView { tensor, start: self.margin / 2, len: self.channels }
    }

    fn conv<'a>(&self, weight: &'a candle_core::Tensor) -> ConvWeight<'a> {
        ConvWeight { weight, has_silu: self.has_silu }
    }

    fn forward(&self, runner: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let ([x, w], spans) = (self.inputs(runner)?, packed(&self.lengths, self.gap));
        let got = causal_conv(self.view(&x.here), self.conv(&w.here), &spans, None)?;
        Ok(vec![TensorPair::new(got, reference(self.view(&x.plain), self.conv(&w.plain), &spans, None)?)])
    }

    fn generation(&self, runner: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let ([x, w], spans) = (self.inputs(runner)?, packed(&[self.rows()], 0));
        let state = runner.normal("state", (self.taps - 1, self.channels))?;
        let got = causal_conv(self.view(&x.here), self.conv(&w.here), &spans, Some(&state.here))?;
        let want = reference(self.view(&x.plain), self.conv(&w.plain), &spans, Some(&state.plain))?;
        Ok(vec![TensorPair::new(got, want), state.pair()])
    }

    fn backward(&self, runner: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let ([x, w], spans) = (self.inputs(runner)?, packed(&self.lengths, self.gap));
        let dy = runner.normal("dy", (self.rows(), self.channels))?;
        let dx = runner.normal("dx", (self.rows(), self.channels + self.margin))?;
        let dweight = runner.normal_f32("dweight", (self.channels, self.taps))?;
        let trained = |grad| self.trained.then_some(grad);
        let to = |tensor| ColumnViewMut { tensor, start: self.margin - self.margin / 2, len: self.channels };
        let (view, dw) = (self.view(&x.here), trained(&dweight.here));
        causal_conv_backward(view, self.conv(&w.here), &dy.here, &spans, dw, to(&dx.here))?;
        let (view, dw) = (self.view(&x.plain), trained(&dweight.plain));
        reference_backward(view, self.conv(&w.plain), &dy.plain, &spans, dw, to(&dx.plain))?;
        Ok(vec![dx.pair(), dweight.pair()])
    }
}
