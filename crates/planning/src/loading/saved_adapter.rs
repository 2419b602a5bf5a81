//! Combines `[adapter]` with the saved adapter of `adapter.path`. Keys in the recipe must agree
//! with the adapter; the others take its values.
//!
//! Modules, ranks and alphas are compared by their effect on the model. A list in another order, or
//! `all-linear` for the names of all linear layers, is equal. `lora_dropout` cannot contradict a
//! saved adapter: it applies to further training, so the recipe's value is used.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::adapter_setup::{AdapterSetup, refuse_dropout_on_experts, spec_of};
use crate::adapter::{self, ModulePattern, NamePattern, Target, TargetSpec};
use crate::error::{Error, Result};
use crate::model::{self, ModelConfig, Module};
use crate::recipe::{self, AdapterKind, Patterns, Recipe};
use crate::weights::{ClassNames, EMBED_TOKENS_MODULE, LM_HEAD_MODULE};

/// The recipe's section.
const SECTION: &str = "adapter";
/// Takes the value of a key from the second section into the first.
type TakeKey = fn(&mut recipe::AdapterSection, &recipe::AdapterSection);
/// The keys that describe a saved adapter.
const KEYS: [(&str, TakeKey); 9] = [
    ("kind", |used, in_adapter| used.kind = in_adapter.kind),
    ("r", |used, in_adapter| used.r = in_adapter.r),
    ("lora_alpha", |used, in_adapter| used.lora_alpha = in_adapter.lora_alpha),
    ("target_modules", |used, in_adapter| used.target_modules = in_adapter.target_modules.clone()),
    ("exclude_modules", |used, in_adapter| used.exclude_modules = in_adapter.exclude_modules.clone()),
    ("modules_to_save", |used, in_adapter| used.modules_to_save = in_adapter.modules_to_save.clone()),
    ("rank_pattern", |used, in_adapter| used.rank_pattern = in_adapter.rank_pattern.clone()),
    ("alpha_pattern", |used, in_adapter| used.alpha_pattern = in_adapter.alpha_pattern.clone()),
    ("use_rslora", |used, in_adapter| used.use_rslora = in_adapter.use_rslora),
];

impl AdapterSetup {
    /// Loads the saved adapter in `folder`, the recipe's `adapter.path`, for further training.
    /// `base` is the model's name in adapter_config.json, `model` its shape, `tokens` the new
    /// tokens. Copies the adapter's settings into the recipe's `[adapter]` where that has none.
    ///
    /// # Errors
    /// The adapter cannot be read, belongs to another model, or has no rows for `tokens`; keys in
    /// `[adapter]` contradict it.
    pub(crate) fn from_saved(
        recipe: &mut Recipe,
        folder: &Path,
        (base, model): (&str, &ModelConfig),
        tokens: &[u32],
    ) -> Result<Self> {
        let mut adapter_setup = Self::saved_in(folder, model)?;
        let used = settings(recipe, &adapter_setup, folder, model)?;
        adapter_setup.check_trains(&recipe.model.new_tokens, tokens)?;
        adapter_setup.config.lora_dropout = used.lora_dropout;
        refuse_dropout_on_experts(used.lora_dropout, &adapter_setup.targets, model)?;
        adapter_setup.config.base_model_name_or_path = Some(base.to_owned());
        recipe.adapter = Some(used);
        Ok(adapter_setup)
    }

    /// Refuses tokens that the saved adapter does not train; `tokens` are the ids of `texts`.
    fn check_trains(&self, texts: &[String], tokens: &[u32]) -> Result<()> {
        let whole = self.saves(EMBED_TOKENS_MODULE) || self.saves(LM_HEAD_MODULE);
        let trained: BTreeSet<&u32> = self.rows.values().flatten().collect();
        match texts.iter().zip(tokens).find(|(_, id)| !whole && !trained.contains(id)) {
            None => Ok(()),
            Some((text, id)) => {
                Err(Error::user("`model.new_tokens` contradicts the adapter of `adapter.path`")
                    .because(format!("`{text}` is token {id}, for which the saved adapter has no row"))
                    .hint("remove `new_tokens` from the recipe, or leave out `path` to start a new adapter"))
            }
        }
    }
}

/// Returns the effective `[adapter]` for the adapter `saved` in `folder`, on `model`.
///
/// # Errors
/// The user's: keys in the recipe contradict the adapter, or name missing modules.
fn settings(
    recipe: &Recipe,
    saved: &AdapterSetup,
    folder: &Path,
    model: &ModelConfig,
) -> Result<recipe::AdapterSection> {
    let (modules, class) = (&model::modules(model)[..], model.family.class_names);
    let in_recipe = recipe.adapter.clone().unwrap_or_default();
    let in_adapter = in_words_of_the_recipe(&in_recipe, saved, modules);
    let is_written = |key: &str| recipe.written.location(SECTION, key).is_some();
    let compared = Compared {
        in_recipe: &in_recipe,
        in_adapter: &in_adapter,
        is_written: &is_written,
        saved,
        modules,
        class,
    };
    let (mut used, mut contradictions) = (in_recipe.clone(), Vec::new());
    for (key, take) in KEYS {
        if !is_written(key) {
            take(&mut used, &in_adapter);
        } else if !compared.agree(key)? {
            contradictions.push(key);
        }
    }
    if !contradictions.is_empty() {
        return Err(compared.refusal(recipe, folder, &contradictions));
    }
    if !is_written("lora_dropout") {
        used.lora_dropout = saved.config.lora_dropout;
    }
    Ok(used)
}

/// Returns the saved adapter in the form of `[adapter]`. Modules have the names that the adapter's
/// `all-linear`, regular expressions and layer numbers resolved to.
fn in_words_of_the_recipe(
    in_recipe: &recipe::AdapterSection,
    saved: &AdapterSetup,
    modules: &[Module],
) -> recipe::AdapterSection {
    let spec = &saved.config.spec;
    recipe::AdapterSection {
        kind: if spec.use_dora { AdapterKind::Dora } else { AdapterKind::Lora },
        r: spec.r,
        lora_alpha: spec.lora_alpha,
        target_modules: recipe::TargetModules::Named(adapter::target_names(&saved.targets, modules)),
        exclude_modules: Vec::new(),
        modules_to_save: spec.modules_to_save.clone(),
        rank_pattern: Patterns(spec.rank_pattern.clone()),
        alpha_pattern: Patterns(spec.alpha_pattern.clone()),
        use_rslora: spec.use_rslora,
        ..in_recipe.clone()
    }
}

/// The recipe's section and the settings of the saved adapter.
struct Compared<'a> {
    in_recipe: &'a recipe::AdapterSection,
    in_adapter: &'a recipe::AdapterSection,
    is_written: &'a dyn Fn(&str) -> bool,
    saved: &'a AdapterSetup,
    modules: &'a [Module],
    /// The names of the model's class.
    class: &'a ClassNames,
}

impl Compared<'_> {
    /// True if the value of `key` has the same effect as the saved adapter's.
    fn agree(&self, key: &str) -> Result<bool> {
        let (in_recipe, in_adapter) = (self.in_recipe, self.in_adapter);
        Ok(match key {
            "kind" => in_recipe.kind == in_adapter.kind,
            "r" => in_recipe.r == in_adapter.r,
            "lora_alpha" => in_recipe.lora_alpha == in_adapter.lora_alpha,
            "use_rslora" => in_recipe.use_rslora == in_adapter.use_rslora,
            "target_modules" => self.names_the_targets(spec_of(in_recipe, self.class).target_modules)?,
            "exclude_modules" => self.names_the_targets(self.own_targets())?,
            "modules_to_save" => self.saved_by(in_recipe)? == self.saved_by(in_adapter)?,
            _ => {
                let TargetSpec { rank_pattern, alpha_pattern, .. } = spec_of(in_recipe, self.class);
                let (r, lora_alpha) = (in_adapter.r, in_adapter.lora_alpha);
                let spec =
                    TargetSpec { target_modules: self.own_targets(), r, lora_alpha, ..Default::default() };
                if key == "rank_pattern" {
                    let targets = adapter::resolve(&TargetSpec { rank_pattern, ..spec }, self.modules)?;
                    by_name(&targets, |target| target.r) == by_name(&self.saved.targets, |target| target.r)
                } else {
                    let targets = adapter::resolve(&TargetSpec { alpha_pattern, ..spec }, self.modules)?;
                    by_name(&targets, |target| target.alpha)
                        == by_name(&self.saved.targets, |target| target.alpha)
                }
            }
        })
    }

    /// Returns the adapter's modules, each by its full name.
    fn own_targets(&self) -> ModulePattern {
        let names = self.saved.targets.iter().map(|target| target.name.clone());
        ModulePattern::Named(NamePattern::List(names.collect()))
    }

    /// True if `target_modules`, without excluded modules and those saved whole, are the adapter's
    /// modules.
    fn names_the_targets(&self, target_modules: ModulePattern) -> Result<bool> {
        let of = |key: &str| if (self.is_written)(key) { self.in_recipe } else { self.in_adapter };
        let spec = TargetSpec {
            target_modules,
            exclude_modules: spec_of(of("exclude_modules"), self.class).exclude_modules,
            modules_to_save: spec_of(of("modules_to_save"), self.class).modules_to_save,
            ..TargetSpec::default()
        };
        let named = adapter::resolve(&spec, self.modules)?;
        Ok(by_name(&named, |_| ()) == by_name(&self.saved.targets, |_| ()))
    }

    /// Returns the modules that `adapter` saves whole.
    fn saved_by(&self, adapter: &recipe::AdapterSection) -> Result<Vec<String>> {
        adapter::resolve_saved(&spec_of(adapter, self.class), self.modules)
    }

    /// Returns the error for the keys `contradictions`.
    fn refusal(&self, recipe: &Recipe, folder: &Path, contradictions: &[&str]) -> Error {
        let (in_recipe, in_adapter) = (self.in_recipe, self.in_adapter);
        let value = |adapter: &recipe::AdapterSection, key: &str| adapter.value(key).unwrap_or_default();
        let mut error = Error::user(format!("cannot go on with the adapter in {}", folder.display()));
        for key in contradictions {
            let origin = recipe.written.location(SECTION, key).unwrap_or_default();
            // A saved adapter does not record its excluded modules, only its own.
            let is = match *key {
                "exclude_modules" => {
                    format!("the saved adapter covers {}", value(in_adapter, "target_modules"))
                }
                key => format!("in the saved adapter it is {}", value(in_adapter, key)),
            };
            error = error.because(format!("{origin}: `adapter.{key}` is {}; {is}", value(in_recipe, key)));
        }
        let set = |key: &&str| format!("`--set 'adapter.{key}={}'`", value(in_adapter, key));
        let sets: Vec<String> = contradictions.iter().map(set).collect();
        error.hint(format!(
            "write the saved adapter's values ({}), or remove these keys to use its values; without `adapter.path` a new adapter starts",
            sets.join(", ")
        ))
    }
}

fn by_name<T>(targets: &[Target], value: impl Fn(&Target) -> T) -> BTreeMap<&str, T> {
    targets.iter().map(|target| (target.name.as_str(), value(target))).collect()
}
