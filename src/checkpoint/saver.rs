//! Writing checkpoints, beside the training when asked to, and keeping the last few.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use super::{Moment, OPTIMIZER_FILE, PREFIX, STATE_FILE, State, list, manifest};
use crate::error::{Context, Error, Result};
use crate::weights::{Entry, NewFolder, StoredDtype, write_file, write_text};

/// One trainable tensor as it was at a step.
#[derive(Debug, Clone)]
pub struct SnapshotTensor {
    /// Name.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// f32 values.
    pub values: Vec<f32>,
    /// First and second moment.
    pub moments: [Vec<f32>; 2],
}

/// Writes the weights of a snapshot into a folder, in the form that the run leaves (an adapter, a model).
pub type WriteWeights = Arc<dyn Fn(&Path, &[SnapshotTensor]) -> Result<()> + Send + Sync>;

/// Saves checkpoints into one output folder.
pub struct Saver {
    output: PathBuf,
    keep_last: usize,
    in_background: bool,
    write_weights: WriteWeights,
    writing: Option<JoinHandle<Result<PathBuf>>>,
}

impl Saver {
    /// A saver for `output`; unfinished folders of earlier, killed runs are removed.
    pub fn new(output: &Path, keep_last: usize, in_background: bool, write_weights: WriteWeights) -> Result<Self> {
        remove_unfinished(output)?;
        Ok(Saver { output: output.to_owned(), keep_last, in_background, write_weights, writing: None })
    }

    /// Saves `tensors` as `checkpoint-<step>`. In the background, the error of a save comes with the next call.
    ///
    /// # Errors
    /// Storage: the disk is full or fails. Earlier checkpoints stay as they are.
    pub fn save(&mut self, state: State, tensors: Vec<SnapshotTensor>) -> Result<()> {
        self.finish()?;
        let (output, keep_last, write) = (self.output.clone(), self.keep_last, self.write_weights.clone());
        let work = move || {
            let step = state.step;
            let place = output.join(format!("{PREFIX}{step}"));
            save(&place, &state, &tensors, &write).during(|| format!("cannot save step {step}"))?;
            retain(&output, keep_last)?;
            Ok(place)
        };
        if self.in_background {
            let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(work);
            self.writing = Some(thread.map_err(|e| Error::io("start a thread for", &self.output, &e))?);
            return Ok(());
        }
        work().map(drop)
    }

    /// Waits for the save in the background.
    ///
    /// # Errors
    /// That of the save.
    pub fn finish(&mut self) -> Result<Option<PathBuf>> {
        let Some(thread) = self.writing.take() else { return Ok(None) };
        match thread.join() {
            Ok(result) => result.map(Some),
            Err(_) => Err(Error::internal("the thread that saves checkpoints panicked")),
        }
    }
}

fn save(place: &Path, state: &State, tensors: &[SnapshotTensor], write_weights: &WriteWeights) -> Result<()> {
    if place.exists() {
        // The same step, saved by a run that was resumed from an earlier checkpoint: the same bytes.
        std::fs::remove_dir_all(place).map_err(|e| Error::io("replace", place, &e))?;
    }
    let folder = NewFolder::create(place)?;
    write_weights(folder.path(), tensors)?;
    let moments = [Moment::First, Moment::Second];
    let entry = |tensor: &SnapshotTensor, moment: Moment| Entry {
        name: format!("{}.{}", tensor.name, moment.suffix()),
        dtype: StoredDtype::F32,
        shape: tensor.shape.clone(),
    };
    let entries: Vec<Entry> =
        tensors.iter().flat_map(|tensor| moments.map(|moment| entry(tensor, moment))).collect();
    let mut values = tensors.iter().flat_map(|tensor| &tensor.moments);
    write_file(&folder.path().join(OPTIMIZER_FILE), &entries, |entry, sink| match values.next() {
        Some(values) => sink.write_values(values),
        None => Err(Error::internal(format!("no moment for {}", entry.name))),
    })?;
    let text = serde_json::to_string_pretty(state).map_err(|e| Error::internal(e.to_string()))?;
    write_text(&folder.path().join(STATE_FILE), &text)?;
    manifest::write(folder.path())?;
    sync(folder.path())?;
    folder.commit()?;
    sync(place.parent().unwrap_or(place))
}

/// Removes all but the last `keep` checkpoints, each by a rename first so that none is ever seen half removed.
fn retain(output: &Path, keep: usize) -> Result<()> {
    let all = list(output)?;
    for (_, folder) in all.iter().take(all.len().saturating_sub(keep)) {
        let mut doomed = folder.clone().into_os_string();
        doomed.push(format!(".tmp-{}", std::process::id()));
        let doomed = PathBuf::from(doomed);
        std::fs::rename(folder, &doomed).map_err(|e| Error::io("remove", folder, &e))?;
        std::fs::remove_dir_all(&doomed).map_err(|e| Error::io("remove", &doomed, &e))?;
    }
    Ok(())
}

fn remove_unfinished(output: &Path) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(output) else { return Ok(()) };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(PREFIX) && name.contains(".tmp-") {
            std::fs::remove_dir_all(entry.path()).map_err(|e| Error::io("remove", &entry.path(), &e))?;
        }
    }
    Ok(())
}

fn sync(folder: &Path) -> Result<()> {
    let file = std::fs::File::open(folder).map_err(|e| Error::io("sync", folder, &e))?;
    file.sync_all().map_err(|e| Error::io("sync", folder, &e))
}
