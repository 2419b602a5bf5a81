//! Cases of the gated delta rule.

use candle_core::{DType, Tensor};

use super::{
    DeltaHeads, DeltaInputs, DeltaOutput, DeltaParamGrads, GateGrads, gated_delta, gated_delta_backward,
    reference, reference_backward,
};
use crate::error::Result;
use crate::ops::case::{CaseRunner, OpCase, OpPair, TensorPair, Tolerance};
use crate::ops::causal_conv::cases::packed;
use crate::ops::matmul::{ColumnView, ColumnViewMut};

/// The sizes of a case.
#[derive(Debug, Clone)]
pub(in crate::ops) struct DeltaCase {
    pub(in crate::ops) heads: DeltaHeads,
    /// Tokens of each sequence.
    pub(in crate::ops) lengths: Vec<usize>,
    /// Rows outside all sequences, after each of them.
    pub(in crate::ops) gap: usize,
    pub(in crate::ops) trained: bool,
}

/// Returns the cases of packed sequences and of a generation.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = Vec::new();
    let heads = |num_key_heads, num_value_heads, key_dim, value_dim| DeltaHeads {
        num_key_heads,
        num_value_heads,
        key_dim,
        value_dim,
    };
    for (heads, lengths, gap, trained) in [
        (heads(2, 4, 16, 24), &[1usize, 70, 3, 64][..], 0, true),
        (heads(1, 3, 20, 8), &[130], 0, true),
        (heads(1, 2, 64, 64), &[65, 12], 3, false),
    ] {
        let DeltaHeads { num_key_heads: k, num_value_heads: v, key_dim, value_dim } = heads;
        let what = format!("rows of {lengths:?}, {k}/{v} heads of {key_dim}/{value_dim}");
        cases.extend(DeltaCase { heads, lengths: lengths.to_vec(), gap, trained }.cases(&what));
    }
    cases
}

/// The inputs of a case.
struct DeltaPairs {
    qkv: OpPair,
    /// Columns of b, then of a, with one more column around each.
    gates: OpPair,
    a_log: OpPair,
    dt_bias: OpPair,
}

impl DeltaPairs {
    fn new(runner: &CaseRunner<'_>, heads: DeltaHeads, rows: usize) -> Result<Self> {
        let values = heads.num_value_heads;
        // From states that live for a thousand tokens to those that live for one.
        let rates = (0..values).map(|h| 1.0 - 7.0 * h as f32 / values as f32).collect();
        Ok(DeltaPairs {
            qkv: runner.normal("qkv", (rows, heads.conv_width()))?,
            gates: runner.normal("gates", (rows, 2 * values + 3))?,
            a_log: runner.twin(DType::F32, rates, values)?,
            dt_bias: runner.normal("dt_bias", values)?,
        })
    }

    fn inputs(&self, of: fn(&OpPair) -> &Tensor) -> DeltaInputs<'_> {
        let values = of(&self.a_log).elem_count();
        let columns = |start| ColumnView { tensor: of(&self.gates), start, len: values };
        DeltaInputs {
            qkv: of(&self.qkv),
            a: columns(values + 2),
            b: columns(1),
            a_log: of(&self.a_log),
            dt_bias: of(&self.dt_bias),
        }
    }

    fn here(&self) -> DeltaInputs<'_> {
        self.inputs(|pair| &pair.here)
    }

    fn plain(&self) -> DeltaInputs<'_> {
        self.inputs(|pair| &pair.plain)
    }
}

impl DeltaCase {
    /// Returns forward, generation and backward.
    pub(in crate::ops) fn cases(self, what: &str) -> [OpCase; 3] {
        let (forward, generation, backward) = (self.clone(), self.clone(), self);
        [
            OpCase::new("gated_delta", what, Tolerance::FORWARD, move |runner| forward.forward(runner)),
            OpCase::new("gated_delta", format!("{what}, state"), Tolerance::FORWARD, move |runner| {
                generation.generation(runner)
            }),
            OpCase::new("gated_delta_backward", what, Tolerance::BACKWARD, move |runner| {
                backward.backward(runner)
            }),
        ]
    }

    fn rows(&self) -> usize {
        self.lengths.iter().map(|len| len + self.gap).sum()
    }

    fn forward(&self, runner: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let (pairs, spans) =
            (DeltaPairs::new(runner, self.heads, self.rows())?, packed(&self.lengths, self.gap));
        let got = gated_delta(pairs.here(), self.heads, &spans, None)?;
        let want = reference(pairs.plain(), self.heads, &spans, None)?;
        Ok(vec![TensorPair::new(got.out, want.out), TensorPair::new(got.states, want.states)])
    }

    fn generation(&self, runner: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let DeltaHeads { num_value_heads, key_dim, value_dim, .. } = self.heads;
        let (pairs, spans) = (DeltaPairs::new(runner, self.heads, self.rows())?, packed(&[self.rows()], 0));
        let state = runner.normal_f32("state", (num_value_heads, key_dim, value_dim))?;
        let got = gated_delta(pairs.here(), self.heads, &spans, Some(&state.here))?;
        let want = reference(pairs.plain(), self.heads, &spans, Some(&state.plain))?;
        Ok(vec![TensorPair::new(got.out, want.out), state.pair()])
    }

    fn backward(&self, runner: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let (heads, values) = (self.heads, self.heads.num_value_heads);
        let (pairs, spans) = (DeltaPairs::new(runner, heads, self.rows())?, packed(&self.lengths, self.gap));
        let dout = runner.normal("dout", (self.rows(), heads.value_width()))?;
        let dgates = runner.normal("dgates", (self.rows(), 2 * values + 1))?;
        let params = [runner.normal_f32("da_log", values)?, runner.normal_f32("ddt_bias", values)?];
        let columns = |of: fn(&OpPair) -> &crate::runtime::TensorMut| {
            let column = |start| ColumnViewMut { tensor: of(&dgates), start, len: values };
            let [a_log, dt_bias] = [&params[0], &params[1]].map(|pair| self.trained.then_some(of(pair)));
            GateGrads { params: DeltaParamGrads { a_log, dt_bias }, da: column(0), db: column(values + 1) }
        };
        let want = reference(pairs.plain(), heads, &spans, None)?;
        let here = DeltaOutput {
            out: want.out.to_dtype(runner.dtype)?.to_device(runner.device)?,
            states: want.states.to_device(runner.device)?,
        };
        let GateGrads { params: grads, da, db } = columns(|pair| &pair.here);
        let got = gated_delta_backward(pairs.here(), &here, &dout.here, heads, &spans, grads, da, db)?;
        let plain = columns(|pair| &pair.plain);
        let want = reference_backward(pairs.plain(), &want, &dout.plain, heads, &spans, plain)?;
        let mut pairs_of_results = vec![TensorPair::new(got, want), dgates.pair()];
        pairs_of_results.extend(params.map(OpPair::pair));
        Ok(pairs_of_results)
    }
}
