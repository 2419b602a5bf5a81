//! The thread that writes to a terminal, so that no other thread waits for one that accepts no
//! output, as after Ctrl-S or over a connection that stalls.
//!
//! Lines and drawings wait in a bounded queue. If the queue is full, the printer drops and counts
//! lines, and writes the count when the terminal accepts output again.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::locks::locked;
use crate::threads;

/// Jobs in the queue before progress is dropped; lines are dropped at twice as many.
const WAITING: usize = 512;

/// Time that the end of a process waits for a terminal that accepts no output.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// Changes the state of the printing thread, and may write.
type PrintJob<S> = Box<dyn FnOnce(&mut S) + Send>;

/// The effect of a full queue on a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JobKind {
    /// Dropped: the next one shows the same and more.
    Progress,
    /// Dropped and counted.
    Line,
    /// Kept: a run has few of them.
    Kept,
}

struct PrintQueue<S> {
    jobs: VecDeque<PrintJob<S>>,
    is_writing: bool,
    /// Jobs that are done.
    done: u64,
    /// Lines dropped since the last job was done.
    dropped: u64,
}

struct SharedQueue<S> {
    queue: Mutex<PrintQueue<S>>,
    changed: Condvar,
}

/// The queue before a thread that owns an `S` and writes.
pub(super) struct Printer<S>(Arc<SharedQueue<S>>);

impl<S: 'static> Printer<S> {
    /// Starts the thread, which owns the value of `make` and reports dropped lines by
    /// `tell_dropped`. Returns none if the system starts no thread.
    pub(super) fn start(
        make: impl FnOnce() -> S + Send + 'static,
        report_dropped: fn(&mut S, u64),
    ) -> Option<Self> {
        let queue = PrintQueue { jobs: VecDeque::new(), is_writing: false, done: 0, dropped: 0 };
        let shared = Arc::new(SharedQueue { queue: Mutex::new(queue), changed: Condvar::new() });
        let theirs = Arc::clone(&shared);
        threads::start("terminal", move || theirs.write(make(), report_dropped)).ok()?;
        Some(Printer(shared))
    }

    /// Queues `job` for the thread and returns at once.
    pub(super) fn hand_over(&self, kind: JobKind, job: impl FnOnce(&mut S) + Send + 'static) {
        let mut queue = self.0.lock();
        match kind {
            JobKind::Progress if queue.jobs.len() >= WAITING => {}
            JobKind::Line if queue.jobs.len() >= 2 * WAITING => queue.dropped += 1,
            _ => queue.jobs.push_back(Box::new(job)),
        }
        drop(queue);
        self.0.changed.notify_all();
    }

    /// Waits until the queue is written, or until no job ended for `patience`; returns whether all
    /// is written.
    pub(super) fn flush(&self, patience: Duration) -> bool {
        let mut queue = self.0.lock();
        while queue.is_writing || !queue.jobs.is_empty() {
            let done = queue.done;
            let stands = |queue: &mut PrintQueue<S>| {
                queue.done == done && (queue.is_writing || !queue.jobs.is_empty())
            };
            let waited = self.0.changed.wait_timeout_while(queue, patience, stands);
            let (now, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() {
                return false;
            }
            queue = now;
        }
        true
    }
}

impl<S> SharedQueue<S> {
    fn lock(&self) -> MutexGuard<'_, PrintQueue<S>> {
        locked(&self.queue)
    }

    /// Runs jobs as they come, as long as the process lives.
    fn write(&self, mut state: S, report_dropped: fn(&mut S, u64)) {
        let mut queue = self.lock();
        loop {
            let waits = |queue: &mut PrintQueue<S>| queue.jobs.is_empty() && queue.dropped == 0;
            queue = self.changed.wait_while(queue, waits).unwrap_or_else(PoisonError::into_inner);
            let job = queue.jobs.pop_front();
            // After the lines in the queue, which are older.
            let dropped = if queue.jobs.is_empty() { std::mem::take(&mut queue.dropped) } else { 0 };
            queue.is_writing = true;
            drop(queue);
            // A job that panics must not silence the thread; the panic hook has printed it.
            let _panicked = catch_unwind(AssertUnwindSafe(|| {
                if let Some(job) = job {
                    job(&mut state);
                }
                if dropped > 0 {
                    report_dropped(&mut state, dropped);
                }
            }));
            queue = self.lock();
            (queue.is_writing, queue.done) = (false, queue.done + 1);
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// Returns a printer whose terminal accepts nothing until the sender is dropped.
    fn stalled() -> (Printer<Vec<String>>, Sender<()>) {
        let report_dropped = |lines: &mut Vec<String>, dropped: u64| lines.push(format!("{dropped} dropped"));
        let printer = Printer::start(Vec::new, report_dropped).unwrap();
        let (begun, begins) = channel();
        let (go_on, wait) = channel();
        printer.hand_over(JobKind::Kept, move |_| {
            begun.send(()).unwrap();
            let _closed = wait.recv();
        });
        begins.recv().unwrap();
        (printer, go_on)
    }

    /// Returns all that the printer writes once the terminal accepts output again.
    fn written(printer: &Printer<Vec<String>>, go_on: Sender<()>) -> Vec<String> {
        drop(go_on);
        assert!(printer.flush(Duration::from_secs(60)));
        let (sender, all) = channel();
        printer.hand_over(JobKind::Kept, move |lines| sender.send(lines.clone()).unwrap());
        all.recv().unwrap()
    }

    #[test]
    fn nobody_waits_for_a_terminal_that_takes_nothing() {
        let (printer, go_on) = stalled();
        for nth in 0..5000 {
            printer.hand_over(JobKind::Line, move |lines| lines.push(format!("line {nth}")));
        }
        assert!(!printer.flush(Duration::from_millis(1)));
        let written = written(&printer, go_on);
        let printed: Vec<_> = (0..2 * WAITING).map(|nth| format!("line {nth}")).collect();
        let dropped = format!("{} dropped", 5000 - 2 * WAITING);
        assert!(written.contains(&dropped), "{written:?}");
        assert!(written.iter().filter(|line| **line != dropped).eq(&printed), "in order: {written:?}");
    }

    #[test]
    fn a_job_that_panics_silences_nobody() {
        let printer = Printer::<Vec<String>>::start(Vec::new, |_, _| ()).unwrap();
        printer.hand_over(JobKind::Kept, |_| panic!("planted"));
        printer.hand_over(JobKind::Kept, |lines| lines.push("after it".into()));
        assert!(printer.flush(Duration::from_secs(60)));
    }

    #[test]
    fn progress_makes_room_for_lines_and_what_is_kept_is_kept() {
        let (printer, go_on) = stalled();
        for _ in 0..5000 {
            printer.hand_over(JobKind::Progress, |lines| lines.push("progress".into()));
        }
        printer.hand_over(JobKind::Line, |lines| lines.push("line".into()));
        for _ in 0..3 * WAITING {
            printer.hand_over(JobKind::Kept, |lines| lines.push("kept".into()));
        }
        let written = written(&printer, go_on);
        let count = |text: &str| written.iter().filter(|line| *line == text).count();
        assert_eq!([count("progress"), count("line"), count("kept")], [WAITING, 1, 3 * WAITING]);
    }
}
