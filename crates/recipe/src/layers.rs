//! Layers of settings, from lowest to highest: the recipe's text, the flags, `--set`.
//!
//! Each layer is checked alone, so that a fault has a location (`file:line:column`, or the flag).
//! One error lists the faults of all layers. If two keys exclude each other, the one in the higher
//! layer replaces the other. A key that a higher layer leaves without effect is ignored with a
//! note.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Value;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use super::builtin::RecipeText;
use super::conflicts::conflicts;
use super::key_conflict::KeyConflict;
use super::peers::{
    is_removed, key_of_a_source, other_language, section_of_peers, value_of_key, value_of_peers,
};
use super::render::inline;
use super::schema::Key;
use super::shell::quoted_for_shell;
use super::suggest::{nearest, nearest_key};
use super::value::{AutoOr, ValueRefusal};
use super::{Recipe, WrittenKeys};
use crate::error::{Error, Result};
use crate::private_file::{without_address, without_user};

/// Purpose for which a recipe is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Purpose {
    /// Training: model, data and learning rate are required.
    #[default]
    Train,
    /// Any other purpose, which requires no key.
    Other,
}

/// All sources of settings of a run, lowest layer first.
#[derive(Debug, Clone, Default)]
pub struct RecipeLayers {
    /// The recipe of `--recipe`, or that of the run to resume.
    pub recipe: Option<RecipeText>,
    /// True if the run to resume left the recipe: its removed keys are ignored with a note.
    /// Purposes other than training ignore them always.
    pub is_left: bool,
    /// The model of `--model`, which sets `model.id`.
    pub model: Option<String>,
    /// Values of `--dataset`, for `data.train`.
    pub train: Vec<String>,
    /// Values of `--eval-dataset`, for `data.eval`.
    pub eval: Vec<String>,
    /// Flags that each set one key, such as `--lr`.
    pub settings: Vec<FlagAssignment>,
    /// Values of `--set section.key=value`; the last one of a key counts.
    pub set: Vec<String>,
    /// The typed arguments, for an error that shows the completed command.
    pub typed: Vec<String>,
    /// Base of relative paths in flags: the working folder.
    pub folder: PathBuf,
    /// Decides the required keys.
    pub purpose: Purpose,
}

/// A flag that sets one key of a recipe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlagAssignment {
    /// The flag, such as `--lr`.
    pub flag: &'static str,
    /// Section of the key.
    pub section: &'static str,
    /// Name of the key.
    pub key: &'static str,
    /// The typed value.
    pub value: String,
}

/// Keys that replace another key of a lower layer, after their section. Of the first two pairs at
/// most one key counts; a lower layer's `max_steps` would override `epochs`.
const REPLACES: [[&str; 3]; 5] = [
    ["scheduler", "warmup_steps", "warmup_ratio"],
    ["scheduler", "warmup_ratio", "warmup_steps"],
    ["train", "global_batch_size", "gradient_accumulation_steps"],
    ["train", "gradient_accumulation_steps", "global_batch_size"],
    ["train", "epochs", "max_steps"],
];

/// The TOML parser's message for a duplicate key; the rest of such a text is valid. The parser has
/// no error codes, so a test below compares these texts with the parser.
const DUPLICATE: &str = "duplicate key";

/// Start of the parser's message about an invalid or missing value.
const NO_VALUE: &str = "string values must be quoted";

/// Flags for a model or data.
const SOURCE_FLAGS: [&str; 3] = ["--model", "--dataset", "--eval-dataset"];

/// Flag that training commands miss most often.
const EXAMPLE_DATASET: &str = "--dataset rows.jsonl";

/// Example line of such a file.
const EXAMPLE_ROW: &str =
    r#"{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}"#;

/// Hint of a fault without a better one.
const REFERENCE: &str = "`finetune recipes show reference` documents every key";

/// Hint for a recipe in another language.
const AS_TOML: &str = "write `key = value` under `[section]`; docs/recipes.md maps the names of other trainers to these, \
    and `finetune recipes write lora` writes a file to start from";

/// Longest name or value quoted in a message, in characters.
const QUOTED_CHARS: usize = 60;

/// Maximum number of faults in a message; further ones are only counted.
const MAX_FAULTS: usize = 20;

/// Merges the layers into a recipe.
pub(super) fn load(layers: &RecipeLayers) -> Result<Recipe> {
    let ignores_removed = layers.is_left || layers.purpose == Purpose::Other;
    let mut reader = Reader { ignores_removed, ..Reader::default() };
    if let Some(text) = &layers.recipe {
        reader.read_text(text);
    }
    reader.layer = Layer::Flags;
    reader.read_flags(layers);
    reader.layer = Layer::Set;
    for assignment in &layers.set {
        reader.read_assignment(assignment, &layers.folder);
    }
    reader.check_conflicts();
    if layers.purpose == Purpose::Train {
        reader.check_complete(layers);
    }
    let what = match &layers.recipe {
        Some(text) => format!("cannot use recipe {}", text.name),
        None => "cannot use these settings".to_owned(),
    };
    reader.finish(what)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
enum Layer {
    #[default]
    Text,
    Flags,
    Set,
}

struct RecipeFault {
    /// `file:line:column` or the flag; empty for a missing key.
    location: String,
    text: String,
    hint: Option<String>,
}

#[derive(Default)]
struct Reader {
    recipe: Recipe,
    /// True if the recipe may have removed keys, which are ignored with a note.
    ignores_removed: bool,
    layer: Layer,
    faults: Vec<RecipeFault>,
    /// Number of faults that the message omits.
    omitted: usize,
    /// Layer and location that set each key last.
    locations: BTreeMap<(String, String), (Layer, String)>,
    /// One line per key that a higher layer leaves without effect.
    overruled: Vec<String>,
    /// Sections with a fault: further problems there may be consequences.
    faulty: BTreeSet<String>,
}

impl Reader {
    fn fault(&mut self, section: &str, location: &str, text: String, hint: Option<String>) {
        self.faulty.insert(section.to_owned());
        self.push(RecipeFault { location: location.to_owned(), text, hint });
    }

    fn push(&mut self, fault: RecipeFault) {
        if !self.counts_alone() {
            self.faults.push(fault);
        }
    }

    /// Returns true if the message is full; counts the fault, so that its location and nearest name
    /// need no search.
    fn counts_alone(&mut self) -> bool {
        let enough = self.faults.len() >= MAX_FAULTS;
        self.omitted += usize::from(enough);
        enough
    }

    /// Reads the text of a recipe: tables of keys.
    fn read_text(&mut self, text: &RecipeText) {
        let lines = Lines::of(text);
        let (table, mut errors) = DeTable::parse_recoverable(&text.text);
        errors.sort_by_key(|error| error.span().map(|span| span.start));
        if let (Some(language), false) = (other_language(&text.text), errors.is_empty()) {
            self.fault(
                "",
                &text.name,
                format!("this is {language}, and recipes are TOML"),
                Some(AS_TOML.into()),
            );
            self.faulty.extend(Recipe::section_names().into_iter().map(str::to_owned));
            return;
        }
        for error in &errors {
            if self.counts_alone() {
                continue;
            }
            let span = error.span().unwrap_or_default();
            let (message, hint) = not_toml(error.message(), text.text.get(span.clone()).unwrap_or_default());
            self.fault("", &lines.location(span.start), message, hint);
        }
        // The recovered part of an invalid text would cause misleading faults.
        if !errors.iter().all(|error| error.message() == DUPLICATE) {
            self.faulty.extend(Recipe::section_names().into_iter().map(str::to_owned));
            return;
        }
        for (name, item) in table.into_inner() {
            let (start, name) = (name.span().start, name.into_inner());
            match item.into_inner() {
                DeValue::Table(keys) if Recipe::has_section(&name) => {
                    self.read_section(text, &lines, &name, keys);
                }
                _ if self.counts_alone() => {}
                DeValue::Table(_) => self.unknown_section(&lines.location(start), &name),
                _ => self.stray(&lines.location(start), &name),
            }
        }
    }

    fn read_section(&mut self, text: &RecipeText, lines: &Lines<'_>, section: &str, keys: DeTable<'_>) {
        let Some(table) = self.recipe.section_mut(section) else { return };
        let known = table.keys();
        for (key, value) in keys {
            let is_known = known.iter().any(|known| known.name == key.get_ref());
            if !is_known && self.counts_alone() {
                self.faulty.insert(section.to_owned());
                continue;
            }
            let key_location = lines.location(key.span().start);
            let written = value.span();
            let value_location = lines.location(written.start);
            let key = key.into_inner();
            match Value::deserialize(ValueDeserializer::from(value)) {
                Ok(value) => self.set(section, &key, &value, &text.folder, (&key_location, &value_location)),
                // An integer outside of every integer type.
                Err(_) => {
                    let written = text.text.get(written).unwrap_or_default();
                    let message = format!("`{section}.{key}` is {written}; accepted: numbers below 2^63");
                    self.fault(section, &value_location, message, None);
                }
            }
        }
    }

    /// Reports a value outside all tables.
    fn stray(&mut self, location: &str, name: &str) {
        if Recipe::has_section(name) {
            let text = format!("`{name}` is not a table; accepted: one table of keys");
            return self.fault(name, location, text, Some(format!("write `[{name}]` and its keys below")));
        }
        let ours = || {
            let near = nearest_key("", name);
            near.map(|(section, key)| format!("write {} under `[{section}]`", as_written(key, name)))
        };
        let hint = key_of_a_source(name).or_else(ours);
        self.fault("", location, format!("`{}` is outside of any section", clip(name)), hint);
    }

    fn unknown_section(&mut self, location: &str, section: &str) {
        let names = Recipe::section_names();
        let near = section_of_peers(section).or_else(|| nearest(section, names.iter().copied()));
        let named = near.map_or_else(String::new, |near| format!("; nearest: [{near}]"));
        let shown = clip(section);
        let text = format!("unknown section [{shown}]{named}; accepted: {}", names.join(", "));
        self.fault(near.unwrap_or(section), location, text, near.map(|near| format!("write `[{near}]`")));
    }

    fn read_flags(&mut self, layers: &RecipeLayers) {
        let text = |text: &String| Value::String(text.clone());
        if let Some(id) = &layers.model {
            self.set("model", "id", &text(id), &layers.folder, ("--model", "--model"));
        }
        let lists = [("train", &layers.train, "--dataset"), ("eval", &layers.eval, "--eval-dataset")];
        for (key, list, flag) in lists {
            if !list.is_empty() {
                let list = Value::Array(list.iter().map(text).collect());
                self.set("data", key, &list, &layers.folder, (flag, flag));
            }
        }
        for FlagAssignment { flag, section, key, value } in &layers.settings {
            self.set_typed((section, key), value, &layers.folder, flag);
        }
    }

    /// Reads `section.key=value`: the value is TOML, else text.
    fn read_assignment(&mut self, assignment: &str, folder: &Path) {
        let source = format!("--set {}", without_address(&without_user(assignment)));
        let parts = assignment.split_once('=').and_then(|(name, value)| {
            let (section, key) = name.trim().split_once('.')?;
            Some((section.trim(), key.trim(), value.trim()))
        });
        let Some((section, key, raw)) = parts else {
            let hint = Some("write `--set train.epochs=3`, for example".to_owned());
            return self.fault("", &source, "accepted: section.key=value".into(), hint);
        };
        if !Recipe::has_section(section) {
            return self.unknown_section(&source, section);
        }
        self.set_typed((section, key), raw, folder, &source);
    }

    /// Sets a key to a value from the command line: TOML, else text.
    fn set_typed(&mut self, (section, key): (&str, &str), raw: &str, folder: &Path, location: &str) {
        let text = Value::String(raw.to_owned());
        let value = ValueDeserializer::parse(raw).ok().and_then(|value| Value::deserialize(value).ok());
        // `--set model.revision=7` must give the text "7": a key that accepts only text reads the
        // value as text.
        let value = value.filter(|value| {
            let mut trial = self.recipe.clone();
            let mut accepts =
                |value: &Value| trial.section_mut(section).is_some_and(|s| s.set(key, value, folder).is_ok());
            accepts(value) || !accepts(&text)
        });
        self.set(section, key, &value.unwrap_or(text), folder, (location, location));
    }

    /// Sets one key of a section that exists.
    fn set(&mut self, section: &str, key: &str, value: &Value, folder: &Path, locations: (&str, &str)) {
        let Some(table) = self.recipe.section_mut(section) else { return };
        let Some(known) = table.keys().iter().find(|known| known.name == key) else {
            let keys: Vec<&str> = table.keys().iter().map(|known| known.name).collect();
            let (text, hint) = unknown_key(section, key, &keys);
            if self.ignores_removed && self.layer == Layer::Text && is_removed(section, key) {
                let hint = hint.unwrap_or_default();
                let note =
                    format!("{}: `{section}.{key}` no longer exists and is ignored; {hint}", locations.0);
                return self.overruled.push(note);
            }
            return self.fault(section, locations.0, text, hint);
        };
        match table.set(key, value, folder) {
            Ok(()) => {
                for [.., other] in REPLACES.iter().filter(|[of, own, _]| [*of, *own] == [section, key]) {
                    let at = (section.to_owned(), (*other).to_owned());
                    if self.locations.get(&at).is_some_and(|(layer, _)| *layer < self.layer) {
                        table.reset(other);
                        self.locations.remove(&at);
                    }
                }
                let origin = (self.layer, locations.1.to_owned());
                self.locations.insert((section.to_owned(), key.to_owned()), origin);
            }
            Err(refusal) => {
                let (text, hint) = refused(section, known, value, &refusal);
                let text = match refusal {
                    // The flag already names the value.
                    ValueRefusal::Unusable(why) if SOURCE_FLAGS.contains(&locations.1) => why,
                    _ => text,
                };
                self.fault(section, locations.1, text, hint);
            }
        }
    }

    /// Layer that set a key last.
    fn layer_of(&self, section: &str, key: &str) -> Option<Layer> {
        self.locations.get(&(section.to_owned(), key.to_owned())).map(|(layer, _)| *layer)
    }

    /// Resets keys that a key of a higher layer leaves without effect, each with a note.
    /// Conflicting keys of the same layer stay.
    fn drop_overruled(&mut self) {
        // Each round resets one of the keys that are set.
        for _ in 0..self.locations.len() {
            let overruled = conflicts(&self.recipe).into_iter().find_map(|conflict| {
                let (section, key) = conflict.overruled_by?;
                let is_lower =
                    self.layer_of(conflict.section, conflict.key)? < self.layer_of(section, key)?;
                is_lower.then_some((conflict, (section.to_owned(), key.to_owned())))
            });
            let Some((conflict, cause)) = overruled else { return };
            let KeyConflict { section, key, text, .. } = conflict;
            let location_of = |location: Option<(Layer, String)>| {
                location.map(|(_, location)| location).unwrap_or_default()
            };
            let cause = location_of(self.locations.get(&cause).cloned());
            let origin = location_of(self.locations.remove(&(section.to_owned(), key.to_owned())));
            if let Some(table) = self.recipe.section_mut(section) {
                table.reset(key);
            }
            self.overruled.push(format!("{origin}: `{section}.{key}` {text} ({cause}), and is ignored"));
        }
    }

    /// The conflict of `global_batch_size` and `gradient_accumulation_steps`, if both are set.
    fn two_batches(&self) -> Option<KeyConflict> {
        let [section, global, accumulation] = REPLACES[2];
        let is_number = self.recipe.train.gradient_accumulation_steps != AutoOr::Auto;
        let both = self.recipe.train.global_batch_size.and(self.layer_of(section, accumulation));
        both.filter(|_| is_number).map(|_| {
            let text = format!("and `{accumulation}` exclude each other");
            KeyConflict::new(section, global, text, "remove one of the two")
        })
    }

    fn check_conflicts(&mut self) {
        self.drop_overruled();
        for conflict in conflicts(&self.recipe).into_iter().chain(self.two_batches()) {
            if !self.faulty.contains(conflict.section) {
                let at = (conflict.section.to_owned(), conflict.key.to_owned());
                let origin =
                    self.locations.get(&at).map(|(_, location)| location.clone()).unwrap_or_default();
                let text = format!("`{}.{}` {}", conflict.section, conflict.key, conflict.text);
                self.push(RecipeFault { location: origin, text, hint: Some(conflict.hint) });
            }
        }
    }

    /// Checks the keys that training requires.
    fn check_complete(&mut self, layers: &RecipeLayers) {
        let rate = match layers.recipe {
            Some(_) => "--set optimizer.learning_rate=2e-4",
            None => "--recipe lora",
        };
        let needed = [
            ("model", "id", self.recipe.model.id.is_none(), "--model Qwen/Qwen2.5-0.5B"),
            ("data", "train", self.recipe.data.train.is_empty(), EXAMPLE_DATASET),
            ("optimizer", "learning_rate", self.recipe.optimizer.learning_rate.is_none(), rate),
        ];
        let mut flags = Vec::new();
        for (section, key, missing, flag) in needed {
            if missing && !self.faulty.contains(section) {
                flags.push(flag);
                let text = format!("`{section}.{key}` is not set");
                self.push(RecipeFault { location: String::new(), text, hint: None });
            }
        }
        if let (Some(fault), false) = (self.faults.last_mut(), flags.is_empty()) {
            fault.hint = Some(completed(&layers.typed, &flags));
        }
    }

    fn finish(self, what: String) -> Result<Recipe> {
        if self.faults.is_empty() {
            let locations = self.locations.into_iter().map(|(key, (_, location))| (key, location));
            let written = WrittenKeys { locations: locations.collect(), overruled: self.overruled };
            return Ok(Recipe { written, ..self.recipe });
        }
        // If all faults are in flags, the recipe itself is not the problem.
        let in_flags = self.faults.iter().all(|fault| fault.location.starts_with("--"));
        let mut error = Error::user(if in_flags { "cannot use these settings".to_owned() } else { what });
        let mut hints: Vec<String> = Vec::new();
        for RecipeFault { location, text, hint } in self.faults {
            error = error.because(if location.is_empty() { text } else { format!("{location}: {text}") });
            hints.extend(hint.filter(|hint| !hints.contains(hint)));
        }
        if self.omitted > 0 {
            error = error.because(format!("and {} more", self.omitted));
        }
        // The general hint comes last.
        hints.sort_by_key(|hint| hint == REFERENCE);
        if !hints.is_empty() {
            error = error.hint(hints.join("; "));
        }
        Err(error)
    }
}

/// Rewords the parser's message about `written` if it would mislead.
fn not_toml(message: &str, written: &str) -> (String, Option<String>) {
    let written = &*without_address(written);
    match message {
        DUPLICATE => (format!("`{written}` is set twice"), Some("remove one of the two".into())),
        _ if !message.starts_with(NO_VALUE) => (format!("not TOML: {message}"), None),
        _ if written.trim().is_empty() => ("not TOML: no value after `=`".into(), None),
        _ => (
            format!("not TOML: {written} is not a value"),
            Some(format!("write \"{written}\" for a text, true or false for a switch")),
        ),
    }
}

fn unknown_key(section: &str, key: &str, keys: &[&str]) -> (String, Option<String>) {
    let of_a_source = key_of_a_source(key);
    let near = nearest_key(section, key).filter(|_| of_a_source.is_none());
    let named = near.map_or_else(String::new, |(section, key)| format!("; nearest: `{section}.{key}`"));
    let shown = clip(key);
    let text = format!("unknown key `{section}.{shown}`{named}; [{section}] has: {}", keys.join(", "));
    let hint = match near {
        Some((owner, near)) if owner == section => format!("write {}", as_written(near, key)),
        Some((owner, near)) => format!("write {} under `[{owner}]`", as_written(near, key)),
        None => of_a_source.unwrap_or_else(|| REFERENCE.to_owned()),
    };
    (text, Some(hint))
}

/// Key `ours` as a replacement of `theirs`, with a value if `theirs` implies one.
fn as_written(ours: &str, theirs: &str) -> String {
    value_of_key(theirs).map_or_else(|| format!("`{ours}`"), |value| format!("`{ours} = {value}`"))
}

fn refused(section: &str, key: &Key, value: &Value, refusal: &ValueRefusal) -> (String, Option<String>) {
    let name = key.name;
    // A mistyped webhook is a secret too.
    let is_secret = (section, name) == ("alerts", "webhook");
    let shown = if is_secret { "(hidden)".to_owned() } else { clip(&inline(value)) };
    let text = match refusal {
        ValueRefusal::Shape => format!("`{section}.{name}` is {shown}; accepted: {}", (key.accepted)()),
        ValueRefusal::Empty => format!("`{section}.{name}` is empty; accepted: {}", (key.accepted)()),
        ValueRefusal::Unusable(why) => format!("`{section}.{name}` is {shown}: {why}"),
    };
    let near = value.as_str().and_then(|text| nearest(text, (key.choices)()));
    let theirs = value.as_str().and_then(|text| value_of_peers(section, name, text));
    let hint = match (near, refusal) {
        _ if theirs.is_some() => theirs.map(str::to_owned),
        (Some(near), _) => Some(format!("write `{name} = {near:?}`")),
        (None, ValueRefusal::Unusable(_)) => None,
        (None, ValueRefusal::Shape | ValueRefusal::Empty) => Some(REFERENCE.to_owned()),
    };
    (text, hint)
}

/// Shortens a name or value for a message and hides its password.
fn clip(text: &str) -> String {
    let text = &without_user(text);
    match text.char_indices().nth(QUOTED_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Lines of a recipe's text.
struct Lines<'a> {
    recipe: &'a RecipeText,
    /// Start of each line after the first, in bytes.
    ends: Vec<usize>,
}

impl<'a> Lines<'a> {
    fn of(recipe: &'a RecipeText) -> Self {
        let ends = recipe.text.match_indices('\n').map(|(byte, _)| byte + 1).collect();
        Lines { recipe, ends }
    }

    /// Location `name:line:column` of a byte, both from 1, the column in characters.
    fn location(&self, byte: usize) -> String {
        let line = self.ends.partition_point(|end| *end <= byte);
        let start = line.checked_sub(1).map_or(0, |before| self.ends[before]);
        let column = self.recipe.text.get(start..byte).map_or(0, |before| before.chars().count()) + 1;
        format!("{}:{}:{column}", self.recipe.name, line + 1)
    }
}

/// The typed command plus its missing flags.
fn completed(typed: &[String], flags: &[&str]) -> String {
    let shown = |word: &String| if word.contains('=') { without_address(word) } else { word.clone() };
    let words =
        typed.iter().map(|word| quoted_for_shell(&shown(word))).chain(flags.iter().map(ToString::to_string));
    let command = words.fold("finetune".to_owned(), |command, word| format!("{command} {word}"));
    let row = if flags.contains(&EXAMPLE_DATASET) {
        format!("; each line of rows.jsonl is a row, such as {EXAMPLE_ROW}")
    } else {
        String::new()
    };
    format!("add what is missing: `{command}`{row}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A parser version with other messages would make ours misleading.
    #[test]
    fn the_parser_words_its_errors_as_this_module_expects() {
        for (text, begin, span) in [
            ("[a]\nb = 1\nb = 2\n", DUPLICATE, 10..11),
            ("[a]\nb = 1\n[a]\nc = 2\n", DUPLICATE, 11..12),
            ("b = { c = 1, c = 2 }\n", DUPLICATE, 13..14),
            ("b = yes\n", NO_VALUE, 4..7),
            ("b = [yes]\n", NO_VALUE, 5..8),
            ("b = \n", NO_VALUE, 4..4),
        ] {
            let (_, errors) = DeTable::parse_recoverable(text);
            assert!(errors[0].message().starts_with(begin), "{text:?}: {}", errors[0].message());
            assert_eq!(errors[0].span(), Some(span), "{text:?}");
        }
    }
}
