//! The recipe in TOML: every key with its default and unit, documented at its declaration
//! (`sections`), read from layers (`layers`) and written back (`render`).
//!
//! A recipe is pure data. It is checked without a model, a device or a data set: unknown keys,
//! wrong types, ranges, missing paths, keys without effect. One error reports all faults, each with
//! its line or flag. `planning` decides what a recipe means for a model and a machine.
//!
//! The sections do not use serde: it stops at the first fault, loses the origin of a merged value,
//! and would need every key's documentation and range a second time.

mod builtin;
mod chat_templates;
mod command_line;
mod conflicts;
mod difference;
mod key_conflict;
mod layers;
mod listen_address;
mod objective_keys;
mod peers;
mod render;
mod row_source;
mod schema;
mod sections;
mod shell;
mod source;
mod split_slice;
mod step_interval;
mod suggest;
mod train_on;
mod value;
mod webhook;

pub use builtin::{BUILT_IN, BuiltIn, RecipeText};
pub use command_line::CommandLine;
pub use difference::RecipeDifference;
pub use finetune_core::recipe::enums;
pub use finetune_core::recipe::enums::{
    AdapterInit, AdapterKind, AlertRule, Attention, ComputeDtype, DataFormat, Dtype, FDivergence, LossType,
    MasterWeights, ModelInit, ObjectiveKind, ObjectiveRows, Offload, OnBadRow, OnLongRow, OnNan,
    OptimizerKind, QuantKind, Recompute, ReduceDtype, SchedulerKind, StateDtype, Strategy, TrainedEnds,
    TrainedTurns,
};
use finetune_core::{address, error, private_file, program};
pub use layers::{FlagAssignment, Purpose, RecipeLayers};
pub use listen_address::ListenAddress;
pub use row_source::RowSource;
pub use sections::{
    AdapterSection, AlertsSection, CheckpointSection, DataSection, EvalSection, LEAST_SEQ_LEN, LogSection,
    MOST_ACCUMULATION, ModelSection, ObjectiveSection, OptimizerSection, ParallelSection, ProfileSection,
    QuantizationSection, SchedulerSection, TrainSection,
};
pub use shell::quoted_for_shell;
pub use source::{DataSource, Folder, Template};
pub use split_slice::SplitSlice;
pub use step_interval::StepInterval;
pub use suggest::{key_of_peers, nearest};
pub use train_on::TrainOn;
pub use value::{AutoOr, Patterns, TargetModules};
pub use webhook::WebhookSource;

use std::collections::{BTreeMap, BTreeSet};

use schema::Section;

use crate::error::Result;

/// Settings of the user, with every default filled in.
///
/// Only `model.id`, `data.train` and `optimizer.learning_rate` have no default; [`Purpose::Train`]
/// requires them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Recipe {
    /// The model to start from.
    pub model: ModelSection,
    /// Quantization of the frozen base; `None`: not quantized.
    pub quantization: Option<QuantizationSection>,
    /// The adapter to train; `None`: all weights are trained.
    pub adapter: Option<AdapterSection>,
    /// Training and evaluation data.
    pub data: DataSection,
    /// Loss that is minimized.
    pub objective: ObjectiveSection,
    /// Length of the training and batch sizes.
    pub train: TrainSection,
    /// The optimizer that applies gradients.
    pub optimizer: OptimizerSection,
    /// The learning-rate schedule.
    pub scheduler: SchedulerSection,
    /// Distribution over devices.
    pub parallel: ParallelSection,
    /// Checkpoints and the result.
    pub checkpoint: CheckpointSection,
    /// Evaluation on held-out data.
    pub eval: EvalSection,
    /// Logging of a run.
    pub log: LogSection,
    /// A trace of some steps.
    pub profile: ProfileSection,
    /// Alerts about problems of a run.
    pub alerts: AlertsSection,
    /// Keys that the user set.
    pub written: WrittenKeys,
}

/// Keys that a recipe, a flag or `--set` assigned, even to the default.
///
/// All values compare equal, so that recipes are compared only by their values.
#[derive(Debug, Clone, Default)]
pub struct WrittenKeys {
    /// Location of each key.
    locations: BTreeMap<(String, String), String>,
    overruled: Vec<String>,
}

impl WrittenKeys {
    /// Location that set `key` of `section` last: `recipe.toml:3:5`, or the flag; none for a
    /// default.
    pub fn location(&self, section: &str, key: &str) -> Option<&str> {
        self.locations.get(&(section.to_owned(), key.to_owned())).map(String::as_str)
    }

    /// One line per ignored key that a key of a higher layer leaves without effect.
    pub fn overruled(&self) -> &[String] {
        &self.overruled
    }
}

impl PartialEq for WrittenKeys {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl AdapterSection {
    /// Value of `key` as TOML; none if it is not set.
    pub fn value(&self, key: &str) -> Option<String> {
        let at = self.keys().iter().position(|known| known.name == key)?;
        self.values().swap_remove(at).map(|value| render::inline(&value))
    }
}

impl TrainSection {
    /// Rows of a micro-batch; 1 while that is undecided.
    pub fn micro_batch_rows(&self) -> usize {
        match self.micro_batch_size {
            AutoOr::Auto => 1,
            AutoOr::Fixed(rows) => rows,
        }
    }

    /// Micro-batches of a step on each rank; 1 while that is undecided.
    pub fn accumulation(&self) -> usize {
        match self.gradient_accumulation_steps {
            AutoOr::Auto => 1,
            AutoOr::Fixed(micro_batches) => micro_batches,
        }
    }
}

impl Recipe {
    /// Number of checkpoints that a run of `total` steps, with `epoch` steps per epoch, saves at
    /// most after its first `done` steps, and the number it keeps. With `keep_best`, each
    /// evaluation may save one, the last step is saved, and the best one is kept beside the last.
    /// With `keep_every`, each such step is kept too.
    pub fn checkpoints(&self, [done, total]: [u64; 2], epoch: u64) -> (u64, u64) {
        let saves = self.checkpoint.save_steps.count([done, total], epoch);
        let each = self.checkpoint.keep_every.map_or(0, |every| total / every - done / every);
        let keep = (self.checkpoint.keep_last as u64).saturating_add(each);
        if !self.eval.keeps_best() {
            return (saves, keep);
        }
        let evaluations = self.eval.interval().count_between([done, total], epoch);
        (saves.saturating_add(evaluations).saturating_add(1), keep.saturating_add(1))
    }
}

impl EvalSection {
    /// Returns true if the run keeps the weights of its best evaluation.
    pub fn keeps_best(&self) -> bool {
        self.keep_best || self.patience.is_some()
    }

    /// Interval of the evaluations between the first and the last step.
    pub fn interval(&self) -> StepInterval {
        match self.steps {
            StepInterval::Auto if self.keeps_best() => StepInterval::Epoch,
            StepInterval::Auto => StepInterval::Never,
            steps => steps,
        }
    }
}

impl DataSection {
    /// Maximum tokens of a row if neither the user nor the model sets a smaller limit.
    pub(crate) const MOST_AUTO_SEQ_LEN: usize = 2048;

    /// Maximum tokens of a row; `DataSection::MOST_AUTO_SEQ_LEN` while that is undecided.
    pub fn longest_row(&self) -> usize {
        match self.max_seq_len {
            AutoOr::Auto => Self::MOST_AUTO_SEQ_LEN,
            AutoOr::Fixed(tokens) => tokens,
        }
    }

    /// Resolves `max_seq_len = "auto"` for a model of `positions` positions.
    pub fn fit_positions(&mut self, positions: usize) {
        if self.max_seq_len == AutoOr::Auto {
            let tokens = positions.clamp(LEAST_SEQ_LEN, Self::MOST_AUTO_SEQ_LEN);
            self.max_seq_len = AutoOr::Fixed(tokens);
        }
    }
}

impl Recipe {
    /// Merges the layers: `--set` over flags over the recipe over defaults.
    ///
    /// # Errors
    /// One error that lists every fault of every layer, each with its location.
    pub fn load(layers: &RecipeLayers) -> Result<Recipe> {
        layers::load(layers)
    }

    /// Maximum tokens of the examples that stay together: those of a row, or of both answers of a
    /// pair.
    pub fn longest_group(&self) -> usize {
        self.data.longest_row().saturating_mul(self.objective.examples_of_row())
    }

    /// Values in the text of a recipe, in the form of [`Recipe::values`]; none if it is no TOML of
    /// sections.
    pub fn values_of(text: &str) -> Option<BTreeMap<String, String>> {
        let mut values = BTreeMap::new();
        for (section, keys) in text.parse::<toml::Table>().ok()? {
            let toml::Value::Table(keys) = keys else { return None };
            values
                .extend(keys.iter().map(|(key, value)| (format!("{section}.{key}"), render::inline(value))));
        }
        Some(values)
    }

    /// Adds the defaults of keys that are missing in the sections of `values`, which an older
    /// version's [`Recipe::values`] may have returned. A recipe from before a key existed means
    /// that key's default.
    pub fn add_defaults(values: &mut BTreeMap<String, String>) {
        let section = |key: &str| key.split_once('.').map(|(section, _)| section.to_owned());
        let present: BTreeSet<String> = values.keys().filter_map(|key| section(key)).collect();
        let defaults = Recipe::complete().values().into_iter();
        for (key, value) in
            defaults.filter(|(key, _)| section(key).is_some_and(|name| present.contains(&name)))
        {
            values.entry(key).or_insert(value);
        }
    }

    /// The values that differ from their defaults, and an empty entry for each section that has
    /// values.
    pub fn without_defaults(values: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        let defaults = Recipe::complete().values();
        let sections =
            values.keys().filter_map(|key| Some((key.split_once('.')?.0.to_owned(), String::new())));
        let values = values.iter().filter(|(key, value)| defaults.get(*key) != Some(value));
        sections.chain(values.map(|(key, value)| (key.clone(), value.clone()))).collect()
    }

    /// A recipe with every table.
    pub fn complete() -> Recipe {
        Recipe {
            quantization: Some(QuantizationSection::default()),
            adapter: Some(AdapterSection::default()),
            ..Recipe::default()
        }
    }

    /// The present tables, in the order of the reference.
    fn sections(&self) -> Vec<&dyn Section> {
        let optional = [
            self.quantization.as_ref().map(|section| section as &dyn Section),
            self.adapter.as_ref().map(|section| section as &dyn Section),
        ];
        let first: [&dyn Section; 1] = [&self.model];
        let rest: [&dyn Section; 11] = [
            &self.data,
            &self.objective,
            &self.train,
            &self.optimizer,
            &self.scheduler,
            &self.parallel,
            &self.checkpoint,
            &self.eval,
            &self.log,
            &self.profile,
            &self.alerts,
        ];
        first.into_iter().chain(optional.into_iter().flatten()).chain(rest).collect()
    }

    /// The table `name`, if it is present.
    fn section(&self, name: &str) -> Option<&dyn Section> {
        self.sections().into_iter().find(|section| section.name() == name)
    }

    /// The names of all tables.
    fn section_names() -> Vec<&'static str> {
        Recipe::complete().sections().iter().map(|section| section.name()).collect()
    }

    /// True if a recipe can have the table `name`.
    fn has_section(name: &str) -> bool {
        Recipe::default().section_mut(name).is_some()
    }

    /// The table `name`, added with its defaults if it is absent.
    fn section_mut(&mut self, name: &str) -> Option<&mut dyn Section> {
        Some(match name {
            "model" => &mut self.model,
            "quantization" => self.quantization.get_or_insert_default(),
            "adapter" => self.adapter.get_or_insert_default(),
            "data" => &mut self.data,
            "objective" => &mut self.objective,
            "train" => &mut self.train,
            "optimizer" => &mut self.optimizer,
            "scheduler" => &mut self.scheduler,
            "parallel" => &mut self.parallel,
            "checkpoint" => &mut self.checkpoint,
            "eval" => &mut self.eval,
            "log" => &mut self.log,
            "profile" => &mut self.profile,
            "alerts" => &mut self.alerts,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_section_is_found_by_its_name() {
        let names: Vec<&str> = Recipe::complete().sections().iter().map(|section| section.name()).collect();
        assert!(!names.is_empty());
        for name in names {
            let mut recipe = Recipe::default();
            assert_eq!(recipe.section_mut(name).map(|section| section.name()), Some(name));
        }
        assert!(Recipe::default().section_mut("trian").is_none());
    }

    #[test]
    fn a_key_at_its_default_counts_as_written() {
        let layers = RecipeLayers {
            set: vec!["adapter.r=16".into(), "adapter.kind=lora".into()],
            purpose: Purpose::Other,
            ..RecipeLayers::default()
        };
        let recipe = Recipe::load(&layers).unwrap();
        assert_eq!(recipe.adapter, Some(AdapterSection::default()));
        assert_eq!(recipe.written.location("adapter", "r"), Some("--set adapter.r=16"));
        assert_eq!(recipe.written.location("adapter", "lora_alpha"), None);
    }
}
