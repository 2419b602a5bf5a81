//! Configurations and splits of a data set: which of its files belong together.
//!
//! Like in the library `datasets`, a repository holds configurations (subsets), and each of these
//! holds splits. README.md lists them (`configs`, with `data_files` by pattern), or finetune infers
//! them from file names: `main/train-00000-of-00001.parquet`, `main/train/0000.parquet` as the hub
//! converts to, `data/test.jsonl`. Unlike `datasets`, finetune reads folders with the same splits
//! as configurations even without a README.md. It never mixes their rows unless the user asks for
//! it.

use std::collections::BTreeMap;

use regex::Regex;

use super::front_matter::{self, ListedConfig};
use super::select;
use crate::error::{Error, Result};

/// The name of a configuration without one, and of the preferred configuration if the user names
/// none.
const DEFAULT: &str = "default";
const TRAIN: &str = "train";
/// Splits to evaluate on, in order of preference.
const HELD_OUT: [&str; 5] = ["validation", "valid", "val", "dev", "test"];
/// Configurations that an error names; it counts the others.
const MAX_SHOWN: usize = 12;

/// The use of the rows, which decides the split if the user names none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowsFor {
    /// The split `train`.
    Training,
    /// The split `validation`, else `test`.
    Evaluation,
}

/// A part of a data set that its authors made for use alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Configuration {
    name: String,
    is_default: bool,
    /// Files by the name of their split, in the order of the repository.
    splits: BTreeMap<String, Vec<String>>,
    /// True if no file name contains a split: `train` then holds all files.
    is_unnamed: bool,
}

/// The files of one split of one configuration.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Chosen {
    pub(super) files: Vec<String>,
    /// A note for the user if finetune chose among several configurations.
    pub(super) note: Option<String>,
}

/// Returns the configurations of a repository with these file names and this README.md.
///
/// # Errors
/// README.md lists configurations in a form that finetune does not read.
pub(super) fn configurations(names: &[String], readme: Option<&str>) -> Result<Vec<Configuration>, String> {
    let listed = readme.map(front_matter::configs).transpose()?.unwrap_or_default();
    if listed.is_empty() {
        return Ok(inferred(names));
    }
    let all: Vec<Configuration> =
        listed.into_iter().map(|config| listed_configuration(config, names)).collect::<Result<_, _>>()?;
    let repeats = |config: &Configuration| all.iter().filter(|c| c.name == config.name).count() > 1;
    match all.iter().find(|config| repeats(config)) {
        Some(config) => Err(format!("it lists the configuration `{}` twice", config.name)),
        None => Ok(all),
    }
}

fn listed_configuration(listed: ListedConfig, names: &[String]) -> Result<Configuration, String> {
    let ListedConfig { config_name, default: is_default, data_dir, data_files } = listed;
    let name = config_name.unwrap_or(DEFAULT.to_owned());
    let folder = data_dir.as_deref().unwrap_or_default().trim_matches(['/', '.']);
    let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
    let Some(data_files) = data_files else {
        let inside: Vec<String> = names.iter().filter(|name| name.starts_with(&prefix)).cloned().collect();
        return Ok(by_split(name, is_default, &select::rows(&inside)));
    };
    let mut splits: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (split, pattern) in data_files.0 {
        let regex = pattern_regex(&format!("{prefix}{}", pattern.trim_start_matches("./")));
        let regex = regex.map_err(|why| format!("configuration `{name}`: the pattern `{pattern}` {why}"))?;
        let files = splits.entry(split.unwrap_or(TRAIN.to_owned())).or_default();
        files.extend(names.iter().filter(|name| regex.is_match(name) && select::is_rows(name)).cloned());
    }
    for files in splits.values_mut() {
        files.sort();
        files.dedup();
    }
    Ok(Configuration { name, is_default, splits, is_unnamed: false })
}

/// Signs of patterns and their meanings as regexes, the first that fits counting.
const SIGNS: [(&str, &str); 4] = [("**/", "(?:.*/)?"), ("**", ".*"), ("*", "[^/]*"), ("?", "[^/]")];

/// Translates a pattern of file names to a regex, as `datasets` reads it: `*` and `?` stay inside a
/// folder, `**` does not.
fn pattern_regex(pattern: &str) -> Result<Regex, String> {
    if pattern.contains("://") {
        return Err("leads out of the repository".into());
    }
    let (mut regex, mut rest) = ("^".to_owned(), pattern);
    while let Some(c) = rest.chars().next() {
        let sign = SIGNS.iter().find_map(|(sign, meaning)| Some((rest.strip_prefix(sign)?, meaning)));
        if let Some((after, meaning)) = sign {
            regex.push_str(meaning);
            rest = after;
        } else if let Some((class, after)) = rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            let class = class.replace('\\', r"\\").replace('[', r"\[").replacen('!', "^", 1);
            regex.push_str(&format!("[{class}]"));
            rest = after;
        } else {
            regex.push_str(&regex::escape(c.encode_utf8(&mut [0; 4])));
            rest = &rest[c.len_utf8()..];
        }
    }
    regex.push('$');
    Regex::new(&regex).map_err(|_| "is not a valid pattern".to_owned())
}

/// Returns the configurations that the file names alone show.
fn inferred(names: &[String]) -> Vec<Configuration> {
    let rows = select::rows(names);
    let mut folders: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for file in &rows {
        folders.entry(folder_of(file).unwrap_or(DEFAULT)).or_default().push(file);
    }
    let have_splits = rows.iter().all(|file| split_of(file).is_some());
    if !have_splits || folders.len() < 2 {
        let name = match folders.keys().next() {
            Some(folder) if have_splits && folders.len() == 1 => *folder,
            _ => DEFAULT,
        };
        folders = BTreeMap::from([(name, rows)]);
    }
    folders.into_iter().map(|(name, files)| by_split(name.to_owned(), false, &files)).collect()
}

/// Groups files by split. Files whose name contains no split count only if no name contains one.
fn by_split(name: String, is_default: bool, files: &[&str]) -> Configuration {
    let is_unnamed = files.iter().all(|file| split_of(file).is_none());
    let mut splits: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in files {
        match split_of(file) {
            Some(split) => splits.entry(split).or_default().push((*file).to_owned()),
            None if is_unnamed => splits.entry(TRAIN.to_owned()).or_default().push((*file).to_owned()),
            None => {}
        }
    }
    Configuration { name, is_default, splits, is_unnamed }
}

/// Returns the first folder of a file, skipping `data/`; none if the folder's name is that of a
/// split.
fn folder_of(file: &str) -> Option<&str> {
    let (folder, _) = file.strip_prefix("data/").unwrap_or(file).split_once('/')?;
    (split_in_word(folder).is_none()).then_some(folder)
}

/// Returns the split in a file's name, else in the names of its folders.
fn split_of(file: &str) -> Option<String> {
    let parts: Vec<&str> = file.split('/').collect();
    let (name, folders) = parts.split_last()?;
    let stem = name.split('.').next().unwrap_or(name);
    // The form of the branch refs/convert/parquet, which marks truncated splits with `partial-`.
    if let ([_, split], true) =
        (folders, stem.bytes().all(|b| b.is_ascii_digit()) && name.ends_with(".parquet"))
    {
        return Some(split.trim_start_matches("partial-").to_owned());
    }
    // `train_sft-00000-of-00003-0123456789abcdef.parquet`
    let mut words = stem.split("-of-");
    if let (Some((split, shard)), Some(rest)) = (words.next().and_then(|w| w.rsplit_once('-')), words.next())
    {
        let is_number = |text: &str| text.len() >= 5 && text.bytes().take(5).all(|b| b.is_ascii_digit());
        if is_number(shard) && is_number(rest) {
            return Some(split.to_owned());
        }
    }
    std::iter::once(&stem).chain(folders.iter().rev()).find_map(|part| split_in_word(part))
}

/// Returns the first split that a word of `name` stands for.
fn split_in_word(name: &str) -> Option<String> {
    let split = |word: &str| match word.to_ascii_lowercase().as_str() {
        "train" | "training" => Some(TRAIN),
        "validation" | "valid" | "dev" | "val" => Some("validation"),
        "test" | "testing" | "eval" | "evaluation" => Some("test"),
        _ => None,
    };
    name.split(|c: char| !c.is_ascii_alphabetic()).find_map(split).map(ToOwned::to_owned)
}

/// Chooses the configuration and the split that `wanted` names (`config`, `config/split`,
/// `/split`), or else those that `datasets` would choose. `subject` and `id` name the data set in
/// messages.
///
/// # Errors
/// The data set has no such configuration or split, or none is the default.
pub(super) fn choose(
    all: &[Configuration],
    wanted: Option<&str>,
    rows_for: RowsFor,
    subject: &str,
    id: &str,
) -> Result<Chosen> {
    let ResolvedSplit { config, split } = meant(all, wanted).ok_or_else(|| {
        let shown = wanted.unwrap_or_default();
        let error = Error::user(format!("{subject} has no configuration `{shown}`")).because(overview(all));
        match all {
            [only] if only.splits.contains_key(shown) => {
                error.hint(format!("write `{id}:/{shown}` for its split"))
            }
            _ => error.hint(format!("write `{}`", example(all, id))),
        }
    })?;
    let config = config.ok_or_else(|| {
        Error::user(format!("{subject} has {} configurations, and one of them must be named", all.len()))
            .because(overview(all))
            .hint(format!("write `{}`", example(all, id)))
    })?;
    let chosen = match (split, rows_for) {
        (Some(split), _) => config.splits.get_key_value(split),
        (None, RowsFor::Training) => config.splits.get_key_value(TRAIN),
        (None, RowsFor::Evaluation) if config.is_unnamed => config.splits.get_key_value(TRAIN),
        (None, RowsFor::Evaluation) => HELD_OUT.iter().find_map(|split| config.splits.get_key_value(*split)),
    };
    let Some((split, files)) = chosen else {
        let lacking = match (split, rows_for) {
            (Some(split), _) => format!("no split `{split}`"),
            (None, RowsFor::Training) => format!("no split `{TRAIN}`"),
            (None, RowsFor::Evaluation) => "no split to evaluate on (validation, test)".to_owned(),
        };
        return Err(Error::user(format!("configuration `{}` of {subject} has {lacking}", config.name))
            .because(overview(std::slice::from_ref(config)))
            .hint(format!("write `{}`", example(std::slice::from_ref(config), id))));
    };
    if files.is_empty() {
        return Err(Error::user(format!(
            "split `{split}` of configuration `{}` of {subject} has no file of rows",
            config.name
        ))
        .because("the patterns of README.md for it match no file that finetune can read")
        .because(select::accepted_rows()));
    }
    let is_unasked = all.len() > 1 && wanted.is_none_or(|wanted| wanted.starts_with('/'));
    let note = is_unasked.then(|| {
        format!("using the default configuration `{}` of {subject}; {}", config.name, overview(all))
    });
    Ok(Chosen { files: files.clone(), note })
}

/// The configuration and the split that `wanted` names. The configuration is none if no name was
/// given and none is the default; the split is none if no name was given.
struct ResolvedSplit<'a> {
    config: Option<&'a Configuration>,
    split: Option<&'a str>,
}

/// Resolves `wanted`; none if no configuration has the name.
fn meant<'a>(all: &'a [Configuration], wanted: Option<&'a str>) -> Option<ResolvedSplit<'a>> {
    let find = |name: &str| all.iter().find(|config| config.name == name);
    let default = || match all {
        [only] => Some(only),
        _ => all.iter().find(|config| config.is_default).or_else(|| find(DEFAULT)),
    };
    let Some(wanted) = wanted else { return Some(ResolvedSplit { config: default(), split: None }) };
    if let Some(split) = wanted.strip_prefix('/') {
        return Some(ResolvedSplit { config: default(), split: Some(split) });
    }
    if let Some(config) = find(wanted) {
        return Some(ResolvedSplit { config: Some(config), split: None });
    }
    let (config, split) = wanted.rsplit_once('/')?;
    Some(ResolvedSplit { config: Some(find(config)?), split: Some(split) })
}

/// Lists the configurations and their splits, for an error.
fn overview(all: &[Configuration]) -> String {
    let splits = |config: &Configuration| config.splits.keys().cloned().collect::<Vec<_>>().join(", ");
    let shown = all.iter().take(MAX_SHOWN).map(|config| format!("{} ({})", config.name, splits(config)));
    let more = all.len().saturating_sub(MAX_SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("configurations and their splits: {}{more}", shown.collect::<Vec<_>>().join(", "))
}

fn example(all: &[Configuration], id: &str) -> String {
    let Some(config) = all.first() else { return id.to_owned() };
    match config.splits.keys().find(|split| *split == TRAIN).or(config.splits.keys().next()) {
        Some(split) => format!("{id}:{}/{split}", config.name),
        None => format!("{id}:{}", config.name),
    }
}
