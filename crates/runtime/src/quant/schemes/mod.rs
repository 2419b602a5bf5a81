//! The quantized formats, one file each.

mod blocks;
mod four_bit;
mod ggml;
mod grid;
mod int8;
mod int8_rows;

pub use blocks::{BlockCodes, BlockFormat};
pub use four_bit::FourBit;
pub use ggml::GgmlFormat;
pub use grid::{GridCodes, GridFormat, GridZeros};
pub use int8::Int8;
pub use int8_rows::Int8Rows;
