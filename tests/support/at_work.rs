//! Runs that a test observes in the middle of training: they stop themselves with SIGSTOP until the
//! test resumes them.

use std::process::{Child, Command};

/// Steps of a run that is observed in the middle, as a number and as `--set` takes it. Release
/// builds plant no fault, and only Linux reports a stopped run: elsewhere the run must be long
/// enough.
pub(crate) const STEPS: usize = if STOPS { 50 } else { 300 };
pub(crate) const MAX_STEPS: &str = if STOPS { "train.max_steps=50" } else { "train.max_steps=300" };
const STOPS: bool = cfg!(all(debug_assertions, target_os = "linux"));

/// Makes the run stop itself as it reads rows for the fifth time, after three or four steps.
pub(crate) fn stops_at_work(command: &mut Command) -> &mut Command {
    command.env("FINETUNE_FAULT", "0:data:5:stop")
}

/// Waits until Linux reports that the run has stopped itself.
pub(crate) fn has_stopped(run: &mut Child) {
    while STOPS {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", run.id())).unwrap();
        if stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T')) {
            return;
        }
        assert!(run.try_wait().unwrap().is_none(), "the run ended before it was stopped");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

/// Resumes the run.
pub(crate) fn go_on(run: &Child) {
    // SAFETY: a signal to a process that the test has started and not waited for.
    unsafe { libc::kill(libc::pid_t::try_from(run.id()).unwrap(), libc::SIGCONT) };
}
