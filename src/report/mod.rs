//! Everything a run prints or leaves for people to read.
//!
//! - [`metrics`]: `metrics.jsonl`, the record that the other reports are made from.
//! - [`listener`]: whoever follows a run beside it.
//! - [`alerts`]: alarms about trouble in a run, and who is told.
//! - [`tensorboard`]: the same figures as TensorBoard event files.
//! - [`terminal`]: lines, warnings and progress bars on stderr; data asked for on stdout.
//! - [`ui`]: the run on a whole screen, for `--ui`.
//! - [`printable`](mod@printable): what stands between any text and a terminal.
//! - [`memory`]: what this process holds in memory, now and at its peak.
//! - [`card`] and [`html`]: the model card and the run at a glance.
//!
//! This is floor 1: it knows numbers and texts, nothing of recipes, models or data. The caller hands over plain
//! structs. Besides `main`, this is the only module that prints.

pub mod alerts;
pub mod card;
pub mod html;
pub mod listener;
pub mod memory;
pub mod metrics;
pub mod printable;
pub mod tensorboard;
pub mod terminal;
pub mod ui;

pub use listener::{RunListener, RunListeners};
pub use metrics::{EvalReport, MetricsEntry, MetricsLog, SkippedStep, StepReport};
pub use printable::printable;
pub use tensorboard::EventWriter;
pub use terminal::{Terminal, Verbosity};
