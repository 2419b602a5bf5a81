//! Lists every parameter of a run with its segment, its storage, and if it trains.

use std::collections::{HashMap, HashSet};

use candle_core::DType;

use super::adapter_setup::AdapterSetup;
use crate::adapter::TensorKind;
use crate::error::Result;
use crate::model::{self, ModelConfig, Module, ModuleKind, ParamSpec, Role, Segment};
use crate::parallel::{LrGroup, ParamDesc, ParamKind, Placements, TOKEN_ROWS, UpdateRule};
use crate::quant::QuantFormat;
use crate::weights::{EMBED_TOKENS_MODULE, LM_HEAD, LM_HEAD_MODULE, ModelFiles, StoredDtype};

/// Returns the other module that uses the same weight in a tied model.
pub fn tied_module(module: &str) -> Option<&'static str> {
    match module {
        EMBED_TOKENS_MODULE => Some(LM_HEAD_MODULE),
        LM_HEAD_MODULE => Some(EMBED_TOKENS_MODULE),
        _ => None,
    }
}

/// Returns the name under which the adapter trains and saves `module` whole: its own, or that of
/// the module it is tied to.
pub(crate) fn saved_as<'a>(
    config: &ModelConfig,
    adapter_setup: &'a AdapterSetup,
    module: &str,
) -> Option<&'a str> {
    let tied = config.tie_word_embeddings && !adapter_setup.unties();
    let names = [Some(module), tied_module(module).filter(|_| tied)];
    names.into_iter().flatten().find_map(|name| adapter_setup.saved.get(name)).map(String::as_str)
}

/// The parameters that train.
#[derive(Debug, Clone, Copy)]
pub enum Trains<'a> {
    /// Nothing trains: the model is only used.
    Nothing,
    /// An adapter, with the modules that it trains whole.
    Adapter(&'a AdapterSetup),
    /// All weights (full fine-tuning).
    All,
}

impl<'a> Trains<'a> {
    /// Returns the adapter, or all weights without one.
    pub fn adapter_or_all(adapter_setup: Option<&'a AdapterSetup>) -> Self {
        adapter_setup.map_or(Trains::All, Trains::Adapter)
    }

    /// Returns the adapter, or nothing without one.
    pub fn adapter_or_nothing(adapter_setup: Option<&'a AdapterSetup>) -> Self {
        adapter_setup.map_or(Trains::Nothing, Trains::Adapter)
    }

    /// Returns the adapter, if one trains.
    pub fn adapter(self) -> Option<&'a AdapterSetup> {
        match self {
            Trains::Adapter(adapter_setup) => Some(adapter_setup),
            Trains::Nothing | Trains::All => None,
        }
    }

    /// True if the weights of `module` train, in a model of shape `config`.
    pub fn has(self, config: &ModelConfig, module: &str) -> bool {
        match self {
            Trains::Nothing => false,
            Trains::Adapter(adapter_setup) => saved_as(config, adapter_setup, module).is_some(),
            Trains::All => true,
        }
    }
}

/// The storage of a model's frozen part.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoragePolicy<'a> {
    /// The format of the linear layers, if the run quantizes them.
    pub format: Option<QuantFormat>,
    /// Linear layers that are not quantized.
    pub skipped: &'a HashSet<&'a str>,
    /// The files, which may already hold quantized layers.
    pub files: Option<&'a ModelFiles>,
    /// True if matrices may keep their stored 16 bits. They compute in f32 on the CPU, where
    /// products widen what they read.
    pub narrow: bool,
    /// True if the matrices of adapters on linear layers of blocks compute in bf16, as on a GPU in
    /// bf16.
    pub(crate) adapters_in_bf16: bool,
}

impl StoragePolicy<'_> {
    /// Returns the format of a frozen parameter; none if it is not quantized.
    fn format_of(&self, spec: &ParamSpec) -> Option<QuantFormat> {
        if !matches!((spec.role, spec.segment()), (Role::Weight, Segment::Block(_))) {
            return None;
        }
        let stored = self.files.and_then(|files| files.quantized_format(&spec.name));
        let own = self.format.filter(|_| !self.skipped.contains(spec.module()));
        stored.or(own)
    }

    /// Returns the kind of a frozen parameter; `as_stored` allows the dtype of the files.
    fn frozen(&self, spec: &ParamSpec, as_stored: bool) -> ParamKind {
        match self.format_of(spec) {
            Some(format) => ParamKind::Quantized(format),
            None => ParamKind::Frozen { dtype: self.kept_as(spec).filter(|_| as_stored) },
        }
    }

    /// Returns the dtype of a frozen matrix if it differs from the compute dtype: bf16 if stored
    /// so. Beside a quantized base, tables always keep it: widening them would cost more memory
    /// than quantizing saves. A weight that is dequantized while it is read is not bf16.
    fn kept_as(&self, spec: &ParamSpec) -> Option<DType> {
        let matrix = spec.role.is_matrix();
        let table = matrix && !matches!(spec.segment(), Segment::Block(_));
        let files = self.files?;
        let stored = files.info(&spec.name)?;
        let plain = files.stored_format(&spec.name).is_none();
        let stays = matrix && self.narrow || table && self.format.is_some();
        // Rows beyond the stored ones are means, which need more digits.
        let whole = plain && stored.dtype == StoredDtype::BF16 && stored.shape == spec.shape;
        (stays && whole).then_some(DType::BF16)
    }
}

/// Returns every parameter of the run, with the one declaration of its shape and placement that
/// loading, checkpoints, outputs and the planner read. A tied head gets its own parameter only if
/// it or the embedding trains separately (PEFT's `modules_to_save` unties them).
pub(crate) fn descs(
    config: &ModelConfig,
    trains: Trains<'_>,
    keeping: StoragePolicy<'_>,
) -> Result<Vec<ParamDesc>> {
    let adapter_setup = trains.adapter();
    // PEFT saves a copy of a table under its adapter, in a separate dtype.
    let has_copy = |module: &str| {
        let saved = adapter_setup.and_then(|a| a.start.saved());
        saved.is_some_and(|saved| saved.info(module, TensorKind::BaseWeight).is_some())
    };
    let has_rows = |module: &str| adapter_setup.is_some_and(|a| a.rows.contains_key(module));
    let mut descs = Vec::new();
    for spec in model::parameters(config) {
        let kind = if spec.role == Role::Buffer {
            ParamKind::Buffer { saved: matches!(trains, Trains::All) }
        } else if trains.has(config, spec.module()) {
            let decay = spec.role.is_decayed();
            ParamKind::Trainable(UpdateRule { decay, lr_group: LrGroup::of_shape(&spec.shape) })
        } else if has_rows(spec.module()) {
            ParamKind::Frozen { dtype: None }
        } else {
            keeping.frozen(&spec, !has_copy(spec.module()))
        };
        let segment = spec.segment();
        descs.push(ParamDesc::new(spec.name, spec.shape, Placements::REPLICATED, segment, kind));
    }
    if config.tie_word_embeddings && adapter_setup.is_some_and(AdapterSetup::unties) {
        let kind = if trains.has(config, LM_HEAD_MODULE) {
            ParamKind::Trainable(UpdateRule { decay: true, lr_group: LrGroup::Base })
        } else {
            ParamKind::Frozen { dtype: None }
        };
        let shape = vec![config.vocab_size, config.hidden_size];
        descs.push(ParamDesc::new(LM_HEAD.into(), shape, Placements::REPLICATED, Segment::Head, kind));
    }
    if let Some(adapter_setup) = adapter_setup {
        adapter_slots(config, adapter_setup, keeping.adapters_in_bf16, &mut descs);
    }
    Ok(descs)
}

/// Adds the matrices, magnitudes and token rows of an adapter. Those of linear layers of blocks may
/// be `in_bf16`.
fn adapter_slots(
    config: &ModelConfig,
    adapter_setup: &AdapterSetup,
    in_bf16: bool,
    descs: &mut Vec<ParamDesc>,
) {
    let modules = model::modules(config);
    let modules: HashMap<&str, &Module> =
        modules.iter().map(|module| (module.name.as_str(), module)).collect();
    let segment_of = |desc: &ParamDesc| Some((desc.name.strip_suffix(".weight")?.to_owned(), desc.segment));
    let segments: HashMap<String, Segment> = descs.iter().filter_map(segment_of).collect();
    let mut push = |module: &Module, name: &str, shape: Vec<usize>, lr_group: LrGroup| {
        let rule = UpdateRule { decay: true, lr_group };
        let segment = segments.get(&module.name).copied().unwrap_or(Segment::Head);
        // Vectors scale whole columns, and the kernels that read tables take f32.
        let is_product = shape.len() == 2 && matches!(segment, Segment::Block(_));
        let kind = if in_bf16 && is_product { ParamKind::AdapterInBf16 } else { ParamKind::Adapter };
        let kind = kind(rule);
        let name = format!("{}.{name}", module.name);
        descs.push(ParamDesc::new(name, shape, Placements::REPLICATED, segment, kind));
    };
    for target in &adapter_setup.targets {
        let Some(module) = modules.get(target.name.as_str()) else { continue };
        let (out, inputs, r) = (module.out_features(), module.in_features(), target.r);
        if module.kind == ModuleKind::Embedding {
            push(module, "lora_embedding_A", vec![r, out], LrGroup::Base);
            push(module, "lora_embedding_B", vec![inputs, r], LrGroup::Base);
            continue;
        }
        push(module, "lora_A.weight", vec![r, inputs], LrGroup::Base);
        push(module, "lora_B.weight", vec![out, r], LrGroup::LoraPlus);
        if adapter_setup.config.spec.use_dora {
            push(module, "lora_magnitude_vector", vec![out], LrGroup::LoraPlus);
        }
    }
    for (name, ids) in &adapter_setup.rows {
        let Some(module) = modules.get(name.as_str()) else { continue };
        let shape = vec![ids.len(), module.in_features()];
        push(module, TOKEN_ROWS.trim_start_matches('.'), shape, LrGroup::Base);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planning::LossPath;
    use crate::recipe::{AdapterSection, TargetModules};

    fn path(config: &ModelConfig, trains: Trains<'_>) -> Result<LossPath> {
        let skipped = HashSet::new();
        let keeping = StoragePolicy {
            format: None,
            skipped: &skipped,
            files: None,
            narrow: false,
            adapters_in_bf16: false,
        };
        Ok(LossPath::of(config, &descs(config, trains, keeping)?))
    }

    /// Returns the path with an adapter that has these targets, saves these modules and adds these
    /// tokens.
    fn path_under(
        config: &ModelConfig,
        targets: &[&str],
        modules_to_save: &[&str],
        tokens: &[u32],
    ) -> Result<LossPath> {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();
        let section = AdapterSection {
            target_modules: TargetModules::Named(owned(targets)),
            modules_to_save: owned(modules_to_save),
            ..AdapterSection::default()
        };
        let adapter_setup = AdapterSetup::from_recipe(&section, ("base", config), tokens)?;
        path(config, Trains::Adapter(&adapter_setup))
    }

    #[test]
    fn the_path_of_the_loss_follows_from_what_trains() -> Result<()> {
        use LossPath::{Chunked, Frozen, Trained};
        for tied in [false, true] {
            let text = format!(
                r#"{{"model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 24,
                "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
                "tie_word_embeddings": {tied}}}"#
            );
            let mut config = ModelConfig::from_json(&text, "config.json")?;
            assert_eq!(path(&config, Trains::All)?, Trained);
            assert_eq!(path(&config, Trains::Nothing)?, Frozen);
            assert_eq!(path_under(&config, &["q_proj"], &[], &[])?, Frozen);
            // PEFT's adapter on an embedding does not apply to a tied head, and a saved copy unties
            // the two.
            assert_eq!(path_under(&config, &["q_proj", "embed_tokens"], &[], &[])?, Frozen);
            assert_eq!(path_under(&config, &["q_proj"], &["embed_tokens"], &[])?, Frozen);
            assert_eq!(path_under(&config, &["q_proj"], &["lm_head"], &[])?, Trained);
            assert_eq!(path_under(&config, &["q_proj"], &[], &[3, 5])?, Chunked);
            assert_eq!(path_under(&config, &["q_proj", "lm_head"], &[], &[])?, Chunked);
            config.logit_softcap = Some(30.0);
            assert_eq!(path_under(&config, &["q_proj"], &[], &[])?, Chunked);
            assert_eq!(path_under(&config, &["q_proj"], &["lm_head"], &[])?, Trained);
            assert_eq!(path(&config, Trains::All)?, Trained);
        }
        Ok(())
    }
}
