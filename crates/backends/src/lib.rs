//! The backends of the operations of `finetune`: products on CPUs, loops that vectorize, and the
//! launch path of kernels on GPUs, with the emulator and the counter that replace a GPU.

pub mod column_view;
pub mod gemm;
pub mod gpu;
pub mod mat_view;
pub mod packed_gemm;
pub mod simd;

// Only the drivers of GPUs have locks.
use finetune_core::error;
#[cfg(any(feature = "cuda", feature = "kernel-emu"))]
use finetune_core::locks;
#[cfg(test)]
use finetune_core::recipe;
use finetune_runtime::{instruction_set, quant, rounding, runtime};
