//! `finetune plan`, and the plan that a run prints.

mod explorer;
mod frozen_base;
pub(crate) mod planning;
pub(crate) mod sizing;
mod sizing_page;
mod sizing_run;
