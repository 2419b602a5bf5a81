//! What of a model trains beside or instead of all its weights: the recipe's `[adapter]`, a saved PEFT adapter, or
//! both (go on training a saved one).

use std::collections::BTreeMap;
use std::path::Path;

use super::locate::Finder;
use crate::adapter::{
    self, Adapter, AdapterConfig, InitLoraWeights, ModuleInfo, Names, Target, TargetModules, TargetSpec,
};
use crate::error::{Error, Result};
use crate::model::{self, ModelConfig, ModuleKind};
use crate::recipe::{self, AdapterInit, AdapterKind};
use crate::strategy::LoraSpec;

/// An adapter on a model: which modules, how, and from which values it starts.
#[derive(Debug)]
pub struct Adaptation {
    /// The modules with LoRA.
    pub targets: Vec<Target>,
    /// The modules that train whole (`modules_to_save`).
    pub saved: Vec<String>,
    /// Probability that an input of A is dropped in training.
    pub dropout: f32,
    /// A starts normal instead of uniform.
    pub gaussian: bool,
    /// A saved adapter whose values it starts from.
    pub start: Option<Adapter>,
    /// What adapter_config.json will say.
    pub config: AdapterConfig,
}

impl Adaptation {
    /// The recipe's `[adapter]` on this model, which `base` names in adapter_config.json.
    ///
    /// # Errors
    /// An adapter kind or start that this program does not have yet; a target that does not exist or cannot carry
    /// LoRA; settings that contradict the saved adapter of `adapter.path`.
    pub fn from_recipe(
        recipe: &recipe::Adapter,
        model: &ModelConfig,
        base: &str,
        finder: &Finder<'_>,
    ) -> Result<Self> {
        refuse_unready(recipe)?;
        let modules = module_infos(model);
        if let Some(source) = &recipe.path {
            let mut adaptation = Self::saved_in(&finder.adapter(source)?.folder, model)?;
            adaptation.check_agrees(recipe)?;
            if recipe.lora_dropout > 0.0 {
                adaptation.config.lora_dropout = recipe.lora_dropout;
            }
            adaptation.dropout = adaptation.config.lora_dropout as f32;
            adaptation.config.base_model_name_or_path = Some(base.to_owned());
            return Ok(adaptation);
        }
        let mut spec = spec_of(recipe);
        let targets = adapter::resolve(&spec, &modules)?;
        refuse_ends(&targets, &modules)?;
        let saved = adapter::resolve_saved(&spec, &modules)?;
        // Written as the module names that were meant: PEFT versions differ in what "all-linear" covers.
        spec.target_modules = TargetModules::Named(Names::List(adapter::target_names(&targets, &modules)));
        spec.exclude_modules = Names::NONE;
        let gaussian = recipe.init == AdapterInit::Gaussian;
        let config = AdapterConfig {
            base_model_name_or_path: Some(base.to_owned()),
            revision: None,
            spec,
            lora_dropout: recipe.lora_dropout,
            inference_mode: true,
            init_lora_weights: if gaussian { InitLoraWeights::Gaussian } else { InitLoraWeights::Default },
            ensure_weight_tying: false,
        };
        Ok(Adaptation { targets, saved, dropout: recipe.lora_dropout as f32, gaussian, start: None, config })
    }

    /// The adapter in `folder`, as it was saved.
    ///
    /// # Errors
    /// It cannot be read, or was made for another model.
    pub fn saved_in(folder: &Path, model: &ModelConfig) -> Result<Self> {
        let adapter = Adapter::read(folder)?;
        let modules = module_infos(model);
        adapter.check_fits(&modules)?;
        refuse_ends(adapter.targets(), &modules)?;
        Ok(Adaptation {
            targets: adapter.targets().to_vec(),
            saved: adapter.saved().map(str::to_owned).collect(),
            dropout: adapter.config().lora_dropout as f32,
            gaussian: false,
            config: adapter.config().clone(),
            start: Some(adapter),
        })
    }

    /// Whether the module trains whole.
    pub fn saves(&self, module: &str) -> bool {
        self.saved.iter().any(|saved| saved == module)
    }

    /// Whether a tied head gets parameters of its own, because it or the embedding trains.
    pub fn unties(&self) -> bool {
        !self.config.ensure_weight_tying && (self.saves("lm_head") || self.saves("model.embed_tokens"))
    }

    /// The constants of each target.
    pub fn loras(&self) -> BTreeMap<String, LoraSpec> {
        let spec = |target: &Target| LoraSpec { scale: target.scale, dropout: self.dropout };
        self.targets.iter().map(|target| (target.name.clone(), spec(target))).collect()
    }

    /// A setting of the recipe that is neither the default nor the saved adapter's cannot take effect.
    fn check_agrees(&self, recipe: &recipe::Adapter) -> Result<()> {
        let (saved, default) = (&self.config.spec, recipe::Adapter::default());
        let wanted = spec_of(recipe);
        let short = |targets: &TargetModules| format!("{targets:?}");
        let checks = [
            ("r", recipe.r != default.r && recipe.r != saved.r, recipe.r.to_string(), saved.r.to_string()),
            (
                "lora_alpha",
                recipe.lora_alpha != default.lora_alpha && recipe.lora_alpha != saved.lora_alpha,
                recipe.lora_alpha.to_string(),
                saved.lora_alpha.to_string(),
            ),
            (
                "use_rslora",
                recipe.use_rslora && !saved.use_rslora,
                recipe.use_rslora.to_string(),
                saved.use_rslora.to_string(),
            ),
            (
                "target_modules",
                recipe.target_modules != default.target_modules
                    && wanted.target_modules != saved.target_modules,
                short(&wanted.target_modules),
                short(&saved.target_modules),
            ),
            (
                "modules_to_save",
                !wanted.modules_to_save.is_empty() && wanted.modules_to_save != saved.modules_to_save,
                wanted.modules_to_save.join(", "),
                saved.modules_to_save.join(", "),
            ),
        ];
        for (key, differs, wanted, saved) in checks {
            if differs {
                return Err(Error::user(format!(
                    "`adapter.{key}` contradicts the adapter of `adapter.path`"
                ))
                .because(format!("the recipe says {wanted}, the saved adapter was made with {saved}"))
                .hint(format!(
                    "remove `{key}` from the recipe, or leave out `path` to start a new adapter"
                )));
            }
        }
        Ok(())
    }
}

fn spec_of(recipe: &recipe::Adapter) -> TargetSpec {
    TargetSpec {
        target_modules: match &recipe.target_modules {
            recipe::TargetModules::AllLinear => TargetModules::AllLinear,
            recipe::TargetModules::Named(names) => TargetModules::Named(Names::List(names.clone())),
        },
        exclude_modules: Names::List(recipe.exclude_modules.clone()),
        modules_to_save: recipe.modules_to_save.clone(),
        r: recipe.r,
        lora_alpha: recipe.lora_alpha,
        use_rslora: recipe.use_rslora,
        rank_pattern: recipe.rank_pattern.0.clone(),
        alpha_pattern: recipe.alpha_pattern.0.clone(),
        ..TargetSpec::default()
    }
}

fn refuse_unready(recipe: &recipe::Adapter) -> Result<()> {
    let later = |key: &str, value: &str, accepted: &str| {
        Err(Error::user(format!("`adapter.{key} = \"{value}\"` is not available in this version"))
            .because(format!("accepted now: {accepted}"))
            .hint(format!("remove `{key}`, or write one of these")))
    };
    match (recipe.kind, recipe.init) {
        (AdapterKind::Dora, _) => later("kind", "dora", "lora"),
        (_, AdapterInit::Pissa) => later("init", "pissa", "default, gaussian"),
        (_, AdapterInit::Loftq) => later("init", "loftq", "default, gaussian"),
        (AdapterKind::Lora, AdapterInit::Default | AdapterInit::Gaussian) => Ok(()),
    }
}

/// LoRA on the embedding or the output layer is not computed by the engine yet.
fn refuse_ends(targets: &[Target], modules: &[ModuleInfo]) -> Result<()> {
    let linear = |name: &str| {
        modules.iter().any(|module| module.name == name && module.kind == adapter::ModuleKind::Linear)
    };
    match targets.iter().find(|target| !linear(&target.name)) {
        None => Ok(()),
        Some(target) => Err(Error::user(format!("`{}` cannot carry LoRA in this version", target.name))
            .because("accepted now: the linear layers of the blocks")
            .hint("train it whole: name it in `adapter.modules_to_save`")),
    }
}

fn module_infos(model: &ModelConfig) -> Vec<ModuleInfo> {
    model::modules(model)
        .into_iter()
        .map(|module| ModuleInfo {
            kind: match module.kind {
                ModuleKind::Linear => adapter::ModuleKind::Linear,
                ModuleKind::Embedding => adapter::ModuleKind::Embedding,
                ModuleKind::Head => adapter::ModuleKind::Head,
                ModuleKind::Norm => adapter::ModuleKind::Norm,
            },
            shape: match module.kind {
                ModuleKind::Norm => vec![module.out_features],
                _ => vec![module.out_features, module.in_features],
            },
            name: module.name,
        })
        .collect()
}
