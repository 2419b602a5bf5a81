//! The values of a parameter whose rows or columns have another order in the file.

use super::parameter::GgufParameter;
use super::rows::{RowRun, rows_of};
use super::source::{BlockSource, decode_part, row_bytes};

/// A row of a file: the tensor among the sources of the parameter, and its row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SourceRow {
    source: u32,
    row: u32,
}

/// The position of each row and column of a parameter in the file.
#[derive(Debug, Clone)]
pub(super) struct FileOrder {
    /// For each row of the parameter.
    rows: Vec<SourceRow>,
    /// For each column; empty: as in the parameter.
    columns: Vec<usize>,
    /// The number of heads whose matrices a source holds transposed.
    transposed: Vec<Option<usize>>,
    /// The row of values that are decoded at once.
    row: usize,
    /// The text of the order, which differs between any two of them.
    text: String,
}

impl FileOrder {
    /// Returns the order of a parameter of `elements` values; `None` if it is that of the file.
    ///
    /// # Errors
    /// The runs are not every row of the parameter once.
    pub(super) fn of(parameter: &GgufParameter, elements: usize) -> Result<Option<Self>, String> {
        let GgufParameter { rows, columns, transposed_heads, by_element, .. } = parameter;
        if rows.is_empty() && columns.is_empty() {
            return Ok(None);
        }
        // A vector has rows of one value.
        let wide =
            if parameter.shape.len() < 2 { 1 } else { parameter.shape[parameter.shape.len() - 1].max(1) };
        let row = if *by_element { 1 } else { wide };
        let count = elements / row;
        let nowhere = SourceRow { source: u32::MAX, row: 0 };
        let mut order = vec![nowhere; count];
        let wrong = || format!("the order in its list is not each of {count} rows once");
        if rows.is_empty() {
            order = (0..count as u32).map(|row| SourceRow { source: 0, row }).collect();
        }
        for (source, runs) in (0u32..).zip(rows) {
            if runs.iter().map(RowRun::count).fold(0, usize::saturating_add) > count {
                return Err(wrong());
            }
            for (at, row) in (0u32..).zip(rows_of(runs)) {
                let source_row = order.get_mut(row).filter(|origin| **origin == nowhere).ok_or_else(wrong)?;
                *source_row = SourceRow { source, row: at };
            }
        }
        if order.contains(&nowhere) {
            return Err(wrong());
        }
        let moved: Vec<usize> = rows_of(columns).take(wide + 1).collect();
        let mut inverse = vec![usize::MAX; moved.len()];
        for (at, from) in moved.iter().enumerate() {
            *inverse.get_mut(*from).ok_or_else(wrong)? = at;
        }
        if !inverse.is_empty() && (inverse.len() != wide || inverse.contains(&usize::MAX)) {
            return Err(wrong());
        }
        let text = format!("{rows:?} {columns:?} {transposed_heads:?}");
        let mut transposed = transposed_heads.clone();
        transposed.resize(rows.len().max(1), None);
        Ok(Some(FileOrder { rows: order, columns: inverse, transposed, row, text }))
    }

    /// Returns the text of the order.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Returns whether single values are in another order.
    pub(super) fn is_by_element(&self) -> bool {
        self.row == 1
    }

    /// Returns the number of values of source `at`.
    pub(super) fn elements(&self, at: usize) -> usize {
        self.rows.iter().filter(|origin| origin.source as usize == at).count() * self.row
    }

    /// Returns the length of the rows of source `at`, whose shape is `shape`.
    pub(super) fn row_of(&self, at: usize, shape: &[usize]) -> usize {
        match self.transposed.get(at).copied().flatten() {
            Some(heads) => self.elements(at) / (heads * self.row).max(1),
            None if self.row == 1 => shape.last().copied().unwrap_or(1),
            None => self.row,
        }
    }

    /// Decodes the values from `start` on, of the tensors `sources` with the bytes `stored`.
    pub(super) fn decode(
        &self,
        sources: &[BlockSource],
        stored: &[&[u8]],
        start: usize,
        mut out: &mut [f32],
    ) {
        let (mut at, mut scratch, mut line) = (start, Vec::new(), vec![0f32; self.row]);
        while !out.is_empty() {
            let (row, column) = (at / self.row, at % self.row);
            let count = (self.row - column).min(out.len());
            let (part, rest) = out.split_at_mut(count);
            let SourceRow { source, row } = self.rows[row];
            let (source, row) = (source as usize, row as usize);
            let (kind, bytes) = (sources[source].kind, stored[source]);
            if let Some(heads) = self.transposed[source] {
                let values = bytes.len() / kind.bytes() * kind.elements();
                let wide = values / (heads * self.row).max(1);
                let (head, inner) = (row / wide, row % wide);
                for (column, value) in (column..).zip(part) {
                    let line = row_bytes(kind, bytes, head * self.row + column, wide);
                    decode_part(kind, line, inner..inner + 1, std::slice::from_mut(value), &mut scratch);
                }
            } else if self.row == 1 {
                // Biases of experts, which are f32: a block is one value.
                decode_part(kind, row_bytes(kind, bytes, row, 1), 0..1, part, &mut scratch);
            } else if self.columns.is_empty() {
                let stored = row_bytes(kind, bytes, row, self.row);
                decode_part(kind, stored, column..column + count, part, &mut scratch);
            } else {
                let stored = row_bytes(kind, bytes, row, self.row);
                decode_part(kind, stored, 0..self.row, &mut line, &mut scratch);
                let columns = self.columns[column..].iter();
                part.iter_mut().zip(columns).for_each(|(to, from)| *to = line[*from]);
            }
            (at, out) = (at + count, rest);
        }
    }

    /// Returns the values of each of `sources` tensors in the order of the file, given those of the
    /// parameter: the reverse of [`FileOrder::decode`].
    pub(super) fn in_files(&self, values: &[f32], sources: usize) -> Vec<Vec<f32>> {
        let mut all: Vec<Vec<f32>> = (0..sources).map(|at| vec![0.0; self.elements(at)]).collect();
        for (origin, line) in self.rows.iter().zip(values.chunks_exact(self.row)) {
            let (source, row) = (origin.source as usize, origin.row as usize);
            let to = &mut all[source];
            if let Some(heads) = self.transposed[source] {
                let wide = to.len() / (heads * self.row).max(1);
                let (head, inner) = (row / wide, row % wide);
                for (column, value) in line.iter().enumerate() {
                    to[(head * self.row + column) * wide + inner] = *value;
                }
            } else if self.columns.is_empty() || self.row == 1 {
                to[row * self.row..][..self.row].copy_from_slice(line);
            } else {
                let to = &mut to[row * self.row..];
                self.columns.iter().zip(line).for_each(|(column, value)| to[*column] = *value);
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::BlockType;
    use crate::tensor_info::ShardRange;

    fn parameter(shape: &[usize], rows: Vec<Vec<RowRun>>, columns: Vec<RowRun>) -> GgufParameter {
        GgufParameter {
            tensors: Vec::new(),
            expert: None,
            position: None,
            half: None,
            shape: shape.to_vec(),
            interleaved_heads: None,
            added: 0.0,
            rows,
            columns,
            transposed_heads: Vec::new(),
            by_element: false,
            is_log_rate: false,
        }
    }

    fn decoded(order: &FileOrder, stored: &[&[f32]], count: usize) -> Vec<f32> {
        let source = || BlockSource { kind: BlockType::F32, span: ShardRange { shard: 0, range: 0..0 } };
        let sources: Vec<BlockSource> = stored.iter().map(|_| source()).collect();
        let bytes: Vec<Vec<u8>> = stored
            .iter()
            .map(|values| values.iter().flat_map(|value| value.to_le_bytes()).collect())
            .collect();
        let bytes: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
        let mut out = vec![0.0; count - 1];
        order.decode(&sources, &bytes, 1, &mut out);
        let mut all = vec![0.0; count];
        order.decode(&sources, &bytes, 0, &mut all);
        assert_eq!(order.in_files(&all, stored.len()), stored, "there and back");
        out
    }

    /// Two heads: a key of two columns, transposed, and a value.
    #[test]
    fn transposed_keys_and_values_are_one_parameter() {
        let rows = [0, 1].map(|start| vec![RowRun::blocks(start, 2, 2, 1)]).into();
        let mut keys = parameter(&[4, 2], rows, Vec::new());
        keys.transposed_heads = vec![Some(2), None];
        let order = FileOrder::of(&keys, 8).expect("each row once").expect("another order");
        let actual = decoded(&order, &[&[0.0, 1.0, 10.0, 11.0], &[100.0, 101.0, 110.0, 111.0]], 8);
        assert_eq!(actual, [1.0, 100.0, 101.0, 10.0, 11.0, 110.0, 111.0]);
    }

    #[test]
    fn columns_and_vectors_are_put_back() {
        let in_turns = vec![RowRun { start: 0, counts: [2, 2, 1], strides: [1, 2, 1] }];
        let columns = parameter(&[2, 4], Vec::new(), in_turns.clone());
        let order = FileOrder::of(&columns, 8).expect("each column once").expect("another order");
        let actual = decoded(&order, &[&[0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]], 8);
        assert_eq!(actual, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        let vector = parameter(&[4], vec![in_turns], Vec::new());
        let order = FileOrder::of(&vector, 4).expect("each value once").expect("another order");
        assert_eq!(decoded(&order, &[&[0.0, 2.0, 1.0, 3.0]], 4), [1.0, 2.0, 3.0]);
    }

    #[test]
    fn an_order_is_every_row_once() {
        for rows in [vec![RowRun::range(0, 3)], vec![RowRun::range(0, 4), RowRun::range(0, 1)]] {
            assert!(FileOrder::of(&parameter(&[4, 1], vec![rows], Vec::new()), 4).is_err());
        }
        assert!(FileOrder::of(&parameter(&[1, 2], Vec::new(), vec![RowRun::range(1, 2)]), 2).is_err());
        assert!(FileOrder::of(&parameter(&[4, 2], Vec::new(), Vec::new()), 8).expect("none").is_none());
    }
}
