//! Copies between host and GPU through page-locked memory, on a separate stream. **Not yet run on a
//! GPU.**
//!
//! The driver copies pageable memory through a small buffer while the host waits. From page-locked
//! memory a copy runs at the full rate of the bus, while the host fills or empties the other
//! buffer. So each device has two page-locked buffers, created at first use, and a copy stream;
//! [`super::copy_steps`] has the schedule. By events, without a wait of the host, the copy stream
//! waits for earlier computation, or for a mark in it, and later computation waits for copies to
//! the GPU. If the system gives no page-locked memory, copies do not use it.

use std::ops::Range;
use std::slice::{from_raw_parts, from_raw_parts_mut};
use std::sync::{Arc, Mutex};

use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaStream, DriverError, PinnedHostSlice, result,
};
use candle_core::{CudaDevice, DType, Device, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::TensorMut;
use super::buffer::Buffer;
use super::copy_steps::{BUFFERS, CopyAction, CopyStep, CopyToGpu, bring, steps_to_host};
use super::cpu_tensor::{PlainElement, memory, read, update};
use super::device_queue::{QueueMark, wait_for_event, wait_for_stream};
use crate::error::{Error, Result};
use crate::locks::locked;

/// Bytes of a page-locked buffer.
const BUFFER_BYTES: usize = 64 << 20;

/// Minimum bytes of a copy through page-locked memory.
const LEAST_BYTES: usize = 1 << 20;

/// Bytes per copy task of a host thread.
const CHUNK: usize = 1 << 20;

/// Copy stream and buffers of one GPU.
struct CopyLane {
    /// candle's stream of the device.
    compute: Arc<CudaStream>,
    copies: Arc<CudaStream>,
    buffers: [PinnedBuffer; BUFFERS],
    /// Index of the next buffer.
    next: usize,
}

struct PinnedBuffer {
    memory: PinnedHostSlice<u8>,
    /// Event of the last copy from or to it.
    done: CudaEvent,
}

impl CopyLane {
    fn new(compute: Arc<CudaStream>) -> Result<Self, DriverError> {
        let context = compute.context();
        let buffer = || {
            // Not write-combined: the host also reads it.
            // SAFETY: the host or a copy that was waited for writes each byte before it is read.
            let memory = unsafe { context.alloc_pinned_with_flags::<u8>(BUFFER_BYTES, 0) }?;
            Ok(PinnedBuffer { memory, done: context.new_event(None)? })
        };
        let buffers = [buffer()?, buffer()?];
        let copies = context.new_stream()?;
        Ok(CopyLane { compute, copies, buffers, next: 0 })
    }

    /// Starts to copy `from` to the GPU's memory at `to`, which work before `free` uses, or any
    /// work so far. Later computation waits for the copy.
    fn bring(&mut self, from: &[u8], to: usize, free: Option<&QueueMark>) -> Result<(), DriverError> {
        self.compute.context().bind_to_thread()?;
        let (bytes, first) = (from.len(), self.next);
        bring(&mut PinnedCopy { lane: self, from, to }, bytes, BUFFER_BYTES, first, free)
    }

    /// Copies `bytes` bytes of the GPU's memory at `from` to the host, after the computation of its
    /// values, and calls `take` with each range and its bytes. The GPU copies the next range
    /// meanwhile.
    fn fetch(
        &mut self,
        from: usize,
        bytes: usize,
        mut take: impl FnMut(Range<usize>, &[u8]),
    ) -> Result<(), DriverError> {
        self.compute.context().bind_to_thread()?;
        self.copies.join(&self.compute)?;
        for (action, piece) in steps_to_host(bytes, BUFFER_BYTES, self.next) {
            let PinnedBuffer { memory, done } = &mut self.buffers[piece.buffer];
            let len = piece.range.len();
            match action {
                CopyAction::Wait => wait_for_event(done)?,
                CopyAction::CopyOnHost => take(piece.range, &memory.as_slice()?[..len]),
                CopyAction::StartOnGpu => {
                    let from = (from + piece.range.start) as u64;
                    // SAFETY: the buffer is read only after a wait for `done`; the GPU's memory has
                    // `bytes` bytes and lives until this returns, when all copies are done.
                    unsafe {
                        let to = &mut memory.as_mut_slice()?[..len];
                        result::memcpy_dtoh_async(to, from, self.copies.cu_stream())?;
                    }
                    done.record(&self.copies)?;
                    self.next = (piece.buffer + 1) % BUFFERS;
                }
            }
        }
        Ok(())
    }
}

/// A copy of `from` to the GPU's memory at `to`.
struct PinnedCopy<'a> {
    lane: &'a mut CopyLane,
    from: &'a [u8],
    to: usize,
}

impl CopyToGpu for PinnedCopy<'_> {
    type Mark = QueueMark;
    type Error = DriverError;

    fn follow(&mut self, mark: Option<&QueueMark>) -> Result<(), DriverError> {
        let CopyLane { compute, copies, .. } = &*self.lane;
        match mark.and_then(QueueMark::event) {
            Some(event) => copies.wait(event),
            None => copies.join(compute),
        }
    }

    fn step(&mut self, (action, piece): CopyStep) -> Result<(), DriverError> {
        let CopyLane { copies, buffers, next, .. } = &mut *self.lane;
        let PinnedBuffer { memory, done } = &mut buffers[piece.buffer];
        let len = piece.range.len();
        match action {
            CopyAction::Wait => wait_for_event(done)?,
            CopyAction::CopyOnHost => {
                copy_on_host(&self.from[piece.range], &mut memory.as_mut_slice()?[..len]);
            }
            CopyAction::StartOnGpu => {
                let to = (self.to + piece.range.start) as u64;
                // SAFETY: the buffer is written again only after a wait for `done`; the GPU's
                // memory is as long as `from`, and is freed on the compute stream, which waits in
                // `lead`.
                unsafe {
                    result::memcpy_htod_async(to, &memory.as_slice()?[..len], copies.cu_stream())?;
                }
                done.record(copies)?;
                *next = (piece.buffer + 1) % BUFFERS;
            }
        }
        Ok(())
    }

    fn lead(&mut self) -> Result<(), DriverError> {
        self.lane.compute.join(&self.lane.copies)
    }
}

fn copy_on_host(from: &[u8], to: &mut [u8]) {
    to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK)).for_each(|(to, from)| to.copy_from_slice(from));
}

/// Copy stream and buffers of a GPU, for the life of the process; none without page-locked memory.
type SharedLane = &'static Mutex<Option<CopyLane>>;

/// Copy stream and buffers of `device`, created at first use.
fn lane_of(device: &CudaDevice) -> SharedLane {
    /// Lanes by the address of candle's stream, which they keep alive for the life of the process.
    static LANES: Mutex<Vec<(usize, SharedLane)>> = Mutex::new(Vec::new());
    let stream = device.cuda_stream();
    let key = stream.cu_stream().addr();
    let mut lanes = locked(&LANES);
    if let Some((_, lane)) = lanes.iter().find(|(known, _)| *known == key) {
        return lane;
    }
    let lane: SharedLane = Box::leak(Box::new(Mutex::new(CopyLane::new(stream).ok())));
    lanes.push((key, lane));
    lane
}

/// Copies through the lane of `device`; false if there is none.
fn copied(
    device: &CudaDevice,
    what: impl FnOnce() -> String,
    copy: impl FnOnce(&mut CopyLane) -> Result<(), DriverError>,
) -> Result<bool> {
    // Valid after a panic: each copy ends before the next one uses its buffer.
    let mut lane = locked(lane_of(device));
    let Some(lane) = &mut *lane else { return Ok(false) };
    let done = copy(lane);
    done.map(|()| true).map_err(|error| {
        // A started copy must not outlive the memory that it uses.
        let _ = wait_for_stream(&lane.copies);
        let ordinal = lane.compute.context().ordinal();
        Error::internal(format!("cannot copy {} GPU {ordinal}", what())).because(error.to_string())
    })
}

/// Copies `x` to `device`, one being a GPU and the other the host. None if candle must copy: few
/// bytes, an unsupported dtype, or no page-locked memory.
///
/// # Errors
/// The device has too little memory, or a copy fails.
pub(super) fn to_device(x: &Tensor, device: &Device) -> Result<Option<Tensor>> {
    if !is_worth_it(x.dtype(), x.elem_count()) || x.device().is_cpu() == device.is_cpu() {
        return Ok(None);
    }
    let x = x.contiguous()?;
    // SAFETY: the tensor is written in full, or dropped.
    let target = TensorMut::new(unsafe { Tensor::empty(x.shape(), x.dtype(), device)? });
    Ok(copy(&x, &target, None)?.then(|| target.into_tensor()))
}

/// Copies `from` to `to`, of one dtype and length, between host and GPU; false if candle must copy,
/// as in [`to_device`]. A copy to a GPU waits for work before `free` alone, or for all work.
///
/// # Errors
/// A tensor is not contiguous, or a copy fails.
pub(super) fn copy(from: &Tensor, to: &TensorMut, free: Option<&QueueMark>) -> Result<bool> {
    if from.dtype() != to.dtype() || from.elem_count() != to.elem_count() {
        return Ok(false);
    }
    match from.dtype() {
        DType::F32 => copy_of::<f32>(from, to, free),
        DType::BF16 => copy_of::<bf16>(from, to, free),
        DType::U8 => copy_of::<u8>(from, to, free),
        _ => Ok(false),
    }
}

fn copy_of<T: PlainElement>(from: &Tensor, to: &TensorMut, free: Option<&QueueMark>) -> Result<bool> {
    match (from.device(), to.device()) {
        (Device::Cpu, Device::Cuda(_)) => copy_slice::<T>(&read::<T>(from)?, to, free),
        (Device::Cuda(device), Device::Cpu) if is_worth_it(T::DTYPE, from.elem_count()) => {
            let from = memory(from)?;
            update(to, |to: &mut [T]| {
                // SAFETY: the length in bytes is that of the elements, which accept any bytes.
                let to = unsafe { from_raw_parts_mut(to.as_mut_ptr().cast::<u8>(), size_of_val(to)) };
                fetch(device, &from, |range, bytes| copy_on_host(bytes, &mut to[range]))
            })?
        }
        _ => Ok(false),
    }
}

/// Same as [`copy`], from host memory to a GPU.
///
/// # Errors
/// Same as [`copy`].
pub(super) fn copy_slice<T: PlainElement>(
    from: &[T],
    to: &TensorMut,
    free: Option<&QueueMark>,
) -> Result<bool> {
    let Device::Cuda(device) = to.device() else { return Ok(false) };
    if !is_worth_it(T::DTYPE, from.len()) || to.dtype() != T::DTYPE || to.elem_count() != from.len() {
        return Ok(false);
    }
    // SAFETY: plain numbers, as bytes.
    let from = unsafe { from_raw_parts(from.as_ptr().cast::<u8>(), size_of_val(from)) };
    let to = memory(to)?;
    copied(device, || format!("{} bytes to", from.len()), |lane| lane.bring(from, to.address(), free))
}

fn fetch(device: &CudaDevice, from: &Buffer, take: impl FnMut(Range<usize>, &[u8])) -> Result<bool> {
    let bytes = from.bytes();
    copied(device, || format!("{bytes} bytes from"), |lane| lane.fetch(from.address(), bytes, take))
}

/// Calls `each` with the start and the values of successive runs of `from`, a tensor on a GPU, of
/// `most` values at most, on the host. False if candle must copy, as in [`to_device`].
///
/// # Errors
/// The tensor is not contiguous, a copy fails, or the first error of `each`.
pub(super) fn fetch_runs(
    from: &Tensor,
    most: usize,
    mut each: impl FnMut(usize, &Tensor) -> Result<()>,
) -> Result<bool> {
    let Device::Cuda(device) = from.device() else { return Ok(false) };
    if from.dtype() != DType::F32 || !is_worth_it(DType::F32, from.elem_count()) {
        return Ok(false);
    }
    let mut ended = Ok(());
    let width = size_of::<f32>();
    let mut take = |range: Range<usize>, bytes: &[u8]| -> Result<()> {
        for (i, run) in bytes.chunks(most * width).enumerate() {
            let target = TensorMut::zeros(run.len() / width, DType::F32, &Device::Cpu)?;
            update(&target, |to: &mut [f32]| {
                // SAFETY: the length in bytes is that of the elements, which accept any bytes.
                let to = unsafe { from_raw_parts_mut(to.as_mut_ptr().cast::<u8>(), run.len()) };
                copy_on_host(run, to);
            })?;
            each(range.start / width + i * most, &target)?;
        }
        Ok(())
    };
    let copied = fetch(device, &memory(from)?, |range, bytes| {
        if ended.is_ok() {
            ended = take(range, bytes);
        }
    })?;
    ended.map(|()| copied)
}

fn is_worth_it(dtype: DType, elements: usize) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::U8) && elements * dtype.size_in_bytes() >= LEAST_BYTES
}
