//! Prints a run and writes its reports for people.
//!
//! - [`metrics`]: `metrics.jsonl`, the record that the other reports are made from.
//! - [`listener`]: the receivers of a run's events.
//! - [`alerts`]: alerts about trouble in a run, and their delivery.
//! - [`tensorboard`]: the same figures as TensorBoard event files.
//! - [`endpoint`]: the same for Prometheus, over HTTP ([`PageServer`]).
//! - [`log_command`]: the run as lines of JSON, for a program of the user.
//! - [`terminal`]: lines, warnings and progress bars on stderr; data asked for on stdout.
//! - [`ui`]: the run on a whole screen, for `--ui`.
//! - [`printable`](mod@printable): escapes control characters in text for a terminal.
//! - [`memory`] and [`timing`]: measured memory and step times, beside the plan.
//! - [`card`] and [`html`]: the model card and the run at a glance. `markdown`: names of any origin
//!   in the card.
//!
//! This is floor 1: it knows numbers and texts, nothing of recipes, models or data. The caller
//! gives plain structs. Besides `main`, this is the only module that prints.

pub mod alerts;
pub mod card;
mod delivery;
pub mod endpoint;
mod figures;
pub mod html;
pub mod listener;
pub mod log_command;
mod markdown;
pub mod memory;
pub mod metrics;
mod page_server;
pub mod printable;
mod printer;
pub mod tensorboard;
pub mod terminal;
pub mod timing;
pub mod ui;

use std::time::Duration;

pub use endpoint::{MetricsEndpoint, RunLabels};
use finetune_core::{address, clock, error, locks, median, program, recipe, threads, units};
pub use listener::{RunEnd, RunListener, RunListeners};
pub use log_command::{LogCommand, RunStart};
pub use metrics::{EvalReport, HeldOutAnswer, MetricsEntry, MetricsLog, SkippedStep, StepReport};
pub use page_server::PageServer;
pub use printable::printable;
pub use tensorboard::EventWriter;
pub use terminal::{Terminal, Verbosity, print_last};

/// Longest time that a run may take at its end to deliver alerts and to end the program of
/// `log.command`.
pub const LONGEST_END: Duration = Duration::from_secs(
    alerts::LAST_WAIT.as_secs() + log_command::LAST_WAIT.as_secs() + log_command::KILL_WAIT.as_secs(),
);

/// Waits until the terminal has accepted all output, or none for two seconds, and gives the screen
/// back. Call it before the process ends.
pub fn finish() {
    terminal::flush_all();
    ui::restore_screen();
}
