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
    let is_same = |kept: &&DeviceTable| {
        kept.address == address
            && kept.there.device().same_device(device)
            && kept.there.dtype() == T::DTYPE
            && kept.there.elem_count() == table.len()
    };
    if let Some(there) = UPLOADED.with_borrow(|kept| kept.iter().find(is_same).map(|kept| kept.there.clone()))
    {
        return Ok(there);
    }
    let there = upload(table, table.len(), device)?;
    UPLOADED.with_borrow_mut(|kept| kept.push(DeviceTable { address, there: there.clone() }));
    Ok(there)
}
