//! Weights in the packed formats of other tools, decoded to f32.
//!
//! A value is `scale * (code - zero)`, each operation in f32. A scale, and the zero if the format
//! stores zeros, belongs to a group of columns of a row or to a block of the matrix. Everything is
//! little-endian and unaligned, as a memory map of a file gives it.

use std::ops::Range;

use super::e4m3::E4M3;
use super::small_floats::{E2M1, ScaleDtype};

/// Position within a word of each of eight rows of AWQ.
pub(super) const AWQ_POSITIONS: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// The arrangement of the codes of a matrix `[rows, columns]`. Words have 32 bits, and the first
/// code of a word is in its lowest bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodeLayout {
    /// Bytes of the type e4m3 without infinities, row by row.
    E4m3,
    /// Halves of bytes of the type e2m1, the low half first, row by row.
    E2m1,
    /// Signed bytes, row by row. Stored zeros are signed bytes `[rows, groups]`.
    I8,
    /// Words of consecutive columns, row by row. Stored zeros are words of consecutive rows,
    /// `[words, groups]`; otherwise the zero is half the number of codes.
    RowWords,
    /// Words of consecutive columns, `[words, rows]` (GPTQ). Zeros are words of consecutive rows,
    /// `[groups, words]`, and scales `[groups, rows]`.
    ColumnWords,
    /// Words of eight rows of a column in the order 0, 2, 4, 6, 1, 3, 5, 7, `[columns, words]`
    /// (AWQ). Zeros are `[groups, words]` in the same order, and scales `[groups, rows]`.
    InterleavedWords,
    /// Unsigned bytes, row by row (HQQ). Zeros are stored as numbers of the type of the scales.
    U8,
    /// Halves of bytes (HQQ). The high halves hold the first half of all groups, a group after the
    /// other, and the low halves the second. Zeros are stored as those of `U8`.
    GroupHalves,
}

impl CodeLayout {
    /// Returns whether zeros are numbers of the type of the scales.
    pub(super) fn has_float_zeros(self) -> bool {
        matches!(self, CodeLayout::U8 | CodeLayout::GroupHalves)
    }
}

/// The format of a packed matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedFormat {
    /// The arrangement of the codes.
    pub codes: CodeLayout,
    /// Bits of a code: 4 or 8.
    pub bits: usize,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub columns: usize,
    /// Rows that share a scale; 1 if words hold the codes.
    pub row_block: usize,
    /// Consecutive columns that share a scale, unless each column names its group.
    pub column_block: usize,
    /// Number of groups of columns.
    pub groups: usize,
    /// The type of scales.
    pub scales: ScaleDtype,
    /// Number to add to each stored zero by one sum over its word, carries included: 1 in version 1
    /// of GPTQ.
    pub zero_offset: u8,
}

/// A packed matrix: its format and bytes.
#[derive(Debug, Clone, Copy)]
pub struct PackedTensor<'a> {
    /// The arrangement of its bytes.
    pub format: PackedFormat,
    /// The codes of all values.
    pub codes: &'a [u8],
    /// The scales: `[row blocks, groups]` unless the layout of the codes has another order.
    pub scales: &'a [u8],
    /// The zeros, if they are stored.
    pub zeros: Option<&'a [u8]>,
    /// The group of each column in 32 bits, if columns name their groups.
    pub groups: Option<&'a [u8]>,
    /// The factor of all scales, for a type of scales that has one.
    pub factor: f32,
}

/// Columns that are decoded before they are transposed: a line of the cache.
const COLUMNS: usize = 16;

/// Rows and columns to decode.
struct Area {
    rows: Range<usize>,
    columns: Range<usize>,
}

/// Scales and zeros of an area.
struct AreaScales {
    /// Pairs of scale and zero. Those of a row are adjacent if the codes are stored row by row,
    /// otherwise those of a group.
    pairs: Vec<(f32, f32)>,
    /// The length of a row, or of a group, in `pairs`.
    stride: usize,
    runs: Vec<GroupRun>,
}

/// Consecutive columns of one group.
pub(super) struct GroupRun {
    pub(super) columns: Range<usize>,
    /// The group, counted from the first in [`AreaScales::pairs`].
    pub(super) group: usize,
}

impl PackedFormat {
    /// Returns whether the codes of a row are adjacent.
    fn is_by_rows(&self) -> bool {
        !matches!(self.codes, CodeLayout::ColumnWords | CodeLayout::InterleavedWords)
    }

    fn codes_per_word(&self) -> usize {
        32 / self.bits
    }

    /// Returns the index of a scale in the sequence of all.
    pub(super) fn scale_index(&self, row: usize, group: usize) -> usize {
        let PackedFormat { rows, groups, row_block, .. } = *self;
        if self.is_by_rows() { row / row_block * groups + group } else { group * rows + row }
    }

    /// Returns the index of a zero in the sequence of all.
    fn zero_index(&self, row: usize, group: usize) -> usize {
        let n = self.codes_per_word();
        match self.codes {
            CodeLayout::E4m3
            | CodeLayout::E2m1
            | CodeLayout::I8
            | CodeLayout::U8
            | CodeLayout::GroupHalves => row * self.groups + group,
            CodeLayout::RowWords => (row / n * self.groups + group) * n + row % n,
            CodeLayout::ColumnWords => group * self.rows + row,
            CodeLayout::InterleavedWords => group * self.rows + row / 8 * 8 + AWQ_POSITIONS[row % 8],
        }
    }
}

impl PackedTensor<'_> {
    /// Decodes `rows` and `columns` into `out`, row by row.
    ///
    /// # Panics
    /// The bytes do not match the format, or `out` has another length.
    pub fn decode(&self, rows: Range<usize>, columns: Range<usize>, out: &mut [f32]) {
        assert_eq!(out.len(), rows.len() * columns.len(), "one value for each code");
        if out.is_empty() {
            return;
        }
        let area = Area { rows, columns };
        let scales = self.scales_of(&area);
        self.decode_area(area, scales, out);
    }

    /// Writes the codes of `rows` as numbers, row by row.
    pub(super) fn decode_codes(&self, rows: Range<usize>, out: &mut [f32]) {
        let (stride, columns) = (if self.format.is_by_rows() { 1 } else { rows.len() }, self.format.columns);
        let runs = vec![GroupRun { columns: 0..columns, group: 0 }];
        let scales = AreaScales { pairs: vec![(1.0, 0.0); rows.len()], stride, runs };
        self.decode_area(Area { rows, columns: 0..columns }, scales, out);
    }

    fn decode_area(&self, area: Area, scales: AreaScales, out: &mut [f32]) {
        let PackedFormat { rows, columns, bits, .. } = self.format;
        let (codes, n) = (self.codes, self.format.codes_per_word());
        let mask = u8::MAX >> (8 - bits);
        // Codes of 4 and 8 bits never cross a byte.
        match self.format.codes {
            CodeLayout::E4m3 => by_rows(&area, &scales, out, |row, range| {
                let start = row * columns;
                codes[start + range.start..start + range.end].iter().map(|code| E4M3[usize::from(*code)])
            }),
            CodeLayout::E2m1 => by_rows(&area, &scales, out, |row, range| {
                let line = &codes[row * columns.div_ceil(2)..];
                range.map(move |column| E2M1[usize::from(line[column / 2] >> (column % 2 * 4) & 15)])
            }),
            CodeLayout::I8 => by_rows(&area, &scales, out, |row, range| {
                let start = row * columns;
                codes[start + range.start..start + range.end].iter().map(|code| f32::from(code.cast_signed()))
            }),
            CodeLayout::U8 => by_rows(&area, &scales, out, |row, range| {
                let start = row * columns;
                codes[start + range.start..start + range.end].iter().map(|code| f32::from(*code))
            }),
            CodeLayout::GroupHalves => by_rows(&area, &scales, out, |row, range| {
                let half = self.format.rows * columns / 2;
                range.map(move |column| {
                    let at = row * columns + column;
                    let high = u8::from(at < half);
                    f32::from(codes[at % half] >> (4 * high) & 15)
                })
            }),
            CodeLayout::RowWords => by_rows(&area, &scales, out, |row, range| {
                let line = &codes[row * columns.div_ceil(n) * 4..];
                // 1 if a byte holds two codes.
                let two = usize::from(bits == 4);
                range.map(move |column| f32::from(line[column >> two] >> ((column & two) * 4) & mask))
            }),
            CodeLayout::ColumnWords => by_columns(&area, &scales, out, |column, range| {
                let (start, shift) = (column / n * rows, column % n * bits);
                let (words, _) = codes[4 * (start + range.start)..4 * (start + range.end)].as_chunks::<4>();
                let code = move |word: &[u8; 4]| u32::from_le_bytes(*word) >> shift & u32::from(mask);
                words.iter().map(move |word| code(word) as f32)
            }),
            CodeLayout::InterleavedWords => by_columns(&area, &scales, out, |column, range| {
                let (words, _) = codes[column * rows / 2..(column + 1) * rows / 2].as_chunks::<4>();
                range.map(move |row| {
                    let word = u32::from_le_bytes(words[row / 8]);
                    (word >> (4 * AWQ_POSITIONS[row % 8]) & 15) as f32
                })
            }),
        }
    }

    fn scales_of(&self, area: &Area) -> AreaScales {
        let runs = self.runs(area.columns.clone());
        let first = runs.iter().map(|run| run.group).min().unwrap_or(0);
        let count = runs.iter().map(|run| run.group).max().map_or(0, |last| last + 1 - first);
        let runs = runs.into_iter().map(|run| GroupRun { group: run.group - first, ..run }).collect();
        let pair = |row: usize, group: usize| (self.scale(row, group), self.zero(row, group));
        let groups = first..first + count;
        let (rows, many) = (area.rows.clone(), area.rows.len());
        if self.format.is_by_rows() {
            let pairs = rows.flat_map(|row| groups.clone().map(move |group| pair(row, group))).collect();
            AreaScales { pairs, stride: count, runs }
        } else {
            let pairs = groups.flat_map(|group| rows.clone().map(move |row| pair(row, group))).collect();
            AreaScales { pairs, stride: many, runs }
        }
    }

    /// Cuts columns into those of one group.
    pub(super) fn runs(&self, columns: Range<usize>) -> Vec<GroupRun> {
        let PackedFormat { column_block, groups, .. } = self.format;
        let Some(stored) = self.groups else {
            let (first, last) = (columns.start / column_block, columns.end.div_ceil(column_block));
            let run = |group: usize| GroupRun {
                columns: columns.start.max(group * column_block)..columns.end.min((group + 1) * column_block),
                group,
            };
            return (first..last).map(run).collect();
        };
        // Readers refuse other groups; a changed file must not end the process.
        let group = |column: usize| (word(stored, column) as usize).min(groups - 1);
        columns.map(|column| GroupRun { columns: column..column + 1, group: group(column) }).collect()
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        self.scale_of(self.scale_bits(row, group))
    }

    /// Returns the stored bits of a scale.
    pub(super) fn scale_bits(&self, row: usize, group: usize) -> u32 {
        self.format.scales.bits(self.scales, self.format.scale_index(row, group))
    }

    /// Returns the scale with these bits.
    pub(super) fn scale_of(&self, bits: u32) -> f32 {
        self.format.scales.with_factor(self.format.scales.value(bits), self.factor)
    }

    pub(super) fn zero(&self, row: usize, group: usize) -> f32 {
        let PackedFormat { codes, bits, zero_offset, .. } = self.format;
        let Some(zeros) = self.zeros else {
            return if codes == CodeLayout::RowWords { (1 << (bits - 1)) as f32 } else { 0.0 };
        };
        let at = self.format.zero_index(row, group);
        if codes.has_float_zeros() {
            return self.format.scales.read(zeros, at);
        }
        if codes == CodeLayout::I8 {
            return f32::from(zeros[at].cast_signed());
        }
        let (n, mask) = (self.format.codes_per_word(), u32::MAX >> (32 - bits));
        // `u32::MAX / mask` has 1 in each field.
        let word = word(zeros, at / n).wrapping_add(u32::from(zero_offset) * (u32::MAX / mask));
        (word >> (at % n * bits) & mask) as f32
    }
}

/// Decodes codes that are stored row by row; `codes` returns those of a row in a range of columns.
fn by_rows<I: Iterator<Item = f32>>(
    area: &Area,
    scales: &AreaScales,
    out: &mut [f32],
    codes: impl Fn(usize, Range<usize>) -> I,
) {
    let lines = out.chunks_exact_mut(area.columns.len()).zip(area.rows.clone());
    for ((line, row), pairs) in lines.zip(scales.pairs.chunks_exact(scales.stride)) {
        let mut rest = line;
        for GroupRun { columns, group } in &scales.runs {
            let (values, after) = rest.split_at_mut(columns.len());
            let (scale, zero) = pairs[*group];
            for (value, code) in values.iter_mut().zip(codes(row, columns.clone())) {
                *value = scale * (code - zero);
            }
            rest = after;
        }
    }
}

/// Decodes codes of which neighbouring rows are close to each other; `codes` returns those of a
/// column in a range of rows.
fn by_columns<I: Iterator<Item = f32>>(
    area: &Area,
    scales: &AreaScales,
    out: &mut [f32],
    codes: impl Fn(usize, Range<usize>) -> I,
) {
    let (many, width) = (scales.stride, area.columns.len());
    // Writing each value to its row would use few sets of the cache: rows are powers of two apart.
    let mut block = vec![0f32; COLUMNS * many];
    for GroupRun { columns, group } in &scales.runs {
        let pairs = &scales.pairs[group * many..(group + 1) * many];
        for column in columns.clone() {
            let (at, slot) = (column - area.columns.start, (column - area.columns.start) % COLUMNS);
            let values = block[slot * many..(slot + 1) * many].iter_mut();
            for ((value, code), (scale, zero)) in values.zip(codes(column, area.rows.clone())).zip(pairs) {
                *value = scale * (code - zero);
            }
            if slot + 1 == COLUMNS || at + 1 == width {
                for (row, line) in out.chunks_exact_mut(width).enumerate() {
                    let values = block[row..].iter().step_by(many);
                    line[at - slot..=at].iter_mut().zip(values).for_each(|(to, value)| *to = *value);
                }
            }
        }
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let bytes = &bytes[4 * at..4 * at + 4];
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    /// A format of 16 rows and 24 columns, with a scale for every eight columns of a row.
    fn format(codes: CodeLayout, bits: usize) -> PackedFormat {
        PackedFormat {
            codes,
            bits,
            rows: 16,
            columns: 24,
            row_block: 1,
            column_block: 8,
            groups: 3,
            scales: ScaleDtype::F32,
            zero_offset: 0,
        }
    }

    /// Packs `values` of `bits` each into words.
    fn words(values: &[u32], bits: usize) -> Vec<u8> {
        let word = |values: &[u32]| values.iter().rev().fold(0u32, |word, value| word << bits | value);
        values.chunks(32 / bits).flat_map(|values| word(values).to_le_bytes()).collect()
    }

    fn code(row: usize, column: usize, bits: usize) -> u32 {
        ((row * 31 + column * 7 + row * column) as u32) & ((1 << bits) - 1)
    }

    fn zero(row: usize, group: usize, bits: usize) -> u32 {
        ((row * 5 + group * 3 + 1) as u32) & ((1 << bits) - 1)
    }

    fn scale(row: usize, group: usize) -> f32 {
        (row * 3 + group + 1) as f32 / 64.0
    }

    /// Lists `lines` times `across` values: those of a line are adjacent.
    fn listed<T>(lines: usize, across: usize, value: impl Fn(usize, usize) -> T) -> Vec<T> {
        (0..lines).flat_map(|line| (0..across).map(move |at| (line, at))).map(|(a, b)| value(a, b)).collect()
    }

    /// Codes, scales and zeros of a layout, from the definitions of the formats.
    fn stored(layout: CodeLayout, bits: usize) -> [Vec<u8>; 3] {
        let n = 32 / bits;
        let order = [0, 2, 4, 6, 1, 3, 5, 7];
        let by_rows = listed(16, 3, scale);
        let by_groups = listed(3, 16, |group, row| scale(row, group));
        let (codes, scales, zeros) = match layout {
            CodeLayout::RowWords => (
                listed(16, 24, |row, column| code(row, column, bits)),
                by_rows,
                listed(16 / n, 3 * n, |block, at| zero(block * n + at % n, at / n, bits)),
            ),
            CodeLayout::ColumnWords => (
                listed(24 / n, 16 * n, |block, at| code(at / n, block * n + at % n, bits)),
                by_groups,
                listed(3, 16, |group, row| zero(row, group, bits)),
            ),
            CodeLayout::InterleavedWords => (
                listed(24, 16, |column, at| code(at / 8 * 8 + order[at % 8], column, bits)),
                by_groups,
                listed(3, 16, |group, at| zero(at / 8 * 8 + order[at % 8], group, bits)),
            ),
            _ => unreachable!("not of words"),
        };
        let scales = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        [words(&codes, bits), scales, words(&zeros, bits)]
    }

    /// Subtracts `offset` from every zero as GPTQModel writes version 1: from words, with borrows.
    fn less(offset: u8, bits: usize, zeros: &[u8]) -> Vec<u8> {
        let ones: u32 = if bits == 4 { 0x1111_1111 } else { 0x0101_0101 };
        let words = (0..zeros.len() / 4).map(|at| word(zeros, at));
        words.flat_map(|word| word.wrapping_sub(ones * u32::from(offset)).to_le_bytes()).collect()
    }

    #[test]
    fn a_zero_of_zero_borrows_from_its_neighbours() {
        let zeros = less(1, 4, &words(&[0, 8, 8, 8, 8, 8, 8, 8], 4));
        assert_eq!(zeros, 0x7777_776f_u32.to_le_bytes());
        let format = PackedFormat {
            rows: 8,
            columns: 8,
            groups: 1,
            zero_offset: 1,
            ..format(CodeLayout::ColumnWords, 4)
        };
        let scales: Vec<u8> = [1f32; 8].iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let tensor = PackedTensor {
            format,
            codes: &[0; 32],
            scales: &scales,
            zeros: Some(&zeros),
            groups: None,
            factor: 1.0,
        };
        let mut out = [0.0; 8];
        tensor.decode(0..8, 0..1, &mut out);
        assert_eq!(out, [0.0, -8.0, -8.0, -8.0, -8.0, -8.0, -8.0, -8.0]);
    }

    #[test]
    fn every_layout_of_words_gives_its_values() {
        let layouts = [
            (CodeLayout::RowWords, 4),
            (CodeLayout::RowWords, 8),
            (CodeLayout::ColumnWords, 4),
            (CodeLayout::ColumnWords, 8),
            (CodeLayout::InterleavedWords, 4),
        ];
        for (layout, bits) in layouts {
            let [codes, scales, zeros] = stored(layout, bits);
            for zero_offset in [0, 1] {
                let format = PackedFormat { zero_offset, ..format(layout, bits) };
                let zeros = less(zero_offset, bits, &zeros);
                let tensor = PackedTensor {
                    format,
                    codes: &codes,
                    scales: &scales,
                    zeros: Some(&zeros),
                    groups: None,
                    factor: 1.0,
                };
                let wanted = |row: usize, column: usize| {
                    let zero = zero(row, column / 8, bits);
                    scale(row, column / 8) * (code(row, column, bits) as f32 - zero as f32)
                };
                for (rows, columns) in [(0..16, 0..24), (3..4, 5..23), (7..15, 8..9), (4..4, 0..24)] {
                    let mut out = vec![0.0; rows.len() * columns.len()];
                    tensor.decode(rows.clone(), columns.clone(), &mut out);
                    let wanted =
                        listed(rows.len(), columns.len(), |r, c| wanted(rows.start + r, columns.start + c));
                    assert_eq!(out, wanted, "{layout:?} {bits} {rows:?} {columns:?}");
                }
            }
        }
    }

    #[test]
    fn columns_name_their_groups() {
        let [codes, scales, zeros] = stored(CodeLayout::ColumnWords, 4);
        let zeros = less(1, 4, &zeros);
        let group = |column: usize| column * 5 % 3;
        let groups: Vec<u8> = (0..24).flat_map(|column| (group(column) as u32).to_le_bytes()).collect();
        let format = PackedFormat { zero_offset: 1, ..format(CodeLayout::ColumnWords, 4) };
        let tensor = PackedTensor {
            format,
            codes: &codes,
            scales: &scales,
            zeros: Some(&zeros),
            groups: Some(&groups),
            factor: 1.0,
        };
        let mut out = vec![0.0; 2 * 20];
        tensor.decode(5..7, 1..21, &mut out);
        let wanted = listed(2, 20, |row, column| {
            let (row, column) = (row + 5, column + 1);
            let zero = zero(row, group(column), 4);
            scale(row, group(column)) * (code(row, column, 4) as f32 - zero as f32)
        });
        assert_eq!(out, wanted);
    }

    #[test]
    fn symmetric_words_have_the_middle_as_zero() {
        let [codes, scales, _] = stored(CodeLayout::RowWords, 4);
        let tensor = PackedTensor {
            format: format(CodeLayout::RowWords, 4),
            codes: &codes,
            scales: &scales,
            zeros: None,
            groups: None,
            factor: 1.0,
        };
        let mut out = [0.0; 24];
        tensor.decode(2..3, 0..24, &mut out);
        let wanted = listed(1, 24, |_, column| scale(2, column / 8) * (code(2, column, 4) as f32 - 8.0));
        assert_eq!(out[..], wanted);
    }

    #[test]
    fn blocks_of_bytes_share_a_scale() {
        // Blocks of 4 rows and 5 columns over 6 rows and 7 columns: the last ones are cut.
        let format = PackedFormat {
            rows: 6,
            columns: 7,
            row_block: 4,
            column_block: 5,
            groups: 2,
            scales: ScaleDtype::BF16,
            ..format(CodeLayout::E4m3, 8)
        };
        let codes: Vec<u8> = (0..42).map(|i| i * 5).collect();
        let scales: Vec<u8> =
            [1.5, -2.0, 0.25, 8.0].iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
        let tensor =
            PackedTensor { format, codes: &codes, scales: &scales, zeros: None, groups: None, factor: 1.0 };
        let mut out = [0.0; 42];
        tensor.decode(0..6, 0..7, &mut out);
        let wanted = listed(6, 7, |row, column| {
            [1.5, -2.0, 0.25, 8.0][row / 4 * 2 + column / 5] * E4M3[5 * (row * 7 + column)]
        });
        assert!(out.iter().zip(&wanted).all(|(a, b)| a == b || a.is_nan() && b.is_nan()), "{out:?}");
        let zeros = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0xff];
        let format = PackedFormat { codes: CodeLayout::I8, row_block: 1, ..format };
        let scales: Vec<u8> = (1..13).flat_map(|v| bf16::from_f32(v as f32).to_le_bytes()).collect();
        let tensor = PackedTensor {
            format,
            codes: &codes,
            scales: &scales,
            zeros: Some(&zeros),
            groups: None,
            factor: 1.0,
        };
        let mut last = [0.0];
        tensor.decode(5..6, 6..7, &mut last);
        assert_eq!(last, [12.0 * (f32::from(205u8.cast_signed()) + 1.0)]);
    }

    #[test]
    fn numbers_of_eight_bits_are_those_of_the_standard() {
        let of = |code: usize| E4M3[code];
        // Zero, the smallest, the largest subnormal, the smallest normal, one, the largest.
        let wanted = [(0, 0.0), (1, 1.0 / 512.0), (7, 7.0 / 512.0), (8, 1.0 / 64.0), (0x38, 1.0)];
        for (code, value) in wanted.into_iter().chain([(0x7e, 448.0), (0x39, 1.125)]) {
            assert_eq!((of(code), of(code + 128)), (value, -value), "{code}");
        }
        assert!(of(0x7f).is_nan() && of(0xff).is_nan() && of(0x80).is_sign_negative());
        // Neighbours grow: no code is decoded twice.
        assert!((0..126).all(|code| of(code) < of(code + 1)));
    }
}
