//! Checkpoints of compressed-tensors (LLM Compressor): whole numbers in words ("pack-quantized"),
//! in bytes ("int-quantized"), e4m3 ("float-quantized"), and e2m1 ("nvfp4-pack-quantized",
//! "mxfp4-pack-quantized").
//!
//! A linear layer `X` is stored as `X.weight` in bytes, or as `X.weight_packed` and
//! `X.weight_shape`; each with `X.weight_scale`, and optionally `X.weight_zero_point` and
//! `X.weight_g_idx`, the group of each input (-1 in it: not set). Two values in e2m1 share a byte
//! of `X.weight_packed`; their scales are exponents, or numbers in e4m3 that
//! `X.weight_global_scale` divides. The entries of `config_groups` are for classes and patterns of
//! modules, which are not read: type, bits, grid of scales and zeros of a weight follow from its
//! tensors, and must be those of one entry.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::reader::{
    CheckpointFormat, ReadWeight, Settings, StoredWeight, expect, refused, scale_dtype, weight_before,
};
use crate::error::{Error, Result};
use crate::quant::{CodeLayout, PackedFormat, ScaleDtype};
use crate::stored_parts::StoredParts;
use crate::{StoredDtype, TensorInfo};

const WORDS: &str = ".weight_packed";
const SHAPE: &str = ".weight_shape";
const SCALES: &str = ".weight_scale";
const ZEROS: &str = ".weight_zero_point";
const GROUPS: &str = ".weight_g_idx";
const FACTOR: &str = ".weight_global_scale";
/// The companions; the last ones are for activations and are not used.
const OWNED: [&str; 9] =
    [WORDS, SHAPE, SCALES, ZEROS, GROUPS, FACTOR, ".input_scale", ".input_zero_point", ".input_global_scale"];

/// The format "compressed-tensors".
pub(super) struct CompressedTensors;

#[derive(Deserialize)]
struct GroupSettings {
    format: Option<String>,
    weights: Option<WeightSettings>,
}

#[derive(Deserialize)]
struct WeightSettings {
    num_bits: usize,
    r#type: String,
    strategy: String,
    symmetric: bool,
    group_size: Option<i64>,
    block_structure: Option<[usize; 2]>,
    #[serde(default)]
    dynamic: Value,
}

/// The codes of an entry of `config_groups`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Codes {
    Int4,
    Int8,
    Float8,
    Nvfp4,
    Mxfp4,
}

impl Codes {
    fn bits(self) -> usize {
        match self {
            Codes::Int4 | Codes::Nvfp4 | Codes::Mxfp4 => 4,
            Codes::Int8 | Codes::Float8 => 8,
        }
    }

    /// Returns the type of the scales in `info`.
    fn scales(self, info: &TensorInfo) -> Result<ScaleDtype, String> {
        match self {
            Codes::Nvfp4 => Ok(ScaleDtype::E4m3Over),
            Codes::Mxfp4 => Ok(ScaleDtype::E8m0),
            Codes::Int4 | Codes::Int8 | Codes::Float8 => scale_dtype("weight_scale", info),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Codes::Int4 => "compressed-tensors int4",
            Codes::Int8 => "compressed-tensors int8",
            Codes::Float8 => "compressed-tensors fp8",
            Codes::Nvfp4 => "compressed-tensors nvfp4",
            Codes::Mxfp4 => "compressed-tensors mxfp4",
        }
    }
}

/// The weights of one entry of `config_groups`.
#[derive(Debug, Clone, Copy)]
struct Scheme {
    codes: Codes,
    /// Rows and columns of a block with one scale; `None` for all.
    block: [Option<usize>; 2],
    symmetric: bool,
}

impl CheckpointFormat for CompressedTensors {
    fn method(&self) -> &'static str {
        "compressed-tensors"
    }

    fn owner(&self, name: &str) -> Option<String> {
        weight_before(&OWNED, name)
    }

    fn is_label(&self, name: &str) -> bool {
        name.ends_with(SHAPE)
    }

    fn is_codes(&self, dtype: StoredDtype) -> bool {
        matches!(dtype, StoredDtype::F8E4M3 | StoredDtype::I8)
    }

    fn reader(&self, settings: &Settings) -> Result<ReadWeight> {
        let given = |key: &str| settings.get(key).filter(|value| !value.is_null());
        let sparsity = given("sparsity_config")
            .filter(|sparsity| sparsity.get("format").is_some_and(|format| format != "dense"));
        let transform =
            given("transform_config").filter(|rotations| rotations.get("config_groups").is_some());
        let others = [
            ("sparsity_config", sparsity, "null, or the format \"dense\""),
            ("transform_config", transform, "null"),
        ];
        if let Some((key, value, accepted)) =
            others.into_iter().find_map(|(key, value, accepted)| Some((key, value?, accepted)))
        {
            return Err(refused(key, value, accepted));
        }
        let format = given("format").and_then(Value::as_str);
        let groups = given("config_groups").unwrap_or(&Value::Null);
        let groups = BTreeMap::<String, GroupSettings>::deserialize(groups).map_err(|error| {
            Error::user("`quantization_config.config_groups` in config.json is not valid")
                .because(error.to_string())
        })?;
        let mut schemes = Vec::new();
        for (name, GroupSettings { format: own, weights }) in groups {
            if let Some(weights) = weights {
                schemes.push(scheme(&format!("config_groups.{name}"), own.as_deref().or(format), &weights)?);
            }
        }
        Ok(Box::new(move |weight| read(weight, &schemes)))
    }
}

/// Reads the entry `at` of `config_groups`, whose weights have this `format`.
fn scheme(at: &str, format: Option<&str>, weights: &WeightSettings) -> Result<Scheme> {
    let WeightSettings { num_bits, r#type, strategy, symmetric, group_size, block_structure, dynamic } =
        weights;
    let key = |name: &str| format!("{at}.weights.{name}");
    let codes = match (format, r#type.as_str(), num_bits) {
        (Some("pack-quantized"), "int", 4) => Codes::Int4,
        (Some("pack-quantized" | "int-quantized" | "naive-quantized"), "int", 8) => Codes::Int8,
        (Some("float-quantized" | "naive-quantized"), "float", 8) if *symmetric => Codes::Float8,
        (Some("nvfp4-pack-quantized"), "float", 4) if *symmetric => Codes::Nvfp4,
        (Some("mxfp4-pack-quantized"), "float", 4) if *symmetric => Codes::Mxfp4,
        _ => {
            let format = format.map_or("missing".into(), |format| format!("\"{format}\""));
            let symmetric = if *symmetric { "" } else { ", not symmetric" };
            return Err(refused(
                "format",
                format!("{format} with weights of type \"{}\" in {num_bits} bits{symmetric}", r#type),
                "\"pack-quantized\" (int in 4 or 8 bits), \"int-quantized\" (int in 8 bits), \"float-quantized\" (float in 8 bits, symmetric), \"nvfp4-pack-quantized\" or \"mxfp4-pack-quantized\" (float in 4 bits, symmetric)",
            ));
        }
    };
    if *dynamic != Value::Null && *dynamic != Value::Bool(false) {
        return Err(refused(&key("dynamic"), dynamic, "false"));
    }
    let block = match strategy.as_str() {
        "tensor" => [None, None],
        "channel" => [Some(1), None],
        "group" | "tensor_group" => {
            let size = group_size.filter(|size| *size > 0).and_then(|size| usize::try_from(size).ok());
            let given = || group_size.map_or("null".into(), |size| size.to_string());
            [Some(1), Some(size.ok_or_else(|| refused(&key("group_size"), given(), "a number from 1"))?)]
        }
        "block" => {
            let block = block_structure.filter(|block| !block.contains(&0)).map(|block| block.map(Some));
            let given = || block_structure.map_or("null".into(), |block| format!("{block:?}"));
            block.ok_or_else(|| refused(&key("block_structure"), given(), "two numbers from 1"))?
        }
        _ => {
            let accepted = "\"tensor\", \"channel\", \"group\", \"tensor_group\", \"block\"";
            return Err(refused(&key("strategy"), format!("\"{strategy}\""), accepted));
        }
    };
    if !symmetric && !["channel", "group"].contains(&strategy.as_str()) {
        return Err(refused(&key("symmetric"), "false", &format!("true for the strategy \"{strategy}\"")));
    }
    Ok(Scheme { codes, block, symmetric: *symmetric })
}

fn read(weight: &StoredWeight<'_, '_>, schemes: &[Scheme]) -> Result<(TensorInfo, StoredParts), String> {
    let StoredCodes { info, layout, shape: [rows, columns], kind: codes } = codes_of(weight)?;
    let (scales, zeros) = (weight.required(SCALES)?, weight.of_module(ZEROS));
    if codes != Codes::Nvfp4 && weight.of_module(FACTOR).is_some() {
        let name = codes.name();
        return Err(format!("weight_global_scale is present, and it is stored as {name}; accepted: nvfp4"));
    }
    let mut causes = Vec::new();
    for scheme in schemes.iter().filter(|scheme| scheme.codes == codes) {
        let [row_block, column_block] = [(scheme.block[0], rows), (scheme.block[1], columns)]
            .map(|(block, all)| block.unwrap_or(all).max(1));
        let grid = [rows.div_ceil(row_block), columns.div_ceil(column_block)];
        let same = scales.shape == grid || scheme.block == [None, None] && scales.elements() == 1;
        if !same {
            causes.push(format!("weight_scale has shape {:?}; accepted: {grid:?}", scales.shape));
            continue;
        }
        if zeros.is_some() == scheme.symmetric {
            let stored = if scheme.symmetric { "present" } else { "missing" };
            causes.push(format!("weight_zero_point is {stored}, but symmetric is {}", scheme.symmetric));
            continue;
        }
        let format = PackedFormat {
            codes: layout,
            bits: codes.bits(),
            rows,
            columns,
            row_block,
            column_block,
            groups: grid[1],
            scales: codes.scales(scales)?,
            zero_offset: 0,
        };
        check_zeros(&format, zeros)?;
        let indices = weight.groups(GROUPS, [columns, grid[1]], |indices| indices.contains(&-1))?;
        let packed = weight.packed(codes.name(), format, info, [Some(scales), zeros, indices])?;
        return if codes == Codes::Nvfp4 { weight.with_factor(packed, FACTOR) } else { Ok(packed) };
    }
    Err(causes.into_iter().next().unwrap_or_else(|| {
        format!("it is stored as {}, which no entry of `config_groups` describes", codes.name())
    }))
}

/// The codes of a weight.
struct StoredCodes<'w> {
    info: &'w TensorInfo,
    layout: CodeLayout,
    /// The shape of the weight.
    shape: [usize; 2],
    kind: Codes,
}

fn codes_of<'w>(weight: &'w StoredWeight<'_, '_>) -> Result<StoredCodes<'w>, String> {
    if weight.of_module(WORDS).is_none() {
        let codes = weight.codes()?;
        let (layout, kind) = match codes.dtype {
            StoredDtype::I8 => (CodeLayout::I8, Codes::Int8),
            StoredDtype::F8E4M3 => (CodeLayout::E4m3, Codes::Float8),
            other => return Err(format!("it has dtype {other} beside its scales; accepted: I8, F8_E4M3")),
        };
        expect("weight", codes, codes.dtype, None)?;
        return Ok(StoredCodes { info: codes, layout, shape: [codes.shape[0], codes.shape[1]], kind });
    }
    if weight.of_module(WORDS).is_some_and(|codes| codes.dtype == StoredDtype::U8) {
        return floats_of(weight);
    }
    let words = weight.words(WORDS)?;
    let [rows, columns] = weight.stored_shape(SHAPE)?;
    let [narrow, wide] = [8, 4].map(|in_word| [rows, columns.div_ceil(in_word)]);
    let kinds = [(narrow, Codes::Int4), (wide, Codes::Int8)];
    let Some((_, kind)) = kinds.into_iter().find(|(shape, _)| words.shape == shape) else {
        return Err(format!(
            "weight_packed has shape {:?}; accepted for weight_shape [{rows}, {columns}]: {narrow:?} (4 bits), {wide:?} (8 bits)",
            words.shape
        ));
    };
    Ok(StoredCodes { info: words, layout: CodeLayout::RowWords, shape: [rows, columns], kind })
}

/// Returns the codes of a weight in e2m1. The type of its scales gives its kind.
fn floats_of<'w>(weight: &'w StoredWeight<'_, '_>) -> Result<StoredCodes<'w>, String> {
    if weight.codes().is_ok() {
        return Err("it is stored twice, as weight and as weight_packed".into());
    }
    let (info, scales) = (weight.required(WORDS)?, weight.required(SCALES)?);
    expect("weight_packed", info, StoredDtype::U8, None)?;
    let kind = match scales.dtype {
        StoredDtype::F8E4M3 => Codes::Nvfp4,
        StoredDtype::U8 | StoredDtype::F8E8M0 => Codes::Mxfp4,
        other => return Err(format!("weight_scale has dtype {other}; accepted: F8_E4M3, U8, F8_E8M0")),
    };
    let shape = [info.shape[0], info.shape[1].saturating_mul(2)];
    Ok(StoredCodes { info, layout: CodeLayout::E2m1, shape, kind })
}

/// Checks the zeros of a weight in this format.
fn check_zeros(format: &PackedFormat, zeros: Option<&TensorInfo>) -> Result<(), String> {
    let Some(zeros) = zeros else { return Ok(()) };
    let (dtype, lines) = match format.codes {
        CodeLayout::RowWords => (StoredDtype::I32, format.rows.div_ceil(32 / format.bits)),
        _ => (StoredDtype::I8, format.rows),
    };
    expect("weight_zero_point", zeros, dtype, Some(&[lines, format.groups]))
}
