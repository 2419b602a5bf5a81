//! Parts of stacks that hold the transpose of each part.

use super::packed::in_tasks;
use super::{StoredElement, TensorInfo};

/// Returns the transpose of `bytes`, `rows` times `columns` elements of `size` bytes.
pub(super) fn transposed(bytes: &[u8], [rows, columns]: [usize; 2], size: usize) -> Vec<u8> {
    let mut out = vec![0; bytes.len()];
    // Rows at once that share the lines of the cache in `bytes`.
    const ROWS: usize = 32;
    for first in (0..columns).step_by(ROWS) {
        let last = columns.min(first + ROWS);
        for (row, line) in bytes.chunks_exact((columns * size).max(1)).enumerate() {
            for (i, value) in line[first * size..last * size].chunks_exact(size).enumerate() {
                let at = ((first + i) * rows + row) * size;
                out[at..at + size].copy_from_slice(value);
            }
        }
    }
    out
}

/// Reads values of a part of a transposed stack from element `start` on; `bytes` are all of the
/// part. Returns false if they are no floats.
pub(super) fn decode_transposed<T: StoredElement>(
    bytes: &[u8],
    info: &TensorInfo,
    start: usize,
    out: &mut [T],
) -> bool {
    let &[rows, columns] = &info.shape[..] else { return false };
    let size = info.dtype.size_bytes();
    in_tasks(columns.max(1), start, out, |start, out| {
        let (first, end) = (start / columns, (start + out.len()).div_ceil(columns));
        let mut column = vec![T::default(); end - first];
        for at in 0..columns {
            let stored = &bytes[(at * rows + first) * size..(at * rows + end) * size];
            // The result below says so of other types.
            let _is_float = T::decode(stored, info.dtype, &mut column);
            for (row, value) in (first..).zip(&column) {
                let index = (row * columns + at).checked_sub(start);
                if let Some(out) = index.and_then(|index| out.get_mut(index)) {
                    *out = *value;
                }
            }
        }
    });
    info.dtype.is_float()
}
