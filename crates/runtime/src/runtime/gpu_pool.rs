//! The memory pool from which a GPU's tensors are allocated: its use, its limit, and the return of
//! unused memory to the system. **Not yet run on a GPU.**

use candle_core::Device;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

#[cfg(feature = "cuda")]
use super::device_queue::{wait_for, wait_for_stream};
#[cfg(feature = "cuda")]
use crate::error::Error;
use crate::error::Result;

/// Value of a pool's attribute in bytes; none if the driver does not report it.
#[cfg(feature = "cuda")]
pub(super) fn pool_bytes(pool: sys::CUmemoryPool, attribute: sys::CUmemPool_attribute) -> Option<u64> {
    let mut bytes = 0u64;
    // SAFETY: the pool belongs to a device, and the requested attributes are a u64.
    unsafe { result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast()) }.ok()?;
    Some(bytes)
}

/// Lets the pool of `device` keep up to `bytes` bytes for later allocations: memory above is
/// returned to the system at the next wait for the device, where modules, libraries and
/// communicators find it. By default a pool returns all unused memory, so that every step waits for
/// new memory. Has no effect on the CPU.
///
/// # Errors
/// The driver refuses the value.
pub fn release_above(device: &Device, bytes: u64) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        let set = pool(device.cuda_stream().context())
            .and_then(|pool| pool.map_or(Ok(()), |pool| keep(pool, bytes)));
        return set.map_err(|error| failed("cannot limit the memory that the pool of a GPU keeps", &error));
    }
    let _ = (device, bytes);
    Ok(())
}

#[cfg(feature = "cuda")]
fn keep(pool: sys::CUmemoryPool, mut bytes: u64) -> Result<(), DriverError> {
    use sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as THRESHOLD;
    // SAFETY: the pool belongs to a device, and this attribute is a u64.
    unsafe { result::mem_pool::set_attribute(pool, THRESHOLD, (&raw mut bytes).cast()) }
}

/// Returns the unused memory in the pool of `device` to the system, after all work launched so far:
/// other users of the GPU's memory, or a larger block of the pool, can have it. Has no effect on
/// the CPU.
///
/// # Errors
/// An earlier operation of the device failed.
pub fn make_room(device: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return make_room_on(&device.cuda_stream());
    }
    let _ = device;
    Ok(())
}

/// Same as [`make_room`], for the GPU of a stream, on which all its memory is freed.
///
/// # Errors
/// Same as [`make_room`].
#[cfg(feature = "cuda")]
pub fn make_room_on(stream: &CudaStream) -> Result<()> {
    let trim = || -> Result<(), DriverError> {
        wait_for_stream(stream)?;
        // SAFETY: the pool belongs to the stream's device.
        pool(stream.context())?.map_or(Ok(()), |pool| unsafe { result::mem_pool::trim_to(pool, 0) })
    };
    trim().map_err(|error| failed("cannot empty the memory pool of a GPU", &error))
}

#[cfg(feature = "cuda")]
fn failed(what: &str, error: &DriverError) -> Error {
    Error::of_device(what, &error.to_string())
}

/// Pool of the allocations in `context`; none if the driver has no pools.
#[cfg(feature = "cuda")]
fn pool(context: &CudaContext) -> Result<Option<sys::CUmemoryPool>, DriverError> {
    if !context.has_async_alloc() {
        return Ok(None);
    }
    // SAFETY: a context holds a valid device.
    unsafe { result::device::get_mem_pool(context.cu_device()) }.map(Some)
}

/// Lets each GPU of `devices` access tensors in the pools of the others, if it can reach them. By
/// default a pool is private to its GPU, and between ranks of one process NCCL may access its
/// memory directly.
///
/// # Errors
/// The driver refuses the access.
#[cfg(feature = "cuda")]
pub fn share_pools(devices: &[Device]) -> Result<()> {
    let refused = |error: DriverError| {
        Error::internal("cannot share memory between the GPUs of this process").because(error.to_string())
    };
    let mut pools = Vec::new();
    for device in devices {
        if let Device::Cuda(device) = device {
            let stream = device.cuda_stream();
            pools.push((stream.context().cu_device(), pool(stream.context()).map_err(refused)?));
        }
    }
    for (owner, pool) in &pools {
        let Some(pool) = pool else { continue };
        for (peer, _) in pools.iter().filter(|(peer, _)| peer != owner) {
            let mut reaches = 0;
            // SAFETY: both devices are from the driver.
            unsafe { sys::cuDeviceCanAccessPeer(&raw mut reaches, *peer, *owner) }
                .result()
                .map_err(refused)?;
            if reaches == 0 {
                continue;
            }
            // A CUmemAccessDesc: a device (1), its number, read and write access (3). As numbers,
            // because newer toolkits declare the same bytes as another type.
            let grant = [1_i32, *peer, 3];
            // SAFETY: the pool belongs to the owner, and this is one description.
            unsafe { sys::cuMemPoolSetAccess(*pool, grant.as_ptr().cast(), 1) }.result().map_err(refused)?;
        }
    }
    Ok(())
}

/// Bytes that tensors use on the GPU `device`; none on a CPU or if the driver does not report it.
#[cfg(feature = "cuda")]
pub fn used_bytes(device: &Device) -> Option<u64> {
    let Device::Cuda(device) = device else { return None };
    pool_bytes(
        pool(device.cuda_stream().context()).ok()??,
        sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
    )
}

/// Bytes that tensors use on a GPU: none in a build without GPU support.
#[cfg(not(feature = "cuda"))]
pub fn used_bytes(_device: &Device) -> Option<u64> {
    None
}

/// Peak bytes that tensors used on the GPU `device`; none on a CPU or if the driver does not report
/// it.
#[cfg(feature = "cuda")]
pub fn peak_bytes(device: &Device) -> Option<u64> {
    let Device::Cuda(device) = device else { return None };
    pool_bytes(
        pool(device.cuda_stream().context()).ok()??,
        sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
    )
}

/// Peak bytes that tensors use on the GPU `device` during `work`, above those held before. None on
/// a CPU, where `work` does not run, or if the driver does not report it. Restarts the count of
/// [`peak_bytes`].
///
/// # Errors
/// The errors of `work`.
#[cfg(feature = "cuda")]
pub fn bytes_taken_by(device: &Device, work: impl FnOnce() -> Result<()>) -> Result<Option<u64>> {
    use sys::CUmemPool_attribute::{CU_MEMPOOL_ATTR_USED_MEM_CURRENT, CU_MEMPOOL_ATTR_USED_MEM_HIGH};
    let Device::Cuda(cuda) = device else { return Ok(None) };
    let Ok(Some(pool)) = pool(cuda.cuda_stream().context()) else { return Ok(None) };
    let (mut before, mut reset) = (0u64, 0u64);
    // SAFETY: the pool belongs to the device, and both attributes are u64; the high mark may only
    // be reset to 0.
    let read = unsafe {
        result::mem_pool::get_attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, (&raw mut before).cast())
            .and_then(|()| {
                result::mem_pool::set_attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, (&raw mut reset).cast())
            })
    };
    work()?;
    wait_for(device)?;
    Ok(read.ok().and(peak_bytes(device)).map(|peak| peak.saturating_sub(before)))
}

/// Peak bytes of `work` on a GPU: none in a build without GPU support, which does not run it.
///
/// # Errors
/// None.
#[cfg(not(feature = "cuda"))]
pub fn bytes_taken_by(_device: &Device, _work: impl FnOnce() -> Result<()>) -> Result<Option<u64>> {
    Ok(None)
}

/// Peak bytes that tensors used on a GPU: none in a build without GPU support.
#[cfg(not(feature = "cuda"))]
pub fn peak_bytes(_device: &Device) -> Option<u64> {
    None
}
