//! AdamW by the kernel of `kernels/adamw.cu`, which takes any number of pieces in one launch; here it is one.

use candle_core::Tensor;

use super::AdamWStep;
use crate::error::Result;
use crate::ops::gpu::{Driver, In, InOut, LaunchShape, kernels, number};
use crate::runtime::TensorMut;

/// Values that a block updates.
const CHUNK: usize = 4096;

pub(super) fn adamw(
    driver: &dyn Driver,
    param: &TensorMut,
    grad: &Tensor,
    moments: [&TensorMut; 2],
    options: &AdamWStep,
) -> Result<()> {
    let (count, device, rates) = (param.elem_count(), param.device(), options.rates());
    let address =
        |tensor: &TensorMut| -> Result<i64> { Ok(InOut::<f32>::all(tensor)?.arg().value.cast_signed()) };
    let gradient = In::<f32>::all(grad)?.arg().value.cast_signed();
    // No bf16 value beside the master, the only group of rates, no scales of moments.
    let piece =
        [address(param)?, gradient, address(moments[0])?, address(moments[1])?, 0, count as i64, 0, 0, 0];
    let blocks = count.div_ceil(CHUNK);
    let pieces = Tensor::new(&piece, device)?;
    let first_block = Tensor::new(&[0, number(blocks)?], device)?;
    let group = [rates.decay, rates.step, rates.root, rates.beta1, rates.beta2, rates.eps];
    let (group, grad_scale) = (Tensor::new(&group, device)?, Tensor::new(&[rates.grad_scale], device)?);
    kernels::adamw_f32(
        driver,
        LaunchShape::line(blocks, 256),
        In::all(&pieces)?,
        In::all(&first_block)?,
        1,
        In::all(&group)?,
        In::all(&grad_scale)?,
    )
}
