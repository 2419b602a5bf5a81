//! Checkpoints of GPTQ (AutoGPTQ, GPTQModel).
//!
//! A linear layer `X` is stored as `X.qweight` (words of 32 bits along its inputs, transposed),
//! `X.scales` (a row for each group of inputs), `X.qzeros` (words along its outputs) and `X.g_idx`,
//! the group of each input. Groups are those of `g_idx` and not consecutive inputs: with `desc_act`
//! inputs are grouped by their importance. A `g_idx` of zeros alone is a placeholder if there are
//! several groups. Version 1 stores zeros less one, subtracted from whole words: a zero of 0
//! borrows from the next.

use serde_json::Value;

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
const GROUPS: &str = ".g_idx";

/// The format "gptq".
pub(super) struct Gptq;

/// The settings that all weights share.
#[derive(Clone, Copy)]
struct Packing {
    bits: usize,
    /// `None` if all inputs are one group.
    group_size: Option<usize>,
    desc_act: bool,
    zero_offset: u8,
}

impl CheckpointFormat for Gptq {
    fn method(&self) -> &'static str {
        "gptq"
    }

    fn owner(&self, name: &str) -> Option<String> {
        weight_before(&[CODES, SCALES, ZEROS, GROUPS], name)
    }

    fn reader(&self, settings: &Settings) -> Result<ReadWeight> {
        let packing = packing(settings)?;
        Ok(Box::new(move |weight| read(weight, packing)))
    }
}

fn packing(settings: &Settings) -> Result<Packing> {
    let bits = setting(settings, &["bits"], "4, 8")?;
    if ![4, 8].contains(&bits) {
        return Err(refused("bits", bits, "4, 8"));
    }
    // GPTQModel has a second name for it.
    let version = name_in(settings, &["checkpoint_format", "format"], &["gptq", "gptq_v2"])?;
    let zero_offset = u8::from(version != Some("gptq_v2"));
    name_in(settings, &["pack_dtype"], &["int32"])?;
    // Settings of single modules, by patterns of their names.
    let patterns = settings.get("dynamic").and_then(Value::as_object).into_iter().flatten();
    if let Some((pattern, settings)) = patterns.into_iter().find(|(pattern, _)| !pattern.starts_with("-:")) {
        let value = format!("{settings} for \"{pattern}\"");
        return Err(refused("dynamic", value, "patterns of modules that are not quantized (\"-:\")"));
    }
    let desc_act = setting::<Option<bool>>(settings, &["desc_act"], "true, false")?.unwrap_or_default();
    Ok(Packing { bits, group_size: group_size(settings, &["group_size"])?, desc_act, zero_offset })
}

/// Returns the number of inputs of a group, the first of `keys` that is present; `None` for -1: all
/// inputs.
///
/// # Errors
/// User: another number that is not above 0.
pub(super) fn group_size(settings: &Settings, keys: &[&str]) -> Result<Option<usize>> {
    const ACCEPTED: &str = "-1, or a number from 1";
    let size: i64 = setting(settings, keys, ACCEPTED)?;
    match usize::try_from(size) {
        Ok(size) if size > 0 => Ok(Some(size)),
        _ if size == -1 => Ok(None),
        _ => Err(refused(keys[0], size, ACCEPTED)),
    }
}

fn read(weight: &StoredWeight<'_, '_>, packing: Packing) -> Result<(TensorInfo, StoredParts), String> {
    let Packing { bits, group_size, desc_act, zero_offset } = packing;
    let codes = weight.words(CODES)?;
    let in_word = 32 / bits;
    let (columns, rows) = (codes.shape[0].saturating_mul(in_word), codes.shape[1]);
    let column_block = group_size.unwrap_or(columns).max(1);
    let groups = columns.div_ceil(column_block);
    if !rows.is_multiple_of(in_word) {
        return Err(format!("qweight has {rows} columns; accepted: multiples of {in_word}"));
    }
    let [scales, zeros] = [weight.required(SCALES)?, weight.required(ZEROS)?];
    expect("scales", scales, scales.dtype, Some(&[groups, rows]))?;
    expect("qzeros", zeros, StoredDtype::I32, Some(&[groups, rows / in_word]))?;
    if desc_act && weight.of_module(GROUPS).is_none() {
        return Err("g_idx, the groups of its inputs, is missing although `desc_act` is true".into());
    }
    let is_placeholder = |indices: &[i32]| groups > 1 && indices.iter().all(|index| *index == 0);
    let indices = weight.groups(GROUPS, [columns, groups], is_placeholder)?;
    let format = PackedFormat {
        codes: CodeLayout::ColumnWords,
        bits,
        rows,
        columns,
        row_block: 1,
        column_block,
        groups,
        scales: scale_dtype("scales", scales)?,
        zero_offset,
    };
    let name = if bits == 4 { "gptq int4" } else { "gptq int8" };
    weight.packed(name, format, codes, [Some(scales), Some(zeros), indices])
}
