//! PEFT's names for the tensors of an adapter.
//!
//! A tensor is called `base_model.model.<module>` plus a suffix for its kind. A few suffixes have
//! changed over PEFT's versions: all are read, and the one that every version reads is written.

use crate::weights::NameRules;

/// The file with the tensors of an adapter.
pub const WEIGHTS_FILE: &str = "adapter_model.safetensors";

/// The prefix that PEFT adds to the module names of a model.
pub(super) const PREFIX: &str = "base_model.model.";

/// The kind of a tensor of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TensorKind {
    /// A: [r, in].
    LoraA,
    /// B: [out, r].
    LoraB,
    /// DoRA's magnitudes: `[out]`; `[hidden]` for an embedding.
    LoraMagnitude,
    /// A of an embedding: [r, vocab].
    LoraEmbeddingA,
    /// B of an embedding: [hidden, r].
    LoraEmbeddingB,
    /// Trained rows of an embedding, as values and not as differences from the base's: [n, hidden].
    TokensDelta,
    /// The base's weight under the adapter. PEFT saves a copy for embeddings and heads with LoRA
    /// and after a change of the vocabulary size; it replaces the base's.
    BaseWeight,
    /// The weight of a module that is saved whole.
    SavedWeight,
    /// The bias of a module that is saved whole.
    SavedBias,
}

/// The suffixes of each kind: first the one that is written, then others that are read.
const ENDS: [(TensorKind, &[&str]); 9] = [
    (TensorKind::LoraA, &[".lora_A.weight"]),
    (TensorKind::LoraB, &[".lora_B.weight"]),
    // PEFT 0.9 to 0.12 used a plain parameter, later versions a module; files of both exist.
    (TensorKind::LoraMagnitude, &[".lora_magnitude_vector", ".lora_magnitude_vector.weight"]),
    (TensorKind::LoraEmbeddingA, &[".lora_embedding_A"]),
    (TensorKind::LoraEmbeddingB, &[".lora_embedding_B"]),
    (TensorKind::TokensDelta, &[".token_adapter.trainable_tokens_delta"]),
    (TensorKind::BaseWeight, &[".base_layer.weight", ".token_adapter.base_layer.weight"]),
    (TensorKind::SavedWeight, &[".weight", ".modules_to_save.weight"]),
    (TensorKind::SavedBias, &[".bias", ".modules_to_save.bias"]),
];

impl TensorKind {
    /// Returns whether it belongs to a module that is saved whole.
    pub fn is_saved(self) -> bool {
        matches!(self, Self::SavedWeight | Self::SavedBias)
    }

    /// Returns whether it belongs to a module with LoRA.
    pub(crate) fn is_lora(self) -> bool {
        matches!(
            self,
            Self::LoraA | Self::LoraB | Self::LoraMagnitude | Self::LoraEmbeddingA | Self::LoraEmbeddingB
        )
    }
}

/// A tensor of an adapter: its module, its kind and its shape.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct AdapterTensor {
    /// The module's Hugging Face name: `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// The kind of the tensor.
    pub kind: TensorKind,
    /// Shape of the tensor, as it is stored.
    pub shape: Vec<usize>,
}

impl AdapterTensor {
    /// Returns its name in the file.
    pub fn name(&self) -> String {
        file_name(&self.module, self.kind)
    }
}

/// Returns the name under which a tensor is written.
pub(super) fn file_name(module: &str, kind: TensorKind) -> String {
    let end = ENDS.iter().find(|(of, _)| *of == kind).map_or("", |(_, ends)| ends[0]);
    format!("{PREFIX}{module}{end}")
}

/// Parts of a name that precede the adapter's name in a module's own state (`state_dict()`).
const NAMED: [&str; 7] = [
    "lora_A",
    "lora_B",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "trainable_tokens_delta",
    "modules_to_save",
];

/// The last parts of names of parameters, which are not adapter names.
const PARAMETERS: [&str; 2] = ["weight", "bias"];

/// Removes the adapter's name: `q_proj.lora_A.default.weight` becomes `q_proj.lora_A.weight`.
pub(super) fn without_adapter(name: &str) -> String {
    let mut parts: Vec<&str> = name.split('.').collect();
    let mark = parts.iter().rposition(|part| NAMED.contains(part));
    if let Some(mark) = mark
        && parts.get(mark + 1).is_some_and(|part| !PARAMETERS.contains(part))
        // An adapter's name has no dot, so at most the parameter follows.
        && parts.len() <= mark + 3
    {
        parts.remove(mark + 1);
    }
    parts.join(".")
}

/// Returns the module and the kind of a name in a file, by the naming rules `rules`.
pub(super) fn split_name(name: &str, rules: &NameRules) -> Option<(String, TensorKind)> {
    let name = without_adapter(name);
    let ends = ENDS.iter().flat_map(|(kind, ends)| ends.iter().map(move |end| (*end, *kind)));
    // The longest suffix decides: `.lora_A.weight` and `.base_layer.weight` end in `.weight` too.
    let (end, kind) = ends.filter(|(end, _)| name.ends_with(end)).max_by_key(|(end, _)| end.len())?;
    let module = name.strip_suffix(end)?;
    // Tensors of other methods would look like modules that are saved whole.
    let foreign = [".lora_", ".token_adapter", ".base_layer"].iter().any(|part| module.contains(part));
    if module.is_empty() || module.ends_with('.') || foreign {
        return None;
    }
    // A module that is not of a text model keeps its name for the error.
    let module = rules.canonical(module);
    let module = module.strip_prefix(PREFIX).unwrap_or(&module);
    (!module.is_empty()).then(|| (module.to_owned(), kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(name: &str) -> Option<(String, TensorKind)> {
        split_name(name, &NameRules::default())
    }

    #[test]
    fn names_of_wrapped_models_are_read() {
        for front in [
            "",
            "model.",
            "_orig_mod.base_model.model.model.",
            "base_model.model.language_model.model.",
            "base_model.model.base_model.model.model.",
            "module.base_model.model.model._fsdp_wrapped_module.",
        ] {
            let name = format!("{front}layers.0._checkpoint_wrapped_module.mlp.up_proj.lora_A.weight");
            let module = "model.layers.0.mlp.up_proj".to_owned();
            assert_eq!(split(&name), Some((module, TensorKind::LoraA)), "{name}");
        }
    }

    #[test]
    fn names_are_peft_s() {
        for (name, module, kind) in [
            ("model.layers.0.mlp.down_proj.lora_A.weight", "model.layers.0.mlp.down_proj", TensorKind::LoraA),
            ("lm_head.lora_B.weight", "lm_head", TensorKind::LoraB),
            ("lm_head.lora_magnitude_vector", "lm_head", TensorKind::LoraMagnitude),
            ("model.embed_tokens.lora_embedding_A", "model.embed_tokens", TensorKind::LoraEmbeddingA),
            ("model.embed_tokens.lora_embedding_B", "model.embed_tokens", TensorKind::LoraEmbeddingB),
            (
                "model.embed_tokens.token_adapter.trainable_tokens_delta",
                "model.embed_tokens",
                TensorKind::TokensDelta,
            ),
            ("lm_head.base_layer.weight", "lm_head", TensorKind::BaseWeight),
            ("lm_head.weight", "lm_head", TensorKind::SavedWeight),
            ("model.norm.bias", "model.norm", TensorKind::SavedBias),
        ] {
            let name = format!("{PREFIX}{name}");
            assert_eq!(split(&name), Some((module.to_owned(), kind)));
            assert_eq!(file_name(module, kind), name);
        }
    }

    #[test]
    fn names_of_other_versions_are_read() {
        for (end, kind) in [
            ("lora_magnitude_vector.weight", TensorKind::LoraMagnitude),
            ("lora_magnitude_vector.default", TensorKind::LoraMagnitude),
            ("lora_magnitude_vector.default.weight", TensorKind::LoraMagnitude),
            ("token_adapter.base_layer.weight", TensorKind::BaseWeight),
            ("lora_A.default.weight", TensorKind::LoraA),
            ("lora_B.my-own_name.weight", TensorKind::LoraB),
            ("lora_embedding_A.default", TensorKind::LoraEmbeddingA),
            ("token_adapter.trainable_tokens_delta.default", TensorKind::TokensDelta),
            ("modules_to_save.default.weight", TensorKind::SavedWeight),
        ] {
            let name = format!("{PREFIX}lm_head.{end}");
            assert_eq!(split(&name), Some(("lm_head".to_owned(), kind)), "{end}");
        }
    }

    #[test]
    fn names_of_other_methods_are_not() {
        for other in [
            "base_model.model.x.lora_A.default",
            "base_model.model.x.lora_A.one.two.weight",
            "base_model.model.x.lora_B.bias",
            "base_model.model.x.lora_B.default.bias",
            "base_model.model.x.lora_diag",
            "base_model.model.x.token_adapter.weight",
            "base_model.model.x.base_layer.bias",
            "base_model.model..weight",
        ] {
            assert_eq!(split(other), None, "{other}");
        }
    }
}
