//! The end of a run in one or several processes: which of them explains it.

use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use super::started::StartedProcess;
use crate::error::{Error, ErrorCategory, Result};
use crate::launcher::child;
use crate::report::print_last;

/// End of a run in one or several processes.
pub(crate) struct RunEnd {
    /// Name of the process that explains the end, for messages: "rank 3 on GPU 3".
    pub(crate) name: String,
    /// Status of that process.
    pub(crate) status: ExitStatus,
    /// True if a signal asked the processes to stop.
    pub(crate) asked_to_stop: bool,
    /// True if the first process, which has the standard streams of this one, has reported the end.
    pub(super) is_reported: bool,
    /// Last lines of the output of a process that failed without those streams.
    pub(super) output: Vec<String>,
}

impl RunEnd {
    /// Returns the end of the run of `processes`, which have ended in this `order`.
    pub(super) fn of(mut processes: Vec<StartedProcess>, order: &[usize], asked_to_stop: bool) -> Self {
        let first = processes.first().and_then(|first| first.child.status()).unwrap_or_default();
        let process = processes.swap_remove(explains(&processes, order));
        let status = public(process.child.status().unwrap_or_default());
        let is_reported = status.success() || first.code().is_some_and(|code| code != 0);
        let shown = process.output.as_ref().filter(|_| process.has_failed());
        let output = shown.map(|output| output.lines()).unwrap_or_default();
        RunEnd { name: process.name, status, asked_to_stop, is_reported, output }
    }

    /// Describes the end, for messages.
    pub(crate) fn in_words(&self) -> String {
        format!("{} {}", self.name, child::how_it_ended(self.status))
    }

    /// Prints the last output of the process that explains the end, which nobody has seen yet.
    pub(super) fn print_output(&self) {
        if !self.output.is_empty() {
            print_last(&self.output_text());
        } else if self.is_reported && self.status.code().is_none() {
            // The first process knows only that the connection was lost.
            print_last(&self.in_words());
        }
    }

    /// Text of the output. An error of this process follows it if no process has reported the end.
    fn output_text(&self) -> String {
        let head = if self.is_reported {
            format!("{}; its last output:", self.in_words())
        } else {
            format!("the last output of {}:", self.name)
        };
        self.output.iter().fold(head, |text, line| format!("{text}\n  | {line}"))
    }

    /// Ends this process as the run ended.
    ///
    /// # Errors
    /// The failure, if no process has reported it.
    pub(crate) fn conclude(&self) -> Result<()> {
        match self.status.code() {
            Some(code) if self.is_reported => child::end_with(code),
            // A signal came before the process could save.
            None if self.asked_to_stop => child::stop_now(),
            None if self.is_reported => child::end_with(i32::from(child::category(self.status).exit_code())),
            _ => Err(self.error(child::category(self.status))),
        }
    }

    /// Returns the error of an end that no process has reported.
    fn error(&self, category: ErrorCategory) -> Error {
        let error = Error::new(category, self.in_words());
        match category {
            ErrorCategory::Transient | ErrorCategory::Internal => error,
            _ => error.hint("its last output, printed above, says what to change"),
        }
    }
}

/// Returns the index of the process whose end explains that of the run: of those that failed by
/// themselves the first one to end. If the first process failed in the same way, it has printed the
/// same error.
fn explains(processes: &[StartedProcess], order: &[usize]) -> usize {
    let first = order.iter().copied().min_by_key(|index| distance(&processes[*index])).unwrap_or(0);
    let code = processes[first].code();
    if code.is_some() && code == processes[0].code() { 0 } else { first }
}

/// Returns how far the end of a process is from explaining that of the run.
fn distance(process: &StartedProcess) -> u8 {
    match process.code() {
        _ if process.was_ended() => 3,
        Some(0) => 4,
        Some(code) if code == i32::from(ErrorCategory::SavedAndStopped.exit_code()) => 2,
        Some(code) if code == i32::from(child::HEARD) => 1,
        _ => 0,
    }
}

/// Returns the status with the exit code that users know: a failure of another host's rank, of
/// which the processes here have only heard, is one of a peer.
fn public(status: ExitStatus) -> ExitStatus {
    let transient = i32::from(ErrorCategory::Transient.exit_code());
    if status.code() == Some(i32::from(child::HEARD)) { ExitStatus::from_raw(transient << 8) } else { status }
}
