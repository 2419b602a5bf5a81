//! A token table with more rows than its file, for added tokens.
//!
//! The added rows are the mean of the stored ones, so that a new token is initially as likely as an
//! average one (<https://nlp.stanford.edu/~johnhew/vocab-expansion.html>). transformers samples
//! them around this mean, with a billionth of the rows' covariance; the mean itself needs no seed.

use std::sync::OnceLock;

use super::{ModelFiles, StoredElement};
use crate::error::Result;

/// Number of values read at once for the mean: 4 MiB of f32.
const PIECE: usize = 1 << 20;

/// A tensor; a matrix may have any number of rows.
#[derive(Debug)]
pub struct ResizedEmbedding<'a> {
    files: &'a ModelFiles,
    name: &'a str,
    mean: OnceLock<Vec<f32>>,
}

impl<'a> ResizedEmbedding<'a> {
    /// Creates a view of the tensor stored as `name`.
    pub fn new(files: &'a ModelFiles, name: &'a str) -> Self {
        ResizedEmbedding { files, name, mean: OnceLock::new() }
    }

    /// Returns the name of the tensor.
    pub fn name(&self) -> &str {
        self.name
    }

    /// Reads elements from `start` on, in any number.
    ///
    /// # Errors
    /// The same as for [`ModelFiles::read_part`].
    pub fn read_part<T: StoredElement>(&self, start: usize, out: &mut [T]) -> Result<()> {
        let stored = self.files.require(self.name)?.elements();
        let (own, added) = out.split_at_mut(stored.saturating_sub(start).min(out.len()));
        if !own.is_empty() {
            self.files.read_part(self.name, start, own)?;
        }
        if !added.is_empty() {
            let mean = self.mean()?;
            let first = (start + own.len()) % mean.len().max(1);
            for (value, mean) in added.iter_mut().zip(mean.iter().cycle().skip(first)) {
                *value = T::from_f32(*mean);
            }
        }
        Ok(())
    }

    /// Releases the pages, like [`ModelFiles::discard`].
    pub fn discard(&self) {
        self.files.discard(self.name);
    }

    /// Returns the mean of the stored rows, summed in f64.
    fn mean(&self) -> Result<&[f32]> {
        if let Some(mean) = self.mean.get() {
            return Ok(mean);
        }
        let info = self.files.require(self.name)?;
        let (elements, columns) = (info.elements(), info.shape.last().copied().unwrap_or(1).max(1));
        let mut sums = vec![0f64; columns];
        let piece = (PIECE / columns).max(1) * columns;
        let mut values = vec![0f32; piece.min(elements)];
        for start in (0..elements).step_by(piece) {
            let values = &mut values[..piece.min(elements - start)];
            self.files.read_part(self.name, start, values)?;
            self.files.discard(self.name);
            for row in values.chunks_exact(columns) {
                sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
            }
        }
        let rows = (elements / columns).max(1) as f64;
        Ok(self.mean.get_or_init(|| sums.into_iter().map(|sum| (sum / rows) as f32).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{StoredDtype, WriteEntry, write_file};

    #[test]
    fn rows_beyond_the_file_are_the_mean() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("model.safetensors");
        let entry = WriteEntry { name: "t".into(), dtype: StoredDtype::F32, shape: vec![3, 2], stack: None };
        write_file(&path, &[entry], |_, sink| sink.write_values(&[1f32, 10.0, 2.0, 20.0, 6.0, 60.0]))
            .expect("written");
        let files = ModelFiles::open_file(&path).expect("opens");
        let table = ResizedEmbedding::new(&files, "t");
        let read = |start: usize, len: usize| {
            let mut out = vec![0f32; len];
            table.read_part(start, &mut out).expect("reads");
            out
        };
        assert_eq!(read(0, 10), [1.0, 10.0, 2.0, 20.0, 6.0, 60.0, 3.0, 30.0, 3.0, 30.0]);
        assert_eq!(read(5, 4), [60.0, 3.0, 30.0, 3.0]);
        assert_eq!(read(9, 2), [30.0, 3.0]);
        assert_eq!(read(1, 2), [10.0, 2.0]);
    }
}
