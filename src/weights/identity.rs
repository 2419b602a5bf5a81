//! Which model weights are: what an adapter and a checkpoint keep of their base, so that they are not used on another
//! one of equal shapes.
//!
//! The digest covers each tensor's name, type, shape and a sample of its bytes, sorted by name, so that it is the same
//! however the files are sharded and costs a few pages a tensor instead of the whole model. Training changes nearly
//! every value, so the sample tells models of one architecture apart; it is no proof against tampering. What loaders
//! pass over does not count: buffers of old checkpoints, the second copy of a tied table.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::{EMBED_TOKENS, LM_HEAD, ModelFiles, TensorInfo, is_rotary_buffer};
use crate::error::{Error, Result};
use crate::quant::QuantFormat;

/// The entry of a quantized checkpoint's metadata with the [`ModelIdentity`] of the model that was quantized.
pub const QUANTIZED_FROM: &str = "finetune.quantized_from";
/// The version of the digest that this program computes.
const VERSION: u32 = 1;
/// Bytes of one part of a sample.
const SAMPLE: usize = 256;
/// Parts of a sample, evenly spread from the first byte to the last.
const SAMPLES: usize = 8;
/// Characters of a digest that are shown.
const SHOWN: usize = 16;

/// Which model weights are: its name, and a digest by which two are compared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelIdentity {
    /// How the digest is computed.
    version: u32,
    /// The hub id, or the name of the folder.
    id: String,
    /// The commit on the hub.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    commit: Option<String>,
    /// BLAKE3 in hex; none where only the name is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    digest: Option<String>,
    /// The model that was quantized to this one, where the checkpoint says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    quantized_from: Option<Box<ModelIdentity>>,
}

impl ModelIdentity {
    /// The identity of the model called `id`, whose weights have not been looked at.
    pub fn named(id: &str, commit: Option<&str>) -> Self {
        let (id, commit) = (id.to_owned(), commit.map(str::to_owned));
        ModelIdentity { version: VERSION, id, commit, digest: None, quantized_from: None }
    }

    /// As it is, with the digest of `files`, and the model that they were quantized from if they say so.
    ///
    /// # Errors
    /// The user's: what `files` say of the original is malformed.
    pub fn of_files(self, files: &ModelFiles) -> Result<Self> {
        let from = files.metadata(QUANTIZED_FROM).map(Self::from_json).transpose()?;
        // Of headers alone there are no bytes to sample: what remains are name and commit.
        let digest = if files.is_header_only() { None } else { Some(digest(files)?.to_hex().to_string()) };
        Ok(ModelIdentity { digest, quantized_from: from.map(Box::new), ..self })
    }

    /// As it is, for weights that are drawn from `seed`: parameters by name and shape.
    pub fn drawn<'a>(self, seed: u64, parameters: impl Iterator<Item = (&'a str, &'a [usize])>) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"drawn").update(&seed.to_le_bytes());
        for (name, shape) in parameters {
            text(&mut hasher, name);
            text(&mut hasher, &format!("{shape:?}"));
        }
        ModelIdentity { digest: Some(hasher.finalize().to_hex().to_string()), ..self }
    }

    /// Reads what [`ModelIdentity::to_json`] wrote, and what a later version of this program writes.
    ///
    /// # Errors
    /// The user's: the text is something else.
    pub fn from_json(text: &str) -> Result<Self> {
        serde_json::from_str(text)
            .map_err(|error| Error::user("cannot read which model it is").because(error.to_string()))
    }

    /// One line of JSON.
    pub fn to_json(&self) -> String {
        // Texts and a number: nothing that JSON cannot hold.
        serde_json::to_value(self).unwrap_or_default().to_string()
    }

    /// The digest; none where only the name is known.
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// The model that was quantized to this one, where the checkpoint says so.
    pub fn quantized_from(&self) -> Option<&ModelIdentity> {
        self.quantized_from.as_deref()
    }

    /// Whether both are one model, or quantized from one; none: there is nothing to compare.
    pub fn is_same(&self, other: &Self) -> Option<bool> {
        let mut known = None;
        for one in self.with_original() {
            for another in other.with_original() {
                match one.equals(another) {
                    Some(true) => return Some(true),
                    Some(false) => known = Some(false),
                    None => {}
                }
            }
        }
        known
    }

    fn with_original(&self) -> impl Iterator<Item = &Self> {
        [Some(self), self.quantized_from()].into_iter().flatten()
    }

    /// By digests where both have one of the same version, else by commits.
    fn equals(&self, other: &Self) -> Option<bool> {
        match (&self.digest, &other.digest, &self.commit, &other.commit) {
            (Some(one), Some(another), ..) if self.version == other.version => Some(one == another),
            (_, _, Some(one), Some(another)) => Some(one == another),
            _ => None,
        }
    }
}

impl fmt::Display for ModelIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.id)?;
        if let Some(commit) = &self.commit {
            write!(f, " at commit {commit}")?;
        }
        match &self.digest {
            Some(digest) => write!(f, " (digest {})", digest.get(..SHOWN).unwrap_or(digest)),
            None => Ok(()),
        }
    }
}

/// The digest of all that loading the model reads.
fn digest(files: &ModelFiles) -> Result<blake3::Hash> {
    let bytes = |name: &str, info: &TensorInfo| files.stored(name, info.shard, &info.range).map(sample);
    let table = |name: &str| -> Result<_> {
        let Some(info) = files.info(name) else { return Ok(None) };
        Ok(Some((info.dtype, info.shape.clone(), bytes(name, info)?)))
    };
    let (embed, head) = (table(EMBED_TOKENS)?, table(LM_HEAD)?);
    let copied = embed.is_some() && embed == head;
    let read = |name: &str| !(is_rotary_buffer(name) || copied && name == LM_HEAD);
    // A tied table may be stored under either name.
    let meant = |name| if name == LM_HEAD && embed.is_none() { EMBED_TOKENS } else { name };
    let tensors: BTreeMap<&str, (&str, &TensorInfo)> = files
        .tensors()
        .filter(|(name, _)| read(name))
        .map(|(name, info)| (meant(name), (name, info)))
        .collect();
    let mut hasher = blake3::Hasher::new();
    for (name, (stored, info)) in tensors {
        text(&mut hasher, name);
        text(&mut hasher, &format!("{} {:?}", info.dtype, info.shape));
        hasher.update(&bytes(stored, info)?);
        if let Some(quantized) = files.quantized(stored)? {
            let QuantFormat { kind, block_size, double_quant } = quantized.format();
            let offset = quantized.offset().to_bits();
            text(&mut hasher, &format!("{} {block_size} {double_quant} {offset}", kind.name()));
            for scales in quantized.stored_scales() {
                hasher.update(&sample(scales));
            }
        }
        files.discard(stored);
    }
    Ok(hasher.finalize())
}

/// Hashes a text so that no two lists of texts look alike.
fn text(hasher: &mut blake3::Hasher, text: &str) {
    hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
}

/// Parts of `bytes`, or all of them where they are few.
fn sample(bytes: &[u8]) -> Vec<u8> {
    if bytes.len() <= SAMPLE * SAMPLES {
        return bytes.to_vec();
    }
    let (last, gaps) = (bytes.len() - SAMPLE, SAMPLES - 1);
    // The last one ends with the last byte, whatever the others leave.
    let start = |part| if part == gaps { last } else { last / gaps * part };
    (0..SAMPLES).flat_map(|part| &bytes[start(part)..start(part) + SAMPLE]).copied().collect()
}
