//! Weights of other tools in the arrangement in which a run keeps them: row by row, without a
//! change of codes, scales or zeros.

use std::ops::Range;

use rayon::prelude::*;

use super::packed::{CodeLayout, PackedFormat, PackedTensor};
use super::runs::{RunMeaning, RunsViewMut};
use super::schemes::{GridCodes, GridFormat, GridZeros};
use super::small_floats::ScaleDtype;

/// The rows whose codes a thread rearranges at once: an even number, so that their codes fill whole
/// bytes.
const ROWS: usize = 32;

impl PackedFormat {
    /// Returns the format in which a run keeps such a matrix. Zeros are stored if `has_zeros`;
    /// columns name their groups if `by_column`. `None` if the matrix is empty or has more groups
    /// than 16 bits can name, or if zeros are numbers in f32.
    pub fn repacked_format(&self, has_zeros: bool, by_column: bool) -> Option<GridFormat> {
        let codes = match (self.codes, self.bits) {
            (CodeLayout::E4m3, _) => GridCodes::E4m3,
            (CodeLayout::E2m1, _) => GridCodes::E2m1,
            (_, 4) => GridCodes::Int4,
            _ => GridCodes::Int8,
        };
        let PackedFormat { rows, columns, row_block, column_block, scales, groups, .. } = *self;
        let zeros = match (has_zeros, self.codes.has_float_zeros()) {
            (false, _) => GridZeros::Implied,
            (true, false) => GridZeros::Bytes,
            (true, true) => GridZeros::AsScales,
        };
        // Numbers in f32 are a run of their own type, which only scales have.
        let fits = zeros != GridZeros::AsScales || scales != ScaleDtype::F32;
        let fits = fits && rows > 0 && columns > 0 && groups <= 1 << 16;
        // Blocks may exceed the matrix, but the elements of two of them fit into 64 bits.
        let fits = fits && columns.checked_mul(row_block).is_some_and(|band| band.checked_mul(2).is_some());
        fits.then_some(GridFormat { codes, columns, row_block, column_block, scales, zeros, by_column })
    }
}

impl PackedTensor<'_> {
    /// Rearranges the matrix into the runs of `format`, which is [`PackedFormat::repacked_format`]
    /// of its own.
    ///
    /// # Panics
    /// The bytes or runs do not match the formats.
    pub fn copy_to(&self, format: &GridFormat, to: &mut RunsViewMut<'_>) {
        let PackedFormat { rows, columns, row_block, groups, .. } = self.format;
        let bits = format.codes.bits();
        let bands = to.bytes_mut(RunMeaning::Codes).par_chunks_mut(ROWS * columns * bits / 8);
        bands.enumerate().for_each(|(band, codes)| {
            let rows = band * ROWS..rows.min((band + 1) * ROWS);
            let mut values = vec![0u8; rows.len() * columns];
            self.plain_codes(rows, &mut values);
            pack_codes(&values, bits, codes);
        });
        let cells =
            (0..rows.div_ceil(row_block)).flat_map(|block| (0..groups).map(move |group| (block, group)));
        let size = self.format.scales.bytes();
        let scale = |(block, group)| {
            let at = self.format.scale_index(block * row_block, group) * size;
            &self.scales[at..at + size]
        };
        if format.scales == ScaleDtype::F32 {
            for (to, cell) in to.floats_mut(RunMeaning::Scales).iter_mut().zip(cells.clone()) {
                *to = scale(cell).try_into().map_or(f32::NAN, f32::from_le_bytes);
            }
        } else {
            let scales = to.bytes_mut(RunMeaning::ScaleBytes).chunks_exact_mut(size);
            scales.zip(cells.clone()).for_each(|(to, cell)| to.copy_from_slice(scale(cell)));
        }
        *to.offset = self.factor;
        match (format.zeros, self.zeros) {
            (GridZeros::Bytes, _) => {
                let signed = if self.format.codes == CodeLayout::I8 { 128.0 } else { 0.0 };
                for (to, (block, group)) in to.bytes_mut(RunMeaning::Zeros).iter_mut().zip(cells) {
                    *to = (self.zero(block * row_block, group) + signed) as u8;
                }
            }
            (GridZeros::AsScales, Some(zeros)) => {
                let to = to.bytes_mut(RunMeaning::Zeros);
                to.copy_from_slice(&zeros[..to.len()]);
            }
            _ => {}
        }
        if format.by_column {
            let named = to.bytes_mut(RunMeaning::ColumnGroups).chunks_exact_mut(2);
            for (to, run) in named.zip(self.runs(0..columns)) {
                to.copy_from_slice(&(run.group as u16).to_le_bytes());
            }
        }
    }

    /// Writes the codes of `rows`, one a byte; those of signed bytes are 128 higher.
    fn plain_codes(&self, rows: Range<usize>, out: &mut [u8]) {
        let columns = self.format.columns;
        match self.format.codes {
            CodeLayout::E4m3 | CodeLayout::U8 => {
                out.copy_from_slice(&self.codes[rows.start * columns..rows.end * columns])
            }
            CodeLayout::I8 => {
                let codes = &self.codes[rows.start * columns..rows.end * columns];
                out.iter_mut().zip(codes).for_each(|(to, code)| *to = code ^ 0x80);
            }
            CodeLayout::E2m1 => {
                for (line, row) in out.chunks_exact_mut(columns).zip(rows) {
                    let bytes = &self.codes[row * columns.div_ceil(2)..];
                    let code = |column: usize| bytes[column / 2] >> (column % 2 * 4) & 15;
                    line.iter_mut().enumerate().for_each(|(column, to)| *to = code(column));
                }
            }
            CodeLayout::RowWords
            | CodeLayout::ColumnWords
            | CodeLayout::InterleavedWords
            | CodeLayout::GroupHalves => {
                let mut values = vec![0f32; out.len()];
                self.decode_codes(rows, &mut values);
                out.iter_mut().zip(values).for_each(|(to, code)| *to = code as u8);
            }
        }
    }
}

/// Packs codes of 4 bits in pairs, the first into the high half; copies those of 8 bits.
pub fn pack_codes(codes: &[u8], bits: usize, to: &mut [u8]) {
    if bits == 8 {
        return to.copy_from_slice(codes);
    }
    for (to, pair) in to.iter_mut().zip(codes.chunks(2)) {
        *to = pair[0] << 4 | pair.get(1).copied().unwrap_or_default();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use half::bf16;

    use super::*;
    use crate::quant::{DequantizedElement, QuantBuffer, QuantFormat, QuantScheme as _};

    /// The rows of the matrices of these tests.
    pub(in crate::quant) const ROWS: usize = 48;

    /// Bytes without a pattern.
    fn bytes(count: usize, seed: usize) -> Vec<u8> {
        (0..count).map(|i| ((i + seed * 7919).wrapping_mul(2_654_435_761) >> 11) as u8).collect()
    }

    /// A format of `ROWS` rows in cells of this size.
    pub(in crate::quant) fn format(
        codes: CodeLayout,
        bits: usize,
        columns: usize,
        cell: [usize; 2],
        scales: ScaleDtype,
    ) -> PackedFormat {
        let [row_block, column_block] = cell;
        let groups = columns.div_ceil(column_block);
        let zero_offset = u8::from(codes == CodeLayout::ColumnWords);
        PackedFormat {
            codes,
            bits,
            rows: ROWS,
            columns,
            row_block,
            column_block,
            groups,
            scales,
            zero_offset,
        }
    }

    /// Compares values of parts of a kept matrix with those of the packed one, bit for bit.
    fn parts<T: DequantizedElement + Into<f32>>(repacked: &QuantBuffer, wanted: &[f32], what: &str) {
        let n = wanted.len();
        for (start, len) in [(0, n), (1, n - 1), (n / 2 - 3, 7), (n - 1, 1), (0, 0), (n / 3, n / 2)] {
            let mut values = vec![T::nearest(1.0); len];
            repacked.view().dequantize(start, &mut values);
            for (i, value) in values.into_iter().enumerate() {
                let (ours, wanted): (f32, f32) = (value.into(), T::nearest(wanted[start + i]).into());
                let same = ours.to_bits() == wanted.to_bits() || ours.is_nan() && wanted.is_nan();
                assert!(same, "{what}: value {} is {ours}, not {wanted}", start + i);
            }
        }
    }

    #[test]
    fn every_layout_keeps_its_values() {
        use CodeLayout::{ColumnWords, E2m1, E4m3, GroupHalves, I8, InterleavedWords, RowWords, U8};
        use ScaleDtype::{BF16, E4m3Over, E4m3Times, E8m0, F16, F32};
        let cases = [
            (format(RowWords, 4, 72, [1, 32], F16), false, false),
            (format(RowWords, 4, 71, [1, 32], BF16), true, false),
            (format(RowWords, 8, 70, [1, 70], F32), true, false),
            (format(RowWords, 4, 72, [1, 24], F32), false, true),
            (format(I8, 8, 33, [1, 33], F32), false, false),
            (format(I8, 8, 64, [1, 16], BF16), true, false),
            (format(ColumnWords, 4, 64, [1, 32], F16), true, false),
            (format(ColumnWords, 4, 64, [1, 16], F16), true, true),
            (format(ColumnWords, 8, 64, [1, 64], F16), true, true),
            (format(InterleavedWords, 4, 65, [1, 16], F16), true, false),
            (format(E4m3, 8, 90, [20, 32], F32), false, false),
            (format(E4m3, 8, 90, [ROWS, 90], BF16), false, false),
            (format(E4m3, 8, 91, [1, 91], BF16), false, false),
            (format(E2m1, 4, 96, [1, 32], E8m0), false, false),
            (format(U8, 8, 96, [1, 32], BF16), true, false),
            (format(GroupHalves, 4, 96, [1, 32], F16), true, false),
            (format(E2m1, 4, 96, [1, 16], E4m3Times), false, false),
            (format(E2m1, 4, 96, [1, 16], E4m3Over), false, false),
        ];
        for (at, (format, has_zeros, by_column)) in cases.into_iter().enumerate() {
            let PackedFormat { rows, columns, groups, scales, row_block, .. } = format;
            let codes = bytes((columns + 8) * rows, at);
            let scales = bytes(rows.div_ceil(row_block) * groups * scales.bytes(), at + 100);
            let zeros = bytes(2 * rows * groups + 4 * groups, at + 200);
            // A group beyond the last counts as the last.
            let named: Vec<u8> = (0..columns as u32).flat_map(|i| (i * 7 % 5).to_le_bytes()).collect();
            let (zeros, named) = (has_zeros.then_some(&zeros[..]), by_column.then_some(&named[..]));
            let packed =
                PackedTensor { format, codes: &codes, scales: &scales, zeros, groups: named, factor: 3e-3 };
            let mut wanted = vec![0f32; rows * columns];
            packed.decode(0..rows, 0..columns, &mut wanted);
            let grid = format.repacked_format(has_zeros, by_column).expect("a format");
            let mut matrix = QuantBuffer::zeros(QuantFormat::Grid(grid), rows * columns);
            packed.copy_to(&grid, &mut matrix.view_mut().runs);
            parts::<f32>(&matrix, &wanted, &grid.describe());
            parts::<bf16>(&matrix, &wanted, &grid.describe());
        }
    }

    #[test]
    fn what_16_bits_cannot_name_is_not_kept() {
        let few = format(CodeLayout::ColumnWords, 4, 1 << 16, [1, 1], ScaleDtype::F16);
        assert!(few.repacked_format(true, true).is_some());
        let many = format(CodeLayout::ColumnWords, 4, (1 << 16) + 8, [1, 1], ScaleDtype::F16);
        assert_eq!(many.repacked_format(true, true), None);
        assert_eq!(PackedFormat { rows: 0, ..few }.repacked_format(true, true), None);
    }
}
