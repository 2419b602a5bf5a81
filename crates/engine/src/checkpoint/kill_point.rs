//! Named moments at the end of a run, at which tests kill the process.

/// The environment variable that names the moment. Only builds with debug assertions, which tests run, read it.
const VARIABLE: &str = "FINETUNE_KILL_AT";

/// A moment between the last step of a run and its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KillPoint {
    /// The last step is done, and nothing of the result is written.
    LastStep,
    /// All ranks have written their weights; nothing says yet that they are whole.
    Written,
    /// The manifest of the result is on the disk.
    Sealed,
    /// The result has been renamed, and none of its files is in its place.
    Committed,
    /// The result is in its place.
    Published,
    /// The held-out rows have been evaluated, and everyone who listens has been told of the end.
    Evaluated,
    /// The model card has its last form.
    Described,
    /// The speed of the operations has been measured.
    Measured,
}

impl KillPoint {
    /// All of them, in the order of a run.
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

    /// Kills this process, as `kill -9` does, if a test asked for that at this moment.
    pub fn reach(self) {
        if cfg!(debug_assertions) && std::env::var_os(VARIABLE).is_some_and(|name| name == self.name()) {
            // SAFETY: a system call on this process itself.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
    }

    /// The word for it in the environment variable, such as `sealed`.
    pub fn name(self) -> &'static str {
        match self {
            KillPoint::LastStep => "last_step",
            KillPoint::Written => "written",
            KillPoint::Sealed => "sealed",
            KillPoint::Committed => "committed",
            KillPoint::Published => "published",
            KillPoint::Evaluated => "evaluated",
            KillPoint::Described => "described",
            KillPoint::Measured => "measured",
        }
    }
}
