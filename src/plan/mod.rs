//! The one place where a recipe meets parts: facts (config.json, headers, devices, data) turn what the user asked for
//! into what will run.
//!
//! A [`Base`] is a model found and understood, an [`Adaptation`] what of it trains; [`Base::engine`] loads weights into
//! a ready [`Engine`](crate::engine::Engine). [`Plan`] adds the data, the schedule and the memory that a training run
//! needs. Refused here, before any weight is read: keys whose feature this program does not have yet.

mod adaptation;
mod assets;
mod base;
mod fit;
mod locate;
mod memory;
mod merging;
mod parameters;
mod pissa;
mod ranks;
mod rows;
mod training;
mod values;
mod vocabulary;

pub use adaptation::Adaptation;
pub use base::{Base, EngineOptions};
pub use locate::{Finder, Found};
pub use memory::Memory;
pub use merging::{BaseChoice, Certificate, Check, MergeBase};
pub use ranks::WorldSize;
pub use rows::Rows;
pub use training::Plan;
