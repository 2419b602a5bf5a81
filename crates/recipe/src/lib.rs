//! What the TOML may say: every key of a recipe, its default and unit documented where it is declared
//! (`sections`), read from layers (`layers`) and written back (`render`).
//!
//! A recipe is pure data. It is checked as far as that goes without a model, a device or a data set: unknown
//! keys, wrong kinds, ranges, paths that do not exist, keys without effect. All faults are reported at once, each
//! with its line or flag. What a recipe means for a model and a machine is for `plan` to say.
//!
//! The sections are not deserialized with serde: it stops at the first fault, cannot tell where a merged value
//! came from, and would need every key's documentation and range a second time.

mod addresses;
mod builtin;
mod chat_templates;
mod conflicts;
mod difference;
mod layers;
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

pub use addresses::{ListenAddress, ServerUrl};
pub use builtin::{BUILT_IN, BuiltIn, RecipeText};
pub use difference::RecipeDifference;
pub use finetune_core::recipe::enums;
pub use finetune_core::recipe::enums::{
    AdapterInit, AdapterKind, AlertRule, Attention, ComputeDtype, DataFormat, Dtype, MasterWeights,
    ModelInit, ObjectiveKind, Offload, OnBadRow, OnLongRow, OnNan, OptimizerKind, QuantKind, Recompute,
    ReduceDtype, SchedulerKind, StateDtype, Strategy,
};
use finetune_core::{address, error, private_file, program};
pub use layers::{FlagAssignment, Purpose, RecipeLayers};
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
pub use train_on::{TrainOn, TrainedEnds, TrainedTurns};
pub use value::{AutoOr, Patterns, TargetModules};
pub use webhook::{AlertProgram, WebhookSource};

use std::collections::{BTreeMap, BTreeSet};

use schema::Section;

use crate::error::{Error, Result};

/// What the user asks for, with every default filled in.
///
/// Only `model.id`, `data.train` and `optimizer.learning_rate` have none; [`Purpose::Train`] demands them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Recipe {
    /// The model to start from.
    pub model: ModelSection,
    /// How the frozen base is stored; `None`: as it is.
    pub quantization: Option<QuantizationSection>,
    /// The adapter to train; `None`: all weights are trained.
    pub adapter: Option<AdapterSection>,
    /// What the model learns from.
    pub data: DataSection,
    /// The loss that is minimized.
    pub objective: ObjectiveSection,
    /// How long and in which portions.
    pub train: TrainSection,
    /// What turns gradients into updates.
    pub optimizer: OptimizerSection,
    /// The learning rate over the steps.
    pub scheduler: SchedulerSection,
    /// How the work is spread over devices.
    pub parallel: ParallelSection,
    /// What is saved on the way and at the end.
    pub checkpoint: CheckpointSection,
    /// Evaluation on held-out data.
    pub eval: EvalSection,
    /// What a run reports.
    pub log: LogSection,
    /// A trace of some steps.
    pub profile: ProfileSection,
    /// Alarms about trouble in a run.
    pub alerts: AlertsSection,
    /// The keys that somebody wrote.
    pub written: WrittenKeys,
}

/// The keys that a recipe, a flag or `--set` gave a value, default or not.
///
/// Any two are equal, so that recipes are compared by their values alone.
#[derive(Debug, Clone, Default)]
pub struct WrittenKeys {
    /// The place of each key.
    places: BTreeMap<(String, String), String>,
    overruled: Vec<String>,
}

impl WrittenKeys {
    /// Where `key` of `section` was written last: `recipe.toml:3:5`, or the flag; none if it has its default.
    pub fn place(&self, section: &str, key: &str) -> Option<&str> {
        self.places.get(&(section.to_owned(), key.to_owned())).map(String::as_str)
    }

    /// A line for each key that was left out, because a key of a higher layer leaves it without an effect.
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
    /// The value of `key` as TOML; none if it is not set.
    pub fn value(&self, key: &str) -> Option<String> {
        let at = self.keys().iter().position(|known| known.name == key)?;
        self.values().swap_remove(at).map(|value| render::inline(&value))
    }
}

impl TrainSection {
    /// Rows that go through the model at once; one where that is not decided yet.
    pub fn micro_batch_rows(&self) -> usize {
        match self.micro_batch_size {
            AutoOr::Auto => 1,
            AutoOr::Fixed(rows) => rows,
        }
    }

    /// Micro-batches of a step on each rank; one where that is not decided yet.
    pub fn accumulation(&self) -> usize {
        match self.gradient_accumulation_steps {
            AutoOr::Auto => 1,
            AutoOr::Fixed(micro_batches) => micro_batches,
        }
    }
}

impl Recipe {
    /// The checkpoints that a run of `total` steps, `epoch` of them an epoch, saves at most after its first `done` steps, and how
    /// many stay. Where the best is kept, each evaluation may save one, the last step is saved, and one stays beside the last.
    pub fn checkpoints(&self, [done, total]: [u64; 2], epoch: u64) -> (u64, u64) {
        let saves = self.checkpoint.save_steps.count([done, total], epoch);
        let keep = self.checkpoint.keep_last as u64;
        if !self.eval.keeps_best() {
            return (saves, keep);
        }
        let evaluations = self.eval.interval().count_between([done, total], epoch);
        (saves.saturating_add(evaluations).saturating_add(1), keep.saturating_add(1))
    }
}

impl EvalSection {
    /// Returns whether the run leaves the weights of its best evaluation.
    pub fn keeps_best(&self) -> bool {
        self.keep_best || self.patience.is_some()
    }

    /// When the run evaluates between its first step and its last.
    pub fn interval(&self) -> StepInterval {
        match self.steps {
            StepInterval::Auto if self.keeps_best() => StepInterval::Epoch,
            StepInterval::Auto => StepInterval::Never,
            steps => steps,
        }
    }
}

impl DataSection {
    /// The most tokens of a row where neither the user nor the model sets a smaller limit.
    pub const MOST_AUTO_SEQ_LEN: usize = 2048;

    /// The most tokens of a row; [`DataSection::MOST_AUTO_SEQ_LEN`] where that is not decided yet.
    pub fn longest_row(&self) -> usize {
        match self.max_seq_len {
            AutoOr::Auto => Self::MOST_AUTO_SEQ_LEN,
            AutoOr::Fixed(tokens) => tokens,
        }
    }

    /// Decides `max_seq_len = "auto"` for a model of so many `positions`.
    pub fn fit_positions(&mut self, positions: usize) {
        if self.max_seq_len == AutoOr::Auto {
            let tokens = positions.clamp(LEAST_SEQ_LEN, Self::MOST_AUTO_SEQ_LEN);
            self.max_seq_len = AutoOr::Fixed(tokens);
        }
    }
}

impl Recipe {
    /// Puts the layers over each other: `--set` over flags over the recipe over defaults.
    ///
    /// # Errors
    /// One error that lists every fault of every layer, each with its place.
    pub fn load(layers: &RecipeLayers) -> Result<Recipe> {
        layers::load(layers)
    }

    /// Every value that is set, as a recipe that reads back to this one. Paths are absolute, a chat template is
    /// its text.
    pub fn to_toml(&self) -> String {
        render::plain(self)
    }

    /// The value of every key that is set, as TOML, by `section.key`.
    pub fn values(&self) -> BTreeMap<String, String> {
        render::values(self)
    }

    /// The values that the text of a recipe says, in the form of [`Recipe::values`]; none if it is no TOML of sections.
    pub fn values_of(text: &str) -> Option<BTreeMap<String, String>> {
        let mut values = BTreeMap::new();
        for (section, keys) in text.parse::<toml::Table>().ok()? {
            let toml::Value::Table(keys) = keys else { return None };
            values
                .extend(keys.iter().map(|(key, value)| (format!("{section}.{key}"), render::inline(value))));
        }
        Some(values)
    }

    /// Adds to `values`, which [`Recipe::values`] gave, perhaps of an older version of the program, the defaults of keys that
    /// their sections lack: a recipe from before a key was there means its default.
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

    /// The values that are other than their defaults, and the name of each section that has values, with an empty one.
    pub fn without_defaults(values: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        let defaults = Recipe::complete().values();
        let sections =
            values.keys().filter_map(|key| Some((key.split_once('.')?.0.to_owned(), String::new())));
        let values = values.iter().filter(|(key, value)| defaults.get(*key) != Some(value));
        sections.chain(values.map(|(key, value)| (key.clone(), value.clone()))).collect()
    }

    /// Every section and key with its documentation, what it accepts and its default, as a recipe.
    pub fn reference() -> String {
        render::reference()
    }

    /// The part of [`Recipe::reference`] about the section `name`.
    ///
    /// # Errors
    /// The user's: a recipe has no such section; the error lists the sections.
    pub fn reference_of(name: &str) -> Result<String> {
        render::reference_of(name).ok_or_else(|| {
            let recipe = Recipe::complete();
            let names: Vec<&str> = recipe.sections().iter().map(|section| section.name()).collect();
            let error = Error::user(format!("there is no section `{name}` in the reference"))
                .because(format!("sections: {}", names.join(", ")));
            match nearest(name, names) {
                Some(near) => error.hint(format!("write `{near}`")),
                None => error,
            }
        })
    }

    /// A recipe in which every table is present.
    fn complete() -> Recipe {
        Recipe {
            quantization: Some(QuantizationSection::default()),
            adapter: Some(AdapterSection::default()),
            ..Recipe::default()
        }
    }

    /// The tables present, in the order of the reference.
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

    /// Whether there is a table of that name.
    fn has_section(name: &str) -> bool {
        Recipe::default().section_mut(name).is_some()
    }

    /// The table of that name, added with its defaults if it was absent.
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
        assert_eq!(names.len(), 13);
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
        assert_eq!(recipe.written.place("adapter", "r"), Some("--set adapter.r=16"));
        assert_eq!(recipe.written.place("adapter", "lora_alpha"), None);
    }
}
