//! The folder of a checkpoint: created under a temporary name, filled by all ranks, renamed, and
//! removed by retention.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::manifest::{self, Files};
use super::{
    ABSMAX, OPTIMIZER, PREFIX, Retention, STATE_FILE, SavedCheckpoint, SavedValues, SnapshotPart,
    SnapshotTensor, TrainingState, WriteWeights, list, number, process,
};
use crate::error::{Error, Result};
use crate::weights::{
    AtomicDir, StoredDtype, WriteEntry, Written, is_there, names_in, temporary, write_file, write_text,
};

/// The suffix of an old checkpoint that a new one of its step replaces.
const REPLACED: &str = "-replaced";

/// Writes the share of rank `rank` of `size`: its weights and the optimizer's state.
pub(super) fn write_share(
    folder: &Path,
    (rank, size): (usize, usize),
    tensors: &[SnapshotTensor],
    write_weights: &WriteWeights,
) -> Result<Files> {
    let mut written = write_weights(folder, tensors, SnapshotPart::Tensors(rank))?;
    // A single rank writes the file even if nothing is trained: a reader looks for it.
    if size == 1 || !tensors.is_empty() {
        written.push(write_state(&folder.join(optimizer_file(rank, size)), tensors)?);
    }
    Ok(manifest::part(folder, written))
}

/// Completes a folder that holds the `files` of all ranks and gives it its name. Returns messages
/// about old folders that could not be removed, or that were kept under another name.
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
    let path = folder.target().to_owned();
    let before = move_aside(&path, state)?;
    if let Err(error) = folder.rename() {
        // Gives the earlier checkpoint its name back. If that fails, the next run does it.
        if let Some(Before::Replaced(old)) = before {
            drop(std::fs::rename(old, &path));
        }
        return Err(error);
    }
    let note = before.and_then(|before| match before {
        Before::Replaced(old) => removed(&old),
        Before::Kept(aside) => Some(format!(
            "{} is not a sound checkpoint of this run: kept as {}",
            path.display(),
            aside.display()
        )),
    });
    Ok(note.into_iter().collect())
}

/// The folder that existed in place of a checkpoint before the new one.
enum Before {
    /// An earlier save of the same step, moved here to be removed.
    Replaced(PathBuf),
    /// Anything else, kept under this name.
    Kept(PathBuf),
}

/// Renames the folder at `target`, so that the checkpoint of `state` can take its name. An earlier
/// save of the same run and step is renamed for removal; anything else is kept under another name.
fn move_aside(target: &Path, state: &TrainingState) -> Result<Option<Before>> {
    if !is_there(target)? {
        return Ok(None);
    }
    let move_to = |to: PathBuf| {
        std::fs::rename(target, &to).map_err(|e| Error::io("move", target, &e))?;
        Ok(to)
    };
    if SavedCheckpoint::open(target).is_ok_and(|saved| saved.state.fingerprint == state.fingerprint) {
        let away = with_suffix(target, &format!(".tmp-{}{REPLACED}", std::process::id()));
        return move_to(away).map(|old| Some(Before::Replaced(old)));
    }
    let aside = free_name(|number| with_suffix(target, &format!(".aside-{number}")))?;
    move_to(aside).map(|aside| Some(Before::Kept(aside)))
}

/// Returns the first path of `numbered`, from 1 on, that does not exist.
pub(super) fn free_name(numbered: impl Fn(u32) -> PathBuf) -> Result<PathBuf> {
    let mut number = 1;
    while is_there(&numbered(number))? {
        number += 1;
    }
    Ok(numbered(number))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.to_owned().into_os_string();
    name.push(suffix);
    PathBuf::from(name)
}

/// Returns the file name of a rank's part of the optimizer's state.
fn optimizer_file(rank: usize, size: usize) -> String {
    match size {
        1 => format!("{OPTIMIZER}.safetensors"),
        _ => format!("{OPTIMIZER}-{:05}-of-{size:05}.safetensors", rank + 1),
    }
}

/// Writes optimizer.safetensors: `<parameter>.<name>` for each state tensor, such as `.exp_avg`. A
/// state in 8 bits also has its `.absmax`.
fn write_state(path: &Path, tensors: &[SnapshotTensor]) -> Result<Written> {
    let mut parts: Vec<(WriteEntry, Stored<'_>)> = Vec::new();
    for tensor in tensors {
        for state in &tensor.state {
            let name = format!("{}.{}", tensor.name, state.name);
            let mut push = |name: String, dtype, shape: Vec<usize>, part| {
                parts.push((WriteEntry { name, dtype, shape, stack: None }, part));
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

/// The values of a tensor of optimizer.safetensors.
enum Stored<'a> {
    Floats(&'a [f32]),
    Bytes(&'a [u8]),
}

/// Removes the oldest checkpoints of the run that has just saved `state`. Keeps those of
/// `retention`, the one of `state` and the best one. Only checkpoints with matching digests count,
/// and only those with nothing but the run's files are removed: a damaged or foreign one stays and
/// does not count. Each is renamed first, so that no reader sees it half removed. Returns a message
/// for each that could not be removed.
pub(super) fn retain(output: &Path, retention: Retention, state: &TrainingState) -> Vec<String> {
    let mut notes = Vec::new();
    let checkpoints = list(output).unwrap_or_else(|error| {
        notes.push(error.in_one_line());
        Vec::new()
    });
    let mut complete = 0;
    for (step, folder) in checkpoints.into_iter().rev() {
        if step == state.step {
            complete += 1;
        } else if complete >= retention.last && retention.keeps(step, state) {
        } else if complete < retention.last {
            let counts = SavedCheckpoint::open(&folder).is_ok_and(|saved| saved.state.is_earlier_of(state));
            complete += usize::from(counts);
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

/// Removes a folder. Returns a message if that fails, which does not end a run.
fn removed(folder: &Path) -> Option<String> {
    std::fs::remove_dir_all(folder).err().map(|error| stays(folder, &error))
}

fn stays(folder: &Path, error: &std::io::Error) -> String {
    format!("{} cannot be removed and stays: {error}", folder.display())
}

/// Removes the folders of checkpoints that ended processes were filling or removing. Returns a
/// message for each folder that could not be removed.
pub(super) fn remove_unfinished(output: &Path) -> Vec<String> {
    let folders = match unfinished(output) {
        Ok(folders) => folders,
        Err(error) => return vec![error.in_one_line()],
    };
    let gone = folders.into_iter().filter(|(_, pid, _)| is_gone(*pid));
    gone.filter_map(|(_, _, folder)| removed(&folder)).collect()
}

/// Gives a checkpoint its name back if an ended process had renamed it for a new one of its step
/// and did not finish the new one.
///
/// # Errors
/// Storage: `output` cannot be read.
pub(super) fn restore_replaced(output: &Path) -> Result<()> {
    for (step, pid, folder) in unfinished(output)? {
        let path = output.join(format!("{PREFIX}{step}"));
        let replaced = folder.to_string_lossy().ends_with(REPLACED);
        if replaced && is_gone(pid) && !is_there(&path)? {
            // If that fails, the folder keeps its name, and the next run tries again.
            drop(std::fs::rename(folder, path));
        }
    }
    Ok(())
}

/// Returns the temporary folders of checkpoints in `output`, with their steps and process ids.
fn unfinished(output: &Path) -> Result<Vec<(u64, u32, PathBuf)>> {
    if !is_there(output)? {
        return Ok(Vec::new());
    }
    let names = names_in(output)?;
    let named =
        names.iter().filter_map(|name| temporary_of(name).map(|(step, pid)| (step, pid, output.join(name))));
    // A link is not a folder of this program.
    Ok(named.filter(|(_, _, path)| path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir())).collect())
}

/// Returns whether the process `pid`, which worked in a folder that this process has locked, has
/// ended.
fn is_gone(pid: u32) -> bool {
    pid == std::process::id() || !process::is_alive(pid)
}

/// Returns the step and the process id in the name of a temporary folder:
/// `checkpoint-<step>.tmp-<pid>`, also while it is removed.
fn temporary_of(name: &str) -> Option<(u64, u32)> {
    let (base, pid) = temporary(name)?;
    Some((number(base.strip_prefix(PREFIX)?)?, pid))
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
