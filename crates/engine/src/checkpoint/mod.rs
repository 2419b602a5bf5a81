//! Checkpoints. A checkpoint is a folder with everything a run needs to continue bit for bit, and
//! is itself a PEFT adapter or a Hugging Face model.
//!
//! ```text
//! OUT/checkpoint-120/     weights in f32 (bf16 without masters):
//!                         adapter_model.safetensors + adapter_config.json,
//!                         or model*.safetensors + config.json …
//!   optimizer*.safetensors  the optimizer's state of every trainable tensor; a file a rank
//!   trainer_state.json      step, position in the data, fingerprint of the run
//!   manifest.json           size and BLAKE3 digest of every other file
//! OUT/.finetune/          marks OUT as the run's own, and locks it while the run works
//! ```
//!
//! All ranks write a checkpoint into a temporary folder beside its final name, sync it and rename
//! it: the rename is the commit. A reader takes the newest checkpoint whose digests match, and only
//! such checkpoints count when old ones are removed. A damaged or foreign folder that has the name
//! of a new checkpoint is kept as `checkpoint-120.aside-1`.

mod best;
mod folder;
mod kill_point;
mod lock;
mod manifest;
mod process;
mod retention;
mod run_changes;
mod run_folder;
mod run_record;
mod saver;
mod snapshot;
mod space;

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use best::BestEvaluation;
pub use kill_point::KillPoint;
pub use retention::Retention;
pub use run_changes::CHANGES_ON_REQUEST;
pub use run_folder::RunFolder;
pub use run_record::RunRecord;
pub use saver::{SaveThreads, Saver, SaverOptions};
pub use snapshot::{SavedState, SavedValues, SnapshotPart, SnapshotTensor, WeightValues, WriteWeights};

use crate::error::input_file;
use crate::error::{Error, ErrorCategory, Result};
use crate::recipe::Recipe;
use crate::weights::{ModelFiles, ModelIdentity, names_in};

const STATE_FILE: &str = "trainer_state.json";
/// The prefix of the names of files with the optimizer's state.
const OPTIMIZER: &str = "optimizer";
const PREFIX: &str = "checkpoint-";
/// The suffix of the name of the scales of a state in 8 bits.
const ABSMAX: &str = ".absmax";

/// The position of a run at a step, and the fingerprint that a resumed run must share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainingState {
    /// Version of the format of this file.
    pub schema: u32,
    /// Optimizer steps done.
    pub step: u64,
    /// Number of completed epochs.
    pub epoch: u64,
    /// Number of dataset units used in this epoch.
    pub index: u64,
    /// Number of tokens trained on so far.
    pub tokens: u64,
    /// Number of ranks that trained.
    #[serde(default = "one")]
    pub ranks: usize,
    /// Micro-batches of a step over all ranks; missing in checkpoints from before this field.
    #[serde(default)]
    pub micro_batches: Option<usize>,
    /// The base model of the run; missing in older checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<ModelIdentity>,
    /// The best evaluation so far, if the run keeps the best.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<BestEvaluation>,
    /// The time that `strftime_now` returns in the chat template, RFC 3339, if the template calls
    /// it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template_date: Option<String>,
    /// The settings that determine the numbers of the run: recipe keys with their values as TOML,
    /// and names with digests.
    pub fingerprint: std::collections::BTreeMap<String, String>,
}

/// The recipe key of the micro-batches of a step. In a fingerprint it counts those of all ranks.
const ACCUMULATION: &str = "train.gradient_accumulation_steps";

impl TrainingState {
    /// Reads the state in the checkpoint `folder` as the run wrote it.
    fn as_written(folder: &Path) -> Result<Self> {
        let path = folder.join(STATE_FILE);
        let text = input_file::read_text("read", &path)?;
        let unreadable = |why: String| Error::user(format!("cannot read {}", path.display())).because(why);
        let state: TrainingState = serde_json::from_str(&text).map_err(|e| unreadable(e.to_string()))?;
        if state.schema != SCHEMA {
            return Err(unreadable(format!("its schema is {}; this program reads {SCHEMA}", state.schema)));
        }
        Ok(state)
    }

    /// Reads the state in the checkpoint `folder`, with the keys that are younger than it.
    fn read(folder: &Path) -> Result<Self> {
        let mut state = Self::as_written(folder)?;
        // Checkpoints from before `base` had a digest of another sample here.
        state.fingerprint.remove("weights");
        Recipe::add_defaults(&mut state.fingerprint);
        Ok(state)
    }

    /// Returns the micro-batches of a step over all ranks, from whichever field has them.
    pub fn micro_batches(&self) -> Option<usize> {
        self.micro_batches.or_else(|| self.fingerprint.get(ACCUMULATION)?.parse().ok())
    }

    /// Returns whether `step` is that of the best evaluation.
    fn is_best(&self, step: u64) -> bool {
        self.best.as_ref().is_some_and(|best| best.report.step == step)
    }

    /// Returns whether the run ends here with a patience of `patience` evaluations.
    pub fn is_out_of_patience(&self, patience: Option<u64>) -> bool {
        BestEvaluation::is_out_of_patience(self.best.as_ref(), patience)
    }
}

/// The number of ranks of checkpoints without the field.
fn one() -> usize {
    1
}

/// The schema version of [`TrainingState`] that this program writes and reads.
pub const SCHEMA: u32 = 1;

/// A checkpoint on disk with matching digests.
#[derive(Debug)]
pub struct SavedCheckpoint {
    /// Folder of the checkpoint.
    pub folder: PathBuf,
    /// The position and fingerprint of the run.
    pub state: TrainingState,
    optimizer: ModelFiles,
}

impl SavedCheckpoint {
    /// Opens the checkpoint in `folder` after checking every digest.
    ///
    /// # Errors
    /// A file is missing, changed or of another schema.
    pub fn open(folder: &Path) -> Result<Self> {
        manifest::verify(folder)?;
        let state = TrainingState::read(folder)?;
        let is_optimizer = |name: &String| name.starts_with(OPTIMIZER) && name.ends_with(".safetensors");
        let files: Vec<String> = names_in(folder)?.into_iter().filter(is_optimizer).collect();
        let optimizer = ModelFiles::open_files(folder, &files)?;
        Ok(SavedCheckpoint { folder: folder.to_owned(), state, optimizer })
    }

    /// Returns the digest of the manifest, which identifies this checkpoint.
    ///
    /// # Errors
    /// Storage: the manifest cannot be read.
    pub fn digest(&self) -> Result<String> {
        manifest::digest(&self.folder)
    }

    /// Returns the fingerprint keys that the checkpoint itself records, without those filled in as
    /// defaults.
    ///
    /// # Errors
    /// Storage: the file cannot be read. User: it is malformed.
    pub fn recorded_keys(&self) -> Result<Vec<String>> {
        Ok(TrainingState::as_written(&self.folder)?.fingerprint.into_keys().collect())
    }

    /// Returns the files of the checkpoint that a finished run also leaves, by their names below
    /// the folder: weights or adapter, configuration, tokenizer.
    ///
    /// # Errors
    /// Storage: the folder cannot be read.
    pub fn result_names(&self) -> Result<Vec<String>> {
        let names = manifest::files_below(&self.folder)?.into_iter().map(|(name, _)| name);
        Ok(names.filter(|name| name != STATE_FILE && !name.starts_with(OPTIMIZER)).collect())
    }

    /// Reads the optimizer state called `state` of the parameter `param` into `out`.
    ///
    /// # Errors
    /// The checkpoint has no such tensor, its size differs from `out`, or the file cannot be read.
    pub fn optimizer_state(&self, param: &str, state: &str, out: &mut [f32]) -> Result<()> {
        self.optimizer.read_f32(&format!("{param}.{state}"), out)
    }

    /// Returns the codes of an optimizer state in 8 bits and reads its scales into `absmax`.
    ///
    /// # Errors
    /// The checkpoint has no such tensor, the number of its scales differs from `absmax`, or the
    /// file cannot be read.
    pub(crate) fn optimizer_codes(&self, param: &str, state: &str, absmax: &mut [f32]) -> Result<&[u8]> {
        let name = format!("{param}.{state}");
        self.optimizer.read_f32(&format!("{name}{ABSMAX}"), absmax)?;
        self.optimizer.bytes(&name)
    }
}

/// Returns the path of the checkpoint of step `step` in `output`.
pub fn path_of(output: &Path, step: u64) -> PathBuf {
    output.join(format!("{PREFIX}{step}"))
}

/// Returns whether `folder` is itself a checkpoint, sound or not, and not a folder of checkpoints.
pub fn is_one(folder: &Path) -> bool {
    let named = folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
    // A path that cannot be examined counts: opening it reports the reason.
    named && folder.is_dir() || folder.join(STATE_FILE).try_exists().unwrap_or(true)
}

/// Returns the newest sound checkpoint in `output`, and a message for each damaged one that it
/// skipped.
///
/// # Errors
/// The folder cannot be listed, or storage fails; a damaged checkpoint is no error.
pub fn newest(output: &Path) -> Result<(Option<SavedCheckpoint>, Vec<String>)> {
    newest_in(output, 0..u64::MAX)
}

/// Works like [`newest`], restricted to the steps `steps`.
///
/// # Errors
/// The same as for [`newest`].
pub fn newest_in(output: &Path, steps: Range<u64>) -> Result<(Option<SavedCheckpoint>, Vec<String>)> {
    let mut passed = Vec::new();
    for (_, folder) in list(output)?.into_iter().rev().filter(|(step, _)| steps.contains(step)) {
        match SavedCheckpoint::open(&folder) {
            Ok(saved) => return Ok((Some(saved), passed)),
            Err(error) if error.kind() != ErrorCategory::User => return Err(error),
            Err(error) => {
                passed.push(format!("{} is damaged: {}", folder.display(), error.causes().join("; ")));
            }
        }
    }
    Ok((None, passed))
}

/// Parses a number only in the form in which this program writes it.
fn number<N: std::str::FromStr + ToString>(text: &str) -> Option<N> {
    text.parse().ok().filter(|number: &N| number.to_string() == text)
}

/// Returns whether `output` holds a checkpoint, sound or not, with a manifest.
///
/// # Errors
/// Storage: `output` cannot be read.
pub fn has_any(output: &Path) -> Result<bool> {
    count(output).map(|count| count > 0)
}

/// Returns the number of checkpoints in `output`, sound or not.
///
/// # Errors
/// Storage: `output` cannot be read.
pub fn count(output: &Path) -> Result<u64> {
    list(output)?.iter().try_fold(0, |count, (_, folder)| Ok(count + u64::from(manifest::is_there(folder)?)))
}

/// Returns the committed checkpoints in `output`, oldest first.
fn list(output: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut checkpoints = Vec::new();
    for entry in if_there("read", output, std::fs::read_dir(output))?.into_iter().flatten() {
        let path = entry.map_err(|e| Error::io("read", output, &e))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if let Some(step) = name.strip_prefix(PREFIX).and_then(number) {
            checkpoints.push((step, path));
        }
    }
    checkpoints.sort();
    Ok(checkpoints)
}

/// Returns what `doing` something with `path` gave, or `None` if nothing is there.
fn if_there<T>(doing: &str, path: &Path, done: std::io::Result<T>) -> Result<Option<T>> {
    match done {
        Ok(done) => Ok(Some(done)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(doing, path, &error)),
    }
}
