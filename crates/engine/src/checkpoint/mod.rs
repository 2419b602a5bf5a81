//! Checkpoints: a folder that holds all a run needs to go on to the bit, and that is itself a PEFT adapter or a
//! Hugging Face model.
//!
//! ```text
//! OUT/checkpoint-120/   adapter_model.safetensors + adapter_config.json, or model*.safetensors + config.json …  (f32; bf16 without masters)
//!                       optimizer*.safetensors    the optimizer's state of every trainable tensor; a file a rank
//!                       trainer_state.json        step, place in the data, what the run was started with
//!                       manifest.json             size and BLAKE3 digest of every other file
//! OUT/.finetune/        marks OUT as the run's own and locks it while the run works ([`RunFolder`])
//! ```
//!
//! A checkpoint is written beside its place by all ranks, synced, then renamed: the rename is the commit. A reader takes
//! the newest one whose digests hold; only such ones count when old ones are removed. What stands where a checkpoint is to
//! be and is none of the run's, or a damaged one, is kept as `checkpoint-120.aside-1`.

mod best;
mod folder;
mod kill_point;
mod lock;
mod manifest;
mod process;
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
/// How the names of files with the optimizer's state begin.
const OPTIMIZER: &str = "optimizer";
const PREFIX: &str = "checkpoint-";
/// The end of the name of the scales of a state in 8 bits.
const ABSMAX: &str = ".absmax";

/// Where a run stood, and what it was: a run goes on only with the same.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainingState {
    /// Version of this file's form.
    pub schema: u32,
    /// Optimizer steps done.
    pub step: u64,
    /// Number of completed epochs.
    pub epoch: u64,
    /// Units of data used in this epoch.
    pub index: u64,
    /// Tokens trained on so far.
    pub tokens: u64,
    /// Ranks that trained.
    #[serde(default = "one")]
    pub ranks: usize,
    /// Micro-batches of a step, those of all ranks together; not in checkpoints from before this field.
    #[serde(default)]
    pub micro_batches: Option<usize>,
    /// The model that the run started from; none in checkpoints that do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<ModelIdentity>,
    /// The best evaluation so far, where the run keeps the best.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<BestEvaluation>,
    /// The moment that `strftime_now` tells in the chat template, where the template asks for it: RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template_date: Option<String>,
    /// What decides the numbers of the run: a recipe's key → its value as TOML, a name → a digest.
    pub fingerprint: std::collections::BTreeMap<String, String>,
}

/// The recipe's key that counts the micro-batches of a step. In a fingerprint it counts those of all ranks.
const ACCUMULATION: &str = "train.gradient_accumulation_steps";

impl TrainingState {
    /// Reads the state in the checkpoint `folder`.
    fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(STATE_FILE);
        let text = input_file::read_text("read", &path)?;
        let unreadable = |why: String| Error::user(format!("cannot read {}", path.display())).because(why);
        let mut state: TrainingState = serde_json::from_str(&text).map_err(|e| unreadable(e.to_string()))?;
        if state.schema != SCHEMA {
            return Err(unreadable(format!("its schema is {}; this program reads {SCHEMA}", state.schema)));
        }
        // What checkpoints had before `base`: the digest of another sample.
        state.fingerprint.remove("weights");
        Recipe::add_defaults(&mut state.fingerprint);
        Ok(state)
    }

    /// Micro-batches of a step, those of all ranks together, wherever this checkpoint says it.
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

/// Checkpoints that do not say were made by one.
fn one() -> usize {
    1
}

/// The form of [`TrainingState`] that this program writes and reads.
pub const SCHEMA: u32 = 1;

/// A checkpoint on disk whose digests hold.
#[derive(Debug)]
pub struct SavedCheckpoint {
    /// Folder of the checkpoint.
    pub folder: PathBuf,
    /// Where the run stood.
    pub state: TrainingState,
    optimizer: ModelFiles,
}

impl SavedCheckpoint {
    /// Opens the checkpoint in `folder` after checking every digest.
    ///
    /// # Errors
    /// A file is missing, changed or not of this program's form.
    pub fn open(folder: &Path) -> Result<Self> {
        manifest::verify(folder)?;
        let state = TrainingState::read(folder)?;
        let optimizer = ModelFiles::open_files(folder, &optimizer_files(folder)?)?;
        Ok(SavedCheckpoint { folder: folder.to_owned(), state, optimizer })
    }

    /// The digest of the manifest, which tells this checkpoint from any other.
    ///
    /// # Errors
    /// Storage: the manifest cannot be read.
    pub fn digest(&self) -> Result<String> {
        manifest::digest(&self.folder)
    }

    /// The keys that the checkpoint says of itself, those that it lacks and that count as their defaults left out.
    ///
    /// # Errors
    /// Storage: the file cannot be read. The user's: it is malformed.
    pub fn said_keys(&self) -> Result<Vec<String>> {
        let path = self.folder.join(STATE_FILE);
        let text = std::fs::read_to_string(&path).map_err(|e| Error::io("read", &path, &e))?;
        let state: TrainingState = serde_json::from_str(&text)
            .map_err(|e| Error::user(format!("cannot read {}", path.display())).because(e.to_string()))?;
        Ok(state.fingerprint.into_keys().collect())
    }

    /// The files of the checkpoint that a run also leaves in the end, by their names below the folder: weights or
    /// adapter, configuration, tokenizer.
    ///
    /// # Errors
    /// Storage: the folder cannot be read.
    pub fn result_names(&self) -> Result<Vec<String>> {
        let names = manifest::files_below(&self.folder)?.into_iter().map(|(name, _)| name);
        Ok(names.filter(|name| name != STATE_FILE && !name.starts_with(OPTIMIZER)).collect())
    }

    /// Reads the tensor `state` of the optimizer's state beside the parameter called `param`.
    ///
    /// # Errors
    /// When the checkpoint has no such tensor, its size differs from `out`, or the file cannot be read.
    pub fn optimizer_state(&self, param: &str, state: &str, out: &mut [f32]) -> Result<()> {
        self.optimizer.read_f32(&format!("{param}.{state}"), out)
    }

    /// The codes of a tensor of the optimizer's state that is kept in 8 bits; reads its scales.
    ///
    /// # Errors
    /// When the checkpoint has no such tensor, its scales differ in number from `absmax`, or the file cannot be read.
    pub fn optimizer_codes(&self, param: &str, state: &str, absmax: &mut [f32]) -> Result<&[u8]> {
        let name = format!("{param}.{state}");
        self.optimizer.read_f32(&format!("{name}{ABSMAX}"), absmax)?;
        self.optimizer.bytes(&name)
    }
}

fn optimizer_files(folder: &Path) -> Result<Vec<String>> {
    let is_part = |name: &String| name.starts_with(OPTIMIZER) && name.ends_with(".safetensors");
    Ok(names_in(folder)?.into_iter().filter(is_part).collect())
}

/// The place of the checkpoint of step `step` in `output`.
pub fn place(output: &Path, step: u64) -> PathBuf {
    output.join(format!("{PREFIX}{step}"))
}

/// Whether `folder` is itself a checkpoint, sound or not, and not a folder of checkpoints.
pub fn is_one(folder: &Path) -> bool {
    let named = folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
    // One that cannot be looked at says so when it is opened.
    named && folder.is_dir() || folder.join(STATE_FILE).try_exists().unwrap_or(true)
}

/// The newest sound checkpoint in `output`, and a word on each damaged one that was passed over.
///
/// # Errors
/// When the folder cannot be listed or storage fails; a damaged checkpoint is no error.
pub fn newest(output: &Path) -> Result<(Option<SavedCheckpoint>, Vec<String>)> {
    newest_in(output, 0..u64::MAX)
}

/// As [`newest`], of those of the steps `steps`.
///
/// # Errors
/// As [`newest`].
pub fn newest_in(output: &Path, steps: Range<u64>) -> Result<(Option<SavedCheckpoint>, Vec<String>)> {
    let mut passed = Vec::new();
    for (_, folder) in list(output)?.into_iter().rev().filter(|(found, _)| steps.contains(found)) {
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

/// A number as this program writes it.
fn number<N: std::str::FromStr + ToString>(text: &str) -> Option<N> {
    text.parse().ok().filter(|number: &N| number.to_string() == text)
}

/// Whether `output` holds a checkpoint, sound or not, which has a manifest.
///
/// # Errors
/// Storage: `output` cannot be read.
pub fn has_any(output: &Path) -> Result<bool> {
    count(output).map(|found| found > 0)
}

/// How many checkpoints, sound or not, `output` holds.
///
/// # Errors
/// Storage: `output` cannot be read.
pub fn count(output: &Path) -> Result<u64> {
    list(output)?.iter().try_fold(0, |count, (_, folder)| Ok(count + u64::from(manifest::is_there(folder)?)))
}

/// The committed checkpoints in `output`, oldest first.
fn list(output: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    let entries = match std::fs::read_dir(output) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(found),
        Err(error) => return Err(Error::io("read", output, &error)),
    };
    for entry in entries {
        let path = entry.map_err(|e| Error::io("read", output, &e))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if let Some(step) = name.strip_prefix(PREFIX).and_then(number) {
            found.push((step, path));
        }
    }
    found.sort();
    Ok(found)
}
