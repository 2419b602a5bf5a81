//! Every parameter of a run with its place and its first value: the model's own from files or a seed, the adapter's
//! from a saved one or fresh.

use super::adaptation::Adaptation;
use crate::adapter::TensorKind;
use crate::error::{Error, Result};
use crate::model::{self, ModelConfig, Role, Segment, initial_lora, initial_value};
use crate::strategy::{Fill, Slot};
use crate::weights::{Element, ModelFiles};

const EMBED: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
/// The way out when weights and config.json do not fit.
const ONE_MODEL: &str = "give config.json and weights of one and the same model";

/// The module that a tied model computes with the same weight.
pub(super) fn twin_of(module: &str) -> Option<&'static str> {
    match module {
        "model.embed_tokens" => Some("lm_head"),
        "lm_head" => Some("model.embed_tokens"),
        _ => None,
    }
}

/// The name under which the adapter trains and saves `module` whole: its own, or that of the one it is tied to.
fn saved_as<'a>(config: &ModelConfig, adaptation: &'a Adaptation, module: &str) -> Option<&'a str> {
    let tied = config.tie_word_embeddings && !adaptation.unties();
    let names = [Some(module), twin_of(module).filter(|_| tied)];
    names
        .into_iter()
        .flatten()
        .find_map(|name| adaptation.saved.iter().find(|saved| *saved == name))
        .map(String::as_str)
}

/// Every parameter of the run. A tied head gets one of its own only when it or the embedding is trained apart
/// (PEFT's `modules_to_save` unties them).
pub(super) fn slots(config: &ModelConfig, adaptation: Option<&Adaptation>, trains_all: bool) -> Vec<Slot> {
    let trains =
        |module: &str| trains_all || adaptation.is_some_and(|a| saved_as(config, a, module).is_some());
    let mut slots: Vec<Slot> = model::parameters(config)
        .into_iter()
        .map(|spec| Slot {
            trainable: trains(spec.module()),
            decay: matches!(spec.role, Role::Weight | Role::Embedding),
            name: spec.name,
            shape: spec.shape,
            segment: spec.segment,
            adapter: false,
        })
        .collect();
    if config.tie_word_embeddings && adaptation.is_some_and(Adaptation::unties) {
        slots.push(Slot {
            name: HEAD.into(),
            shape: vec![config.vocab_size, config.hidden_size],
            segment: Segment::Head,
            decay: true,
            trainable: trains("lm_head"),
            adapter: false,
        });
    }
    let Some(adaptation) = adaptation else { return slots };
    let modules = model::modules(config);
    for target in &adaptation.targets {
        let Some(module) = modules.iter().find(|module| module.name == target.name) else { continue };
        let segment =
            slots.iter().find(|s| s.name.strip_suffix(".weight") == Some(&target.name)).map(|s| s.segment);
        let shapes =
            [("lora_A", [target.r, module.in_features]), ("lora_B", [module.out_features, target.r])];
        for (matrix, shape) in shapes {
            slots.push(Slot {
                name: format!("{}.{matrix}.weight", target.name),
                shape: shape.to_vec(),
                segment: segment.unwrap_or(Segment::Head),
                decay: true,
                trainable: true,
                adapter: true,
            });
        }
    }
    slots
}

/// Where first values come from.
pub(super) struct Values<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) files: Option<&'a ModelFiles>,
    pub(super) adaptation: Option<&'a Adaptation>,
    pub(super) seed: u64,
}

impl Values<'_> {
    /// Checks names and shapes of the whole checkpoint against the model before a byte of weights is read.
    pub(super) fn check(&self, slots: &[Slot]) -> Result<()> {
        let Some(files) = self.files else { return Ok(()) };
        for slot in slots.iter().filter(|slot| !slot.adapter) {
            let name = self.stored_name(files, &slot.name);
            let info = files.require(name).map_err(|e| e.hint(ONE_MODEL))?;
            if info.shape != slot.shape {
                return Err(Error::user(format!("cannot load {}", info.file.display()))
                    .because(format!(
                        "{name} has shape {:?}, config.json makes it {:?} ({})",
                        info.shape,
                        slot.shape,
                        self.dimensions()
                    ))
                    .hint(ONE_MODEL));
            }
        }
        for name in files.names() {
            // Buffers that old checkpoints carry, and the second copy of a tied table.
            let harmless = name.ends_with("rotary_emb.inv_freq") || name == HEAD || name == EMBED;
            if !harmless && !slots.iter().any(|slot| slot.name == name) {
                let file = files.info(name).map(|info| info.file.display().to_string()).unwrap_or_default();
                return Err(Error::user(format!("cannot load {file}"))
                    .because(format!("{name} has no place in the model that config.json describes"))
                    .hint(ONE_MODEL));
            }
        }
        Ok(())
    }

    fn dimensions(&self) -> String {
        let c = self.config;
        format!(
            "hidden_size {}, intermediate_size {}, vocab_size {}, {} and {} heads of {}",
            c.hidden_size,
            c.intermediate_size,
            c.vocab_size,
            c.heads.num_heads,
            c.heads.num_kv_heads,
            c.heads.head_dim
        )
    }

    /// The name that a parameter has in the files: a tied table may be stored as the embedding or as the head.
    fn stored_name<'n>(&self, files: &ModelFiles, name: &'n str) -> &'n str {
        let other = match name {
            EMBED => HEAD,
            HEAD => EMBED,
            _ => return name,
        };
        if self.config.tie_word_embeddings && files.info(name).is_none() { other } else { name }
    }

    /// Writes the first value of `slot` to its place.
    pub(super) fn fill(&self, slot: &Slot, to: Fill<'_>) -> Result<()> {
        match to {
            Fill::F32(out) => self.fill_as(slot, out),
            Fill::Bf16(out) => self.fill_as(slot, out),
        }
    }

    fn fill_as<T: Element>(&self, slot: &Slot, out: &mut [T]) -> Result<()> {
        let (module, last) = slot.name.rsplit_once('.').unwrap_or((&slot.name, ""));
        if slot.adapter {
            return self.fill_adapter(slot, module, out);
        }
        let saved = self.adaptation.and_then(|a| a.start.as_ref().zip(saved_as(self.config, a, module)));
        if let Some((adapter, name)) = saved {
            let kind = if last == "bias" { TensorKind::SavedBias } else { TensorKind::SavedWeight };
            return adapter.read_into(name, kind, out);
        }
        match self.files {
            Some(files) => {
                let name = self.stored_name(files, &slot.name);
                files.read_into(name, out)?;
                files.discard(name);
            }
            None => {
                // A head that was untied starts as the embedding it was tied to.
                let tied = self.config.tie_word_embeddings && slot.name == HEAD;
                let name = if tied { EMBED } else { &slot.name };
                let spec = model::parameters(self.config).into_iter().find(|spec| spec.name == name);
                let spec = spec.ok_or_else(|| Error::internal(format!("no parameter is called {name}")))?;
                copy(out, &initial_value(self.config, &spec, self.seed));
            }
        }
        Ok(())
    }

    fn fill_adapter<T: Element>(&self, slot: &Slot, path: &str, out: &mut [T]) -> Result<()> {
        let adaptation =
            self.adaptation.ok_or_else(|| Error::internal("an adapter slot without an adapter"))?;
        let (module, matrix) = path.rsplit_once('.').unwrap_or((path, ""));
        let is_a = matrix == "lora_A";
        if let Some(start) = &adaptation.start {
            return start.read_into(module, if is_a { TensorKind::LoraA } else { TensorKind::LoraB }, out);
        }
        if is_a {
            let modules = model::modules(self.config);
            let found = modules.iter().find(|m| m.name == module);
            let found = found.ok_or_else(|| Error::internal(format!("no module is called {module}")))?;
            copy(out, &initial_lora(found, slot.shape[0], adaptation.gaussian, self.seed));
        }
        Ok(())
    }
}

fn copy<T: Element>(out: &mut [T], values: &[f32]) {
    for (out, value) in out.iter_mut().zip(values) {
        *out = T::from_f32(*value);
    }
}
