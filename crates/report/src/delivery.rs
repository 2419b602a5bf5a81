//! A thread behind a bounded queue: it receives what a run hands over, and the run never waits for
//! it.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::threads;

/// The pause between two looks at a thread that is to end.
pub(crate) const PAUSE: Duration = Duration::from_millis(10);

/// The reason why a queue takes no item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandOverRefusal {
    /// The queue is full.
    Full,
    /// The thread has ended.
    Ended,
}

/// The run's end of the queue.
pub(crate) struct DeliveryQueue<T> {
    queue: SyncSender<T>,
    /// Closed when the thread has ended.
    ended: Receiver<()>,
}

impl<T: Send + 'static> DeliveryQueue<T> {
    /// Starts a thread named `name`, which does `work` with the items of a queue of at most `most`.
    ///
    /// # Errors
    /// The system starts no thread.
    pub(crate) fn start(
        name: &str,
        most: usize,
        work: impl FnOnce(Receiver<T>) + Send + 'static,
    ) -> Result<Self> {
        let (queue, items) = sync_channel(most);
        let (alive, ended) = sync_channel(0);
        let work = move || {
            let _alive = alive;
            work(items);
        };
        threads::start(name, work).map(|_| DeliveryQueue { queue, ended })
    }

    /// Queues an item without waiting.
    ///
    /// # Errors
    /// The queue is full, or its thread has ended.
    pub(crate) fn hand_over(&self, item: T) -> Result<(), HandOverRefusal> {
        self.queue.try_send(item).map_err(|refused| match refused {
            TrySendError::Full(_) => HandOverRefusal::Full,
            TrySendError::Disconnected(_) => HandOverRefusal::Ended,
        })
    }

    /// Closes the queue, and waits for its thread, at most until `until`. Calls `pulse` while it
    /// waits. Returns whether the thread has ended.
    pub(crate) fn finish(self, until: Instant, pulse: &dyn Fn()) -> bool {
        drop(self.queue);
        loop {
            match self.ended.recv_timeout(PAUSE) {
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => pulse(),
                ended => return ended != Err(RecvTimeoutError::Timeout),
            }
        }
    }
}
