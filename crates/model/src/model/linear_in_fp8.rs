//! The choice of the layers of a group whose frozen weights are multiplied in fp8.

use super::fp8_base::{Fp8Base, fits};
use super::linear::{Linear, MergedLinear};
use crate::error::Result;
use crate::ops::matmul_fp8::Fp8Rows;

impl Linear {
    fn takes_fp8(&self) -> Result<bool> {
        let (out, inputs) = self.weight.get().dims()?;
        Ok(!self.is_gate && self.weight.grad().is_none() && fits([out, inputs]))
    }
}

impl MergedLinear {
    /// Multiplies by frozen weights in fp8 from now on; those after a layer that does not are
    /// multiplied as before. With `keeps` the codes are kept, one byte a value.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub(super) fn multiply_in_fp8(&mut self, keeps: bool) -> Result<()> {
        let takes = self.layers.iter().map(Linear::takes_fp8).collect::<Result<Vec<_>>>()?;
        let layers = takes.into_iter().take_while(|takes| *takes).count();
        if layers == 0 {
            return Ok(());
        }
        self.fp8 = Some(Fp8Base { layers, codes: None });
        if keeps { self.keep_codes() } else { Ok(()) }
    }

    /// Keeps the codes of weights in fp8.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub(super) fn keep_codes(&mut self) -> Result<()> {
        let Some(Fp8Base { layers, codes }) = self.fp8.as_mut().filter(|fp8| fp8.codes.is_none()) else {
            return Ok(());
        };
        let weights: Vec<_> = self.layers[..*layers].iter().map(|layer| layer.weight.get()).collect();
        *codes = Some(Fp8Rows::of(&weights)?);
        Ok(())
    }
}
