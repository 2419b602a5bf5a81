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
    Ok(Device::Cuda(device))
}

#[cfg(not(feature = "cuda"))]
fn open_gpu(index: usize) -> candle_core::Result<Device> {
    Device::new_cuda(index)
}

/// The dtype a run computes in when the recipe says "auto": bf16 on a GPU, f32 on the CPU.
pub fn default_dtype(device: &Device) -> DType {
    if device.is_cpu() { DType::F32 } else { DType::BF16 }
}

/// Bytes of GPU memory that are free; none when the driver does not say.
#[cfg(feature = "cuda")]
pub fn free_bytes(device: &Device) -> Option<u64> {
    let Device::Cuda(device) = device else { return None };
    device.cuda_stream().context().bind_to_thread().ok()?;
    candle_core::cuda_backend::cudarc::driver::result::mem_get_info().ok().map(|(free, _)| free as u64)
}

/// Bytes of GPU memory that are free: none in a build without GPU support.
#[cfg(not(feature = "cuda"))]
pub fn free_bytes(_device: &Device) -> Option<u64> {
    None
}

/// A GPU that the driver sees.
#[derive(Debug, Clone)]
pub struct Gpu {
    /// The number `--gpus` takes.
    pub index: usize,
    /// Its name and bytes of memory, or why it cannot be opened.
    pub found: Result<(String, u64), String>,
}

/// The GPUs of this machine.
///
/// # Errors
/// The driver does not answer.
#[cfg(feature = "cuda")]
pub fn gpus() -> Result<Vec<Gpu>> {
    use candle_core::cuda_backend::cudarc::driver::CudaContext;

    let asked = CudaContext::device_count();
    let count = asked.map_err(|error| {
        Error::user("cannot ask the driver for its GPUs")
            .because(error.to_string())
            .hint("`nvidia-smi` says whether the driver works")
    })?;
    let open = |index: usize| {
        let context = CudaContext::new(index)?;
        Ok((context.name()?, context.total_mem()? as u64))
    };
    let told = |error: candle_core::cuda_backend::cudarc::driver::DriverError| error.to_string();
    Ok((0..count as usize).map(|index| Gpu { index, found: open(index).map_err(told) }).collect())
}

/// The GPUs of this machine: none that a build without GPU support could use.
///
/// # Errors
/// Never.
#[cfg(not(feature = "cuda"))]
pub fn gpus() -> Result<Vec<Gpu>> {
    Ok(Vec::new())
}
