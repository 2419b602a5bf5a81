//! AdamW (arXiv 1711.05101): both moments of the gradient, in f32 or in 8 bits.

use candle_core::Tensor;

use super::algorithm::{OptimizerAlgorithm, UpdateStep};
use super::state::{StateTensor, StateValues};
use crate::error::{Error, Result};
use crate::ops::adamw::{AdamWStep, adamw};
use crate::ops::adamw_int8::adamw_int8;
use crate::runtime::TensorMut;

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

    fn update(
        &self,
        param: &TensorMut,
        grad: &Tensor,
        state: &[StateValues],
        step: &UpdateStep,
    ) -> Result<()> {
        let &UpdateStep { learning_rate, weight_decay, update, grad_scale } = step;
        let AdamW { betas, eps } = *self;
        let step = AdamWStep { learning_rate, betas, eps, weight_decay, update, grad_scale };
        match state {
            [StateValues::F32(first), StateValues::F32(second)] => adamw(param, grad, [first, second], &step),
            [StateValues::Int8(first), StateValues::Int8(second)] => {
                adamw_int8(param, grad, [first, second], &step)
            }
            _ => Err(Error::internal("AdamW keeps two moments alike")),
        }
    }
}
