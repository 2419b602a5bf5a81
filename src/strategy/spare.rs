//! Memory that is used for a while each step: embedding and head when whole, and their gradients before they are summed.
//!
//! An allocator hands pieces of this size back to the system, and each use would fault them in again, page by page.

use std::sync::Mutex;

use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};

/// Pieces that nobody uses now.
#[derive(Debug, Default)]
pub(super) struct Spare(Mutex<Vec<Tensor>>);

impl Spare {
    /// A flat piece of at least `len` elements, whatever they are: the smallest that fits, or a new one.
    pub(super) fn take(&self, len: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        let mut pieces = self.0.lock().map_err(|_| Error::internal("memory was lost in a panic"))?;
        let fits = |piece: &Tensor| piece.dtype() == dtype && piece.elem_count() >= len;
        let fitting = pieces.iter().enumerate().filter(|(_, piece)| fits(piece));
        match fitting.min_by_key(|(_, piece)| piece.elem_count()).map(|(i, _)| i) {
            Some(i) => Ok(pieces.swap_remove(i)),
            None => Ok(Tensor::zeros(len, dtype, device)?),
        }
    }

    /// Takes a piece back. After a panic it is freed instead.
    pub(super) fn give(&self, piece: Tensor) {
        if let Ok(mut pieces) = self.0.lock() {
            pieces.push(piece);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_piece_that_fits_is_used_again() -> Result<()> {
        let spare = Spare::default();
        for len in [10, 4, 7] {
            spare.give(Tensor::zeros(len, DType::F32, &Device::Cpu)?);
        }
        let lens = [5, 5, 5, 4, 1].map(|len| spare.take(len, DType::F32, &Device::Cpu));
        let lens: Vec<usize> =
            lens.into_iter().map(|piece| piece.map(|p| p.elem_count())).collect::<Result<_>>()?;
        assert_eq!(lens, [7, 10, 5, 4, 1]);
        spare.give(Tensor::zeros(9, DType::BF16, &Device::Cpu)?);
        assert_eq!(spare.take(3, DType::F32, &Device::Cpu)?.dtype(), DType::F32);
        Ok(())
    }
}
