//! The library's public modules against references, faults and the golden files.
//!
//! Each module is a topic; `cargo test --test lib saving::` runs one. No test may change the
//! process that the modules share (environment, working folder, signal handlers). Tests that need
//! their own process start this binary again with `--exact` and the test's path.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(clippy::disallowed_methods, reason = "a test that cannot start a thread may panic")]
#![allow(clippy::too_many_lines, reason = "a table of cases or a snapshot is one function")]

#[path = "../support/gguf_contents.rs"]
mod gguf_contents;
#[path = "../support/golden_files.rs"]
mod golden_files;
#[path = "../support/hub_double.rs"]
mod hub_double;
#[path = "../support/logits.rs"]
mod logits;
#[path = "../support/skipped.rs"]
mod skipped;
#[allow(dead_code, reason = "saving needs a part of it")]
#[path = "../support/test_dir.rs"]
mod test_dir;

mod adapter;
mod adapter_switch;
mod collective_local;
mod data;
mod experts;
mod facade;
mod gguf_base;
mod gguf_of_llama_cpp;
mod hangs;
mod hub;
mod launch;
mod mapped_files;
mod merge;
mod model;
mod neftune;
mod objective;
mod offload;
mod ops;
mod optimizer_state;
mod packed_bases;
mod packed_bases_kept;
mod preference;
mod published;
mod quant;
mod recipe;
mod recipe_objective;
mod rendezvous;
mod report;
mod report_page;
mod saving;
mod stages;
mod traffic;
mod training;
mod weights;
