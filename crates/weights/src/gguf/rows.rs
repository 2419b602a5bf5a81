//! The order in which a tensor of a GGUF file has the rows of a parameter.

use serde::{Deserialize, Serialize};

/// Rows of a parameter in three nested loops, the last of which is the innermost: row `start` and
/// those that each loop reaches by `count` steps of `stride` rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowRun {
    /// The first row.
    pub start: usize,
    /// The number of steps of each loop.
    pub counts: [usize; 3],
    /// The rows between two steps of each loop.
    pub strides: [usize; 3],
}

impl RowRun {
    /// Returns `len` rows side by side.
    pub fn range(start: usize, len: usize) -> Self {
        RowRun { start, counts: [1, 1, len], strides: [0, 0, 1] }
    }

    /// Returns a block of `len` rows of each of `count` groups of `stride` rows.
    pub fn blocks(start: usize, count: usize, stride: usize, len: usize) -> Self {
        RowRun { start, counts: [1, count, len], strides: [0, stride, 1] }
    }

    /// Returns the number of rows.
    pub fn count(&self) -> usize {
        self.counts.iter().fold(1, |product: usize, count| product.saturating_mul(*count))
    }

    /// Returns the rows in order.
    pub(crate) fn rows(&self) -> impl Iterator<Item = usize> {
        let RowRun { start, counts: [a, b, c], strides: [of_a, of_b, of_c] } = *self;
        (0..a).flat_map(move |i| {
            (0..b).flat_map(move |j| (0..c).map(move |k| start + i * of_a + j * of_b + k * of_c))
        })
    }
}

/// Returns all rows of `runs` in order.
pub fn rows_of(runs: &[RowRun]) -> impl Iterator<Item = usize> {
    runs.iter().flat_map(RowRun::rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two key heads with a query, a key and a value of two rows each.
    #[test]
    fn keys_of_each_head() {
        let runs = [RowRun::blocks(0, 2, 6, 2), RowRun::blocks(2, 2, 6, 2)];
        assert_eq!(rows_of(&runs).collect::<Vec<_>>(), [0, 1, 6, 7, 2, 3, 8, 9]);
        assert_eq!(runs[0].count(), 4);
        assert_eq!(RowRun::range(3, 2).rows().collect::<Vec<_>>(), [3, 4]);
    }
}
