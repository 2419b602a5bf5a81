//! What two runs must have alike: to go on from a checkpoint, or to be processes of one run.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::Plan;
use crate::checkpoint::SavedCheckpoint;
use crate::data::ExampleSource as _;
use crate::error::input_file;
use crate::recipe;
use crate::recipe::Recipe;

/// The resolved recipe that a run leaves in its folder.
pub(crate) const RECIPE: &str = "recipe.toml";
/// Sections that change what is saved, said or how long it takes, not the numbers.
const HARMLESS: [&str; 6] = ["checkpoint", "log", "profile", "alerts", "eval", "parallel"];
/// Keys of other sections that do the same.
const HARMLESS_KEYS: [&str; 4] =
    ["train.recompute", "train.on_nan", "train.nan_limit", "quantization.bf16_copy"];

impl Plan {
    /// What decides the numbers of the run: a checkpoint goes on only under the same.
    pub fn fingerprint(&self) -> BTreeMap<String, String> {
        let mut recipe = self.recipe.clone();
        // These change what is saved, said or how long it takes, not the numbers.
        recipe.checkpoint = recipe::CheckpointSection::default();
        recipe.log = recipe::LogSection::default();
        recipe.eval = recipe::EvalSection::default();
        recipe.data.train = Vec::new();
        recipe.data.eval = Vec::new();
        recipe.train.recompute = recipe::AutoOr::Auto;
        // A run that stopped at a NaN may go on another way.
        let train = recipe::TrainSection::default();
        (recipe.train.on_nan, recipe.train.nan_limit) = (train.on_nan, train.nan_limit);
        if let Some(quantization) = &mut recipe.quantization {
            quantization.bf16_copy = false;
        }
        recipe.model.id = None;
        // How a run is spread over ranks does not change it: what counts is all ranks' micro-batches.
        recipe.parallel = recipe::ParallelSection {
            strategy: recipe::Strategy::Single,
            reduce_dtype: recipe.parallel.reduce_dtype,
            ..recipe::ParallelSection::default()
        };
        recipe.train.gradient_accumulation_steps = recipe::AutoOr::Fixed(self.micro_batches());
        let mut facts = recipe.values();
        // Left out, so that checkpoints from before they were there go on.
        facts.retain(|key, _| !key.starts_with("profile.") && !key.starts_with("alerts."));
        let short = |hash: blake3::Hash| hash.to_hex()[..16].to_owned();
        facts.insert("data".into(), short(self.train.0.digest()));
        facts.insert("steps".into(), self.total_steps.to_string());
        facts.insert("tokenizer".into(), short(self.rows.tokenizer.digest()));
        facts
    }

    /// What is not in a fingerprint and other than in the recipe that the run of `saved` left beside it, in words: ranks and
    /// strategy, saving, logging. Nothing where that recipe is gone.
    pub(super) fn harmless_changes(&self, saved: &SavedCheckpoint) -> Vec<String> {
        let recipe = |output: &Path| input_file::read_text("read", &output.join(RECIPE)).ok();
        let text = saved.folder.parent().and_then(recipe);
        let Some(then) = text.and_then(|text| Recipe::values_of(&text)) else { return Vec::new() };
        let now = self.recipe.values();
        // Of a key that is younger than the run.
        let defaults = Recipe::default().values();
        let nothing = "nothing".to_owned();
        let keys: BTreeSet<&String> = then.keys().chain(now.keys()).filter(|key| is_harmless(key)).collect();
        let value = |values: &BTreeMap<String, String>, key: &str| {
            values.get(key).or(defaults.get(key)).unwrap_or(&nothing).clone()
        };
        let changed = keys.into_iter().map(|key| (key.as_str(), value(&then, key), value(&now, key)));
        let ranks = ("ranks", saved.state.ranks.to_string(), self.ranks.to_string());
        let changed = changed.chain([ranks]).filter(|(_, then, now)| then != now);
        changed.map(|(key, then, now)| format!("{key}: {then} before, {now} now")).collect()
    }

    /// The recipe as text, but for what names places of one host: what processes of one run must have alike.
    pub fn run_text(&self) -> String {
        let mut recipe = self.recipe.clone();
        recipe.model.id = None;
        (recipe.data.train, recipe.data.eval) = (Vec::new(), Vec::new());
        recipe.parallel.offload_folder = None;
        recipe.parallel.strategy = self.strategy();
        // The first rank alone raises alarms.
        recipe.alerts = recipe::AlertsSection::default();
        format!("{}\n{} ranks, {} steps", recipe.to_toml(), self.ranks, self.total_steps)
    }
}

/// Whether a key of the recipe may be other than it was when a run goes on.
fn is_harmless(key: &str) -> bool {
    let section = key.split_once('.').map_or(key, |(section, _)| section);
    HARMLESS_KEYS.contains(&key) || HARMLESS.contains(&section) && key != "parallel.reduce_dtype"
}
