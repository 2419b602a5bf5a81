//! Failures of a device that tests plan, on any machine: the next thing of a kind that is asked of the device fails as it
//! does on a GPU, so that what a run then does and says can be tried from where it happens to the exit code.

use std::sync::atomic::{AtomicBool, Ordering};

/// What is to fail.
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

    /// The next one fails, whichever thread asks.
    pub fn plan(self) {
        self.flag().store(true, Ordering::Relaxed);
    }

    /// Whether this one fails; a plan is for one alone. Only builds with debug assertions hear of plans.
    pub fn strikes(self) -> bool {
        cfg!(debug_assertions)
            && self.flag().load(Ordering::Relaxed)
            && self.flag().swap(false, Ordering::Relaxed)
    }
}
