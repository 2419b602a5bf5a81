//! Cases of the model's two ends, the embedding and the loss, and of the optimizer.

use candle_core::{D, DType, Device, Tensor};

use super::{CaseRunner, OpPair, SelftestCase, TensorPair, Tolerance};
use crate::error::Result;
use crate::ops::adamw::{self, AdamWStep};
use crate::ops::cross_entropy::{
    self, Delta, IGNORE, LossKind, LossTargets, Output, OutputGrads, TokenScore, linear_cross_entropy,
    logits, score_targets,
};
use crate::ops::embedding;
use crate::runtime::rng::RngStream;

pub(super) fn cases() -> Vec<SelftestCase> {
    let mut cases = embeddings();
    cases.extend(losses());
    cases.extend(scores());
    cases.extend(updates());
    cases
}

const VOCAB: usize = 61;

/// Ids below `VOCAB`, with repetitions.
fn tokens(count: usize) -> Vec<u32> {
    let stream = RngStream::new(0).named("tokens");
    (0..count as u64).map(|i| (stream.bits(i) % VOCAB as u64) as u32).collect()
}

fn embeddings() -> Vec<SelftestCase> {
    let case = |(factor, what): (f64, &str)| {
        [
            SelftestCase::new("embed", what, Tolerance::ROUNDED, move |bench| {
                let table = bench.normal("table", (VOCAB, 24))?;
                let got = embedding::embed(&table.here, &tokens(130), factor, bench.dtype)?;
                let want = embedding::reference(&table.plain, &tokens(130), factor, DType::F32)?;
                // A table may be kept in fewer bits than activations have.
                let wide = embedding::embed(&table.here, &tokens(130), factor, DType::F32)?;
                Ok(vec![TensorPair::new(got, want.clone()), TensorPair::new(wide, want)])
            }),
            SelftestCase::new("embed_backward", what, Tolerance::BACKWARD, move |bench| {
                let grad = bench.normal_f32("grad", (VOCAB, 24))?;
                let dy = bench.normal("dy", (130, 24))?;
                embedding::embed_backward(&grad.here, &tokens(130), &dy.here, factor, Some(3))?;
                embedding::reference_backward(&grad.plain, &tokens(130), &dy.plain, factor, Some(3))?;
                Ok(vec![grad.pair()])
            }),
        ]
    };
    let mut cases: Vec<SelftestCase> =
        [(1.0, "factor 1"), (4.898_979, "factor 4.9")].into_iter().flat_map(case).collect();
    cases.push(SelftestCase::new("columns_of", "A of an adapter", Tolerance::ROUNDED.only_f32(), |bench| {
        let a = bench.normal_f32("a", (4, VOCAB))?;
        let got = embedding::columns_of(&a.here, &tokens(130))?;
        Ok(vec![TensorPair::new(got, embedding::columns_of_reference(&a.plain, &tokens(130))?)])
    }));
    cases.push(SelftestCase::new(
        "columns_of_backward",
        "A of an adapter",
        Tolerance::BACKWARD.only_f32(),
        |bench| {
            let (grad, du) = (bench.normal_f32("grad", (4, VOCAB))?, bench.normal_f32("du", (130, 4))?);
            embedding::columns_of_backward(&grad.here, &tokens(130), &du.here, Some(3))?;
            embedding::columns_of_backward_reference(&grad.plain, &tokens(130), &du.plain, Some(3))?;
            Ok(vec![grad.pair()])
        },
    ));
    cases
}

/// One variant of the loss.
#[derive(Debug, Clone, Copy)]
struct Loss {
    rows: usize,
    /// Every so many rows have no target; 1: none has.
    ignore_every: usize,
    softcap: Option<f64>,
    dweight: bool,
    /// An adapter on the head, and single rows of it that train.
    adapter: bool,
    /// Each row counts by a factor of its own.
    weighted: bool,
}

const LOSS_WIDTH: usize = 24;

fn losses() -> Vec<SelftestCase> {
    let plain =
        Loss { rows: 45, ignore_every: 1000, softcap: None, dweight: false, adapter: false, weighted: false };
    let variants = [
        (plain, "frozen head"),
        (Loss { dweight: true, ..plain }, "dweight"),
        (Loss { ignore_every: 3, dweight: true, ..plain }, "ignored targets, dweight"),
        (Loss { ignore_every: 3, softcap: Some(2.0), ..plain }, "ignored targets, soft-cap"),
        (Loss { softcap: Some(2.0), dweight: true, ..plain }, "soft-cap, dweight"),
        (Loss { rows: 2100, ignore_every: 50, dweight: true, ..plain }, "more rows than a chunk"),
        (Loss { ignore_every: 1, dweight: true, ..plain }, "no target at all"),
        (Loss { ignore_every: 3, adapter: true, ..plain }, "adapter, token rows"),
        (
            Loss { rows: 2100, softcap: Some(2.0), adapter: true, ..plain },
            "adapter, token rows, soft-cap, two chunks",
        ),
        (Loss { ignore_every: 3, dweight: true, weighted: true, ..plain }, "coefficients, dweight"),
        (
            Loss { rows: 2100, softcap: Some(2.0), adapter: true, weighted: true, ..plain },
            "coefficients, adapter, token rows, soft-cap, two chunks",
        ),
    ];
    let case = |(loss, what): (Loss, &str)| {
        SelftestCase::new("linear_cross_entropy", what, Tolerance::BACKWARD, move |bench| loss.compare(bench))
    };
    variants.into_iter().map(case).collect()
}

impl Loss {
    fn targets(self) -> Vec<u32> {
        let mut targets = tokens(self.rows);
        targets.iter_mut().step_by(self.ignore_every).for_each(|target| *target = IGNORE);
        targets
    }

    /// From −1 to 2, and zeros among them.
    fn coefficients(self) -> Option<Vec<f32>> {
        self.weighted.then(|| (0..self.rows).map(|n| (n % 13) as f32 / 4.0 - 1.0).collect())
    }

    fn compare(self, bench: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let (x, w) = head_inputs(bench, self.rows)?;
        let grad = self.dweight.then(|| bench.normal_f32("dweight", (VOCAB, LOSS_WIDTH))).transpose()?;
        // As large as what is there before, so that neither hides the other.
        let kind = LossKind { scale: 0.3, softcap: self.softcap };
        let (ids, coefficients) = (self.targets(), self.coefficients());
        let targets = LossTargets { ids: &ids, coefficients: coefficients.as_deref() };
        let (u, b) = (bench.normal_f32("u", (self.rows, 3))?, bench.normal_f32("b", (VOCAB, 3))?);
        let (drows, db) =
            (bench.normal_f32("drows", (ROWS.len(), LOSS_WIDTH))?, bench.normal_f32("db", (VOCAB, 3))?);
        let output =
            |w, u, b| Output { weight: w, delta: self.adapter.then_some(Delta { u, b, scale: 0.4 }) };
        let grads = |weight, rows, b| OutputGrads {
            weight,
            rows: self.adapter.then_some((&ROWS[..], rows)),
            b: self.adapter.then_some(b),
        };
        let here = grads(grad.as_ref().map(|g| &g.here), &drows.here, &db.here);
        let got = linear_cross_entropy(&x.here, output(&w.here, &u.here, &b.here), targets, kind, here)?;
        let plain = grads(grad.as_ref().map(|g| &g.plain), &drows.plain, &db.plain);
        let output = output(&w.plain, &u.plain, &b.plain);
        let want = cross_entropy::reference(&x.plain, output, targets, kind, plain)?;
        let mut pairs = vec![TensorPair::scalars(got.loss, want.loss)?, TensorPair::new(got.dx, want.dx)];
        pairs.extend(got.du.zip(want.du).map(|(got, want)| TensorPair::new(got, want)));
        pairs.extend(grad.map(OpPair::pair));
        pairs.extend([drows.pair(), db.pair()]);
        Ok(pairs)
    }
}

/// The rows that train.
const ROWS: [u32; 3] = [1, 17, 60];

/// The last hidden states, and the head's weight such that logits are about 1.
fn head_inputs(bench: &CaseRunner<'_>, rows: usize) -> Result<(OpPair, OpPair)> {
    let weight = bench.normal("w", (VOCAB, LOSS_WIDTH))?.scaled(1.0 / (LOSS_WIDTH as f64).sqrt())?;
    Ok((bench.normal("x", (rows, LOSS_WIDTH))?, weight))
}

fn scores() -> Vec<SelftestCase> {
    let mut cases = Vec::new();
    for (softcap, what) in [(None, "plain"), (Some(2.0), "soft-cap")] {
        cases.push(SelftestCase::new("logits", what, Tolerance::FORWARD, move |bench| {
            let (x, w) = head_inputs(bench, 17)?;
            let got = logits(&x.here, Output { weight: &w.here, delta: None }, softcap)?;
            Ok(vec![TensorPair::new(got, plain_logits(&x.plain, &w.plain, softcap)?)])
        }));
        cases.push(SelftestCase::new("score_targets", what, Tolerance::FORWARD, move |bench| {
            let (x, w) = head_inputs(bench, 90)?;
            let mut targets = tokens(90);
            targets.iter_mut().step_by(4).for_each(|target| *target = IGNORE);
            let logits = plain_logits(&x.plain, &w.plain, softcap)?;
            aim(&mut targets, &logits)?;
            let output = Output { weight: &w.here, delta: None };
            compare_scores(&score_targets(&x.here, output, &targets, softcap)?, &targets, &logits)
        }));
    }
    cases
}

fn plain_logits(x: &Tensor, weight: &Tensor, softcap: Option<f64>) -> Result<Tensor> {
    let logits = x.matmul(&weight.t()?.contiguous()?)?;
    Ok(match softcap {
        Some(cap) => ((logits / cap)?.tanh()? * cap)?,
        None => logits,
    })
}

/// Turns every third target into the likeliest token, so that there are hits to be found.
fn aim(targets: &mut [u32], logits: &Tensor) -> Result<()> {
    let best = logits.argmax(D::Minus1)?.to_vec1::<u32>()?;
    for (target, best) in targets.iter_mut().zip(best).step_by(3).filter(|(target, _)| **target != IGNORE) {
        *target = best;
    }
    Ok(())
}

/// Losses, and hits where the best logit leads by more than a rounding.
fn compare_scores(scores: &[TokenScore], targets: &[u32], logits: &Tensor) -> Result<Vec<TensorPair>> {
    let rows = logits.to_vec2::<f32>()?;
    let (mut losses, mut hits) = (Vec::new(), Vec::new());
    let counted = rows.iter().zip(targets).filter(|(_, target)| **target != IGNORE);
    for ((row, &target), score) in counted.clone().zip(scores) {
        let exact = row.iter().map(|&l| f64::from(l).exp()).sum::<f64>().ln();
        losses.push(exact - f64::from(row[target as usize]));
        let mut sorted = row.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let clear = sorted[0] - sorted[1] > 0.05;
        let hit = row[target as usize] == sorted[0];
        hits.push(if clear { hit } else { score.correct });
    }
    let tensor = |values: Vec<f64>| {
        let len = values.len();
        Tensor::from_vec(values, len, &Device::Cpu)
    };
    let flags = |flags: Vec<bool>| tensor(flags.into_iter().map(|hit| f64::from(u8::from(hit))).collect());
    let found = scores.iter().map(|score| f64::from(score.loss)).collect();
    Ok(vec![
        TensorPair::new(tensor(found)?, tensor(losses)?),
        TensorPair::new(flags(scores.iter().map(|score| score.correct).collect())?, flags(hits)?),
    ])
}

/// More elements than a task of AdamW.
const PARAMETERS: usize = 40_000;

fn updates() -> Vec<SelftestCase> {
    let first = AdamWStep {
        learning_rate: 0.02,
        betas: [0.9, 0.999],
        eps: 1e-8,
        weight_decay: 0.0,
        update: 1,
        grad_scale: 1.0,
    };
    let variants = [
        (first, "first update"),
        (AdamWStep { weight_decay: 0.1, update: 7, grad_scale: 0.3, ..first }, "decay, clipping, update 7"),
        (AdamWStep { betas: [0.8, 0.95], eps: 1e-3, update: 1000, ..first }, "other betas, update 1000"),
    ];
    let case = |(options, what): (AdamWStep, &str)| {
        SelftestCase::new("adamw", what, Tolerance::FORWARD.only_f32(), move |bench| update(bench, &options))
    };
    variants.into_iter().map(case).collect()
}

fn update(bench: &CaseRunner<'_>, options: &AdamWStep) -> Result<Vec<TensorPair>> {
    let (param, grad) = (bench.normal("param", PARAMETERS)?, bench.normal("grad", PARAMETERS)?);
    let first = bench.normal("first", PARAMETERS)?.scaled(0.1)?;
    let stream = RngStream::new(0).named("second");
    let squares = (0..PARAMETERS as u64).map(|i| stream.uniform(i)).collect();
    let second = bench.twin(DType::F32, squares, PARAMETERS)?;
    adamw::adamw(&param.here, &grad.here, [&first.here, &second.here], options)?;
    adamw::reference(&param.plain, &grad.plain, [&first.plain, &second.plain], options)?;
    Ok(vec![param.pair(), first.pair(), second.pair()])
}
