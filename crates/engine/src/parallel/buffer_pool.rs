//! Pooled memory that each step uses for a while: gathered embedding and head, and their gradients
//! before they are summed.
//!
//! Without the pool, an allocator returns buffers of this size to the system, and each use causes
//! page faults for all of their pages.

use std::sync::Mutex;

use candle_core::{DType, Device};

use crate::error::{Error, Result};
use crate::runtime::TensorMut;

/// The free buffers.
#[derive(Debug, Default)]
pub(super) struct BufferPool(Mutex<Vec<TensorMut>>);

impl BufferPool {
    /// Returns a flat buffer of at least `len` elements with arbitrary contents: the smallest that
    /// fits, or a new one in place of the largest that does not. A caller that takes several begins
    /// with the longest.
    pub(super) fn take(&self, len: usize, dtype: DType, device: &Device) -> Result<TensorMut> {
        let mut buffers = self.0.lock().map_err(|_| Error::internal("memory was lost in a panic"))?;
        let free = || {
            let sizes = buffers.iter().map(|buffer| buffer.elem_count()).enumerate();
            sizes.filter(|(i, _)| buffers[*i].dtype() == dtype)
        };
        if let Some((i, _)) = free().filter(|(_, n)| *n >= len).min_by_key(|(_, n)| *n) {
            return Ok(buffers.swap_remove(i));
        }
        // Freed first, so that both never exist together.
        if let Some((i, _)) = free().max_by_key(|(_, n)| *n) {
            drop(buffers.swap_remove(i));
        }
        TensorMut::zeros(len, dtype, device)
    }

    /// Returns a buffer to the pool. After a panic it is freed instead.
    pub(super) fn give(&self, buffer: TensorMut) {
        if let Ok(mut buffers) = self.0.lock() {
            buffers.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_piece_that_fits_is_used_again() -> Result<()> {
        let pool = BufferPool::default();
        for len in [10, 4, 7] {
            pool.give(TensorMut::zeros(len, DType::F32, &Device::Cpu)?);
        }
        let take = |len: usize| pool.take(len, DType::F32, &Device::Cpu).map(|buffer| buffer.elem_count());
        assert_eq!([take(5)?, take(5)?, take(4)?, take(1)?], [7, 10, 4, 1]);
        // A table, then a longer one with a norm beside it: one piece for both tables.
        pool.give(TensorMut::zeros(10, DType::F32, &Device::Cpu)?);
        pool.give(pool.take(12, DType::F32, &Device::Cpu)?);
        assert_eq!([take(10)?, take(10)?], [12, 10]);
        pool.give(TensorMut::zeros(9, DType::BF16, &Device::Cpu)?);
        assert_eq!(pool.take(3, DType::F32, &Device::Cpu)?.dtype(), DType::F32);
        Ok(())
    }
}
