//! A sum of losses that a GPU may not have computed yet. Reading it waits for the GPU, so the
//! engine reads it once per step.

use candle_core::Tensor;

use crate::backends::gpu;
use crate::error::Result;

/// Losses to sum, as numbers or as device tensors.
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
        /// The coefficient of each row; none means 1.
        coefficients: Option<Vec<f32>>,
    },
}

impl From<f64> for LossSum {
    fn from(sum: f64) -> Self {
        LossSum { parts: vec![LossPart::Known(sum)] }
    }
}

impl LossSum {
    /// Returns the sum of `losses: [rows]` f32, each times its coefficient.
    pub(super) fn pending(losses: Tensor, coefficients: Option<Vec<f32>>) -> Self {
        LossSum { parts: vec![LossPart::Pending { losses, coefficients }] }
    }

    /// Adds another sum.
    pub fn add(&mut self, other: LossSum) {
        self.parts.extend(other.parts);
    }

    /// Returns the sum, added in a fixed order; waits for the device.
    ///
    /// # Errors
    /// Fails if an operation of the device failed.
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
