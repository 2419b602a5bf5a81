//! Encodes values as the bytes of a [`BlockType`].
//!
//! candle rounds the blocks; its types equal ggml's to the byte, and so do its q8_0 and q4_0. The
//! k-quants use candle's scale search for importance matrices, with all importances equal. On
//! heavy-tailed noise its error is within 1 % of ggml's (the plain search: 2 % for q6_K). All
//! threads convert rows.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use crate::error::{Error, ErrorContext, Result};
use crate::quant::BlockType;

/// Elements per task, unless a row is longer.
const TASK: usize = 1 << 15;

/// Returns the bytes of `values`, which are whole rows of `row` elements of the tensor `name`.
///
/// # Errors
/// User: a value is not finite, or too large for f16.
pub(super) fn encode(name: &str, values: &[f32], row: usize, kind: BlockType) -> Result<Vec<u8>> {
    let rows = (TASK / row.max(1)).max(1) * row.max(1);
    let parts: Result<Vec<Vec<u8>>> =
        values.par_chunks(rows).map(|part| task(name, part, row, kind)).collect();
    Ok(parts?.concat())
}

fn task(name: &str, values: &[f32], row: usize, kind: BlockType) -> Result<Vec<u8>> {
    let refused = || Error::user(format!("cannot store tensor `{name}` as {kind}"));
    if let Some(value) = values.iter().find(|value| !value.is_finite()) {
        return Err(refused()
            .because(format!("it holds {value}; accepted: finite numbers"))
            .hint("give an earlier checkpoint of that run"));
    }
    match kind {
        BlockType::F32 => Ok(values.iter().flat_map(|value| value.to_le_bytes()).collect()),
        BlockType::BF16 => Ok(values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect()),
        BlockType::F16 => {
            if let Some(value) = values.iter().find(|value| f16::from_f32(**value).is_infinite()) {
                return Err(refused()
                    .because(format!("it holds {value}; the largest number of f16 is 65504"))
                    .hint("write `--type bf16` or `--type f32`"));
            }
            Ok(values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect())
        }
        BlockType::MXFP4 => {
            values.chunks(kind.elements()).map(mxfp4).collect::<Result<Vec<_>>>().map(|all| all.concat())
        }
        _ => quantize(values, row, kind).during(|| format!("cannot store tensor `{name}` as {kind}")),
    }
}

fn quantize(values: &[f32], row: usize, kind: BlockType) -> Result<Vec<u8>> {
    let rows = Tensor::from_slice(values, (values.len() / row, row), &Device::Cpu)?;
    let blocks = match kind {
        BlockType::Q4K | BlockType::Q5K | BlockType::Q6K => {
            QTensor::quantize_imatrix(&rows, &vec![1.0; row], ggml(kind)?)?
        }
        _ => QTensor::quantize(&rows, ggml(kind)?)?,
    };
    Ok(blocks.data()?.into_owned())
}

/// The magnitudes of e2m1, doubled, by their codes.
const E2M1: [f32; 8] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0];

/// Returns the block of 32 values that are those of a block in MXFP4.
///
/// # Errors
/// Internal: they are not.
fn mxfp4(values: &[f32]) -> Result<Vec<u8>> {
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
    let found = units.filter(|(_, unit)| fits(unit)).find_map(|(e, unit)| Some((e, codes_by(unit)?)));
    let (e, codes) =
        found.ok_or_else(|| Error::internal("values of a checkpoint in MXFP4 are no block of it"))?;
    let (low, high) = codes.split_at(codes.len() / 2);
    let bytes = low.iter().zip(high).map(|(low, high)| low | high << 4);
    Ok(std::iter::once(e).chain(bytes).collect())
}

/// Returns the same type in candle, which has not all.
fn ggml(kind: BlockType) -> Result<GgmlDType> {
    Ok(match kind {
        BlockType::Q4_0 => GgmlDType::Q4_0,
        BlockType::Q5_0 => GgmlDType::Q5_0,
        BlockType::Q5_1 => GgmlDType::Q5_1,
        BlockType::Q8_0 => GgmlDType::Q8_0,
        BlockType::Q4K => GgmlDType::Q4K,
        BlockType::Q5K => GgmlDType::Q5K,
        BlockType::Q6K => GgmlDType::Q6K,
        other => return Err(Error::internal(format!("no export writes blocks of {other}"))),
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
        assert_eq!(encode("t", &values, 32, BlockType::Q8_0).expect("finite"), wanted);
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
        assert_eq!(encode("t", &values, 32, BlockType::Q4_0).expect("finite"), wanted);
    }

    /// Each scale that f32 has without loss, with each code.
    #[test]
    fn blocks_of_mxfp4_keep_their_values() {
        for e in [1u8, 60, 127, 128, 200, 250] {
            let block: Vec<u8> = std::iter::once(e).chain((0..16).map(|i| i | (15 - i) << 4)).collect();
            let mut values = [0f32; 32];
            BlockType::MXFP4.dequantize(&block, &mut values);
            let bytes = encode("t", &values, 32, BlockType::MXFP4).expect("values of a block");
            let mut again = [1f32; 32];
            BlockType::MXFP4.dequantize(&bytes, &mut again);
            assert_eq!(values, again, "{e}");
        }
        let zeros = encode("t", &[0.0; 32], 32, BlockType::MXFP4).expect("zeros");
        assert!(zeros[1..].iter().all(|byte| *byte == 0));
        let mut other = [0.0; 32];
        (other[0], other[1]) = (1.0, 0.3);
        assert!(encode("t", &other, 32, BlockType::MXFP4).is_err());
    }

    #[test]
    fn numbers_that_do_not_fit_are_refused() {
        for (value, kind) in
            [(f32::NAN, BlockType::F32), (f32::INFINITY, BlockType::Q4K), (65520.0, BlockType::F16)]
        {
            let mut values = vec![0.5; 256];
            values[200] = value;
            assert!(encode("t", &values, 256, kind).is_err(), "{value} {kind}");
        }
        assert!(encode("t", &[65504.0, -65504.0], 1, BlockType::F16).is_ok());
    }

    /// Rows of equal values, or of zeros, are special cases of each scale search.
    #[test]
    fn constant_rows_keep_their_value() {
        for kind in [BlockType::Q4K, BlockType::Q5K, BlockType::Q6K, BlockType::Q5_0, BlockType::Q5_1] {
            for value in [0.0f32, 0.75, -0.75] {
                let bytes = encode("t", &[value; 512], 512, kind).expect("finite");
                let device = Device::Cpu;
                let storage = candle_core::quantized::QStorage::from_data(
                    bytes.into(),
                    &device,
                    ggml(kind).expect("known"),
                )
                .expect("whole blocks");
                let blocks = QTensor::new(storage, 512).expect("one row");
                let values: Vec<f32> =
                    blocks.dequantize(&device).expect("on the CPU").to_vec1().expect("f32");
                assert!(
                    values.iter().all(|found| (found - value).abs() < 0.02),
                    "{kind} {value}: {:?}",
                    &values[..4]
                );
            }
        }
    }
}
