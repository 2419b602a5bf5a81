//! Settings that two runs must share, to resume a checkpoint or to be processes of one run.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::Plan;
use crate::checkpoint::SavedCheckpoint;
use crate::data::ExampleSource as _;
use crate::error::input_file;
use crate::recipe;
use crate::recipe::Recipe;

/// File name of the resolved recipe in the folder of a run.
pub const RECIPE: &str = "recipe.toml";
/// Sections that affect saving, logging or speed, but not the numbers. A fingerprint has the
/// defaults of their keys.
const HARMLESS: [&str; 6] = ["checkpoint", "log", "profile", "alerts", "eval", "parallel"];
/// Keys of other sections with the same property, and those for a run that stopped at a NaN.
const HARMLESS_KEYS: [&str; 4] =
    ["train.recompute", "train.on_nan", "train.nan_limit", "quantization.bf16_copy"];

impl Plan {
    /// Returns the settings that determine the numbers of the run. A checkpoint resumes only with
    /// the same ones.
    pub fn fingerprint(&self) -> BTreeMap<String, String> {
        let mut recipe = self.recipe.clone();
        (recipe.data.train, recipe.data.eval) = (Vec::new(), Vec::new());
        recipe.model.id = None;
        recipe.train.gradient_accumulation_steps = recipe::AutoOr::Fixed(self.micro_batches());
        // Left out, so that checkpoints older than these sections can resume.
        let is_newer = |key: &str| key.starts_with("profile.") || key.starts_with("alerts.");
        let facts = recipe.values().into_iter().filter(|(key, _)| !is_newer(key));
        let defaults = Recipe::complete().values();
        let recorded = |(key, value): (String, String)| {
            let value = if is_harmless(&key) { defaults.get(&key)?.clone() } else { value };
            Some((key, value))
        };
        let mut facts: BTreeMap<String, String> = facts.filter_map(recorded).collect();
        // Spreading a run over ranks does not change it: the micro-batches of all ranks count.
        facts.insert("parallel.strategy".into(), format!("{:?}", recipe::Strategy::Single.as_str()));
        if self.recipe.objective == recipe::ObjectiveSection::default() {
            facts.retain(|key, _| !key.starts_with("objective."));
        }
        let short = |hash: blake3::Hash| hash.to_hex()[..16].to_owned();
        facts.insert("data".into(), short(self.train.dataset.digest()));
        facts.insert("steps".into(), self.total_steps.to_string());
        facts.insert("tokenizer".into(), short(self.dataset_loader.tokenizer.digest()));
        facts
    }

    /// Returns the fingerprint to compare with that of the checkpoint `saved`.
    pub(super) fn fingerprint_beside(&self, saved: &SavedCheckpoint) -> BTreeMap<String, String> {
        with_older_format(self.fingerprint(), &saved.state.fingerprint)
    }

    /// Returns the changes that a fingerprint ignores, as text: ranks and strategy, saving,
    /// logging. Compares with the recipe that the run of `saved` wrote; empty if that file is
    /// missing.
    pub(super) fn harmless_changes(&self, saved: &SavedCheckpoint) -> Vec<String> {
        let recipe = |output: &Path| input_file::read_text("read", &output.join(RECIPE)).ok();
        let text = saved.folder.parent().and_then(recipe);
        let Some(then) = text.and_then(|text| Recipe::values_of(&text)) else { return Vec::new() };
        let now = self.recipe.values();
        // Defaults stand for keys that are newer than the run.
        let defaults = Recipe::complete().values();
        let nothing = "nothing".to_owned();
        let keys: BTreeSet<&String> = then.keys().chain(now.keys()).filter(|key| is_harmless(key)).collect();
        let value = |values: &BTreeMap<String, String>, key: &str| {
            values.get(key).or(defaults.get(key)).unwrap_or(&nothing).clone()
        };
        let changed = keys.into_iter().map(|key| (key.as_str(), value(&then, key), value(&now, key)));
        let ranks = ("ranks", saved.state.ranks.to_string(), self.world_size.to_string());
        let changed = changed.chain([ranks]).filter(|(_, then, now)| then != now);
        changed.map(|(key, then, now)| format!("{key}: {then} before, {now} now")).collect()
    }

    /// Returns the recipe as text without paths of one host: processes of one run must agree on it.
    pub fn run_text(&self) -> String {
        let mut recipe = self.recipe.clone();
        recipe.model.id = None;
        (recipe.data.train, recipe.data.eval) = (Vec::new(), Vec::new());
        recipe.parallel.offload_folder = None;
        recipe.parallel.strategy = self.strategy();
        // Only rank 0 raises alerts and starts programs.
        recipe.alerts = recipe::AlertsSection::default();
        recipe.log.command = None;
        format!("{}\n{} ranks, {} steps", recipe.to_toml(), self.world_size, self.total_steps)
    }
}

/// True if a key of the recipe may change on resume.
fn is_harmless(key: &str) -> bool {
    let section = key.split_once('.').map_or(key, |(section, _)| section);
    HARMLESS_KEYS.contains(&key) || HARMLESS.contains(&section) && key != "parallel.reduce_dtype"
}

/// Returns `facts` with the format of pairs as the checkpoint recorded it: before the format
/// "preference_chosen", the recipe of such a run had "auto" or "preference". The digest of the data
/// compares the rows.
fn with_older_format(
    mut facts: BTreeMap<String, String>,
    recorded: &BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let (now, then) = (facts.get("data.format"), recorded.get("data.format"));
    if let (Some("\"preference_chosen\""), Some(older @ ("\"auto\"" | "\"preference\""))) =
        (now.map(String::as_str), then.map(String::as_str))
    {
        facts.insert("data.format".into(), older.to_owned());
    }
    facts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_name_of_the_format_of_pairs_is_the_same_run() {
        let of = |format: &str| BTreeMap::from([("data.format".to_owned(), format!("{format:?}"))]);
        for older in ["auto", "preference"] {
            assert_eq!(with_older_format(of("preference_chosen"), &of(older)), of(older));
        }
        assert_eq!(with_older_format(of("text"), &of("auto")), of("text"));
        assert_eq!(with_older_format(of("preference_chosen"), &of("text")), of("preference_chosen"));
    }
}
