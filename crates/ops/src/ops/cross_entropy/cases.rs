//! Cases of the loss over the output layer, of logits and of scores.

use candle_core::{D, Device, Tensor};

use super::{
    Delta, IGNORE, LossKind, LossTargets, Output, OutputGrads, TokenScore, linear_cross_entropy, logits,
    reference, score_targets,
};
use crate::error::Result;
use crate::ops::case::{CaseRunner, OpCase, OpPair, TensorPair, Tolerance};
use crate::ops::embedding::cases::{VOCAB, tokens};

/// One variant of the loss.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops) struct LossCase {
    pub(in crate::ops) rows: usize,
    /// More than the ids of the output layer's trained rows.
    pub(in crate::ops) vocab: usize,
    pub(in crate::ops) width: usize,
    /// Logits are [`CONFIDENT`] times as large, and every second target is the likeliest token.
    /// Rows with a probability above 0.95 are also compared separately, because their gradient
    /// nearly cancels.
    pub(in crate::ops) confident: bool,
    /// Every `ignore_every`-th row has no target; 1 means that no row has one.
    pub(in crate::ops) ignore_every: usize,
    pub(in crate::ops) softcap: Option<f64>,
    pub(in crate::ops) dweight: bool,
    /// An adapter on the output layer, and single trained rows of it.
    pub(in crate::ops) adapter: bool,
    /// Each row has its own coefficient.
    pub(in crate::ops) weighted: bool,
}

/// Default width of the cases.
pub(in crate::ops) const WIDTH: usize = 24;
/// Standard deviation of confident logits.
const CONFIDENT: f64 = 20.0;

/// Returns the cases of the fused loss, of logits and of scores.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = losses();
    cases.extend(scores());
    cases
}

fn losses() -> Vec<OpCase> {
    let plain = LossCase {
        rows: 45,
        vocab: VOCAB,
        width: WIDTH,
        confident: false,
        ignore_every: 1000,
        softcap: None,
        dweight: false,
        adapter: false,
        weighted: false,
    };
    let variants = [
        (plain, "frozen head"),
        (LossCase { vocab: 4200, ignore_every: 4, ..plain }, "frozen head, parts of the vocabulary"),
        (
            // Enough multiplications for the packed product in each whole part, even with the small
            // parts of tests.
            LossCase { rows: 70, vocab: 2600, width: 1024, confident: true, ignore_every: 9, ..plain },
            "frozen head, packed parts of the vocabulary, confident",
        ),
        (
            LossCase { vocab: 2049, ignore_every: 5, weighted: true, ..plain },
            "frozen head, parts of the vocabulary, coefficients",
        ),
        (LossCase { dweight: true, ..plain }, "dweight"),
        (LossCase { ignore_every: 3, dweight: true, ..plain }, "ignored targets, dweight"),
        (LossCase { ignore_every: 3, softcap: Some(2.0), ..plain }, "ignored targets, soft-cap"),
        (LossCase { softcap: Some(2.0), dweight: true, ..plain }, "soft-cap, dweight"),
        (LossCase { rows: 4200, ignore_every: 50, dweight: true, ..plain }, "more rows than a chunk"),
        (LossCase { ignore_every: 1, dweight: true, ..plain }, "no target at all"),
        (LossCase { ignore_every: 3, adapter: true, ..plain }, "adapter, token rows"),
        (
            LossCase { rows: 4200, softcap: Some(2.0), adapter: true, ..plain },
            "adapter, token rows, soft-cap, two chunks",
        ),
        (LossCase { ignore_every: 3, dweight: true, weighted: true, ..plain }, "coefficients, dweight"),
        (
            LossCase { rows: 4200, softcap: Some(2.0), adapter: true, weighted: true, ..plain },
            "coefficients, adapter, token rows, soft-cap, two chunks",
        ),
    ];
    variants.into_iter().map(|(loss, what)| loss.case(what)).collect()
}

impl LossCase {
    pub(in crate::ops) fn case(self, what: &str) -> OpCase {
        OpCase::new("linear_cross_entropy", what, Tolerance::BACKWARD, move |runner| self.compare(runner))
    }

    /// Returns targets spread over the vocabulary.
    fn targets(self) -> Vec<u32> {
        let last = self.vocab as u64 - 1;
        let spread = |id: u32| (u64::from(id) * last / (VOCAB as u64 - 1)) as u32;
        tokens(self.rows).into_iter().map(spread).collect()
    }

    /// Returns coefficients from −1 to 2, including zeros.
    fn coefficients(self) -> Option<Vec<f32>> {
        self.weighted.then(|| (0..self.rows).map(|n| (n % 13) as f32 / 4.0 - 1.0).collect())
    }

    fn compare(self, runner: &CaseRunner<'_>) -> Result<Vec<TensorPair>> {
        let (x, w) = head_inputs(
            runner,
            (self.rows, self.vocab, self.width),
            if self.confident { CONFIDENT } else { 1.0 },
        )?;
        let grad =
            self.dweight.then(|| runner.normal_f32("dweight", (self.vocab, self.width))).transpose()?;
        // As large as the existing gradients, so that neither hides the other.
        let kind = LossKind { scale: 0.3, softcap: self.softcap };
        let (mut ids, coefficients) = (self.targets(), self.coefficients());
        if self.confident {
            aim(&mut ids, &plain_logits(&x.plain, &w.plain, self.softcap)?, 2)?;
        }
        ids.iter_mut().step_by(self.ignore_every).for_each(|target| *target = IGNORE);
        let targets = LossTargets { ids: &ids, coefficients: coefficients.as_deref() };
        let (u, b) = (runner.normal_f32("u", (self.rows, 3))?, runner.normal_f32("b", (self.vocab, 3))?);
        let (drows, db) = (
            runner.normal_f32("drows", (ROWS.len(), self.width))?,
            runner.normal_f32("db", (self.vocab, 3))?,
        );
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
        let want = reference(&x.plain, output, targets, kind, plain)?;
        let mut pairs = vec![
            TensorPair::scalars(got.loss.read()?, want.loss.read()?)?,
            TensorPair::new(got.dx.clone(), want.dx.clone()),
        ];
        if self.confident {
            let sure = sure_rows(&plain_logits(&x.plain, &w.plain, self.softcap)?, &ids)?;
            let of_sure = |dx: Tensor| dx.index_select(&sure.to_device(dx.device())?, 0);
            pairs.push(TensorPair::new(of_sure(got.dx)?, of_sure(want.dx)?));
        }
        pairs.extend(got.du.zip(want.du).map(|(got, want)| TensorPair::new(got, want)));
        pairs.extend(grad.map(OpPair::pair));
        pairs.extend([drows.pair(), db.pair()]);
        Ok(pairs)
    }
}

/// Returns the rows whose target has a probability above 0.95.
fn sure_rows(logits: &Tensor, targets: &[u32]) -> Result<Tensor> {
    let log_p = candle_nn::ops::log_softmax(logits, D::Minus1)?.to_vec2::<f32>()?;
    let is_sure =
        |(row, &target): (&Vec<f32>, &u32)| target != IGNORE && row[target as usize] > 0.95_f32.ln();
    let rows = log_p.iter().zip(targets).enumerate().filter(|(_, row)| is_sure(*row));
    let rows: Vec<u32> = rows.map(|(n, _)| n as u32).collect();
    Ok(Tensor::from_vec(rows.clone(), rows.len(), &Device::Cpu)?)
}

/// The ids of the trained rows.
const ROWS: [u32; 3] = [1, 17, 60];

/// Returns the last hidden states, and a weight that gives logits of about the magnitude `logits`.
fn head_inputs(
    runner: &CaseRunner<'_>,
    (rows, vocab, width): (usize, usize, usize),
    logits: f64,
) -> Result<(OpPair, OpPair)> {
    let weight = runner.normal("w", (vocab, width))?.scaled(logits / (width as f64).sqrt())?;
    Ok((runner.normal("x", (rows, width))?, weight))
}

fn scores() -> Vec<OpCase> {
    let mut cases = Vec::new();
    for (softcap, what) in [(None, "plain"), (Some(2.0), "soft-cap")] {
        cases.push(OpCase::new("logits", what, Tolerance::FORWARD, move |runner| {
            let (x, w) = head_inputs(runner, (17, VOCAB, WIDTH), 1.0)?;
            let got = logits(&x.here, Output { weight: &w.here, delta: None }, softcap)?;
            Ok(vec![TensorPair::new(got, plain_logits(&x.plain, &w.plain, softcap)?)])
        }));
        cases.push(score_case(what, 90, VOCAB, softcap));
        cases.push(score_case(&format!("{what}, parts of the vocabulary"), 45, 4200, softcap));
    }
    cases
}

/// Returns the case of scores of `rows` rows over `vocab` tokens, at least [`VOCAB`].
pub(in crate::ops) fn score_case(what: &str, rows: usize, vocab: usize, softcap: Option<f64>) -> OpCase {
    OpCase::new("score_targets", what, Tolerance::FORWARD, move |runner| {
        let (x, w) = head_inputs(runner, (rows, vocab, WIDTH), 1.0)?;
        let mut targets = tokens(rows);
        targets.iter_mut().skip(1).step_by(4).for_each(|target| *target = IGNORE);
        let logits = plain_logits(&x.plain, &w.plain, softcap)?;
        aim(&mut targets, &logits, 3)?;
        let output = Output { weight: &w.here, delta: None };
        compare_scores(&score_targets(&x.here, output, &targets, softcap)?, &targets, &logits)
    })
}

fn plain_logits(x: &Tensor, weight: &Tensor, softcap: Option<f64>) -> Result<Tensor> {
    let logits = x.matmul(&weight.t()?.contiguous()?)?;
    Ok(match softcap {
        Some(cap) => ((logits / cap)?.tanh()? * cap)?,
        None => logits,
    })
}

/// Replaces every `every`-th target by the likeliest token, so that hits occur.
fn aim(targets: &mut [u32], logits: &Tensor, every: usize) -> Result<()> {
    let best = logits.argmax(D::Minus1)?.to_vec1::<u32>()?;
    for (target, best) in targets.iter_mut().zip(best).step_by(every).filter(|(target, _)| **target != IGNORE)
    {
        *target = best;
    }
    Ok(())
}

/// Compares losses, and hits if the best logit leads by more than a rounding.
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
    let actual = scores.iter().map(|score| f64::from(score.loss)).collect();
    Ok(vec![
        TensorPair::new(tensor(actual)?, tensor(losses)?),
        TensorPair::new(flags(scores.iter().map(|score| score.correct).collect())?, flags(hits)?),
    ])
}
