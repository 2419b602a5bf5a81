//! The bytes of a tensor of a GGUF file, decoded a part of a row at a time.

use std::ops::Range;

use crate::quant::BlockType;
use crate::tensor_info::ShardRange;

/// One tensor of a file, or a part of it.
#[derive(Debug, Clone)]
pub(crate) struct BlockSource {
    pub(super) kind: BlockType,
    pub(super) span: ShardRange,
}

/// Returns the bytes of a row of `columns` values.
pub(super) fn row_bytes(kind: BlockType, bytes: &[u8], row: usize, columns: usize) -> &[u8] {
    let size = columns / kind.elements() * kind.bytes();
    &bytes[row * size..][..size]
}

/// Decodes some columns of a row.
pub(super) fn decode_part(
    kind: BlockType,
    row: &[u8],
    columns: Range<usize>,
    out: &mut [f32],
    scratch: &mut Vec<f32>,
) {
    let n = kind.elements();
    let blocks = columns.start / n..columns.end.div_ceil(n);
    let bytes = &row[blocks.start * kind.bytes()..blocks.end * kind.bytes()];
    if blocks.len() * n == out.len() {
        return kind.dequantize(bytes, out);
    }
    scratch.resize(blocks.len() * n, 0.0);
    kind.dequantize(bytes, scratch);
    out.copy_from_slice(&scratch[columns.start - blocks.start * n..][..columns.len()]);
}
