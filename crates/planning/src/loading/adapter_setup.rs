//! The adapter that trains on a model: from the recipe's `[adapter]`, from a saved PEFT adapter, or
//! both (further training of a saved one, see `saved_adapter`).

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;

use super::new_tokens::{refuse_lora_beside_rows, tables_with_rows};
use super::pissa::PissaStart;
use crate::adapter::{
    self, AdapterConfig, InitLoraWeights, ModulePattern, NamePattern, SavedAdapter, Target, TargetSpec,
    TensorKind,
};
use crate::error::{Error, Result};
use crate::model::{self, BlockLayout, ModelConfig};
use crate::parallel::{Adapters, LoraSpec};
use crate::recipe::{self, AdapterInit, AdapterKind};
use crate::weights::{ClassNames, EMBED_TOKENS_MODULE, LM_HEAD_MODULE};

/// An adapter on a model: its modules, settings and first values.
#[derive(Debug)]
pub struct AdapterSetup {
    /// The modules with LoRA.
    pub targets: Vec<Target>,
    /// The modules that train whole (`modules_to_save`).
    pub saved: BTreeSet<String>,
    /// Tokens whose rows train, by table.
    pub rows: BTreeMap<String, Vec<u32>>,
    /// The contents of adapter_config.json.
    pub config: AdapterConfig,
    /// The source of its values.
    pub(crate) start: AdapterStart,
}

/// The source of an adapter's first values.
#[derive(Debug)]
pub(crate) enum AdapterStart {
    /// A new adapter.
    Fresh(AdapterInit),
    /// A saved adapter.
    Saved(SavedAdapter),
    /// A checkpoint of a run that began with PiSSA.
    Pissa(PissaStart),
}

impl AdapterStart {
    /// Returns the saved adapter, which also holds the whole modules.
    pub(crate) fn saved(&self) -> Option<&SavedAdapter> {
        match self {
            AdapterStart::Fresh(_) => None,
            AdapterStart::Saved(saved) | AdapterStart::Pissa(PissaStart(saved)) => Some(saved),
        }
    }
}

impl AdapterSetup {
    /// Builds the adapter of the recipe's `[adapter]` on the model `base` (its name in
    /// adapter_config.json, its shape), with rows for new `tokens`.
    ///
    /// # Errors
    /// The adapter kind or start is not supported; a target does not exist or cannot have LoRA.
    pub fn from_recipe(
        recipe: &recipe::AdapterSection,
        (base, model): (&str, &ModelConfig),
        tokens: &[u32],
    ) -> Result<Self> {
        let modules = model::modules(model);
        let mut spec = spec_of(recipe, model.family.class_names);
        let targets = adapter::resolve(&spec, &modules)?;
        refuse_dora_on_tables(&spec, &targets)?;
        refuse_dropout_on_experts(recipe.lora_dropout, &targets, model)?;
        let saved = adapter::resolve_saved(&spec, &modules)?;
        if !tokens.is_empty() {
            let tables = tables_with_rows(model, &saved);
            refuse_lora_beside_rows(&tables, &targets)?;
            spec.trainable_token_indices =
                tables.into_iter().map(|table| (table.to_owned(), tokens.to_vec())).collect();
        }
        let rows = adapter::resolve_rows(&spec, &modules)?;
        if *model.family.class_names != ClassNames::USUAL {
            // The end of a usual name may be that of other modules in the class.
            spec.modules_to_save.clone_from(&saved);
        }
        // Written as resolved module names: PEFT versions differ in the modules of "all-linear".
        spec.target_modules =
            ModulePattern::Named(NamePattern::List(adapter::target_names(&targets, &modules)));
        spec.exclude_modules = NamePattern::NONE;
        let config = AdapterConfig {
            base_model_name_or_path: Some(base.to_owned()),
            revision: None,
            spec,
            target_parameters: Vec::new(),
            lora_dropout: recipe.lora_dropout,
            inference_mode: true,
            // PiSSA and LoftQ write an ordinary adapter.
            init_lora_weights: match recipe.init {
                AdapterInit::Gaussian => InitLoraWeights::Gaussian,
                _ => InitLoraWeights::Default,
            },
            ensure_weight_tying: false,
        };
        Ok(AdapterSetup {
            targets,
            saved: saved.into_iter().collect(),
            rows,
            start: AdapterStart::Fresh(recipe.init),
            config,
        })
    }

    /// Loads the saved adapter in `folder`.
    ///
    /// # Errors
    /// It cannot be read, or belongs to another model.
    pub fn saved_in(folder: &Path, model: &ModelConfig) -> Result<Self> {
        let modules = model::modules(model);
        let adapter = SavedAdapter::read(folder)?.without(&model::unread_modules(model)).fitted(&modules)?;
        refuse_dora_on_tables(&adapter.config().spec, adapter.targets())?;
        let mut rows = adapter.rows().clone();
        // PEFT saves the embedding's rows under the name of a head that is tied to it too.
        let own =
            adapter.config().spec.trainable_token_indices.keys().any(|end| end.ends_with(LM_HEAD_MODULE));
        if model.tie_word_embeddings && rows.contains_key(EMBED_TOKENS_MODULE) && !own {
            rows.remove(LM_HEAD_MODULE);
        }
        Ok(AdapterSetup {
            targets: adapter.targets().to_vec(),
            saved: adapter.saved().map(str::to_owned).collect(),
            rows,
            config: adapter.config().clone(),
            start: AdapterStart::Saved(adapter),
        })
    }

    /// Returns the warning about tensors of the saved adapter that the model does not use.
    pub fn warning(&self) -> Option<&str> {
        match &self.start {
            AdapterStart::Saved(adapter) => adapter.warning(),
            _ => None,
        }
    }

    /// True if the module trains whole.
    pub fn saves(&self, module: &str) -> bool {
        self.saved.contains(module)
    }

    /// True if a tied head gets its own parameters, because it or the embedding trains.
    pub fn unties(&self) -> bool {
        let apart = self.saves(LM_HEAD_MODULE) || self.saves(EMBED_TOKENS_MODULE);
        self.rows.contains_key(LM_HEAD_MODULE) || (apart && !self.config.ensure_weight_tying)
    }

    /// Returns the parts of the adapter that the parameter store needs.
    pub fn adapters(&self) -> Adapters {
        let dropout = self.config.lora_dropout as f32;
        let spec = |target: &Target| LoraSpec { scale: target.scale, dropout };
        let loras = self.targets.iter().map(|target| (target.name.clone(), spec(target))).collect();
        Adapters { loras, rows: self.rows.clone(), base_change: self.base_change() }
    }

    /// Returns the reason for which the model without the adapter is not the model as training
    /// starts; `None` if it is.
    pub(crate) fn reference_change(&self) -> Option<String> {
        if let Some(module) = self.saved.iter().next() {
            return Some(format!("`{module}` is trained in place in the model"));
        }
        if let Some(table) = self.rows.keys().next() {
            return Some(format!("rows of `{table}` are trained in place in the table"));
        }
        self.base_change().map(str::to_owned)
    }

    /// Returns the reason for which the frozen weights differ from the base's; none if they are
    /// equal.
    fn base_change(&self) -> Option<&'static str> {
        let tables = [EMBED_TOKENS_MODULE, LM_HEAD_MODULE];
        let stored = |saved: &SavedAdapter| {
            tables.iter().any(|table| saved.info(table, TensorKind::BaseWeight).is_some())
        };
        if self.is_pissa() {
            Some("PiSSA took the adapter's first values out of the weights")
        } else if self.start.saved().is_some_and(stored) {
            Some("the adapter's files bring a token table of their own")
        } else {
            None
        }
    }

    /// Continues from the adapter in a checkpoint of the same run.
    pub fn resume(&mut self, saved: SavedAdapter) {
        self.start = self.start_from(saved);
    }

    /// Returns the same adapter with the values of a checkpoint of the same run.
    pub fn resumed(&self, saved: SavedAdapter) -> Self {
        AdapterSetup {
            targets: self.targets.clone(),
            saved: self.saved.clone(),
            rows: self.rows.clone(),
            config: self.config.clone(),
            start: self.start_from(saved),
        }
    }

    fn start_from(&self, saved: SavedAdapter) -> AdapterStart {
        if self.is_pissa() { AdapterStart::Pissa(PissaStart(saved)) } else { AdapterStart::Saved(saved) }
    }

    /// True if the base is without the part that the adapter started from.
    pub fn is_pissa(&self) -> bool {
        matches!(self.start, AdapterStart::Fresh(AdapterInit::Pissa) | AdapterStart::Pissa(_))
    }

    /// True if its first values need the unquantized weights.
    pub(crate) fn needs_exact_weights(&self) -> bool {
        self.is_pissa() || matches!(self.start, AdapterStart::Fresh(AdapterInit::Loftq))
    }

    /// True if first values depend on the base's.
    pub(crate) fn derives_from_weights(&self) -> bool {
        match &self.start {
            AdapterStart::Fresh(AdapterInit::Pissa | AdapterInit::Loftq) | AdapterStart::Pissa(_) => true,
            AdapterStart::Fresh(_) => self.config.spec.use_dora,
            AdapterStart::Saved(_) => false,
        }
    }
}

/// Returns the settings of a recipe that depend on names of modules, for a model whose class has
/// the names `class`.
pub(crate) fn spec_of(recipe: &recipe::AdapterSection, class: &ClassNames) -> TargetSpec {
    let spec = TargetSpec {
        target_modules: match &recipe.target_modules {
            recipe::TargetModules::AllLinear => ModulePattern::AllLinear,
            recipe::TargetModules::Named(names) => ModulePattern::Named(NamePattern::List(names.clone())),
            recipe::TargetModules::Pattern(pattern) => {
                ModulePattern::Named(NamePattern::Regex(pattern.clone()))
            }
        },
        exclude_modules: NamePattern::List(recipe.exclude_modules.clone()),
        modules_to_save: recipe.modules_to_save.clone(),
        r: recipe.r,
        lora_alpha: recipe.lora_alpha,
        use_rslora: recipe.use_rslora,
        use_dora: recipe.kind == AdapterKind::Dora,
        rank_pattern: recipe.rank_pattern.0.clone(),
        alpha_pattern: recipe.alpha_pattern.0.clone(),
        ..TargetSpec::default()
    };
    spec.translated(|name| class.usual(name))
}

/// Refuses dropout on experts. A mask belongs to a token and not to its row, which depends on the
/// other tokens of the batch.
pub(super) fn refuse_dropout_on_experts(dropout: f64, targets: &[Target], model: &ModelConfig) -> Result<()> {
    if dropout == 0.0 || model.experts().next().is_none() {
        return Ok(());
    }
    let of_layer = |layer| {
        let layout = BlockLayout::new(model, layer);
        let of_experts = layout.linears().filter(|module| module.part.expert().is_some());
        of_experts.map(|module| module.name_in(layer)).collect::<Vec<_>>()
    };
    let of_experts: HashSet<String> = (0..model.num_layers()).flat_map(of_layer).collect();
    match targets.iter().find(|target| of_experts.contains(&target.name)) {
        None => Ok(()),
        Some(target) => Err(Error::user(format!("`{}` cannot have dropout", target.name))
            .because(format!("`adapter.lora_dropout` is {dropout}; accepted with layers of experts: 0"))
            .hint("write `lora_dropout = 0`, or name other layers in `adapter.target_modules`")),
    }
}

/// Refuses DoRA on a token table, which the engine does not support.
fn refuse_dora_on_tables(spec: &TargetSpec, targets: &[Target]) -> Result<()> {
    let table = |target: &&Target| spec.use_dora && !target.kind.is_layer_of_block();
    match targets.iter().find(table) {
        None => Ok(()),
        Some(target) => Err(Error::user(format!("`{}` cannot carry DoRA", target.name))
            .because("`adapter.kind` is \"dora\"; accepted with it: the linear layers of the blocks")
            .hint("write `kind = \"lora\"`, or train the table whole: name it in `adapter.modules_to_save`")),
    }
}
