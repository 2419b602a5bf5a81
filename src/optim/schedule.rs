//! Learning-rate schedules, as transformers' `get_scheduler` computes them: the n-th update (from 0) uses
//! `learning_rate · factor(n)`, so the first warm-up step has rate 0.

use std::f64::consts::PI;

/// The shape after warm-up. What falls, falls to `min_lr_ratio` of the peak.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ScheduleKind {
    /// The rate itself, without warm-up.
    Constant,
    /// The rate itself after a linear warm-up.
    ConstantWithWarmup,
    /// Straight down.
    Linear,
    /// Half a cosine down.
    Cosine,
    /// A cosine with hard restarts.
    CosineWithRestarts {
        /// How many times it goes down.
        num_cycles: f64,
    },
    /// A polynomial down.
    Polynomial {
        /// The exponent.
        power: f64,
    },
    /// `√t / √(n + t − warmup)`, with t the warm-up's length, or 10 000 without one.
    InverseSqrt,
    /// Warm-up, plateau, then half a cosine down over the last updates.
    WarmupStableDecay {
        /// Length of the fall, in updates.
        num_decay_steps: u64,
    },
}

/// A run's learning rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// Shape.
    pub kind: ScheduleKind,
    /// Peak rate.
    pub learning_rate: f64,
    /// Updates of linear warm-up.
    pub warmup_steps: u64,
    /// Updates of the whole run.
    pub total_steps: u64,
    /// Where a falling schedule ends, as a share of the peak.
    pub min_lr_ratio: f64,
}

impl Schedule {
    /// The learning rate of update `n`, counted from 0.
    pub fn at(&self, n: u64) -> f64 {
        self.learning_rate * self.factor(n as f64)
    }

    fn factor(&self, n: f64) -> f64 {
        let (warmup, total) = (self.warmup_steps as f64, self.total_steps as f64);
        let warms_up = !matches!(self.kind, ScheduleKind::Constant);
        if warms_up && n < warmup {
            return n / warmup.max(1.0);
        }
        let progress = (n - warmup) / (total - warmup).max(1.0);
        let half_cosine = |t: f64| 0.5 * (1.0 + (PI * t).cos());
        match self.kind {
            ScheduleKind::Constant | ScheduleKind::ConstantWithWarmup => 1.0,
            ScheduleKind::Linear => self.floored(((total - n) / (total - warmup).max(1.0)).max(0.0)),
            ScheduleKind::Cosine => self.floored(half_cosine(progress).max(0.0)),
            ScheduleKind::CosineWithRestarts { .. } if progress >= 1.0 => self.floored(0.0),
            ScheduleKind::CosineWithRestarts { num_cycles } => {
                self.floored(half_cosine((num_cycles * progress) % 1.0))
            }
            ScheduleKind::Polynomial { .. } if n > total => self.floored(0.0),
            ScheduleKind::Polynomial { power } => self.floored((1.0 - progress).powf(power)),
            ScheduleKind::InverseSqrt => {
                let scale = if warmup > 0.0 { warmup } else { 10_000.0 };
                1.0 / ((n + (scale - warmup)) / scale).sqrt()
            }
            ScheduleKind::WarmupStableDecay { num_decay_steps } => {
                let decay = num_decay_steps as f64;
                let into = n - (total - decay).max(warmup);
                if into < 0.0 { 1.0 } else { self.floored(half_cosine((into / decay.max(1.0)).min(1.0))) }
            }
        }
    }

    /// Lifts a factor that falls to 0 so that it falls to `min_lr_ratio`.
    fn floored(&self, factor: f64) -> f64 {
        factor * (1.0 - self.min_lr_ratio) + self.min_lr_ratio
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rates of transformers' `get_scheduler` (tests/golden/schedules.json, made by the script beside it).
    #[test]
    fn rates_equal_transformers() {
        let cases: Vec<serde_json::Value> =
            serde_json::from_str(include_str!("../../tests/golden/schedules.json")).unwrap();
        assert_eq!(cases.len(), 11);
        for case in &cases {
            let kwargs = &case["kwargs"];
            let learning_rate = case["lr"].as_f64().unwrap();
            let kind = match case["name"].as_str().unwrap() {
                "linear" => ScheduleKind::Linear,
                "cosine" | "cosine_with_min_lr" => ScheduleKind::Cosine,
                "constant" => ScheduleKind::Constant,
                "constant_with_warmup" => ScheduleKind::ConstantWithWarmup,
                "cosine_with_restarts" => {
                    ScheduleKind::CosineWithRestarts { num_cycles: kwargs["num_cycles"].as_f64().unwrap() }
                }
                "polynomial" => ScheduleKind::Polynomial { power: kwargs["power"].as_f64().unwrap() },
                "inverse_sqrt" => ScheduleKind::InverseSqrt,
                "warmup_stable_decay" => ScheduleKind::WarmupStableDecay {
                    num_decay_steps: kwargs["num_decay_steps"].as_u64().unwrap(),
                },
                other => panic!("no schedule is called {other}"),
            };
            let min_lr_ratio = match (kwargs["min_lr_rate"].as_f64(), kwargs["lr_end"].as_f64()) {
                (Some(ratio), _) => ratio,
                (_, Some(end)) => end / learning_rate,
                _ => 0.0,
            };
            let total_steps = case["steps"].as_u64().unwrap();
            let warmup_steps = case["warmup"].as_u64().unwrap();
            let schedule = Schedule { kind, learning_rate, warmup_steps, total_steps, min_lr_ratio };
            let wanted = case["lr_used_at_step"].as_array().unwrap();
            assert_eq!(wanted.len() as u64, total_steps);
            for (n, wanted) in wanted.iter().enumerate() {
                let (ours, wanted) = (schedule.at(n as u64), wanted.as_f64().unwrap());
                assert!(
                    (ours - wanted).abs() < 1e-12,
                    "{} at update {n}: {ours}, transformers {wanted}",
                    case["name"]
                );
            }
        }
    }
}
