//! A weight that another tool packed: the positions of its parts, and its values while they are
//! read. `readers` defines the names of the parts in files and checks that they match.

use std::ops::Range;

use rayon::prelude::*;

use super::StoredElement;
use super::quantized::read_f32;
use super::tensor_info::ShardRange;
use crate::error::Result;
use crate::quant::{CodeLayout, GridFormat, PackedFormat, PackedTensor};

/// The least number of rows that are decoded at once: GPTQ and AWQ store neighbouring rows side by
/// side.
const ROWS: usize = 32;
/// The least number of values that are decoded at once.
const VALUES: usize = 1 << 16;

/// The data of a packed weight besides its entry in the list of tensors, which has the position of
/// its codes.
#[derive(Debug, Clone)]
pub(super) struct PackedParts {
    /// The format in messages, such as "gptq int4".
    pub(super) name: &'static str,
    pub(super) format: PackedFormat,
    pub(super) scales: ShardRange,
    pub(super) zeros: Option<ShardRange>,
    pub(super) groups: Option<ShardRange>,
    /// The factor of all scales: a number in f32.
    pub(super) factor: Option<ShardRange>,
    /// True if the columns of a group are not consecutive.
    pub(super) scattered: bool,
    /// Bytes of codes and companions.
    pub(super) bytes: u64,
}

impl PackedParts {
    /// Returns the positions of the parts beside the codes.
    pub(super) fn places(&self) -> impl Iterator<Item = &ShardRange> {
        let optional = [&self.zeros, &self.groups, &self.factor];
        [&self.scales].into_iter().chain(optional.into_iter().flatten())
    }

    /// Returns the weight of `rows` alone and the position of its codes, given that of all codes;
    /// `None` unless codes and scales are stored row by row.
    pub(super) fn of_rows(&self, rows: Range<usize>, codes: &Range<usize>) -> Option<(Self, Range<usize>)> {
        let PackedFormat { columns, groups, .. } = self.format;
        if self.format.codes != CodeLayout::E2m1 {
            return None;
        }
        let within = |all: &Range<usize>, row_bytes: usize| {
            all.start + rows.start * row_bytes..all.start + rows.end * row_bytes
        };
        let codes = within(codes, columns.div_ceil(2));
        let scales = ShardRange { range: within(&self.scales.range, groups), ..self.scales };
        let bytes = (codes.len() + scales.range.len()) as u64;
        let format = PackedFormat { rows: rows.len(), ..self.format };
        Some((PackedParts { format, scales, bytes, ..self.clone() }, codes))
    }

    /// Returns the format in which a run keeps the weight, if it can.
    pub(super) fn run_format(&self) -> Option<GridFormat> {
        self.format.repacked_format(self.zeros.is_some(), self.scattered)
    }

    /// Returns text that differs between any two formats of equal shape. The identity of a model
    /// includes it, so it never changes.
    pub(super) fn fingerprint(&self) -> String {
        let PackedFormat { codes, bits, row_block, column_block, scales, zero_offset, .. } = self.format;
        let [zeros, groups] = [&self.zeros, &self.groups].map(|part| u8::from(part.is_some()));
        let name = self.name;
        format!(
            "{name} {codes:?} {bits} {row_block} {column_block} {scales:?} {zeros}+{zero_offset} {groups}"
        )
    }

    /// Returns the tensor; `bytes` reads a range.
    pub(super) fn tensor<'a>(
        &self,
        codes: &'a [u8],
        bytes: impl Fn(&ShardRange) -> Result<&'a [u8]>,
    ) -> Result<PackedTensor<'a>> {
        let optional = |span: &Option<ShardRange>| span.as_ref().map(&bytes).transpose();
        Ok(PackedTensor {
            format: self.format,
            codes,
            scales: bytes(&self.scales)?,
            zeros: optional(&self.zeros)?,
            groups: optional(&self.groups)?,
            factor: optional(&self.factor)?.and_then(|bytes| read_f32(bytes).next()).unwrap_or(1.0),
        })
    }
}

/// Decodes the values from `start` on, on all threads, each rounded once.
pub(super) fn read<T: StoredElement>(tensor: &PackedTensor<'_>, start: usize, out: &mut [T]) {
    in_tasks(tensor.format.columns.max(1), start, out, |start, out| {
        let mut values = vec![0f32; out.len()];
        decode_from(tensor, start, &mut values);
        T::round(&values, out);
    });
}

/// Calls `decode` on all threads for the values from `start` on of a matrix of `width` columns:
/// for those within a row, or from the start of a row.
pub(super) fn in_tasks<T: Send>(
    width: usize,
    start: usize,
    out: &mut [T],
    decode: impl Fn(usize, &mut [T]) + Sync,
) {
    // The rest of the first row, then whole rows.
    let first = ((width - start % width) % width).min(out.len());
    let (head, rows) = out.split_at_mut(first);
    if !head.is_empty() {
        decode(start, head);
    }
    let task = ROWS.max(VALUES / width) * width;
    rows.par_chunks_mut(task).enumerate().for_each(|(i, out)| decode(start + first + i * task, out));
}

/// Decodes the values from `start` on: within a row, or from the start of a row.
fn decode_from(tensor: &PackedTensor<'_>, start: usize, out: &mut [f32]) {
    let width = tensor.format.columns.max(1);
    let (row, column) = (start / width, start % width);
    if column + out.len() <= width {
        return tensor.decode(row..row + 1, column..column + out.len(), out);
    }
    let whole = out.len() / width;
    let (rows, last) = out.split_at_mut(whole * width);
    tensor.decode(row..row + whole, 0..width, rows);
    tensor.decode(row + whole..row + whole + 1, 0..last.len(), last);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::ScaleDtype;

    /// The identities of models contain these texts.
    #[test]
    fn fingerprints_stay_and_tell_formats_apart() {
        let shard_range = || ShardRange { shard: 0, range: 0..0 };
        let format = PackedFormat {
            codes: CodeLayout::ColumnWords,
            bits: 4,
            rows: 8,
            columns: 8,
            row_block: 1,
            column_block: 4,
            groups: 2,
            scales: ScaleDtype::F16,
            zero_offset: 1,
        };
        let (scales, zeros, groups) = (shard_range(), Some(shard_range()), None);
        let first = PackedParts {
            name: "gptq int4",
            format,
            scales,
            zeros,
            groups,
            factor: None,
            scattered: false,
            bytes: 0,
        };
        assert_eq!(first.fingerprint(), "gptq int4 ColumnWords 4 1 4 F16 1+1 0");
        let with = |format| PackedParts { format, ..first.clone() }.fingerprint();
        let others = [
            with(PackedFormat { codes: CodeLayout::InterleavedWords, ..format }),
            with(PackedFormat { codes: CodeLayout::RowWords, ..format }),
            with(PackedFormat { codes: CodeLayout::I8, ..format }),
            with(PackedFormat { codes: CodeLayout::E4m3, ..format }),
            with(PackedFormat { codes: CodeLayout::E2m1, ..format }),
            with(PackedFormat { bits: 8, ..format }),
            with(PackedFormat { scales: ScaleDtype::BF16, ..format }),
            with(PackedFormat { scales: ScaleDtype::F32, ..format }),
            with(PackedFormat { scales: ScaleDtype::E8m0, ..format }),
            with(PackedFormat { zero_offset: 0, ..format }),
            PackedParts { zeros: None, ..first.clone() }.fingerprint(),
            PackedParts { groups: Some(shard_range()), ..first.clone() }.fingerprint(),
        ];
        insta::assert_snapshot!(others.join("\n"), @"
        gptq int4 InterleavedWords 4 1 4 F16 1+1 0
        gptq int4 RowWords 4 1 4 F16 1+1 0
        gptq int4 I8 4 1 4 F16 1+1 0
        gptq int4 E4m3 4 1 4 F16 1+1 0
        gptq int4 E2m1 4 1 4 F16 1+1 0
        gptq int4 ColumnWords 8 1 4 F16 1+1 0
        gptq int4 ColumnWords 4 1 4 BF16 1+1 0
        gptq int4 ColumnWords 4 1 4 F32 1+1 0
        gptq int4 ColumnWords 4 1 4 E8m0 1+1 0
        gptq int4 ColumnWords 4 1 4 F16 1+0 0
        gptq int4 ColumnWords 4 1 4 F16 0+1 0
        gptq int4 ColumnWords 4 1 4 F16 1+1 1
        ");
    }
}
