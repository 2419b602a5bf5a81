//! A process of a run, from its start on.

use std::os::unix::process::ExitStatusExt as _;

use signal_hook::consts::SIGKILL;

use super::RankProcess;
use super::last_output::LastOutput;
use crate::error::{ErrorCategory, Result};
use crate::launcher::child::Running;
use crate::launcher::signals::ENDS_BEFORE_RUN;
use crate::report::ui::ScreenOfChild;

/// A process of a run that was started.
pub(super) struct StartedProcess {
    /// Name of the process for messages.
    pub(super) name: String,
    pub(super) child: Running,
    /// Its output; none for the process that has the standard streams of this one.
    pub(super) output: Option<LastOutput>,
    /// True if this process has killed it because another one failed.
    is_killed: bool,
    /// True if this process has sent it [`ENDS_BEFORE_RUN`] because another one failed.
    is_signalled: bool,
    /// Given back when this value is dropped, after the end of the process.
    _screen: Option<ScreenOfChild>,
}

impl StartedProcess {
    /// Starts `process`. The first process keeps the standard streams of this one.
    ///
    /// # Errors
    /// [`crate::error::Error::cannot_start`].
    pub(super) fn start(process: RankProcess, is_first: bool) -> Result<Self> {
        let RankProcess { name, mut command, screen } = process;
        let output = if is_first { None } else { Some(LastOutput::of(&mut command, &name)?) };
        let child = Running::start(command)?;
        Ok(StartedProcess { name, child, output, is_killed: false, is_signalled: false, _screen: screen })
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

    /// Returns whether the process ended because this one has ended it.
    pub(super) fn was_ended(&self) -> bool {
        let by = self.child.status().and_then(|status| status.signal());
        self.is_killed || self.is_signalled && by == Some(ENDS_BEFORE_RUN)
    }

    /// Ends the process if its ranks do not run yet: it plans, or waits for others to join.
    pub(super) fn end_before_run(&mut self) {
        if !std::mem::replace(&mut self.is_signalled, true) {
            self.child.send(ENDS_BEFORE_RUN);
        }
    }

    /// Kills the process unless it has ended.
    pub(super) fn kill(&mut self) {
        if self.child.status().is_none() {
            self.is_killed = true;
            self.child.send(SIGKILL);
        }
    }
}
