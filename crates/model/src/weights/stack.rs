//! Tensors that hold the matrices of several layers one after the other, as some checkpoints store
//! the experts of a block.
//!
//! finetune has a parameter for each layer. Reading takes each layer's part of the stored tensor
//! ([`super::ModelFiles::unstack`]); writing gives consecutive parts the name and shape of the
//! stack.

use std::sync::Arc;

use super::packed::in_tasks;
use super::stored_parts::StoredParts;
use super::{ModelFiles, StoredElement, TensorInfo};
use crate::error::{Error, Result};

/// A stored tensor of several parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// Its name in the checkpoint.
    pub name: String,
    /// Its shape in the checkpoint; empty if it is a single tensor under another name.
    pub shape: Vec<usize>,
    /// True if it holds the transpose of each part, a matrix.
    pub transposed: bool,
}

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
                let place = (row * columns + at).checked_sub(start);
                if let Some(out) = place.and_then(|place| out.get_mut(place)) {
                    *out = *value;
                }
            }
        }
    });
    info.dtype.is_float()
}

/// A stored tensor and the parts that it holds one after the other.
#[derive(Debug)]
pub struct StackParts {
    /// The stored tensor.
    pub stack: Arc<Stack>,
    /// The parts, in their order.
    pub parts: Vec<StackPart>,
}

/// A part of a stored tensor: a parameter.
#[derive(Debug)]
pub struct StackPart {
    /// The name of the parameter.
    pub name: String,
    /// The shape of the parameter.
    pub shape: Vec<usize>,
}

impl ModelFiles {
    /// Replaces the tensor of `stack` by its parts. Does nothing if no tensor has its name.
    ///
    /// # Errors
    /// User: the tensor has another shape or is quantized, or a part is stored too.
    pub(crate) fn unstack(&mut self, StackParts { stack, parts }: StackParts) -> Result<()> {
        let Some(info) = self.tensors.remove(&stack.name) else { return Ok(()) };
        let refused = |cause: String| {
            Error::user(format!("cannot read weights {}", info.file.display()))
                .because(format!("tensor `{}` {cause}", stack.name))
                .hint("give config.json and weights of one and the same model")
        };
        if info.shape != stack.shape {
            return Err(refused(format!(
                "has shape {:?}, config.json makes it {:?}",
                info.shape, stack.shape
            )));
        }
        let packed = self.parts.remove(&stack.name);
        let (mut start, mut row) = (info.range.start, 0);
        for StackPart { name, shape } in parts {
            let range = if let Some(packed) = &packed {
                let rows = row..row + shape.first().copied().unwrap_or(0);
                row = rows.end;
                let part = packed.packed().and_then(|parts| parts.of_rows(rows, &info.range));
                let (part, codes) = part.ok_or_else(|| {
                    refused(format!("is quantized to {}; accepted: F32, F16, BF16, mxfp4", packed.name()))
                        .hint("give the model that was not quantized")
                })?;
                self.parts.insert(name.clone(), StoredParts::Packed(part));
                codes
            } else {
                let end = start + shape.iter().product::<usize>() * info.dtype.size_bytes();
                std::mem::replace(&mut start, end)..end
            };
            let part = TensorInfo { shape, range, stack: Some(Arc::clone(&stack)), ..info.clone() };
            if self.tensors.insert(name.clone(), part).is_some() {
                return Err(refused(format!("and its part `{name}` are both stored")));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stored_dtype::StoredDtype;
    use crate::weights::{WriteEntry, write_file};

    /// The file has `[E, in, out]`, and reading any range of a part gives its rows again.
    #[test]
    fn a_transposed_stack_is_read_as_it_was_written() -> Result<()> {
        let (experts, rows, columns) = (2, 70, 3);
        let shape = vec![experts, columns, rows];
        let stack = Arc::new(Stack { name: "all".into(), shape, transposed: true });
        let name = |expert: usize| format!("part{expert}");
        let entry = |expert: usize| WriteEntry {
            name: name(expert),
            dtype: StoredDtype::F32,
            shape: vec![rows, columns],
            stack: Some(Arc::clone(&stack)),
        };
        let value = |expert: usize, at: usize| (1000 * expert + at) as f32;
        let place = tempfile::tempdir().map_err(|error| Error::internal(error.to_string()))?;
        let path = place.path().join("model.safetensors");
        let entries: Vec<WriteEntry> = (0..experts).map(entry).collect();
        write_file(&path, &entries, |entry, sink| {
            let expert = entries.iter().position(|one| one == entry).unwrap_or_default();
            let values: Vec<f32> = (0..rows * columns).map(|at| value(expert, at)).collect();
            values.chunks(31).try_for_each(|values| sink.write_values(values))
        })?;
        let mut files = ModelFiles::open_file(&path)?;
        let mut whole = vec![0f32; experts * rows * columns];
        files.read_f32("all", &mut whole)?;
        for (at, found) in whole.iter().enumerate() {
            let (expert, column, row) = (at / (columns * rows), at / rows % columns, at % rows);
            assert_eq!(*found, value(expert, row * columns + column));
        }
        let part = |expert: usize| StackPart { name: name(expert), shape: vec![rows, columns] };
        files.unstack(StackParts { stack, parts: (0..experts).map(part).collect() })?;
        assert!(!files.is_plain("part1"));
        for (start, len) in [(0, rows * columns), (1, 1), (2, 5), (4, 200), (columns, 2 * columns)] {
            let mut found = vec![0f32; len];
            files.read_part("part1", start, &mut found)?;
            assert!(found.iter().enumerate().all(|(at, found)| *found == value(1, start + at)), "{start}");
        }
        Ok(())
    }
}
