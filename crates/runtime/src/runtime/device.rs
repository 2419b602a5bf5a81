//! Device of a run: choice, memory and capabilities.

use std::fmt;

#[cfg(feature = "cuda")]
use candle_core::CudaDevice;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::{DriverError, result, sys};
use candle_core::{DType, Device};

#[cfg(feature = "cuda")]
use super::device_memory::{GpuMemory, GpuPool};
pub use super::device_queue::wait_for;
#[cfg(feature = "cuda")]
use super::gpu_pool::pool_bytes;
#[cfg(feature = "cuda")]
pub use super::gpu_pool::share_pools;
pub use super::gpu_pool::{bytes_taken_by, peak_bytes, release_above, used_bytes};
#[cfg(feature = "cuda")]
use super::gpu_support;
pub use super::gpu_support::{Gpu, check_fp8_of};
#[cfg(feature = "cuda")]
use crate::error::set_memory_report;
use crate::error::{DeviceFault, Error, Result};

/// The device of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The processor, with all threads of the pool.
    #[default]
    Cpu,
    /// The GPU with this index.
    Gpu(usize),
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Cpu => f.write_str("the CPU"),
            DeviceChoice::Gpu(index) => write!(f, "GPU {index}"),
        }
    }
}

/// True if this build can use a GPU.
pub const GPU_BUILD: bool = cfg!(feature = "cuda");

/// GPUs of this machine in the driver's order; none in a CPU-only build.
///
/// # Errors
/// The driver does not work, such as one too old for this build.
pub fn gpus() -> Result<Vec<Gpu>> {
    #[cfg(feature = "cuda")]
    {
        let refused = |error: DriverError| {
            Error::user("cannot ask the NVIDIA driver for its GPUs")
                .because(error.to_string())
                .hint(format!("`nvidia-smi` shows whether the driver works; {}", gpu_support::DRIVERS))
        };
        if !has_gpus().map_err(refused)? {
            return Ok(Vec::new());
        }
        gpu_support::check_driver(driver_number().map_err(refused)?, sys::CUDA_VERSION.cast_signed())?;
        driver_gpus().map_err(refused)
    }
    #[cfg(not(feature = "cuda"))]
    Ok(Vec::new())
}

/// Default device of a run: the first GPU, else the CPU.
///
/// # Errors
/// Same as [`gpus`]: a broken driver is an error, not a slow run.
pub fn preferred() -> Result<DeviceChoice> {
    Ok(if gpus()?.is_empty() { DeviceChoice::Cpu } else { DeviceChoice::Gpu(0) })
}

/// Opens the device.
///
/// # Errors
/// The build has no GPU support, the machine has no such GPU, or the GPU cannot be opened.
pub fn open(choice: DeviceChoice) -> Result<Device> {
    let DeviceChoice::Gpu(index) = choice else { return Ok(Device::Cpu) };
    let refuse = |cause: String| Error::user(format!("cannot use {choice}")).because(cause);
    let gpu = &find_gpu(index)?;
    #[cfg(feature = "cuda")]
    {
        gpu_support::check_code(gpu, candle_core::cuda_backend::kernels::UNARY.ptx())?;
        gpu_support::check_pools(gpu)?;
    }
    let device = open_gpu(gpu.index).map_err(|error| match DeviceFault::of(&error.to_string()) {
        Some(_) => Error::from(error).during(format!("cannot use {choice}")),
        None => refuse(error.to_string()).hint("`nvidia-smi` shows whether another process holds its memory"),
    })?;
    // Until the memory of a run is planned.
    release_above(&device, u64::MAX)?;
    Ok(device)
}

/// Variables that the driver and NCCL read when they start, with the values of finetune. GPUs are
/// numbered by their place on the PCI bus, as `nvidia-smi` does: by default CUDA's GPU 0 is the
/// fastest one. NCCL 2.26 and newer start the kernels of a GPU's communicators in the order of the
/// calls: gathers and reductions have separate communicators, and kernels that start in another
/// order on another rank may wait for each other forever.
const GPU_ENVIRONMENT: [(&str, &str); 2] =
    [("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("NCCL_LAUNCH_ORDER_IMPLICIT", "1")];

/// Sets `CUDA_DEVICE_ORDER=PCI_BUS_ID` and `NCCL_LAUNCH_ORDER_IMPLICIT=1`, unless the user has set
/// the variables.
///
/// # Safety
/// No other thread of the process exists yet, and the driver has not started.
pub unsafe fn set_gpu_environment() {
    for (name, value) in GPU_ENVIRONMENT {
        if std::env::var_os(name).is_none() {
            // SAFETY: no other thread reads or writes the environment.
            unsafe { std::env::set_var(name, value) };
        }
    }
}

/// Returns the GPU with the number `index`, without opening it.
fn find_gpu(index: usize) -> Result<Gpu> {
    let choice = DeviceChoice::Gpu(index);
    let refuse = |cause: String| Error::user(format!("cannot use {choice}")).because(cause);
    if !GPU_BUILD {
        return Err(refuse("this binary was built for the CPU only".into())
            .hint("build it with `cargo build --release --features cuda`, or leave out `--gpus`"));
    }
    let all = gpus()?;
    let count = all.len();
    all.into_iter().nth(index).ok_or_else(|| {
        let problem = match count {
            0 => "the NVIDIA driver finds no GPU in this machine".into(),
            1 => "this machine has one GPU, number 0".into(),
            _ => format!("this machine has {count} GPUs, numbers 0 to {}", count - 1),
        };
        refuse(problem).hint("leave out `--gpus` to run on the available device; `finetune doctor` shows it")
    })
}

/// Checks that this build and machine have the GPUs with these numbers, and opens none.
///
/// # Errors
/// One of them is missing.
pub fn check_gpus(numbers: &[usize]) -> Result<()> {
    numbers.iter().try_for_each(|number| find_gpu(*number).map(drop))
}

/// Opens the GPUs with these numbers, in their order.
///
/// # Errors
/// One of them cannot be opened.
pub fn open_gpus(numbers: &[usize]) -> Result<Vec<Device>> {
    numbers.iter().map(|number| open(DeviceChoice::Gpu(*number))).collect()
}

/// Newest CUDA version that the NVIDIA driver supports, such as "13.0"; none in a CPU-only build.
///
/// # Errors
/// The driver does not answer.
pub fn driver_version() -> Result<Option<String>> {
    #[cfg(feature = "cuda")]
    return driver_number().map(|number| Some(gpu_support::version(number))).map_err(|error| {
        Error::of_device("cannot ask the NVIDIA driver for its version", &error.to_string())
    });
    #[cfg(not(feature = "cuda"))]
    Ok(None)
}

/// Major CUDA version of the libraries that a build with feature `cuda` needs.
pub fn cuda_release() -> u32 {
    #[cfg(feature = "cuda")]
    return sys::CUDA_VERSION / 1000;
    // The version of `scripts/cuda-env.sh`.
    #[cfg(not(feature = "cuda"))]
    13
}

/// Checks that the device can compute in `dtype`.
///
/// # Errors
/// bf16 on a GPU that does not support it.
pub fn check_dtype(device: &Device, dtype: DType) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let candle_core::DeviceLocation::Cuda { gpu_id } = device.location()
        && let Some(gpu) = gpus()?.get(gpu_id)
    {
        return gpu_support::check_bf16(gpu, dtype);
    }
    let _ = (device, dtype);
    Ok(())
}

/// Refuses a GPU that does not multiply in fp8. A CPU computes the same numbers in software.
///
/// # Errors
/// The GPU's compute capability is below 8.9.
pub fn check_fp8(device: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let candle_core::DeviceLocation::Cuda { gpu_id } = device.location()
        && let Some(gpu) = gpus()?.get(gpu_id)
    {
        return gpu_support::check_fp8(gpu);
    }
    let _ = device;
    Ok(())
}

/// Returns true if the driver finds a GPU.
#[cfg(feature = "cuda")]
fn has_gpus() -> Result<bool, DriverError> {
    match result::init() {
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(false),
        other => other.map(|()| true),
    }
}

#[cfg(feature = "cuda")]
fn driver_number() -> Result<i32, DriverError> {
    let mut number = 0;
    // SAFETY: the driver writes one int there.
    unsafe { sys::cuDriverGetVersion(&raw mut number) }.result()?;
    Ok(number)
}

#[cfg(feature = "cuda")]
fn driver_gpus() -> Result<Vec<Gpu>, DriverError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
        CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED as POOLS,
    };
    (0..result::device::get_count()?)
        .map(|index| {
            let device = result::device::get(index)?;
            // SAFETY: `device` comes from `get`.
            let attribute = |of| unsafe { result::device::get_attribute(device, of) };
            Ok(Gpu {
                index: index as usize,
                name: result::device::get_name(device)?,
                // SAFETY: same as above.
                total_bytes: unsafe { result::device::total_mem(device) }? as u64,
                compute_capability: (attribute(MAJOR)?, attribute(MINOR)?),
                has_pools: attribute(POOLS)? > 0,
            })
        })
        .collect()
}

#[cfg(feature = "cuda")]
fn open_gpu(index: usize) -> candle_core::Result<Device> {
    set_memory_report(|| memory_of_this_thread().map(|memory| memory.to_string()));
    // A separate stream: the default streams are one per host thread, unordered among each other.
    let device = CudaDevice::new_with_stream(index)?;
    // SAFETY: before the first allocation. All memory is allocated and freed on the stream above,
    // and work on other streams, such as copies of offloaded weights, is ordered with it by events.
    unsafe { device.disable_event_tracking() };
    Ok(Device::Cuda(device))
}

#[cfg(not(feature = "cuda"))]
fn open_gpu(index: usize) -> candle_core::Result<Device> {
    Device::new_cuda(index)
}

/// Memory use of the GPU that this thread used last.
#[cfg(feature = "cuda")]
fn memory_of_this_thread() -> Option<GpuMemory> {
    use sys::CUmemPool_attribute::{CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, CU_MEMPOOL_ATTR_USED_MEM_CURRENT};
    let mut device: sys::CUdevice = 0;
    // SAFETY: the driver writes one int there.
    unsafe { sys::cuCtxGetDevice(&raw mut device) }.result().ok()?;
    let (free, total) = result::mem_get_info().ok()?;
    // SAFETY: `device` comes from the driver.
    let pool = unsafe { result::device::get_mem_pool(device) }.ok();
    let bytes = |attribute| pool_bytes(pool?, attribute);
    let (used, reserved) =
        (bytes(CU_MEMPOOL_ATTR_USED_MEM_CURRENT), bytes(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
    let pool = used.zip(reserved).map(|(used, reserved)| GpuPool { used, reserved });
    Some(GpuMemory { index: device as usize, total: total as u64, free: free as u64, pool })
}

/// Allocates a tensor of at least one element on a GPU, which the caller writes in full before
/// reading.
///
/// # Errors
/// The GPU has too little memory.
#[cfg(feature = "cuda")]
pub fn unwritten_on_gpu<T>(device: &CudaDevice, shape: (usize, usize)) -> Result<candle_core::Tensor>
where
    T: candle_core::cuda_backend::CudaDType + candle_core::cuda_backend::cudarc::driver::DeviceRepr,
{
    // SAFETY: any bits are a number of the types that tensors have, and the caller writes them
    // first.
    let memory = unsafe { device.alloc::<T>(shape.0 * shape.1)? };
    let storage = candle_core::Storage::Cuda(T::wrap_cuda_slice(memory, device.clone()));
    Ok(candle_core::Tensor::from_storage(storage, shape, candle_core::op::BackpropOp::none(), false))
}

/// Dtype of the computation for "auto": bf16 on a GPU, f32 on the CPU.
pub fn default_dtype(device: &Device) -> DType {
    if device.is_cpu() { DType::F32 } else { DType::BF16 }
}

/// The device with the least free memory, so that anything that fits there fits on all; the host
/// for an empty list.
pub fn tightest(devices: &[Device]) -> Device {
    let tightest = devices.iter().min_by_key(|device| free_bytes(device).unwrap_or(u64::MAX));
    tightest.cloned().unwrap_or(Device::Cpu)
}

/// Free bytes of GPU memory; none if the driver does not report it.
#[cfg(feature = "cuda")]
pub fn free_bytes(device: &Device) -> Option<u64> {
    let Device::Cuda(device) = device else { return None };
    device.cuda_stream().context().bind_to_thread().ok()?;
    result::mem_get_info().ok().map(|(free, _)| free as u64)
}

/// Free bytes of GPU memory: none in a build without GPU support.
#[cfg(not(feature = "cuda"))]
pub fn free_bytes(_device: &Device) -> Option<u64> {
    None
}
