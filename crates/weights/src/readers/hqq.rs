//! Checkpoints of HQQ in 4 and 8 bits with groups along the inputs (`axis` 1), as transformers
//! saves them.
//!
//! A linear layer `X` is stored as `X.W_q`, codes of all groups of the flattened weight, `X.scale`
//! and `X.zero`, a number for each group, and `X.shape`. In 4 bits the high halves of the bytes
//! hold the first half of the groups. The other companions are settings of the layer; bits, group
//! size and axis follow from the shapes.

use super::reader::{
    CheckpointFormat, ReadWeight, Settings, StoredWeight, Tensors, expect, scale_dtype, weight_before,
};
use crate::error::Result;
use crate::quant::{CodeLayout, PackedFormat};
use crate::stored_parts::StoredParts;
use crate::{StoredDtype, TensorInfo};

const CODES: &str = ".W_q";
const SCALES: &str = ".scale";
const ZEROS: &str = ".zero";
const SHAPE: &str = ".shape";
/// The companions of a layer; the last ones are settings.
const OWNED: [&str; 19] = [
    CODES,
    SCALES,
    ZEROS,
    SHAPE,
    ".axis",
    ".channel_wise",
    ".compute_dtype",
    ".encoded_state_dict",
    ".group_size",
    ".nbits",
    ".offload_meta",
    ".optimize",
    ".packing",
    ".quant_scale",
    ".quant_zero",
    ".round_zero",
    ".stores_quant_config",
    ".unpack_view_dtype",
    ".view_as_float",
];

/// The format "hqq".
pub(super) struct Hqq;

impl CheckpointFormat for Hqq {
    fn method(&self) -> &'static str {
        "hqq"
    }

    fn owner(&self, name: &str) -> Option<String> {
        weight_before(&OWNED, name)
    }

    /// Gemma 4's routers have a `scale` too.
    fn is_quantized(&self, weight: &str, tensors: &Tensors) -> bool {
        let module = weight.trim_end_matches(".weight");
        [CODES, ZEROS].iter().any(|end| tensors.contains_key(&format!("{module}{end}")))
    }

    fn is_telling(&self, name: &str) -> bool {
        name.ends_with(CODES)
    }

    fn is_label(&self, name: &str) -> bool {
        name.ends_with(SHAPE)
    }

    fn reader(&self, _settings: &Settings) -> Result<ReadWeight> {
        Ok(Box::new(read))
    }
}

fn read(weight: &StoredWeight<'_, '_>) -> Result<(TensorInfo, StoredParts), String> {
    if weight.codes().is_ok() {
        return Err("it is stored twice, as weight and as W_q".into());
    }
    let [codes, scales, zeros] = [CODES, SCALES, ZEROS].map(|end| weight.required(end));
    let (codes, scales, zeros) = (codes?, scales?, zeros?);
    // Floats with the bits of several codes have another type.
    expect("W_q", codes, StoredDtype::U8, None)?;
    let [rows, columns] = weight.stored_shape(SHAPE)?;
    let group = codes.shape[1];
    let count = scales.elements();
    if scales.shape != [count, 1] {
        return Err(format!(
            "scale has shape {:?}; accepted: one column, of groups along axis 1",
            scales.shape
        ));
    }
    expect("zero", zeros, scales.dtype, Some(&scales.shape))?;
    let bits = match codes.shape[0] {
        lines if lines == count => 8,
        lines if lines.checked_mul(2) == Some(count) => 4,
        _ => {
            let [wide, narrow] = [[count, group], [count / 2, group]];
            let shape = &codes.shape;
            return Err(format!("W_q has shape {shape:?}; accepted: {wide:?} (8 bits), {narrow:?} (4 bits)"));
        }
    };
    let of_row = columns.checked_div(group).unwrap_or_default();
    if of_row * group != columns || rows.checked_mul(of_row) != Some(count) {
        return Err(format!(
            "shape is [{rows}, {columns}], and scale has {count} groups of {group}; accepted: whole groups in each row"
        ));
    }
    let format = PackedFormat {
        codes: if bits == 4 { CodeLayout::GroupHalves } else { CodeLayout::U8 },
        bits,
        rows,
        columns,
        row_block: 1,
        column_block: group.max(1),
        groups: of_row,
        scales: scale_dtype("scale", scales)?,
        zero_offset: 0,
    };
    let name = if bits == 4 { "hqq int4" } else { "hqq int8" };
    weight.packed(name, format, codes, [Some(scales), Some(zeros), None])
}
