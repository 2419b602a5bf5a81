//! Asking for memory of a device: where it is refused, the error says how much was asked for and what the memory is used
//! for.

use std::fmt;

use super::planned_failure::PlannedFailure;
use crate::error::{DeviceFault, Error, Result};
use crate::units;

/// `make`, which asks a device for `bytes` bytes at once.
///
/// # Errors
/// Those of `make`; where a GPU has not the memory, with the bytes.
pub fn requested<T, E: Into<Error>>(bytes: usize, make: impl FnOnce() -> Result<T, E>) -> Result<T> {
    let made = if PlannedFailure::Request.strikes() {
        Err(Error::of_fault(DeviceFault::OutOfMemory, "the device is out of memory, as a test planned"))
    } else {
        make().map_err(Into::into)
    };
    made.map_err(|error| match error.device_fault() {
        Some(DeviceFault::OutOfMemory) => {
            error.because(format!("{} were asked for at once", units::bytes(bytes as u64)))
        }
        _ => error,
    })
}

/// What the memory of a GPU is used for, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// The GPU's number.
    pub index: usize,
    /// All that it has.
    pub total: u64,
    /// What no process holds.
    pub free: u64,
    /// What this process has from the system, where the driver tells: in use, and kept for what it asks for next.
    pub pool: Option<GpuPool>,
}

/// The pool from which a process has its memory of a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuPool {
    /// In use by tensors.
    pub used: u64,
    /// Taken from the system, what is in use included.
    pub reserved: u64,
}

impl fmt::Display for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [total, free] = [self.total, self.free].map(units::bytes);
        write!(f, "GPU {} has {total}", self.index)?;
        let Some(GpuPool { used, reserved }) = self.pool else {
            return write!(f, ", of which {free} are free");
        };
        let others = self.total.saturating_sub(self.free).saturating_sub(reserved);
        let [used, kept, others] = [used, reserved.saturating_sub(used), others].map(units::bytes);
        write!(
            f,
            ": tensors of this process hold {used}, {kept} are kept for its next ones, other use {others}, {free} are free"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_fails_says_how_much_it_was() {
        let refused = || Err(candle_core::Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"\")".into()));
        let error = requested::<(), _>(3 << 29, refused).unwrap_err();
        assert_eq!(error.kind().exit_code(), 1);
        assert_eq!(error.causes().last().map(String::as_str), Some("1.50 GiB were asked for at once"));
        let other = || Err(candle_core::Error::Msg("DriverError(CUDA_ERROR_INVALID_VALUE, \"\")".into()));
        let error = requested::<(), _>(3 << 29, other).unwrap_err();
        assert!(!error.to_string().contains("GiB") && error.kind().exit_code() == 3, "{error}");
        assert_eq!(requested(8, || Ok::<_, Error>(5)).unwrap(), 5);
    }

    #[test]
    fn memory_adds_up() {
        const GIB: u64 = 1 << 30;
        let pool = Some(GpuPool { used: 70 * GIB, reserved: 76 * GIB });
        let memory = GpuMemory { index: 3, total: 80 * GIB, free: GIB, pool };
        assert_eq!(
            memory.to_string(),
            "GPU 3 has 80.0 GiB: tensors of this process hold 70.0 GiB, 6.00 GiB are kept for its next ones, other use 3.00 GiB, 1.00 GiB are free"
        );
        let memory = GpuMemory { pool: None, ..memory };
        assert_eq!(memory.to_string(), "GPU 3 has 80.0 GiB, of which 1.00 GiB are free");
    }
}
