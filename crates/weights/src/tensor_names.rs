//! Maps the tensor names of other programs to those of Hugging Face's text models:
//! `model.layers.0…`, `model.embed_tokens`, `model.norm`, `lm_head`. Models and adapters share this
//! table of prefixes.
//!
//! Two kinds of parts carry no information about the tensor. Wrappers (torch.compile, DDP, FSDP,
//! activation checkpointing) insert a part anywhere in a name. Containers (PEFT, vision models,
//! classes with and without a head) prepend parts. A name is changed only if its rest is one of a
//! text model: parts of a vision tower or of another architecture stay.

use std::collections::BTreeMap;

use super::{ClassNames, StoredDtype};
use crate::recipe::enums::Dtype;

/// Parts that wrappers insert into names: torch.compile; DDP, DeepSpeed and FSDP; activation
/// checkpointing; Lightning.
const WRAPPERS: [&str; 6] = [
    "_orig_mod",
    "module",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_fpw_module",
    "_forward_module",
];

/// Parts that contain a text model: PEFT, classes with a head, vision models, older classes and
/// trainers.
const CONTAINERS: [&str; 9] = [
    "base_model",
    "model",
    "language_model",
    "text_model",
    "transformer",
    "decoder",
    "backbone",
    "llm",
    "pretrained_model",
];

/// Parts of other towers: their tensors are not of the text model, even with the same layers.
const OTHER_TOWERS: [&str; 7] =
    ["vision_tower", "vision_model", "visual", "audio_tower", "encoder", "mtp", "draft"];

/// Parts at the root of a text model.
const ROOTS: [&str; 9] = [
    "layers",
    "embed_tokens",
    "embed_tokens_per_layer",
    "per_layer_model_projection",
    "per_layer_projection_norm",
    "altup_projections",
    "altup_unembed_projections",
    "norm",
    "rotary_emb",
];

/// The head, which is beside the text model.
const HEAD: &str = "lm_head";

/// The ends of the names of values that no optimizer updates: biases that routers add to scores,
/// factors on the outputs of blocks, numbers of activations. Outputs keep their dtype.
const BUFFERS: [&str; 5] =
    [".e_score_correction_bias", ".expert_bias", ".layer_scalar", ".act_fn.beta", ".act_fn.eps"];

/// Returns the dtype in which an output has the tensor `name`, stored as `stored`, if `dtype` is
/// asked for.
pub fn output_dtype(name: &str, stored: StoredDtype, dtype: Dtype) -> StoredDtype {
    if BUFFERS.iter().any(|end| name.ends_with(end)) { stored } else { stored.stored_as(dtype) }
}

/// The names of one file, or of the files of one model.
#[derive(Debug, Default)]
pub struct NameRules {
    /// Leading parts that all names share, without a part of a text model: another program's
    /// container.
    shared: Vec<String>,
}

impl NameRules {
    /// Returns the rules for files with these `names`.
    pub fn new<'n>(names: impl IntoIterator<Item = &'n str>) -> Self {
        let mut shared: Option<Vec<&str>> = None;
        for name in names {
            let parts = || parts(name).take_while(|part| *part != HEAD && !ROOTS.contains(part));
            shared = Some(match shared {
                None => parts().collect(),
                Some(shared) => {
                    let same = shared.iter().zip(parts()).take_while(|(one, other)| *one == other).count();
                    shared[..same].to_vec()
                }
            });
        }
        let shared = shared.filter(|front| !front.iter().any(|part| OTHER_TOWERS.contains(part)));
        NameRules { shared: shared.unwrap_or_default().into_iter().map(str::to_owned).collect() }
    }

    /// Returns the Hugging Face name of a tensor or module of a text model. Any other name is only
    /// stripped of wrappers.
    pub fn canonical(&self, name: &str) -> String {
        let all: Vec<&str> = parts(name).collect();
        let shares = all.iter().zip(&self.shared).take_while(|(one, other)| one == other).count();
        let rest = if shares == self.shared.len() { &all[shares..] } else { &all };
        match from_root(rest) {
            Some(rest) if rest[0] == HEAD => rest.join("."),
            Some(rest) => format!("model.{}", rest.join(".")),
            None => of_another_class(&all, shares).unwrap_or_else(|| all.join(".")),
        }
    }

    /// Returns new names for `names`, by the old one, if they differ.
    ///
    /// # Errors
    /// The two names that map to the same one.
    pub(super) fn renamed<'n>(
        &self,
        names: impl IntoIterator<Item = &'n str>,
    ) -> Result<BTreeMap<String, String>, (String, String)> {
        let mut by_new: BTreeMap<String, &str> = BTreeMap::new();
        for name in names {
            if let Some(other) = by_new.insert(self.canonical(name), name) {
                return Err((other.to_owned(), name.to_owned()));
            }
        }
        let changed = by_new.into_iter().filter(|(new, old)| new != old);
        Ok(changed.map(|(new, old)| (old.to_owned(), new)).collect())
    }
}

/// Returns the parts of a name except those of wrappers.
fn parts(name: &str) -> impl Iterator<Item = &str> {
    name.split('.').filter(|part| !WRAPPERS.contains(part))
}

/// Returns the parts from the root of a text model on, if only containers precede it.
fn from_root<'p, 'n>(parts: &'p [&'n str]) -> Option<&'p [&'n str]> {
    let start = parts.iter().position(|part| !CONTAINERS.contains(part))?;
    let rest = &parts[start..];
    let is_numbered = || rest.get(1).is_some_and(|part| part.parse::<usize>().is_ok());
    let is_text = rest[0] == HEAD || ROOTS.contains(&rest[0]) && (rest[0] != "layers" || is_numbered());
    is_text.then_some(rest)
}

/// Returns the usual name of a tensor of a class with other names, if only containers or the first
/// `shared` parts precede it.
fn of_another_class(parts: &[&str], shared: usize) -> Option<String> {
    let contained = parts.iter().take_while(|part| CONTAINERS.contains(part)).count();
    (0..=contained.max(shared).min(parts.len()))
        .find_map(|start| ClassNames::usual_of_any(&parts[start..].join(".")))
}

/// Returns the part of a model that a tensor belongs to: its name up to the first part that is no
/// container.
pub(super) fn tower(name: &str) -> String {
    let all: Vec<&str> = name.split('.').collect();
    let contained = all.iter().take_while(|part| CONTAINERS.contains(part)).count();
    all[..all.len().min(contained + 1)].join(".")
}

/// Returns a warning about changed names: `renamed` has new names by the old ones.
pub(super) fn rename_warning(renamed: &BTreeMap<String, String>) -> Option<String> {
    let is_foreign = |(old, new): &(&String, &String)| ClassNames::usual_of_any(old).as_ref() != Some(*new);
    let foreign: Vec<_> = renamed.iter().filter(is_foreign).collect();
    let (old, new) = foreign.first()?;
    let named = match foreign.len() {
        1 => "1 tensor has a name".to_owned(),
        count => format!("{count} tensors have names"),
    };
    Some(format!("{named} of another program: `{old}` is read as `{new}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_text_models() {
        let layer = "model.layers.0.self_attn.q_proj.weight";
        for name in [
            layer,
            "layers.0.self_attn.q_proj.weight",
            "_orig_mod.model.layers.0.self_attn.q_proj.weight",
            "module._orig_mod.module.model.layers.0.self_attn.q_proj.weight",
            "model._orig_mod.layers.0._checkpoint_wrapped_module.self_attn.q_proj.weight",
            "model.layers.0._fsdp_wrapped_module.self_attn.q_proj.weight",
            "base_model.model.base_model.model.model.layers.0.self_attn.q_proj.weight",
            "language_model.model.layers.0.self_attn.q_proj.weight",
            "model.language_model.layers.0.self_attn.q_proj.weight",
            "model.text_model.layers.0.self_attn.q_proj.weight",
            "transformer.layers.0.self_attn.q_proj.weight",
        ] {
            assert_eq!(NameRules::default().canonical(name), layer);
        }
        for (name, expected) in [
            ("norm.weight", "model.norm.weight"),
            ("base_model.model.model.embed_tokens", "model.embed_tokens"),
            ("language_model.lm_head.weight", "lm_head.weight"),
            ("model.language_model.embed_tokens_per_layer.weight", "model.embed_tokens_per_layer.weight"),
            ("model.lm_head.weight", "lm_head.weight"),
        ] {
            assert_eq!(NameRules::default().canonical(name), expected);
        }
    }

    #[test]
    fn other_names_stay() {
        for name in [
            "model.visual.blocks.0.norm1.weight",
            "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
            "model.mtp.layers.0.input_layernorm.weight",
            "bert.encoder.layer.0.attention.self.query.weight",
            "model.layers.weight",
            "w.weight",
            "model",
        ] {
            assert_eq!(NameRules::default().canonical(name), name);
        }
        assert_eq!(NameRules::default().canonical("_orig_mod.model.visual.x"), "model.visual.x");
        let alone = ["w.weight", "w.bias"];
        assert_eq!(NameRules::new(alone).canonical("w.bias"), "w.bias");
    }

    #[test]
    fn names_of_other_classes() {
        for (name, expected) in [
            ("gpt_neox.layers.0.attention.dense.weight", "model.layers.0.attention.dense.weight"),
            ("base_model.model.gpt_neox.embed_in.lora_A.weight", "model.embed_tokens.lora_A.weight"),
            ("embed_out.weight", "lm_head.weight"),
            ("module.transformer.h.1.ln_mlp.bias", "model.layers.1.ln_mlp.bias"),
        ] {
            assert_eq!(NameRules::default().canonical(name), expected);
        }
        let falcon = ["transformer.h.0.ln_attn.weight", "transformer.ln_f.weight"];
        let rules = NameRules::new(falcon);
        assert_eq!(
            falcon.map(|name| rules.canonical(name)),
            ["model.layers.0.ln_attn.weight", "model.norm.weight"]
        );
        assert_eq!(rename_warning(&rules.renamed(falcon).expect("two names")), None);
    }

    #[test]
    fn a_front_that_all_names_share_says_nothing() {
        let names = ["actor.net.model.norm.weight", "actor.net.lm_head.weight"];
        let rules = NameRules::new(names);
        assert_eq!(names.map(|name| rules.canonical(name)), ["model.norm.weight", "lm_head.weight"]);
        let vision = ["vision_tower.encoder.layers.0.q_proj", "vision_tower.encoder.layers.1.q_proj"];
        assert_eq!(NameRules::new(vision).canonical(vision[0]), vision[0]);
        let rules = NameRules::new(["actor.norm.weight", "critic.norm.weight"]);
        assert_eq!(rules.canonical("actor.norm.weight"), "actor.norm.weight");
    }

    #[test]
    fn two_names_of_one_tensor_are_told() {
        let rules = NameRules::default();
        let twins = rules.renamed(["model.norm.weight", "norm.weight"]).expect_err("one tensor");
        assert_eq!(twins, ("model.norm.weight".to_owned(), "norm.weight".to_owned()));
        let names = rules.renamed(["_orig_mod.lm_head.weight", "model.norm.weight"]).expect("two");
        assert!(
            rename_warning(&names)
                .is_some_and(|note| note.ends_with("`_orig_mod.lm_head.weight` is read as `lm_head.weight`"))
        );
    }
}
