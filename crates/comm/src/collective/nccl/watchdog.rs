//! Watch over the calls on the streams: a thread that polls and raises the flag if the library
//! reports a failure or no call finishes for too long. A rank's own thread may then be inside CUDA,
//! waiting for a result: the aborted communicator's kernels end, and so does the wait.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::communicator::AbortFlag;
use super::device::{CommStream, GpuStreams};
use crate::collective::call_record::CallRecord;
use crate::collective::hang_watch::GPU_SWITCHES;
use crate::error::{Error, ErrorCategory, Result};
use crate::locks::locked;
use crate::threads;

/// Time between two looks, the maximum delay of a failure's detection.
const PERIOD: Duration = Duration::from_millis(100);

/// A call whose kernel may still run.
struct WatchedCall<M> {
    mark: M,
    record: CallRecord,
}

/// The calls of one stream, which finish in order.
struct WatchQueue<M> {
    calls: VecDeque<WatchedCall<M>>,
    /// Time at which the first of them became the first.
    since: Instant,
}

struct WatchdogState<D: GpuStreams> {
    device: Arc<D>,
    abort_flag: Arc<AbortFlag>,
    rank: usize,
    deadline: Duration,
    /// Queue of each stream, by its [`CommStream`].
    queues: Mutex<[WatchQueue<D::Mark>; CommStream::COUNT]>,
    stop: Mutex<bool>,
    stopped: Condvar,
}

/// Watch over a rank's calls; see the module. Its drop ends the thread.
pub(super) struct Watch<D: GpuStreams> {
    shared: Arc<WatchdogState<D>>,
    thread: Option<JoinHandle<()>>,
}

impl<D: GpuStreams> Watch<D> {
    /// Starts the watch for `rank` of the world.
    pub(super) fn start(
        device: &Arc<D>,
        abort_flag: &Arc<AbortFlag>,
        rank: usize,
        deadline: Duration,
    ) -> Result<Watch<D>> {
        let queue = || WatchQueue { calls: VecDeque::new(), since: Instant::now() };
        let shared = Arc::new(WatchdogState {
            device: Arc::clone(device),
            abort_flag: Arc::clone(abort_flag),
            rank,
            deadline,
            queues: Mutex::new([(); CommStream::COUNT].map(|()| queue())),
            stop: Mutex::new(false),
            stopped: Condvar::new(),
        });
        let watched = Arc::clone(&shared);
        let thread = threads::start(&format!("nccl-watch-{rank}"), move || watched.run())?;
        Ok(Watch { shared, thread: Some(thread) })
    }

    /// Watches a call on a stream, which finishes at `mark`.
    pub(super) fn add(&self, lane: CommStream, mark: D::Mark, record: CallRecord) {
        let mut queues = locked(&self.shared.queues);
        let queue = &mut queues[lane as usize];
        if queue.calls.is_empty() {
            queue.since = Instant::now();
        }
        queue.calls.push_back(WatchedCall { mark, record });
    }
}

impl<D: GpuStreams> WatchdogState<D> {
    fn run(&self) {
        let bound = self.device.bind();
        let look = || bound.clone().and_then(|()| self.look());
        loop {
            if let Err(error) = look() {
                self.abort_flag.raise(error);
                return;
            }
            let stop = locked(&self.stop);
            let waited = self.stopped.wait_timeout_while(stop, PERIOD, |stop| !*stop);
            if *waited.unwrap_or_else(PoisonError::into_inner).0 {
                return;
            }
        }
    }

    fn look(&self) -> Result<()> {
        self.abort_flag.check()?;
        let oldest = self.oldest()?;
        for communicator in self.abort_flag.communicators() {
            let Some(communicator) = communicator.upgrade() else { continue };
            communicator.poll().map_err(|error| match &oldest {
                Some((_, record)) => error.because(format!("rank {} was at {record}", self.rank)),
                None => error,
            })?;
        }
        match oldest {
            Some((since, record)) if since.elapsed() > self.deadline => Err(self.stuck(&record)),
            _ => Ok(()),
        }
    }

    /// The call that has waited longest, and its start. Computation may wait for the other streams,
    /// so all count.
    fn oldest(&self) -> Result<Option<(Instant, CallRecord)>> {
        let mut queues = locked(&self.queues);
        for queue in queues.iter_mut() {
            while let Some(call) = queue.calls.front() {
                if !self.device.reached(&call.mark)? {
                    break;
                }
                queue.calls.pop_front();
                queue.since = Instant::now();
            }
        }
        let first = |queue: &WatchQueue<D::Mark>| Some((queue.since, queue.calls.front()?.record.clone()));
        Ok(queues.iter().filter_map(first).min_by_key(|(since, _)| *since))
    }

    fn stuck(&self, record: &CallRecord) -> Error {
        Error::new(ErrorCategory::Transient, format!("rank {} waits for other ranks without end", self.rank))
            .because(format!("{record} did not end in {} s", self.deadline.as_secs()))
            .because("another rank stopped, or called something else")
            .hint(format!("if no other rank failed, {GPU_SWITCHES}"))
    }
}

impl<D: GpuStreams> Drop for Watch<D> {
    fn drop(&mut self) {
        *locked(&self.shared.stop) = true;
        self.shared.stopped.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panicked watch has nothing more to report.
            let _ = thread.join();
        }
    }
}
