//! adapter_model.safetensors: PEFT's names for the tensors of an adapter.
//!
//! `base_model.model.<module>.lora_A.weight` is A [r, in], `….lora_B.weight` is B [out, r]; a module of
//! modules_to_save is there whole as `base_model.model.<module>.weight` and `.bias`. Reading checks that the
//! file is what the configuration says and keeps it mapped; [`Adapter::check_fits`] then holds it against a model.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::{AdapterConfig, CONFIG_FILE, ModuleInfo, Target, targets};
use crate::error::{Error, Result};
use crate::weights::{self, Element, Entry, ModelFiles, StoredDtype, TensorInfo, TensorSink, Written};

/// The name of the file.
pub const WEIGHTS_FILE: &str = "adapter_model.safetensors";

/// What PEFT puts before the module names of a model.
const PREFIX: &str = "base_model.model.";

/// Which tensor of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TensorKind {
    /// A: [r, in].
    LoraA,
    /// B: [out, r].
    LoraB,
    /// DoRA's magnitudes: [out].
    LoraMagnitude,
    /// A of an embedding: [r, vocab].
    LoraEmbeddingA,
    /// B of an embedding: [hidden, r].
    LoraEmbeddingB,
    /// Rows of an embedding that train: [n, hidden].
    TokensDelta,
    /// The weight of a module that is saved whole.
    SavedWeight,
    /// The bias of a module that is saved whole.
    SavedBias,
}

impl TensorKind {
    // The longer ends stand first: `.lora_A.weight` ends in `.weight` too.
    const ALL: [Self; 8] = [
        Self::LoraA,
        Self::LoraB,
        Self::LoraMagnitude,
        Self::LoraEmbeddingA,
        Self::LoraEmbeddingB,
        Self::TokensDelta,
        Self::SavedWeight,
        Self::SavedBias,
    ];

    fn suffix(self) -> &'static str {
        match self {
            Self::LoraA => ".lora_A.weight",
            Self::LoraB => ".lora_B.weight",
            Self::LoraMagnitude => ".lora_magnitude_vector",
            Self::LoraEmbeddingA => ".lora_embedding_A",
            Self::LoraEmbeddingB => ".lora_embedding_B",
            Self::TokensDelta => ".token_adapter.trainable_tokens_delta",
            Self::SavedWeight => ".weight",
            Self::SavedBias => ".bias",
        }
    }

    /// Whether it belongs to a module that is saved whole.
    pub fn is_saved(self) -> bool {
        matches!(self, Self::SavedWeight | Self::SavedBias)
    }
}

/// A tensor of an adapter: its module, its kind and its shape.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct AdapterTensor {
    /// The module's Hugging Face name: `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// Which tensor of it.
    pub kind: TensorKind,
    /// Its shape.
    pub shape: Vec<usize>,
}

impl AdapterTensor {
    /// Its name in the file.
    pub fn name(&self) -> String {
        file_name(&self.module, self.kind)
    }
}

fn file_name(module: &str, kind: TensorKind) -> String {
    format!("{PREFIX}{module}{}", kind.suffix())
}

/// An adapter on disk, open and checked against its own configuration.
#[derive(Debug)]
pub struct Adapter {
    config: AdapterConfig,
    files: ModelFiles,
    targets: Vec<Target>,
    saved: BTreeSet<String>,
}

impl Adapter {
    /// Opens the adapter in `folder`.
    ///
    /// # Errors
    /// The user's: a file is missing or malformed; weights are a pickle; a tensor has a name or a type that is not
    /// LoRA's; A or B is missing or has not the rank that the configuration gives it; no tensor at all.
    pub fn read(folder: &Path) -> Result<Self> {
        let config = AdapterConfig::read(folder)?;
        let path = folder.join(WEIGHTS_FILE);
        let failed =
            |cause: String| Error::user(format!("cannot read adapter {}", folder.display())).because(cause);
        if !path.exists() {
            return Err(missing_weights(folder));
        }
        let files = ModelFiles::open_file(&path)?;
        let mut modules: BTreeMap<&str, BTreeSet<TensorKind>> = BTreeMap::new();
        for (name, info) in files.tensors() {
            let (module, kind) = split_name(name).ok_or_else(|| {
                failed(format!("{WEIGHTS_FILE} has tensor `{name}`; accepted: {PREFIX}<module> and .lora_A.weight, .lora_B.weight, .weight or .bias"))
            })?;
            if !info.dtype.is_float() {
                return Err(failed(format!(
                    "tensor `{name}` has dtype {}; accepted: F32, F16, BF16, F64",
                    info.dtype
                )));
            }
            modules.entry(module).or_default().insert(kind);
        }
        if modules.is_empty() {
            return Err(failed(format!("{WEIGHTS_FILE} holds no tensor")));
        }
        let is_saved = |kinds: &BTreeSet<TensorKind>| kinds.iter().all(|kind| kind.is_saved());
        let (saved, adapted): (Vec<_>, Vec<_>) = modules.iter().partition(|(_, kinds)| is_saved(kinds));
        let targets = targets::targets_of(&config.spec, adapted.iter().map(|(module, _)| **module))?;
        for target in &targets {
            check_target(&files, target).map_err(failed)?;
        }
        let saved: BTreeSet<String> = saved.into_iter().map(|(module, _)| (*module).to_owned()).collect();
        for name in &config.spec.modules_to_save {
            if !saved.iter().any(|module| module.ends_with(name)) {
                return Err(failed(format!(
                    "{CONFIG_FILE} has `modules_to_save` with `{name}`, of which {WEIGHTS_FILE} holds no tensor"
                )));
            }
        }
        Ok(Self { config, files, targets, saved })
    }

    /// Its configuration.
    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// The modules with LoRA, sorted by name, with the ranks and scales they were trained with.
    pub fn targets(&self) -> &[Target] {
        &self.targets
    }

    /// The modules that are saved whole, sorted.
    pub fn saved(&self) -> impl ExactSizeIterator<Item = &str> {
        self.saved.iter().map(String::as_str)
    }

    /// The header's word on a tensor.
    pub fn info(&self, module: &str, kind: TensorKind) -> Option<&TensorInfo> {
        self.files.info(&file_name(module, kind))
    }

    /// Reads a tensor, rounded to `T`; `out` has its number of elements.
    ///
    /// # Errors
    /// The user's: there is no such tensor, or it holds NaN or infinity. A fault of ours: `out` has another length.
    pub fn read_into<T: Element>(&self, module: &str, kind: TensorKind, out: &mut [T]) -> Result<()> {
        let name = file_name(module, kind);
        self.files.read_into(&name, out)?;
        if let Some(value) = out.iter().map(|value| value.to_f32()).find(|value| !value.is_finite()) {
            return Err(Error::user(format!("cannot read adapter {}", self.files.folder().display()))
                .because(format!("tensor `{name}` holds {value}; accepted: finite numbers"))
                .hint("give an earlier checkpoint of that run"));
        }
        Ok(())
    }

    /// The bytes of a tensor as they are in the file.
    ///
    /// # Errors
    /// The user's: there is no such tensor.
    pub fn bytes(&self, module: &str, kind: TensorKind) -> Result<&[u8]> {
        self.files.bytes(&file_name(module, kind))
    }

    /// Checks that each tensor fits a module of the model.
    ///
    /// # Errors
    /// The user's: the adapter was made for another model.
    pub fn check_fits(&self, modules: &[ModuleInfo]) -> Result<()> {
        let by_name: BTreeMap<&str, &ModuleInfo> =
            modules.iter().map(|module| (module.name.as_str(), module)).collect();
        let base = self.config.base_model_name_or_path.as_deref().unwrap_or("a model it does not name");
        let other = |cause: String| {
            Error::user(format!("cannot use adapter {} with this model", self.files.folder().display()))
                .because(cause)
                .hint(format!("give the model it was trained on as `--model`: {base}"))
        };
        for (name, info) in self.files.tensors() {
            let Some((module, kind)) = split_name(name) else { continue };
            let Some(found) = by_name.get(module) else {
                return Err(other(format!("it has tensors for `{module}`, which the model has not")));
            };
            let fits = match (kind, found.shape.as_slice(), info.shape.as_slice()) {
                (TensorKind::LoraA, &[_, inputs], &[_, found]) => inputs == found,
                (TensorKind::LoraB, &[outputs, _], &[found, _]) => outputs == found,
                (TensorKind::LoraMagnitude, &[outputs, _], &[found]) => outputs == found,
                (TensorKind::SavedWeight, expected, found) => expected == found,
                (TensorKind::SavedBias, expected, &[found]) => expected.first() == Some(&found),
                _ => false,
            };
            if !fits {
                return Err(other(format!(
                    "`{name}` has shape {:?}, the weight of `{module}` has {:?}",
                    info.shape, found.shape
                )));
            }
        }
        Ok(())
    }
}

fn split_name(name: &str) -> Option<(&str, TensorKind)> {
    let name = name.strip_prefix(PREFIX)?;
    let (module, kind) =
        TensorKind::ALL.into_iter().find_map(|kind| Some((name.strip_suffix(kind.suffix())?, kind)))?;
    // `lora_magnitude_vector`, `lora_embedding_A` and the like of other methods are no modules of a model.
    (!module.is_empty() && !module.contains(".lora_")).then_some((module, kind))
}

fn check_target(files: &ModelFiles, target: &Target) -> Result<(), String> {
    for (kind, rank_at) in [(TensorKind::LoraA, 0), (TensorKind::LoraB, 1)] {
        let name = file_name(&target.name, kind);
        let Some(info) = files.info(&name) else {
            return Err(format!("{WEIGHTS_FILE} has no tensor `{name}`, though it has the other half"));
        };
        if info.shape.len() != 2 || info.shape[rank_at] != target.r {
            let expected =
                if rank_at == 0 { format!("[{}, in]", target.r) } else { format!("[out, {}]", target.r) };
            return Err(format!(
                "tensor `{name}` has shape {:?}; r = {} in {CONFIG_FILE} makes it {expected}",
                info.shape, target.r
            ));
        }
    }
    for kind in [TensorKind::SavedWeight, TensorKind::SavedBias] {
        let name = file_name(&target.name, kind);
        if files.info(&name).is_some() {
            return Err(format!("module `{}` has LoRA and is saved whole too (`{name}`)", target.name));
        }
    }
    Ok(())
}

fn missing_weights(folder: &Path) -> Error {
    let failed = Error::user(format!("cannot read adapter {}", folder.display()));
    if folder.join("adapter_model.bin").exists() {
        let shown = folder.display();
        return failed
            .because(format!("its weights are a pickle file (adapter_model.bin), which can run code when opened; accepted: {WEIGHTS_FILE}"))
            .hint(format!(
                "convert it once with Python: python -c \"import torch; from safetensors.torch import save_file; save_file(torch.load('{shown}/adapter_model.bin', weights_only=True), '{shown}/{WEIGHTS_FILE}')\""
            ));
    }
    failed
        .because(format!("it has no {WEIGHTS_FILE}"))
        .hint(format!("give the folder that holds {CONFIG_FILE} and {WEIGHTS_FILE}"))
}

/// Writes an adapter into the existing `folder`: the weights as `dtype` in the order of their names, then the
/// configuration. `write` is called once for each tensor to give its values to the sink.
///
/// # Errors
/// As [`weights::write_file`].
pub fn write(
    folder: &Path,
    config: &AdapterConfig,
    tensors: &[AdapterTensor],
    dtype: StoredDtype,
    mut write: impl FnMut(&AdapterTensor, &mut TensorSink<'_>) -> Result<()>,
) -> Result<Vec<Written>> {
    let by_name: BTreeMap<String, &AdapterTensor> =
        tensors.iter().map(|tensor| (tensor.name(), tensor)).collect();
    let entry = |(name, tensor): (&String, &&AdapterTensor)| Entry {
        name: name.clone(),
        dtype,
        shape: tensor.shape.clone(),
    };
    let entries: Vec<Entry> = by_name.iter().map(entry).collect();
    let weights = weights::write_file(&folder.join(WEIGHTS_FILE), &entries, |entry, sink| {
        match by_name.get(&entry.name) {
            Some(tensor) => write(tensor, sink),
            None => Err(Error::internal(format!("cannot write tensor `{}`", entry.name))),
        }
    })?;
    let config = weights::write_text(&folder.join(CONFIG_FILE), &config.to_json())?;
    Ok(vec![weights, config])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_peft_s() {
        for (name, module, kind) in [
            (
                "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight",
                "model.layers.0.mlp.down_proj",
                TensorKind::LoraA,
            ),
            ("base_model.model.lm_head.lora_B.weight", "lm_head", TensorKind::LoraB),
            ("base_model.model.lm_head.weight", "lm_head", TensorKind::SavedWeight),
            ("base_model.model.model.norm.bias", "model.norm", TensorKind::SavedBias),
        ] {
            assert_eq!(split_name(name), Some((module, kind)));
            assert_eq!(file_name(module, kind), name);
        }
        for other in [
            "model.layers.0.mlp.down_proj.lora_A.weight",
            "base_model.model.lm_head.lora_magnitude_vector",
            "base_model.model.model.embed_tokens.lora_embedding_A",
            "base_model.model.x.lora_A.default.weight",
            "base_model.model..weight",
        ] {
            assert_eq!(split_name(other), None, "{other}");
        }
    }
}
