//! Trained models in the layouts that other programs open.
//!
//! [`hf`] writes a Hugging Face folder. Adapters are written by `adapter`, checkpoints by `checkpoint`.

pub mod hf;
