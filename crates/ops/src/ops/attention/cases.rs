//! Cases of attention: grouped heads, windows, soft-caps, and packed spans with lengths near the
//! tile borders. The reference is the S × S form in f32.

use candle_core::Tensor;

use super::{AttentionKind, AttentionOutput, ColumnView, Heads, Qkv, Span, attention, attention_backward};
use crate::error::Result;
use crate::ops::case::{CaseRunner, OpCase, OpPair, TensorPair, Tolerance};
use crate::recipe::enums::Attention;

/// The attention of one layer over one packed batch.
#[derive(Debug, Clone)]
struct PackedSpans {
    kind: AttentionKind,
    spans: Vec<Span>,
}

/// Returns the cases of both algorithms.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = Vec::new();
    for algorithm in [Attention::Flash, Attention::Eager] {
        for (what, packed) in sequences() {
            let what = format!("{algorithm:?}, {what}");
            let same = packed.clone();
            cases.push(OpCase::new("attention", &what, Tolerance::FORWARD, move |runner| {
                same.forward(runner, algorithm)
            }));
            cases.push(OpCase::new("attention_backward", &what, Tolerance::BACKWARD, move |runner| {
                packed.backward(runner, algorithm)
            }));
        }
        for (what, packed) in forward_only() {
            let what = format!("{algorithm:?}, {what}");
            cases.push(OpCase::new("attention", what, Tolerance::FORWARD, move |runner| {
                packed.forward(runner, algorithm)
            }));
        }
    }
    cases
}

fn kind(num_heads: usize, num_kv_heads: usize, head_dim: usize) -> AttentionKind {
    AttentionKind {
        heads: Heads { num_heads, num_kv_heads, head_dim },
        scale: 1.0 / (head_dim as f64).sqrt(),
        softcap: None,
        window: None,
    }
}

/// Returns whole sequences of these lengths, end to end.
fn pack(lengths: &[usize]) -> Vec<Span> {
    let mut start = 0;
    let span = |&len: &usize| {
        start += len;
        Span::sequence(start - len, len)
    };
    lengths.iter().map(span).collect()
}

fn sequences() -> Vec<(&'static str, PackedSpans)> {
    let borders = pack(&[1, 63, 64, 65, 130]);
    let grouped = kind(4, 2, 16);
    let with = |kind: AttentionKind| PackedSpans { kind, spans: borders.clone() };
    vec![
        ("as many key heads", with(kind(2, 2, 16))),
        ("grouped heads", with(grouped)),
        ("one key head, head_dim 24", with(kind(3, 1, 24))),
        ("window 2", with(AttentionKind { window: Some(2), ..grouped })),
        ("window 17", with(AttentionKind { window: Some(17), ..grouped })),
        ("window 64", with(AttentionKind { window: Some(64), ..grouped })),
        ("window past every span", with(AttentionKind { window: Some(500), ..grouped })),
        ("soft-cap, another scale", with(AttentionKind { softcap: Some(2.0), scale: 0.4, ..grouped })),
        ("soft-cap, window 66", with(AttentionKind { softcap: Some(1.5), window: Some(66), ..grouped })),
        ("more rows than a task", PackedSpans { kind: kind(2, 1, 8), spans: pack(&[5, 600]) }),
        (
            "scores up to 60",
            PackedSpans { kind: AttentionKind { scale: 4.0, ..grouped }, spans: pack(&[70, 9]) },
        ),
    ]
}

/// Returns cases with queries at the end of longer keys, as in generation, and one with a window of
/// 1.
fn forward_only() -> Vec<(&'static str, PackedSpans)> {
    let grouped = kind(4, 2, 16);
    let span = |q_len, k_len| vec![Span { q_start: 0, q_len, k_start: 0, k_len }];
    let two = vec![
        Span { q_start: 0, q_len: 3, k_start: 0, k_len: 70 },
        Span { q_start: 3, q_len: 65, k_start: 70, k_len: 66 },
    ];
    let windowed = AttentionKind { window: Some(20), ..grouped };
    // A backward is not compared here: the gradients of q and k are zero except for rounding.
    let alone = AttentionKind { window: Some(1), ..grouped };
    vec![
        ("window 1", PackedSpans { kind: alone, spans: pack(&[63, 66]) }),
        ("1 query, 130 keys", PackedSpans { kind: grouped, spans: span(1, 130) }),
        ("5 queries, 64 keys", PackedSpans { kind: grouped, spans: span(5, 64) }),
        ("70 queries, 200 keys, window 20", PackedSpans { kind: windowed, spans: span(70, 200) }),
        ("two cached spans", PackedSpans { kind: grouped, spans: two }),
    ]
}

/// q and k as columns of one tensor and v of another, as a transformer block passes them.
struct AttentionInputs {
    q: OpPair,
    k: OpPair,
    v: OpPair,
}

/// Number of columns before the range of each input.
const MARGIN: usize = 3;

impl AttentionInputs {
    fn qkv<'a>(&'a self, heads: Heads, side: impl Fn(&'a OpPair) -> &'a Tensor) -> Qkv<'a> {
        let range = |twin, len| ColumnView { tensor: side(twin), start: MARGIN, len };
        Qkv {
            q: range(&self.q, heads.q_width()),
            k: range(&self.k, heads.kv_width()),
            v: range(&self.v, heads.kv_width()),
        }
    }
}

impl PackedSpans {
    fn rows(&self) -> (usize, usize) {
        let ends = |end: fn(&Span) -> usize| self.spans.iter().map(end).max().unwrap_or(0);
        (ends(|span| span.q_start + span.q_len), ends(|span| span.k_start + span.k_len))
    }

    fn inputs(&self, runner: &CaseRunner<'_>) -> Result<AttentionInputs> {
        let ((q_rows, k_rows), heads) = (self.rows(), self.kind.heads);
        Ok(AttentionInputs {
            q: runner.normal("q", (q_rows, MARGIN + heads.q_width()))?,
            k: runner.normal("k", (k_rows, MARGIN + heads.kv_width() + 2))?,
            v: runner.normal("v", (k_rows, MARGIN + heads.kv_width()))?,
        })
    }

    fn attend(&self, qkv: Qkv<'_>, algorithm: Attention) -> Result<AttentionOutput> {
        attention(qkv, &self.spans, self.kind, algorithm)
    }

    fn forward(&self, runner: &CaseRunner<'_>, algorithm: Attention) -> Result<Vec<TensorPair>> {
        let x = self.inputs(runner)?;
        let got = self.attend(x.qkv(self.kind.heads, |t| &t.here), algorithm)?;
        let want = self.attend(x.qkv(self.kind.heads, |t| &t.plain), Attention::Eager)?;
        Ok(vec![TensorPair::new(got.out, want.out), TensorPair::new(got.lse, want.lse)])
    }

    /// Compares the gradients, with op and reference each using its own forward, as in a step.
    fn backward(&self, runner: &CaseRunner<'_>, algorithm: Attention) -> Result<Vec<TensorPair>> {
        let (x, heads) = (self.inputs(runner)?, self.kind.heads);
        let dout = runner.normal("dout", (self.rows().0, heads.q_width()))?;
        let (here, plain) = (x.qkv(heads, |t| &t.here), x.qkv(heads, |t| &t.plain));
        let saved = self.attend(here, algorithm)?;
        let got = attention_backward(here, &saved, &dout.here, &self.spans, self.kind, algorithm)?;
        let saved = self.attend(plain, Attention::Eager)?;
        let want = attention_backward(plain, &saved, &dout.plain, &self.spans, self.kind, Attention::Eager)?;
        let parts =
            [(0, heads.q_width()), (heads.q_width(), heads.kv_width()), (heads.qk_width(), heads.kv_width())];
        let part =
            |(start, len)| Ok(TensorPair::new(got.narrow(1, start, len)?, want.narrow(1, start, len)?));
        parts.into_iter().map(part).collect()
    }
}
