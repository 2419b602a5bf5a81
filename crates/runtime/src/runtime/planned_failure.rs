//! Device failures that tests plan, on any machine: the next request of a kind fails as on a GPU,
//! so that a test covers the whole path to the exit code.

use std::sync::atomic::{AtomicBool, Ordering};

/// Kind of the failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlannedFailure {
    /// The next request for memory of a device.
    Request,
    /// The next launch of a kernel that is emulated (feature `kernel-emu`).
    Launch,
}

static REQUEST: AtomicBool = AtomicBool::new(false);
static LAUNCH: AtomicBool = AtomicBool::new(false);

impl PlannedFailure {
    fn flag(self) -> &'static AtomicBool {
        match self {
            PlannedFailure::Request => &REQUEST,
            PlannedFailure::Launch => &LAUNCH,
        }
    }

    /// Makes the next request of this kind fail, on any thread.
    pub fn plan(self) {
        self.flag().store(true, Ordering::Relaxed);
    }

    /// Returns true if this request must fail, once per plan. Always false without debug
    /// assertions.
    pub fn strikes(self) -> bool {
        cfg!(debug_assertions)
            && self.flag().load(Ordering::Relaxed)
            && self.flag().swap(false, Ordering::Relaxed)
    }
}
