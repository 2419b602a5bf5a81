//! A dequantized matrix that a GPU's second queue makes beside the products before its own.
//! **Not yet run on a GPU.**

use std::cell::Cell;

use candle_core::{DType, Tensor};

use super::{Quantized, cuda};
use crate::error::{DeviceFault, Error, Result};
use crate::ops::gpu::{Driver, WorkBeside, driver_of};
use crate::quant::RunMeaning;
use crate::runtime::TensorMut;
use crate::runtime::trace::{SpanInfo, span};

thread_local! {
    /// True once a panel of this thread's products did not fit. A request that fails empties the
    /// memory pool, which is too slow to repeat for each product.
    static IS_REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// The panel of stacked quantized matrices, in the making. It holds the memory that the second
/// queue reads and writes: dropping it makes the first queue, which frees and reuses that memory,
/// wait for the second.
#[derive(Debug)]
pub struct PanelAhead {
    /// `[Σ out, in]`.
    panel: TensorMut,
    /// The matrices that the second queue reads.
    _weights: Vec<Quantized>,
    /// The end of the work; none once the first queue waits for it.
    end: Option<Box<dyn WorkBeside>>,
}

impl PanelAhead {
    /// Starts to dequantize stacked whole matrices of one width to `dtype`, `[Σ out, in]`, as
    /// [`super::dequantize`] does, after all work that the device has so far. Returns none if the
    /// device has no second queue, no kernel for it, or not enough memory for a panel more, now or
    /// before on this thread: the product then makes its own.
    ///
    /// # Errors
    /// Fails if a run is missing, or the driver refuses the work.
    pub fn start(weights: &[&Quantized], dtype: DType) -> Result<Option<Self>> {
        let Some(first) = weights.first() else { return Err(Error::internal("a panel without matrices")) };
        let codes = first.run(RunMeaning::Codes)?;
        let Some(driver) = driver_of(codes).filter(|_| cuda::is_supported(weights, dtype)) else {
            return Ok(None);
        };
        if IS_REFUSED.get() {
            return Ok(None);
        }
        match Self::start_by(driver, weights, dtype) {
            Err(error) if error.device_fault() == Some(DeviceFault::OutOfMemory) => {
                IS_REFUSED.set(true);
                Ok(None)
            }
            started => started,
        }
    }

    fn start_by(driver: &dyn Driver, weights: &[&Quantized], dtype: DType) -> Result<Option<Self>> {
        let panel = cuda::unwritten(weights, dtype)?;
        let sources = cuda::sources(weights)?;
        let _span = span(|| SpanInfo::op("dequantize").detail("ahead").dims(panel.dims()));
        let end = driver.beside(&mut |second| cuda::fill(second, &sources, &panel))?;
        let weights = weights.iter().map(|weight| (*weight).clone()).collect();
        Ok(end.map(|end| PanelAhead { panel, _weights: weights, end: Some(end) }))
    }

    /// Returns the panel, `[Σ out, in]` in the dtype that it was started with, for the work that
    /// follows, which waits for it on the device.
    ///
    /// # Errors
    /// Fails if the driver refuses it.
    pub fn finish(mut self) -> Result<Tensor> {
        self.wait()?;
        Ok(self.panel.clone().into_tensor())
    }

    fn wait(&mut self) -> Result<()> {
        if let Some(end) = &self.end {
            end.join()?;
        }
        self.end = None;
        Ok(())
    }
}

impl Drop for PanelAhead {
    fn drop(&mut self) {
        if self.wait().is_err() {
            // The second queue may still use this memory, so it is never freed.
            std::mem::forget((self.panel.clone(), std::mem::take(&mut self._weights)));
        }
    }
}

#[cfg(all(test, feature = "kernel-emu"))]
mod tests;
