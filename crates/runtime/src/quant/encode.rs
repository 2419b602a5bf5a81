//! Quantizes new values of a packed weight to its own format: the same layout, zeros, groups of
//! columns and factor.
//!
//! A cell of the matrix keeps its scale unless a scale of its new extremes has a smaller squared
//! error. So cells that did not change keep their codes, and the error is never larger than with
//! either scale alone.

use std::ops::Range;

use rayon::prelude::*;

use super::e4m3::{E4M3, MOST_E4M3, to_e4m3};
use super::mxfp4::mx_exponent;
use super::packed::{AWQ_POSITIONS, CodeLayout, PackedFormat, PackedTensor};
use super::small_floats::{E2M1, ScaleDtype, to_e2m1};

/// The new bytes of a packed matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedTensor {
    /// The codes of all values, as [`PackedTensor::codes`].
    pub codes: Vec<u8>,
    /// The scales, as [`PackedTensor::scales`].
    pub scales: Vec<u8>,
}

/// Values of a cell from which on all threads share its rows.
const SHARED: usize = 1 << 16;
/// Bytes of codes that a thread packs at once.
const PACKED: usize = 1 << 14;

/// The values that share a scale, among those of their rows.
struct Cell<'a> {
    values: &'a [f32],
    /// The length of a row.
    width: usize,
    columns: &'a [Range<usize>],
    zero: f32,
}

impl Cell<'_> {
    /// Returns the values of the cell in a row.
    fn of_row<'r>(&'r self, row: &'r [f32]) -> impl Iterator<Item = f32> {
        self.columns.iter().flat_map(move |run| row[run.clone()].iter().copied())
    }

    /// Returns the results of `of_row` for all rows, merged in order.
    fn by_rows<T: Send>(
        &self,
        start: T,
        of_row: impl Fn(&[f32]) -> T + Sync + Send,
        merge: impl Fn(T, T) -> T,
    ) -> T {
        if self.values.len() < SHARED {
            return self.values.chunks(self.width.max(1)).map(of_row).fold(start, merge);
        }
        let rows: Vec<T> = self.values.par_chunks(self.width.max(1)).map(of_row).collect();
        rows.into_iter().fold(start, merge)
    }
}

impl PackedFormat {
    /// Returns the smallest and the largest number of a code.
    fn extremes(&self) -> [f32; 2] {
        match self.codes {
            CodeLayout::E4m3 => [-MOST_E4M3, MOST_E4M3],
            CodeLayout::E2m1 => [-6.0, 6.0],
            CodeLayout::I8 => [-128.0, 127.0],
            _ => [0.0, ((1u32 << self.bits) - 1) as f32],
        }
    }

    /// Returns the code of the nearest number, and that number.
    fn nearest(&self, x: f32) -> (u8, f32) {
        match self.codes {
            CodeLayout::E4m3 => {
                let code = to_e4m3(x);
                (code, E4M3[usize::from(code)])
            }
            CodeLayout::E2m1 => {
                let code = to_e2m1(x);
                (code, E2M1[usize::from(code)])
            }
            _ => {
                let [low, high] = self.extremes();
                let number = x.round_ties_even().clamp(low, high);
                (number as i32 as u8, number)
            }
        }
    }

    /// Returns the position, row by row, of the value whose code is the one number `part` of a
    /// byte, from the lowest bits on; `None` if no value has it.
    fn value_at(&self, byte: usize, part: usize) -> Option<usize> {
        let PackedFormat { bits, rows, columns, .. } = *self;
        let (in_word, word) = (32 / bits, byte / 4);
        let of_word = byte % 4 * (8 / bits) + part;
        let [row, column] = match self.codes {
            CodeLayout::E4m3 | CodeLayout::I8 | CodeLayout::U8 => [byte / columns, byte % columns],
            CodeLayout::E2m1 => {
                let width = columns.div_ceil(2);
                [byte / width, byte % width * 2 + part]
            }
            CodeLayout::GroupHalves => {
                let half = rows * columns / 2;
                let at = if part == 0 { byte + half } else { byte };
                [if byte < half { at / columns } else { rows }, at % columns]
            }
            CodeLayout::RowWords => {
                let width = columns.div_ceil(in_word);
                [word / width, word % width * in_word + of_word]
            }
            CodeLayout::ColumnWords => [word % rows, word / rows * in_word + of_word],
            CodeLayout::InterleavedWords => {
                let height = rows / in_word;
                let row = AWQ_POSITIONS.iter().position(|position| *position == of_word)?;
                [word % height * in_word + row, word / height]
            }
        };
        (row < rows && column < columns).then_some(row * columns + column)
    }
}

impl PackedTensor<'_> {
    /// Quantizes finite values, `[rows, columns]` row by row, to the format of this matrix.
    ///
    /// # Panics
    /// `values` has another length, or the bytes of this matrix do not match its format.
    pub fn encode(&self, values: &[f32]) -> EncodedTensor {
        let PackedFormat { rows, columns, row_block, groups, scales, bits, .. } = self.format;
        assert_eq!(values.len(), rows * columns, "one value for each code");
        let mut of_group = vec![Vec::new(); groups];
        for run in self.runs(0..columns) {
            of_group[run.group].push(run.columns);
        }
        let band = (row_block * columns).max(1);
        let mut codes = vec![0u8; values.len()];
        let bands = values.par_chunks(band).zip(codes.par_chunks_mut(band)).enumerate();
        let cells: Vec<Vec<u32>> = bands
            .map(|(block, (values, codes))| {
                let row = block * row_block;
                let cells = of_group.iter().enumerate().map(|(group, runs)| {
                    let cell = Cell { values, width: columns, columns: runs, zero: self.zero(row, group) };
                    self.encode_cell(&cell, self.scale_bits(row, group), codes)
                });
                cells.collect()
            })
            .collect();
        let mut encoded = EncodedTensor { codes: self.codes.to_vec(), scales: self.scales.to_vec() };
        let mask = u8::MAX >> (8 - bits);
        encoded.codes.par_chunks_mut(PACKED).enumerate().for_each(|(task, bytes)| {
            for (at, byte) in (task * PACKED..).zip(bytes) {
                for part in 0..8 / bits {
                    let Some(value) = self.format.value_at(at, part) else { continue };
                    let shift = part * bits;
                    *byte = *byte & !(mask << shift) | (codes[value] & mask) << shift;
                }
            }
        });
        for (block, groups) in cells.into_iter().enumerate() {
            for (group, scale) in groups.into_iter().enumerate() {
                let at = self.format.scale_index(block * row_block, group) * scales.bytes();
                let bytes = &scale.to_le_bytes()[..scales.bytes()];
                encoded.scales[at..at + scales.bytes()].copy_from_slice(bytes);
            }
        }
        encoded
    }

    /// Writes the codes of a cell and returns the bits of its scale: of `stored`, or of a new one.
    fn encode_cell(&self, cell: &Cell<'_>, stored: u32, codes: &mut [u8]) -> u32 {
        let (old, bits) = (self.scale_of(stored), self.new_scale(cell, stored));
        let new = self.scale_of(bits);
        let errors = [old, new].map(|scale| self.error(cell, scale));
        // A stored scale that is no number has no error.
        let keeps = !(errors[1] < errors[0] || errors[0].is_nan());
        let scale = if keeps { old } else { new };
        let width = cell.width.max(1);
        let quantize = |(codes, values): (&mut [u8], &[f32])| {
            for at in cell.columns.iter().flat_map(Range::clone) {
                codes[at] = self.quantized(cell, scale, values[at]).0;
            }
        };
        if codes.len() < SHARED {
            codes.chunks_mut(width).zip(cell.values.chunks(width)).for_each(quantize);
        } else {
            codes.par_chunks_mut(width).zip(cell.values.par_chunks(width)).for_each(quantize);
        }
        if keeps { stored } else { bits }
    }

    /// Returns the bits of the smallest scale with which every value has a code; those of `stored`
    /// if all values are zero.
    fn new_scale(&self, cell: &Cell<'_>, stored: u32) -> u32 {
        let wider = |[low, high]: [f32; 2], [least, most]: [f32; 2]| [low.min(least), high.max(most)];
        let of_row = |row: &[f32]| cell.of_row(row).fold([0f32; 2], |all, value| wider(all, [value; 2]));
        let [low, high] = cell.by_rows([0f32; 2], of_row, wider);
        if low == 0.0 && high == 0.0 {
            return stored;
        }
        let PackedFormat { scales, .. } = self.format;
        if scales == ScaleDtype::E8m0 {
            return mx_exponent(high.max(-low).to_bits()).into();
        }
        let [least, most] = self.format.extremes().map(|number| number - cell.zero);
        let side = |value: f32, number: f32| if number == 0.0 { 0.0 } else { value / number };
        let scale = side(low, least).max(side(high, most));
        // Scales that are powers of two stay such.
        let is_power = scales == ScaleDtype::F32 && stored.trailing_zeros() >= 23 && stored != 0;
        scales.nearest(if is_power { power_from(scale) } else { scale }, self.factor)
    }

    /// Returns the sum of squared errors of a cell, in f64.
    fn error(&self, cell: &Cell<'_>, scale: f32) -> f64 {
        let error = |value| (f64::from(value) - f64::from(self.quantized(cell, scale, value).1)).powi(2);
        cell.by_rows(0.0, |row| cell.of_row(row).map(error).sum(), |all, of_row: f64| all + of_row)
    }

    /// Returns the code of a value, and the value that it stands for.
    fn quantized(&self, cell: &Cell<'_>, scale: f32, value: f32) -> (u8, f32) {
        let x = if scale == 0.0 { 0.0 } else { value / scale };
        // A sum with 0 would lose the sign of -0.
        let x = if cell.zero == 0.0 { x } else { x + cell.zero };
        let (code, number) = self.format.nearest(x);
        (code, scale * (number - cell.zero))
    }
}

/// Returns the smallest power of two from `x` on.
fn power_from(x: f32) -> f32 {
    f32::from_bits((x.to_bits() + 0x7f_ffff) & !0x7f_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::repack::tests::{ROWS, format};

    /// A matrix in some format, with bytes without a pattern.
    struct Matrix {
        format: PackedFormat,
        codes: Vec<u8>,
        scales: Vec<u8>,
        zeros: Option<Vec<u8>>,
        groups: Option<Vec<u8>>,
    }

    impl Matrix {
        fn new(codes: CodeLayout, columns: usize, cell: [usize; 2], scales: ScaleDtype) -> Self {
            let bits = match codes {
                CodeLayout::E4m3 | CodeLayout::I8 | CodeLayout::U8 => 8,
                _ => 4,
            };
            let format = format(codes, bits, columns, cell, scales);
            let noise = |i: usize| ((i + columns).wrapping_mul(2_654_435_761) >> 11) as u8;
            // No NaN of e4m3.
            let code = |i: usize| if codes == CodeLayout::E4m3 { noise(i) & 0xf7 } else { noise(i) };
            let bytes = ROWS * (columns + 7) / 8 * bits;
            let scale = |i: usize| 0.01 * (1.0 + f32::from(noise(i)) / 64.0);
            let scales_of = |i: usize| scales.nearest(scale(i), FACTOR).to_le_bytes();
            let count = ROWS.div_ceil(format.row_block) * format.groups;
            Matrix {
                codes: (0..bytes).map(code).collect(),
                scales: (0..count).flat_map(|i| scales_of(i)[..scales.bytes()].to_vec()).collect(),
                zeros: None,
                groups: None,
                format,
            }
        }

        /// Adds zeros: of words, in which all numbers are possible, or numbers of the type of the
        /// scales.
        fn with_zeros(mut self) -> Self {
            let PackedFormat { codes, groups, scales, .. } = self.format;
            let is_float = codes.has_float_zeros();
            let number = |i: usize| scales.nearest(3.0 + (i % 9) as f32 * 0.7, FACTOR).to_le_bytes();
            self.zeros = Some(if is_float {
                (0..ROWS * groups).flat_map(|i| number(i)[..scales.bytes()].to_vec()).collect()
            } else {
                (0..4 * ROWS * groups).map(|i| (i * 89 + 7) as u8).collect()
            });
            self
        }

        fn with_groups(mut self) -> Self {
            let PackedFormat { columns, groups, .. } = self.format;
            self.groups = Some((0..columns).flat_map(|i| ((i * 7 % groups) as u32).to_le_bytes()).collect());
            self
        }

        fn tensor(&self) -> PackedTensor<'_> {
            let Matrix { format, codes, scales, zeros, groups } = self;
            let (zeros, groups) = (zeros.as_deref(), groups.as_deref());
            PackedTensor { format: *format, codes, scales, zeros, groups, factor: FACTOR }
        }

        fn with(&self, EncodedTensor { codes, scales }: EncodedTensor) -> Self {
            let (zeros, groups) = (self.zeros.clone(), self.groups.clone());
            Matrix { format: self.format, codes, scales, zeros, groups }
        }

        fn values(&self) -> Vec<f32> {
            let PackedFormat { rows, columns, .. } = self.format;
            let mut values = vec![0f32; rows * columns];
            self.tensor().decode(0..rows, 0..columns, &mut values);
            values
        }
    }

    const FACTOR: f32 = 0.25;

    fn matrices() -> Vec<Matrix> {
        use CodeLayout::{ColumnWords, E2m1, E4m3, GroupHalves, I8, InterleavedWords, RowWords, U8};
        use ScaleDtype::{BF16, E4m3Over, E4m3Times, E8m0, F16, F32};
        vec![
            Matrix::new(RowWords, 72, [1, 32], F16),
            Matrix::new(RowWords, 71, [1, 32], BF16).with_zeros(),
            Matrix::new(RowWords, 72, [1, 24], F32).with_groups(),
            Matrix::new(I8, 33, [1, 33], F32),
            Matrix::new(I8, 64, [1, 16], BF16).with_zeros(),
            Matrix::new(ColumnWords, 64, [1, 32], F16).with_zeros(),
            Matrix::new(ColumnWords, 64, [1, 16], F16).with_zeros().with_groups(),
            Matrix::new(InterleavedWords, 65, [1, 16], F16).with_zeros(),
            Matrix::new(E4m3, 90, [20, 32], F32),
            Matrix::new(E4m3, 90, [ROWS, 90], BF16),
            Matrix::new(E2m1, 96, [1, 32], E8m0),
            Matrix::new(E2m1, 96, [1, 16], E4m3Times),
            Matrix::new(E2m1, 96, [1, 16], E4m3Over),
            Matrix::new(U8, 96, [1, 32], BF16).with_zeros(),
            Matrix::new(GroupHalves, 96, [1, 32], F16).with_zeros(),
        ]
    }

    #[test]
    fn values_of_the_format_stay() {
        for matrix in matrices() {
            let values = matrix.values();
            let again = matrix.with(matrix.tensor().encode(&values));
            assert!(again.values() == values, "{:?}", matrix.format);
            assert_eq!(again.scales, matrix.scales, "{:?}", matrix.format);
            assert!(again.codes == matrix.codes, "{:?}", matrix.format);
        }
    }

    fn squares(values: &[f32], wanted: &[f32]) -> f64 {
        values.iter().zip(wanted).map(|(a, b)| f64::from(a - b).powi(2)).sum()
    }

    /// Small changes keep most scales; large ones need new ones. All are better than the old
    /// values, and no code is farther from its value than its neighbours.
    #[test]
    fn other_values_get_the_nearest_codes() {
        for matrix in matrices() {
            let stored = matrix.values();
            for growth in [1.0, 3.0] {
                let noise = |at: usize| ((at as f32) * 0.7).sin() * 0.02;
                let wanted: Vec<f32> =
                    stored.iter().enumerate().map(|(at, value)| value * growth + noise(at)).collect();
                let encoded = matrix.with(matrix.tensor().encode(&wanted));
                let values = encoded.values();
                let what = format!("{:?}, {growth}", matrix.format);
                assert!(squares(&values, &wanted) < 0.7 * squares(&stored, &wanted), "{what}");
                let flipped = |bit: u8| {
                    let codes = encoded.codes.iter().map(|byte| byte ^ bit).collect();
                    let scales = encoded.scales.clone();
                    matrix.with(EncodedTensor { codes, scales }).values()
                };
                for bit in [1, 2, 16, 32] {
                    for (at, other) in flipped(bit).into_iter().enumerate() {
                        let [ours, theirs] = [values[at], other].map(|value| (value - wanted[at]).abs());
                        let is_nearest = theirs.is_nan() || ours <= theirs * 1.0001 + 1e-6;
                        assert!(is_nearest, "{what}, {at}: {ours}, {theirs}");
                    }
                }
            }
        }
    }

    #[test]
    fn scales_of_powers_of_two_stay_such() {
        let mut matrix = Matrix::new(CodeLayout::E4m3, 64, [ROWS, 64], ScaleDtype::F32);
        matrix.scales = 0.25f32.to_le_bytes().to_vec();
        let encoded = matrix.tensor().encode(&vec![300.0; ROWS * 64]);
        assert_eq!(encoded.scales, 1.0f32.to_le_bytes());
        assert_eq!([power_from(1.0), power_from(1.0001), power_from(0.3)], [1.0, 2.0, 0.5]);
    }

    #[test]
    fn a_cell_of_zeros_gets_a_scale_with_its_first_value() {
        let mut matrix = Matrix::new(CodeLayout::I8, 64, [1, 64], ScaleDtype::F32);
        matrix.scales.fill(0);
        assert_eq!(matrix.values(), vec![0.0; ROWS * 64]);
        let wanted: Vec<f32> = (0..ROWS * 64).map(|at| (at % 64 * 2 + 1) as f32).collect();
        assert!(matrix.with(matrix.tensor().encode(&wanted)).values() == wanted);
    }
}
