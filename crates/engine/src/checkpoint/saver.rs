//! Saves checkpoints of all ranks together, on request in the background.
//!
//! A save runs on one thread per rank. The thread writes the rank's share of the tensors into a
//! common folder, then a list of these files with their digests. The thread of rank 0 waits for all
//! lists, completes the folder and renames it: the commit. No thread calls a collective, because
//! the ranks own their order. Ranks synchronize only when a save begins and in [`Saver::finish`],
//! before the next save and at the end.
//!
//! A rank that fails notifies its peers as in any phase. The save in progress is still committed if
//! the files of all ranks turn out complete, and removed otherwise. For that, the threads outlive
//! the ranks: [`SaveThreads`] waits for them.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};

use super::manifest::{self, Files};
use super::retention::Retention;
use super::run_record::OWN;
use super::snapshot::{SnapshotTensor, WriteWeights};
use super::space::require_room;
use super::{TrainingState, folder};
use crate::collective::{Call, Collective};
use crate::error::{Error, ErrorCategory, ErrorContext, Result};
use crate::locks::locked;
use crate::runtime::cpu_tensor::memory;
use crate::runtime::trace::{self, SpanInfo, SpanKind};
use crate::threads;
use crate::weights::AtomicDir;

/// Intervals at which rank 0 polls for the files of the others, at first and later.
const LOOKS: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(200)];

/// The time for which rank 0 continues to poll after a run has failed.
const PATIENCE: Duration = Duration::from_secs(3);

/// The work of a thread for one save.
type SaveWork = Box<dyn FnOnce() + Send>;

/// The threads that save for the ranks of this process. Dropping it, after the ranks have ended,
/// waits for active threads.
#[derive(Debug, Default)]
pub struct SaveThreads(Mutex<Vec<JoinHandle<()>>>);

impl SaveThreads {
    /// Starts a thread that does the work it is sent. It ends if no work comes.
    fn start(&self) -> Result<Sender<SaveWork>> {
        let (give, work) = channel::<SaveWork>();
        let thread = threads::start("checkpoint", move || {
            if let Ok(work) = work.recv() {
                work();
            }
        })?;
        let mut threads = locked(&self.0);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(give)
    }
}

impl Drop for SaveThreads {
    fn drop(&mut self) {
        let threads = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        // The dropped sender has reported a panic.
        threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Options of a rank's saver.
#[derive(Clone)]
pub struct SaverOptions {
    /// The folder of the checkpoints.
    pub output: PathBuf,
    /// The checkpoints to keep.
    pub retention: Retention,
    /// True if training continues while checkpoints are written.
    pub in_background: bool,
    /// Minimum size of a checkpoint in bytes: a save begins only if this much space is free.
    pub bytes: u64,
    /// Writes the weights.
    pub write_weights: WriteWeights,
}

/// Saves a rank's part of checkpoints into one output folder.
pub struct Saver<'a> {
    options: SaverOptions,
    writers: &'a SaveThreads,
    writing: Option<PendingSave>,
    /// Problems beside saving, until the caller takes them.
    notes: Vec<String>,
    /// All problems so far, so that each is reported once.
    noted: BTreeSet<String>,
}

/// A save in progress on a thread.
struct PendingSave {
    step: usize,
    /// Receives a message when this rank's files are complete.
    share: Receiver<()>,
    /// Receives the result of the thread.
    end: Receiver<Result<Vec<String>>>,
    /// True if it ended without an error.
    ended: bool,
    /// Sends a message when the files of all ranks are complete; dropped if they may never be.
    parts: Sender<()>,
}

impl<'a> Saver<'a> {
    /// Creates a rank's saver. On the first rank it removes unfinished folders of killed runs.
    pub fn new(options: SaverOptions, first: bool, writers: &'a SaveThreads) -> Self {
        let left = if first { folder::remove_unfinished(&options.output) } else { Vec::new() };
        let mut saver = Saver { options, writers, writing: None, notes: Vec::new(), noted: BTreeSet::new() };
        saver.add_warnings(left);
        saver
    }

    /// Removes old checkpoints that the save of `state` left behind, if `state` is the newest
    /// checkpoint: its run may have been killed before it removed them.
    pub fn catch_up(&mut self, state: &TrainingState) {
        let newest = super::list(&self.options.output).ok().and_then(|folders| Some(folders.last()?.0));
        if newest != Some(state.step) {
            return;
        }
        let notes = folder::retain(&self.options.output, self.options.retention, state);
        self.add_warnings(notes);
    }

    /// Returns the problems since the last call that do not end a run, such as an old checkpoint
    /// that cannot be removed.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    fn add_warnings(&mut self, warnings: Vec<String>) {
        let new = warnings.into_iter().filter(|text| self.noted.insert(text.clone()));
        self.notes.extend(new);
    }

    /// Saves `tensors`, this rank's share, as `checkpoint-<step>`, after the previous save has
    /// ended. All ranks call it. In the background, later calls return the error of this save.
    ///
    /// # Errors
    /// Storage: the disk is full or fails. A peer failed. Earlier checkpoints stay as they are.
    pub fn save(
        &mut self,
        state: TrainingState,
        tensors: Vec<SnapshotTensor>,
        world: &dyn Collective,
    ) -> Result<()> {
        self.finish(world)?;
        let step = state.step;
        self.start(state, tensors, world).during(|| format!("cannot save step {step}"))?;
        if self.options.in_background { Ok(()) } else { self.finish(world) }
    }

    fn start(
        &mut self,
        state: TrainingState,
        tensors: Vec<SnapshotTensor>,
        world: &dyn Collective,
    ) -> Result<()> {
        let (rank, size, step) = (world.rank(), world.size(), state.step);
        // Before the folder: if the system refuses a thread, no rank has begun to write.
        let thread = self.writers.start()?;
        let options = self.options.clone();
        let target = super::path_of(&options.output, step);
        let begin = || {
            // The run's own folder, if any: the space check creates a file for a moment.
            let own = Some(options.output.join(OWN)).filter(|own| own.is_dir());
            let asked = own.as_ref().unwrap_or(&options.output);
            require_room(asked, options.bytes, &format!("cannot write {}", target.display()))?;
            AtomicDir::beside(&target)
        };
        let folder = (rank == 0).then(begin).transpose()?;
        // All ranks write to the folder that rank 0 names.
        let tag =
            Tensor::new(&[folder.as_ref().map_or(0.0, |folder| f64::from(folder.tag()))], &Device::Cpu)?;
        let call = Call { what: "the folder of step", index: step as usize };
        world.broadcast(call, 0, &memory(&tag)?)?;
        let shared = AtomicDir::shared(&target, tag.to_vec1::<f64>()?[0] as u32);
        let ((share_sender, share), (end_sender, end), (parts, all_parts)) =
            (channel(), channel(), channel());
        let work = SaveTask { state, tensors, options, shared, rank, size, share: share_sender, all_parts };
        let recorder = trace::recorder();
        let write = move || {
            let _member = recorder.as_ref().map(|recorder| recorder.join(1));
            let span = trace::span(|| {
                SpanInfo::new(SpanKind::Save, "write checkpoint").index(work.state.step as usize)
            });
            // The span ends before the message, after which the next save may begin on another
            // thread: spans of two saves never overlap.
            let report = move |end| {
                drop(span);
                let _ = end_sender.send(end);
            };
            match folder {
                Some(folder) => work.first(folder, report),
                None => work.other(report),
            }
        };
        thread.send(Box::new(write)).map_err(|_| panicked())?;
        self.writing = Some(PendingSave { step: step as usize, share, end, ended: false, parts });
        Ok(())
    }

    /// Returns whether a save in the background is not yet finished by [`Saver::finish`].
    pub(crate) fn is_saving(&self) -> bool {
        self.writing.is_some()
    }

    /// Checks whether a save in the background has failed on this rank.
    ///
    /// # Errors
    /// The error of the save.
    pub fn check(&mut self, world: &dyn Collective) -> Result<()> {
        let Some(writing) = &mut self.writing else { return Ok(()) };
        match writing.end.try_recv() {
            Ok(end) => {
                let notes = report_end(end, world)?;
                writing.ended = true;
                self.add_warnings(notes);
                Ok(())
            }
            Err(TryRecvError::Disconnected) if !writing.ended => report_end::<()>(Err(panicked()), world),
            Err(_) => Ok(()),
        }
    }

    /// Waits until the save in the background, if any, is committed. All ranks call it.
    ///
    /// # Errors
    /// The error of the save; a peer failed.
    pub fn finish(&mut self, world: &dyn Collective) -> Result<()> {
        let Some(writing) = self.writing.take() else { return Ok(()) };
        let call = |what| Call { what, index: writing.step };
        // Without a message the thread has failed, and its result has the error.
        if writing.share.recv().is_ok() {
            world.barrier(call("the parts of step"))?;
            let _ = writing.parts.send(());
        }
        if !writing.ended {
            let end = writing.end.recv().unwrap_or_else(|_| Err(panicked()));
            let notes = report_end(end, world)?;
            self.add_warnings(notes);
        }
        world.barrier(call("the save of step"))
    }
}

fn panicked() -> Error {
    Error::internal("the thread that saves checkpoints panicked")
}

/// Returns the `end` of a save. Peers learn of a failure before the folder is removed, so that none
/// takes the removal for the cause.
fn report_end<T>(end: Result<T>, world: &dyn Collective) -> Result<T> {
    if let Err(error) = &end {
        let causes = error.causes().iter().map(String::as_str);
        world.abort(&std::iter::once(error.what()).chain(causes).collect::<Vec<_>>().join(": "));
    }
    end
}

/// The work of a rank's thread.
struct SaveTask {
    state: TrainingState,
    tensors: Vec<SnapshotTensor>,
    options: SaverOptions,
    /// The folder that all ranks fill.
    shared: PathBuf,
    rank: usize,
    size: usize,
    share: Sender<()>,
    all_parts: Receiver<()>,
}

impl SaveTask {
    fn write_share(&mut self) -> Result<Files> {
        let tensors = std::mem::take(&mut self.tensors);
        folder::write_share(&self.shared, (self.rank, self.size), &tensors, &self.options.write_weights)
    }

    fn context<T>(&self, result: Result<T>) -> Result<T> {
        result.during(|| format!("cannot save step {}", self.state.step))
    }

    /// Runs the save of a rank other than the first.
    fn other(mut self, report: impl FnOnce(Result<Vec<String>>)) {
        let written = self
            .write_share()
            .and_then(|files| manifest::write_part(&self.shared, self.rank, self.size, files));
        // After a failed run nobody receives this.
        if written.is_ok() {
            let _ = self.share.send(());
        }
        report(self.context(written).map(|()| Vec::new()));
    }

    /// Runs the save of the first rank, which created `folder`.
    fn first(mut self, folder: AtomicDir, report: impl FnOnce(Result<Vec<String>>)) {
        // A panic must not remove the folder either.
        let written = catch_unwind(AssertUnwindSafe(|| self.write_share()));
        let written = written.unwrap_or_else(|_| Err(panicked()));
        let share = std::mem::replace(&mut self.share, channel().0);
        match written {
            Ok(files) => {
                let _ = share.send(());
                let committed = self.commit(folder, files);
                report(self.context(committed));
            }
            Err(error) => {
                report(self.context(Err(error)));
                drop(share);
                // The folder is removed after the last rank has stopped writing.
                drop(self.gather_parts(Files::new()));
                drop(folder);
            }
        }
    }

    fn commit(&self, folder: AtomicDir, files: Files) -> Result<Vec<String>> {
        let files = self.gather_parts(files)?;
        manifest::remove_parts(folder.path(), 1..self.size, self.size)?;
        let mut notes = folder::commit(folder, &self.state, files, &self.options.write_weights)?;
        notes.extend(folder::retain(&self.options.output, self.options.retention, &self.state));
        Ok(notes)
    }

    /// Waits for the lists of the other ranks and adds them to the `files` of the first.
    ///
    /// # Errors
    /// The run has failed, and files are missing.
    fn gather_parts(&self, mut files: Files) -> Result<Files> {
        let [mut pause, longest] = LOOKS;
        let mut failed: Option<Instant> = None;
        for rank in 1..self.size {
            loop {
                if let Some(part) = manifest::read_part(&self.shared, rank, self.size)? {
                    files.extend(part);
                    break;
                }
                match self.all_parts.recv_timeout(pause) {
                    Ok(()) => {}
                    Err(RecvTimeoutError::Timeout) => pause = (2 * pause).min(longest),
                    Err(RecvTimeoutError::Disconnected) => {
                        if failed.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                            return Err(Error::new(
                                ErrorCategory::Transient,
                                "some ranks have not written their part",
                            )
                            .because(format!("the part of rank {rank} is missing, and the run has failed")));
                        }
                        std::thread::sleep(LOOKS[0]);
                    }
                }
            }
        }
        Ok(files)
    }
}
