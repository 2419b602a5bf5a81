//! Formats of flat blocks, each with one scale, its largest magnitude. A value is its nearest code
//! times that scale.

use std::fmt::Debug;

use rayon::prelude::*;

use crate::error::Result;
use crate::quant::element::DequantizedElement;
use crate::quant::nested::{NESTED_BLOCK, block_scales, nest};
use crate::quant::runs::{QuantRun, RunMeaning, RunsView, RunsViewMut};
use crate::quant::scheme::{PanelKernel, ProductHint, QuantScheme, ReadValues};

/// Values that a thread holds in f32: 64 KiB, which stay in its cache from reading to the codes.
const PIECE: usize = 1 << 14;

/// A set of codes.
pub trait BlockCodes: Debug + Copy + Send + Sync {
    /// Bits of a code.
    const BITS: usize;
    /// Divisor of all values.
    const DIVISOR: Option<f32> = None;
    /// Kernel that dequantizes a matrix on a GPU.
    const KERNEL: Option<PanelKernel>;

    /// Name in recipes and checkpoints.
    fn name(self) -> &'static str;

    /// Value of each code, before its block's scale: 16 or 256 values.
    fn table(self) -> &'static [f32];

    /// Quantizes whole blocks, or the last ones of a tensor, into codes and one scale per block.
    fn quantize(self, block_size: usize, values: &[f32], codes: &mut [u8], scales: &mut [f32]);

    /// Dequantizes values `at..at + out.len()`, which belong to one block of this scale. `codes`
    /// are those of the whole tensor, `table` is that of [`BlockCodes::table`].
    fn dequantize<T: DequantizedElement>(table: &[f32], codes: &[u8], at: usize, scale: f32, out: &mut [T]);
}

/// A format of flat blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockFormat<C> {
    /// Codes of the values.
    pub codes: C,
    /// Values that share a scale.
    pub block_size: usize,
    /// True if the scales are quantized too.
    pub double_quant: bool,
}

impl<C: BlockCodes> BlockFormat<C> {
    /// Bytes of the codes of `n` values.
    pub fn code_bytes(&self, n: usize) -> usize {
        (n * C::BITS).div_ceil(8)
    }

    /// Number of scales of `n` values.
    pub fn blocks(&self, n: usize) -> usize {
        n.div_ceil(self.block_size)
    }

    /// Values that a thread quantizes at once: whole blocks, and whole bytes of two codes each.
    fn piece(&self) -> usize {
        (PIECE / self.block_size).max(2) / 2 * 2 * self.block_size
    }

    /// Quantizes finite `values`, a tensor or whole blocks of one, into `codes` and one scale per
    /// block.
    ///
    /// # Panics
    /// `codes` or `scales` have other lengths than [`BlockFormat::code_bytes`] and
    /// [`BlockFormat::blocks`] of `values`.
    pub fn quantize(&self, values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
        assert_eq!(scales.len(), self.blocks(values.len()), "one scale a block");
        assert_eq!(codes.len(), self.code_bytes(values.len()), "codes of all values");
        let piece = self.piece();
        let codes = codes.par_chunks_mut(self.code_bytes(piece));
        let scales = scales.par_chunks_mut(self.blocks(piece));
        values.par_chunks(piece).zip(codes).zip(scales).for_each(|((values, codes), scales)| {
            self.codes.quantize(self.block_size, values, codes, scales);
        });
    }
}

impl<C: BlockCodes> QuantScheme for BlockFormat<C> {
    fn name(&self) -> &'static str {
        self.codes.name()
    }

    fn runs(&self, n: usize) -> Vec<QuantRun> {
        let run = |meaning, elements| QuantRun { meaning, elements };
        let (codes, blocks) = (run(RunMeaning::Codes, self.code_bytes(n)), self.blocks(n));
        if self.double_quant {
            let nested = run(RunMeaning::NestedScales, blocks.div_ceil(NESTED_BLOCK));
            vec![codes, run(RunMeaning::ScaleCodes, blocks), nested]
        } else {
            vec![codes, run(RunMeaning::Scales, blocks)]
        }
    }

    fn unit(&self) -> usize {
        self.block_size * if self.double_quant { NESTED_BLOCK } else { 1 }
    }

    fn dequantize<T: DequantizedElement>(&self, runs: &RunsView<'_>, start: usize, out: &mut [T]) {
        let (table, codes) = (self.codes.table(), runs.bytes(RunMeaning::Codes));
        let scale = block_scales(runs, self.double_quant);
        let (mut block, within) = (start / self.block_size, start % self.block_size);
        let first = (self.block_size - within).min(out.len());
        let (head, rest) = out.split_at_mut(first);
        let mut at = start;
        for part in [head].into_iter().chain(rest.chunks_mut(self.block_size)).filter(|part| !part.is_empty())
        {
            C::dequantize(table, codes, at, scale(block), part);
            at += part.len();
            block += 1;
        }
    }

    fn fill(&self, n: usize, read: ReadValues<'_>, to: &mut RunsViewMut<'_>) -> Result<()> {
        let (piece, mut scales) = (self.piece(), vec![0f32; self.blocks(n)]);
        let codes =
            to.bytes_mut(RunMeaning::Codes)[..self.code_bytes(n)].par_chunks_mut(self.code_bytes(piece));
        let pieces = codes.zip(scales.par_chunks_mut(self.blocks(piece))).enumerate();
        let failed = pieces.map_init(
            || vec![0f32; piece.min(n)],
            |values, (i, (codes, scales))| {
                let start = i * piece;
                let values = &mut values[..piece.min(n - start)];
                read(start, values)?;
                self.codes.quantize(self.block_size, values, codes, scales);
                Ok(())
            },
        );
        if let Some(failed) = failed.find_first(Result::is_err) {
            return failed;
        }
        if self.double_quant {
            let mut outer = vec![0f32; scales.len().div_ceil(NESTED_BLOCK)];
            *to.offset = nest(&scales, to.bytes_mut(RunMeaning::ScaleCodes), &mut outer);
            to.floats_mut(RunMeaning::NestedScales).copy_from_slice(&outer);
        } else {
            to.floats_mut(RunMeaning::Scales).copy_from_slice(&scales);
        }
        Ok(())
    }

    fn hint(&self) -> ProductHint {
        let (block_size, table) = (self.block_size, self.codes.table());
        ProductHint { block_size, bits: C::BITS, table, divisor: C::DIVISOR, kernel: C::KERNEL }
    }
}

/// Values and codes of each block, for codes of a byte each.
pub(super) fn blocks_of<'a>(
    block_size: usize,
    values: &'a [f32],
    codes: &'a mut [u8],
) -> impl Iterator<Item = (&'a [f32], &'a mut [u8])> {
    values.chunks(block_size).zip(codes.chunks_mut(block_size))
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::quant::{QuantBuffer, QuantFormat, QuantTensor};
    use crate::recipe::enums::QuantKind;

    #[test]
    fn runs_of_a_short_last_block() {
        let sizes = |kind, double_quant| {
            let runs = QuantFormat::of_kind(kind, 64, double_quant).scheme().runs(64 * 300 + 1);
            runs.iter().map(|run| (run.elements, run.bytes())).collect::<Vec<_>>()
        };
        assert_eq!(sizes(QuantKind::Nf4, false), [(9601, 9601), (301, 1204)]);
        assert_eq!(sizes(QuantKind::Nf4, true), [(9601, 9601), (301, 301), (2, 8)]);
        assert_eq!(sizes(QuantKind::Int8, false), [(19201, 19201), (301, 1204)]);
    }

    /// Covers every kind of code, blocks that are no multiple of a vector, parts with arbitrary
    /// bounds, and scales that are not finite, are below 2⁻¹²⁶ or cause ties.
    #[test]
    fn bf16_is_f32_rounded() {
        let scales = [0.731, f32::INFINITY, f32::NAN, -3.0, 0.0, 1e-39, 1.0 + 2f32.powi(-8), 3e38];
        let blockwise =
            |size| QuantKind::ALL.iter().map(move |kind| QuantFormat::of_kind(*kind, size, false));
        let of_size =
            |size| blockwise(size).chain([QuantFormat::int8_rows(size)]).map(move |format| (format, size));
        for (format, block_size) in [64, 70, 256].into_iter().flat_map(of_size) {
            let n = scales.len() * block_size;
            let codes: Vec<u8> = (0..n).map(|i| (i * 167 + i / 256) as u8).collect();
            let (codes, scales) = ([(RunMeaning::Codes, &codes[..])], [(RunMeaning::Scales, &scales[..])]);
            let view = QuantTensor { format, runs: RunsView::new(codes, scales, 0.0) };
            for (start, len) in [(0, n), (0, 0), (n, 0), (1, 1), (63, 2), (5, n - 5), (64, 64), (3, 130)] {
                let (mut wide, mut narrow) = (vec![0f32; len], vec![bf16::ONE; len]);
                view.dequantize(start, &mut wide);
                view.dequantize(start, &mut narrow);
                for (i, (wide, narrow)) in wide.iter().zip(&narrow).enumerate() {
                    let want = bf16::from_f32(*wide);
                    assert_eq!(want.to_bits(), narrow.to_bits(), "{format:?} {start}+{i}: {wide}");
                }
            }
        }
    }

    /// Parts of a tensor equal the whole, in its own memory and alone.
    #[test]
    fn parts_are_those_of_the_whole() -> Result<()> {
        let n = 40_000;
        let values: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
        for double_quant in [false, true] {
            let format = QuantFormat::of_kind(QuantKind::Nf4, 64, double_quant);
            let tensor = QuantBuffer::new(format, n, &|start, out| {
                out.copy_from_slice(&values[start..start + out.len()]);
                Ok(())
            })?;
            let (runs, mut whole) = (format.scheme().runs(n), vec![0f32; n]);
            tensor.view().dequantize(0, &mut whole);
            assert!(values.iter().zip(&whole).all(|(value, got)| (value - got).abs() < 0.16));
            for (start, len) in [(0, 1), (1, 63), (63, 3), (64, 64), (129, 400), (16_390, 20_000), (n - 1, 1)]
            {
                let mut out = vec![0f32; len];
                tensor.view().dequantize(start, &mut out);
                assert_eq!(out, whole[start..start + len]);
                let (first, ranges) = format.scheme().part(start..start + len);
                let parts = || runs.iter().map(|run| run.meaning).zip(ranges.clone());
                let view = tensor.view();
                let bytes = parts().filter_map(|(run, range)| Some((run, view.runs.bytes(run).get(range)?)));
                let floats =
                    parts().filter_map(|(run, range)| Some((run, view.runs.floats(run).get(range)?)));
                let part = QuantTensor { format, runs: RunsView::new(bytes, floats, view.runs.offset) };
                part.dequantize(start - first, &mut out);
                assert_eq!(out, whole[start..start + len], "{start} {len} {double_quant}");
            }
        }
        Ok(())
    }
}
