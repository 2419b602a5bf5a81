//! Writing checkpoints, beside the training when asked to, and keeping the last few.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use candle_core::{Device, Tensor};

use super::{ABSMAX, Moment, OPTIMIZER, PREFIX, STATE_FILE, State, list, manifest};
use crate::collective::{Call, Collective};
use crate::error::{Context, Error, Result};
use crate::ops::access::memory;
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
    /// First and second moment, unless only the weights are wanted.
    pub moments: Option<[SavedMoment; 2]>,
}

/// A moment as the optimizer keeps it.
#[derive(Debug, Clone)]
pub enum SavedMoment {
    /// In f32.
    F32(Vec<f32>),
    /// As codes with one scale per block.
    Int8 {
        /// One per value.
        codes: Vec<u8>,
        /// One per block.
        absmax: Vec<f32>,
    },
}

/// Who writes what of a folder that ranks fill together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The tensors of this rank.
    Tensors(usize),
    /// What stands beside the tensors, when all of them are there: an index, a configuration, a tokenizer.
    Rest,
}

/// Writes the weights of a snapshot into a folder, in the form that the run leaves (an adapter, a model).
pub type WriteWeights = Arc<dyn Fn(&Path, &[SnapshotTensor], Part) -> Result<()> + Send + Sync>;

/// Saves checkpoints into one output folder.
pub struct Saver {
    output: PathBuf,
    keep_last: usize,
    in_background: bool,
    write_weights: WriteWeights,
    writing: Option<JoinHandle<Result<PathBuf>>>,
}

impl Saver {
    /// A rank's saver for `output`; the first rank removes unfinished folders of earlier, killed runs.
    pub fn new(
        output: &Path,
        keep_last: usize,
        in_background: bool,
        write_weights: WriteWeights,
        first: bool,
    ) -> Result<Self> {
        if first {
            remove_unfinished(output)?;
        }
        Ok(Saver { output: output.to_owned(), keep_last, in_background, write_weights, writing: None })
    }

    /// Saves `tensors`, this rank's share of all, as `checkpoint-<step>`. All ranks call it. One rank may write in the
    /// background; the error of such a save comes with the next call. Several write at once, each its own files.
    ///
    /// # Errors
    /// Storage: the disk is full or fails. Earlier checkpoints stay as they are.
    pub fn save(&mut self, state: State, tensors: Vec<SnapshotTensor>, world: &dyn Collective) -> Result<()> {
        if world.size() > 1 {
            let step = state.step;
            return self.save_together(&state, &tensors, world).during(|| format!("cannot save step {step}"));
        }
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

    fn save_together(&self, state: &State, tensors: &[SnapshotTensor], world: &dyn Collective) -> Result<()> {
        let (rank, size) = (world.rank(), world.size());
        let place = self.output.join(format!("{PREFIX}{}", state.step));
        let folder = (rank == 0).then(|| fresh(&place)).transpose()?;
        // All ranks write where the first one says.
        let tag =
            Tensor::new(&[folder.as_ref().map_or(0.0, |folder| f64::from(folder.tag()))], &Device::Cpu)?;
        let call = |what| Call { what, index: state.step as usize };
        world.broadcast(call("the folder of step"), 0, &memory(&tag)?)?;
        let shared = NewFolder::shared(&place, tag.to_vec1::<f64>()?[0] as u32);
        (self.write_weights)(&shared, tensors, Part::Tensors(rank))?;
        if !tensors.is_empty() {
            write_moments(&shared.join(optimizer_file(rank, size)), tensors)?;
        }
        world.barrier(call("the parts of step"))?;
        if let Some(folder) = folder {
            commit(folder, state, tensors, &self.write_weights)?;
            retain(&self.output, self.keep_last)?;
        }
        world.barrier(call("the save of step"))
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
    let folder = fresh(place)?;
    write_weights(folder.path(), tensors, Part::Tensors(0))?;
    write_moments(&folder.path().join(optimizer_file(0, 1)), tensors)?;
    commit(folder, state, tensors, write_weights)
}

/// The folder that will be `place`.
fn fresh(place: &Path) -> Result<NewFolder> {
    if place.exists() {
        // The same step, saved by a run that was resumed from an earlier checkpoint: the same bytes.
        std::fs::remove_dir_all(place).map_err(|e| Error::io("replace", place, &e))?;
    }
    NewFolder::create(place)
}

/// Completes a folder that holds all tensors and gives it its name.
fn commit(
    folder: NewFolder,
    state: &State,
    tensors: &[SnapshotTensor],
    write_weights: &WriteWeights,
) -> Result<()> {
    write_weights(folder.path(), tensors, Part::Rest)?;
    let text = serde_json::to_string_pretty(state).map_err(|e| Error::internal(e.to_string()))?;
    write_text(&folder.path().join(STATE_FILE), &text)?;
    manifest::write(folder.path())?;
    sync(folder.path())?;
    let parent = folder.path().parent().map(Path::to_owned);
    folder.commit()?;
    parent.map_or(Ok(()), |parent| sync(&parent))
}

/// The file of a rank's moments.
fn optimizer_file(rank: usize, size: usize) -> String {
    match size {
        1 => format!("{OPTIMIZER}.safetensors"),
        _ => format!("{OPTIMIZER}-{:05}-of-{size:05}.safetensors", rank + 1),
    }
}

/// optimizer.safetensors: `<name>.exp_avg` and `.exp_avg_sq`; in 8 bits also their `.absmax`.
fn write_moments(path: &Path, tensors: &[SnapshotTensor]) -> Result<()> {
    let mut parts: Vec<(Entry, Stored<'_>)> = Vec::new();
    for tensor in tensors {
        for (moment, saved) in [Moment::First, Moment::Second].iter().zip(tensor.moments.iter().flatten()) {
            let name = format!("{}.{}", tensor.name, moment.suffix());
            let mut push = |name: String, dtype, shape: Vec<usize>, part| {
                parts.push((Entry { name, dtype, shape }, part));
            };
            match saved {
                SavedMoment::F32(values) => {
                    push(name, StoredDtype::F32, tensor.shape.clone(), Stored::Floats(values));
                }
                SavedMoment::Int8 { codes, absmax } => {
                    let scales = format!("{name}{ABSMAX}");
                    push(name, StoredDtype::U8, tensor.shape.clone(), Stored::Bytes(codes));
                    push(scales, StoredDtype::F32, vec![absmax.len()], Stored::Floats(absmax));
                }
            }
        }
    }
    let entries: Vec<Entry> = parts.iter().map(|(entry, _)| entry.clone()).collect();
    let by_name: HashMap<&str, &Stored<'_>> =
        parts.iter().map(|(entry, part)| (entry.name.as_str(), part)).collect();
    write_file(path, &entries, |entry, sink| match by_name.get(entry.name.as_str()) {
        Some(Stored::Floats(values)) => sink.write_values(values),
        Some(Stored::Bytes(bytes)) => sink.write_bytes(bytes),
        None => Err(Error::internal(format!("no moment for {}", entry.name))),
    })?;
    Ok(())
}

/// A tensor of optimizer.safetensors.
enum Stored<'a> {
    Floats(&'a [f32]),
    Bytes(&'a [u8]),
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
