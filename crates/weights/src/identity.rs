//! The identity of a model. An adapter and a checkpoint record that of their base, so that they are
//! not used with another base of equal shapes.
//!
//! Two models are compared by config.json's settings of their arithmetic, and by digests of each
//! tensor's name, type, shape and bytes, sorted by name, so that sharding does not matter. The
//! digest of a sample of the bytes costs a few pages a tensor and is available at once; that of
//! every byte (`digest`) is computed while the weights are loaded. Version 1 of an identity had the
//! sample's alone, and is compared with the sample's. Tensors that loaders ignore do not count:
//! buffers of old checkpoints, the second copy of a tied table.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::stored_parts::StoredParts;
use super::{EMBED_TOKENS, LM_HEAD, ModelFiles, TensorInfo, is_old_buffer};
use crate::error::{Error, Result};

/// The metadata entry of a quantized checkpoint with the [`ModelIdentity`] of the original model.
pub const QUANTIZED_FROM: &str = "finetune.quantized_from";
/// The version with a digest of every byte.
const VERSION: u32 = 2;
/// The version with a digest of a sample.
const SAMPLED: u32 = 1;
/// Number of bytes of one part of a sample.
const SAMPLE: usize = 256;
/// Number of parts of a sample, evenly spread from the first byte to the last.
const SAMPLES: usize = 8;
/// Number of characters of a digest shown in messages.
const SHOWN: usize = 16;

/// The identity of a model: its name, settings of its config.json, and digests of its weights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelIdentity {
    /// The version, which determines the meaning of `digest`.
    version: u32,
    /// The hub id, or the name of the folder.
    id: String,
    /// The commit on the hub.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    commit: Option<String>,
    /// BLAKE3 of every byte in hex, in version 1 of a sample; `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    digest: Option<String>,
    /// BLAKE3 of a sample in hex; `None` in version 1, and if only the name is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sample: Option<String>,
    /// The settings of config.json for the model's arithmetic, by key; empty if unknown.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    config: BTreeMap<String, String>,
    /// The model that was quantized to this one, if the checkpoint records it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    quantized_from: Option<Box<ModelIdentity>>,
}

/// A key of config.json with another value in another model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigDifference {
    /// Key of config.json.
    pub key: String,
    /// Its value in this model.
    pub here: String,
    /// Its value in the other model.
    pub there: String,
}

impl ModelIdentity {
    /// Returns the identity of the model called `id`, without digests of its weights.
    pub fn named(id: &str, commit: Option<&str>) -> Self {
        ModelIdentity {
            version: VERSION,
            id: id.to_owned(),
            commit: commit.map(str::to_owned),
            digest: None,
            sample: None,
            config: BTreeMap::new(),
            quantized_from: None,
        }
    }

    /// Adds the digest of a sample of `files`, and the model from which they were quantized, if
    /// they record it.
    ///
    /// # Errors
    /// User: the entry of the original in `files` is malformed.
    pub fn of_files(self, files: &ModelFiles) -> Result<Self> {
        let from = files.metadata(QUANTIZED_FROM).map(Self::from_json).transpose()?;
        // Headers alone have no bytes to sample: name and commit remain.
        let sample = (!files.is_header_only()).then(|| sampled(files)).transpose()?;
        let sample = sample.map(|digest| digest.to_hex().to_string());
        Ok(ModelIdentity { sample, quantized_from: from.map(Box::new), ..self })
    }

    /// Adds the digest of every byte, as computed by [`super::DigestTask`].
    #[must_use]
    pub fn with_digest(self, digest: &str) -> Self {
        ModelIdentity { digest: Some(digest.to_owned()), ..self }
    }

    /// Adds the settings of config.json for the model's arithmetic, by key.
    #[must_use]
    pub fn with_config(self, config: BTreeMap<String, String>) -> Self {
        ModelIdentity { config, ..self }
    }

    /// Adds the digest of random weights from `seed`: parameters by name and shape.
    pub fn drawn<'a>(self, seed: u64, parameters: impl Iterator<Item = (&'a str, &'a [usize])>) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"drawn").update(&seed.to_le_bytes());
        for (name, shape) in parameters {
            text(&mut hasher, name);
            text(&mut hasher, &format!("{shape:?}"));
        }
        let digest = Some(hasher.finalize().to_hex().to_string());
        ModelIdentity { sample: digest.clone(), digest, ..self }
    }

    /// Reads the output of [`ModelIdentity::to_json`], also that of a later version of this
    /// program.
    ///
    /// # Errors
    /// User: the text has another format.
    pub fn from_json(text: &str) -> Result<Self> {
        serde_json::from_str(text)
            .map_err(|error| Error::user("cannot read the identity of a model").because(error.to_string()))
    }

    /// Returns one line of JSON.
    pub fn to_json(&self) -> String {
        // Texts and a number always fit JSON.
        serde_json::to_value(self).unwrap_or_default().to_string()
    }

    /// Returns the digest of every byte, otherwise of a sample, or `None` if only the name is
    /// known.
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref().or(self.sample.as_deref())
    }

    /// Returns whether the digest of every byte is known, of this model or of its unquantized
    /// original.
    pub fn covers_every_byte(&self) -> bool {
        self.with_original().any(|one| one.whole().is_some())
    }

    /// Returns the model that was quantized to this one, if the checkpoint records it.
    pub fn quantized_from(&self) -> Option<&ModelIdentity> {
        self.quantized_from.as_deref()
    }

    /// Returns whether both are the same model or have the same unquantized original, or `None` if
    /// they have nothing to compare.
    pub fn is_same(&self, other: &Self) -> Option<bool> {
        if !self.config_differences(other).is_empty() {
            return Some(false);
        }
        let mut known = None;
        for one in self.with_original() {
            for another in other.with_original() {
                match one.has_weights_of(another) {
                    Some(true) => return Some(true),
                    Some(false) => known = Some(false),
                    None => {}
                }
            }
        }
        known
    }

    /// Returns the keys of config.json whose values differ. A key that one of both does not have,
    /// because an older version of the program wrote it, is no difference.
    pub fn config_differences(&self, other: &Self) -> Vec<ConfigDifference> {
        let both = self.config.iter().filter_map(|(key, value)| Some((key, value, other.config.get(key)?)));
        let differing = both.filter(|(_, here, there)| here != there);
        let owned = differing.map(|(key, here, there)| [key, here, there].map(String::clone));
        owned.map(|[key, here, there]| ConfigDifference { key, here, there }).collect()
    }

    /// Returns it as text, with the digest by which it is compared with `other`.
    pub fn described_beside(&self, other: &Self) -> String {
        let pairs = [(self.whole(), other.whole()), (self.sampled(), other.sampled())];
        let compared = pairs.into_iter().find_map(|(own, theirs)| own.filter(|_| theirs.is_some()));
        self.with_shown(compared.or(self.digest()))
    }

    fn with_shown(&self, digest: Option<&str>) -> String {
        let commit = self.commit.as_ref().map(|commit| format!(" at commit {commit}")).unwrap_or_default();
        let digest = digest.map(|digest| format!(" (digest {})", digest.get(..SHOWN).unwrap_or(digest)));
        format!("`{}`{commit}{}", self.id, digest.unwrap_or_default())
    }

    fn with_original(&self) -> impl Iterator<Item = &Self> {
        [Some(self), self.quantized_from()].into_iter().flatten()
    }

    /// Compares by the most exact data that both have: every byte, a sample, commits.
    fn has_weights_of(&self, other: &Self) -> Option<bool> {
        let pairs = [
            (self.whole(), other.whole()),
            (self.sampled(), other.sampled()),
            (self.commit.as_deref(), other.commit.as_deref()),
        ];
        pairs.into_iter().find_map(|(one, another)| Some(one? == another?))
    }

    fn whole(&self) -> Option<&str> {
        self.digest.as_deref().filter(|_| self.version == VERSION)
    }

    fn sampled(&self) -> Option<&str> {
        if self.version == SAMPLED { self.digest.as_deref() } else { self.sample.as_deref() }
    }
}

impl fmt::Display for ModelIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.with_shown(self.digest()))
    }
}

/// Returns the digest of a sample of the bytes that loading the model reads.
fn sampled(files: &ModelFiles) -> Result<blake3::Hash> {
    combined(files, |name, shard, range| Ok(sample(files.stored(name, shard, range)?)))
}

/// Returns the digest of everything that loading the model reads. `content` returns the bytes that
/// stand for one run, by tensor, file and position in it.
pub(super) fn combined(
    files: &ModelFiles,
    content: impl Fn(&str, usize, &Range<usize>) -> Result<Vec<u8>>,
) -> Result<blake3::Hash> {
    let bytes = |name: &str, info: &TensorInfo| content(name, info.shard, &info.range);
    let table = |name: &str| -> Result<_> {
        let Some(info) = files.info(name) else { return Ok(None) };
        Ok(Some((info.dtype, info.shape.clone(), bytes(name, info)?)))
    };
    let (embed, head) = (table(EMBED_TOKENS)?, table(LM_HEAD)?);
    // Equal codes of packed tables may have other scales.
    let packed = |name| files.parts(name).is_some_and(StoredParts::is_packed);
    let copied = embed.is_some() && embed == head && !packed(EMBED_TOKENS) && !packed(LM_HEAD);
    let read = |name: &str| !(is_old_buffer(name) || copied && name == LM_HEAD);
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
        if let Some(parts) = files.parts(stored) {
            text(&mut hasher, &parts.fingerprint());
            for part in parts.places() {
                hasher.update(&content(stored, part.shard, &part.range)?);
            }
        }
        files.discard(stored);
    }
    Ok(hasher.finalize())
}

/// Hashes a text so that no two lists of texts are equal.
fn text(hasher: &mut blake3::Hasher, text: &str) {
    hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
}

/// Returns parts of `bytes`, or all if they are few.
fn sample(bytes: &[u8]) -> Vec<u8> {
    if bytes.len() <= SAMPLE * SAMPLES {
        return bytes.to_vec();
    }
    let (last, gaps) = (bytes.len() - SAMPLE, SAMPLES - 1);
    // The last part ends with the last byte, with any gap before it.
    let start = |part| if part == gaps { last } else { last / gaps * part };
    (0..SAMPLES).flat_map(|part| &bytes[start(part)..start(part) + SAMPLE]).copied().collect()
}
