//! Quantized numbers, bit-compatible with bitsandbytes: NF4 and FP4 (QLoRA, arXiv 2305.14314),
//! blockwise int8 (arXiv 2110.02861), the rows of LLM.int8() (arXiv 2208.07339), double
//! quantization of scales.
//!
//! A format is a file in `schemes` that implements [`QuantScheme`], and a variant of
//! [`QuantFormat`], which names the format of a tensor. This module has only slices and arithmetic:
//! `weights` defines the names in files, `ops` the products with codes. `packed` and `block_type`
//! decode formats of other tools; `encode` quantizes to those of `packed`, and `block_codes` to
//! blocks of ggml. `repack` rearranges those that a run keeps (`schemes/grid.rs`). `mxfp4` rounds
//! to MXFP4.

mod block_codes;
mod block_type;
mod codes;
mod e4m3;
mod element;
mod encode;
mod format;
mod magnitude;
mod mxfp4;
mod nested;
mod packed;
mod repack;
mod runs;
mod scheme;
mod schemes;
mod small_floats;
mod tensor;

pub use block_type::BlockType;
pub use codes::{DynamicMap, dynamic_signed, dynamic_unsigned, nearest};
pub use e4m3::{E4M3, MOST_E4M3, to_e4m3};
pub use element::DequantizedElement;
pub use encode::EncodedTensor;
pub use format::QuantFormat;
pub use magnitude::first_not_finite;
pub use mxfp4::{MXFP4_BLOCK, to_mxfp4};
pub use nested::{NESTED_BLOCK, block_scales, nest, nest_around};
pub use packed::{CodeLayout, PackedFormat, PackedTensor};
pub use repack::pack_codes;
pub use runs::{QuantMemory, QuantRun, RunDtype, RunMeaning, RunsView, RunsViewMut};
pub use scheme::{PanelKernel, ProductHint, QuantScheme, ReadValues};
pub use schemes::{
    BlockCodes, BlockFormat, FourBit, GgmlFormat, GridCodes, GridFormat, GridZeros, Int8, Int8Rows,
};
pub use small_floats::ScaleDtype;
pub use tensor::{QuantBuffer, QuantTensor, QuantView, QuantViewMut};
