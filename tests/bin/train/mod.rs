//! Training runs through the binary: golden trajectories, resume, alerts, outputs, monitoring.

mod adapter_path;
mod alert_programs;
mod alerts;
mod auto_micro_batch;
mod best;
mod changes_on_resume;
mod closing;
mod golden;
mod golden_ranks;
mod held_out_answers;
mod log_command;
mod master_weights;
mod monitoring;
mod older_checkpoint;
mod output_folder;
mod profile;
mod qlora;
mod recipes_learn;
mod report_page;
mod resume_every_step;
mod split;
mod stacked_experts;
mod threads;
mod tokens;
mod ui;
mod warnings;
