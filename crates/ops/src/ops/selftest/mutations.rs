//! The self-test can fail: every case detects a wrong element, and different options of each op
//! give different results.

use candle_core::{DType, Device, Tensor};

use super::cases;
use crate::error::Result;
use crate::ops::adamw::{self, AdamWPiece, AdamWStep};
use crate::ops::attention::{AttentionKind, ColumnView, Heads, Qkv, Span, attention, attention_backward};
use crate::ops::case::{CaseRunner, TensorPair, Tolerance, in_f64, largest_error};
use crate::ops::cross_entropy::{self, IGNORE, LossKind, LossTargets};
use crate::ops::dropout::{Dropout, dropout};
use crate::ops::embedding;
use crate::ops::glu;
use crate::ops::glu::Activation;
use crate::ops::matmul;
use crate::ops::matmul::{Addend, ColumnViewMut, Transpose};
use crate::ops::noise::{Noise, add_noise};
use crate::ops::rms_norm::{self, NormKind};
use crate::ops::rotary::{self, RotaryTable};
use crate::ops::stochastic_rounding::StochasticRounding;
use crate::recipe::enums::Attention;
use crate::runtime::rng::RngStream;

#[test]
fn every_case_notices_one_wrong_element() -> Result<()> {
    let mut seen = 0;
    for case in cases() {
        for (dtype, tolerance) in case.tolerance.dtypes() {
            for pair in (case.compare)(&CaseRunner { device: &Device::Cpu, dtype, first: 0 })? {
                let mut values = in_f64(&pair.got)?;
                let largest = in_f64(&pair.want)?.iter().fold(0f64, |a, b| a.max(b.abs()));
                let at = values.len() / 2;
                let step = if largest > 0.0 { 3.0 * tolerance * largest } else { 3.0 * tolerance };
                values[at] += step;
                let off = Tensor::from_vec(values.clone(), pair.want.dims(), &Device::Cpu)?;
                let error = TensorPair::new(off, pair.want.copy()?).error()?;
                assert!(error > tolerance, "{} {}: {error:e}", case.op, case.what);
                values[at] = f64::NAN;
                let nan = Tensor::from_vec(values, pair.want.dims(), &Device::Cpu)?;
                assert_eq!(
                    TensorPair::new(nan, pair.want).error()?,
                    f64::INFINITY,
                    "{} {}",
                    case.op,
                    case.what
                );
                seen += 1;
            }
        }
    }
    assert!(seen > 200, "{seen}");
    Ok(())
}

#[test]
fn another_shape_and_nothing_at_all_are_refused() -> Result<()> {
    let ones = |n: usize| Tensor::ones(n, DType::F32, &Device::Cpu);
    assert!(TensorPair::new(ones(3)?, ones(4)?).error().is_err());
    assert!(largest_error(&[]).is_err());
    Ok(())
}

/// Fails unless an op and its reference under other options differ beyond tolerance in both dtypes.
fn must_differ(what: &str, compare: impl Fn(&CaseRunner<'_>) -> Result<Vec<TensorPair>>) -> Result<()> {
    for (dtype, tolerance) in Tolerance::BACKWARD.dtypes() {
        let error = largest_error(&compare(&CaseRunner { device: &Device::Cpu, dtype, first: 0 })?)?;
        assert!(error > tolerance, "{what} in {dtype:?}: error {error:e} is tolerated");
    }
    Ok(())
}

#[test]
fn products() -> Result<()> {
    let wrong = |alpha: f64, accumulate: bool, shift: usize| {
        move |runner: &CaseRunner<'_>| {
            let (dst, a) = (runner.normal("dst", (9, 12))?, runner.normal("a", (9, 8))?);
            let b = runner.normal("b", (10, 8))?;
            let range = |tensor, start| ColumnViewMut { tensor, start, len: 10 };
            let (here, plain) = (range(&dst.here, 1), range(&dst.plain, 1 + shift));
            matmul::matmul(
                here,
                ColumnView::all(&a.here),
                ColumnView::all(&b.here),
                Transpose::Nt,
                0.5,
                Addend::Destination,
            )?;
            let (a, b) = (ColumnView::all(&a.plain), ColumnView::all(&b.plain));
            let addend = Addend::destination_if(accumulate);
            matmul::reference(plain, a, b, Transpose::Nt, alpha, addend)?;
            Ok(vec![dst.pair()])
        }
    };
    must_differ("alpha", wrong(0.55, true, 0))?;
    must_differ("accumulate", wrong(0.5, false, 0))?;
    must_differ("columns", wrong(0.5, true, 1))
}

#[test]
fn norms_and_gates() -> Result<()> {
    let kind = NormKind { eps: 1e-6, unit_offset: false };
    for (what, other) in
        [("offset", NormKind { unit_offset: true, ..kind }), ("eps", NormKind { eps: 0.1, ..kind })]
    {
        must_differ(what, |runner| {
            let (x, w, dy) =
                (runner.normal("x", (9, 16))?, runner.normal("w", 16)?, runner.normal("dy", (9, 16))?);
            let want = rms_norm::reference_backward(&x.plain, &w.plain, &dy.plain, None, None, other)?;
            let got = rms_norm::rms_norm_backward(&x.here, &w.here, &dy.here, None, None, None, kind)?;
            Ok(vec![TensorPair::new(got, want)])
        })?;
    }
    must_differ("residual", |runner| {
        let (x, w, dy) =
            (runner.normal("x", (9, 16))?, runner.normal("w", 16)?, runner.normal("dy", (9, 16))?);
        let got = rms_norm::rms_norm_backward(&x.here, &w.here, &dy.here, Some(&dy.here), None, None, kind)?;
        let want = rms_norm::reference_backward(&x.plain, &w.plain, &dy.plain, None, None, kind)?;
        Ok(vec![TensorPair::new(got, want)])
    })?;
    must_differ("activation", |runner| {
        let x = runner.normal("x", (9, 16))?;
        let want = glu::reference(&x.plain, Activation::GeluTanh)?;
        Ok(vec![TensorPair::new(glu::glu(&x.here, Activation::Silu)?, want)])
    })?;
    must_differ("direction of a rotation", |runner| {
        let heads = Heads { num_heads: 1, num_kv_heads: 1, head_dim: 4 };
        let (x, angles) = (runner.normal("x", (9, 12))?, runner.normal_f32("angles", (9, 2))?.plain);
        let table = RotaryTable { cos: angles.cos()?, sin: angles.sin()?, interleaved: false };
        let back = RotaryTable { sin: table.sin.neg()?, ..table.clone() };
        let got = rotary::rotary(&x.here, heads, None, &table)?;
        Ok(vec![TensorPair::new(got, rotary::reference(&x.plain, heads, None, &back)?)])
    })
}

#[test]
fn attention_options() -> Result<()> {
    let kind = AttentionKind {
        heads: Heads { num_heads: 4, num_kv_heads: 2, head_dim: 8 },
        scale: 0.4,
        softcap: None,
        window: None,
    };
    let apart = [Span::sequence(0, 30), Span::sequence(30, 40)];
    let together = [Span::sequence(0, 70)];
    let windowed = AttentionKind { window: Some(16), ..kind };
    let capped = AttentionKind { softcap: Some(3.0), ..kind };
    let mutations: [(&str, AttentionKind, AttentionKind, &[Span]); 5] = [
        ("scale", kind, AttentionKind { scale: 0.44, ..kind }, &apart),
        ("soft-cap", capped, kind, &apart),
        ("soft-cap's size", capped, AttentionKind { softcap: Some(3.3), ..kind }, &apart),
        ("window by one", windowed, AttentionKind { window: Some(17), ..kind }, &apart),
        ("a leak between spans", kind, kind, &together),
    ];
    for (what, kind, other, spans) in mutations {
        must_differ(what, |runner| Ok(vec![attended(runner, (kind, &apart), (other, spans))?.0]))?;
        must_differ(what, |runner| Ok(vec![attended(runner, (kind, &apart), (other, spans))?.1]))?;
    }
    Ok(())
}

type AttentionForm<'a> = (AttentionKind, &'a [Span]);

/// Returns the output and the gradient of the op, and of its reference under other options.
fn attended(
    runner: &CaseRunner<'_>,
    op: AttentionForm<'_>,
    reference: AttentionForm<'_>,
) -> Result<(TensorPair, TensorPair)> {
    let heads = op.0.heads;
    let (x, dout) =
        (runner.normal("qkv", (70, heads.qkv_width()))?, runner.normal("dout", (70, heads.q_width()))?);
    let both = |x: &Tensor,
                dout: &Tensor,
                (kind, spans): AttentionForm<'_>,
                algorithm|
     -> Result<(Tensor, Tensor)> {
        let range = |start, len| ColumnView { tensor: x, start, len };
        let (q, k) = (range(0, heads.q_width()), range(heads.q_width(), heads.kv_width()));
        let qkv = Qkv { q, k, v: range(heads.qk_width(), heads.kv_width()) };
        let saved = attention(qkv, spans, kind, algorithm)?;
        let d = attention_backward(qkv, &saved, dout, spans, kind, algorithm)?;
        Ok((saved.out, d))
    };
    let got = both(&x.here, &dout.here, op, Attention::Flash)?;
    let want = both(&x.plain, &dout.plain, reference, Attention::Eager)?;
    Ok((TensorPair::new(got.0, want.0), TensorPair::new(got.1, want.1)))
}

#[test]
fn both_ends_of_the_model() -> Result<()> {
    let targets: Vec<u32> = (0..20).map(|i| if i % 5 == 0 { IGNORE } else { i % 11 }).collect();
    let mut shifted = targets.clone();
    shifted.rotate_left(1);
    let kind = LossKind { scale: 0.3, softcap: None };
    let [ids, shifted] = [&targets, &shifted].map(|ids| LossTargets::unweighted(ids));
    let one_more = [vec![1.0; 12], vec![1.1], vec![1.0; 7]].concat();
    let coefficients = LossTargets { coefficients: Some(&one_more), ..ids };
    for (what, other, targets_of_reference) in [
        ("scale", LossKind { scale: 0.33, ..kind }, ids),
        ("soft-cap", LossKind { softcap: Some(4.0), ..kind }, ids),
        ("targets by one", kind, shifted),
        ("a coefficient", kind, coefficients),
    ] {
        must_differ(what, |runner| {
            let (x, w) = (runner.normal("x", (20, 8))?, runner.normal("w", (11, 8))?);
            let output = cross_entropy::Output { weight: &w.here, delta: None };
            let none = cross_entropy::OutputGrads::default();
            let got = cross_entropy::linear_cross_entropy(&x.here, output, ids, kind, none)?.dx;
            let plain = cross_entropy::Output { weight: &w.plain, delta: None };
            let want = cross_entropy::reference(&x.plain, plain, targets_of_reference, other, none)?.dx;
            Ok(vec![TensorPair::new(got, want)])
        })?;
    }
    must_differ("embedding's factor", |runner| {
        let table = runner.normal("table", (5, 8))?;
        let want = embedding::reference(&table.plain, &[1, 4, 1], 1.0, DType::F32)?;
        Ok(vec![TensorPair::new(embedding::embed(&table.here, &[1, 4, 1], 1.1, runner.dtype)?, want)])
    })?;
    must_differ("dropout's token", |runner| {
        let x = runner.normal("x", (20, 8))?;
        let site = Dropout { p: 0.2, stream: RngStream::new(1), first_token: 0 };
        let want = dropout(&x.plain, Dropout { first_token: 1, ..site })?;
        Ok(vec![TensorPair::new(dropout(&x.here, site)?, want)])
    })?;
    must_differ("the noise's token", |runner| {
        let x = runner.normal("x", (20, 8))?;
        let noise = Noise { bounds: &[1.0; 20], stream: RngStream::new(1), first_token: 0 };
        let want = add_noise(&x.plain, Noise { first_token: 1, ..noise })?;
        Ok(vec![TensorPair::new(add_noise(&x.here, noise)?, want)])
    })
}

#[test]
fn optimizer_options() -> Result<()> {
    let options = AdamWStep {
        learning_rate: 0.02,
        betas: [0.9, 0.99],
        eps: 1e-8,
        weight_decay: 0.1,
        update: 3,
        grad_scale: 0.5,
    };
    for (what, other) in [
        ("update", AdamWStep { update: 2, ..options }),
        ("first beta", AdamWStep { betas: [0.91, 0.99], ..options }),
        ("second beta", AdamWStep { betas: [0.9, 0.98], ..options }),
        ("eps", AdamWStep { eps: 1e-3, ..options }),
        ("weight decay", AdamWStep { weight_decay: 0.0, ..options }),
        ("grad_scale", AdamWStep { grad_scale: 1.0, ..options }),
        ("learning rate", AdamWStep { learning_rate: 0.021, ..options }),
    ] {
        let runner = CaseRunner { device: &Device::Cpu, dtype: DType::F32, first: 0 };
        let (param, grad) = (runner.normal("param", 50)?, runner.normal("grad", 50)?);
        let (first, second) = (runner.normal("first", 50)?, runner.twin(DType::F32, vec![0.25; 50], 50)?);
        let moments = [&first.here, &second.here];
        adamw::adamw(&[AdamWPiece {
            param: &param.here,
            value: None,
            rounding: StochasticRounding::new(RngStream::new(0), 0),
            grad: &grad.here,
            moments,
            step: options,
        }])?;
        adamw::reference(&param.plain, &grad.plain, [&first.plain, &second.plain], &other)?;
        let error = param.pair().error()?;
        assert!(error > 4e-6, "{what}: error {error:e} is tolerated");
    }
    Ok(())
}
