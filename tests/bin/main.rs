//! User-facing tests: the binary as a child process, its files, exit codes and all printed text.
//!
//! A verb has a module or a folder, `every_verb` the rest; `cargo test --test bin bad_input::` runs
//! one topic. No test may change its own process (environment, working folder, signal handlers),
//! for the modules share it. Planted faults and hangs are in tests/faults.

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
#[path = "../support/golden_run.rs"]
mod golden_run;
#[path = "../support/hub_double.rs"]
mod hub_double;
#[path = "../support/logits.rs"]
mod logits;
#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../support/planned_run.rs"]
mod planned_run;
#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../support/pseudo_terminal.rs"]
mod pseudo_terminal;
#[path = "../support/skipped.rs"]
mod skipped;
#[path = "../support/test_dir.rs"]
mod test_dir;

mod bench;
mod compare;
mod data;
mod doctor;
mod every_verb;
mod export;
mod generate;
mod merge;
mod plan;
mod quantize;
mod train;
mod verify_resume;
