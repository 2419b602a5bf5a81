//! run.json: identifies the run of a folder and lists the files that it wrote there.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::ACCUMULATION;
use super::run_changes::{self, MICRO_BATCH};
use crate::clock;
use crate::error::{Error, Result, input_file};
use crate::recipe::Recipe;
use crate::weights::write_text;

/// The folder of this program's own files in an output folder.
pub(super) const OWN: &str = ".finetune";
pub(super) const RECORD: &str = "run.json";
/// The schema version of [`RunRecord`] that this program writes and reads.
const SCHEMA: u32 = 1;
/// Files up to this many bytes are compared by digest, larger ones, which users do not edit, by
/// size.
const DIGESTED: u64 = 64 << 20;
/// Files that mark a folder as a finished adapter or model: they get their names last.
pub(super) const LAST: [&str; 2] = ["config.json", "adapter_config.json"];

/// The contents of run.json.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    schema: u32,
    /// A random id of the run.
    pub run: String,
    /// The program and its version.
    pub program: String,
    /// The time at which the run started, RFC 3339.
    pub started: String,
    /// The digest of the settings that determine the numbers of the run.
    pub plan: String,
    /// The time that `strftime_now` returns in the chat template, RFC 3339, if the template calls
    /// it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template_date: Option<String>,
    /// The digest of the manifest of the checkpoint in another folder from which the run began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_from: Option<String>,
    /// The commits of downloads from the hub, by request: model, data sets, adapter.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sources: BTreeMap<String, String>,
    /// The folder below the output folder that got the result because foreign files had its names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) elsewhere: Option<String>,
    /// True if the run has done all its steps, and card and report have its final metrics.
    #[serde(default)]
    pub completed: bool,
    /// Files that the run wrote, by name below the folder, with their appearance, or without one
    /// while they change.
    pub(super) files: BTreeMap<String, Option<String>>,
}

impl RunRecord {
    /// Creates the record of a new run.
    ///
    /// # Errors
    /// An internal error: the system gives no random numbers.
    pub fn new(plan: &BTreeMap<String, String>) -> Result<Self> {
        let mut id = [0; 16];
        getrandom::fill(&mut id)
            .map_err(|e| Error::internal("cannot get random numbers").because(e.to_string()))?;
        Ok(RunRecord {
            schema: SCHEMA,
            run: id.iter().map(|byte| format!("{byte:02x}")).collect(),
            program: concat!("finetune ", env!("CARGO_PKG_VERSION")).to_owned(),
            started: clock::now_as_text(),
            plan: Self::digest(plan),
            ..RunRecord::default()
        })
    }

    /// Returns the digest of the settings that determine the numbers of a run, independent of the
    /// split of its steps into micro-batches. A key at its default counts as absent, so that
    /// program versions with other keys agree.
    pub fn digest(plan: &BTreeMap<String, String>) -> String {
        let mut counted = plan.clone();
        // The split of a step into micro-batches does not count.
        if let Some(rows) = run_changes::rows(plan) {
            counted.retain(|key, _| ![MICRO_BATCH, ACCUMULATION].contains(&key.as_str()));
            counted.insert("rows of a step".into(), rows.to_string());
        }
        let plan = Recipe::without_defaults(&counted);
        let lines: Vec<String> = plan.iter().map(|(key, value)| format!("{key} = {value}\n")).collect();
        blake3::hash(lines.concat().as_bytes()).to_hex().to_string()
    }

    /// Reads the record of the run in `output`. Returns `None` if no run has begun there.
    ///
    /// # Errors
    /// Storage; the record is damaged or of another version of the program.
    pub fn read(output: &Path) -> Result<Option<Self>> {
        let path = output.join(OWN).join(RECORD);
        let text = match path.symlink_metadata() {
            Ok(_) => input_file::read_text("read", &path)?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => return Ok(None),
            Err(error) => return Err(Error::io("read", &path, &error)),
        };
        let unreadable = |why: String| {
            Error::user(format!("cannot read {}", path.display()))
                .because(why)
                .hint(format!(
                    "run `rm {}` and start again with `--resume`, which then uses the sound checkpoints of the folder; or start anew in another folder, with `--output`",
                    path.display()
                ))
        };
        let record: Self = serde_json::from_str(&text).map_err(|e| unreadable(e.to_string()))?;
        if record.schema != SCHEMA {
            return Err(unreadable(format!("its schema is {}; this program reads {SCHEMA}", record.schema)));
        }
        Ok(Some(record))
    }

    /// Writes to `output` the record of a run that begins like this one, at the same time, and has
    /// written nothing yet.
    ///
    /// # Errors
    /// Storage: it cannot be written.
    pub fn begin_as(&self, output: &Path) -> Result<()> {
        let own = output.join(OWN);
        std::fs::create_dir_all(&own).map_err(|e| Error::io("create", &own, &e))?;
        RunRecord { files: BTreeMap::new(), ..self.clone() }.write(output)
    }

    /// Returns whether the run has written its result to `output` or to a separate folder there,
    /// complete or not.
    pub fn is_finished(&self, output: &Path) -> bool {
        let elsewhere = self.elsewhere.as_ref().map(|name| output.join(name));
        if elsewhere.is_some_and(|folder| LAST.iter().any(|name| folder.join(name).exists())) {
            return true;
        }
        LAST.iter().any(|name| matches!(self.files.get(*name), Some(Some(_))) || output.join(name).exists())
    }

    /// Returns the files that the run wrote and that no longer exist in `output`.
    pub fn missing(&self, output: &Path) -> Vec<String> {
        let wrote = self.files.iter().filter(|(_, wrote)| wrote.is_some()).map(|(name, _)| name);
        wrote.filter(|name| output.join(name).symlink_metadata().is_err()).cloned().collect()
    }

    /// Returns whether every file that the run wrote to `output` exists unchanged.
    ///
    /// # Errors
    /// Storage: a file cannot be read.
    pub fn is_as_written(&self, output: &Path) -> Result<bool> {
        let wrote = self.files.iter().filter(|(_, wrote)| wrote.is_some());
        wrote.map(|(name, _)| self.owns(output, name)).try_fold(true, |all, owns| Ok(all && owns?))
    }

    /// Writes the record into `output`.
    pub(super) fn write(&self, output: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(|e| Error::internal(e.to_string()))?;
        write_text(&output.join(OWN).join(RECORD), &text).map(drop)
    }

    /// Records the file `name` of `output`, as it is, as the run's; for folders of runs that kept
    /// no record.
    ///
    /// # Errors
    /// Storage: the file cannot be read.
    pub fn adopt(&mut self, output: &Path, name: &str) -> Result<()> {
        self.files.insert(name.to_owned(), Some(appearance(&output.join(name))?));
        Ok(())
    }

    /// Returns whether the existing file `name` of `output` is unchanged since the run wrote it.
    ///
    /// # Errors
    /// Storage: the file cannot be read.
    pub(super) fn owns(&self, output: &Path, name: &str) -> Result<bool> {
        match self.files.get(name) {
            // A link without a target is not the run's.
            Some(Some(_)) if !exists(&output.join(name))? => Ok(false),
            Some(Some(wrote)) => Ok(appearance(&output.join(name))? == *wrote),
            Some(None) => Ok(true),
            None => Ok(false),
        }
    }
}

/// Returns whether a path exists, after following links.
fn exists(path: &Path) -> Result<bool> {
    path.try_exists().map_err(|error| Error::io("look at", path, &error))
}

/// Returns the appearance of a file, which detects changes: its digest, or its size if it is too
/// large.
pub(super) fn appearance(path: &Path) -> Result<String> {
    let cannot = |e: std::io::Error| Error::io("read", path, &e);
    let metadata = path.metadata().map_err(cannot)?;
    let bytes = metadata.len();
    if !metadata.is_file() {
        // Opening a pipe blocks.
        return Ok("no file".to_owned());
    }
    if bytes > DIGESTED {
        return Ok(format!("{bytes} bytes"));
    }
    Ok(format!("blake3:{}", blake3::hash(&std::fs::read(path).map_err(cannot)?).to_hex()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_of_the_rows_is_no_other_run() {
        let of = |size: &str, turns: &str, rank: &str| {
            let keys = [(MICRO_BATCH, size), (ACCUMULATION, turns), ("adapter.r", rank)];
            RunRecord::digest(&keys.map(|(key, value)| (key.to_owned(), value.to_owned())).into())
        };
        assert_eq!(of("1", "8", "16"), of("4", "2", "16"));
        assert_ne!(of("1", "8", "16"), of("4", "4", "16"));
        assert_ne!(of("1", "8", "16"), of("1", "8", "4"));
    }
}
