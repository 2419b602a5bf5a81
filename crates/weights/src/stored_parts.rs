//! The parts of a tensor that is stored as several: codes, scales, and other companions.

use super::gguf::BlockParts;
use super::packed::PackedParts;
use super::quantized::QuantizedParts;
use super::tensor_info::ShardRange;
use crate::quant::QuantFormat;

/// The data of a tensor that is stored as several.
#[derive(Debug, Clone)]
pub(super) enum StoredParts {
    /// Its codes are kept as they are.
    Quantized(QuantizedParts),
    /// It is decoded to floats while it is read.
    Packed(PackedParts),
    /// It is in a GGUF file, and decoded to floats while it is read.
    Blocks(BlockParts),
}

impl StoredParts {
    /// Returns the name of the format in messages.
    pub(super) fn name(&self) -> &'static str {
        match self {
            StoredParts::Quantized(parts) => parts.format.scheme().name(),
            StoredParts::Packed(parts) => parts.name,
            StoredParts::Blocks(parts) => parts.name(),
        }
    }

    /// Returns whether it is decoded to floats while it is read.
    pub(super) fn is_packed(&self) -> bool {
        matches!(self, StoredParts::Packed(_) | StoredParts::Blocks(_))
    }

    /// Returns whether it holds codes, and not floats in another arrangement.
    pub(super) fn has_codes(&self) -> bool {
        match self {
            StoredParts::Quantized(_) | StoredParts::Packed(_) => true,
            StoredParts::Blocks(parts) => parts.has_codes(),
        }
    }

    /// Returns the format in which a run may keep it instead of decoding it.
    pub(super) fn run_format(&self) -> Option<QuantFormat> {
        match self {
            StoredParts::Quantized(_) => None,
            StoredParts::Packed(parts) => parts.run_format().map(QuantFormat::Grid),
            StoredParts::Blocks(parts) => parts.run_format(),
        }
    }

    /// Returns the weight that another tool packed, if it is one.
    pub(super) fn packed(&self) -> Option<&PackedParts> {
        match self {
            StoredParts::Packed(parts) => Some(parts),
            StoredParts::Quantized(_) | StoredParts::Blocks(_) => None,
        }
    }

    /// Returns the bytes of codes and companions.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            StoredParts::Quantized(parts) => parts.bytes,
            StoredParts::Packed(parts) => parts.bytes,
            StoredParts::Blocks(parts) => parts.bytes(),
        }
    }

    /// Returns the positions of the parts beside the codes that are read with the values.
    pub(super) fn places(&self) -> Vec<&ShardRange> {
        match self {
            StoredParts::Quantized(parts) => parts.runs.iter().map(|(_, span)| span).collect(),
            StoredParts::Packed(parts) => parts.places().collect(),
            StoredParts::Blocks(parts) => parts.places().collect(),
        }
    }

    /// Returns text that differs between any two formats of equal shape. The identity of a model
    /// includes it, so it never changes.
    pub(super) fn fingerprint(&self) -> String {
        match self {
            StoredParts::Quantized(QuantizedParts { format, offset, .. }) => {
                format!("{} {}", format.scheme().fingerprint(), offset.to_bits())
            }
            StoredParts::Packed(parts) => parts.fingerprint(),
            StoredParts::Blocks(parts) => parts.fingerprint(),
        }
    }
}
