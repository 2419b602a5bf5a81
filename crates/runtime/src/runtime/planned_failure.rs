//! Device failures that tests plan, on any machine: the next request of a kind fails as on a GPU,
//! so that a test covers the whole path to the exit code.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

/// Kind of the failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlannedFailure {
    /// The next request for memory of a device and its retry.
    Request,
    /// The next launch of a kernel that is emulated (feature `kernel-emu`).
    Launch,
    /// The memory for the code of the next kernel, but not its retry.
    Module,
    /// The memory for the next matrix product, but not its retry.
    Product,
    /// The memory for the next tensor that candle converts or stacks, but not its retry.
    CandleRequest,
}

/// Planned failures by kind.
static PLANNED: [AtomicBool; 5] = [const { AtomicBool::new(false) }; 5];

thread_local! {
    /// True if the retry of this thread's last request must fail too.
    static AGAIN: Cell<bool> = const { Cell::new(false) };
}

impl PlannedFailure {
    /// Makes the next request of this kind fail, on any thread.
    pub fn plan(self) {
        PLANNED[self as usize].store(true, Ordering::Relaxed);
    }

    /// Returns true if this request must fail, once per plan; for [`PlannedFailure::Request`] also
    /// for its retry on the same thread. Always false without debug assertions.
    pub fn strikes(self) -> bool {
        if !cfg!(debug_assertions) {
            return false;
        }
        let planned = &PLANNED[self as usize];
        let first = planned.load(Ordering::Relaxed) && planned.swap(false, Ordering::Relaxed);
        if self != PlannedFailure::Request {
            return first;
        }
        let again = AGAIN.replace(first);
        first || again
    }
}
