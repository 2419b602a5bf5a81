//! Allocation of device memory: a refused request is repeated once, after the memory that the GPU's
//! pool caches was returned to the system, and after optional values of its thread were dropped
//! ([`super::optional_memory`]). Its error names its size and the use of the memory.
//!
//! In a step, candle itself allocates where it converts or stacks tensors ([`super::copy`]); these
//! requests are repeated too. Not repeated are those inside composed operations, which only compute
//! what no kernel supports: candle allocates each of their intermediate tensors.

use std::fmt;

use candle_core::Device;

use super::deferred::issue_deferred;
use super::gpu_pool::make_room;
use super::optional_memory::release_optional;
use super::planned_failure::PlannedFailure;
use crate::error::{DeviceFault, Error, Result};
use crate::units;

/// Runs `make`, which allocates `bytes` bytes on `device`, and once again if the GPU is out of
/// memory at first.
///
/// # Errors
/// Those of [`requested`].
pub fn allocated<T, E: Into<Error>>(
    device: &Device,
    bytes: usize,
    make: impl FnMut() -> Result<T, E>,
) -> Result<T> {
    allocated_as(PlannedFailure::Request, device, bytes, make)
}

/// Works like [`allocated`] for an operation of candle, which allocates its result.
///
/// # Errors
/// Those of [`requested`].
pub(super) fn allocated_by_candle<T, E: Into<Error>>(
    device: &Device,
    bytes: usize,
    make: impl FnMut() -> Result<T, E>,
) -> Result<T> {
    allocated_as(PlannedFailure::CandleRequest, device, bytes, make)
}

fn allocated_as<T, E: Into<Error>>(
    kind: PlannedFailure,
    device: &Device,
    bytes: usize,
    mut make: impl FnMut() -> Result<T, E>,
) -> Result<T> {
    let make = || -> Result<T> { make().map_err(Into::into) };
    let free_memory = || {
        // Deferred work holds the memory of tensors that were dropped.
        issue_deferred()?;
        make_room(device)
    };
    requested(bytes, || with_room(kind, free_memory, make))
}

/// Runs `make`, which allocates on a device what the caller can do without. Returns none if the GPU
/// is out of memory; then nothing is waited for, returned to the system or tried again.
///
/// # Errors
/// The other errors of `make`.
pub fn allocated_if_free<T, E: Into<Error>>(make: impl FnOnce() -> Result<T, E>) -> Result<Option<T>> {
    if PlannedFailure::OptionalRequest.strikes() {
        return Ok(None);
    }
    match make().map_err(Into::into) {
        Err(error) if is_out_of_memory(&error) => Ok(None),
        made => made.map(Some),
    }
}

fn is_out_of_memory(error: &Error) -> bool {
    error.device_fault() == Some(DeviceFault::OutOfMemory)
}

/// Runs `make`. If it runs out of GPU memory, drops the optional values of this thread, calls
/// `make_room` and runs it again, once. `kind` is the failure that a test may plan here.
///
/// # Errors
/// The errors of `make` and of `make_room`.
pub fn with_room<T>(
    kind: PlannedFailure,
    make_room: impl FnOnce() -> Result<()>,
    mut make: impl FnMut() -> Result<T>,
) -> Result<T> {
    let mut attempt = || {
        if kind.strikes() {
            return Err(Error::of_fault(
                DeviceFault::OutOfMemory,
                "the device is out of memory, as a test planned",
            ));
        }
        make()
    };
    match attempt() {
        Err(error) if is_out_of_memory(&error) => {
            release_optional();
            make_room()?;
            attempt()
        }
        made => made,
    }
}

/// Runs `make`, which allocates `bytes` bytes on a device.
///
/// # Errors
/// The errors of `make`; an out-of-memory error of a GPU also names the bytes.
pub fn requested<T, E: Into<Error>>(bytes: usize, make: impl FnOnce() -> Result<T, E>) -> Result<T> {
    make().map_err(Into::into).map_err(|error: Error| match error.device_fault() {
        Some(DeviceFault::OutOfMemory) => {
            error.because(format!("the failed request was for {}", units::bytes(bytes as u64)))
        }
        _ => error,
    })
}

/// Memory use of a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// The GPU's number.
    pub index: usize,
    /// Total memory of the GPU.
    pub total: u64,
    /// Memory that no process holds.
    pub free: u64,
    /// Memory of this process, in use and cached, if the driver reports it.
    pub pool: Option<GpuPool>,
}

/// Memory pool of this process on a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuPool {
    /// Memory that tensors use.
    pub used: u64,
    /// Memory from the system, including memory in use.
    pub reserved: u64,
}

impl fmt::Display for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [total, free] = [self.total, self.free].map(units::bytes);
        write!(f, "GPU {} has {total}", self.index)?;
        let Some(GpuPool { used, reserved }) = self.pool else {
            return write!(f, ", {free} available");
        };
        let others = self.total.saturating_sub(self.free).saturating_sub(reserved);
        let [used, cached, others] = [used, reserved.saturating_sub(used), others].map(units::bytes);
        write!(
            f,
            ": tensors of this process hold {used}, its pool caches {cached}, other use is {others}, {free} available"
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
        assert_eq!(error.causes().last().map(String::as_str), Some("the failed request was for 1.50 GiB"));
        let other = || Err(candle_core::Error::Msg("DriverError(CUDA_ERROR_INVALID_VALUE, \"\")".into()));
        let error = requested::<(), _>(3 << 29, other).unwrap_err();
        assert!(!error.to_string().contains("GiB") && error.kind().exit_code() == 3, "{error}");
        assert_eq!(requested(8, || Ok::<_, Error>(5)).unwrap(), 5);
    }

    /// Runs an operation that fails with the first of `failures`, then with the second, then
    /// succeeds. Returns the result, and the calls in their order.
    fn tried(kind: PlannedFailure, failures: &[&str]) -> (Result<()>, Vec<&'static str>) {
        let calls = std::cell::RefCell::new(Vec::new());
        let mut failures = failures.iter();
        let free_memory = || {
            calls.borrow_mut().push("room");
            Ok(())
        };
        let made = with_room(kind, free_memory, || {
            calls.borrow_mut().push("make");
            failures.next().map_or(Ok(()), |name| Err(Error::of_device("cannot load a kernel", name)))
        });
        (made, calls.into_inner())
    }

    #[test]
    fn without_memory_an_operation_runs_once_more() {
        let (kernel, memory) = ("CUDA_ERROR_ILLEGAL_ADDRESS", "CUBLAS_STATUS_ALLOC_FAILED");
        let outcome = |failures: &[&str]| {
            let (made, calls) = tried(PlannedFailure::Module, failures);
            (made.err().and_then(|error| error.device_fault()), calls)
        };
        assert_eq!(outcome(&[]), (None, vec!["make"]));
        assert_eq!(outcome(&[kernel]), (Some(DeviceFault::Kernel), vec!["make"]));
        assert_eq!(outcome(&[memory]), (None, vec!["make", "room", "make"]));
        assert_eq!(outcome(&[memory; 2]), (Some(DeviceFault::OutOfMemory), vec!["make", "room", "make"]));
    }

    #[test]
    #[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plan failures")]
    fn a_planned_failure_comes_before_the_operation() {
        PlannedFailure::Product.plan();
        let (made, calls) = tried(PlannedFailure::Product, &[]);
        assert!(made.is_ok() && calls == ["room", "make"], "{calls:?}");
    }

    #[test]
    fn memory_adds_up() {
        const GIB: u64 = 1 << 30;
        let pool = Some(GpuPool { used: 70 * GIB, reserved: 76 * GIB });
        let memory = GpuMemory { index: 3, total: 80 * GIB, free: GIB, pool };
        assert_eq!(
            memory.to_string(),
            "GPU 3 has 80.0 GiB: tensors of this process hold 70.0 GiB, its pool caches 6.00 GiB, other use is 3.00 GiB, 1.00 GiB available"
        );
        let memory = GpuMemory { pool: None, ..memory };
        assert_eq!(memory.to_string(), "GPU 3 has 80.0 GiB, 1.00 GiB available");
    }
}
