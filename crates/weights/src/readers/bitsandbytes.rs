//! Checkpoints of bitsandbytes.
//!
//! Its 4-bit layers store `X.weight` (codes, flat) with `X.weight.absmax`, `.quant_map`, with
//! double quantization `.nested_absmax` and `.nested_quant_map`, and a JSON text in bytes,
//! `.quant_state.bitsandbytes__nf4` or `…__fp4` (`QuantState.as_dict` of
//! bitsandbytes/functional.py). LLM.int8() stores `X.weight` (i8), `X.SCB` (the largest magnitude
//! of each row) and `X.weight_format`.

use serde::Deserialize;

use super::reader::{CheckpointFormat, ReadWeight, Settings, StoredWeight};
use crate::error;
use crate::header::clip;
use crate::quant::{self, BlockCodes as _, BlockFormat, FourBit, NESTED_BLOCK, QuantFormat, RunMeaning};
use crate::quantized::{QuantizedParts, read_f32};
use crate::stored_parts::StoredParts;
use crate::tensor_info::ShardRange;
use crate::{StoredDtype, TensorInfo};

/// `quant_method` in config.json.
pub const BITSANDBYTES: &str = "bitsandbytes";

/// The suffix that follows the name of a quantized weight in the name of its JSON text.
const STATE: &str = ".quant_state.bitsandbytes__";
const ABSMAX: &str = ".absmax";
const QUANT_MAP: &str = ".quant_map";
const NESTED_ABSMAX: &str = ".nested_absmax";
const NESTED_QUANT_MAP: &str = ".nested_quant_map";
/// The suffix that follows the name of a module in LLM.int8()'s names.
const ROW_SCALES: &str = ".SCB";
const ROW_LAYOUT: &str = ".weight_format";
/// The block sizes for which bitsandbytes has kernels.
const BLOCK_SIZES: [usize; 8] = [32, 64, 128, 256, 512, 1024, 2048, 4096];

/// The JSON text of a 4-bit tensor.
#[derive(Deserialize)]
struct BnbState {
    quant_type: String,
    blocksize: usize,
    dtype: String,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f64>,
}

/// The reader of bitsandbytes' checkpoints.
pub(super) struct Bitsandbytes;

impl CheckpointFormat for Bitsandbytes {
    fn method(&self) -> &'static str {
        BITSANDBYTES
    }

    /// The first configurations do not name the method.
    fn reads_unnamed(&self, settings: &Settings) -> bool {
        ["load_in_4bit", "load_in_8bit"].iter().any(|key| settings.contains_key(*key))
    }

    fn owner(&self, name: &str) -> Option<String> {
        if let Some((weight, _)) = name.split_once(STATE) {
            return Some(weight.to_owned());
        }
        let of_module = [ROW_SCALES, ROW_LAYOUT].iter().find_map(|end| name.strip_suffix(end));
        if let Some(module) = of_module {
            return Some(format!("{module}.weight"));
        }
        let ends = [NESTED_ABSMAX, NESTED_QUANT_MAP, ABSMAX, QUANT_MAP];
        ends.iter()
            .find_map(|end| name.strip_suffix(end))
            .filter(|weight| weight.ends_with(".weight"))
            .map(Into::into)
    }

    fn is_label(&self, name: &str) -> bool {
        name.contains(STATE)
            || [QUANT_MAP, NESTED_QUANT_MAP, ROW_LAYOUT].iter().any(|end| name.ends_with(end))
    }

    fn hint(&self) -> &'static str {
        "quantize the model again: `finetune quantize --model ORIGINAL --kind nf4 --output NEW`"
    }

    fn reader(&self, _: &Settings) -> error::Result<ReadWeight> {
        Ok(Box::new(|weight| read(weight).map(|(info, parts)| (info, StoredParts::Quantized(parts)))))
    }
}

fn read(weight: &StoredWeight<'_, '_>) -> Result<(TensorInfo, QuantizedParts), String> {
    match (weight.of_module(ROW_SCALES), weight.of_module(ROW_LAYOUT)) {
        (Some(scales), layout) => read_rows(weight, scales, layout),
        (None, Some(_)) => Err("it has weight_format, but SCB, the scales of its rows, is missing".into()),
        (None, None) => read_four_bits(weight),
    }
}

/// The positions of the scales of a 4-bit weight.
struct StoredScales {
    runs: Vec<(RunMeaning, ShardRange)>,
    /// The mean of double-quantized scales.
    offset: f32,
}

/// Reads a weight of LLM.int8() with one scale per row.
fn read_rows(
    weight: &StoredWeight<'_, '_>,
    scales: &TensorInfo,
    layout: Option<&TensorInfo>,
) -> Result<(TensorInfo, QuantizedParts), String> {
    let codes = weight.codes()?;
    let &[rows, columns] = codes.shape.as_slice() else {
        return Err(format!("it has shape {:?}; accepted: [out, in]", codes.shape));
    };
    if codes.dtype != StoredDtype::I8 {
        return Err(format!("it has dtype {} beside SCB; accepted: I8", codes.dtype));
    }
    floats("SCB", scales, rows, &format!("{rows} rows"))?;
    // 0 means "row", the only layout that bitsandbytes still reads.
    if let Some(layout) = layout
        && (weight.bytes)(layout).iter().any(|&byte| byte != 0)
    {
        return Err(format!("weight_format is {:?}; accepted: 0 (rows)", (weight.bytes)(layout)));
    }
    let tensors = [Some(scales), layout].into_iter().flatten();
    let parts = QuantizedParts {
        format: QuantFormat::int8_rows(columns.max(1)),
        runs: vec![(RunMeaning::Scales, range_of(scales))],
        offset: 0.0,
        bytes: tensors.chain([codes]).map(|info| info.range.len() as u64).sum(),
    };
    // bitsandbytes makes the codes from f16 values.
    Ok((TensorInfo { dtype: StoredDtype::F16, ..codes.clone() }, parts))
}

fn read_four_bits(weight: &StoredWeight<'_, '_>) -> Result<(TensorInfo, QuantizedParts), String> {
    let (kind, text) = read_state(weight)?;
    let state = parse_state(kind, (weight.bytes)(text))?;
    let codes = weight.codes()?;
    let elements = state.shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim));
    let format = BlockFormat {
        codes: kind,
        block_size: state.blocksize,
        double_quant: weight.companion(NESTED_ABSMAX).is_some(),
    };
    let bytes = elements.map(|n| n.div_ceil(2));
    if bytes != Some(codes.range.len()) {
        let needed = bytes.map_or("more than a file can hold".into(), |bytes| bytes.to_string());
        return Err(format!(
            "it has {} bytes of codes; the shape of its quant_state, {:?}, needs {needed}",
            codes.range.len(),
            state.shape
        ));
    }
    let blocks = format.blocks(elements.unwrap_or(0));
    let needs = format!("{blocks} blocks (shape {:?}, blocksize {})", state.shape, state.blocksize);
    let StoredScales { runs, offset } = read_scales(weight, &state, blocks, &needs)?;
    check_map(weight, QUANT_MAP, kind.table(), kind.name())?;
    if format.double_quant {
        check_map(weight, NESTED_QUANT_MAP, quant::dynamic_signed(), "nested scales")?;
    }
    let ends = [ABSMAX, QUANT_MAP, NESTED_ABSMAX, NESTED_QUANT_MAP];
    let tensors = ends.iter().filter_map(|end| weight.companion(end)).chain([text, codes]);
    let bytes = tensors.map(|info| info.range.len() as u64).sum();
    let dtype = state.stored_dtype()?;
    let parts = QuantizedParts { format: QuantFormat::FourBit(format), runs, offset, bytes };
    Ok((TensorInfo { dtype, shape: state.shape, ..codes.clone() }, parts))
}

/// Returns the JSON text, and the kind in its name.
fn read_state<'w>(weight: &'w StoredWeight<'_, '_>) -> Result<(FourBit, &'w TensorInfo), String> {
    let start = format!("{}{STATE}", weight.name);
    let mut states = weight.tensors.range(start.clone()..).take_while(|(name, _)| name.starts_with(&start));
    let Some((name, text)) = states.next() else {
        let scales =
            weight.tensors.keys().find(|name| Bitsandbytes.owner(name).as_deref() == Some(weight.name));
        return Err(format!(
            "{} is present, but its quant_state is missing",
            scales.map_or("a companion", |name| clip_end(name, weight.name))
        ));
    };
    if let Some((other, _)) = states.next() {
        return Err(format!(
            "it has two quant_states, {} and {}",
            clip_end(name, weight.name),
            clip_end(other, weight.name)
        ));
    }
    let kind = name.strip_prefix(&start).and_then(four_bit_kind);
    let kind = kind.ok_or_else(|| {
        format!(
            "its quant_state is called {}; accepted: bitsandbytes__nf4, bitsandbytes__fp4",
            clip_end(name, weight.name)
        )
    })?;
    if text.dtype != StoredDtype::U8 {
        return Err(format!("its quant_state has dtype {}; accepted: U8", text.dtype));
    }
    Ok((kind, text))
}

fn read_scales(
    weight: &StoredWeight<'_, '_>,
    state: &BnbState,
    blocks: usize,
    needs: &str,
) -> Result<StoredScales, String> {
    let absmax = weight.companion(ABSMAX).ok_or("absmax, the scales of its blocks, is missing")?;
    let Some(outer) = weight.companion(NESTED_ABSMAX) else {
        if state.nested_offset.is_some() {
            return Err("its quant_state has a nested_offset, but nested_absmax is missing".into());
        }
        floats("absmax", absmax, blocks, needs)?;
        return Ok(StoredScales { runs: vec![(RunMeaning::Scales, range_of(absmax))], offset: 0.0 });
    };
    if absmax.dtype != StoredDtype::U8 {
        return Err(format!("absmax has dtype {} beside nested_absmax; accepted: U8", absmax.dtype));
    }
    if absmax.elements() != blocks {
        return Err(format!("absmax has {} scales for {needs}", absmax.elements()));
    }
    if state.nested_blocksize != Some(NESTED_BLOCK) {
        let actual = state.nested_blocksize.map_or("missing".into(), |size| size.to_string());
        return Err(format!("nested_blocksize is {actual}; accepted: {NESTED_BLOCK}"));
    }
    floats("nested_absmax", outer, blocks.div_ceil(NESTED_BLOCK), &format!("{blocks} nested scales"))?;
    let offset = state.nested_offset.ok_or("its quant_state has no nested_offset")? as f32;
    let runs = vec![(RunMeaning::ScaleCodes, range_of(absmax)), (RunMeaning::NestedScales, range_of(outer))];
    Ok(StoredScales { runs, offset })
}

/// Checks the map of code values: a map that differs from the kind's would give other weights.
fn check_map(weight: &StoredWeight<'_, '_>, end: &str, table: &[f32], what: &str) -> Result<(), String> {
    let name = &end[1..];
    let map = weight.companion(end).ok_or_else(|| format!("{name} is missing"))?;
    floats(name, map, table.len(), &format!("{} codes", table.len()))?;
    let actual = read_f32((weight.bytes)(map));
    // Not bit for bit: other versions of torch compute the tables with other rounding.
    let same = |(actual, ours): (f32, &f32)| (actual - ours).abs() <= 1e-6 * ours.abs();
    match actual.zip(table).position(|pair| !same(pair)) {
        Some(code) => {
            Err(format!("{name} is not the table of {what}: the value of code {code} is not {}", table[code]))
        }
        None => Ok(()),
    }
}

impl BnbState {
    fn stored_dtype(&self) -> Result<StoredDtype, String> {
        let dtypes = [StoredDtype::F32, StoredDtype::F16, StoredDtype::BF16];
        dtypes.into_iter().find(|dtype| dtype.config_name() == Some(&self.dtype)).ok_or_else(|| {
            format!(
                "its quant_state has dtype \"{}\"; accepted: float32, float16, bfloat16",
                clip(&self.dtype)
            )
        })
    }
}

fn parse_state(kind: FourBit, text: &[u8]) -> Result<BnbState, String> {
    let state: BnbState = serde_json::from_slice(text)
        .map_err(|error| format!("its quant_state ({} bytes) is not valid: {error}", text.len()))?;
    if four_bit_kind(&state.quant_type) != Some(kind) {
        return Err(format!(
            "its quant_state is called bitsandbytes__{}, but says quant_type \"{}\"",
            kind.name(),
            clip(&state.quant_type)
        ));
    }
    if !BLOCK_SIZES.contains(&state.blocksize) {
        return Err(format!("its quant_state has blocksize {}; accepted: {BLOCK_SIZES:?}", state.blocksize));
    }
    Ok(state)
}

fn four_bit_kind(name: &str) -> Option<FourBit> {
    FourBit::ALL.into_iter().find(|kind| kind.name() == name)
}

/// Returns the name of a companion without that of its weight and the dot.
fn clip_end<'n>(name: &'n str, weight: &str) -> &'n str {
    let module = weight.trim_end_matches(".weight");
    let end = name.strip_prefix(weight).or(name.strip_prefix(module)).unwrap_or(name);
    end.trim_start_matches('.').trim_start_matches("quant_state.")
}

/// Checks that `info` holds `wanted` f32 values.
fn floats(name: &str, info: &TensorInfo, wanted: usize, needs: &str) -> Result<(), String> {
    if info.dtype != StoredDtype::F32 {
        return Err(format!("{name} has dtype {}; accepted: F32", info.dtype));
    }
    if info.elements() != wanted {
        return Err(format!("{name} has {} values for {needs}", info.elements()));
    }
    Ok(())
}

fn range_of(info: &TensorInfo) -> ShardRange {
    ShardRange { shard: info.shard, range: info.range.clone() }
}
