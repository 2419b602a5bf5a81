//! Checkpoints in MXFP4 (`quant_method` "mxfp4": gpt-oss): `X_blocks` of bytes with two values in
//! e2m1, and `X_scales` with an exponent for each 32 values of a row. `X` is the stack of a layer
//! of all experts, `[E, in, out]` before quantization; the blocks hold the rows of `[E, out, in]`.

use super::reader::{CheckpointFormat, ReadWeight, Settings, StoredWeight, expect};
use crate::error::Result;
use crate::quant::{CodeLayout, PackedFormat, ScaleDtype};
use crate::stored_parts::StoredParts;
use crate::{StoredDtype, TensorInfo};

/// Values with a common scale.
const BLOCK: usize = 32;
const ENDS: [&str; 2] = ["_blocks", "_scales"];

/// The format "mxfp4".
pub(super) struct Mxfp4;

impl CheckpointFormat for Mxfp4 {
    fn method(&self) -> &'static str {
        "mxfp4"
    }

    fn owner(&self, name: &str) -> Option<String> {
        let stack = ENDS.iter().find_map(|end| name.strip_suffix(end))?;
        stack.ends_with("_proj").then(|| stack.to_owned())
    }

    fn reader(&self, _settings: &Settings) -> Result<ReadWeight> {
        Ok(Box::new(read))
    }
}

fn read(weight: &StoredWeight<'_, '_>) -> Result<(TensorInfo, StoredParts), String> {
    if weight.tensors.contains_key(weight.name) {
        return Err("it is stored twice, as itself and as blocks".to_owned());
    }
    let [blocks, scales] = ENDS.map(|end| weight.required(end));
    let (blocks, scales) = (blocks?, scales?);
    let &[experts, rows, groups, bytes] = &blocks.shape[..] else {
        return Err(format!("blocks has shape {:?}; accepted: four dimensions", blocks.shape));
    };
    let accepted = [experts, rows, groups, BLOCK / 2];
    if bytes != BLOCK / 2 {
        return Err(format!("blocks has shape {:?}; accepted: {accepted:?}", blocks.shape));
    }
    expect("blocks", blocks, StoredDtype::U8, Some(&accepted))?;
    expect("scales", scales, StoredDtype::U8, Some(&accepted[..3]))?;
    let format = PackedFormat {
        codes: CodeLayout::E2m1,
        bits: 4,
        rows: experts * rows,
        columns: groups * BLOCK,
        row_block: 1,
        column_block: BLOCK,
        groups,
        scales: ScaleDtype::E8m0,
        zero_offset: 0,
    };
    let (info, parts) = weight.packed("mxfp4", format, blocks, [Some(scales), None, None])?;
    Ok((TensorInfo { shape: vec![experts, format.columns, rows], ..info }, parts))
}
