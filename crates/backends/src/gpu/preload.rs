//! Loading of a GPU's code before a run.
//!
//! By default CUDA loads code at its first launch. It then waits for all earlier work of the GPU,
//! under a lock that another rank of the process may need before it can join a collective in that
//! work.

use candle_core::{DType, Device};

use super::driver_on;
use crate::error::Result;
use crate::runtime::TensorMut;
use crate::runtime::copy::{copy_into, zero};

/// Loads the code of all kernels on `device` and of candle's operations in a step, and starts the
/// library of the products. Each rank does so before its first collective. Has no effect where the
/// CPU forms compute.
///
/// # Errors
/// Fails if the driver refuses the code, or the device has not enough memory.
pub fn preload(device: &Device) -> Result<()> {
    let Some(driver) = driver_on(device) else { return Ok(()) };
    driver.preload()?;
    run_copies(device)
}

/// Sets, copies, converts and gathers some values of each dtype of a step.
fn run_copies(device: &Device) -> Result<()> {
    for of in [DType::F32, DType::BF16] {
        let x = TensorMut::zeros((2, 2), of, device)?;
        zero(&x)?;
        for to in [DType::F32, DType::BF16] {
            copy_into(&TensorMut::zeros((2, 2), to, device)?, &x)?;
        }
        x.narrow(1, 0, 1)?.contiguous()?;
    }
    Ok(())
}

#[cfg(all(test, feature = "kernel-emu"))]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::gpu::emulator::Emulator;
    use crate::gpu::{Arg, Driver, Gemm, Kernel, LaunchShape, with_host_driver};

    /// A driver whose code does not load.
    #[derive(Debug)]
    struct WithoutCode;

    impl Driver for WithoutCode {
        fn launch(&self, _: &Kernel, _: LaunchShape, _: &[Arg]) -> Result<()> {
            Err(Error::internal("a kernel was launched"))
        }

        fn gemm(&self, _: &Gemm) -> Result<()> {
            Err(Error::internal("a product was started"))
        }

        fn preload(&self) -> Result<()> {
            Err(Error::internal("no code"))
        }
    }

    #[test]
    fn code_that_does_not_load_is_an_error_before_a_launch() {
        let found = with_host_driver(&WithoutCode, || preload(&Device::Cpu));
        assert_eq!(found.unwrap_err().what(), "no code");
        assert!(with_host_driver(&Emulator, || preload(&Device::Cpu)).is_ok());
    }
}
