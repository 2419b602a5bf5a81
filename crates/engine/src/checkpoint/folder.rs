//! The folder of a checkpoint: made beside its place, filled by every rank, given its name, one day removed.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::manifest::{self, Files};
use super::{
    ABSMAX, OPTIMIZER, PREFIX, STATE_FILE, SavedCheckpoint, SavedValues, SnapshotPart, SnapshotTensor,
    TrainingState, WriteWeights, list, number, process,
};
use crate::error::{Error, Result};
use crate::weights::{
    AtomicDir, StoredDtype, WriteEntry, Written, is_there, names_in, temporary, write_file, write_text,
};

/// How the name of a checkpoint ends that makes room for a new one of its step.
const REPLACED: &str = "-replaced";

/// The folder that will be `place`, whatever stands there now.
pub(super) fn fresh(place: &Path) -> Result<AtomicDir> {
    AtomicDir::beside(place)
}

/// Writes what is rank `rank`'s of a folder that `size` ranks fill: its weights and the optimizer's state.
pub(super) fn write_share(
    folder: &Path,
    (rank, size): (usize, usize),
    tensors: &[SnapshotTensor],
    write_weights: &WriteWeights,
) -> Result<Files> {
    let mut written = write_weights(folder, tensors, SnapshotPart::Tensors(rank))?;
    // Alone, also where nothing is trained: a reader looks for the file.
    if size == 1 || !tensors.is_empty() {
        written.push(write_state(&folder.join(optimizer_file(rank, size)), tensors)?);
    }
    Ok(manifest::part(folder, written))
}

/// Completes a folder that holds the `files` of all ranks and gives it its name. Returns a word on what could not be
/// tidied up after that.
pub(super) fn commit(
    folder: AtomicDir,
    state: &TrainingState,
    mut files: Files,
    write_weights: &WriteWeights,
) -> Result<Vec<String>> {
    files.extend(manifest::part(folder.path(), write_weights(folder.path(), &[], SnapshotPart::Rest)?));
    let text = serde_json::to_string_pretty(state).map_err(|e| Error::internal(e.to_string()))?;
    write_text(&folder.path().join(STATE_FILE), &text)?;
    manifest::complete(folder.path(), files)?;
    folder.sync()?;
    let place = folder.place().to_owned();
    let before = make_room(&place, state)?;
    if let Err(error) = folder.rename() {
        // The checkpoint from before gets its name back; if that fails, the next run gives it back.
        if let Some(Before::Replaced(old)) = before {
            drop(std::fs::rename(old, &place));
        }
        return Err(error);
    }
    let note = before.and_then(|before| match before {
        Before::Replaced(old) => removed(&old),
        Before::Kept(aside) => Some(format!(
            "{} was no sound checkpoint of this run: it is kept as {}",
            place.display(),
            aside.display()
        )),
    });
    Ok(note.into_iter().collect())
}

/// The place of a checkpoint before the new one came.
enum Before {
    /// An earlier save of the same step, moved here to be removed.
    Replaced(PathBuf),
    /// Something else, kept here.
    Kept(PathBuf),
}

/// Moves what stands at `place` out of the way of the checkpoint of `state`: an earlier save of the same run and step, or
/// anything else, which is kept under another name.
fn make_room(place: &Path, state: &TrainingState) -> Result<Option<Before>> {
    if !is_there(place)? {
        return Ok(None);
    }
    let move_to = |to: PathBuf| {
        std::fs::rename(place, &to).map_err(|e| Error::io("move", place, &e))?;
        Ok(to)
    };
    if SavedCheckpoint::open(place).is_ok_and(|saved| saved.state.fingerprint == state.fingerprint) {
        let away = with_suffix(place, &format!(".tmp-{}{REPLACED}", std::process::id()));
        return move_to(away).map(|old| Some(Before::Replaced(old)));
    }
    let mut number = 1_u32;
    let aside = |number: u32| with_suffix(place, &format!(".aside-{number}"));
    while is_there(&aside(number))? {
        number += 1;
    }
    move_to(aside(number)).map(|aside| Some(Before::Kept(aside)))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.to_owned().into_os_string();
    name.push(suffix);
    PathBuf::from(name)
}

/// The file of a rank's part of the optimizer's state.
fn optimizer_file(rank: usize, size: usize) -> String {
    match size {
        1 => format!("{OPTIMIZER}.safetensors"),
        _ => format!("{OPTIMIZER}-{:05}-of-{size:05}.safetensors", rank + 1),
    }
}

/// optimizer.safetensors: `<parameter>.<name>` of each tensor of the state, such as `.exp_avg`; in 8 bits also its `.absmax`.
fn write_state(path: &Path, tensors: &[SnapshotTensor]) -> Result<Written> {
    let mut parts: Vec<(WriteEntry, Stored<'_>)> = Vec::new();
    for tensor in tensors {
        for state in &tensor.state {
            let name = format!("{}.{}", tensor.name, state.name);
            let mut push = |name: String, dtype, shape: Vec<usize>, part| {
                parts.push((WriteEntry { name, dtype, shape }, part));
            };
            match &state.values {
                SavedValues::F32(values) => {
                    push(name, StoredDtype::F32, tensor.shape.clone(), Stored::Floats(values));
                }
                SavedValues::Int8 { codes, absmax } => {
                    let scales = format!("{name}{ABSMAX}");
                    push(name, StoredDtype::U8, tensor.shape.clone(), Stored::Bytes(codes));
                    push(scales, StoredDtype::F32, vec![absmax.len()], Stored::Floats(absmax));
                }
            }
        }
    }
    let entries: Vec<WriteEntry> = parts.iter().map(|(entry, _)| entry.clone()).collect();
    let by_name: HashMap<&str, &Stored<'_>> =
        parts.iter().map(|(entry, part)| (entry.name.as_str(), part)).collect();
    write_file(path, &entries, |entry, sink| match by_name.get(entry.name.as_str()) {
        Some(Stored::Floats(values)) => sink.write_values(values),
        Some(Stored::Bytes(bytes)) => sink.write_bytes(bytes),
        None => Err(Error::internal(format!("no state {}", entry.name))),
    })
}

/// A tensor of optimizer.safetensors.
enum Stored<'a> {
    Floats(&'a [f32]),
    Bytes(&'a [u8]),
}

/// Removes the oldest checkpoints of the run that has just saved `state`, but for the last `keep`, that one and the best. Only those
/// count whose digests hold, and only those go that hold nothing but the run's files: one that is damaged or not of this
/// run stays, and keeps none from staying. Each goes by a rename first, so that none is ever seen half removed. Returns a
/// word on each that could not be removed.
pub(super) fn retain(output: &Path, keep: usize, state: &TrainingState) -> Vec<String> {
    let mut notes = Vec::new();
    let found = list(output).unwrap_or_else(|error| {
        notes.push(error.in_one_line());
        Vec::new()
    });
    let mut kept = 0;
    for (step, folder) in found.into_iter().rev() {
        if step == state.step {
            kept += 1;
        } else if kept >= keep && state.is_best(step) {
        } else if kept < keep {
            let counts = SavedCheckpoint::open(&folder).is_ok_and(|saved| saved.state.is_earlier_of(state));
            kept += usize::from(counts);
        } else if manifest::is_complete(&folder)
            && TrainingState::read(&folder).is_ok_and(|saved| saved.is_earlier_of(state))
        {
            let doomed = with_suffix(&folder, &format!(".tmp-{}-removed", std::process::id()));
            match std::fs::rename(&folder, &doomed) {
                Ok(()) => notes.extend(removed(&doomed)),
                Err(error) => notes.push(stays(&folder, &error)),
            }
        }
    }
    notes
}

/// Removes a folder; a word if that fails, which is no reason to end a run.
fn removed(folder: &Path) -> Option<String> {
    std::fs::remove_dir_all(folder).err().map(|error| stays(folder, &error))
}

fn stays(folder: &Path, error: &std::io::Error) -> String {
    format!("{} cannot be removed and stays: {error}", folder.display())
}

/// Removes the folders of checkpoints that processes which are gone were filling or removing. Returns a word on each that
/// could not be removed.
pub(super) fn remove_unfinished(output: &Path) -> Vec<String> {
    let found = match unfinished(output) {
        Ok(found) => found,
        Err(error) => return vec![error.in_one_line()],
    };
    let gone = found.into_iter().filter(|(_, pid, _)| is_gone(*pid));
    gone.filter_map(|(_, _, folder)| removed(&folder)).collect()
}

/// Gives a checkpoint its name back that a process which is gone had moved away for a new one of its step, and which
/// that one did not get to replace.
///
/// # Errors
/// Storage: `output` cannot be read.
pub(super) fn restore_replaced(output: &Path) -> Result<()> {
    for (step, pid, folder) in unfinished(output)? {
        let place = output.join(format!("{PREFIX}{step}"));
        let replaced = folder.to_string_lossy().ends_with(REPLACED);
        if replaced && is_gone(pid) && !is_there(&place)? {
            // It stays where it is if that fails, and is tried again by the next run.
            drop(std::fs::rename(folder, place));
        }
    }
    Ok(())
}

/// The temporary folders of checkpoints in `output`, with their steps and makers.
fn unfinished(output: &Path) -> Result<Vec<(u64, u32, PathBuf)>> {
    if !is_there(output)? {
        return Ok(Vec::new());
    }
    let names = names_in(output)?;
    let named =
        names.iter().filter_map(|name| temporary_of(name).map(|(step, pid)| (step, pid, output.join(name))));
    // A link is not a folder, and not ours.
    Ok(named.filter(|(_, _, path)| path.symlink_metadata().is_ok_and(|found| found.is_dir())).collect())
}

/// Whether the process `pid`, which worked in a folder that this one has locked, is none that works now.
fn is_gone(pid: u32) -> bool {
    pid == std::process::id() || !process::is_alive(pid)
}

/// The step and the maker of the temporary folder called `name`: `checkpoint-<step>.tmp-<pid>`, also while it is removed.
fn temporary_of(name: &str) -> Option<(u64, u32)> {
    let (place, pid) = temporary(name)?;
    Some((number(place.strip_prefix(PREFIX)?)?, pid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_our_own_making_are_temporary() {
        for name in ["checkpoint-4.tmp-17", "checkpoint-4.tmp-17-removed", "checkpoint-4.tmp-17-replaced"] {
            assert_eq!(temporary_of(name), Some((4, 17)), "{name}");
        }
        for name in [
            "checkpoint-4",
            "checkpoint-x.tmp-mine",
            "checkpoint-4.tmp-mine",
            "checkpoint-x.tmp-17",
            "checkpoint-4.tmp-17-mine",
            "checkpoint-4.tmp-017",
            "checkpoint-+4.tmp-17",
            "checkpoint-4.tmp-+17",
            "checkpoint-4.tmp-",
            "my-checkpoint-4.tmp-17",
            "checkpoint-4.aside-1",
        ] {
            assert_eq!(temporary_of(name), None, "{name}");
        }
    }
}
