//! Cases of the ops that take a token, or a single value, at a time.

use candle_core::{DType, Device, Tensor};

use super::{CaseRunner, OpPair, SelftestCase, TensorPair, Tolerance};
use crate::error::Result;
use crate::ops::dropout::{Dropout, dropout};
use crate::ops::elementwise;
use crate::ops::glu;
use crate::ops::glu::Activation;
use crate::ops::rms_norm::{self, NormKind};
use crate::ops::rotary::{self, Heads, QkNorm, RotaryTable};
use crate::runtime::TensorMut;
use crate::runtime::copy;
use crate::runtime::rng::RngStream;

pub(super) fn cases() -> Vec<SelftestCase> {
    let mut cases = norms();
    cases.extend(rotaries());
    cases.extend(gates());
    cases.extend(dropouts());
    cases.extend(sums());
    cases
}

const KINDS: [(NormKind, &str); 2] = [
    (NormKind { eps: 1e-6, unit_offset: false }, "weight"),
    (NormKind { eps: 1e-5, unit_offset: true }, "1 + weight"),
];

fn norms() -> Vec<SelftestCase> {
    let mut cases = Vec::new();
    for (kind, name) in KINDS {
        // 37: not a multiple of the lanes.
        for width in [64, 37] {
            cases.push(SelftestCase::new(
                "rms_norm",
                format!("{name}, {width} wide"),
                Tolerance::FORWARD,
                move |bench| {
                    let (x, w) = (bench.normal("x", (19, width))?, bench.normal("w", width)?);
                    let got = rms_norm::rms_norm(&x.here, &w.here, kind)?;
                    Ok(vec![TensorPair::new(got, rms_norm::reference(&x.plain, &w.plain, kind)?)])
                },
            ));
            for (residual, dweight, extra) in [
                (false, false, ""),
                (true, false, ", residual"),
                (false, true, ", dweight"),
                (true, true, ", residual, dweight"),
            ] {
                let what = format!("{name}, {width} wide{extra}");
                cases.push(SelftestCase::new("rms_norm_backward", what, Tolerance::BACKWARD, move |bench| {
                    norm_backward(bench, kind, width, residual, dweight)
                }));
            }
        }
    }
    cases
}

fn norm_backward(
    bench: &CaseRunner<'_>,
    kind: NormKind,
    width: usize,
    residual: bool,
    dweight: bool,
) -> Result<Vec<TensorPair>> {
    let (x, w) = (bench.normal("x", (19, width))?, bench.normal("w", width)?);
    let dy = bench.normal("dy", (19, width))?;
    let around = residual.then(|| bench.normal("residual", (19, width))).transpose()?;
    let grad = dweight.then(|| bench.normal_f32("dweight", width)).transpose()?;
    let (here, plain) = (around.as_ref().map(|r| &*r.here), around.as_ref().map(|r| &*r.plain));
    let dw = (grad.as_ref().map(|g| &g.here), grad.as_ref().map(|g| &g.plain));
    let got = rms_norm::rms_norm_backward(&x.here, &w.here, &dy.here, here, dw.0, kind)?;
    let want = rms_norm::reference_backward(&x.plain, &w.plain, &dy.plain, plain, dw.1, kind)?;
    let mut pairs = vec![TensorPair::new(got, want)];
    pairs.extend(grad.map(OpPair::pair));
    Ok(pairs)
}

/// One variant of rotary: half of `rotary_dim`, and the per-head norms.
#[derive(Debug, Clone, Copy)]
struct RotaryCase {
    heads: Heads,
    half: usize,
    norm: Option<NormKind>,
    /// The norms are trained.
    trained: bool,
}

fn rotaries() -> Vec<SelftestCase> {
    let heads = Heads { num_heads: 4, num_kv_heads: 2, head_dim: 16 };
    let whole = RotaryCase { heads, half: 8, norm: None, trained: false };
    let variants = [
        (whole, "whole heads"),
        (RotaryCase { half: 3, ..whole }, "partial"),
        (RotaryCase { norm: Some(KINDS[0].0), trained: true, ..whole }, "normed heads"),
        (RotaryCase { norm: Some(KINDS[1].0), ..whole }, "normed heads (1 + weight), frozen"),
        (RotaryCase { half: 4, norm: Some(KINDS[0].0), trained: true, ..whole }, "partial, normed heads"),
    ];
    let case = |(turn, what): (RotaryCase, &str)| {
        [
            SelftestCase::new("rotary", what, Tolerance::FORWARD, move |bench| turn.forward(bench)),
            SelftestCase::new("rotary_backward", what, Tolerance::BACKWARD, move |bench| {
                turn.backward(bench)
            }),
        ]
    };
    variants.into_iter().flat_map(case).collect()
}

const ROTARY_ROWS: usize = 21;

/// `[op, reference]` of everything rotary reads.
struct RotaryInputs {
    qkv: OpPair,
    tables: [RotaryTable; 2],
    weights: [OpPair; 2],
    grads: [OpPair; 2],
}

impl RotaryCase {
    fn inputs(self, bench: &CaseRunner<'_>) -> Result<RotaryInputs> {
        let angle = |i: usize| {
            let frequency = 100f32.powf(-((i % self.half) as f32) / self.half as f32);
            (i / self.half) as f32 * frequency
        };
        let table = |f: fn(f32) -> f32| {
            let values = (0..ROTARY_ROWS * self.half).map(|i| f(angle(i))).collect();
            bench.twin(DType::F32, values, (ROTARY_ROWS, self.half))
        };
        let (cos, sin) = (table(f32::cos)?, table(f32::sin)?);
        let dim = self.heads.head_dim;
        Ok(RotaryInputs {
            qkv: bench.normal("qkv", (ROTARY_ROWS, self.heads.qkv_width()))?,
            tables: [
                RotaryTable { cos: cos.here.into_tensor(), sin: sin.here.into_tensor() },
                RotaryTable { cos: cos.plain.into_tensor(), sin: sin.plain.into_tensor() },
            ],
            weights: [bench.normal("q_norm", dim)?, bench.normal("k_norm", dim)?],
            grads: [bench.normal_f32("dq_norm", dim)?, bench.normal_f32("dk_norm", dim)?],
        })
    }

    fn norms<'a>(
        self,
        x: &'a RotaryInputs,
        side: impl Fn(&'a OpPair) -> &'a TensorMut,
    ) -> Option<QkNorm<'a>> {
        let part = |i: usize| (&**side(&x.weights[i]), self.trained.then(|| side(&x.grads[i])));
        self.norm.map(|kind| QkNorm { q: part(0), k: part(1), kind })
    }

    fn forward(self, bench: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let x = self.inputs(bench)?;
        let (here, plain) = (self.norms(&x, |t| &t.here), self.norms(&x, |t| &t.plain));
        let got = rotary::rotary(&x.qkv.here, self.heads, here, &x.tables[0])?;
        Ok(vec![TensorPair::new(got, rotary::reference(&x.qkv.plain, self.heads, plain, &x.tables[1])?)])
    }

    fn backward(self, bench: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let x = self.inputs(bench)?;
        let d = bench.normal("dqkv", (ROTARY_ROWS, self.heads.qkv_width()))?;
        let (here, plain) = (self.norms(&x, |t| &t.here), self.norms(&x, |t| &t.plain));
        rotary::rotary_backward(&x.qkv.here, &d.here, self.heads, here, &x.tables[0])?;
        rotary::reference_backward(&x.qkv.plain, &d.plain, self.heads, plain, &x.tables[1])?;
        let mut pairs = vec![d.pair()];
        // Where nothing is trained, both must be as they were.
        pairs.extend(x.grads.map(OpPair::pair));
        Ok(pairs)
    }
}

fn gates() -> Vec<SelftestCase> {
    let mut cases = Vec::new();
    for activation in [Activation::Silu, Activation::GeluTanh] {
        for (spread, size) in [(1.0, "values about 1"), (20.0, "values about 20")] {
            let what = format!("{activation:?}, {size}");
            cases.push(SelftestCase::new("glu", &what, Tolerance::FORWARD, move |bench| {
                let x = bench.normal("gate_up", (13, 2 * 37))?.scaled(spread)?;
                let got = glu::glu(&x.here, activation)?;
                Ok(vec![TensorPair::new(got, glu::reference(&x.plain, activation)?)])
            }));
            cases.push(SelftestCase::new("glu_backward", &what, Tolerance::BACKWARD, move |bench| {
                let x = bench.normal("gate_up", (13, 2 * 37))?.scaled(spread)?;
                let dh = bench.normal("dh", (13, 37))?;
                let got = glu::glu_backward(&x.here, &dh.here, activation)?;
                let want = glu::reference_backward(&x.plain, &dh.plain, activation)?;
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

fn dropouts() -> Vec<SelftestCase> {
    let case = |p: f32| {
        SelftestCase::new("dropout", format!("p = {p}"), Tolerance::ROUNDED, move |bench| {
            let x = bench.normal("x", (33, 20))?;
            let site = Dropout { p, stream: RngStream::new(3).named("dropout"), first_token: 7 };
            let got = dropout(&x.here, site)?;
            let mask = mask(site, 33, 20)?;
            Ok(vec![TensorPair::new(got, (&*x.plain * mask)?)])
        })
    };
    [0.0, 0.1, 0.5].into_iter().map(case).collect()
}

/// The definition: `keep / (1 − p)` of (stream, token, column).
fn mask(site: Dropout, rows: usize, width: usize) -> Result<Tensor> {
    let keep = |i: usize| {
        let (row, column) = ((i / width) as u64, (i % width) as u64);
        let dropped = site.stream.part(site.first_token + row).uniform(column) < site.p;
        if dropped { 0.0 } else { 1.0 / (1.0 - site.p) }
    };
    Ok(Tensor::from_vec((0..rows * width).map(keep).collect(), (rows, width), &Device::Cpu)?)
}

/// More elements than a chunk of `reduce`, and no multiple of one.
const SQUARE: (usize, usize) = (131, 130);

fn sums() -> Vec<SelftestCase> {
    let mut cases = vec![
        SelftestCase::new("add", "", Tolerance::ROUNDED, |bench| {
            let (a, b) = (bench.normal("a", SQUARE)?, bench.normal("b", SQUARE)?);
            Ok(vec![TensorPair::new(elementwise::add(&a.here, &b.here)?, (&*a.plain + &*b.plain)?)])
        }),
        SelftestCase::new("zero", "", Tolerance::ROUNDED, |bench| {
            let x = bench.normal("x", SQUARE)?;
            copy::zero(&x.here)?;
            Ok(vec![TensorPair::new(x.here.into_tensor(), x.plain.zeros_like()?)])
        }),
        SelftestCase::new("sum_of_squares", "more than a chunk", Tolerance::FORWARD.only_f32(), |bench| {
            let x = bench.normal("x", SQUARE)?;
            let want = super::in_f64(&x.plain)?.iter().map(|x| x * x).sum();
            Ok(vec![TensorPair::scalars(elementwise::sum_of_squares(&x.here)?, want)?])
        }),
    ];
    for (kept, tolerance, what) in [
        ([None, None], Tolerance::ROUNDED, "one dtype"),
        ([Some(DType::F32), None], Tolerance::ROUNDED.only_bf16(), "into f32"),
        ([None, Some(DType::F32)], Tolerance::ROUNDED.only_bf16(), "from f32"),
    ] {
        let inputs = move |bench: &CaseRunner<'_>| -> Result<(OpPair, OpPair)> {
            let [dst, x] = kept.map(|dtype| dtype.unwrap_or(bench.dtype));
            Ok((bench.normal_as(dst, "dst", SQUARE)?, bench.normal_as(x, "x", SQUARE)?))
        };
        cases.push(SelftestCase::new("add_into", what, tolerance, move |bench| {
            let (dst, x) = inputs(bench)?;
            elementwise::add_into(&dst.here, &x.here)?;
            Ok(vec![TensorPair::new(dst.here.into_tensor(), (&*dst.plain + &*x.plain)?)])
        }));
        cases.push(SelftestCase::new("copy_into", what, tolerance, move |bench| {
            let (dst, x) = inputs(bench)?;
            copy::copy_into(&dst.here, &x.here)?;
            Ok(vec![TensorPair::new(dst.here.into_tensor(), x.plain.into_tensor())])
        }));
    }
    cases
}
