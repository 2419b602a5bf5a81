//! Reports a check that was skipped because this machine does not have what it needs.

use std::io::Write;

/// Names the skipped check and the missing requirement, in a line that begins with `SKIPPED`. It
/// bypasses the harness, which shows the output of failing tests only; `.ci/run` repeats all such
/// lines at its end.
pub(crate) fn skipped(check: &str, why: &str) {
    // A failed write to stderr must not fail the test.
    drop(writeln!(std::io::stderr().lock(), "SKIPPED {check}: {why}"));
}
