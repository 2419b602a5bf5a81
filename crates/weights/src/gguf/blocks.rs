//! The values of a tensor of a GGUF file as a parameter of the model: decoded, with rows in the
//! order of Hugging Face checkpoints, and new values in the order of the file.

use rayon::prelude::*;

use super::encode::requantize;
use super::order::FileOrder;
use super::source::{BlockSource, decode_part, row_bytes};
use crate::StoredElement;
use crate::error::Result;
use crate::quant;
use crate::quant::{
    BlockType, GgmlFormat, GridCodes, GridFormat, GridZeros, QuantFormat, RunMeaning, RunsViewMut, ScaleDtype,
};
use crate::tensor_info::{Patch, ShardRange};

/// The least number of values that are decoded at once.
const VALUES: usize = 1 << 16;

/// The data of a parameter besides its entry in the list of tensors, which has the position of the
/// first source.
#[derive(Debug, Clone)]
pub(crate) struct BlockParts {
    /// The tensors that hold its rows, in equal shares.
    pub(super) sources: Vec<BlockSource>,
    /// The length of a row.
    pub(super) columns: usize,
    /// The number of rows of a source.
    pub(super) rows: usize,
    /// The number of heads whose halves are interleaved in the file.
    pub(super) interleaved_heads: Option<usize>,
    /// The number that the file has added to each value.
    pub(super) added: f32,
    /// The order of rows and columns; `None`: sources hold equal shares in order.
    pub(super) order: Option<FileOrder>,
    /// True if the file has −exp(v) for each value v.
    pub(super) is_log_rate: bool,
}

impl BlockParts {
    fn kind(&self) -> Option<BlockType> {
        self.sources.first().map(|source| source.kind)
    }

    /// Returns the name of its type: that of safetensors for floats.
    pub(crate) fn name(&self) -> &'static str {
        match self.kind() {
            None | Some(BlockType::F32) => "F32",
            Some(BlockType::F16) => "F16",
            Some(BlockType::BF16) => "BF16",
            Some(kind) => kind.name(),
        }
    }

    /// Returns whether any of its sources is quantized.
    pub(crate) fn has_codes(&self) -> bool {
        self.sources.iter().any(|source| source.kind.is_quantized())
    }

    /// Returns the bytes of all sources.
    pub(crate) fn bytes(&self) -> u64 {
        self.sources.iter().map(|source| source.span.range.len() as u64).sum()
    }

    /// Returns the positions of the sources after the first.
    pub(crate) fn places(&self) -> impl Iterator<Item = &ShardRange> {
        self.sources.iter().skip(1).map(|source| &source.span)
    }

    /// Returns text that differs between any two formats of equal shape. The identity of a model
    /// includes it, so it never changes.
    pub(crate) fn fingerprint(&self) -> String {
        let kinds: Vec<&str> = self.sources.iter().map(|source| source.kind.name()).collect();
        let mut text = format!("gguf {} {:?} {}", kinds.join("+"), self.interleaved_heads, self.added);
        if let Some(order) = &self.order {
            text = format!("{text} in the order {}", order.text());
        }
        if self.is_log_rate { format!("{text} as rates") } else { text }
    }

    /// Returns the row of the file that holds `row` of a source.
    fn source_row(&self, row: usize) -> usize {
        let Some(heads) = self.interleaved_heads else { return row };
        let width = self.rows / heads;
        let (head, at, half) = (row / width, row % width, width / 2);
        head * width + at % half * 2 + at / half
    }

    /// Reads the values from `start` on, on all threads, each rounded once; `bytes` reads a range.
    pub(crate) fn read<'a, T: StoredElement>(
        &self,
        start: usize,
        out: &mut [T],
        bytes: impl Fn(&ShardRange) -> Result<&'a [u8]>,
    ) -> Result<()> {
        let sources: Vec<&[u8]> =
            self.sources.iter().map(|source| bytes(&source.span)).collect::<Result<_>>()?;
        let task = (VALUES / self.columns.max(1)).max(1) * self.columns.max(1);
        out.par_chunks_mut(task).enumerate().for_each(|(i, out)| {
            let mut values = vec![0f32; out.len()];
            match &self.order {
                Some(order) => order.decode(&self.sources, &sources, start + i * task, &mut values),
                None => self.decode(&sources, start + i * task, &mut values),
            }
            if self.is_log_rate {
                values.iter_mut().for_each(|value| *value = (-*value).ln());
            }
            T::round(&values, out);
        });
        Ok(())
    }

    /// Returns the format in which a run keeps the parameter, if it can: blocks of whole numbers
    /// with one scale each as a grid, other blocks as they are.
    pub(crate) fn run_format(&self) -> Option<QuantFormat> {
        let kind = self.kind()?;
        let alike = self.sources.iter().all(|source| source.kind == kind);
        let in_order = self.order.is_none() && !self.is_log_rate && self.added == 0.0;
        if !kind.is_quantized() || !alike || !in_order || self.rows == 0 || self.columns == 0 {
            return None;
        }
        let codes = match kind {
            BlockType::Q4_0 => GridCodes::Int4,
            BlockType::Q8_0 => GridCodes::Int8,
            kind => return Some(QuantFormat::Ggml(GgmlFormat { kind })),
        };
        Some(QuantFormat::Grid(GridFormat {
            codes,
            columns: self.columns,
            row_block: 1,
            column_block: kind.elements(),
            scales: ScaleDtype::F16,
            zeros: GridZeros::Implied,
            by_column: false,
        }))
    }

    /// Rearranges the blocks into the runs of `format`, which is [`BlockParts::run_format`];
    /// `bytes` reads a range.
    pub(crate) fn copy_to<'a>(
        &self,
        format: QuantFormat,
        to: &mut RunsViewMut<'_>,
        bytes: impl Fn(&ShardRange) -> Result<&'a [u8]>,
    ) -> Result<()> {
        let mut row = 0;
        for source in &self.sources {
            let stored = bytes(&source.span)?;
            for at in 0..self.rows {
                let line = row_bytes(source.kind, stored, self.source_row(at), self.columns);
                match format {
                    QuantFormat::Grid(format) => to_grid(line, source.kind, &format, row, to),
                    _ => to.bytes_mut(RunMeaning::Codes)[row * line.len()..][..line.len()]
                        .copy_from_slice(line),
                }
                row += 1;
            }
        }
        Ok(())
    }

    /// Returns new bytes for the sources, given new values of the parameter `name`; `bytes` reads a
    /// range.
    ///
    /// # Errors
    /// User: a value is not finite, or too large for f16. Errors of `bytes`.
    pub(crate) fn requantized<'a>(
        &self,
        name: &str,
        values: &[f32],
        bytes: impl Fn(&ShardRange) -> Result<&'a [u8]>,
    ) -> Result<Vec<Patch>> {
        let mut patches = Vec::with_capacity(self.sources.len());
        for (source, mut values) in self.sources.iter().zip(self.in_files(values)) {
            if self.is_log_rate {
                values.iter_mut().for_each(|value| *value = -value.exp());
            } else if self.added != 0.0 {
                values.iter_mut().for_each(|value| *value += self.added);
            }
            let bytes = requantize(name, &values, source.kind, bytes(&source.span)?)?;
            patches.push(Patch { span: source.span.clone(), bytes });
        }
        Ok(patches)
    }

    /// Returns the values of each source in the order of its file.
    fn in_files(&self, values: &[f32]) -> Vec<Vec<f32>> {
        if let Some(order) = &self.order {
            return order.in_files(values, self.sources.len());
        }
        let share = |values: &[f32]| {
            let mut in_file = vec![0f32; values.len()];
            for (row, line) in values.chunks_exact(self.columns.max(1)).enumerate() {
                in_file[self.source_row(row) * self.columns..][..self.columns].copy_from_slice(line);
            }
            in_file
        };
        values.chunks_exact((self.rows * self.columns).max(1)).map(share).collect()
    }

    fn decode(&self, sources: &[&[u8]], start: usize, mut out: &mut [f32]) {
        let mut at = start;
        let mut scratch = Vec::new();
        while !out.is_empty() {
            let (row, column) = (at / self.columns, at % self.columns);
            let count = (self.columns - column).min(out.len());
            let (part, rest) = out.split_at_mut(count);
            let source = row / self.rows;
            let kind = self.sources[source].kind;
            let line = row_bytes(kind, sources[source], self.source_row(row % self.rows), self.columns);
            decode_part(kind, line, column..column + count, part, &mut scratch);
            if self.added != 0.0 {
                part.iter_mut().for_each(|value| *value -= self.added);
            }
            (at, out) = (at + count, rest);
        }
    }
}

/// Rearranges a line of blocks of whole numbers into the runs of `format`, as the line `row`.
fn to_grid(line: &[u8], kind: BlockType, format: &GridFormat, row: usize, to: &mut RunsViewMut<'_>) {
    let (bits, mut codes) = (format.codes.bits(), vec![0u8; format.columns]);
    let scales = to.bytes_mut(RunMeaning::ScaleBytes).chunks_exact_mut(2).skip(row * format.groups());
    let blocks = line.chunks_exact(kind.bytes()).zip(scales);
    for ((block, scale), codes) in blocks.zip(codes.chunks_exact_mut(format.column_block)) {
        scale.copy_from_slice(&block[..2]);
        block_codes(format.codes, &block[2..], codes);
    }
    let width = format.columns * bits / 8;
    quant::pack_codes(&codes, bits, &mut to.bytes_mut(RunMeaning::Codes)[row * width..][..width]);
}

/// Writes the codes of a block, one a byte; those of signed bytes are 128 higher.
fn block_codes(kind: GridCodes, block: &[u8], codes: &mut [u8]) {
    if kind == GridCodes::Int8 {
        return codes.iter_mut().zip(block).for_each(|(to, code)| *to = code ^ 0x80);
    }
    // The second half of the values is in the high halves of the bytes.
    let (first, second) = codes.split_at_mut(block.len());
    for ((first, second), byte) in first.iter_mut().zip(second).zip(block) {
        (*first, *second) = (byte & 15, byte >> 4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reverse of `permute` of conversion/llama.py, on 16 rows with 2 heads.
    #[test]
    fn interleaved_halves_are_put_apart() {
        let shard_range = ShardRange { shard: 0, range: 0..0 };
        let parts = BlockParts {
            sources: vec![BlockSource { kind: BlockType::F32, span: shard_range }],
            columns: 1,
            rows: 16,
            interleaved_heads: Some(2),
            added: 1.0,
            order: None,
            is_log_rate: false,
        };
        let stored = [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15];
        let bytes: Vec<u8> = stored.iter().flat_map(|row| (*row as f32 + 1.0).to_le_bytes()).collect();
        let mut values = [0f32; 15];
        parts.read(1, &mut values, |_| Ok(&bytes)).expect("in memory");
        assert!(values.iter().zip(1..).all(|(value, row)| *value == row as f32), "{values:?}");
        let values: Vec<f32> = (0..16).map(|row| row as f32).collect();
        let patches = parts.requantized("t", &values, |_| Ok(&bytes)).expect("in memory");
        assert_eq!(patches[0].bytes, bytes);
    }

    /// The identities of models contain this text.
    #[test]
    fn the_fingerprint_stays() {
        let source = |kind| BlockSource { kind, span: ShardRange { shard: 0, range: 0..0 } };
        let sources = vec![source(BlockType::Q4K), source(BlockType::Q6K)];
        let (order, is_log_rate) = (None, false);
        let parts = BlockParts {
            sources,
            columns: 256,
            rows: 1,
            interleaved_heads: Some(4),
            added: 1.0,
            order,
            is_log_rate,
        };
        assert_eq!(parts.fingerprint(), "gguf q4_K+q6_K Some(4) 1");
    }
}
