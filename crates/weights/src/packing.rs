//! The choice between dequantizing weights of other tools and keeping them packed, for the weights
//! of a model's blocks.

use std::collections::BTreeMap;

use super::stored_parts::StoredParts;
use super::tensor_info::ShardRange;
use super::{EMBED_PER_LAYER, EMBED_TOKENS, LM_HEAD, ModelFiles};
use crate::error::Result;
use crate::quant::{BlockType, QuantFormat, QuantViewMut};
use crate::units;

impl ModelFiles {
    /// Makes runs keep packed weights as they are stored, in the formats with which a run computes.
    /// Embedding, head and weights in other formats are still dequantized while they are read.
    /// Returns whether it changes any weight.
    pub fn keep_packed(&mut self) -> bool {
        self.keeps_packed = true;
        self.describe_packing();
        self.parts.keys().any(|name| self.kept_format(name).is_some())
    }

    /// Returns the quantized format that a run keeps of a tensor, or `None` if it is not quantized,
    /// is dequantized while it is read, or does not exist.
    pub fn quantized_format(&self, name: &str) -> Option<QuantFormat> {
        match self.parts(name)? {
            StoredParts::Quantized(parts) => Some(parts.format),
            StoredParts::Packed(_) | StoredParts::Blocks(_) => self.kept_format(name),
        }
    }

    /// Returns whether another tool packed a tensor, for runs that keep it and that dequantize it.
    pub fn is_packed(&self, name: &str) -> bool {
        self.parts(name).is_some_and(StoredParts::is_packed)
    }

    /// Returns whether a tensor is stored in MXFP4.
    pub fn is_mxfp4(&self, name: &str) -> bool {
        self.parts(name).is_some_and(|parts| parts.name() == BlockType::MXFP4.name())
    }

    /// Returns the format in which a run keeps a packed tensor, if it does.
    fn kept_format(&self, name: &str) -> Option<QuantFormat> {
        let in_block = ![EMBED_TOKENS, EMBED_PER_LAYER, LM_HEAD].contains(&name);
        self.parts(name).filter(|_| self.keeps_packed && in_block)?.run_format()
    }

    /// Copies codes and scales of a tensor with a [`ModelFiles::quantized_format`], which is that
    /// of `to`. Returns false if it has none.
    ///
    /// # Errors
    /// User: another program has changed the length of a file. Internal: only its header was read.
    pub fn copy_quantized(&self, name: &str, to: &mut QuantViewMut<'_>) -> Result<bool> {
        if let Some(stored) = self.quantized(name)? {
            stored.copy_to(to);
            return Ok(true);
        }
        let Some(format) = self.kept_format(name) else { return Ok(false) };
        let (info, part_of) =
            (self.require(name)?, |part: &ShardRange| self.stored(name, part.shard, &part.range));
        match (self.parts(name), format) {
            (Some(StoredParts::Packed(parts)), QuantFormat::Grid(format)) => {
                let codes = self.stored(name, info.shard, &info.range)?;
                parts.tensor(codes, part_of)?.copy_to(&format, &mut to.runs);
            }
            (Some(StoredParts::Blocks(parts)), format) => parts.copy_to(format, &mut to.runs, part_of)?,
            _ => return Ok(false),
        }
        // A truncation during the copy counts too.
        self.check_lengths()?;
        Ok(true)
    }

    /// Describes the packed weights in [`ModelFiles::warnings`].
    pub(super) fn describe_packing(&mut self) {
        let mut counts: BTreeMap<(&str, Fate), usize> = BTreeMap::new();
        for (name, parts) in self.parts.iter().filter(|(_, parts)| parts.is_packed() && parts.has_codes()) {
            let fate = match self.kept_format(name) {
                Some(_) => Fate::Kept,
                None if !self.keeps_packed => Fate::Dequantized,
                None if parts.run_format().is_some() => Fate::Table,
                None => Fate::OtherFormat,
            };
            *counts.entry((parts.name(), fate)).or_default() += 1;
        }
        let note = |((format, fate), count): ((&str, Fate), usize)| {
            let count = units::exact(count, "weight");
            let why = match fate {
                Fate::Kept => return format!("finetune keeps {count} stored as {format} packed in memory"),
                Fate::Dequantized => "",
                Fate::Table => ": embedding and head do not stay packed",
                Fate::OtherFormat => ": no run keeps this format packed",
            };
            format!("finetune dequantizes {count} stored as {format} while it reads the model{why}")
        };
        self.packing = counts.into_iter().map(note).collect();
    }
}

/// The form of a packed weight in a run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fate {
    Kept,
    Dequantized,
    /// Dequantized, since it is an embedding or a head.
    Table,
    /// Dequantized, since runs do not compute with its format.
    OtherFormat,
}
