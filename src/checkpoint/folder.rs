//! The folder of a checkpoint: made beside its place, filled by every rank, given its name, one day removed.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::manifest::{self, Files};
use super::{
    ABSMAX, OPTIMIZER, PREFIX, STATE_FILE, SavedCheckpoint, SavedValues, SnapshotPart, SnapshotTensor,
    TrainingState, WriteWeights, list, number, process,
};
use crate::error::{Error, Result};
use crate::weights::{AtomicDir, StoredDtype, WriteEntry, Written, write_file, write_text};

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

/// Completes a folder that holds the `files` of all ranks and gives it its name.
pub(super) fn commit(
    folder: AtomicDir,
    state: &TrainingState,
    mut files: Files,
    write_weights: &WriteWeights,
) -> Result<()> {
    files.extend(manifest::part(folder.path(), write_weights(folder.path(), &[], SnapshotPart::Rest)?));
    let text = serde_json::to_string_pretty(state).map_err(|e| Error::internal(e.to_string()))?;
    write_text(&folder.path().join(STATE_FILE), &text)?;
    manifest::complete(folder.path(), files)?;
    sync(folder.path())?;
    let place = folder.place().to_owned();
    let replaced = make_room(&place, state)?;
    folder.commit()?;
    place.parent().map_or(Ok(()), sync)?;
    replaced.map_or(Ok(()), |old| remove(&old))
}

/// Moves what stands at `place` out of the way of the checkpoint of `state`. One of the same run and step, which a run
/// that was resumed from an earlier one saves again, is returned to be removed; anything else is kept under another name.
fn make_room(place: &Path, state: &TrainingState) -> Result<Option<PathBuf>> {
    if place.symlink_metadata().is_err() {
        return Ok(None);
    }
    let move_to = |to: PathBuf| {
        std::fs::rename(place, &to).map_err(|e| Error::io("move", place, &e))?;
        Ok(to)
    };
    if SavedCheckpoint::open(place).is_ok_and(|saved| saved.state.fingerprint == state.fingerprint) {
        return move_to(with_suffix(place, &format!(".tmp-{}-replaced", std::process::id()))).map(Some);
    }
    let mut names = (1_u32..).map(|n| with_suffix(place, &format!(".aside-{n}")));
    let free = names.find(|to| to.symlink_metadata().is_err());
    free.map_or(Ok(()), |to| move_to(to).map(drop)).map(|()| None)
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

/// Removes the oldest checkpoints of the run that has just saved `state`, but for the last `keep` and that one. Only those
/// count whose digests hold, and only those go that hold nothing but the run's files: one that is damaged or not of this
/// run stays, and keeps none from staying. Each goes by a rename first, so that none is ever seen half removed.
pub(super) fn retain(output: &Path, keep: usize, state: &TrainingState) -> Result<()> {
    let mut kept = 0;
    for (step, folder) in list(output)?.into_iter().rev() {
        if step == state.step {
            kept += 1;
        } else if kept < keep {
            let counts = SavedCheckpoint::open(&folder).is_ok_and(|saved| saved.state.is_earlier_of(state));
            kept += usize::from(counts);
        } else if manifest::is_complete(&folder)
            && TrainingState::read(&folder).is_ok_and(|saved| saved.is_earlier_of(state))
        {
            let doomed = with_suffix(&folder, &format!(".tmp-{}-removed", std::process::id()));
            std::fs::rename(&folder, &doomed).map_err(|e| Error::io("remove", &folder, &e))?;
            remove(&doomed)?;
        }
    }
    Ok(())
}

fn remove(folder: &Path) -> Result<()> {
    std::fs::remove_dir_all(folder).map_err(|e| Error::io("remove", folder, &e))
}

/// Removes the folders of checkpoints that processes which are gone were filling or removing.
pub(super) fn remove_unfinished(output: &Path) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(output) else { return Ok(()) };
    for entry in entries.flatten() {
        // A link is not a folder, and not ours.
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let maker = temporary_of(&entry.file_name().to_string_lossy());
        let is_gone = |pid| pid == std::process::id() || !process::is_alive(pid);
        if is_folder && maker.is_some_and(is_gone) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// The process that made the temporary folder called `name`: `checkpoint-<step>.tmp-<pid>`, also while it is removed.
fn temporary_of(name: &str) -> Option<u32> {
    let (step, maker) = name.strip_prefix(PREFIX)?.split_once(".tmp-")?;
    let pid = ["-removed", "-replaced"].iter().find_map(|end| maker.strip_suffix(end)).unwrap_or(maker);
    number::<u64>(step)?;
    number(pid)
}

/// Makes what was named and renamed in a folder last through a power cut.
pub(super) fn sync(folder: &Path) -> Result<()> {
    let file = std::fs::File::open(folder).map_err(|e| Error::io("sync", folder, &e))?;
    file.sync_all().map_err(|e| Error::io("sync", folder, &e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_our_own_making_are_temporary() {
        for name in ["checkpoint-4.tmp-17", "checkpoint-4.tmp-17-removed", "checkpoint-4.tmp-17-replaced"] {
            assert_eq!(temporary_of(name), Some(17), "{name}");
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
