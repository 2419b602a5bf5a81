//! Device failures that tests plan, on any machine: the next request of a kind fails as on a GPU,
//! so that a test covers the whole path to the exit code.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Kind of the failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlannedFailure {
    /// The next request for memory of a device, and its retry unless optional memory was released
    /// before.
    Request,
    /// The next launch of a kernel that is emulated (feature `kernel-emu`).
    Launch,
    /// The memory for the code of the next kernel, but not its retry.
    Module,
    /// The memory for the next matrix product, but not its retry.
    Product,
    /// The memory for the next tensor that candle converts or stacks, but not its retry.
    CandleRequest,
    /// The next request for memory that its caller can do without.
    OptionalRequest,
}

/// Planned failures by kind: the number of the request that fails, from 1 on; 0 for none.
static PLANNED: [AtomicUsize; 6] = [const { AtomicUsize::new(0) }; 6];

thread_local! {
    /// True if the retry of this thread's last request must fail too.
    static AGAIN: Cell<bool> = const { Cell::new(false) };
}

impl PlannedFailure {
    /// Makes the next request of this kind fail, on any thread.
    pub fn plan(self) {
        self.plan_after(0);
    }

    /// Makes the request of this kind fail that follows the next `requests` ones, on any thread.
    pub fn plan_after(self, requests: usize) {
        PLANNED[self as usize].store(requests + 1, Ordering::Relaxed);
    }

    /// Returns whether a planned failure is still to come; cancels it.
    pub fn cancel(self) -> bool {
        PLANNED[self as usize].swap(0, Ordering::Relaxed) > 0
    }

    /// Makes the retry of this thread's last request succeed.
    pub(super) fn memory_released() {
        AGAIN.set(false);
    }

    /// Returns true if this request must fail, once per plan; for [`PlannedFailure::Request`] also
    /// for its retry on the same thread. Always false without debug assertions.
    pub fn strikes(self) -> bool {
        if !cfg!(debug_assertions) {
            return false;
        }
        let planned = &PLANNED[self as usize];
        let count = |left: usize| left.checked_sub(1);
        let first = planned.load(Ordering::Relaxed) > 0
            && planned.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count) == Ok(1);
        if self != PlannedFailure::Request {
            return first;
        }
        let again = AGAIN.replace(first);
        first || again
    }
}
