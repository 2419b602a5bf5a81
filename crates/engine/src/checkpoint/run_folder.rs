//! The output folder of a run: marked as the run's own, locked while it works, and what in it is the run's.
//!
//! ```text
//! OUT/.finetune/run.json   which run's the folder is, and every file outside checkpoints that it wrote, with a digest
//! OUT/.finetune/lock       who is at work in the folder; empty when nobody is
//! OUT/.finetune/result/    what the run leaves in the end, until it is whole
//! OUT/.finetune/committed/ the whole of it, on its way to its place in OUT
//! ```
//!
//! The ranks write the result into `result`. The first rank then seals it with a manifest of digests, as checkpoints have
//! one: from then on the result outlives the process, and the next run in the folder publishes a sealed result whose
//! digests hold. The result is committed by one rename, from `result` to `committed`. If a kill
//! keeps a file from its place after that, the next run in the folder moves it there; meanwhile OUT has no config.json or
//! adapter_config.json, so that nobody takes a mixture of two results for one.
//!
//! A file is the run's if run.json lists it and it still is what was written, or if it was being written when the run
//! ended. Nothing else is overwritten: [`RunFolder::foreign`] names what stands in the way before a run begins, and where
//! something came while it trained the result gets a folder of its own ([`RunFolder::publish`]).

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::folder::restore_replaced;
use super::kill_point::KillPoint;
use super::lock::FolderLock;
use super::manifest::{self, files_below};
use super::run_record::{LAST, OWN, RECORD, RunRecord, appearance};
use super::space::require_room;
use crate::error::{Error, ErrorCategory, Result};
use crate::weights::{Written, is_there, names_in, sweep, sync_folder, sync_tree, temporary, write_text};

const LOCK: &str = "lock";
const RESULT: &str = "result";
const COMMITTED: &str = "committed";
/// How the names of files begin that lose their names at once, unless a kill comes in between.
const NAMELESS: &str = ".finetune-offload-";

/// The output folder of a run that this process has locked; released when it is dropped. A folder that was claimed and in
/// which no run began is left as it was.
#[derive(Debug)]
pub struct RunFolder {
    output: PathBuf,
    lock: FolderLock,
    /// Folders that were made for it, outermost first.
    made: Vec<PathBuf>,
    began: AtomicBool,
    record: Mutex<Option<RunRecord>>,
    /// Messages about a sealed result that an earlier process had not published.
    notes: Vec<String>,
}

impl RunFolder {
    /// Locks the folder `output`, which is made if need be.
    ///
    /// # Errors
    /// The user's: a run is at work in it; it is, or its record is kept behind, a link that leads nowhere good. Storage:
    /// it cannot be written to.
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
        // The names of new folders last too; a parent that may not be read is not flushed.
        folder.made.iter().filter_map(|path| path.parent()).for_each(|parent| drop(sync_folder(parent)));
        Ok(folder)
    }

    /// Finishes or tidies away what a run that was killed left half done.
    fn recover(&mut self) -> Result<()> {
        restore_replaced(&self.output)?;
        let record = RunRecord::read(&self.output)?;
        let own = self.output.join(OWN);
        sweep(&own, |base| base == RECORD);
        let inside = std::fs::read_dir(&own).map_err(|e| Error::io("read", &own, &e))?;
        let nameless = |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with(NAMELESS);
        // What stays is in nobody's way.
        inside.flatten().filter(nameless).for_each(|entry| drop(std::fs::remove_file(entry.path())));
        let Some(mut record) = record else { return self.set_aside("no record tells which run wrote it") };
        sweep(&self.output, |base| record.files.contains_key(base));
        if is_there(&own.join(COMMITTED))? {
            give_places(&self.output, &mut record)?;
            record.write(&self.output)?;
        }
        self.adopt(record)
    }

    /// Publishes the result of the run of `record` if a process sealed it and its digests hold. A sealed one that is not as
    /// it was is kept under another name; one without a seal is removed.
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
        *self.record.lock().unwrap_or_else(PoisonError::into_inner) = Some(record);
        let place = self.publish(&[])?.map_or_else(|| self.output.clone(), |(place, _)| place);
        self.notes.push(format!(
            "the run had written its whole result when its process ended: published in {}",
            place.display()
        ));
        Ok(())
    }

    /// Keeps a sealed result under another name because of `why`, and removes one without a seal.
    fn set_aside(&mut self, why: &str) -> Result<()> {
        let result = Self::result(&self.output);
        if !manifest::is_there(&result)? {
            return self.clear_result();
        }
        let place = free_name(|n| self.output.join(format!("{RESULT}.aside-{n}")))?;
        std::fs::rename(&result, &place).map_err(|e| Error::io("move", &result, &e))?;
        self.notes.push(format!("a result that was not published is kept as {}: {why}", place.display()));
        Ok(())
    }

    /// Messages about a result that an earlier process had sealed and not published.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Refuses to begin where fewer than `bytes` bytes are free; `what` says what cannot be done.
    ///
    /// # Errors
    /// Storage: there is no room.
    pub fn require_room(&self, bytes: u64, what: &str) -> Result<()> {
        require_room(&self.output.join(OWN), bytes, what)
    }

    /// Whether nothing but the traces of a run that never began is in `output`, or it is not there.
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
        // What a run leaves that was killed before it wrote its record.
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

    /// Whether a process may be at work in `output`: it holds the file of a lock.
    pub fn has_lock(output: &Path) -> bool {
        output.join(OWN).join(LOCK).is_file()
    }

    /// Where the ranks of a run in `output` write what it leaves in the end, before it is published.
    pub fn result(output: &Path) -> PathBuf {
        output.join(OWN).join(RESULT)
    }

    /// Those of `names` below the folder that are there and, by `record`, not what the run wrote, or that lie behind a link.
    ///
    /// # Errors
    /// Storage: one cannot be looked at.
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

    /// Refuses links in the place of the files and folders `names` below the folder, which the run adds to.
    ///
    /// # Errors
    /// The user's: one is a link.
    pub fn refuse_links(&self, names: &[&str]) -> Result<()> {
        names.iter().try_for_each(|name| refuse_link(&self.output, &self.output.join(name)))
    }

    /// Gives the folder to the run of `record`, which begins now or goes on; it keeps what it finds beside its own files.
    /// The files `live` change all the time while it works.
    ///
    /// # Errors
    /// Storage: run.json cannot be written.
    pub fn begin(&self, record: RunRecord, live: &[&str]) -> Result<()> {
        self.began.store(true, Ordering::SeqCst);
        *self.record.lock().unwrap_or_else(PoisonError::into_inner) = Some(record);
        self.note(live.iter().map(|name| ((*name).to_owned(), None)))
    }

    /// Records that the run is done, and that card and report have the figures of its end.
    ///
    /// # Errors
    /// Storage: the disk is full or fails.
    pub fn complete(&self) -> Result<()> {
        if let Some(record) = self.record.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            record.completed = true;
        }
        self.note(std::iter::empty())
    }

    /// Replaces the file `name` of the run by `text`.
    ///
    /// # Errors
    /// Storage: the disk is full or fails.
    pub fn write_text(&self, name: &str, text: &str) -> Result<()> {
        self.note([(name.to_owned(), None)])?;
        let path = self.output.join(name);
        write_text(&path, text)?;
        self.note([(name.to_owned(), Some(appearance(&path)?))])
    }

    /// Writes the file `name` of the published result, new or in place of what the run wrote before; returns false, and
    /// leaves the file as it is, where it is not as the run wrote it.
    ///
    /// # Errors
    /// Storage: the disk is full or fails; the file is as it was then.
    pub fn update_text(&self, name: &str, text: &str) -> Result<bool> {
        let owned = {
            let record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
            let record = record.as_ref().ok_or_else(no_run)?;
            self.foreign(record, &[name.to_owned()])?.is_empty()
        };
        if owned {
            self.write_text(name, text)?;
        }
        Ok(owned)
    }

    /// Says that rank `rank` of `ranks` has `written` its part of [`RunFolder::result`] in `output`, for the first rank
    /// to seal.
    ///
    /// # Errors
    /// Storage: the disk is full or fails.
    pub fn part_written(output: &Path, (rank, ranks): (usize, usize), written: Vec<Written>) -> Result<()> {
        // A rank of an adapter that wrote nothing may be on a host without the folder.
        if written.is_empty() {
            return Ok(());
        }
        let result = Self::result(output);
        manifest::write_part(&result, rank, ranks, manifest::part(&result, written))
    }

    /// Seals what the `ranks` wrote to [`RunFolder::result`]: all of them have called [`RunFolder::part_written`], and what
    /// stands beside the weights is there. From here on neither a kill nor a power cut loses the result.
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

    /// Commits the sealed [`RunFolder::result`], all of it or nothing, and moves it to its place in the folder. Where
    /// something that is not the run's has one of these names, all of it goes to a new folder `result` beside it instead,
    /// which is returned with the names in the way. Files that come `later` have their place there, too.
    ///
    /// # Errors
    /// Storage: a file cannot be moved; the sealed result stays then, and the next run in the folder publishes it.
    pub fn publish(&self, later: &[&str]) -> Result<Option<(PathBuf, Vec<String>)>> {
        self.commit(later).map_err(|error| {
            let result = Self::result(&self.output);
            error.hint(format!(
                "the result is whole in {}: the same command with `--resume` publishes it when the cause is gone",
                result.display()
            ))
        })
    }

    fn commit(&self, later: &[&str]) -> Result<Option<(PathBuf, Vec<String>)>> {
        let result = Self::result(&self.output);
        sync_tree(&result)?;
        let names: Vec<String> = files_below(&result)?.into_iter().map(|(name, _)| name).collect();
        let later = later.iter().map(|name| (*name).to_owned());
        let taken = self.taken(&names.iter().cloned().chain(later).collect::<Vec<_>>())?;
        if !taken.is_empty() {
            let name = |n: u32| if n == 1 { RESULT.to_owned() } else { format!("{RESULT}-{n}") };
            let place = free_name(|n| self.output.join(name(n)))?;
            self.note_elsewhere(&place)?;
            std::fs::rename(&result, &place).map_err(|e| Error::io("write to", &place, &e))?;
            sync_folder(&self.output)?;
            // The seal has served; a reader of models does not mind it where it cannot be removed.
            drop(manifest::remove(&place));
            return Ok(Some((place, taken)));
        }
        self.note(names.into_iter().map(|name| (name, None)))?;
        let own = self.output.join(OWN);
        let committed = own.join(COMMITTED);
        match std::fs::remove_dir_all(&committed) {
            // One of which no record told: this result takes its place.
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io("remove", &committed, &e));
            }
            _ => {}
        }
        std::fs::rename(&result, &committed).map_err(|e| Error::io("write to", &own, &e))?;
        sync_folder(&own)?;
        KillPoint::Committed.reach();
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let record = record.as_mut().ok_or_else(no_run)?;
        give_places(&self.output, record)?;
        record.write(&self.output)?;
        Ok(None)
    }

    /// What stands in the way of the new files `names`: files of these names that are not the run's, and other weights,
    /// which readers would take for part of them.
    fn taken(&self, names: &[String]) -> Result<Vec<String>> {
        let guard = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let record = guard.as_ref().ok_or_else(no_run)?;
        let mut taken = self.foreign(record, names)?;
        taken.extend(self.foreign(record, &other_weights(&self.output, names)?)?);
        Ok(taken)
    }

    /// Records that the result gets the folder `place` of its own.
    fn note_elsewhere(&self, place: &Path) -> Result<()> {
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let record = record.as_mut().ok_or_else(no_run)?;
        record.elsewhere = place.file_name().map(|name| name.to_string_lossy().into_owned());
        record.write(&self.output)
    }

    /// Records what files look like.
    fn note(&self, files: impl IntoIterator<Item = (String, Option<String>)>) -> Result<()> {
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let record = record.as_mut().ok_or_else(no_run)?;
        record.files.extend(files);
        record.write(&self.output)
    }

    fn clear_result(&self) -> Result<()> {
        let result = Self::result(&self.output);
        match std::fs::remove_dir_all(&result) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io("remove", &result, &error))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        // What cannot be removed is cleared by the next run, and a sealed result is published by it.
        if manifest::is_there(&Self::result(&self.output)).is_ok_and(|sealed| !sealed) {
            drop(self.clear_result());
        }
        if self.began.load(Ordering::SeqCst) || self.made.is_empty() {
            return;
        }
        self.lock.remove();
        for folder in self.made.iter().rev() {
            // Only what is empty goes.
            if std::fs::remove_dir(folder).is_err() {
                break;
            }
        }
    }
}

/// The first of `numbered` from 1 that names nothing.
fn free_name(numbered: impl Fn(u32) -> PathBuf) -> Result<PathBuf> {
    let mut number = 1;
    while is_there(&numbered(number))? {
        number += 1;
    }
    Ok(numbered(number))
}

fn no_run() -> Error {
    Error::internal("no run has begun in this folder")
}

/// Refuses a link in the place of a file or folder that the run in `output` adds to.
fn refuse_link(output: &Path, path: &Path) -> Result<()> {
    if !path.is_symlink() {
        return Ok(());
    }
    let shown = path.display();
    Err(Error::user(format!("cannot train in {}", output.display()))
        .because(format!("{shown} is a link, and a run writes to files and folders of its own alone"))
        .hint(format!("`rm {shown}`, which leaves what it leads to, or give another folder with `--output`")))
}

/// Refuses a link that leads to nothing.
fn refuse_loose_link(output: &Path) -> Result<()> {
    if !output.is_symlink() || output.exists() {
        return Ok(());
    }
    let target = std::fs::read_link(output).unwrap_or_default();
    Err(Error::user(format!("cannot write to {}", output.display()))
        .because(format!("it is a link to {}, where nothing is", target.display()))
        .hint("make that folder, or give another one with `--output`"))
}

/// Moves what was committed in `output` to its place there, and notes in the `record` what it looks like. What makes a
/// folder a finished adapter or model goes first and comes last. A call that was cut short is made good by the next.
fn give_places(output: &Path, record: &mut RunRecord) -> Result<()> {
    let committed = output.join(OWN).join(COMMITTED);
    let mut names: Vec<String> = files_below(&committed)?.into_iter().map(|(name, _)| name).collect();
    let is_last = |name: &str| LAST.contains(&name);
    names.sort_by_key(|name| (is_last(name), name.clone()));
    for name in names.iter().filter(|name| is_last(name)) {
        remove_if_there(&output.join(name))?;
    }
    // Weights of an earlier result; those of this one are noted without what they look like.
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
        let found = appearance(&output.join(&name))?;
        record.files.insert(name, Some(found));
    }
    Ok(())
}

fn remove_if_there(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path, &error)),
        _ => Ok(()),
    }
}

/// The files in `output` that readers would take for part of the weights among `names`, if there are any.
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
