//! Constant tables of kernels, on the device for as long as the thread lives: uploaded once, not at
//! each launch.

use std::cell::RefCell;

use candle_core::{Device, Tensor};

use super::{KernelElement, upload};
use crate::error::Result;

/// A table, identified by its address in this program.
struct DeviceTable {
    address: usize,
    there: Tensor,
}

thread_local! {
    /// The uploaded tables of this thread.
    static UPLOADED: RefCell<Vec<DeviceTable>> = const { RefCell::new(Vec::new()) };
}

/// Returns `table` as a one-dimensional tensor on `device`.
///
/// # Errors
/// Fails if the device has not enough memory.
pub fn constant<T: KernelElement>(table: &'static [T], device: &Device) -> Result<Tensor> {
    let address = table.as_ptr().addr();
    let is_same = |entry: &&DeviceTable| {
        entry.address == address
            && entry.there.device().same_device(device)
            && entry.there.dtype() == T::DTYPE
            && entry.there.elem_count() == table.len()
    };
    if let Some(table_on_device) =
        UPLOADED.with_borrow(|tables| tables.iter().find(is_same).map(|entry| entry.there.clone()))
    {
        return Ok(table_on_device);
    }
    let uploaded = upload(table, table.len(), device)?;
    UPLOADED.with_borrow_mut(|tables| tables.push(DeviceTable { address, there: uploaded.clone() }));
    Ok(uploaded)
}
