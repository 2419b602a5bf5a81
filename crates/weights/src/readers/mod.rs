//! Checkpoints with quantized tensors, one reader for each format.
//!
//! Such a checkpoint stores a weight as several tensors: its codes, and companions such as scales.
//! `ModelReader` removes the companions from the list of tensors and gives each weight its shape
//! and type before quantization, so that the checkpoint reads like any other. Everything but codes
//! and scales is checked when the files are opened: a mislabelled part would silently give wrong
//! numbers.
//!
//! Several formats have companions of the same names, so `quantization_config` of config.json
//! selects the reader. Weights are stored plain or quantized as their own tensors show: lists of
//! excluded modules (`ignore`, `modules_to_not_convert`) are not read.

mod awq;
mod bitsandbytes;
mod compressed_tensors;
mod fp8;
mod gptq;
mod hqq;
mod modelopt;
mod mxfp4;
mod reader;

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::stored_parts::StoredParts;
use super::{StoredDtype, TensorInfo};
use crate::error::{Error, Result};
pub use bitsandbytes::BITSANDBYTES;
pub(crate) use modelopt::{ALGORITHMS as MODELOPT_ALGORITHMS, METHOD as MODELOPT};
use reader::{CheckpointFormat, ReadWeight, StoredWeight, Tensors};

/// The key of config.json with the quantization of weights.
pub(crate) const QUANTIZATION_CONFIG: &str = "quantization_config";

/// All formats; the only registry.
static FORMATS: [&dyn CheckpointFormat; 8] = [
    &bitsandbytes::Bitsandbytes,
    &fp8::Fp8,
    &gptq::Gptq,
    &awq::Awq,
    &compressed_tensors::CompressedTensors,
    &mxfp4::Mxfp4,
    &modelopt::ModelOpt,
    &hqq::Hqq,
];

/// Returns whether a tensor of this name belongs to the quantized weight of another.
pub(super) fn is_companion(name: &str) -> bool {
    FORMATS.iter().any(|format| format.is_telling(name))
}

/// Returns whether [`ModelReader`] reads the values of a tensor of this name.
pub(super) fn is_label(name: &str) -> bool {
    FORMATS.iter().any(|format| format.is_label(name))
}

/// The reader of a model's checkpoint.
pub(super) struct ModelReader {
    format: &'static dyn CheckpointFormat,
    read: ReadWeight,
    /// The type of the weights in config.json.
    dtype: Option<StoredDtype>,
}

impl ModelReader {
    /// Selects the reader by `config`: config.json, if the model has one.
    ///
    /// # Errors
    /// User: a setting in `config` is not supported.
    pub(super) fn of(config: Option<&Map<String, Value>>) -> Result<Self> {
        let none = Map::new();
        let settings = config.and_then(|config| config.get(QUANTIZATION_CONFIG)).and_then(Value::as_object);
        // The names of bitsandbytes are its own. A model in an unknown format is only described.
        let format = settings.and_then(format_of).unwrap_or(&bitsandbytes::Bitsandbytes);
        let read = format.reader(settings.unwrap_or(&none))?;
        Ok(ModelReader { format, read, dtype: config.and_then(dtype_of) })
    }

    /// Removes the companions from `tensors` and gives quantized weights their own shapes and
    /// types; `bytes` reads a tensor.
    ///
    /// # Errors
    /// User: a companion is missing, malformed, or does not match the codes.
    pub(super) fn recognise<'a>(
        &self,
        tensors: &mut Tensors,
        bytes: &dyn Fn(&TensorInfo) -> &'a [u8],
    ) -> Result<BTreeMap<String, StoredParts>> {
        let ModelReader { format, read, dtype } = self;
        // The weights, with the bytes of all tensors that belong to them.
        let mut weights: BTreeMap<String, u64> = BTreeMap::new();
        for (name, info) in tensors.iter() {
            let codes = name.ends_with(".weight") && format.is_codes(info.dtype);
            if let Some(weight) = format.owner(name).or_else(|| codes.then(|| name.clone())) {
                *weights.entry(weight).or_default() += info.range.len() as u64;
            }
        }
        weights.retain(|weight, _| format.is_quantized(weight, tensors));
        let mut all = BTreeMap::new();
        for (name, stored_bytes) in weights {
            let weight = StoredWeight { tensors, name: &name, dtype: *dtype, stored_bytes, bytes };
            let (info, parts) = read(&weight).map_err(|cause| weight.malformed(*format, &cause))?;
            tensors.insert(name.clone(), info);
            all.insert(name, parts);
        }
        tensors.retain(|name, _| format.owner(name).is_none_or(|weight| !all.contains_key(&weight)));
        Ok(all)
    }
}

/// Refuses a model whose `quantization_config` names a format without a reader, or has a setting
/// that the reader does not support.
///
/// # Errors
/// User: no reader reads the format.
pub fn refuse_unknown(settings: &Map<String, Value>) -> Result<()> {
    if let Some(format) = format_of(settings) {
        return format.reader(settings).map(drop);
    }
    let method = settings.get("quant_method").filter(|method| !method.is_null());
    let method = method.map_or("missing".into(), Value::to_string);
    let accepted = FORMATS.map(|format| format!("\"{}\"", format.method())).join(", ");
    Err(Error::user("the model is quantized in a format that this program does not read")
        .because(format!("`quantization_config.quant_method` is {method}; accepted: {accepted}"))
        .hint("give the model that was not quantized"))
}

/// Returns the format that the settings name.
fn format_of(settings: &Map<String, Value>) -> Option<&'static dyn CheckpointFormat> {
    let method = settings.get("quant_method").filter(|method| !method.is_null());
    let named = |format: &&dyn CheckpointFormat| match method {
        Some(method) => method.as_str() == Some(format.method()),
        None => format.reads_unnamed(settings),
    };
    FORMATS.into_iter().find(named)
}

/// Returns the type of the weights before quantization.
fn dtype_of(config: &Map<String, Value>) -> Option<StoredDtype> {
    let name = ["dtype", "torch_dtype"].iter().find_map(|key| config.get(*key)?.as_str())?;
    StoredDtype::ALL.into_iter().find(|dtype| dtype.config_name() == Some(name))
}
