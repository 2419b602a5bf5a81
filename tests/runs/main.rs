//! Whole training runs through the binary, many for each promise: splits over ranks, resumed and
//! stopped runs, sweeps, packed bases, measured memory, hostile rows, profiles, and the commands of
//! the documentation.
//!
//! They take minutes, so `cargo test` leaves them to `cargo test --test runs` and `.ci/run`.
//! Shorter runs of each verb are in tests/bin.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(clippy::disallowed_methods, reason = "a test that cannot start a thread may panic")]
#![allow(clippy::too_many_lines, reason = "a table of cases or a snapshot is one function")]

#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../support/at_work.rs"]
mod at_work;
#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../support/exhaustive.rs"]
mod exhaustive;
#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../support/faulty_run.rs"]
mod faulty_run;
#[path = "../support/golden_files.rs"]
mod golden_files;
#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../support/golden_run.rs"]
mod golden_run;
#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../support/planned_run.rs"]
mod planned_run;
#[path = "../support/skipped.rs"]
mod skipped;
#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../support/test_dir.rs"]
mod test_dir;

mod best;
mod docs;
mod golden_ranks;
mod hostile_rows;
mod master_weights;
mod output_folder;
mod packed_bases_kept;
mod planned_memory;
mod profile;
mod resume_every_step;
mod split;
mod stacked_experts;
mod sweep;
mod threads;
