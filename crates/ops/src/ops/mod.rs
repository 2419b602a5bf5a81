//! Every tensor operation of the engine, forward beside backward.
//!
//! Symbols in shape comments: N tokens of a micro-batch (packed sequences without padding), D
//! `hidden_size`, H query heads, K key/value heads, F `intermediate_size`, V `vocab_size`, r the
//! adapter's rank.
//!
//! An op is one function with up to three implementations: the **reference** (candle's primitives,
//! any device and dtype, simple enough to serve as the definition), the **CPU** form (slices,
//! rayon, loops that vectorize) and the launch code of its kernels for NVIDIA GPUs, in `cuda.rs`
//! beside it. The file `cases.rs` beside each op lists its cases: inputs, and the
//! comparison of the op with its reference. `selftest` runs them all on the present device; `bench`
//! measures every op at the shapes of a model. Reductions run in a fixed order: two runs of one
//! plan are bit-identical. The ops do not use candle's autograd; it serves as the oracle of the
//! tests.

pub mod activation;
pub mod adamw;
pub mod adamw_int8;
pub mod attention;
pub mod attention_sinks;
pub mod bench;
mod case;
pub mod causal_conv;
pub mod cross_entropy;
pub mod dora;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod experts;
pub mod gated_delta;
pub mod gated_norm;
pub mod glu;
pub mod layer_norm;
pub mod low_rank;
pub mod matmul;
pub mod matmul_fp8;
pub mod matmul_quantized;
pub mod noise;
#[cfg(all(test, feature = "kernel-emu"))]
mod null_driver;
pub(crate) mod probe;
pub mod rms_norm;
pub mod rotary;
pub mod selftest;
mod span_tables;
pub mod stochastic_rounding;
mod svd;
pub mod xielu;

pub use crate::backends::gpu::{
    BlockGraphs, BlockPass, GEMM_WORKSPACE, GraphCounts, HELD_BYTES, has_kernels, is_deferring, preload,
};
#[cfg(feature = "kernel-emu")]
pub use crate::backends::gpu::{GpuWork, PanelProduct, RecordedWork, count_process, record, requested_work};
pub use matmul::{Addend, ColumnView, ColumnViewMut, LowRank, Transpose, empty, matmul};
