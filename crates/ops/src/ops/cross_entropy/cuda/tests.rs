//! Tests of the loss kernels alone: rows of any length and alignment, ties and rows without target,
//! against f64.

use candle_core::{DType, Device, Tensor};
use half::bf16;

use super::{In, InOut, LaunchShape, Out, THREADS, kernels};
use crate::backends::gpu::emulator::{Emulator, EmulatorSchedule, Order};
use crate::error::Result;
use crate::ops::ColumnView;
use crate::runtime::rng::RngStream;

/// The form of the gradient that a kernel writes over the logits.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Gradient {
    Bf16,
    F32,
    /// No gradient: the logits stay, only losses and hits are written.
    None,
}

impl Gradient {
    /// Returns value `c` of a row; a bf16 value overlays the bytes of logit `c / 2`.
    fn read(self, row: &[f32], c: usize) -> f32 {
        match self {
            Gradient::Bf16 => bf16::from_bits((row[c / 2].to_bits() >> (16 * (c % 2))) as u16).to_f32(),
            _ => row[c],
        }
    }
}

struct Found {
    losses: Vec<f32>,
    hits: Vec<u32>,
    /// The gradient of each row.
    rows: Vec<Vec<f32>>,
}

/// Rows of `vocab` logits, `pitch` values apart.
struct LossRows {
    vocab: usize,
    pitch: usize,
    logits: Vec<f32>,
    targets: Vec<u32>,
    factors: Option<Vec<f32>>,
    cap: f32,
}

/// The gradient's factor of rows without a factor of their own.
const FACTOR: f32 = 0.3;

/// A value above all other logits of the rows.
const LARGEST: f32 = 12.0;

impl LossRows {
    /// Creates rows with targets at both ends and without target; targets with the largest logit,
    /// alone or tied with another, in their group of four and outside; and a NaN logit.
    fn new(vocab: usize, pitch: usize, cap: f32, factors: bool) -> Self {
        let middle = vocab / 8 * 4;
        // Targets, and the positions of the largest logits.
        let rows: [(usize, &[usize]); 12] = [
            (0, &[]),
            (vocab - 1, &[]),
            (vocab, &[]),
            (u32::MAX as usize, &[0]),
            (0, &[0]),
            (middle + 1, &[middle + 1]),
            (middle + 3, &[middle + 3]),
            (middle + 1, &[middle, middle + 1]),
            (middle + 1, &[middle + 1, middle + 2]),
            (middle + 5, &[middle, middle + 5]),
            (middle + 1, &[middle + 1, middle + 7]),
            (middle + 1, &[middle + 1]),
        ];
        let stream = RngStream::new(vocab as u64);
        let mut logits: Vec<f32> = (0..(rows.len() * pitch) as u64).map(|i| stream.normal(i)).collect();
        for (row, (_, largest)) in logits.chunks_exact_mut(pitch).zip(rows) {
            largest.iter().filter(|&&c| c < vocab).for_each(|&c| row[c] = LARGEST);
        }
        // Keep all logits below the initial maximum of a row without a target.
        logits[2 * pitch..3 * pitch].iter_mut().for_each(|logit| *logit = -1.0 - logit.abs());
        if middle > 0 {
            logits[11 * pitch + middle] = f32::NAN;
        }
        let factors = factors.then(|| (0..rows.len()).map(|n| n as f32 / 4.0 - 1.0).collect());
        LossRows {
            vocab,
            pitch,
            logits,
            targets: rows.map(|(target, _)| target as u32).to_vec(),
            factors,
            cap,
        }
    }

    fn factor(&self, n: usize) -> f64 {
        f64::from(self.factors.as_ref().map_or(FACTOR, |factors| factors[n]))
    }

    fn row(&self, n: usize) -> Vec<f64> {
        self.logits[n * self.pitch..][..self.vocab].iter().map(|&logit| f64::from(logit)).collect()
    }

    /// Returns the loss of row `n`, true if its target is the first largest logit, and the
    /// gradient.
    fn wanted(&self, n: usize) -> (f64, bool, Vec<f64>) {
        let target = self.targets[n] as usize;
        let (row, cap) = (self.row(n), f64::from(self.cap));
        if target >= self.vocab {
            return (0.0, false, vec![0.0; self.vocab]);
        }
        let capped = |x: f64| if cap > 0.0 { cap * (x / cap).tanh() } else { x };
        let slope = |x: f64| if cap > 0.0 { 1.0 - (x / cap).tanh().powi(2) } else { 1.0 };
        let sum: f64 = row.iter().map(|&x| capped(x).exp()).sum();
        let hit =
            row[..target].iter().all(|&x| x < row[target]) && row[target..].iter().all(|&x| x <= row[target]);
        let of = |(c, &x): (usize, &f64)| {
            let onehot = if c == target { 1.0 } else { 0.0 };
            self.factor(n) * (capped(x).exp() / sum - onehot) * slope(x)
        };
        (sum.ln() - capped(row[target]), hit, row.iter().enumerate().map(of).collect())
    }

    fn run(&self, gradient: Gradient) -> Result<Found> {
        let (count, vocab, pitch) = (self.targets.len(), self.vocab as u32, self.pitch as i64);
        let logits = Tensor::from_vec(self.logits.clone(), (count, self.pitch), &Device::Cpu)?;
        let targets = Tensor::from_slice(&self.targets, count, &Device::Cpu)?;
        let factors =
            self.factors.as_ref().map(|f| Tensor::from_slice(f, count, &Device::Cpu)).transpose()?;
        let losses = Tensor::zeros(count, DType::F32, &Device::Cpu)?;
        let hits = Tensor::zeros(count, DType::U32, &Device::Cpu)?;
        let shape = LaunchShape::line(count, THREADS);
        let (targets, factors) = (In::all(&targets)?, In::optional(factors.as_ref())?);
        let (to_losses, to_hits) = (Out::all(&losses)?, Out::all(&hits)?);
        let view = ColumnView { tensor: &logits, start: 0, len: self.vocab };
        let kernel = match gradient {
            Gradient::Bf16 => kernels::cross_entropy_bf16,
            Gradient::F32 => kernels::cross_entropy_f32,
            Gradient::None => {
                let logits = In::columns(&view)?;
                kernels::score_rows(
                    &Emulator, shape, logits, targets, to_losses, to_hits, vocab, pitch, self.cap,
                )?;
                return Ok(Found { losses: losses.to_vec1()?, hits: hits.to_vec1()?, rows: Vec::new() });
            }
        };
        let to = InOut::columns(&view)?;
        kernel(&Emulator, shape, to, targets, factors, to_losses, to_hits, vocab, pitch, FACTOR, self.cap)?;
        let rows = logits.to_vec2::<f32>()?;
        let rows = rows.iter().map(|row| (0..self.vocab).map(|c| gradient.read(row, c)).collect()).collect();
        Ok(Found { losses: losses.to_vec1()?, hits: hits.to_vec1()?, rows })
    }

    fn check(&self, gradient: Gradient) -> Result<()> {
        let found = self.run(gradient)?;
        for n in 0..self.targets.len() {
            let what = format!("{gradient:?}, {} logits, row {n}", self.vocab);
            let (loss, hit, d) = self.wanted(n);
            assert_eq!(found.hits[n], u32::from(hit), "{what}: hit");
            let got = f64::from(found.losses[n]);
            if loss.is_nan() {
                assert!(got.is_nan(), "{what}: loss {got}");
                continue;
            }
            assert!((got - loss).abs() < 1e-5 * (1.0 + loss.abs()), "{what}: loss {got}, wanted {loss}");
            let row = found.rows.get(n).map_or(&[][..], |row| row);
            for (c, (&got, &want)) in row.iter().zip(&d).enumerate() {
                let rounding = if gradient == Gradient::Bf16 { want.abs() / 250.0 } else { 0.0 };
                let most = rounding + 1e-5 * self.factor(n).abs();
                let off = (f64::from(got) - want).abs();
                assert!(off <= most, "{what}: gradient {got} of {c}, wanted {want}");
            }
        }
        Ok(())
    }
}

/// Checks every form of gradient of rows of `vocab` logits, forward and backward, with and without
/// a soft-cap.
fn check(vocab: usize, pitch: usize) -> Result<()> {
    let ways = [(Order::Forward, false), (Order::Reverse, true)];
    for (order, late_copies) in ways {
        let schedule = EmulatorSchedule { order, late_copies, counts: false };
        let (done, _) = Emulator::run(schedule, || -> Result<()> {
            for (cap, factors) in [(0.0, false), (15.0, true)] {
                let rows = LossRows::new(vocab, pitch, cap, factors);
                for gradient in [Gradient::F32, Gradient::Bf16, Gradient::None] {
                    rows.check(gradient)?;
                }
            }
            Ok(())
        });
        done?;
    }
    Ok(())
}

#[test]
fn short_rows() -> Result<()> {
    check(1, 1)?;
    check(3, 8)
}

#[test]
fn rows_shorter_than_a_tile() -> Result<()> {
    check(61, 64)
}

/// Only some rows begin at a multiple of 16 bytes.
#[test]
fn rows_side_by_side() -> Result<()> {
    check(61, 61)
}

#[test]
fn rows_of_several_tiles() -> Result<()> {
    check(4099, 4104)?;
    check(8192, 8192)
}
