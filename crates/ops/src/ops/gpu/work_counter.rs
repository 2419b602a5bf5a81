//! A driver that runs nothing and counts the requested work: launches, products, bytes that kernels
//! read and write, uploads and waits for the GPU. It gives the cost of a step on a GPU without a
//! GPU. Copies that candle does itself, such as that of a residual into a layer's output, are not
//! counted.

use std::convert::Infallible;
use std::sync::{LazyLock, Mutex};

use super::gemm::{DeviceMatrix, GemmElement};
use super::queue_limit::QueueLimit;
use super::{Arg, Driver, Gemm, Kernel, LaunchShape};
use crate::error::Result;
use crate::locks::locked;

/// The work requested of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GpuWork {
    /// Number of kernel launches.
    pub launches: u64,
    /// Number of matrix products.
    pub gemms: u64,
    /// Bytes that kernels read and write, each operand once.
    pub kernel_bytes: u64,
    /// Bytes that products read and write, each operand once.
    pub gemm_bytes: u64,
    /// Operations of products; a multiplication and an addition count as two.
    pub gemm_flops: f64,
    /// Those of them whose operands are codes of e4m3.
    pub fp8_flops: f64,
    /// Operations of attention's products, counted likewise.
    pub attention_flops: f64,
    /// Bytes copied to the GPU.
    pub uploaded_bytes: u64,
    /// Number of times the host waited to read a result.
    pub waits: u64,
    /// Largest number of launches and products since the process began that the host had not waited
    /// for.
    pub most_ahead: u64,
}

impl std::ops::Sub for GpuWork {
    type Output = GpuWork;
    fn sub(self, before: GpuWork) -> GpuWork {
        GpuWork {
            launches: self.launches - before.launches,
            gemms: self.gemms - before.gemms,
            kernel_bytes: self.kernel_bytes - before.kernel_bytes,
            gemm_bytes: self.gemm_bytes - before.gemm_bytes,
            gemm_flops: self.gemm_flops - before.gemm_flops,
            fp8_flops: self.fp8_flops - before.fp8_flops,
            attention_flops: self.attention_flops - before.attention_flops,
            uploaded_bytes: self.uploaded_bytes - before.uploaded_bytes,
            waits: self.waits - before.waits,
            most_ahead: self.most_ahead,
        }
    }
}

impl GpuWork {
    /// Returns the minimum seconds on a GPU with `flops` operations per second and `bytes` bytes
    /// per second, twice as many of e4m3. Products are bound by the slower of the two, attention by
    /// operations, other kernels by memory; their times add up.
    pub fn seconds(&self, flops: f64, bytes: f64) -> f64 {
        let products = ((self.gemm_flops - self.fp8_flops / 2.0) / flops).max(self.gemm_bytes as f64 / bytes);
        products + self.attention_flops / flops + self.kernel_bytes as f64 / bytes
    }
}

/// The work requested since the process began, and whether the GPU is busy.
#[derive(Default)]
struct WorkCounter {
    work: GpuWork,
    busy: bool,
    queue: QueueLimit<u64>,
    /// Launches and products that the host has waited for.
    finished: u64,
}

impl WorkCounter {
    /// Counts a launch or a product in the queue, whose length is limited as on a GPU.
    fn queued(&mut self) {
        self.busy = true;
        let all = self.work.launches + self.work.gemms;
        self.work.most_ahead = self.work.most_ahead.max(all - self.finished);
        let finished = &mut self.finished;
        let wait = |mark| {
            *finished = (*finished).max(mark);
            Ok(())
        };
        let Ok(()) = self.queue.launched::<Infallible>(|| Ok(all), wait);
    }
}

static ASKED: LazyLock<Mutex<WorkCounter>> = LazyLock::new(Mutex::default);

/// Returns the work requested of the GPU since the process began.
pub fn requested_work() -> GpuWork {
    with_requested(|asked| asked.work)
}

fn with_requested<R>(change: impl FnOnce(&mut WorkCounter) -> R) -> R {
    change(&mut locked(&ASKED))
}

/// The driver that counts.
#[derive(Debug)]
pub(super) struct LaunchCounter;

impl Driver for LaunchCounter {
    fn launch(&self, _kernel: &Kernel, shape: LaunchShape, args: &[Arg]) -> Result<()> {
        if shape.is_empty() {
            return Ok(());
        }
        with_requested(|asked| {
            asked.work.launches += 1;
            asked.work.kernel_bytes += args.iter().map(|arg| arg.moved).sum::<u64>();
            asked.queued();
        });
        Ok(())
    }

    fn gemm(&self, gemm: &Gemm) -> Result<()> {
        let (m, n, k) = gemm.size();
        let bytes = |matrix: &DeviceMatrix, element: GemmElement| {
            (matrix.rows * matrix.cols * element.bytes()) as u64
        };
        let result = bytes(&gemm.d, gemm.result) * if gemm.beta == 0.0 { 1 } else { 2 };
        with_requested(|asked| {
            asked.work.gemms += 1;
            let flops = 2.0 * m as f64 * n as f64 * k as f64;
            asked.work.gemm_flops += flops;
            if gemm.operands == GemmElement::E4m3 {
                asked.work.fp8_flops += flops;
            }
            asked.work.gemm_bytes += bytes(&gemm.a, gemm.operands) + bytes(&gemm.b, gemm.operands) + result;
            asked.queued();
        });
        Ok(())
    }

    fn note_attention(&self, flops: &dyn Fn() -> f64) {
        let flops = flops();
        with_requested(|asked| asked.work.attention_flops += flops);
    }

    fn note_upload(&self, bytes: usize) {
        with_requested(|asked| asked.work.uploaded_bytes += bytes as u64);
    }

    fn note_read(&self) {
        with_requested(|asked| {
            asked.work.waits += u64::from(std::mem::take(&mut asked.busy));
            asked.finished = asked.work.launches + asked.work.gemms;
        });
    }
}
