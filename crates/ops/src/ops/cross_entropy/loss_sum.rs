//! A sum of losses that a GPU may not have computed yet: reading it waits for the GPU, so that it is read once a step.

use candle_core::Tensor;

use crate::error::Result;
use crate::ops::gpu;

/// Losses to be added up, as numbers or where a device leaves them.
#[derive(Debug, Default)]
pub struct LossSum {
    parts: Vec<LossPart>,
}

#[derive(Debug)]
enum LossPart {
    Known(f64),
    Pending {
        /// The losses of rows, `[rows]` f32.
        losses: Tensor,
        /// The factor of each; none: all count once.
        coefficients: Option<Vec<f32>>,
    },
}

impl From<f64> for LossSum {
    fn from(sum: f64) -> Self {
        LossSum { parts: vec![LossPart::Known(sum)] }
    }
}

impl LossSum {
    /// The sum of `losses: [rows]` f32, each times its coefficient.
    pub(super) fn pending(losses: Tensor, coefficients: Option<Vec<f32>>) -> Self {
        LossSum { parts: vec![LossPart::Pending { losses, coefficients }] }
    }

    /// Adds another sum.
    pub fn add(&mut self, other: LossSum) {
        self.parts.extend(other.parts);
    }

    /// The sum, in the order in which it was made; waits for the device.
    ///
    /// # Errors
    /// An operation of the device failed.
    pub fn read(&self) -> Result<f64> {
        self.parts.iter().map(LossPart::read).sum()
    }
}

impl LossPart {
    fn read(&self) -> Result<f64> {
        let (losses, coefficients) = match self {
            LossPart::Known(sum) => return Ok(*sum),
            LossPart::Pending { losses, coefficients } => (gpu::read::<f32>(losses)?, coefficients),
        };
        let losses = losses.into_iter().map(f64::from);
        Ok(match coefficients {
            None => losses.sum(),
            Some(coefficients) => losses.zip(coefficients).map(|(loss, &c)| f64::from(c) * loss).sum(),
        })
    }
}
