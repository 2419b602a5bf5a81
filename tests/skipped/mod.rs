//! Says that a check was left out because this machine lacks something.

use std::io::Write;

/// Names the check that was left out and what it lacks, in a line that begins with `SKIPPED`. It is written past the
/// harness, which shows the output of failing tests alone; `.ci/run` repeats all such lines at its end.
pub(crate) fn skipped(check: &str, why: &str) {
    // Nobody to tell is no reason to fail.
    drop(writeln!(std::io::stderr().lock(), "SKIPPED {check}: {why}"));
}
