//! Training runs through the binary: golden trajectories, resume, alerts, outputs, monitoring.

mod adapter_path;
mod alert_programs;
mod alerts;
mod auto_micro_batch;
mod changes_on_resume;
mod closing;
mod golden;
mod held_out_answers;
mod log_command;
mod monitoring;
mod older_checkpoint;
mod preference;
mod preference_recipes;
mod qlora;
mod recipes_learn;
mod report_page;
mod tokens;
mod ui;
mod warnings;
