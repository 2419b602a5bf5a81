//! Elementwise sums by the kernels of `kernels/elementwise.cu`.

use candle_core::{DType, Device, Tensor};
use half::bf16;

use crate::error::Result;
use crate::ops::gpu::{Driver, In, InOut, LaunchShape, Out, is_float, kernels, number};
use crate::ops::matmul::empty;
use crate::runtime::TensorMut;
use crate::runtime::copy::to_device;

/// Returns true if kernels support values of these dtypes.
pub(super) fn is_supported(a: &Tensor, b: &Tensor) -> bool {
    [a, b].iter().all(|x| is_float(x.dtype()))
}

/// Returns the launch shape: a block processes 8192 values if all are bf16, else 4096.
fn shape(count: usize, all_bf16: bool) -> LaunchShape {
    LaunchShape::line(count.div_ceil(if all_bf16 { 8192 } else { 4096 }), 256)
}

/// Returns Σ x² of each tensor, `[tensors]` f64, in two stages whose partition does not depend on
/// the device.
pub(super) fn sums_of_squares(driver: &dyn Driver, tensors: &[&Tensor], device: &Device) -> Result<Tensor> {
    /// Values per block of the first stage.
    const SHARE: usize = 16_384;
    let sums = Tensor::zeros(tensors.len(), DType::F64, device)?;
    for (at, x) in tensors.iter().enumerate().filter(|(_, x)| x.elem_count() > 0) {
        let (x, blocks) = (to_device(x, device)?, x.elem_count().div_ceil(SHARE));
        let partials = Tensor::zeros(blocks, DType::F64, device)?;
        let (shape, count, out) =
            (LaunchShape::line(blocks, 256), x.elem_count() as i64, Out::all(&partials)?);
        if x.dtype() == DType::BF16 {
            kernels::sum_of_squares_bf16(driver, shape, In::all(&x)?, count, out)?;
        } else {
            kernels::sum_of_squares_f32(driver, shape, In::all(&x)?, count, out)?;
        }
        let sum = sums.narrow(0, at, 1)?;
        let (partials, out) = (In::<f64>::all(&partials)?, Out::<f64>::all(&sum)?);
        kernels::sum_partials(driver, LaunchShape::line(1, 256), partials, number(blocks)?, out)?;
    }
    Ok(sums)
}

pub(super) fn add(driver: &dyn Driver, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let count = a.elem_count();
    let y = empty(1, count, a.dtype(), a.device())?;
    let bf16s = a.dtype() == DType::BF16;
    if bf16s {
        let (a, b, y) = (In::<bf16>::all(a)?, In::<bf16>::all(b)?, Out::<bf16>::all(&y)?);
        kernels::add_bf16(driver, shape(count, bf16s), a, b, y, count as i64)?;
    } else {
        let (a, b, y) = (In::<f32>::all(a)?, In::<f32>::all(b)?, Out::<f32>::all(&y)?);
        kernels::add_f32(driver, shape(count, bf16s), a, b, y, count as i64)?;
    }
    Ok(y.reshape(a.shape())?)
}

pub(super) fn add_into(driver: &dyn Driver, dst: &TensorMut, x: &Tensor) -> Result<()> {
    let count = dst.elem_count();
    macro_rules! launch {
        ($kernel:ident, $dst:ty, $x:ty, $all_bf16:literal) => {{
            let (dst, x) = (InOut::<$dst>::all(dst)?, In::<$x>::all(x)?);
            kernels::$kernel(driver, shape(count, $all_bf16), dst, x, count as i64)
        }};
    }
    match (dst.dtype(), x.dtype()) {
        (DType::BF16, DType::BF16) => launch!(add_into_bf16_bf16, bf16, bf16, true),
        (DType::BF16, _) => launch!(add_into_bf16_f32, bf16, f32, false),
        (_, DType::BF16) => launch!(add_into_f32_bf16, f32, bf16, false),
        _ => launch!(add_into_f32_f32, f32, f32, false),
    }
}
