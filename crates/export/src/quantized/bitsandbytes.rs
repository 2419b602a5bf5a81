//! The tensors of bitsandbytes' formats.
//!
//! The names and the JSON text are those of `QuantState.as_dict` (bitsandbytes/functional.py) and
//! of `Linear8bitLt`, the keys of `quantization_config` those of transformers'
//! `BitsAndBytesConfig`.

use half::f16;
use serde_json::{Value, json};

use super::{PIECE, SourceTensor};
use crate::error::{Error, Result};
use crate::quant::{self, BlockCodes, BlockFormat, FourBit, Int8Rows, NESTED_BLOCK};
use crate::weights::readers::BITSANDBYTES;
use crate::weights::{ModelFiles, PlannedFile, StoredDtype, WriteEntry};

/// Longer than any number of a quant_state, in characters.
const LONGEST_NUMBER: usize = 24;

fn tensor(name: String, dtype: StoredDtype, shape: &[usize]) -> PlannedFile {
    PlannedFile::Sized(WriteEntry { name, dtype, shape: shape.into(), stack: None })
}

/// Returns the tensors into which `name` is converted in 4 bits.
pub(super) fn planned_four_bits(
    files: &ModelFiles,
    name: &str,
    format: BlockFormat<FourBit>,
) -> Result<Vec<PlannedFile>> {
    let info = files.require(name)?;
    let sized = |end: &str, dtype, shape: &[usize]| tensor(format!("{name}{end}"), dtype, shape);
    let (n, float, byte) = (info.elements(), StoredDtype::F32, StoredDtype::U8);
    let blocks = format.blocks(n);
    let mut tensors = vec![sized("", byte, &[format.code_bytes(n), 1])];
    if format.double_quant {
        tensors.push(sized(".absmax", byte, &[blocks]));
        tensors.push(sized(".nested_absmax", float, &[blocks.div_ceil(NESTED_BLOCK)]));
        tensors.push(sized(".nested_quant_map", float, &[quant::dynamic_signed().len()]));
    } else {
        tensors.push(sized(".absmax", float, &[blocks]));
    }
    tensors.push(sized(".quant_map", float, &[format.codes.table().len()]));
    let longest = state(format, info.dtype, &info.shape, Some(0.0)).len() + LONGEST_NUMBER;
    tensors.push(PlannedFile::Text(state_name(name, format.codes), longest));
    Ok(tensors)
}

/// Returns the tensors into which `name` is converted in 8 bits.
pub(super) fn planned_rows(files: &ModelFiles, name: &str) -> Result<Vec<PlannedFile>> {
    let info = files.require(name)?;
    let module = |end: &str| name.replace(".weight", end);
    Ok(vec![
        tensor(name.to_owned(), StoredDtype::I8, &info.shape),
        tensor(module(".SCB"), StoredDtype::F32, &info.shape[..1]),
        tensor(module(".weight_format"), StoredDtype::U8, &[]),
    ])
}

/// Quantizes the values, piece by piece, as `prepare` returns them. Writes the codes and returns
/// the scales; `range` describes the accepted values.
fn codes<C: BlockCodes>(
    source: &mut SourceTensor<'_>,
    format: BlockFormat<C>,
    prepare: impl Fn(f32) -> f32,
    range: &str,
) -> Result<Vec<f32>> {
    let (n, name) = (source.files.require(source.name)?.elements(), source.name);
    let piece = (PIECE / format.block_size).max(1) * format.block_size;
    let mut scales = vec![0f32; format.blocks(n)];
    let mut codes = vec![0u8; format.code_bytes(piece.min(n))];
    source.pieces(piece, prepare, range, |start, values, writer| {
        let codes = &mut codes[..format.code_bytes(values.len())];
        let first = start / format.block_size;
        format.quantize(values, codes, &mut scales[first..first + format.blocks(values.len())]);
        writer.write(name, format.code_bytes(start) as u64, codes)
    })?;
    Ok(scales)
}

/// Writes a weight in 4 bits.
pub(super) fn four_bits(source: &mut SourceTensor<'_>, format: BlockFormat<FourBit>) -> Result<()> {
    let info = source.files.require(source.name)?;
    let absmax = codes(source, format, |value| value, "finite numbers")?;
    let mut offset = None;
    if format.double_quant {
        let mut nested = vec![0u8; absmax.len()];
        let mut outer = vec![0f32; absmax.len().div_ceil(NESTED_BLOCK)];
        offset = Some(quant::nest(&absmax, &mut nested, &mut outer));
        source.put(".absmax", &nested)?;
        source.put(".nested_absmax", &le(&outer))?;
        source.put(".nested_quant_map", &le(quant::dynamic_signed()))?;
    } else {
        source.put(".absmax", &le(&absmax))?;
    }
    source.put(".quant_map", &le(format.codes.table()))?;
    let text = state(format, info.dtype, &info.shape, offset);
    source.writer.write(&state_name(source.name, format.codes), 0, text.as_bytes())
}

/// Writes a weight in 8 bits.
pub(super) fn rows(source: &mut SourceTensor<'_>) -> Result<()> {
    let &[_, columns] = source.files.require(source.name)?.shape.as_slice() else {
        return Err(Error::internal(format!("tensor `{}` is no matrix", source.name)));
    };
    let format = BlockFormat { codes: Int8Rows, block_size: columns, double_quant: false };
    let range = "numbers within the range of f16, from which LLM.int8() quantizes";
    // bitsandbytes quantizes from f16, for any stored type of the weights.
    let scales = codes(source, format, |value| f16::from_f32(value).to_f32(), range)?;
    let module = source.module().to_owned();
    source.writer.write(&format!("{module}.SCB"), 0, &le(&scales))?;
    // "row" in bitsandbytes' list of layouts.
    source.writer.write(&format!("{module}.weight_format"), 0, &[0])
}

fn le(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn state_name(weight: &str, kind: FourBit) -> String {
    format!("{weight}.quant_state.bitsandbytes__{}", kind.name())
}

/// Returns the JSON text beside the codes, byte for byte as Python writes it.
fn state(format: BlockFormat<FourBit>, dtype: StoredDtype, shape: &[usize], offset: Option<f32>) -> String {
    // Numbers of other widths are quantized from f32.
    let dtype = dtype.config_name().filter(|_| dtype.size_bytes() <= 4).unwrap_or("float32");
    let mut text = format!(
        "{{\"quant_type\": \"{}\", \"blocksize\": {}, \"dtype\": \"{dtype}\", \"shape\": {shape:?}",
        format.codes.name(),
        format.block_size
    );
    if let Some(offset) = offset {
        text += &format!(
            ", \"nested_blocksize\": {NESTED_BLOCK}, \"nested_dtype\": \"float32\", \"nested_offset\": {}",
            python_float(f64::from(offset))
        );
    }
    text + "}"
}

/// Returns Python's `repr` of a non-negative number.
fn python_float(x: f64) -> String {
    let scientific = format!("{x:e}");
    match scientific.split_once('e').map(|(digits, power)| (digits, power.parse::<i32>())) {
        Some((digits, Ok(power))) if x != 0.0 && !(-4..16).contains(&power) => {
            format!("{digits}e{}{:02}", if power < 0 { '-' } else { '+' }, power.abs())
        }
        _ => format!("{x:?}"),
    }
}

/// Returns the quantization entry of config.json, of 4 bits in a format or of 8 bits. `skip` has
/// whole names, which every version of transformers compares in the same way. A list replaces the
/// default one, so it also has the head.
pub(super) fn settings(
    four: Option<BlockFormat<FourBit>>,
    dtype: StoredDtype,
    skip: Option<&[String]>,
) -> Value {
    // For 8 bits too, config.json has bitsandbytes' defaults of 4 bits.
    let format = four.unwrap_or(BlockFormat { codes: FourBit::Fp4, block_size: 64, double_quant: false });
    let compute = dtype.config_name().filter(|_| four.is_some()).unwrap_or("float32");
    json!({
        "_load_in_4bit": four.is_some(),
        "_load_in_8bit": four.is_none(),
        "bnb_4bit_compute_dtype": compute,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": format.codes.name(),
        "bnb_4bit_use_double_quant": format.double_quant,
        "llm_int8_enable_fp32_cpu_offload": false,
        "llm_int8_has_fp16_weight": false,
        "llm_int8_skip_modules": skip,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": four.is_some(),
        "load_in_8bit": four.is_none(),
        "quant_method": BITSANDBYTES,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_as_python_writes_them() {
        for (x, text) in [
            (0.0, "0.0"),
            (1.0, "1.0"),
            (0.210_155_874_490_737_92, "0.21015587449073792"),
            (0.0001, "0.0001"),
            (0.000_099, "9.9e-05"),
            (1e-7, "1e-07"),
            (1.5e16, "1.5e+16"),
            (123_456_789.0, "123456789.0"),
            (9_007_199_254_740_992.0, "9007199254740992.0"),
        ] {
            assert_eq!(python_float(x), text);
        }
    }
}
