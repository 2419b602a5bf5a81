//! The losses of direct preference optimization, as functions of the log-ratios of a pair. The
//! formulas and names are those of TRL 1.16 (`dpo_trainer.py`).

use std::f64::consts::LN_2;

use super::dual::Dual;
use crate::recipe::ObjectiveSection;
use crate::recipe::enums::{FDivergence, LossType};

/// The largest exponent of the alpha divergence, as in TRL.
const LARGEST_EXPONENT: f64 = 80.0;

/// A pair of log-ratios, policy to reference, with the lengths of the two answers.
#[derive(Debug, Clone, Copy)]
pub(super) struct LogRatios {
    /// The log-ratios of the chosen and of the rejected answer.
    pub(super) ratios: [f64; 2],
    /// The number of tokens of each answer.
    pub(super) tokens: [f64; 2],
}

/// Returns one loss of a pair, with its derivatives by the two log-ratios. `keys` is the recipe's
/// section.
pub(super) fn pair_loss(keys: &ObjectiveSection, loss: LossType, pair: LogRatios) -> Dual {
    let (beta, epsilon) = (keys.beta, keys.label_smoothing);
    let [c, j] = Dual::variables(pair.ratios);
    let [score_c, score_j] = [c, j].map(|ratio| score(keys, ratio));
    let [n_c, n_j] = pair.tokens.map(|count| count.max(1.0));
    let difference = (score_c - score_j) * beta;
    let per_token = score_c / n_c - score_j / n_j;
    match loss {
        LossType::Hinge => (-difference + 1.0).at_least_zero(),
        LossType::Ipo => (per_token - 0.5 / beta).square(),
        LossType::SigmoidNorm => -(per_token * beta).log_sigmoid(),
        LossType::Robust => smoothed(difference, [1.0 - epsilon, -epsilon]) / (1.0 - 2.0 * epsilon),
        LossType::ExoPair => {
            let term = |x: Dual, share: f64| x.sigmoid() * (x.log_sigmoid() - share.ln());
            term(difference, 1.0 - epsilon) + term(-difference, epsilon)
        }
        LossType::NcaPair => {
            let [c, j] = [c * beta, j * beta];
            -c.log_sigmoid() - (-c).log_sigmoid() * 0.5 - (-j).log_sigmoid() * 0.5
        }
        LossType::BcoPair => -(c * beta).log_sigmoid() - (-j * beta).log_sigmoid(),
        LossType::SppoHard => (c - 0.5 / beta).square() + (j + 0.5 / beta).square(),
        LossType::Aot | LossType::AotUnpaired => smoothed((c - j) * beta, [1.0 - epsilon, epsilon]),
        LossType::ApoZero => -(c * beta).sigmoid() + 1.0 + (j * beta).sigmoid(),
        LossType::ApoDown => (c * beta).sigmoid() - ((c - j) * beta).sigmoid() + 1.0,
        LossType::Discopop => {
            let blend = (difference / keys.discopop_tau).sigmoid();
            (-blend + 1.0) * -difference.log_sigmoid() + blend * (-difference).exp()
        }
        // The recipe accepts no other loss for this objective; `sft` is a loss of tokens.
        _ => -difference.log_sigmoid(),
    }
}

/// Returns the score of a log-ratio: the derivative of the divergence at the ratio.
fn score(keys: &ObjectiveSection, ratio: Dual) -> Dual {
    match keys.f_divergence_type {
        FDivergence::ReverseKl => ratio,
        FDivergence::ForwardKl => -(-ratio).exp() + 1.0,
        FDivergence::JsDivergence => ratio.log_sigmoid() + LN_2,
        FDivergence::AlphaDivergence => {
            let power = keys.f_alpha_divergence_coef - 1.0;
            if power.abs() < 1e-6 {
                return ratio;
            }
            ((ratio * power).at_most(LARGEST_EXPONENT).exp() - 1.0) / power
        }
    }
}

/// Returns −w₁ · logσ(x) − w₂ · logσ(−x).
pub(super) fn smoothed(x: Dual, [as_labelled, exchanged]: [f64; 2]) -> Dual {
    x.log_sigmoid() * -as_labelled + (-x).log_sigmoid() * -exchanged
}

#[cfg(test)]
mod tests {
    use super::super::dual::tests::slopes_are_right;
    use super::*;

    const LOSSES: [LossType; 14] = [
        LossType::Sigmoid,
        LossType::Hinge,
        LossType::Ipo,
        LossType::SigmoidNorm,
        LossType::Robust,
        LossType::ExoPair,
        LossType::NcaPair,
        LossType::BcoPair,
        LossType::SppoHard,
        LossType::Aot,
        LossType::AotUnpaired,
        LossType::ApoZero,
        LossType::ApoDown,
        LossType::Discopop,
    ];
    const DIVERGENCES: [FDivergence; 4] = [
        FDivergence::ReverseKl,
        FDivergence::ForwardKl,
        FDivergence::JsDivergence,
        FDivergence::AlphaDivergence,
    ];

    #[test]
    fn each_loss_has_its_derivative_under_each_divergence() {
        for divergence in DIVERGENCES {
            let keys = ObjectiveSection {
                beta: 0.4,
                label_smoothing: 0.1,
                discopop_tau: 0.5,
                f_divergence_type: divergence,
                f_alpha_divergence_coef: 0.3,
                ..ObjectiveSection::default()
            };
            for loss in LOSSES {
                for at in [[0.0, 0.0], [1.7, -2.2], [-3.5, 0.4], [0.3, 0.9]] {
                    let what = format!("{loss} under {divergence}");
                    slopes_are_right(&what, at, |[c, j]| {
                        let pair = LogRatios { ratios: [c.value, j.value], tokens: [12.0, 5.0] };
                        pair_loss(&keys, loss, pair)
                    });
                }
            }
        }
    }

    /// The value of each loss of a pair whose answers have the log-ratios 1 and −0.5, by hand.
    #[test]
    fn losses_have_their_values() {
        let keys = ObjectiveSection { beta: 2.0, label_smoothing: 0.25, ..ObjectiveSection::default() };
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let (p, s) = (sigmoid(3.0), |x: f64| -sigmoid(x).ln());
        let blend = sigmoid(3.0 / 0.05);
        for (loss, wanted) in [
            (LossType::Sigmoid, s(3.0)),
            (LossType::Hinge, 0.0),
            (LossType::Ipo, (1.0 / 4.0 + 0.5 / 2.0 - 0.25_f64).powi(2)),
            (LossType::SigmoidNorm, s(2.0 * (1.0 / 4.0 + 0.5 / 2.0))),
            (LossType::Robust, (0.75 * s(3.0) - 0.25 * s(-3.0)) / 0.5),
            (LossType::ExoPair, p * (p / 0.75).ln() + (1.0 - p) * ((1.0 - p) / 0.25).ln()),
            (LossType::NcaPair, s(2.0) + 0.5 * s(-2.0) + 0.5 * s(1.0)),
            (LossType::BcoPair, s(2.0) + s(1.0)),
            (LossType::SppoHard, 0.75_f64.powi(2) + 0.25_f64.powi(2)),
            (LossType::Aot, 0.75 * s(3.0) + 0.25 * s(-3.0)),
            (LossType::ApoZero, 1.0 - sigmoid(2.0) + sigmoid(-1.0)),
            (LossType::ApoDown, sigmoid(2.0) + 1.0 - sigmoid(3.0)),
            (LossType::Discopop, s(3.0) * (1.0 - blend) + (-3.0_f64).exp() * blend),
        ] {
            let pair = LogRatios { ratios: [1.0, -0.5], tokens: [4.0, 2.0] };
            let value = pair_loss(&keys, loss, pair).value;
            assert!((value - wanted).abs() < 1e-12, "{loss}: {value} {wanted}");
        }
    }
}
