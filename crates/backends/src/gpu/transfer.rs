//! Transfers of the launch code to and from the device.

use candle_core::{Device, Shape, Tensor};

use super::{KernelElement, driver_on};
use crate::error::Result;
use crate::runtime::TensorMut;
use crate::runtime::copy::to_host_vec;
use crate::runtime::device_memory::allocated;
use crate::runtime::device_queue::{finish_upload, wait_for};
use crate::runtime::trace::{self, SpanInfo, SpanKind};

/// Copies `values` to a tensor on `device`.
///
/// # Errors
/// Fails if the device has not enough memory, or the shape has another number of elements.
pub fn upload<T: KernelElement>(values: &[T], shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    if let Some(driver) = driver_on(device) {
        driver.note_upload(size_of_val(values));
    }
    let shape = shape.into();
    if values.is_empty() {
        return Ok(TensorMut::zeros(shape, T::DTYPE, device)?.into_tensor());
    }
    let make = || Tensor::from_slice(values, shape.clone(), device);
    let there = allocated(device, size_of_val(values), make)?;
    finish_upload(device)?;
    Ok(there)
}

/// Returns the values of a tensor, after the device has computed them.
///
/// # Errors
/// Fails if an operation of the device failed.
pub fn read<T: KernelElement>(tensor: &Tensor) -> Result<Vec<T>> {
    if let Some(driver) = driver_on(tensor.device()) {
        driver.note_read();
    }
    if trace::is_on() {
        // A separate span, because the copy's own would include the wait.
        let _span = trace::span(|| SpanInfo::new(SpanKind::Wait, "wait for the device"));
        wait_for(tensor.device())?;
    }
    to_host_vec(tensor)
}
