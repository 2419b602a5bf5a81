//! Checkpoints with quantized tensors, one reader for each format.
//!
//! Such a checkpoint stores a weight as several tensors: its codes, and companions such as scales.
//! [`recognise`] removes the companions from the list of tensors and gives each weight its shape
//! and type before quantization, so that the checkpoint reads like any other. Everything but codes
//! and scales is checked when the files are opened: a mislabelled part would silently give wrong
//! numbers.

mod bitsandbytes;
mod reader;

use std::collections::{BTreeMap, BTreeSet};

use super::TensorInfo;
use super::quantized::QuantizedParts;
use crate::error::{Error, Result};
pub(crate) use bitsandbytes::METHOD as BITSANDBYTES;
use reader::{CheckpointReader, StoredWeight, Tensors};

/// All readers; the only registry.
static READERS: [&dyn CheckpointReader; 1] = [&bitsandbytes::Bitsandbytes];

/// Returns whether a tensor of this name belongs to the quantized weight of another.
pub(super) fn is_companion(name: &str) -> bool {
    READERS.iter().any(|reader| reader.owner(name).is_some())
}

/// Returns whether [`recognise`] reads the values of a tensor of this name.
pub(super) fn is_label(name: &str) -> bool {
    READERS.iter().any(|reader| reader.is_label(name))
}

/// Removes the companions from `tensors` and gives quantized weights their own shapes and types;
/// `bytes` reads a tensor.
///
/// # Errors
/// User: a companion is missing, malformed, or does not match the codes.
pub(super) fn recognise<'a>(
    tensors: &mut Tensors,
    bytes: &dyn Fn(&TensorInfo) -> &'a [u8],
) -> Result<BTreeMap<String, QuantizedParts>> {
    let mut quantized = BTreeMap::new();
    for reader in READERS {
        let weights: BTreeSet<String> = tensors.keys().filter_map(|name| reader.owner(name)).collect();
        for name in weights {
            let weight = StoredWeight { tensors, name: &name, bytes };
            let read = reader.read(&weight).map_err(|cause| weight.malformed(reader.method(), &cause));
            let (info, parts) = read?;
            tensors.insert(name.clone(), info);
            quantized.insert(name, parts);
        }
        tensors.retain(|name, _| reader.owner(name).is_none());
    }
    Ok(quantized)
}

/// Refuses a model whose `quantization_config` names a format without a reader. `method` is its
/// `quant_method`; `has` returns whether it has a key.
///
/// # Errors
/// User: no reader reads the format.
pub(crate) fn refuse_unknown(method: Option<&str>, has: &dyn Fn(&str) -> bool) -> Result<()> {
    let reads = |reader: &&dyn CheckpointReader| match method {
        Some(method) => method == reader.method(),
        None => reader.reads_unnamed(has),
    };
    if READERS.iter().any(reads) {
        return Ok(());
    }
    let method = method.map_or("missing".into(), |method| format!("\"{method}\""));
    let accepted = READERS.map(|reader| format!("\"{}\"", reader.method())).join(", ");
    Err(Error::user("the model is quantized in a format that this program does not read")
        .because(format!("`quantization_config.quant_method` is {method}; accepted: {accepted}"))
        .hint("give the model that was not quantized"))
}
