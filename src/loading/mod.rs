//! Loads the parts of a plan: the base model, its adapter, the layout and first values of all
//! parameters, and the data set.

pub(crate) mod adapter_setup;
pub(crate) mod assets;
pub(crate) mod base_check;
pub(crate) mod base_model;
mod custom_code;
pub(crate) mod dataset;
pub(crate) mod gguf_base;
pub(crate) mod initial_values;
mod loaded_model;
pub(crate) mod new_tokens;
pub(crate) mod param_layout;
pub(crate) mod pissa;
pub(crate) mod resolver;
pub(crate) mod saved_adapter;
pub(crate) mod vocabulary;

pub use adapter_setup::AdapterSetup;
pub use base_check::BaseCheck;
pub use base_model::{BaseModel, DeviceTraits, EngineOptions};
pub use dataset::DatasetLoader;
pub(crate) use loaded_model::LoadedModel;
pub use param_layout::Trains;
pub use resolver::{ResolvedSource, Resolver};

#[cfg(all(test, debug_assertions))]
mod reduction_tests;
