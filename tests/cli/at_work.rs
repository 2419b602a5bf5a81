//! Runs that are met at work, however busy the machine is: they stop themselves, as by SIGSTOP, until a test lets them go on.

use std::process::{Child, Command};

/// Has the run stop itself as it takes rows for the fifth time, with three steps or four behind it. Builds for users plant
/// no fault: there the run is met at work if it is long enough.
pub(crate) fn stops_at_work(command: &mut Command) -> &mut Command {
    command.env("FINETUNE_FAULT", "0:data:5:stop")
}

/// Waits until Linux says that the run has stopped itself.
pub(crate) fn has_stopped(run: &mut Child) {
    while cfg!(all(debug_assertions, target_os = "linux")) {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", run.id())).unwrap();
        if stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T')) {
            return;
        }
        assert!(run.try_wait().unwrap().is_none(), "the run ended before it was stopped");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

/// Lets the run go on.
pub(crate) fn go_on(run: &Child) {
    // SAFETY: a signal to a process that the test has started and not waited for.
    unsafe { libc::kill(libc::pid_t::try_from(run.id()).unwrap(), libc::SIGCONT) };
}
