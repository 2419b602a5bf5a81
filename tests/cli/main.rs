//! What a user meets: the binary as a process of its own, its files, exit codes and every text that it prints.
//!
//! Each module is a topic; `cargo test --test cli bad_input::` runs one. Nothing here may change its own process
//! (environment, working folder, signal handlers): the modules share it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../golden_run/mod.rs"]
mod golden_run;
#[path = "../logits/mod.rs"]
mod logits;
#[path = "../place/mod.rs"]
mod place;
#[path = "../skipped/mod.rs"]
mod skipped;

mod adapter_path;
mod bad_input;
mod base_identity;
mod bench;
mod cli;
mod cli_runs;
mod device_failure;
mod docs;
mod doctor;
mod export;
mod failure;
mod golden_ranks;
mod hostile_files;
mod output_folder;
mod planning;
mod qlora;
mod quantized;
mod shared_models;
mod split;
mod tokens;
mod train;
