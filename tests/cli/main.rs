//! User-facing tests: the binary as a child process, its files, exit codes and all printed text.
//!
//! Each module is a topic; `cargo test --test cli bad_input::` runs one. No test may change its own
//! process (environment, working folder, signal handlers), for the modules share it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(clippy::disallowed_methods, reason = "a test that cannot start a thread may panic")]
#![allow(clippy::too_many_lines, reason = "a table of cases or a snapshot is one function")]

#[path = "../golden_run/mod.rs"]
mod golden_run;
#[path = "../hub_double/mod.rs"]
mod hub_double;
#[path = "../logits/mod.rs"]
mod logits;
#[path = "../place/mod.rs"]
mod place;
#[path = "../skipped/mod.rs"]
mod skipped;

mod adapter_path;
mod addresses;
mod alarm_programs;
mod alerts;
mod at_work;
mod auto_micro_batch;
mod bad_input;
mod base_identity;
mod bench;
mod best;
mod bounds;
mod changes_on_resume;
mod chat_data;
mod chat_forms;
mod chat_templates;
mod cli;
mod cli_runs;
mod closing;
mod compare;
mod data_files;
mod data_sources;
mod data_view;
mod device_failure;
mod divergence;
mod docs;
mod doctor;
mod every_byte_of_a_base;
mod explorer;
mod export;
mod failure;
mod foreign;
mod generate;
mod golden_ranks;
mod hangs;
mod held_out_answers;
mod hostile_files;
mod hostile_rows;
mod library;
mod log_command;
mod master_weights;
mod monitoring;
mod nan_policy;
mod older_checkpoint;
mod output_folder;
mod outputs;
mod planning;
mod process_limits;
mod profile;
mod pseudo_terminal;
mod qlora;
mod quantized;
mod recipes_learn;
mod report_page;
mod restarts;
mod resume_every_step;
mod run_warnings;
mod shared_models;
mod sizing;
mod sizing_page;
mod sizing_run;
mod split;
mod stalled_terminal;
mod surface;
mod system_faults;
mod threads;
mod tokenizer_dropout;
mod tokens;
mod train;
mod train_on;
mod ui;
mod using_it;
mod verify_resume;
