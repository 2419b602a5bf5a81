//! Saves checkpoints of all ranks together, beside the training when asked to.
//!
//! A save is one thread on each rank. It writes the rank's share of the tensors into the folder they all fill, then a
//! list of these files with their digests. The first rank's thread waits for the lists of all, completes the folder and
//! renames it: the commit. No thread calls a collective, whose order is the ranks' own: ranks meet only when a save
//! begins and in [`Saver::finish`], before the next one and at the end.
//!
//! A rank that fails tells its peers as in any phase. What was being saved is then committed all the same if every
//! rank's files turn out whole, else removed. The threads outlive the ranks for that: [`SaveThreads`] waits for them.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};

use super::manifest::{self, Files};
use super::run_record::OWN;
use super::snapshot::{SnapshotTensor, WriteWeights};
use super::space::require_room;
use super::{TrainingState, folder};
use crate::collective::{Call, Collective};
use crate::error::{Error, ErrorCategory, ErrorContext, Result};
use crate::runtime::cpu_tensor::memory;
use crate::runtime::trace::{self, SpanInfo, SpanKind};
use crate::threads;
use crate::weights::AtomicDir;

/// How often the first rank looks for the files of the others, at first and later.
const LOOKS: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(200)];

/// How long it goes on looking after a run has failed.
const PATIENCE: Duration = Duration::from_secs(3);

/// The work of a thread for one save.
type SaveWork = Box<dyn FnOnce() + Send>;

/// The threads that save for the ranks of this process. Dropped after the ranks have ended, it waits for those that
/// are still at work.
#[derive(Debug, Default)]
pub struct SaveThreads(Mutex<Vec<JoinHandle<()>>>);

impl SaveThreads {
    /// Starts a thread that does the work it is sent; it ends where none comes.
    fn start(&self) -> Result<Sender<SaveWork>> {
        let (give, work) = channel::<SaveWork>();
        let thread = threads::start("checkpoint", move || {
            if let Ok(work) = work.recv() {
                work();
            }
        })?;
        let mut threads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(give)
    }
}

impl Drop for SaveThreads {
    fn drop(&mut self) {
        let threads = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        // A panic has been told by the sender it dropped.
        threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// How a rank's saver works.
#[derive(Clone)]
pub struct SaverOptions {
    /// Where checkpoints lie.
    pub output: PathBuf,
    /// How many sound ones are kept.
    pub keep_last: usize,
    /// Whether training goes on while they are written.
    pub in_background: bool,
    /// Bytes of a checkpoint, at least: a save begins only where there is room for them.
    pub bytes: u64,
    /// Writes the weights.
    pub write_weights: WriteWeights,
}

/// Saves a rank's part of checkpoints into one output folder.
pub struct Saver<'a> {
    options: SaverOptions,
    writers: &'a SaveThreads,
    writing: Option<PendingSave>,
    /// What went wrong beside saving, until somebody asks.
    notes: Vec<String>,
    /// All of it so far: what fails after each save is said once.
    noted: BTreeSet<String>,
}

/// A save that a thread is at.
struct PendingSave {
    step: usize,
    /// A word when this rank's files are whole.
    share: Receiver<()>,
    /// The end of the thread.
    end: Receiver<Result<Vec<String>>>,
    /// It ended well.
    ended: bool,
    /// A word when all ranks' files are whole; dropped when they may never be.
    parts: Sender<()>,
}

impl<'a> Saver<'a> {
    /// A rank's saver; the first rank removes unfinished folders of earlier, killed runs.
    pub fn new(options: SaverOptions, first: bool, writers: &'a SaveThreads) -> Self {
        let left = if first { folder::remove_unfinished(&options.output) } else { Vec::new() };
        let mut saver = Saver { options, writers, writing: None, notes: Vec::new(), noted: BTreeSet::new() };
        saver.note(left);
        saver
    }

    /// Removes the checkpoints that were to go after that of `state` was saved, where it is the newest: its run may have been
    /// killed in between, and save no more.
    pub fn catch_up(&mut self, state: &TrainingState) {
        let newest = super::list(&self.options.output).ok().and_then(|found| Some(found.last()?.0));
        if newest != Some(state.step) {
            return;
        }
        let notes = folder::retain(&self.options.output, self.options.keep_last, state);
        self.note(notes);
    }

    /// What has gone wrong since the last call and is no reason to end a run: an old checkpoint that cannot be removed.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    fn note(&mut self, said: Vec<String>) {
        let new = said.into_iter().filter(|text| self.noted.insert(text.clone()));
        self.notes.extend(new);
    }

    /// Saves `tensors`, this rank's share of all, as `checkpoint-<step>`, after the save before has ended. All ranks
    /// call it. In the background, later calls return the error of this save.
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
        // Before the folder: where the system refuses a thread, no rank has begun to write.
        let thread = self.writers.start()?;
        let options = self.options.clone();
        let place = super::place(&options.output, step);
        let begin = || {
            // The folder of the run's own, if it has one: asking for room takes a file for a moment.
            let own = Some(options.output.join(OWN)).filter(|own| own.is_dir());
            let asked = own.as_ref().unwrap_or(&options.output);
            require_room(asked, options.bytes, &format!("cannot write {}", place.display()))?;
            folder::fresh(&place)
        };
        let folder = (rank == 0).then(begin).transpose()?;
        // All ranks write where the first one says.
        let tag =
            Tensor::new(&[folder.as_ref().map_or(0.0, |folder| f64::from(folder.tag()))], &Device::Cpu)?;
        let call = Call { what: "the folder of step", index: step as usize };
        world.broadcast(call, 0, &memory(&tag)?)?;
        let shared = AtomicDir::shared(&place, tag.to_vec1::<f64>()?[0] as u32);
        let ((say_share, share), (say_end, end), (parts, all_parts)) = (channel(), channel(), channel());
        let work = SaveTask { state, tensors, options, shared, rank, size, share: say_share, all_parts };
        let recorder = trace::recorder();
        let write = move || {
            let _member = recorder.as_ref().map(|recorder| recorder.join(1));
            let _span = trace::span(|| {
                SpanInfo::new(SpanKind::Save, "write checkpoint").index(work.state.step as usize)
            });
            match folder {
                Some(folder) => work.first(folder, &say_end),
                None => work.other(&say_end),
            }
        };
        thread.send(Box::new(write)).map_err(|_| panicked())?;
        self.writing = Some(PendingSave { step: step as usize, share, end, ended: false, parts });
        Ok(())
    }

    /// Whether a save in the background has not been waited for.
    pub fn is_saving(&self) -> bool {
        self.writing.is_some()
    }

    /// Looks whether a save in the background has failed on this rank.
    ///
    /// # Errors
    /// That of the save.
    pub fn check(&mut self, world: &dyn Collective) -> Result<()> {
        let Some(writing) = &mut self.writing else { return Ok(()) };
        match writing.end.try_recv() {
            Ok(end) => {
                let notes = report_end(end, world)?;
                writing.ended = true;
                self.note(notes);
                Ok(())
            }
            Err(TryRecvError::Disconnected) if !writing.ended => report_end::<()>(Err(panicked()), world),
            Err(_) => Ok(()),
        }
    }

    /// Waits until the save in the background, if there is one, is committed. All ranks call it.
    ///
    /// # Errors
    /// That of the save; a peer failed.
    pub fn finish(&mut self, world: &dyn Collective) -> Result<()> {
        let Some(writing) = self.writing.take() else { return Ok(()) };
        let call = |what| Call { what, index: writing.step };
        // Without a word the thread has failed, which its end tells.
        if writing.share.recv().is_ok() {
            world.barrier(call("the parts of step"))?;
            let _ = writing.parts.send(());
        }
        if !writing.ended {
            let end = writing.end.recv().unwrap_or_else(|_| Err(panicked()));
            let notes = report_end(end, world)?;
            self.note(notes);
        }
        world.barrier(call("the save of step"))
    }
}

fn panicked() -> Error {
    Error::internal("the thread that saves checkpoints panicked")
}

/// The `end` of a save. Peers are told of a failure before the folder goes, so that none takes that for the cause.
fn report_end<T>(end: Result<T>, world: &dyn Collective) -> Result<T> {
    if let Err(error) = &end {
        let causes = error.causes().iter().map(String::as_str);
        world.abort(&std::iter::once(error.what()).chain(causes).collect::<Vec<_>>().join(": "));
    }
    end
}

/// What a rank's thread works on.
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

    /// What a rank other than the first does.
    fn other(mut self, end: &Sender<Result<Vec<String>>>) {
        let written = self
            .write_share()
            .and_then(|files| manifest::write_part(&self.shared, self.rank, self.size, files));
        // Nobody listens any more when the run has failed.
        if written.is_ok() {
            let _ = self.share.send(());
        }
        let _ = end.send(self.context(written).map(|()| Vec::new()));
    }

    /// What the first rank does, which made `folder`.
    fn first(mut self, folder: AtomicDir, end: &Sender<Result<Vec<String>>>) {
        // A panic must not take the folder away either.
        let written = catch_unwind(AssertUnwindSafe(|| self.write_share()));
        let written = written.unwrap_or_else(|_| Err(panicked()));
        let share = std::mem::replace(&mut self.share, channel().0);
        match written {
            Ok(files) => {
                let _ = share.send(());
                let committed = self.commit(folder, files);
                let _ = end.send(self.context(committed));
            }
            Err(error) => {
                let _ = end.send(self.context(Err(error)));
                drop(share);
                // The folder goes when nobody writes into it any more.
                drop(self.gather_parts(Files::new()));
                drop(folder);
            }
        }
    }

    fn commit(&self, folder: AtomicDir, files: Files) -> Result<Vec<String>> {
        let files = self.gather_parts(files)?;
        manifest::remove_parts(folder.path(), 1..self.size, self.size)?;
        let mut notes = folder::commit(folder, &self.state, files, &self.options.write_weights)?;
        notes.extend(folder::retain(&self.options.output, self.options.keep_last, &self.state));
        Ok(notes)
    }

    /// Waits for what the other ranks wrote and adds it to the `files` of the first.
    ///
    /// # Errors
    /// The run has failed, and not all files are there.
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
                                "not all ranks have written their part",
                            )
                            .because(format!("that of rank {rank} is missing, and the run has failed")));
                        }
                        std::thread::sleep(LOOKS[0]);
                    }
                }
            }
        }
        Ok(files)
    }
}
