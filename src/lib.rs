//! `finetune` fine-tunes Hugging Face language models without Python.
//!
//! [`Session`] trains a model from a recipe, and [`TrainedModel`] computes with the result:
//!
//! ```no_run
//! # fn main() -> finetune::error::Result<()> {
//! let recipe = r#"
//!     model = { id = "models/base" }
//!     adapter = { r = 8 }
//!     data = { train = ["rows.jsonl"] }
//!     optimizer = { learning_rate = 1e-4 }
//! "#;
//! let mut session = finetune::Session::new(recipe, ".".as_ref())?;
//! for step in session.steps()? {
//!     println!("loss {:.4}", step?.loss);
//! }
//! session.save("out".as_ref())?;
//! let model = finetune::TrainedModel::open("models/base", Some("out"))?;
//! println!("{}", model.generate("The capital of Ruritania is", 8)?);
//! # Ok(())
//! # }
//! ```
//!
//! Below this facade is a stack of crates, each of which sees only the crates below it; the page
//! docs/design.md has their table. The feature `testing` makes the modules of all crates public for
//! the tests of this repository, without a promise that they stay.

#![cfg_attr(not(feature = "testing"), allow(unreachable_pub, reason = "public for the tests"))]

mod bench;
mod binary;
#[cfg(not(feature = "testing"))]
mod cli;
#[cfg(feature = "testing")]
pub mod cli;
#[cfg(not(feature = "testing"))]
mod commands;
#[cfg(feature = "testing")]
pub mod commands;
mod comparison;
mod doctor;
mod generation;
mod launcher;
mod session;
#[cfg(not(feature = "testing"))]
mod training;
#[cfg(feature = "testing")]
pub mod training;
mod verify;

/// Modules of the lower crates, by the names under which this crate and the tests use them.
mod floors {
    pub use finetune_comm::{collective, rendezvous};
    pub use finetune_core::{contained, median, threads, units};
    pub use finetune_data as data;
    pub use finetune_engine::{checkpoint, engine, objectives, parallel, profile};
    pub use finetune_export as export;
    pub use finetune_hub as hub;
    pub use finetune_model::{adapter, model, optim};
    pub use finetune_ops::ops;
    pub use finetune_planning::{loading, planning};
    pub use finetune_recipe as recipe;
    pub use finetune_report as report;
    pub use finetune_runtime::{instruction_set, quant, runtime};
    pub use finetune_weights as weights;
}

#[doc(hidden)]
pub use binary::run_binary;
pub use finetune_core::error;
use finetune_core::{clock, locks, private_file, program};
/// Lets a program with [`serve_if_asked`] run hostile templates and files in child processes.
///
/// ```no_run
/// // In `main`, after `serve_if_asked` has returned `None`.
/// finetune::run_in_this_program();
/// ```
#[doc(inline)]
pub use finetune_data::sandbox::run_in_this_program;
/// Serves a child process of [`run_in_this_program`], as the first call in `main`.
///
/// ```no_run
/// use std::process::ExitCode;
///
/// fn main() -> ExitCode {
///     if let Some(code) = finetune::serve_if_asked() {
///         return code;
///     }
///     finetune::run_in_this_program();
///     ExitCode::SUCCESS
/// }
/// ```
#[doc(inline)]
pub use finetune_data::sandboxed::serve_if_asked;
/// The result of [`Session::evaluate`].
///
/// ```no_run
/// # fn main() -> finetune::error::Result<()> {
/// # let session = finetune::Session::new("", ".".as_ref())?;
/// if let Some(finetune::Evaluation { exact, rows, .. }) = session.evaluate()? {
///     println!("{exact} of {rows} rows are predicted exactly");
/// }
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use finetune_engine::engine::Evaluation;
/// The result of a step of [`SessionSteps`].
///
/// ```no_run
/// # fn main() -> finetune::error::Result<()> {
/// # let mut session = finetune::Session::new("", ".".as_ref())?;
/// for step in session.steps()? {
///     let finetune::StepResult { loss, grad_norm, learning_rate, .. } = step?;
///     println!("loss {loss:.4}, gradient norm {grad_norm:.3}, learning rate {learning_rate:.1e}");
/// }
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use finetune_engine::engine::StepResult;
/// A number of the objective in a [`StepResult`].
///
/// ```no_run
/// # fn main() -> finetune::error::Result<()> {
/// # let mut session = finetune::Session::new("", ".".as_ref())?;
/// for step in session.steps()? {
///     let step = step?;
///     for metric in &step.metrics {
///         println!("{} {:?}", metric.name, metric.mean());
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use finetune_engine::objectives::MetricSum;
#[cfg(not(feature = "testing"))]
use floors::*;
#[cfg(feature = "testing")]
pub use floors::*;
pub use session::{Session, SessionSteps, TrainedModel};
