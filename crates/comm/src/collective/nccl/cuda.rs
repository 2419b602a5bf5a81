//! Streams and marks of an NVIDIA GPU, through the cudarc that candle uses. Not yet run on a GPU.
//!
//! Compute is candle's stream of the device. candle frees memory that NCCL accesses there on the
//! same stream, so after the work. Memory of gathers and reductions on other streams is kept until
//! compute follows their marks.

use std::ops::Range;
use std::sync::Arc;

use candle_core::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr, DriverError, PinnedHostSlice, result,
};

use super::device::{CommStream, GpuStreams};
use super::library::RawStream;
use crate::error::{DeviceFault, Error, ErrorCategory, Result};

/// A GPU of this process. candle's event tracking is off for it (`disable_event_tracking`): marks
/// define the order.
pub struct Cuda {
    context: Arc<CudaContext>,
    compute: Arc<CudaStream>,
    gather: Arc<CudaStream>,
    reduce: Arc<CudaStream>,
}

impl Cuda {
    /// Wraps candle's `device`, created by `CudaDevice::new_with_stream`: the default per-thread
    /// stream would be a different one on each thread.
    ///
    /// # Errors
    /// The driver refuses to create a stream.
    pub fn new(device: &CudaDevice) -> Result<Cuda> {
        let compute = device.cuda_stream();
        let context = Arc::clone(compute.context());
        let stream = || context.new_stream().map_err(|error| failed("cannot make a stream", &error));
        let (gather, reduce) = (stream()?, stream()?);
        Ok(Cuda { context, compute, gather, reduce })
    }

    fn lane(&self, lane: CommStream) -> &Arc<CudaStream> {
        match lane {
            CommStream::Compute => &self.compute,
            CommStream::Gather => &self.gather,
            CommStream::Reduce => &self.reduce,
        }
    }
}

/// GPU memory with page-locked host memory.
pub struct CudaScratch {
    address: usize,
    _device: CudaSlice<u8>,
    host: PinnedHostSlice<u8>,
}

fn failed(what: &str, error: &DriverError) -> Error {
    let (what, reason) = (format!("{what} on the GPU"), error.to_string());
    match DeviceFault::of(&reason) {
        Some(_) => Error::of_device(what, &reason),
        None => Error::new(ErrorCategory::Transient, what).because(reason),
    }
}

impl GpuStreams for Cuda {
    type Mark = Arc<CudaEvent>;
    type Scratch = CudaScratch;

    fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(|error| failed("cannot select a thread's device", &error))
    }

    fn stream(&self, lane: CommStream) -> RawStream {
        self.lane(lane).cu_stream().cast()
    }

    fn mark(&self, lane: CommStream) -> Result<Self::Mark> {
        let event = self.lane(lane).record_event(None);
        event.map(Arc::new).map_err(|error| failed("cannot mark a stream", &error))
    }

    fn follow(&self, lane: CommStream, mark: &Self::Mark) -> Result<()> {
        self.lane(lane).wait(mark).map_err(|error| failed("cannot order streams", &error))
    }

    fn reached(&self, mark: &Self::Mark) -> Result<bool> {
        mark.try_is_complete().map_err(|error| failed("a kernel failed", &error))
    }

    fn scratch(&self, bytes: usize) -> Result<CudaScratch> {
        let make = || {
            let device = self.compute.alloc_zeros::<u8>(bytes)?;
            // Not write-combined, because the host reads it.
            // SAFETY: `put` or `fetch` writes its bytes before they are read; it is zeroed below
            // anyway.
            let mut host = unsafe { self.context.alloc_pinned_with_flags::<u8>(bytes, 0) }?;
            host.as_mut_slice()?.fill(0);
            let address = device.device_ptr(&self.compute).0 as usize;
            Ok(CudaScratch { address, _device: device, host })
        };
        make().map_err(|error| failed("cannot get memory for comparing calls", &error))
    }

    fn address(&self, scratch: &CudaScratch) -> usize {
        scratch.address
    }

    fn host<'a>(&self, scratch: &'a mut CudaScratch) -> Result<&'a mut [u8]> {
        scratch.host.as_mut_slice().map_err(|error| failed("cannot reach page-locked memory", &error))
    }

    fn put(&self, scratch: &mut CudaScratch, range: Range<usize>) -> Result<()> {
        let (to, stream) = (scratch.address + range.start, self.compute.cu_stream());
        let copy = || {
            self.context.bind_to_thread()?;
            // SAFETY: both are inside the scratch, which is not accessed or freed before a later
            // mark is reached.
            unsafe { result::memcpy_htod_async(to as u64, &scratch.host.as_slice()?[range], stream) }
        };
        copy().map_err(|error| failed("cannot copy to memory", &error))
    }

    fn fetch(&self, scratch: &mut CudaScratch, range: Range<usize>) -> Result<()> {
        let (from, stream) = (scratch.address + range.start, self.compute.cu_stream());
        let copy = || {
            self.context.bind_to_thread()?;
            // SAFETY: same as for `put`.
            unsafe {
                result::memcpy_dtoh_async(&mut scratch.host.as_mut_slice()?[range], from as u64, stream)
            }
        };
        copy().map_err(|error| failed("cannot copy from memory", &error))
    }
}
