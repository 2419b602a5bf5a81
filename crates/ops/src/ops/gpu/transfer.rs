//! What launch code brings to the device and reads back.

use candle_core::{Device, Shape, Tensor};

use super::{KernelElement, driver_on};
use crate::error::Result;
use crate::runtime::TensorMut;
use crate::runtime::copy::to_host_vec;
use crate::runtime::device_memory::requested;
use crate::runtime::trace::{self, SpanInfo, SpanKind};

/// `values` as a tensor on `device`.
///
/// # Errors
/// The device has no memory for it; the shape has another number of elements.
pub(crate) fn upload<T: KernelElement>(
    values: &[T],
    shape: impl Into<Shape>,
    device: &Device,
) -> Result<Tensor> {
    if let Some(driver) = driver_on(device) {
        driver.note_upload(size_of_val(values));
    }
    let shape = shape.into();
    if values.is_empty() {
        return Ok(TensorMut::zeros(shape, T::DTYPE, device)?.into_tensor());
    }
    requested(size_of_val(values), || Tensor::from_slice(values, shape, device))
}

/// The values of a tensor, once the device has computed them.
///
/// # Errors
/// An operation of the device failed.
pub(crate) fn read<T: KernelElement>(tensor: &Tensor) -> Result<Vec<T>> {
    if let Some(driver) = driver_on(tensor.device()) {
        driver.note_read();
    }
    if trace::is_on() {
        // The copy alone would be shown as long as all that it waits for.
        let _span = trace::span(|| SpanInfo::new(SpanKind::Wait, "wait for the device"));
        tensor.device().synchronize()?;
    }
    to_host_vec(tensor)
}
