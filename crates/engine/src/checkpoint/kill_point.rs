//! Named points at the end of a run at which tests kill the process.

/// The environment variable that names the kill point. Only builds with debug assertions, as in
/// tests, read it.
const VARIABLE: &str = "FINETUNE_KILL_AT";

/// A point between the last step of a run and its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KillPoint {
    /// The last step is done, and no file of the result is written.
    LastStep,
    /// All ranks have written their weights, and no manifest exists yet.
    Written,
    /// The manifest of the result is on the disk.
    Sealed,
    /// The result has been renamed, and none of its files is in its place.
    Committed,
    /// The result is in its place.
    Published,
    /// The held-out rows have been evaluated, and all listeners have been notified of the end.
    Evaluated,
    /// The model card has its final form.
    Described,
    /// The speed of the operations has been measured.
    Measured,
}

/// The names of the kill points, in the order of [`KillPoint::ALL`].
const NAMES: [&str; KillPoint::ALL.len()] =
    ["last_step", "written", "sealed", "committed", "published", "evaluated", "described", "measured"];

impl KillPoint {
    /// All kill points, in the order of a run.
    pub const ALL: [KillPoint; 8] = [
        KillPoint::LastStep,
        KillPoint::Written,
        KillPoint::Sealed,
        KillPoint::Committed,
        KillPoint::Published,
        KillPoint::Evaluated,
        KillPoint::Described,
        KillPoint::Measured,
    ];

    /// Kills this process, as `kill -9` does, if a test requested it at this point.
    pub fn reach(self) {
        if cfg!(debug_assertions) && std::env::var_os(VARIABLE).is_some_and(|name| name == self.name()) {
            // SAFETY: a system call on this process itself.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
    }

    /// Returns its name in the environment variable, such as `sealed`.
    pub fn name(self) -> &'static str {
        NAMES[self as usize]
    }
}
