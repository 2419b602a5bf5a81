//! A process of a run, from its start on.

use std::process::Command;

use signal_hook::consts::SIGKILL;

use super::kept_output::KeptOutput;
use crate::error::{ErrorCategory, Result};
use crate::launcher::child::Running;

/// A process of a run that was started.
pub(super) struct StartedProcess {
    /// Name of the process for messages.
    pub(super) name: String,
    pub(super) child: Running,
    /// Its output; none for the process that has the standard streams of this one.
    pub(super) output: Option<KeptOutput>,
    /// True if this process has killed it because another one failed.
    pub(super) is_killed: bool,
}

impl StartedProcess {
    /// Starts `command`, the process `name`. The first process keeps the standard streams of this
    /// one.
    ///
    /// # Errors
    /// [`crate::error::Error::cannot_start`].
    pub(super) fn start(name: String, mut command: Command, is_first: bool) -> Result<Self> {
        let output = if is_first { None } else { Some(KeptOutput::of(&mut command, &name)?) };
        Ok(StartedProcess { name, child: Running::start(command)?, output, is_killed: false })
    }

    /// Returns the exit code of the process; none before its end, and if a signal ended it.
    pub(super) fn code(&self) -> Option<i32> {
        self.child.status()?.code()
    }

    /// Returns whether the process has ended other than with a result or as asked.
    pub(super) fn has_failed(&self) -> bool {
        let fine = [0, i32::from(ErrorCategory::SavedAndStopped.exit_code())];
        self.child.status().is_some() && self.code().is_none_or(|code| !fine.contains(&code))
    }

    /// Kills the process unless it has ended.
    pub(super) fn kill(&mut self) {
        if self.child.status().is_none() {
            self.is_killed = true;
            self.child.send(SIGKILL);
        }
    }
}
