//! The one place where a recipe meets parts: facts (config.json, headers, devices, data) turn what the user asked for
//! into what will run.
//!
//! A [`BaseModel`] is a model found and understood, an [`AdapterSetup`] what of it trains; [`BaseModel::engine`] loads weights into
//! a ready [`Engine`](crate::engine::Engine). [`Plan`] adds the data, the schedule and the memory that a training run
//! needs. Refused here, before any weight is read: keys whose feature this program does not have yet.

mod fit;
mod memory;
mod method;
mod parallel;
mod training;

pub use memory::MemoryPlan;
pub use method::Method;
pub use parallel::WorldSize;
pub use training::Plan;
