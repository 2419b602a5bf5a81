//! AdamW with f32 moments, one pair per piece of parameter memory.

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::ops::adamw::{AdamW, adamw};

/// The constants of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OptimizerOptions {
    /// Decay of the first and second moment.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay of matrices and tables; norms and biases are never decayed.
    pub weight_decay: f64,
}

/// A run of parameter memory that is updated alike: f32 values and gradients, one-dimensional.
#[derive(Debug, Clone)]
pub struct Piece {
    /// What is updated in place.
    pub param: Tensor,
    /// Its gradient.
    pub grad: Tensor,
    /// Weight decay applies.
    pub decay: bool,
}

/// State beside the pieces it was made for.
#[derive(Debug)]
pub struct Optimizer {
    options: OptimizerOptions,
    pieces: Vec<Piece>,
    moments: Vec<[Tensor; 2]>,
    updates: u64,
}

impl Optimizer {
    /// Moments of zero for every piece.
    pub fn new(options: OptimizerOptions, pieces: Vec<Piece>) -> Result<Self> {
        let moments = pieces
            .iter()
            .map(|piece| {
                let zeros = || Tensor::zeros(piece.param.shape(), DType::F32, piece.param.device());
                Ok([zeros()?, zeros()?])
            })
            .collect::<Result<_>>()?;
        Ok(Optimizer { options, pieces, moments, updates: 0 })
    }

    /// One update at this learning rate; gradients count `grad_scale` times.
    pub fn update(&mut self, learning_rate: f64, grad_scale: f64) -> Result<()> {
        self.updates += 1;
        for (piece, [first, second]) in self.pieces.iter().zip(&self.moments) {
            let step = AdamW {
                learning_rate,
                betas: self.options.betas,
                eps: self.options.eps,
                weight_decay: if piece.decay { self.options.weight_decay } else { 0.0 },
                update: self.updates,
                grad_scale,
            };
            adamw(&piece.param, &piece.grad, [first, second], &step)?;
        }
        Ok(())
    }

    /// Updates so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// The state to save: both moments of each piece, in order.
    pub fn moments(&self) -> &[[Tensor; 2]] {
        &self.moments
    }

    /// Goes on after `updates` updates with moments already put in place through [`Optimizer::moments`].
    pub fn resume(&mut self, updates: u64) {
        self.updates = updates;
    }
}
