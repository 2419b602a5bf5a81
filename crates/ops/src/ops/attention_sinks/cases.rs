//! Cases of the sinks of attention.

use candle_core::DType;

use super::{attention_sinks, attention_sinks_backward, reference, reference_backward};
use crate::error::Result;
use crate::ops::attention::AttentionOutput;
use crate::ops::case::{CaseRunner, OpCase, OpPair, TensorPair, Tolerance};

/// The sizes of a case.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops) struct SinksCase {
    pub(in crate::ops) rows: usize,
    pub(in crate::ops) heads: usize,
    pub(in crate::ops) width: usize,
    /// True if the sinks are f32 beside bf16 activations.
    pub(in crate::ops) f32_sinks: bool,
}

/// Returns the cases of output and gradient.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = Vec::new();
    for (rows, heads, width) in [(70, 3, 64), (9, 10, 37)] {
        for f32_sinks in [false, true] {
            let kind = if f32_sinks { ", f32 sinks" } else { "" };
            let case = SinksCase { rows, heads, width, f32_sinks };
            cases.extend(case.cases(&format!("{heads} heads of {width}{kind}")));
        }
    }
    cases
}

impl SinksCase {
    /// Returns forward and backward.
    pub(in crate::ops) fn cases(self, what: &str) -> [OpCase; 2] {
        let of = |tolerance: Tolerance| if self.f32_sinks { tolerance.only_bf16() } else { tolerance };
        [
            OpCase::new("attention_sinks", what, of(Tolerance::FORWARD), move |runner| self.forward(runner)),
            OpCase::new("attention_sinks_backward", what, of(Tolerance::BACKWARD), move |runner| {
                self.backward(runner)
            }),
        ]
    }

    fn inputs(self, runner: &CaseRunner<'_>) -> Result<[OpPair; 3]> {
        let out = runner.normal("out", (self.rows, self.heads * self.width))?;
        let lse = runner.normal_f32("lse", (self.heads, self.rows))?.scaled(3.0)?;
        let dtype = if self.f32_sinks { DType::F32 } else { runner.dtype };
        Ok([out, lse, runner.normal_as(dtype, "sinks", self.heads)?])
    }

    fn forward(self, runner: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let [out, lse, sinks] = self.inputs(runner)?;
        let plain = AttentionOutput { out: out.plain.copy()?, lse: lse.plain.copy()? };
        let want = reference(&plain, &sinks.plain)?;
        let here = AttentionOutput { out: out.here.into_tensor(), lse: lse.here.into_tensor() };
        let got = attention_sinks(here, &sinks.here)?;
        Ok(vec![TensorPair::new(got.out, want.out), TensorPair::new(got.lse, want.lse)])
    }

    fn backward(self, runner: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let [out, lse, sinks] = self.inputs(runner)?;
        let dout = runner.normal("dout", (self.rows, self.heads * self.width))?;
        let dsinks = runner.normal_f32("dsinks", self.heads)?;
        let plain = AttentionOutput { out: out.plain.copy()?, lse: lse.plain.copy()? };
        let AttentionOutput { out, lse } = reference(&plain, &sinks.plain)?;
        // Both sides read the output as rounded to the dtype of the case.
        let rounded = out.to_dtype(runner.dtype)?;
        let plain = AttentionOutput { out: rounded.to_dtype(out.dtype())?, lse };
        let here = AttentionOutput {
            out: rounded.to_device(runner.device)?,
            lse: plain.lse.to_device(runner.device)?,
        };
        attention_sinks_backward(&here, &dout.here, &sinks.here, &dsinks.here)?;
        reference_backward(&plain, &dout.plain, &sinks.plain, &dsinks.plain)?;
        Ok(vec![dsinks.pair()])
    }
}
