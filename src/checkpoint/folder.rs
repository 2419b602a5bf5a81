//! The folder of a checkpoint: made beside its place, filled by every rank, given its name, one day removed.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::manifest::{self, Files};
use super::{
    ABSMAX, MomentKind, OPTIMIZER, PREFIX, STATE_FILE, SavedMoment, SnapshotPart, SnapshotTensor,
    TrainingState, WriteWeights, list,
};
use crate::error::{Error, Result};
use crate::weights::{AtomicDir, StoredDtype, WriteEntry, Written, write_file, write_text};

/// The folder that will be `place`.
pub(super) fn fresh(place: &Path) -> Result<AtomicDir> {
    if place.exists() {
        // The same step, saved by a run that was resumed from an earlier checkpoint: the same bytes.
        std::fs::remove_dir_all(place).map_err(|e| Error::io("replace", place, &e))?;
    }
    AtomicDir::create(place)
}

/// Writes what is rank `rank`'s of a folder that `size` ranks fill: its weights and their moments.
pub(super) fn write_share(
    folder: &Path,
    (rank, size): (usize, usize),
    tensors: &[SnapshotTensor],
    write_weights: &WriteWeights,
) -> Result<Files> {
    let mut written = write_weights(folder, tensors, SnapshotPart::Tensors(rank))?;
    // Alone, also where nothing is trained: a reader looks for the file.
    if size == 1 || !tensors.is_empty() {
        written.push(write_moments(&folder.join(optimizer_file(rank, size)), tensors)?);
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
fn write_moments(path: &Path, tensors: &[SnapshotTensor]) -> Result<Written> {
    let mut parts: Vec<(WriteEntry, Stored<'_>)> = Vec::new();
    for tensor in tensors {
        for (moment, saved) in
            [MomentKind::First, MomentKind::Second].iter().zip(tensor.moments.iter().flatten())
        {
            let name = format!("{}.{}", tensor.name, moment.suffix());
            let mut push = |name: String, dtype, shape: Vec<usize>, part| {
                parts.push((WriteEntry { name, dtype, shape }, part));
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
    let entries: Vec<WriteEntry> = parts.iter().map(|(entry, _)| entry.clone()).collect();
    let by_name: HashMap<&str, &Stored<'_>> =
        parts.iter().map(|(entry, part)| (entry.name.as_str(), part)).collect();
    write_file(path, &entries, |entry, sink| match by_name.get(entry.name.as_str()) {
        Some(Stored::Floats(values)) => sink.write_values(values),
        Some(Stored::Bytes(bytes)) => sink.write_bytes(bytes),
        None => Err(Error::internal(format!("no moment for {}", entry.name))),
    })
}

/// A tensor of optimizer.safetensors.
enum Stored<'a> {
    Floats(&'a [f32]),
    Bytes(&'a [u8]),
}

/// Removes all but the last `keep` checkpoints, each by a rename first so that none is ever seen half removed.
pub(super) fn retain(output: &Path, keep: usize) -> Result<()> {
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

pub(super) fn remove_unfinished(output: &Path) -> Result<()> {
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
