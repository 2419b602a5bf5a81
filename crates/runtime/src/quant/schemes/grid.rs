//! Codes row by row, with a scale for each cell of a grid over the matrix: the formats of other
//! tools (GPTQ, AWQ, compressed-tensors, FP8, MXFP4, HQQ, some of GGUF) as a run keeps them.
//!
//! A value is `scale * (code - zero)`, each operation in f32, as [`crate::quant::PackedTensor`]
//! decodes the files. `repack` rearranges their bytes; nothing is quantized to these formats.

use super::blocks::BlockCodes;
use super::four_bit::FourBit;
use crate::error::{Error, Result};
use crate::instruction_set::vectorized;
use crate::quant::e4m3::E4M3;
use crate::quant::element::DequantizedElement;
use crate::quant::runs::{QuantRun, RunMeaning, RunsView, RunsViewMut};
use crate::quant::scheme::{PanelKernel, ProductHint, QuantScheme, ReadValues};
use crate::quant::small_floats::{E2M1, ScaleDtype};

/// The codes of a matrix. Two codes of 4 bits share a byte, the first in the high half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GridCodes {
    /// Whole numbers from 0 to 15. The zero is 8 if none is stored.
    Int4,
    /// Whole numbers from 0 to 255. The zero is 128 if none is stored.
    Int8,
    /// The float type e4m3 without infinities.
    E4m3,
    /// The float type e2m1.
    E2m1,
}

/// The zeros of a grid. `kernels/dequantize_grid.cu` has their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GridZeros {
    /// None is stored.
    Implied,
    /// A byte for each cell.
    Bytes,
    /// A number of the type of the scales for each cell.
    AsScales,
}

/// A format of codes with a grid of scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GridFormat {
    /// The type of the codes.
    pub codes: GridCodes,
    /// Number of columns of the matrix.
    pub columns: usize,
    /// Rows that share a scale.
    pub row_block: usize,
    /// Consecutive columns that share a scale, unless columns name their groups.
    pub column_block: usize,
    /// The type of scales, which are stored as in the files.
    pub scales: ScaleDtype,
    /// The zeros of the cells.
    pub zeros: GridZeros,
    /// True if each column names its group, in 16 bits (act-order of GPTQ).
    pub by_column: bool,
}

/// Values of integer codes; those of 4 bits are the first 16.
static INTEGERS: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut at = 0;
    while at < 256 {
        table[at] = at as f32;
        at += 1;
    }
    table
};

impl GridCodes {
    /// Bits of a code.
    pub fn bits(self) -> usize {
        match self {
            GridCodes::Int4 | GridCodes::E2m1 => 4,
            GridCodes::Int8 | GridCodes::E4m3 => 8,
        }
    }

    /// Zero of the codes if none is stored.
    pub fn implied_zero(self) -> u8 {
        match self {
            GridCodes::Int4 => 8,
            GridCodes::Int8 => 128,
            GridCodes::E4m3 | GridCodes::E2m1 => 0,
        }
    }
}

impl GridFormat {
    /// Number of groups of columns.
    pub fn groups(&self) -> usize {
        self.columns.div_ceil(self.column_block)
    }

    /// The run that holds the scales.
    pub fn scales_run(&self) -> RunMeaning {
        if self.scales == ScaleDtype::F32 { RunMeaning::Scales } else { RunMeaning::ScaleBytes }
    }

    /// Reads the scale of a cell. The offset of the runs is the factor of the matrix.
    fn scale(&self, runs: &RunsView<'_>, cell: usize) -> f32 {
        match self.scales {
            ScaleDtype::F32 => runs.floats(RunMeaning::Scales)[cell],
            other => other.with_factor(other.read(runs.bytes(RunMeaning::ScaleBytes), cell), runs.offset),
        }
    }

    /// Reads the zero of a cell.
    fn zero(&self, runs: &RunsView<'_>, cell: usize) -> f32 {
        match self.zeros {
            GridZeros::Implied => f32::from(self.codes.implied_zero()),
            GridZeros::Bytes => f32::from(runs.bytes(RunMeaning::Zeros)[cell]),
            GridZeros::AsScales => self.scales.read(runs.bytes(RunMeaning::Zeros), cell),
        }
    }

    /// Writes values of a row, from a column on.
    fn line<T: DequantizedElement>(&self, runs: &RunsView<'_>, row: usize, column: usize, out: &mut [T]) {
        let first = row / self.row_block * self.groups();
        let codes = runs.bytes(RunMeaning::Codes);
        if self.by_column {
            return self.scattered(runs, [first, row, column], out);
        }
        let (mut at, mut rest) = (column, out);
        while !rest.is_empty() {
            let group = at / self.column_block;
            let count = ((group + 1) * self.column_block - at).min(rest.len());
            let (part, after) = rest.split_at_mut(count);
            let (scale, zero) = (self.scale(runs, first + group), self.zero(runs, first + group));
            let index = row * self.columns + at;
            match self.codes {
                GridCodes::Int4 => {
                    let table: [f32; 16] = std::array::from_fn(|code| code as f32 - zero);
                    FourBit::dequantize(&table, codes, index, scale, part);
                }
                GridCodes::E2m1 => FourBit::dequantize(&E2M1, codes, index, scale, part),
                GridCodes::Int8 => integers(&codes[index..index + count], scale, zero, part),
                GridCodes::E4m3 => floats(&codes[index..index + count], scale, part),
            }
            (at, rest) = (at + count, after);
        }
    }

    /// Writes values of a row whose columns name their groups; `first` is the first cell of the
    /// row.
    fn scattered<T: DequantizedElement>(
        &self,
        runs: &RunsView<'_>,
        [first, row, column]: [usize; 3],
        out: &mut [T],
    ) {
        let pair = |group| (self.scale(runs, first + group), self.zero(runs, first + group));
        let pairs: Vec<(f32, f32)> = (0..self.groups()).map(pair).collect();
        let codes = runs.bytes(RunMeaning::Codes);
        let (groups, _) = runs.bytes(RunMeaning::ColumnGroups)[2 * column..].as_chunks::<2>();
        for (i, (value, group)) in out.iter_mut().zip(groups).enumerate() {
            let at = row * self.columns + column + i;
            let code = match self.codes.bits() {
                4 => codes[at / 2] >> ((at + 1) % 2 * 4) & 15,
                _ => codes[at],
            };
            let (scale, zero) = pairs[usize::from(u16::from_le_bytes(*group))];
            *value = T::nearest(scale * (self.table()[usize::from(code)] - zero));
        }
    }

    fn table(&self) -> &'static [f32] {
        match self.codes {
            GridCodes::Int4 => &INTEGERS[..16],
            GridCodes::Int8 => &INTEGERS,
            GridCodes::E4m3 => &E4M3,
            GridCodes::E2m1 => &E2M1,
        }
    }
}

vectorized! {
    fn integers<T: DequantizedElement>(codes: &[u8], scale: f32, zero: f32, out: &mut [T]) {
        for (value, &code) in out.iter_mut().zip(codes) {
            *value = T::nearest(scale * (f32::from(code) - zero));
        }
    }
}

vectorized! {
    /// Computes e4m3 without its table: so the loop vectorizes.
    fn floats<T: DequantizedElement>(codes: &[u8], scale: f32, out: &mut [T]) {
        for (value, &code) in out.iter_mut().zip(codes) {
            let code = u32::from(code);
            let magnitude = code & 0x7f;
            let normal = f32::from_bits((magnitude << 20) + (120 << 23));
            let finite = if magnitude < 8 { magnitude as f32 * (1.0 / 512.0) } else { normal };
            let float = if magnitude == 0x7f { f32::NAN } else { finite };
            *value = T::nearest(scale * f32::from_bits(float.to_bits() | (code & 0x80) << 24));
        }
    }
}

impl QuantScheme for GridFormat {
    fn name(&self) -> &'static str {
        match (self.codes, self.scales) {
            (GridCodes::Int4, _) => "int4",
            (GridCodes::Int8, _) => "int8",
            (GridCodes::E4m3, _) => "fp8",
            (GridCodes::E2m1, ScaleDtype::E8m0) => "mxfp4",
            (GridCodes::E2m1, _) => "nvfp4",
        }
    }

    fn runs(&self, n: usize) -> Vec<QuantRun> {
        let cells = n.div_ceil(self.columns * self.row_block) * self.groups();
        let scales = cells * if self.scales == ScaleDtype::F32 { 1 } else { self.scales.bytes() };
        let zeros = match self.zeros {
            GridZeros::Implied => None,
            GridZeros::Bytes => Some((RunMeaning::Zeros, cells)),
            GridZeros::AsScales => Some((RunMeaning::Zeros, cells * self.scales.bytes())),
        };
        let groups = self.by_column.then_some((RunMeaning::ColumnGroups, 2 * self.columns));
        let runs = [(RunMeaning::Codes, (n * self.codes.bits()).div_ceil(8)), (self.scales_run(), scales)];
        let runs = runs.into_iter().chain(zeros).chain(groups);
        runs.map(|(meaning, elements)| QuantRun { meaning, elements }).collect()
    }

    fn unit(&self) -> usize {
        // Two rows have whole bytes of codes.
        self.columns * self.row_block * 2
    }

    fn dequantize<T: DequantizedElement>(&self, runs: &RunsView<'_>, start: usize, out: &mut [T]) {
        let (mut row, mut column, mut rest) = (start / self.columns, start % self.columns, out);
        while !rest.is_empty() {
            let count = (self.columns - column).min(rest.len());
            let (line, after) = rest.split_at_mut(count);
            self.line(runs, row, column, line);
            (row, column, rest) = (row + 1, 0, after);
        }
    }

    fn fill(&self, _: usize, _: ReadValues<'_>, _: &mut RunsViewMut<'_>) -> Result<()> {
        Err(Error::internal(format!("a run quantizes no weights to {}", self.describe())))
    }

    fn hint(&self) -> ProductHint {
        let (bits, table) = (self.codes.bits(), self.table());
        let kernel = Some(PanelKernel::Grid);
        ProductHint { block_size: self.column_block, bits, table, divisor: None, kernel }
    }

    fn blocks_in_words(&self) -> String {
        let Self { columns, row_block, column_block, .. } = *self;
        match (row_block, column_block) {
            (1, width) if width >= columns => "with one scale a row".into(),
            (1, width) => format!("in groups of {width}"),
            (height, width) if width < columns => format!("in blocks of {height}x{width}"),
            (height, _) => format!("with one scale for {height} rows"),
        }
    }

    fn describe(&self) -> String {
        let scales = match self.scales {
            ScaleDtype::F32 => "f32",
            ScaleDtype::F16 => "f16",
            ScaleDtype::BF16 => "bf16",
            ScaleDtype::E8m0 => "e8m0",
            ScaleDtype::E4m3Times | ScaleDtype::E4m3Over => "e4m3",
        };
        format!("{} {} (scales in {scales}), as stored", self.name(), self.blocks_in_words())
    }

    fn fingerprint(&self) -> String {
        let Self { columns, row_block, column_block, scales, zeros, by_column, .. } = *self;
        format!("{} {columns} {row_block} {column_block} {scales:?} {zeros:?} {by_column}", self.name())
    }
}
