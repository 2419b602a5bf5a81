//! Learning-rate schedules, as transformers' `get_scheduler` computes them: the n-th update (from
//! 0) uses `learning_rate · factor(n)`, so the first warm-up step has rate 0.

use std::f64::consts::PI;

use crate::recipe::enums::SchedulerKind;

/// The learning-rate schedule of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// The shape after the warm-up. Falling shapes end at `min_lr_ratio` of the peak.
    pub kind: SchedulerKind,
    /// The peak learning rate.
    pub learning_rate: f64,
    /// Number of updates of linear warm-up.
    pub warmup_steps: u64,
    /// Number of updates of the whole run.
    pub total_steps: u64,
    /// The end of a falling schedule, as a fraction of the peak.
    pub min_lr_ratio: f64,
    /// Number of cycles of [`SchedulerKind::CosineWithRestarts`].
    pub num_cycles: f64,
    /// The exponent of [`SchedulerKind::Polynomial`].
    pub power: f64,
    /// Number of updates of the fall at the end of [`SchedulerKind::WarmupStableDecay`].
    pub num_decay_steps: u64,
}

impl Schedule {
    /// Returns the learning rate of update `n`, counted from 0.
    pub fn at(&self, n: u64) -> f64 {
        self.learning_rate * self.factor(n as f64)
    }

    fn factor(&self, n: f64) -> f64 {
        let (warmup, total) = (self.warmup_steps as f64, self.total_steps as f64);
        let warms_up = self.kind.has_warmup();
        if warms_up && n < warmup {
            return n / warmup.max(1.0);
        }
        let progress = (n - warmup) / (total - warmup).max(1.0);
        let half_cosine = |t: f64| 0.5 * (1.0 + (PI * t).cos());
        match self.kind {
            SchedulerKind::Constant | SchedulerKind::ConstantWithWarmup => 1.0,
            SchedulerKind::Linear => self.floored(((total - n) / (total - warmup).max(1.0)).max(0.0)),
            SchedulerKind::Cosine | SchedulerKind::CosineWithMinLr => {
                self.floored(half_cosine(progress).max(0.0))
            }
            SchedulerKind::CosineWithRestarts if progress >= 1.0 => self.floored(0.0),
            SchedulerKind::CosineWithRestarts => {
                self.floored(half_cosine((self.num_cycles * progress) % 1.0))
            }
            SchedulerKind::Polynomial if n > total => self.floored(0.0),
            SchedulerKind::Polynomial => self.floored((1.0 - progress).powf(self.power)),
            SchedulerKind::InverseSqrt => {
                let scale = if warmup > 0.0 { warmup } else { 10_000.0 };
                1.0 / ((n + (scale - warmup)) / scale).sqrt()
            }
            SchedulerKind::WarmupStableDecay => {
                let decay = self.num_decay_steps as f64;
                let into = n - (total - decay).max(warmup);
                if into < 0.0 { 1.0 } else { self.floored(half_cosine((into / decay.max(1.0)).min(1.0))) }
            }
        }
    }

    /// Scales a factor that falls to 0 so that it falls to `min_lr_ratio`.
    fn floored(&self, factor: f64) -> f64 {
        factor * (1.0 - self.min_lr_ratio) + self.min_lr_ratio
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rates of transformers' `get_scheduler` (tests/golden/schedules.json, made by the script
    /// beside it).
    #[test]
    fn rates_equal_transformers() {
        let cases: Vec<serde_json::Value> =
            serde_json::from_str(include_str!("../../../../tests/golden/schedules.json")).unwrap();
        assert!(!cases.is_empty());
        for case in &cases {
            let kwargs = &case["kwargs"];
            let learning_rate = case["lr"].as_f64().unwrap();
            let kind = match case["name"].as_str().unwrap() {
                "linear" => SchedulerKind::Linear,
                "cosine" | "cosine_with_min_lr" => SchedulerKind::Cosine,
                "constant" => SchedulerKind::Constant,
                "constant_with_warmup" => SchedulerKind::ConstantWithWarmup,
                "cosine_with_restarts" => SchedulerKind::CosineWithRestarts,
                "polynomial" => SchedulerKind::Polynomial,
                "inverse_sqrt" => SchedulerKind::InverseSqrt,
                "warmup_stable_decay" => SchedulerKind::WarmupStableDecay,
                other => panic!("no schedule is called {other}"),
            };
            let min_lr_ratio = match (kwargs["min_lr_rate"].as_f64(), kwargs["lr_end"].as_f64()) {
                (Some(ratio), _) => ratio,
                (_, Some(end)) => end / learning_rate,
                _ => 0.0,
            };
            let total_steps = case["steps"].as_u64().unwrap();
            let warmup_steps = case["warmup"].as_u64().unwrap();
            let schedule = Schedule {
                kind,
                learning_rate,
                warmup_steps,
                total_steps,
                min_lr_ratio,
                num_cycles: kwargs["num_cycles"].as_f64().unwrap_or(1.0),
                power: kwargs["power"].as_f64().unwrap_or(1.0),
                num_decay_steps: kwargs["num_decay_steps"].as_u64().unwrap_or(0),
            };
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
