//! A program that finetune starts for each alert.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::alert::OutgoingAlert;
use super::delivery::AlertChannel;
use super::guard;
use crate::program;

/// Time limit of a program, with all processes that it started.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A program and its arguments. It gets the alert as a line of JSON on its input and in its
/// environment; its output is discarded. A [`guard`] starts and ends it.
pub(super) struct AlertCommand {
    words: Vec<String>,
}

impl AlertCommand {
    /// Creates the channel; `words` are the program and its arguments, at least one.
    pub(super) fn new(words: Vec<String>) -> Self {
        AlertCommand { words }
    }

    fn start(&self, outgoing: &OutgoingAlert) -> std::io::Result<Child> {
        let mut command = Command::new(program::own()?);
        command.arg(guard::ARGUMENT).arg(std::process::id().to_string()).arg(TIMEOUT.as_millis().to_string());
        command.args(&self.words);
        command.env("FINETUNE_ALERT_RULE", outgoing.alert.rule);
        command.env("FINETUNE_ALERT_STEP", outgoing.alert.step.to_string());
        command.env("FINETUNE_ALERT_MESSAGE", &outgoing.alert.message);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // A group of its own: Ctrl-C ends the run and not the message about it.
        command.process_group(0).spawn()
    }
}

impl AlertChannel for AlertCommand {
    fn name(&self) -> String {
        format!("the program `{}`", self.words.first().map_or("", String::as_str))
    }

    fn send(&self, alert: &OutgoingAlert) -> Result<(), String> {
        let mut guard = self.start(alert).map_err(|error| error.to_string())?;
        if let Some(mut input) = guard.stdin.take() {
            // A program need not read; the alert fits into the pipe.
            drop(writeln!(input, "{}", alert.to_json()));
        }
        let ended = guard.wait_with_output().map_err(|error| error.to_string())?;
        if !ended.stdout.is_empty() {
            return Err(String::from_utf8_lossy(&ended.stdout).into_owned());
        }
        if ended.status.success() {
            Ok(())
        } else {
            Err(format!("the process that watches it ended with {}", ended.status))
        }
    }
}
