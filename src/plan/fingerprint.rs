//! What two runs must have alike: to go on from a checkpoint, or to be processes of one run.

use std::collections::BTreeMap;

use super::Plan;
use crate::recipe;

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
        recipe.train.gradient_accumulation_steps = self.micro_batches();
        let mut facts = recipe.values();
        // A run that stopped at a NaN may go on another way.
        facts.retain(|key, _| key != "train.on_nan" && key != "train.nan_limit");
        let short = |hash: blake3::Hash| hash.to_hex()[..16].to_owned();
        facts.insert("data".into(), short(self.train.0.digest()));
        facts.insert("steps".into(), self.total_steps.to_string());
        facts.insert("tokenizer".into(), short(self.rows.tokenizer.digest()));
        facts
    }

    /// The recipe as text, but for what names places of one host: what processes of one run must have alike.
    pub fn run_text(&self) -> String {
        let mut recipe = self.recipe.clone();
        recipe.model.id = None;
        (recipe.data.train, recipe.data.eval) = (Vec::new(), Vec::new());
        recipe.parallel.offload_folder = None;
        format!("{}\n{} ranks, {} steps", recipe.to_toml(), self.ranks, self.total_steps)
    }
}
