//! Which device a run computes on, and what it has.

use candle_core::{DType, Device};

use crate::error::{Error, Result};

/// The device of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The processor, all threads of the pool.
    #[default]
    Cpu,
    /// The GPU with this index.
    Gpu(usize),
}

/// True in the build that can use a GPU.
pub const GPU_BUILD: bool = cfg!(feature = "cuda");

/// Opens the device.
///
/// # Errors
/// A GPU was asked for and this build has no GPU support, or the driver finds no such device.
pub fn open(choice: DeviceChoice) -> Result<Device> {
    let DeviceChoice::Gpu(index) = choice else { return Ok(Device::Cpu) };
    if !GPU_BUILD {
        return Err(Error::user(format!("cannot use GPU {index}"))
            .because("this binary was built for the CPU alone")
            .hint("build it with `cargo build --release --features cuda`, or leave out `--gpus`"));
    }
    open_gpu(index).map_err(|error| {
        Error::user(format!("cannot use GPU {index}"))
            .because(error.to_string())
            .hint("`finetune doctor` lists the devices; leave out `--gpus` to run on the CPU")
    })
}

#[cfg(feature = "cuda")]
fn open_gpu(index: usize) -> candle_core::Result<Device> {
    // A stream of our own: the default is one per host thread, unordered against each other.
    let device = candle_core::CudaDevice::new_with_stream(index)?;
    // SAFETY: before the first allocation, and all work of this process is ordered on the one stream above.
    unsafe { device.disable_event_tracking() };
    keep_freed_memory(&device).map_err(candle_core::Error::wrap)?;
    Ok(Device::Cuda(device))
}

/// Lets the driver's pool keep what is freed for the next allocation. By default it hands all of it back to the system
/// whenever the device is synchronized, which is every step, and the next step waits for it anew.
#[cfg(feature = "cuda")]
fn keep_freed_memory(
    device: &candle_core::CudaDevice,
) -> Result<(), candle_core::cuda_backend::cudarc::driver::DriverError> {
    use candle_core::cuda_backend::cudarc::driver::{result, sys};
    let stream = device.cuda_stream();
    let context = stream.context();
    if !context.has_async_alloc() {
        return Ok(());
    }
    let mut threshold = u64::MAX;
    // SAFETY: the context holds a valid device, a device with `has_async_alloc` has a pool, and the attribute is a u64.
    unsafe {
        let pool = result::device::get_mem_pool(context.cu_device())?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        result::mem_pool::set_attribute(pool, attribute, (&raw mut threshold).cast())
    }
}

#[cfg(not(feature = "cuda"))]
fn open_gpu(index: usize) -> candle_core::Result<Device> {
    Device::new_cuda(index)
}

/// The dtype a run computes in when the recipe says "auto": bf16 on a GPU, f32 on the CPU.
pub fn default_dtype(device: &Device) -> DType {
    if device.is_cpu() { DType::F32 } else { DType::BF16 }
}
