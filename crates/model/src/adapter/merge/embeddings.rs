//! Selects the tensors of an adapter for a module's weight, with the rules for embedding and head.
//!
//! A tied embedding and head are one tensor on disk, under either name. peft 0.21 treats an adapter
//! that names one of the two as follows. Whole modules and LoRA change that one alone, unless
//! `ensure_weight_tying` is set. Trained rows of the embedding change both; rows of the head change
//! the head alone. If the two become different, the tie is broken.

use serde_json::{Map, Value};

use super::delta::LoraDelta;
use crate::adapter::files::TABLES;
use crate::adapter::{SavedAdapter, Target, TensorKind};
use crate::error::Result;
use crate::model::{Module, ModuleKind};
use crate::weights::{EMBED_PER_LAYER, EMBED_TOKENS, LM_HEAD, ModelFiles, TIE_EMBEDDING};

/// The tie of embedding and head, and the names under which the base stores them.
pub(super) struct Tie {
    tied: bool,
    embed: bool,
    head: bool,
}

impl Tie {
    pub(super) fn new(base: &ModelFiles, config: &Map<String, Value>) -> Self {
        let (embed, head) = (base.info(EMBED_TOKENS).is_some(), base.info(LM_HEAD).is_some());
        // Families have different defaults for a missing key; a model that is not tied stores both.
        let key = |key: &str| config.get(key).and_then(Value::as_bool);
        let tied = key(TIE_EMBEDDING).or_else(|| key("tie_word_embeddings")).unwrap_or(embed != head);
        Self { tied: tied && !base.head_is_apart(), embed, head }
    }

    /// Returns, for a tied pair with one stored name, the missing name and the stored one.
    pub(super) fn only_one_stored(&self) -> Option<(&'static str, &'static str)> {
        match (self.tied, self.embed, self.head) {
            (true, true, false) => Some((LM_HEAD, EMBED_TOKENS)),
            (true, false, true) => Some((EMBED_TOKENS, LM_HEAD)),
            _ => None,
        }
    }

    /// Returns the module with which a tied one shares its weight.
    fn twin(&self, module: &str) -> Option<&'static str> {
        TABLES.iter().position(|table| self.tied && *table == module).map(|at| TABLES[1 - at])
    }

    /// Returns whether the adapter gives embedding and head of a tied model different values.
    ///
    /// # Errors
    /// The same as for [`SavedAdapter::read_into`].
    pub(super) fn is_broken_by(&self, adapter: &SavedAdapter, modules: &[Module]) -> Result<bool> {
        let Some(embedding) = modules.iter().find(|module| module.name == TABLES[0]) else {
            return Ok(false);
        };
        let [embed, head] = TABLES.map(|module| EmbeddingParts::of(adapter, module, self));
        Ok(self.tied && !embed.give_the_same(&head, adapter, &embedding.shape)?)
    }
}

/// The tensors of an adapter for a module's weight, by the modules that have them in the file.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct EmbeddingParts<'a> {
    /// The module with the whole weight.
    pub(super) whole: Option<&'a str>,
    /// The module with a copy of the base's weight.
    pub(super) base: Option<&'a str>,
    /// The module with trained rows.
    pub(super) rows: Option<&'a str>,
    /// The LoRA that is added.
    pub(super) lora: Option<&'a Target>,
}

impl<'a> EmbeddingParts<'a> {
    pub(super) fn of(adapter: &'a SavedAdapter, module: &'a str, tie: &Tie) -> Self {
        let twin = tie.twin(module);
        let ensured = twin.filter(|_| adapter.config().ensure_weight_tying);
        let first = |names: [Option<&'a str>; 2], kind| {
            names.into_iter().flatten().find(|name| adapter.info(name, kind).is_some())
        };
        let target = |name: &str| adapter.targets().iter().find(|target| target.name == name);
        let followed = twin.filter(|twin| *twin == TABLES[0]);
        Self {
            whole: first([Some(module), ensured], TensorKind::SavedWeight),
            base: first([Some(module), twin], TensorKind::BaseWeight),
            rows: first([Some(module), followed], TensorKind::TokensDelta),
            lora: target(module).or_else(|| ensured.and_then(target)),
        }
    }

    /// Returns whether these parts and `other` have the same effect on a weight of `shape`.
    fn give_the_same(&self, other: &Self, adapter: &SavedAdapter, shape: &[usize]) -> Result<bool> {
        let alike = |a: Option<&str>, b: Option<&str>, kind| match (a, b) {
            (None, None) => Ok(true),
            (Some(a), Some(b)) => Ok(a == b || adapter.bytes(a, kind)? == adapter.bytes(b, kind)?),
            _ => Ok(false),
        };
        if self.whole.is_some() || other.whole.is_some() {
            return alike(self.whole, other.whole, TensorKind::SavedWeight);
        }
        let tokens = |rows: Option<&str>| rows.and_then(|module| adapter.rows().get(module));
        let lora = match (self.lora, other.lora) {
            (None, None) => true,
            (Some(a), Some(b)) => {
                a.name == b.name || LoraDelta::read(adapter, a, shape)? == LoraDelta::read(adapter, b, shape)?
            }
            _ => false,
        };
        Ok(lora
            && tokens(self.rows) == tokens(other.rows)
            && alike(self.base, other.base, TensorKind::BaseWeight)?
            && alike(self.rows, other.rows, TensorKind::TokensDelta)?)
    }
}

/// Returns the modules of the base by its tensors, both of a tied pair, with the adapter's number
/// of rows for the tables.
pub(super) fn modules(base: &ModelFiles, tie: &Tie, adapter: &SavedAdapter) -> Vec<Module> {
    let module = |tensor: &str, shape: &[usize]| {
        let name = tensor.strip_suffix(".weight")?;
        let kind = match tensor {
            EMBED_TOKENS | EMBED_PER_LAYER => ModuleKind::Embedding,
            LM_HEAD => ModuleKind::Head,
            _ if shape.len() == 2 => ModuleKind::Linear,
            // Also the weights of a convolution, which are not quantized either.
            _ => ModuleKind::Norm,
        };
        Some(Module { name: name.into(), kind, shape: shape.into() })
    };
    let mut modules: Vec<_> = base.tensors().filter_map(|(name, info)| module(name, &info.shape)).collect();
    if let Some((missing, stored)) = tie.only_one_stored() {
        modules.extend(base.info(stored).and_then(|info| module(missing, &info.shape)));
    }
    for table in modules.iter_mut().filter(|module| TABLES.contains(&module.name.as_str())) {
        if let Some(tokens) = table.shape.first_mut() {
            *tokens = adapter.vocab_size(*tokens, tie.tied);
        }
    }
    modules
}
