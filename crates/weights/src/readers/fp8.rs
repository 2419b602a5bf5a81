//! Checkpoints in FP8 (`quant_method` "fp8": DeepSeek, Qwen, Mistral): `X.weight` in e4m3 with a
//! scale for each block or row of the matrix, or one for all, in `X.weight_scale_inv`. In spite of
//! its name the scale is a factor. `X.input_scale` and `X.activation_scale` are for activations and
//! are not used.

use super::reader::{
    CheckpointFormat, ReadWeight, Settings, StoredWeight, expect, name_in, refused, scale_dtype, setting,
    weight_before,
};
use crate::error::Result;
use crate::quant::{CodeLayout, PackedFormat};
use crate::stored_parts::StoredParts;
use crate::{StoredDtype, TensorInfo};

const SCALES: [&str; 2] = [".weight_scale_inv", ".weight_scale"];
const OWNED: [&str; 4] = [SCALES[0], SCALES[1], ".input_scale", ".activation_scale"];
/// The block size of transformers if config.json names none.
const BLOCK: [usize; 2] = [128, 128];

/// The format "fp8".
pub(super) struct Fp8;

impl CheckpointFormat for Fp8 {
    fn method(&self) -> &'static str {
        "fp8"
    }

    fn owner(&self, name: &str) -> Option<String> {
        weight_before(&OWNED, name)
    }

    fn is_codes(&self, dtype: StoredDtype) -> bool {
        dtype == StoredDtype::F8E4M3
    }

    fn reader(&self, settings: &Settings) -> Result<ReadWeight> {
        name_in(settings, &["fmt"], &["e4m3"])?;
        let (key, accepted) = ("weight_block_size", "null, or two numbers from 1");
        let block: Option<[usize; 2]> = setting(settings, &[key], accepted)?;
        if let Some(block) = block.filter(|block| block.contains(&0)) {
            return Err(refused(key, format!("{block:?}"), accepted));
        }
        Ok(Box::new(move |weight| read(weight, block)))
    }
}

pub(super) fn read(
    weight: &StoredWeight<'_, '_>,
    block: Option<[usize; 2]>,
) -> Result<(TensorInfo, StoredParts), String> {
    let codes = weight.codes()?;
    expect("weight", codes, StoredDtype::F8E4M3, None)?;
    let [rows, columns] = [codes.shape[0], codes.shape[1]];
    let name_and_scales = SCALES.iter().find_map(|end| Some((&end[1..], weight.of_module(end)?)));
    let (name, scales) = name_and_scales.ok_or("weight_scale_inv, the scales of its blocks, is missing")?;
    let [row_block, column_block] = match block {
        None if scales.elements() == 1 => [rows.max(1), columns.max(1)],
        None if scales.shape == [rows, 1] || scales.shape == [rows] => [1, columns.max(1)],
        block => block.unwrap_or(BLOCK),
    };
    let grid = [rows.div_ceil(row_block), columns.div_ceil(column_block)];
    let by_rows = scales.shape == [rows] && grid == [rows, 1];
    if scales.shape != grid && !by_rows && (scales.elements() != 1 || grid != [1, 1]) {
        let others = if block.is_none() { format!("[1], [{rows}, 1], or ") } else { String::new() };
        return Err(format!(
            "{name} has shape {:?}; accepted: {others}{grid:?}, one scale for each block of {row_block} by {column_block}",
            scales.shape
        ));
    }
    let format = PackedFormat {
        codes: CodeLayout::E4m3,
        bits: 8,
        rows,
        columns,
        row_block,
        column_block,
        groups: grid[1],
        scales: scale_dtype(name, scales)?,
        zero_offset: 0,
    };
    weight.packed("fp8", format, codes, [Some(scales), None, None])
}
