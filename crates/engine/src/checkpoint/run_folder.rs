//! The output folder of a run: its marker, its lock, and the record of the run's own files.
//!
//! ```text
//! OUT/.finetune/run.json   identifies the run, and lists every file outside checkpoints that it
//!                          wrote, with a digest
//! OUT/.finetune/lock       the process that works in the folder; empty if none does
//! OUT/.finetune/result/    the result of the run, until it is complete
//! OUT/.finetune/committed/ the complete result, while its files move to OUT
//! ```
//!
//! The ranks write the result into `result`. Rank 0 then seals it with a manifest of digests, as in
//! checkpoints. From then on the result outlives the process: the next run in the folder publishes
//! a sealed result with matching digests. One rename, from `result` to `committed`, commits it. If
//! a kill interrupts the moves after that, the next run in the folder finishes them. Meanwhile OUT
//! has no config.json or adapter_config.json, so that no reader mistakes a mixture of two results
//! for one.
//!
//! A file belongs to the run if run.json lists it and it is unchanged, or if the run was writing it
//! when it ended. Nothing else is overwritten. [`RunFolder::foreign`] names files of others before
//! a run begins. If such files appear during training, the result gets a separate folder
//! ([`RunFolder::publish`]).

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::folder::{free_name, restore_replaced};
use super::if_there;
use super::kill_point::KillPoint;
use super::lock::FolderLock;
use super::manifest::{self, files_below};
use super::run_record::{LAST, OWN, RECORD, RunRecord, appearance};
use super::space::require_room;
use crate::error::{Error, ErrorCategory, Result};
use crate::locks::locked;
use crate::weights::{Written, is_there, names_in, sweep, sync_folder, sync_tree, temporary, write_text};

const LOCK: &str = "lock";
const RESULT: &str = "result";
const COMMITTED: &str = "committed";
/// The prefix of files that are unlinked right after their creation, unless a kill comes in
/// between.
const NAMELESS: &str = ".finetune-offload-";

/// The output folder of a run, locked by this process until it is dropped. A claimed folder in
/// which no run began is left as it was.
#[derive(Debug)]
pub struct RunFolder {
    output: PathBuf,
    lock: FolderLock,
    /// Folders that this claim created, outermost first.
    made: Vec<PathBuf>,
    began: AtomicBool,
    record: Mutex<Option<RunRecord>>,
    /// Messages about a sealed result that an earlier process had not published.
    notes: Vec<String>,
}

impl RunFolder {
    /// Locks the folder `output`, and creates it if it is missing.
    ///
    /// # Errors
    /// User: another run works in the folder; the folder or its record is a link. Storage: it
    /// cannot be written to.
    pub fn claim(output: &Path) -> Result<Self> {
        let own = output.join(OWN);
        refuse_loose_link(output)?;
        refuse_link(output, &own)?;
        let mut made: Vec<PathBuf> = own
            .ancestors()
            .take_while(|path| !path.as_os_str().is_empty() && !path.exists())
            .map(Path::to_owned)
            .collect();
        made.reverse();
        let lock = FolderLock::take(output, &own.join(LOCK))?;
        let mut folder = RunFolder {
            output: output.to_owned(),
            lock,
            made,
            began: AtomicBool::new(false),
            record: Mutex::new(None),
            notes: Vec::new(),
        };
        folder.recover()?;
        let result = Self::result(output);
        std::fs::create_dir(&result).map_err(|e| Error::io("create", &result, &e))?;
        // New folder names must survive a power cut too; an unreadable parent is not flushed.
        folder.made.iter().filter_map(|path| path.parent()).for_each(|parent| drop(sync_folder(parent)));
        Ok(folder)
    }

    /// Finishes or removes work that a killed run left half done.
    fn recover(&mut self) -> Result<()> {
        restore_replaced(&self.output)?;
        let record = RunRecord::read(&self.output)?;
        let own = self.output.join(OWN);
        sweep(&own, |base| base == RECORD);
        let inside = std::fs::read_dir(&own).map_err(|e| Error::io("read", &own, &e))?;
        let nameless = |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with(NAMELESS);
        // A file that stays does no harm.
        inside.flatten().filter(nameless).for_each(|entry| drop(std::fs::remove_file(entry.path())));
        let Some(mut record) = record else { return self.set_aside("no record tells which run wrote it") };
        sweep(&self.output, |base| record.files.contains_key(base));
        if is_there(&own.join(COMMITTED))? {
            give_places(&self.output, &mut record)?;
            record.write(&self.output)?;
        }
        self.adopt(record)
    }

    /// Publishes the result of the run of `record` if it is sealed and its digests match. Keeps a
    /// sealed result with changes under another name, and removes one without a seal.
    fn adopt(&mut self, record: RunRecord) -> Result<()> {
        let result = Self::result(&self.output);
        if !manifest::is_there(&result)? {
            return self.clear_result();
        }
        match manifest::verify(&result) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorCategory::User => {
                return self.set_aside(&error.causes().join("; "));
            }
            Err(error) => return Err(error),
        }
        *locked(&self.record) = Some(record);
        let folder = self.publish(&[])?.map_or_else(|| self.output.clone(), |(target, _)| target);
        self.notes.push(format!(
            "the run had written its whole result when its process ended: published in {}",
            folder.display()
        ));
        Ok(())
    }

    /// Keeps a sealed result under another name, with the reason `why`, and removes one without a
    /// seal.
    fn set_aside(&mut self, why: &str) -> Result<()> {
        let result = Self::result(&self.output);
        if !manifest::is_there(&result)? {
            return self.clear_result();
        }
        let target = free_name(|n| self.output.join(format!("{RESULT}.aside-{n}")))?;
        std::fs::rename(&result, &target).map_err(|e| Error::io("move", &result, &e))?;
        self.notes.push(format!("an unpublished result is kept as {}: {why}", target.display()));
        Ok(())
    }

    /// Returns the messages about a result that an earlier process had sealed and not published.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Refuses to begin if fewer than `bytes` bytes are free; `what` is the title of the error.
    ///
    /// # Errors
    /// Storage: not enough free space.
    pub fn require_room(&self, bytes: u64, what: &str) -> Result<()> {
        require_room(&self.output.join(OWN), bytes, what)
    }

    /// Returns whether `output` is missing or holds only traces of a run that never began.
    ///
    /// # Errors
    /// `output` is a file, or cannot be read.
    pub fn is_free(output: &Path) -> Result<bool> {
        let entries = match std::fs::read_dir(output) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return refuse_loose_link(output).map(|()| true);
            }
            Err(error) => {
                return Err(Error::io("write to", output, &error).hint("give a new folder with `--output`"));
            }
        };
        // A run that is killed before it writes its record leaves these.
        let is_trace = |name: &str| {
            let written = temporary(name).is_some_and(|(base, _)| base == RECORD);
            written || [LOCK, RESULT].contains(&name) || name.starts_with(NAMELESS)
        };
        let failed = |error: std::io::Error| Error::io("read", output, &error);
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let is_own = entry.file_name() == OWN && entry.file_type().map_err(failed)?.is_dir();
            if !is_own || !names_in(&entry.path())?.iter().all(|name| is_trace(name)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns whether a process may work in `output`: whether the lock file exists.
    pub fn has_lock(output: &Path) -> bool {
        output.join(OWN).join(LOCK).is_file()
    }

    /// Returns the folder into which the ranks of a run in `output` write its result before it is
    /// published.
    pub fn result(output: &Path) -> PathBuf {
        output.join(OWN).join(RESULT)
    }

    /// Returns those of `names` below the folder that exist and, by `record`, differ from the files
    /// of the run, or that are behind a link.
    ///
    /// # Errors
    /// Storage: one cannot be examined.
    pub fn foreign(&self, record: &RunRecord, names: &[String]) -> Result<Vec<String>> {
        let mut foreign = Vec::new();
        for name in names {
            let behind_link =
                name.split_once('/').is_some_and(|(folder, _)| self.output.join(folder).is_symlink());
            if behind_link || is_there(&self.output.join(name))? && !record.owns(&self.output, name)? {
                foreign.push(name.clone());
            }
        }
        Ok(foreign)
    }

    /// Refuses links among the files and folders `names` below the folder, which the run adds to.
    ///
    /// # Errors
    /// User: one is a link.
    pub fn refuse_links(&self, names: &[&str]) -> Result<()> {
        names.iter().try_for_each(|name| refuse_link(&self.output, &self.output.join(name)))
    }

    /// Assigns the folder to the run of `record`, which begins or continues; existing other files
    /// are kept. The files `live` change continually while it works.
    ///
    /// # Errors
    /// Storage: run.json cannot be written.
    pub fn begin(&self, record: RunRecord, live: &[&str]) -> Result<()> {
        self.began.store(true, Ordering::SeqCst);
        *locked(&self.record) = Some(record);
        self.record_files(live.iter().map(|name| ((*name).to_owned(), None)))
    }

    /// Records that the run is complete, and that the card and report have its final metrics.
    ///
    /// # Errors
    /// Storage: the disk is full or fails.
    pub fn complete(&self) -> Result<()> {
        self.change(|record| {
            record.completed = true;
            Ok(())
        })
    }

    /// Replaces the file `name` of the run with `text`.
    ///
    /// # Errors
    /// Storage: the disk is full or fails.
    pub fn write_text(&self, name: &str, text: &str) -> Result<()> {
        self.record_files([(name.to_owned(), None)])?;
        let path = self.output.join(name);
        write_text(&path, text)?;
        self.record_files([(name.to_owned(), Some(appearance(&path)?))])
    }

    /// Writes the file `name` of the published result, new or in place of the run's earlier one.
    /// Returns false and leaves the file alone if it differs from what the run wrote.
    ///
    /// # Errors
    /// Storage: the disk is full or fails; the file is then unchanged.
    pub fn update_text(&self, name: &str, text: &str) -> Result<bool> {
        let owned = {
            let record = locked(&self.record);
            let record = record.as_ref().ok_or_else(no_run)?;
            self.foreign(record, &[name.to_owned()])?.is_empty()
        };
        if owned {
            self.write_text(name, text)?;
        }
        Ok(owned)
    }

    /// Records that rank `rank` of `ranks` has `written` its part of [`RunFolder::result`] in
    /// `output`, so that rank 0 can seal it.
    ///
    /// # Errors
    /// Storage: the disk is full or fails.
    pub fn part_written(output: &Path, (rank, ranks): (usize, usize), written: Vec<Written>) -> Result<()> {
        // On a host without the folder, a rank of an adapter run writes nothing.
        if written.is_empty() {
            return Ok(());
        }
        let result = Self::result(output);
        manifest::write_part(&result, rank, ranks, manifest::part(&result, written))
    }

    /// Seals the files of the `ranks` in [`RunFolder::result`]. Before, all ranks have called
    /// [`RunFolder::part_written`], and the files beside the weights exist. Afterwards neither a
    /// kill nor a power cut loses the result.
    ///
    /// # Errors
    /// Storage: the disk is full or fails, or a file is not as a rank wrote it.
    pub fn seal(&self, ranks: usize) -> Result<()> {
        let result = Self::result(&self.output);
        let mut files = manifest::Files::new();
        for rank in 0..ranks {
            if let Some(part) = manifest::read_part(&result, rank, ranks)? {
                files.extend(part);
                manifest::remove_parts(&result, rank..rank + 1, ranks)?;
            }
        }
        // A power cut must not keep the seal and lose a file.
        sync_tree(&result)?;
        manifest::complete(&result, files)?;
        KillPoint::Sealed.reach();
        Ok(())
    }

    /// Commits the sealed [`RunFolder::result`] atomically and moves its files to their names in
    /// the folder. If a file that is not the run's has one of these names, the whole result goes to
    /// a new folder `result` beside it; the path and the conflicting names are then returned. Files
    /// named in `later` are written there, too.
    ///
    /// # Errors
    /// Storage: a file cannot be moved. The sealed result then stays, and the next run in the
    /// folder publishes it.
    pub fn publish(&self, later: &[&str]) -> Result<Option<(PathBuf, Vec<String>)>> {
        self.commit(later).map_err(|error| {
            let result = Self::result(&self.output);
            error.hint(format!(
                "the result is complete in {}; fix the cause, then run the same command with `--resume` to publish it",
                result.display()
            ))
        })
    }

    fn commit(&self, later: &[&str]) -> Result<Option<(PathBuf, Vec<String>)>> {
        let result = Self::result(&self.output);
        sync_tree(&result)?;
        let names: Vec<String> = files_below(&result)?.into_iter().map(|(name, _)| name).collect();
        let later = later.iter().map(|name| (*name).to_owned());
        let existing = self.taken(&names.iter().cloned().chain(later).collect::<Vec<_>>())?;
        if !existing.is_empty() {
            let name = |n: u32| if n == 1 { RESULT.to_owned() } else { format!("{RESULT}-{n}") };
            let target = free_name(|n| self.output.join(name(n)))?;
            self.change(|record| {
                record.elsewhere = target.file_name().map(|name| name.to_string_lossy().into_owned());
                Ok(())
            })?;
            std::fs::rename(&result, &target).map_err(|e| Error::io("write to", &target, &e))?;
            sync_folder(&self.output)?;
            // The seal is no longer needed. Readers of models ignore it if it cannot be removed.
            drop(manifest::remove(&target));
            return Ok(Some((target, existing)));
        }
        self.record_files(names.into_iter().map(|name| (name, None)))?;
        let own = self.output.join(OWN);
        let committed = own.join(COMMITTED);
        // Not in the record: this result replaces it.
        if_there("remove", &committed, std::fs::remove_dir_all(&committed))?;
        std::fs::rename(&result, &committed).map_err(|e| Error::io("write to", &own, &e))?;
        sync_folder(&own)?;
        KillPoint::Committed.reach();
        self.change(|record| give_places(&self.output, record))?;
        Ok(None)
    }

    /// Returns the conflicts with the new files `names`: files of these names that are not the
    /// run's, and other weights, which readers would take for part of them.
    fn taken(&self, names: &[String]) -> Result<Vec<String>> {
        let guard = locked(&self.record);
        let record = guard.as_ref().ok_or_else(no_run)?;
        let mut foreign = self.foreign(record, names)?;
        foreign.extend(self.foreign(record, &other_weights(&self.output, names)?)?);
        Ok(foreign)
    }

    /// Changes the record and writes it.
    fn change(&self, change: impl FnOnce(&mut RunRecord) -> Result<()>) -> Result<()> {
        let mut record = locked(&self.record);
        let record = record.as_mut().ok_or_else(no_run)?;
        change(record)?;
        record.write(&self.output)
    }

    /// Records the appearance of files.
    fn record_files(&self, files: impl IntoIterator<Item = (String, Option<String>)>) -> Result<()> {
        self.change(|record| {
            record.files.extend(files);
            Ok(())
        })
    }

    fn clear_result(&self) -> Result<()> {
        let result = Self::result(&self.output);
        if_there("remove", &result, std::fs::remove_dir_all(&result)).map(drop)
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        // The next run clears what cannot be removed, and publishes a sealed result.
        if manifest::is_there(&Self::result(&self.output)).is_ok_and(|sealed| !sealed) {
            drop(self.clear_result());
        }
        if self.began.load(Ordering::SeqCst) || self.made.is_empty() {
            return;
        }
        self.lock.remove();
        for folder in self.made.iter().rev() {
            // Only empty folders are removed.
            if std::fs::remove_dir(folder).is_err() {
                break;
            }
        }
    }
}

fn no_run() -> Error {
    Error::internal("no run has begun in this folder")
}

/// Refuses a link in place of a file or folder that the run in `output` adds to.
fn refuse_link(output: &Path, path: &Path) -> Result<()> {
    if !path.is_symlink() {
        return Ok(());
    }
    let shown = path.display();
    Err(Error::user(format!("cannot train in {}", output.display()))
        .because(format!("{shown} is a link; a run writes only to regular files and folders"))
        .hint(format!(
            "run `rm {shown}`, which keeps the target of the link, or give another folder with `--output`"
        )))
}

/// Refuses a link without a target.
fn refuse_loose_link(output: &Path) -> Result<()> {
    if !output.is_symlink() || output.exists() {
        return Ok(());
    }
    let target = std::fs::read_link(output).unwrap_or_default();
    Err(Error::user(format!("cannot write to {}", output.display()))
        .because(format!("it is a link to {}, which does not exist", target.display()))
        .hint("create that folder, or give another one with `--output`"))
}

/// Moves the committed files in `output` to their names there, and records their appearance in
/// `record`. The files that mark a finished adapter or model are removed first and moved last. If a
/// call is interrupted, the next one finishes.
fn give_places(output: &Path, record: &mut RunRecord) -> Result<()> {
    let committed = output.join(OWN).join(COMMITTED);
    let mut names: Vec<String> = files_below(&committed)?.into_iter().map(|(name, _)| name).collect();
    let is_last = |name: &str| LAST.contains(&name);
    names.sort_by_key(|name| (is_last(name), name.clone()));
    for name in names.iter().filter(|name| is_last(name)) {
        remove_if_there(&output.join(name))?;
    }
    // Weights of an earlier result; the record has no appearance yet for those of this one.
    for name in other_weights(output, &names)? {
        if matches!(record.files.get(&name), Some(Some(_))) && record.owns(output, &name)? {
            remove_if_there(&output.join(name))?;
        }
    }
    for name in &names {
        let (from, to) = (committed.join(name), output.join(name));
        let folder = to.parent().unwrap_or(output);
        std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, &e))?;
        if is_last(name) {
            sync_folder(output)?;
        }
        std::fs::rename(&from, &to).map_err(|e| Error::io("write", &to, &e))?;
        if folder != output {
            sync_folder(folder)?;
        }
    }
    sync_folder(output)?;
    std::fs::remove_dir_all(&committed).map_err(|e| Error::io("remove", &committed, &e))?;
    for name in names {
        let current = appearance(&output.join(&name))?;
        record.files.insert(name, Some(current));
    }
    Ok(())
}

fn remove_if_there(path: &Path) -> Result<()> {
    if_there("remove", path, std::fs::remove_file(path)).map(drop)
}

/// Returns the files in `output` that readers would take for part of the weights among `names`.
fn other_weights(output: &Path, names: &[String]) -> Result<Vec<String>> {
    let is_weights = |name: &str| {
        name.starts_with("model")
            && (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"))
    };
    if !names.iter().any(|name| is_weights(name)) {
        return Ok(Vec::new());
    }
    Ok(names_in(output)?.into_iter().filter(|name| is_weights(name) && !names.contains(name)).collect())
}
