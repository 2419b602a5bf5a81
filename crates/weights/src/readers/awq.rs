//! Checkpoints of AWQ in its version "gemm".
//!
//! A linear layer `X` is stored as `X.qweight` `[in, out / 8]` (words of 32 bits along its outputs,
//! in the order 0, 2, 4, 6, 1, 3, 5, 7, transposed), `X.scales` `[groups, out]` and `X.qzeros`
//! `[groups, out / 8]` in the same order. Other versions have other layouts.

use super::gptq::group_size;
use super::reader::{
    CheckpointFormat, ReadWeight, Settings, StoredWeight, expect, name_in, refused, scale_dtype, setting,
    weight_before,
};
use crate::error::Result;
use crate::quant::{CodeLayout, PackedFormat};
use crate::stored_parts::StoredParts;
use crate::{StoredDtype, TensorInfo};

const CODES: &str = ".qweight";
const SCALES: &str = ".scales";
const ZEROS: &str = ".qzeros";
const BITS: usize = 4;
/// Codes in a word.
const IN_WORD: usize = 32 / BITS;

/// The format "awq".
pub(super) struct Awq;

impl CheckpointFormat for Awq {
    fn method(&self) -> &'static str {
        "awq"
    }

    fn owner(&self, name: &str) -> Option<String> {
        weight_before(&[CODES, SCALES, ZEROS], name)
    }

    fn reader(&self, settings: &Settings) -> Result<ReadWeight> {
        // The second names are AutoAWQ's own.
        let bits: usize = setting(settings, &["bits", "w_bit"], "4")?;
        if bits != BITS {
            return Err(refused("bits", bits, "4"));
        }
        name_in(settings, &["version", "format"], &["gemm"])?;
        // Its layout is another. Other backends are names of kernels.
        if let Some(backend) = settings.get("backend").filter(|backend| *backend == "llm-awq") {
            return Err(refused("backend", backend, "\"autoawq\""));
        }
        if setting::<Option<bool>>(settings, &["zero_point"], "true")? == Some(false) {
            return Err(refused("zero_point", "false", "true"));
        }
        let group_size = group_size(settings, &["group_size", "q_group_size"])?;
        Ok(Box::new(move |weight| read(weight, group_size)))
    }
}

fn read(
    weight: &StoredWeight<'_, '_>,
    group_size: Option<usize>,
) -> Result<(TensorInfo, StoredParts), String> {
    let codes = weight.words(CODES)?;
    let (columns, rows) = (codes.shape[0], codes.shape[1].saturating_mul(IN_WORD));
    let column_block = group_size.unwrap_or(columns).max(1);
    let groups = columns.div_ceil(column_block);
    let [scales, zeros] = [weight.required(SCALES)?, weight.required(ZEROS)?];
    expect("scales", scales, scales.dtype, Some(&[groups, rows]))?;
    expect("qzeros", zeros, StoredDtype::I32, Some(&[groups, rows / IN_WORD]))?;
    let format = PackedFormat {
        codes: CodeLayout::InterleavedWords,
        bits: BITS,
        rows,
        columns,
        row_block: 1,
        column_block,
        groups,
        scales: scale_dtype("scales", scales)?,
        zero_offset: 0,
    };
    weight.packed("awq int4", format, codes, [Some(scales), Some(zeros), None])
}
