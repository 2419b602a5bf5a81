//! A dequantized matrix that a GPU's second queue makes beside the products before its own.
//! **Not yet run on a GPU.**
//!
//! A product can always make its own panel, so the memory of a panel ahead is optional. After the
//! first request that finds too little memory, a thread makes no more panels ahead.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Tensor};

use super::{Quantized, cuda};
use crate::backends::gpu::{Driver, WorkBeside, driver_of};
use crate::error::{DeviceFault, Error, Result};
use crate::quant::RunMeaning;
use crate::runtime::TensorMut;
use crate::runtime::trace::{SpanInfo, span};

thread_local! {
    /// True once this thread had too little memory for a panel ahead.
    static IS_REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// True from the first refusal on any thread until the run has reported it.
static UNREPORTED: AtomicBool = AtomicBool::new(false);

fn refuse() {
    if !IS_REFUSED.replace(true) {
        UNREPORTED.store(true, Ordering::Relaxed);
    }
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
    /// device has no second queue or no kernel for it, or if this thread has or had too little
    /// memory: the product then makes its own.
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
        let Some(panel) = cuda::unwritten_if_free(weights, dtype)? else {
            refuse();
            return Ok(None);
        };
        match Self::start_by(driver, weights, panel) {
            Err(error) if error.device_fault() == Some(DeviceFault::OutOfMemory) => {
                refuse();
                Ok(None)
            }
            started => started,
        }
    }

    fn start_by(driver: &dyn Driver, weights: &[&Quantized], panel: TensorMut) -> Result<Option<Self>> {
        let sources = cuda::sources(weights)?;
        let codes = weights.iter().map(|weight| weight.run(RunMeaning::Codes)).collect::<Result<Vec<_>>>()?;
        let _span = span(|| SpanInfo::op("dequantize").detail("ahead").dims(panel.dims()).moves(&codes));
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

    /// Returns a warning once after a thread had too little memory for panels ahead.
    pub fn warning() -> Option<&'static str> {
        UNREPORTED.swap(false, Ordering::Relaxed).then_some(
            "the GPU has too little memory to dequantize weights ahead of their products: each product dequantizes \
             its own from now on; the results are the same",
        )
    }

    /// Frees the panel for a request that found too little memory. This thread makes no more panels
    /// ahead.
    pub fn give_back(self) {
        refuse();
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
