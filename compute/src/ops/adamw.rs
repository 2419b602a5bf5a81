//! AdamW (arXiv 1711.05101), fused: one pass over parameter, gradient and both moments, all f32, in torch's order of
//! operations. The clip coefficient is folded into the read of the gradient.

pub(super) mod cases;
pub(super) mod cuda;

use candle_core::Tensor;
use rayon::prelude::*;

use super::gpu;
use crate::error::Result;
use crate::instruction_set::vectorized;
use crate::runtime::TensorMut;
use crate::runtime::copy::copy_into;
use crate::runtime::cpu_tensor::{read, update};

/// One update's constants.
#[derive(Debug, Clone, Copy)]
pub struct AdamWStep {
    /// Learning rate of this update.
    pub learning_rate: f64,
    /// Decay of the first and second moment.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// 1 for the first update.
    pub update: u64,
    /// Factor on the gradient (clipping).
    pub grad_scale: f64,
}

/// A run of parameters to update.
#[derive(Debug, Clone, Copy)]
pub struct AdamWPiece<'a, M> {
    /// The parameters, f32.
    pub param: &'a TensorMut,
    /// Where they are computed with in bf16: what becomes of `param` is rounded to it.
    pub value: Option<&'a TensorMut>,
    /// Their gradients, f32.
    pub grad: &'a Tensor,
    /// The mean of gradients, and of their squares.
    pub moments: [&'a M; 2],
    /// The constants of its update.
    pub step: AdamWStep,
}

impl<M> AdamWPiece<'_, M> {
    /// Brings `value` in line with `param`.
    pub(super) fn round(&self) -> Result<()> {
        self.value.map_or(Ok(()), |value| copy_into(value, self.param))
    }
}

/// The constants of the loop.
#[derive(Clone, Copy)]
pub(super) struct Rates {
    decay: f32,
    step: f32,
    root: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    grad_scale: f32,
}

impl AdamWStep {
    pub(super) fn rates(&self) -> Rates {
        let correction1 = 1.0 - self.betas[0].powf(self.update as f64);
        let correction2 = 1.0 - self.betas[1].powf(self.update as f64);
        Rates {
            decay: (1.0 - self.learning_rate * self.weight_decay) as f32,
            step: (self.learning_rate / correction1) as f32,
            root: correction2.sqrt() as f32,
            beta1: self.betas[0] as f32,
            beta2: self.betas[1] as f32,
            eps: self.eps as f32,
            grad_scale: self.grad_scale as f32,
        }
    }
}

/// Elements per task.
const CHUNK: usize = 1 << 15;

/// Updates the parameters of all pieces and their moments in place. What a piece holds is contiguous f32 `[elements]`
/// on one device, the same for all pieces, and shares no storage; `value` is bf16. On a GPU it is one launch.
///
/// # Errors
/// When a tensor is not contiguous f32, or an operation of the device fails.
pub fn adamw(pieces: &[AdamWPiece<'_, TensorMut>]) -> Result<()> {
    let Some(first) = pieces.first() else { return Ok(()) };
    if let Some(driver) = gpu::driver_of(first.param) {
        return cuda::adamw(driver, pieces);
    }
    pieces.iter().try_for_each(update_piece)
}

fn update_piece(piece: &AdamWPiece<'_, TensorMut>) -> Result<()> {
    let &AdamWPiece { param, grad, moments, step, .. } = piece;
    if !param.device().is_cpu() {
        reference(param, grad, moments, &step)?;
        return piece.round();
    }
    let rates = step.rates();
    let grad = read::<f32>(grad)?;
    let grad: &[f32] = &grad;
    update(param, |p: &mut [f32]| {
        update(moments[0], |m: &mut [f32]| {
            update(moments[1], |v: &mut [f32]| {
                let chunks = p.par_chunks_mut(CHUNK).zip(m.par_chunks_mut(CHUNK));
                chunks.zip(v.par_chunks_mut(CHUNK)).zip(grad.par_chunks(CHUNK)).for_each(
                    |(((p, m), v), g)| {
                        update_chunk(p, m, v, g, rates);
                    },
                );
            })
        })
    })???;
    piece.round()
}

vectorized! {
    pub(super) fn update_chunk(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], rates: Rates) {
        for (((p, m), v), g) in p.iter_mut().zip(m).zip(v).zip(g) {
            let g = g * rates.grad_scale;
            *p *= rates.decay;
            *m += (g - *m) * (1.0 - rates.beta1);
            *v = *v * rates.beta2 + g * g * (1.0 - rates.beta2);
            *p -= rates.step * (*m / (v.sqrt() / rates.root + rates.eps));
        }
    }
}

/// The definition, in candle's primitives.
pub(crate) fn reference(
    param: &TensorMut,
    grad: &Tensor,
    moments: [&TensorMut; 2],
    options: &AdamWStep,
) -> Result<()> {
    let [beta1, beta2] = options.betas;
    let correction1 = 1.0 - beta1.powf(options.update as f64);
    let correction2 = 1.0 - beta2.powf(options.update as f64);
    let g = (grad * options.grad_scale)?;
    let m = ((&**moments[0] * beta1)? + (&g * (1.0 - beta1))?)?;
    let v = ((&**moments[1] * beta2)? + (g.sqr()? * (1.0 - beta2))?)?;
    let denominator = ((v.sqrt()? / correction2.sqrt())? + options.eps)?;
    let shrunk = (&**param * (1.0 - options.learning_rate * options.weight_decay))?;
    let p = (shrunk - ((&m / denominator)? * (options.learning_rate / correction1))?)?;
    param.slice_set(&p, 0, 0)?;
    moments[0].slice_set(&m, 0, 0)?;
    moments[1].slice_set(&v, 0, 0)?;
    Ok(())
}
