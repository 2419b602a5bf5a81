//! Loads the parts of a plan: the base model, its adapter, the layout and first values of all
//! parameters, and the data set.

pub mod adapter_setup;
pub(crate) mod assets;
pub mod base_check;
pub mod base_model;
mod custom_code;
pub mod dataset;
pub mod gguf_base;
pub mod initial_values;
mod loaded_model;
pub mod new_tokens;
pub mod param_layout;
pub mod pissa;
pub mod resolver;
pub mod saved_adapter;
pub mod vocabulary;

pub use adapter_setup::AdapterSetup;
pub use base_check::BaseCheck;
pub use base_model::{BaseModel, DeviceTraits, EngineOptions};
pub use dataset::DatasetLoader;
pub use loaded_model::LoadedModel;
pub use param_layout::Trains;
pub use resolver::{ResolvedSource, Resolver};

#[cfg(all(test, debug_assertions))]
mod reduction_tests;
