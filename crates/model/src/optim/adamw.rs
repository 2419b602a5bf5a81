//! AdamW (arXiv 1711.05101): both moments of the gradient, in f32 or in 8 bits.

use super::algorithm::{OptimizerAlgorithm, UpdatePiece, UpdateStep};
use super::state::{StateTensor, StateValues};
use crate::error::{Error, Result};
use crate::ops::adamw::{AdamWPiece, AdamWStep, adamw};
use crate::ops::adamw_int8::adamw_int8;

/// AdamW with the constants of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay of the first and second moment.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
}

impl OptimizerAlgorithm for AdamW {
    fn state(&self) -> &'static [StateTensor] {
        // The mean of gradients, and the mean of their squares.
        &[
            StateTensor { name: "exp_avg", may_be_int8: true },
            StateTensor { name: "exp_avg_sq", may_be_int8: true },
        ]
    }

    fn writes_value(&self) -> bool {
        true
    }

    fn update(&self, pieces: &[UpdatePiece<'_>]) -> Result<()> {
        let (mut in_f32, mut in_int8) = (Vec::new(), Vec::new());
        for &UpdatePiece { param, value, rounding, grad, state, step } in pieces {
            let step = self.step(step);
            match state {
                [StateValues::F32(first), StateValues::F32(second)] => {
                    in_f32.push(AdamWPiece { param, value, rounding, grad, moments: [first, second], step });
                }
                [StateValues::Int8(first), StateValues::Int8(second)] => {
                    in_int8.push(AdamWPiece { param, value, rounding, grad, moments: [first, second], step });
                }
                _ => return Err(Error::internal("AdamW needs two moments of the same dtype")),
            }
        }
        adamw(&in_f32)?;
        adamw_int8(&in_int8)
    }
}

impl AdamW {
    fn step(&self, step: UpdateStep) -> AdamWStep {
        let UpdateStep { learning_rate, weight_decay, update, grad_scale } = step;
        let AdamW { betas, eps } = *self;
        AdamWStep { learning_rate, betas, eps, weight_decay, update, grad_scale }
    }
}
