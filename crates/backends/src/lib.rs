//! The backends of the operations of `finetune`: products on CPUs, loops that vectorize, and the
//! launch path of kernels on GPUs, with the emulator and the counter that replace a GPU.

pub mod column_view;
pub mod gemm;
pub mod gpu;
pub mod mat_view;
pub mod packed_gemm;
pub mod simd;

#[cfg(test)]
use finetune_core::recipe;
use finetune_core::{error, locks};
// Only code for the instructions of x86-64 rounds by itself.
#[cfg(target_arch = "x86_64")]
use finetune_runtime::rounding;
use finetune_runtime::{instruction_set, quant, runtime};
