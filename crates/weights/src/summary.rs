//! Describes a model folder from config.json and headers alone: of tensors, it reads only the
//! labels of quantized ones.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::{ModelFiles, StoredDtype, sidecar_files};
use crate::error::Result;

/// The part of a model a tensor belongs to, by its Hugging Face name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TensorGroup {
    /// The token embedding.
    Embedding,
    /// Tensors of attention, of Gated DeltaNet and of short convolutions, without norms.
    Attention,
    /// Feed-forward projections, with their biases.
    Mlp,
    /// Norms, those of queries and keys included.
    Norm,
    /// The output head.
    Head,
    /// All other tensors.
    Other,
}

impl TensorGroup {
    /// Returns the group of the tensor called `name`.
    pub fn of(name: &str) -> Self {
        let has = |part: &str| name.split('.').any(|segment| segment == part);
        let module = name.rsplit('.').nth(1).unwrap_or(name);
        if module.ends_with("norm") || module.starts_with("ln_") {
            return Self::Norm;
        }
        let groups = [
            ("embed_tokens", Self::Embedding),
            ("lm_head", Self::Head),
            ("self_attn", Self::Attention),
            ("linear_attn", Self::Attention),
            ("attention", Self::Attention),
            ("self_attention", Self::Attention),
            ("conv", Self::Attention),
            ("mlp", Self::Mlp),
            ("feed_forward", Self::Mlp),
            ("block_sparse_moe", Self::Mlp),
        ];
        groups.into_iter().find(|(part, _)| has(part)).map_or(Self::Other, |(_, group)| group)
    }
}

/// Tensors, elements and bytes of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of tensors.
    pub tensors: usize,
    /// Number of elements.
    pub elements: u64,
    /// Bytes on disk, without headers.
    pub bytes: u64,
}

impl Tally {
    fn add(&mut self, elements: u64, bytes: u64) {
        self.tensors += 1;
        self.elements += elements;
        self.bytes += bytes;
    }
}

/// The contents of a model folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// `architectures[0]` of config.json.
    pub architecture: Option<String>,
    /// `model_type` of config.json.
    pub model_type: Option<String>,
    /// All tensors. A tied embedding that is stored once counts once.
    pub total: Tally,
    /// Tensors by dtype, without quantized ones.
    pub dtypes: BTreeMap<StoredDtype, Tally>,
    /// Quantized tensors, by the name of their format.
    pub quantized: BTreeMap<&'static str, Tally>,
    /// Tensors by part of the model.
    pub groups: BTreeMap<TensorGroup, Tally>,
    /// Each file with its tensors' bytes, in order.
    pub files: Vec<(String, u64)>,
}

/// Describes the model in `folder`.
///
/// # Errors
/// User: as for [`ModelFiles::open`], or config.json is missing or malformed.
pub fn summary(folder: &Path) -> Result<Summary> {
    // The weights first: their error describes a folder that is not a model.
    summary_of(&ModelFiles::open(folder)?)
}

/// Describes the model with the weights `files`.
///
/// # Errors
/// User: the config.json in their folder is missing or malformed.
pub fn summary_of(files: &ModelFiles) -> Result<Summary> {
    let config = sidecar_files::read_config(files.folder())?;
    let (mut total, mut dtypes, mut groups) = (Tally::default(), BTreeMap::new(), BTreeMap::new());
    let mut quantized = BTreeMap::new();
    for (name, info) in files.tensors() {
        let (elements, bytes) = (info.elements() as u64, files.stored_bytes(name));
        total.add(elements, bytes);
        // A float in another order of rows is not quantized.
        match files.stored_format(name).filter(|format| StoredDtype::from_name(format).is_none()) {
            Some(format) => quantized.entry(format).or_insert_with(Tally::default),
            None => dtypes.entry(info.dtype).or_insert_with(Tally::default),
        }
        .add(elements, bytes);
        groups.entry(TensorGroup::of(name)).or_insert_with(Tally::default).add(elements, bytes);
    }
    let file_bytes = files
        .file_bytes()
        .map(|(path, bytes)| (path.file_name().unwrap_or_default().to_string_lossy().into_owned(), bytes));
    Ok(Summary {
        architecture: config
            .get("architectures")
            .and_then(|all| all.get(0))
            .and_then(Value::as_str)
            .map(Into::into),
        model_type: config.get("model_type").and_then(Value::as_str).map(Into::into),
        total,
        dtypes,
        quantized,
        groups,
        files: file_bytes.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_every_family_have_their_group() {
        for (name, group) in [
            ("model.embed_tokens.weight", TensorGroup::Embedding),
            ("lm_head.weight", TensorGroup::Head),
            ("model.norm.weight", TensorGroup::Norm),
            ("model.layers.0.self_attn.qkv_proj.weight", TensorGroup::Attention),
            ("model.layers.0.self_attn.q_norm.weight", TensorGroup::Norm),
            ("model.layers.0.self_attn.q_proj.bias", TensorGroup::Attention),
            ("model.layers.0.pre_feedforward_layernorm.weight", TensorGroup::Norm),
            ("model.layers.0.mlp.gate_up_proj.weight", TensorGroup::Mlp),
            ("model.layers.0.mlp.experts.3.down_proj.weight", TensorGroup::Mlp),
            ("model.layers.0.block_sparse_moe.experts.3.w1.weight", TensorGroup::Mlp),
            ("model.layers.0.feed_forward.experts.gate_up_proj", TensorGroup::Mlp),
            ("model.layers.0.conv.in_proj.weight", TensorGroup::Attention),
            ("model.embedding_norm.weight", TensorGroup::Norm),
            ("model.layers.0.rotary_emb.inv_freq", TensorGroup::Other),
            ("x", TensorGroup::Other),
        ] {
            assert_eq!(TensorGroup::of(name), group, "{name}");
        }
    }
}
