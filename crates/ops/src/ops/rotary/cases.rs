//! Cases of rotary positions.

use candle_core::DType;

use super::{Heads, QkNorm, RotaryTable, reference, reference_backward, rotary, rotary_backward};
use crate::error::Result;
use crate::ops::case::{CaseRunner, OpCase, OpPair, TensorPair, Tolerance};
use crate::ops::rms_norm::NormKind;
use crate::ops::rms_norm::cases::KINDS;
use crate::runtime::TensorMut;

/// One variant of rotary: half of `rotary_dim`, and the per-head norms.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops) struct RotaryCase {
    pub(in crate::ops) rows: usize,
    pub(in crate::ops) heads: Heads,
    pub(in crate::ops) half: usize,
    /// True if neighbours are pairs.
    pub(in crate::ops) interleaved: bool,
    pub(in crate::ops) norm: Option<NormKind>,
    /// True if the norms are trained.
    pub(in crate::ops) trained: bool,
}

/// Returns the cases of rotation, with and without norms of the heads.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let heads = Heads { num_heads: 4, num_kv_heads: 2, head_dim: 16 };
    let queries = Heads { num_kv_heads: 0, ..heads };
    let whole = RotaryCase { rows: 21, heads, half: 8, interleaved: false, norm: None, trained: false };
    let variants = [
        (whole, "whole heads"),
        (RotaryCase { half: 3, ..whole }, "partial"),
        (RotaryCase { norm: Some(KINDS[0].0), trained: true, ..whole }, "normed heads"),
        (RotaryCase { norm: Some(KINDS[1].0), ..whole }, "normed heads (1 + weight), frozen"),
        (RotaryCase { interleaved: true, ..whole }, "neighbours"),
        (
            RotaryCase { half: 3, interleaved: true, norm: Some(KINDS[0].0), trained: true, ..whole },
            "partial, neighbours, normed heads",
        ),
        (RotaryCase { half: 4, norm: Some(KINDS[0].0), trained: true, ..whole }, "partial, normed heads"),
        (RotaryCase { heads: queries, norm: Some(KINDS[0].0), trained: true, ..whole }, "queries alone"),
    ];
    variants.into_iter().flat_map(|(turn, what)| turn.cases(what)).collect()
}

/// The `[op, reference]` pairs of all inputs of rotary.
struct RotaryInputs {
    qkv: OpPair,
    tables: [RotaryTable; 2],
    weights: [OpPair; 2],
    grads: [OpPair; 2],
}

impl RotaryCase {
    /// Returns the forward and the backward case.
    pub(in crate::ops) fn cases(self, what: &str) -> [OpCase; 2] {
        [
            OpCase::new("rotary", what, Tolerance::FORWARD, move |runner| self.forward(runner)),
            OpCase::new("rotary_backward", what, Tolerance::BACKWARD, move |runner| self.backward(runner)),
        ]
    }

    fn inputs(self, runner: &CaseRunner<'_>) -> Result<RotaryInputs> {
        let angle = |i: usize| {
            let frequency = 100f32.powf(-((i % self.half) as f32) / self.half as f32);
            (i / self.half) as f32 * frequency
        };
        let table = |f: fn(f32) -> f32| {
            let values = (0..self.rows * self.half).map(|i| f(angle(i))).collect();
            runner.twin(DType::F32, values, (self.rows, self.half))
        };
        let (cos, sin) = (table(f32::cos)?, table(f32::sin)?);
        let dim = self.heads.head_dim;
        Ok(RotaryInputs {
            qkv: runner.normal("qkv", (self.rows, self.heads.qkv_width()))?,
            tables: [self.table(cos.here, sin.here), self.table(cos.plain, sin.plain)],
            weights: [runner.normal("q_norm", dim)?, runner.normal("k_norm", dim)?],
            grads: [runner.normal_f32("dq_norm", dim)?, runner.normal_f32("dk_norm", dim)?],
        })
    }

    fn table(self, cos: TensorMut, sin: TensorMut) -> RotaryTable {
        RotaryTable { cos: cos.into_tensor(), sin: sin.into_tensor(), interleaved: self.interleaved }
    }

    fn norms<'a>(
        self,
        x: &'a RotaryInputs,
        side: impl Fn(&'a OpPair) -> &'a TensorMut,
    ) -> Option<QkNorm<'a>> {
        let part = |i: usize| (&**side(&x.weights[i]), self.trained.then(|| side(&x.grads[i])));
        self.norm.map(|kind| QkNorm { q: part(0), k: part(1), kind })
    }

    fn forward(self, runner: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let x = self.inputs(runner)?;
        let (here, plain) = (self.norms(&x, |t| &t.here), self.norms(&x, |t| &t.plain));
        let got = rotary(&x.qkv.here, self.heads, here, &x.tables[0])?;
        Ok(vec![TensorPair::new(got, reference(&x.qkv.plain, self.heads, plain, &x.tables[1])?)])
    }

    fn backward(self, runner: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let x = self.inputs(runner)?;
        let d = runner.normal("dqkv", (self.rows, self.heads.qkv_width()))?;
        let (here, plain) = (self.norms(&x, |t| &t.here), self.norms(&x, |t| &t.plain));
        rotary_backward(&x.qkv.here, &d.here, self.heads, here, &x.tables[0])?;
        reference_backward(&x.qkv.plain, &d.plain, self.heads, plain, &x.tables[1])?;
        let mut pairs = vec![d.pair()];
        // Untrained gradients must not change.
        pairs.extend(x.grads.map(OpPair::pair));
        Ok(pairs)
    }
}
