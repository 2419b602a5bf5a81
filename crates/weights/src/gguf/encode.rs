//! Encodes values as the bytes of a [`BlockType`]: alone, or over the bytes of earlier values.
//!
//! candle rounds the blocks; its types equal ggml's to the byte, and so do its q8_0 and q4_0. The
//! k-quants use candle's scale search for importance matrices, with all importances equal. On
//! heavy-tailed noise its error is within 1 % of ggml's (the plain search: 2 % for q6_K). `quant`
//! rounds the types that candle does not have. All threads convert rows.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use crate::error::{Error, ErrorContext, Result};
use crate::quant::{self, BlockType};

/// Elements per task, unless a row is longer.
const TASK: usize = 1 << 15;

/// Returns the bytes of `values`, which are whole rows of `row` elements of the tensor `name`.
///
/// # Errors
/// User: a value is not finite, or too large for f16. Internal: `kind` is MXFP4, and the values are
/// none of its blocks.
pub fn encode_blocks(name: &str, values: &[f32], row: usize, kind: BlockType) -> Result<Vec<u8>> {
    let rows = (TASK / row.max(1)).max(1) * row.max(1);
    let part = |values: &[f32]| {
        let hint = "write `--type bf16` or `--type f32`";
        match kind {
            BlockType::MXFP4 => check_finite(name, values, kind).and_then(|()| mxfp4_blocks(values)),
            _ => rounded((name, hint), values, row, kind),
        }
    };
    let parts: Result<Vec<Vec<u8>>> = values.par_chunks(rows).map(part).collect();
    Ok(parts?.concat())
}

/// Returns the bytes of new values of the tensor `name`, or of a part of it, over its bytes
/// `stored`. Each block keeps its scales unless those of the new values have a smaller squared
/// error, so a block whose values did not change keeps its bytes.
///
/// # Errors
/// User: a value is not finite, or too large for f16.
pub(super) fn requantize(name: &str, values: &[f32], kind: BlockType, stored: &[u8]) -> Result<Vec<u8>> {
    let hint = "merge without `--requantize`";
    let bytes = TASK / kind.elements() * kind.bytes();
    let part = |(values, stored): (&[f32], &[u8])| {
        let fresh = rounded((name, hint), values, kind.elements(), kind)?;
        Ok(if kind.is_quantized() { kind.choose_blocks(stored, fresh, values) } else { fresh })
    };
    let parts: Result<Vec<Vec<u8>>> =
        values.par_chunks(TASK).zip(stored.par_chunks(bytes)).map(part).collect();
    Ok(parts?.concat())
}

/// Rounds rows of `row` elements of a tensor with this name; the hint is for numbers that are too
/// large.
fn rounded((name, hint): (&str, &str), values: &[f32], row: usize, kind: BlockType) -> Result<Vec<u8>> {
    check_finite(name, values, kind)?;
    match kind {
        BlockType::F32 => Ok(values.iter().flat_map(|value| value.to_le_bytes()).collect()),
        BlockType::BF16 => Ok(values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect()),
        BlockType::F16 => {
            if let Some(value) = values.iter().find(|value| f16::from_f32(**value).is_infinite()) {
                return Err(refused(name, kind)
                    .because(format!("it holds {value}; the largest number of f16 is 65504"))
                    .hint(hint));
            }
            Ok(values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect())
        }
        _ => match kind.search_blocks(values) {
            Some(blocks) => Ok(blocks),
            None => quantize(values, row, kind).during(|| format!("cannot store tensor `{name}` as {kind}")),
        },
    }
}

fn refused(name: &str, kind: BlockType) -> Error {
    Error::user(format!("cannot store tensor `{name}` as {kind}"))
}

fn check_finite(name: &str, values: &[f32], kind: BlockType) -> Result<()> {
    match quant::first_not_finite(values) {
        None => Ok(()),
        Some(at) => Err(refused(name, kind)
            .because(format!("it holds {}; accepted: finite numbers", values[at]))
            .hint("give an earlier checkpoint of that run")),
    }
}

fn quantize(values: &[f32], row: usize, kind: BlockType) -> Result<Vec<u8>> {
    let rows = Tensor::from_slice(values, (values.len() / row, row), &Device::Cpu)?;
    let blocks = if kind.elements() > 32 {
        QTensor::quantize_imatrix(&rows, &vec![1.0; row], ggml(kind)?)?
    } else {
        QTensor::quantize(&rows, ggml(kind)?)?
    };
    Ok(blocks.data()?.into_owned())
}

/// The magnitudes of e2m1, doubled, by their codes.
const E2M1: [f32; 8] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0];

/// Returns the blocks of MXFP4 that have exactly these values.
///
/// # Errors
/// Internal: no such blocks exist.
fn mxfp4_blocks(values: &[f32]) -> Result<Vec<u8>> {
    let blocks: Result<Vec<Vec<u8>>> = values.chunks(BlockType::MXFP4.elements()).map(mxfp4_block).collect();
    Ok(blocks?.concat())
}

fn mxfp4_block(values: &[f32]) -> Result<Vec<u8>> {
    let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    let codes_by = |unit: f32| -> Option<Vec<u8>> {
        let code = |value: &f32| {
            let magnitude = E2M1.iter().position(|code| code * unit == value.abs())? as u8;
            Some(if *value < 0.0 { magnitude | 8 } else { magnitude })
        };
        values.iter().map(code).collect()
    };
    // The unit is half the scale: 2^(e - 128).
    let units = (0..=254u8).map(|e| (e, (f64::from(e) - 128.0).exp2() as f32));
    let fits = |unit: &f32| largest == 0.0 || (1.0..=12.0).contains(&(largest / unit));
    let best = units.filter(|(_, unit)| fits(unit)).find_map(|(e, unit)| Some((e, codes_by(unit)?)));
    let (e, codes) =
        best.ok_or_else(|| Error::internal("values of a checkpoint in MXFP4 are no block of it"))?;
    let (low, high) = codes.split_at(codes.len() / 2);
    let bytes = low.iter().zip(high).map(|(low, high)| low | high << 4);
    Ok(std::iter::once(e).chain(bytes).collect())
}

/// Returns the same type in candle, which has not all.
fn ggml(kind: BlockType) -> Result<GgmlDType> {
    Ok(match kind {
        BlockType::Q4_0 => GgmlDType::Q4_0,
        BlockType::Q4_1 => GgmlDType::Q4_1,
        BlockType::Q5_0 => GgmlDType::Q5_0,
        BlockType::Q5_1 => GgmlDType::Q5_1,
        BlockType::Q8_0 => GgmlDType::Q8_0,
        BlockType::Q2K => GgmlDType::Q2K,
        BlockType::Q3K => GgmlDType::Q3K,
        BlockType::Q4K => GgmlDType::Q4K,
        BlockType::Q5K => GgmlDType::Q5K,
        BlockType::Q6K => GgmlDType::Q6K,
        other => return Err(Error::internal(format!("candle has no blocks of {other}"))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From a block's definition in ggml-common.h: d = amax / 127 as f16, then 32 signed bytes.
    #[test]
    fn a_block_of_q8_0_by_hand() {
        let mut values = [0.0; 32];
        (values[0], values[1], values[2]) = (-127.0, 63.5, 1.0);
        let mut wanted = f16::ONE.to_le_bytes().to_vec();
        wanted.extend([-127i8, 64, 1].map(|q| q as u8));
        wanted.resize(34, 0);
        assert_eq!(encode_blocks("t", &values, 32, BlockType::Q8_0).expect("finite"), wanted);
    }

    /// d = (value of largest magnitude) / -8 as f16; element i in the low half of byte i, i + 16 in
    /// the high half.
    #[test]
    fn a_block_of_q4_0_by_hand() {
        let mut values = [0.0; 32];
        (values[0], values[16], values[31]) = (-8.0, 7.0, -3.0);
        let mut wanted = f16::ONE.to_le_bytes().to_vec();
        wanted.push(15 << 4);
        wanted.resize(17, 8 | 8 << 4);
        wanted.push(8 | 5 << 4);
        assert_eq!(encode_blocks("t", &values, 32, BlockType::Q4_0).expect("finite"), wanted);
    }

    /// Each scale that f32 has without loss, with each code.
    #[test]
    fn blocks_of_mxfp4_keep_their_values() {
        for e in [1u8, 60, 127, 128, 200, 250] {
            let block: Vec<u8> = std::iter::once(e).chain((0..16).map(|i| i | (15 - i) << 4)).collect();
            let mut values = [0f32; 32];
            BlockType::MXFP4.dequantize(&block, &mut values);
            let bytes = encode_blocks("t", &values, 32, BlockType::MXFP4).expect("values of a block");
            let mut again = [1f32; 32];
            BlockType::MXFP4.dequantize(&bytes, &mut again);
            assert_eq!(values, again, "{e}");
        }
        let zeros = encode_blocks("t", &[0.0; 32], 32, BlockType::MXFP4).expect("zeros");
        assert!(zeros[1..].iter().all(|byte| *byte == 0));
        let mut other = [0.0; 32];
        (other[0], other[1]) = (1.0, 0.3);
        assert!(encode_blocks("t", &other, 32, BlockType::MXFP4).is_err());
    }

    #[test]
    fn numbers_that_do_not_fit_are_refused() {
        for (value, kind) in
            [(f32::NAN, BlockType::F32), (f32::INFINITY, BlockType::Q4K), (65520.0, BlockType::F16)]
        {
            let mut values = vec![0.5; 256];
            values[200] = value;
            assert!(encode_blocks("t", &values, 256, kind).is_err(), "{value} {kind}");
        }
        assert!(encode_blocks("t", &[65504.0, -65504.0], 1, BlockType::F16).is_ok());
    }

    fn decoded(kind: BlockType, bytes: &[u8]) -> Vec<f32> {
        let mut values = vec![0.0; bytes.len() / kind.bytes() * kind.elements()];
        kind.dequantize(bytes, &mut values);
        values
    }

    /// All types but MXFP4, which exports only copy.
    fn kinds() -> impl Iterator<Item = BlockType> {
        BlockType::ALL.into_iter().filter(|kind| *kind != BlockType::MXFP4)
    }

    /// Rows of equal values, or of zeros, are special cases of each scale search.
    #[test]
    fn constant_rows_keep_their_value() {
        for kind in kinds() {
            for value in [0.0f32, 0.75, -0.75] {
                let bytes = encode_blocks("t", &[value; 512], 512, kind).expect("finite");
                let values = decoded(kind, &bytes);
                assert!(
                    values.iter().all(|decoded| (decoded - value).abs() < 0.02),
                    "{kind} {value}: {:?}",
                    &values[..4]
                );
            }
        }
    }

    fn noise(count: usize) -> Vec<f32> {
        (0..count).map(|i| ((i as f32 * 0.913).sin() + (i as f32 * 0.077).cos()) * 0.05).collect()
    }

    fn error(values: &[f32], wanted: &[f32]) -> f64 {
        values.iter().zip(wanted).map(|(a, b)| f64::from(a - b).powi(2)).sum()
    }

    /// The root of the mean squared error, as a share of that of the values, is at most about the
    /// one of the widths of the codes.
    #[test]
    fn every_type_is_near_the_values() {
        let values = noise(4096);
        let all = error(&values, &vec![0.0; values.len()]);
        for (kind, most) in [
            (BlockType::F32, 0.0),
            (BlockType::F16, 0.0005),
            (BlockType::BF16, 0.004),
            (BlockType::Q8_0, 0.01),
            (BlockType::Q6K, 0.02),
            (BlockType::Q5K, 0.04),
            (BlockType::Q5_0, 0.05),
            (BlockType::Q5_1, 0.05),
            (BlockType::Q4K, 0.08),
            (BlockType::Q4_0, 0.1),
            (BlockType::Q4_1, 0.1),
            (BlockType::IQ4NL, 0.1),
            (BlockType::IQ4XS, 0.1),
            (BlockType::Q3K, 0.17),
            (BlockType::Q2K, 0.32),
        ] {
            let bytes = encode_blocks("t", &values, 512, kind).expect("finite");
            let share = (error(&decoded(kind, &bytes), &values) / all).sqrt();
            assert!(share <= most, "{kind}: {share}");
        }
    }

    fn fresh(kind: BlockType, values: &[f32]) -> Vec<u8> {
        rounded(("t", ""), values, 512, kind).expect("finite")
    }

    /// Values of the blocks keep every byte; others are at least as near as with old scales or new
    /// ones.
    #[test]
    fn blocks_change_with_their_values_alone() {
        let values = noise(4096);
        for kind in BlockType::ALL {
            let stored = fresh(kind, &values);
            let old = decoded(kind, &stored);
            assert!(requantize("t", &old, kind, &stored).expect("finite") == stored, "{kind}");
            for growth in [1.0f32, 3.0] {
                let mut wanted = old.clone();
                for (i, value) in wanted[256..512].iter_mut().enumerate() {
                    *value = *value * growth + (i as f32 * 1.7).sin() * 0.02;
                }
                let bytes = requantize("t", &wanted, kind, &stored).expect("finite");
                let new = decoded(kind, &bytes);
                let changed = 256 / kind.elements() * kind.bytes();
                assert!(bytes[..changed] == stored[..changed], "{kind}");
                assert!(bytes[2 * changed..] == stored[2 * changed..], "{kind}");
                let fresh = decoded(kind, &fresh(kind, &wanted));
                let [ours, other] =
                    [&new, &fresh].map(|encoded| error(&encoded[256..512], &wanted[256..512]));
                assert!(ours <= other && (ours < error(&old, &wanted) || ours == 0.0), "{kind}: {ours}");
            }
        }
        let mut wrong = vec![0.5f32; 256];
        wrong[7] = f32::NAN;
        assert!(requantize("t", &wrong, BlockType::Q8_0, &[0; 272]).is_err());
    }
}
