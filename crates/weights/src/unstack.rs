//! Replaces a stack by its parts when a checkpoint is opened.

use std::sync::Arc;

use super::stored_parts::StoredParts;
use super::{ModelFiles, StackPart, StackParts, TensorInfo};
use crate::error::{Error, Result};

impl ModelFiles {
    /// Replaces the tensor of `stack` by its parts. Does nothing if no tensor has its name.
    ///
    /// # Errors
    /// User: the tensor has another shape, is quantized to another format than mxfp4, or a part is
    /// stored too.
    pub fn unstack(&mut self, StackParts { stack, parts }: StackParts) -> Result<()> {
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
                    refused(format!(
                        "is quantized to {}; accepted: F64, F32, F16, BF16, mxfp4",
                        packed.name()
                    ))
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
    use crate::{Stack, WriteEntry, write_file};

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
        let folder = tempfile::tempdir().map_err(|error| Error::internal(error.to_string()))?;
        let path = folder.path().join("model.safetensors");
        let entries: Vec<WriteEntry> = (0..experts).map(entry).collect();
        write_file(&path, &entries, |entry, sink| {
            let expert = entries.iter().position(|one| one == entry).unwrap_or_default();
            let values: Vec<f32> = (0..rows * columns).map(|at| value(expert, at)).collect();
            values.chunks(31).try_for_each(|values| sink.write_values(values))
        })?;
        let mut files = ModelFiles::open_file(&path)?;
        let mut whole = vec![0f32; experts * rows * columns];
        files.read_f32("all", &mut whole)?;
        for (at, actual) in whole.iter().enumerate() {
            let (expert, column, row) = (at / (columns * rows), at / rows % columns, at % rows);
            assert_eq!(*actual, value(expert, row * columns + column));
        }
        let part = |expert: usize| StackPart { name: name(expert), shape: vec![rows, columns] };
        files.unstack(StackParts { stack, parts: (0..experts).map(part).collect() })?;
        assert!(!files.is_plain("part1"));
        for (start, len) in [(0, rows * columns), (1, 1), (2, 5), (4, 200), (columns, 2 * columns)] {
            let mut read = vec![0f32; len];
            files.read_part("part1", start, &mut read)?;
            assert!(read.iter().enumerate().all(|(at, read)| *read == value(1, start + at)), "{start}");
        }
        Ok(())
    }
}
