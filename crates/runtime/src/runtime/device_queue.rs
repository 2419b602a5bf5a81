//! Waits for the work in a GPU's queue. **Not yet run on a GPU.**
//!
//! A thread that blocks inside the driver may hold a lock that another rank of the process needs
//! before it can join the collective for which this GPU waits. So every wait asks the driver again
//! and again whether an event has been reached, and copies to the host begin after such a wait.
//! Only small copies from pageable memory may still wait inside the driver.

#![cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only GPUs are waited for"))]

#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::time::Duration;

use candle_core::Device;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DriverError, result, sys};

use super::deferred::issue_deferred;
use crate::error::Result;

/// Number of questions before the first pause; each takes about a microsecond.
const EAGER: usize = 1000;

/// Pause between later questions.
const PAUSE: Duration = Duration::from_micros(20);

/// A point in the queue of a GPU: the end of the work that candle's stream had when the mark was
/// made. On a CPU it is reached at once. A clone is the same point.
#[derive(Debug, Clone)]
pub struct QueueMark {
    #[cfg(feature = "cuda")]
    event: Option<Arc<CudaEvent>>,
}

impl QueueMark {
    /// Marks the end of the work that `device` has so far.
    ///
    /// # Errors
    /// An operation of the device failed.
    pub fn new(device: &Device) -> Result<QueueMark> {
        issue_deferred()?;
        #[cfg(feature = "cuda")]
        return Ok(QueueMark {
            event: match device {
                Device::Cuda(device) => {
                    let event = device.cuda_stream().record_event(None);
                    Some(Arc::new(event.map_err(candle_core::Error::wrap)?))
                }
                _ => None,
            },
        });
        #[cfg(not(feature = "cuda"))]
        {
            let _ = device;
            Ok(QueueMark {})
        }
    }

    /// Event of the mark; none on a CPU.
    #[cfg(feature = "cuda")]
    pub(super) fn event(&self) -> Option<&CudaEvent> {
        self.event.as_deref()
    }
}

/// Waits until `device` has finished all work on candle's stream, which holds every operation but
/// not copies and collectives on streams of their own; returns at once on the CPU.
///
/// # Errors
/// An operation of the device failed.
pub fn wait_for(device: &Device) -> Result<()> {
    issue_deferred()?;
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return Ok(wait_for_stream(&device.cuda_stream()).map_err(candle_core::Error::wrap)?);
    }
    let _ = device;
    Ok(())
}

/// Waits for the copies of pageable host memory to `device` if its driver does not stage them: on
/// a coherent machine, such as Grace Hopper, the GPU reads the pages itself, and the caller may
/// free or change them only after that. Elsewhere returns at once.
///
/// # Errors
/// An operation of the device failed.
pub fn finish_upload(device: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device
        && reads_host_pages(cuda.cuda_stream().context().cu_device()).map_err(candle_core::Error::wrap)?
    {
        return wait_for(device);
    }
    let _ = device;
    Ok(())
}

#[cfg(feature = "cuda")]
fn reads_host_pages(device: sys::CUdevice) -> Result<bool, DriverError> {
    use sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES as BY_HOST;
    // SAFETY: `device` comes from a context, which holds a valid one.
    unsafe { result::device::get_attribute(device, BY_HOST) }.map(|yes| yes != 0)
}

/// Waits until the GPU has finished all work launched on `stream`.
///
/// # Errors
/// An operation of the stream failed.
#[cfg(feature = "cuda")]
pub fn wait_for_stream(stream: &CudaStream) -> Result<(), DriverError> {
    wait_for_event(&stream.record_event(None)?)?;
    // Returns at once. Only here does the pool return memory above its threshold to the system.
    stream.synchronize()
}

/// Waits until the GPU has reached `event`.
///
/// # Errors
/// Work before the event failed.
#[cfg(feature = "cuda")]
pub fn wait_for_event(event: &CudaEvent) -> Result<(), DriverError> {
    event.context().bind_to_thread()?;
    poll(|| event.try_is_complete())
}

/// Calls `is_done` until it returns true or fails; yields between the first calls, then sleeps.
fn poll<E>(mut is_done: impl FnMut() -> Result<bool, E>) -> Result<(), E> {
    let mut calls = 0;
    while !is_done()? {
        calls += 1;
        if calls < EAGER { std::thread::yield_now() } else { std::thread::sleep(PAUSE) }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Polls for something that ends so after `unfinished` calls; also returns the number of calls.
    fn polled(unfinished: usize, end: Result<bool, &'static str>) -> (Result<(), &'static str>, usize) {
        let mut calls = 0;
        let done = poll(|| {
            calls += 1;
            if calls > unfinished { end } else { Ok(false) }
        });
        (done, calls)
    }

    #[test]
    fn a_wait_lasts_until_the_work_is_done_or_fails() {
        for unfinished in [0, 1, EAGER + 2] {
            assert_eq!(polled(unfinished, Ok(true)), (Ok(()), unfinished + 1));
            assert_eq!(polled(unfinished, Err("a kernel failed")), (Err("a kernel failed"), unfinished + 1));
        }
    }

    #[test]
    fn nothing_is_waited_for_on_the_processor() -> Result<()> {
        wait_for(&Device::Cpu)?;
        finish_upload(&Device::Cpu)
    }
}
