//! AdamW by the kernel of `kernels/adamw.cu`, which takes any number of pieces in one launch; here it is one.

use candle_core::{Device, Tensor};

use super::AdamWStep;
use crate::error::Result;
use crate::ops::gpu::{Driver, In, InOut, LaunchShape, kernels, number};
use crate::runtime::TensorMut;

/// Values that a block updates.
const CHUNK: usize = 4096;

/// Parameters side by side in memory, with their state.
pub(in crate::ops) struct Piece {
    /// How many parameters.
    pub(in crate::ops) count: usize,
    /// Addresses of the mean of gradients and of their squares.
    pub(in crate::ops) state: [u64; 2],
    /// Addresses of the scales of these, where they are codes; else 0.
    pub(in crate::ops) scales: [u64; 2],
}

impl Piece {
    /// The piece as kernels read it, and the first of the `blocks` blocks that take it.
    pub(in crate::ops) fn upload(
        &self,
        param: &TensorMut,
        grad: &Tensor,
        blocks: usize,
    ) -> Result<[Tensor; 2]> {
        let param_at = InOut::<f32>::all(param)?.arg().value;
        let grad_at = In::<f32>::all(grad)?.arg().value;
        let ([mean, square], [mean_scales, square_scales]) = (self.state, self.scales);
        // No bf16 value beside the master, the only group of rates.
        let row = [param_at, grad_at, mean, square, 0, self.count as u64, 0, mean_scales, square_scales];
        let row = row.map(u64::cast_signed);
        Ok([Tensor::new(&row, param.device())?, Tensor::new(&[0, number(blocks)?], param.device())?])
    }
}

/// The constants of a step, as kernels read them: the one group of rates, and the factor on gradients.
pub(in crate::ops) fn upload_rates(options: &AdamWStep, device: &Device) -> Result<[Tensor; 2]> {
    let rates = options.rates();
    let group = [rates.decay, rates.step, rates.root, rates.beta1, rates.beta2, rates.eps];
    Ok([Tensor::new(&group, device)?, Tensor::new(&[rates.grad_scale], device)?])
}

pub(super) fn adamw(
    driver: &dyn Driver,
    param: &TensorMut,
    grad: &Tensor,
    moments: [&TensorMut; 2],
    options: &AdamWStep,
) -> Result<()> {
    let address = |tensor: &TensorMut| -> Result<u64> { Ok(InOut::<f32>::all(tensor)?.arg().value) };
    let count = param.elem_count();
    let blocks = count.div_ceil(CHUNK);
    let piece = Piece { count, state: [address(moments[0])?, address(moments[1])?], scales: [0; 2] };
    let (piece, rates) = (piece.upload(param, grad, blocks)?, upload_rates(options, param.device())?);
    kernels::adamw_f32(
        driver,
        LaunchShape::line(blocks, 256),
        In::all(&piece[0])?,
        In::all(&piece[1])?,
        1,
        In::all(&rates[0])?,
        In::all(&rates[1])?,
    )
}
