//! Dispatch from an op to its kernels, the same on every device that runs them.
//!
//! An op's launch code (`crates/ops/src/ops/<op>/cuda.rs`) calls a [`Driver`]: that of NVIDIA GPUs,
//! or the emulator of feature `kernel-emu`, which runs the kernels compiled for the host and checks
//! every access (`kernels/emu`). With the emulator, "device memory" is the memory of CPU tensors,
//! so an engine on the CPU exercises the launch code on any machine.

#![cfg_attr(
    not(any(feature = "cuda", feature = "kernel-emu")),
    allow(dead_code, reason = "without a driver nothing reads what a launch is given")
)]

mod args;
mod beside;
mod block_graphs;
mod constant;
#[cfg(feature = "cuda")]
mod cublas;
#[cfg(feature = "cuda")]
mod cuda_driver;
#[cfg(feature = "cuda")]
mod cuda_graph;
mod deferred;
#[cfg(feature = "kernel-emu")]
pub mod emulator;
mod gemm;
#[cfg(any(feature = "cuda", test))]
mod gemm_plans;
mod held;
#[cfg(feature = "kernel-emu")]
pub mod host_driver;
#[cfg(feature = "kernel-emu")]
mod host_graph;
mod preload;
#[cfg(any(feature = "cuda", feature = "kernel-emu"))]
mod queue_limit;
#[cfg(feature = "kernel-emu")]
mod recorder;
mod request;
mod transfer;
#[cfg(feature = "kernel-emu")]
mod work_counter;

use candle_core::{DType, Device, Tensor};
use half::bf16;

use self::args::KernelValue;
pub use self::args::{Arg, In, InOut, KernelElement, Out};
pub use self::beside::WorkBeside;
pub use self::block_graphs::{BlockGraphs, BlockPass, GraphCounts};
pub use self::constant::constant;
use self::deferred::issue_before_candle;
pub use self::deferred::{HELD_BYTES, is_deferring};
pub use self::gemm::Gemm;
#[cfg(feature = "kernel-emu")]
pub use self::host_driver::count_process;
pub use self::preload::preload;
#[cfg(feature = "kernel-emu")]
pub use self::recorder::{PanelProduct, RecordedWork, record};
pub use self::request::{DeviceGraph, Request};
pub use self::transfer::{read, upload};
#[cfg(feature = "kernel-emu")]
pub use self::work_counter::{GpuWork, requested_work};
use crate::error::{Error, Result};

/// Bytes of workspace of a product on a GPU: NVIDIA's recommendation for Hopper.
pub const GEMM_WORKSPACE: usize = 32 << 20;

/// The identity of a kernel: its function and the file of `kernels/` that defines it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    /// The name of its function.
    pub name: &'static str,
    /// The file name without `.cu`.
    pub module: &'static str,
}

/// The threads of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchShape {
    /// Thread blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block along x, y and z; together a multiple of 32, at most 1024.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
}

impl LaunchShape {
    /// Returns `blocks` blocks of `threads` threads in one dimension.
    pub fn line(blocks: usize, threads: u32) -> Self {
        // A larger grid cannot be launched; the driver refuses the largest number.
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        LaunchShape { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0 }
    }

    /// Returns true if no thread runs: CUDA refuses a launch without blocks.
    pub fn is_empty(&self) -> bool {
        self.grid.contains(&0)
    }
}

/// Describes a launch: the kernel, its threads and arguments. A tensor is shown by its accessible
/// rows and their bytes, a number by its bits, since its type is unknown here.
#[cfg(any(feature = "cuda", feature = "kernel-emu"))]
fn launch_text(kernel: &Kernel, shape: LaunchShape, args: &[Arg]) -> String {
    let LaunchShape { grid: [gx, gy, gz], block: [bx, by, bz], shared_bytes } = shape;
    let arg = |arg: &Arg| match (arg.rows, arg.value) {
        (0, number) if number < 1 << 24 => number.to_string(),
        (0, bits) => format!("{bits:#x}"),
        (rows, _) => format!("[{rows} x {} B]", arg.row_bytes),
    };
    let args: Vec<String> = args.iter().map(arg).collect();
    format!(
        "the kernel {} of kernels/{}.cu, {gx} x {gy} x {gz} blocks of {bx} x {by} x {bz} threads, {shared_bytes} B of \
         shared memory, over {}",
        kernel.name,
        kernel.module,
        args.join(", ")
    )
}

/// Converts a number to a kernel argument.
///
/// # Errors
/// Fails if the number is 2^32 or larger.
pub fn number(value: usize) -> Result<u32> {
    u32::try_from(value).map_err(|_| Error::internal(format!("{value} is too large for a kernel")))
}

/// Returns true if kernels support activations and weights of this type.
pub fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F32)
}

/// Returns true if kernels support values of all these dtypes.
pub fn are_floats<const N: usize>(types: [DType; N]) -> bool {
    types.into_iter().all(is_float)
}

/// The code that computes an op on the device of its tensors.
#[derive(Debug, Clone, Copy)]
pub enum Implementation {
    /// A kernel, which this driver launches.
    Kernel(&'static dyn Driver),
    /// Operations of candle: no kernel of the device supports the op.
    Composed,
    /// The op's own code for the CPU.
    Cpu,
}

impl Implementation {
    /// Returns the implementation of an op on the device of `tensor`. If `is_supported`, a kernel
    /// supports its arguments.
    pub fn of(tensor: &Tensor, is_supported: bool) -> Self {
        if let Some(driver) = driver_of(tensor).filter(|_| is_supported) {
            return Implementation::Kernel(driver);
        }
        issue_before_candle();
        if tensor.device().is_cpu() { Implementation::Cpu } else { Implementation::Composed }
    }
}

/// A backend that runs kernels and multiplies matrices.
pub trait Driver: std::fmt::Debug {
    /// Runs `kernel` over the threads of `shape`, after all earlier launches. An empty shape runs
    /// nothing.
    ///
    /// # Errors
    /// Fails if the driver refuses the launch, or the emulator finds a fault of the kernel or of an
    /// earlier launch.
    fn launch(&self, kernel: &Kernel, shape: LaunchShape, args: &[Arg]) -> Result<()>;

    /// Multiplies matrices, after all earlier launches; none of the sizes is zero.
    ///
    /// # Errors
    /// Fails if the driver refuses the product, or the emulator finds a matrix outside its tensor.
    fn gemm(&self, gemm: &Gemm) -> Result<()>;

    /// Multiplies from now on by the algorithms at `index` of the library's ranking: 0 is the one
    /// that it expects to be the fastest.
    ///
    /// # Errors
    /// Fails if the library does not start.
    fn choose_algorithm(&self, _index: usize) -> Result<()> {
        Ok(())
    }

    /// Returns whether a product of e4m3 takes a scale for each row of both operands.
    fn scales_rows(&self) -> bool {
        true
    }

    /// Calls `work` with a driver that launches on a second queue of the device: after all work
    /// launched so far, and beside later work. Returns its end; none if the device has one queue,
    /// and `work` was not called.
    ///
    /// # Errors
    /// Fails if `work` does, or the driver refuses the second queue. Nothing of `work` runs then.
    fn beside(
        &self,
        _work: &mut dyn FnMut(&dyn Driver) -> Result<()>,
    ) -> Result<Option<Box<dyn WorkBeside>>> {
        Ok(None)
    }

    /// Makes a graph of requests, in this order; none if the device has no graphs. It runs nothing.
    ///
    /// # Errors
    /// Fails if the driver refuses the graph, or the device has not enough memory.
    fn graph(&'static self, _requests: &[Request]) -> Result<Option<Box<dyn DeviceGraph>>> {
        Ok(None)
    }

    /// Announces that the next launch is attention with this many floating-point operations.
    fn record_attention(&self, _flops: &dyn Fn() -> f64) {}

    /// Announces an upload of this many bytes to the device.
    fn record_upload(&self, _bytes: usize) {}

    /// Announces that the host reads a result, and waits for the device.
    fn record_read(&self) {}

    /// Loads the code of all kernels and the library of the products.
    ///
    /// # Errors
    /// Fails if the driver refuses the code, or the device has not enough memory.
    fn preload(&self) -> Result<()> {
        Ok(())
    }
}

/// Returns the driver whose kernels compute on the device of `tensor`; none if the CPU forms
/// compute there.
pub fn driver_of(tensor: &Tensor) -> Option<&'static dyn Driver> {
    driver_on(tensor.device())
}

/// Returns the driver whose kernels compute on `device`; none if the CPU forms compute there. If
/// this thread defers its launches there, the driver records them.
pub fn driver_on(device: &Device) -> Option<&'static dyn Driver> {
    deferred::recording_driver(device).or_else(|| real_driver_on(device))
}

/// Returns the driver of the device itself.
fn real_driver_on(device: &Device) -> Option<&'static dyn Driver> {
    match device {
        Device::Cpu => host_driver(),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda_driver::driver_on(device),
        _ => None,
    }
}

/// Multiplies from now on by the algorithms at `index` of the ranking of the library of `device`.
/// Has no effect where the CPU forms compute.
///
/// # Errors
/// Fails if the library does not start.
pub fn choose_algorithm(device: &Device, index: usize) -> Result<()> {
    driver_on(device).map_or(Ok(()), |driver| driver.choose_algorithm(index))
}

/// Returns true if kernels compute on `device`.
pub fn has_kernels(device: &Device) -> bool {
    driver_on(device).is_some()
}

/// Returns the driver that replaces a GPU: that of this thread in tests of single operations, else
/// that of the process.
fn host_driver() -> Option<&'static dyn Driver> {
    #[cfg(feature = "kernel-emu")]
    if let Some(driver) = STAND_IN.get() {
        return Some(driver);
    }
    #[cfg(feature = "kernel-emu")]
    return host_driver::of_process();
    #[cfg(not(feature = "kernel-emu"))]
    None
}

#[cfg(feature = "kernel-emu")]
thread_local! {
    /// The driver that replaces a GPU on this thread.
    static STAND_IN: std::cell::Cell<Option<&'static dyn Driver>> = const { std::cell::Cell::new(None) };
}

/// Runs `work` with kernels on `driver` for all ops of this thread on CPU tensors.
#[cfg(feature = "kernel-emu")]
pub fn with_host_driver<R>(driver: &'static dyn Driver, work: impl FnOnce() -> R) -> R {
    /// Restores the previous driver, even if `work` panics.
    struct Restore(Option<&'static dyn Driver>);
    impl Drop for Restore {
        fn drop(&mut self) {
            STAND_IN.set(self.0);
        }
    }
    let _restore = Restore(STAND_IN.replace(Some(driver)));
    work()
}

/// The generated functions, one per kernel, with the types of its parameters.
#[allow(clippy::too_many_arguments)]
#[allow(rustdoc::broken_intra_doc_links, reason = "comments of kernels write shapes in brackets")]
pub mod kernels {
    use super::{Driver, In, InOut, Kernel, KernelValue, LaunchShape, Out, Result, bf16};

    include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
}
