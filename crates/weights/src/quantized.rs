//! A quantized tensor in a checkpoint: the positions of its runs, and their values.
//!
//! Codes and scales are borrowed from the memory map, which is unaligned, so f32 scales are copied
//! for each use. `readers` defines the names of the runs in files and checks that they match.

use half::f16;

use super::tensor_info::{Patch, ShardRange};
use crate::error::{Error, Result};
use crate::quant::{
    BlockFormat, NESTED_BLOCK, QuantBuffer, QuantFormat, QuantTensor, QuantViewMut, RunDtype, RunMeaning,
    RunsView, nest_around,
};

/// The data of a quantized tensor besides its entry in the list of tensors, which has the position
/// of its codes.
#[derive(Debug, Clone)]
pub(super) struct QuantizedParts {
    pub(super) format: QuantFormat,
    /// The positions of the other runs of [`crate::quant::QuantScheme::runs`], in its order.
    pub(super) runs: Vec<(RunMeaning, ShardRange)>,
    /// The mean of double-quantized scales.
    pub(super) offset: f32,
    /// Bytes of codes and companions.
    pub(super) bytes: u64,
}

impl QuantizedParts {
    /// Returns new bytes for the codes, which are at `codes`, and for the other runs of tensor
    /// `name`. The mean of double-quantized scales stays, since it is part of a text.
    ///
    /// # Errors
    /// User: a value is beyond the range from which the format is quantized.
    pub(super) fn requantized(&self, name: &str, codes: ShardRange, values: &[f32]) -> Result<Vec<Patch>> {
        let format = match self.format {
            QuantFormat::FourBit(format) => {
                QuantFormat::FourBit(BlockFormat { double_quant: false, ..format })
            }
            other => other,
        };
        // bitsandbytes makes the codes of 8 bits from f16 values.
        let is_f16 = matches!(format, QuantFormat::Int8Rows(_));
        let tensor = QuantBuffer::new(format, values.len(), &|start, part| {
            for (to, value) in part.iter_mut().zip(&values[start..]) {
                *to = if is_f16 { f16::from_f32(*value).to_f32() } else { *value };
            }
            match part.iter().position(|value| !value.is_finite()) {
                None => Ok(()),
                Some(at) => Err(Error::user(format!("cannot quantize the merged `{name}`")).because(format!(
                    "its value {} is {}; accepted: numbers within the range of f16, from which LLM.int8() quantizes",
                    start + at,
                    values[start + at]
                ))),
            }
        })?;
        let scales = tensor.view().runs.floats(RunMeaning::Scales).to_vec();
        let mut nested = vec![0u8; scales.len()];
        let mut outer = vec![0f32; scales.len().div_ceil(NESTED_BLOCK)];
        if self.format.scheme().double_quant() {
            nest_around(self.offset, &scales, &mut nested, &mut outer);
        }
        let mut patches =
            vec![Patch { span: codes, bytes: tensor.view().runs.bytes(RunMeaning::Codes).to_vec() }];
        for (meaning, span) in &self.runs {
            let bytes = match meaning {
                RunMeaning::ScaleCodes => std::mem::take(&mut nested),
                RunMeaning::NestedScales => le(&outer),
                _ => le(&scales),
            };
            patches.push(Patch { span: span.clone(), bytes });
        }
        Ok(patches)
    }
}

fn le(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A quantized tensor of a checkpoint, borrowed from its files.
#[derive(Debug, Clone)]
pub struct QuantizedTensor<'a> {
    format: QuantFormat,
    /// The raw bytes of each run, the codes first.
    runs: Vec<(RunMeaning, &'a [u8])>,
    offset: f32,
}

impl<'a> QuantizedTensor<'a> {
    /// Creates the tensor; `bytes` reads a range.
    pub(super) fn new(
        parts: &QuantizedParts,
        codes: &'a [u8],
        bytes: impl Fn(&ShardRange) -> Result<&'a [u8]>,
    ) -> Result<Self> {
        let others = parts.runs.iter().map(|(meaning, span)| Ok((*meaning, bytes(span)?)));
        let runs = [Ok((RunMeaning::Codes, codes))].into_iter().chain(others).collect::<Result<_>>()?;
        Ok(QuantizedTensor { format: parts.format, runs, offset: parts.offset })
    }

    /// Returns its format. The block of LLM.int8() is a row.
    pub fn format(&self) -> QuantFormat {
        self.format
    }

    /// Returns the codes of all values.
    pub fn codes(&self) -> &'a [u8] {
        self.runs.first().map_or(&[], |(_, codes)| codes)
    }

    /// Returns the mean of the scales; 0 without double quantization.
    pub fn offset(&self) -> f32 {
        self.offset
    }

    /// Copies all runs.
    ///
    /// # Panics
    /// The length of a run's memory differs from the length that [`QuantizedTensor::format`] gives
    /// for the tensor's elements.
    pub fn copy_to(&self, to: &mut QuantViewMut<'_>) {
        for &(meaning, stored) in &self.runs {
            match meaning.dtype() {
                RunDtype::U8 => to.runs.bytes_mut(meaning).copy_from_slice(stored),
                RunDtype::F32 => {
                    let to = to.runs.floats_mut(meaning);
                    assert_eq!(stored.len(), size_of_val(to), "all scales");
                    to.iter_mut().zip(read_f32(stored)).for_each(|(value, stored)| *value = stored);
                }
            }
        }
        *to.runs.offset = self.offset;
    }

    /// Computes the values `start..start + out.len()` in f32.
    pub(super) fn dequantize(&self, start: usize, out: &mut [f32]) {
        let (first, ranges) = self.format.scheme().part(start..start + out.len());
        let parts = |dtype: RunDtype| {
            let of_type = self.runs.iter().zip(&ranges).filter(move |((run, _), _)| run.dtype() == dtype);
            let size = dtype.size_bytes();
            of_type.map(move |((run, stored), part)| (*run, &stored[size * part.start..size * part.end]))
        };
        let floats: Vec<_> =
            parts(RunDtype::F32).map(|(run, stored)| (run, read_f32(stored).collect::<Vec<f32>>())).collect();
        let floats = floats.iter().map(|(run, values)| (*run, &values[..]));
        let runs = RunsView::new(parts(RunDtype::U8), floats, self.offset);
        QuantTensor { format: self.format, runs }.dequantize(start - first, out);
    }
}

/// Reads little-endian floats at any address.
pub(super) fn read_f32(bytes: &[u8]) -> impl ExactSizeIterator<Item = f32> + '_ {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}
