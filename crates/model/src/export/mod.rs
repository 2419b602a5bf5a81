//! Trained models in the layouts that other programs open.
//!
//! [`hf`] writes a Hugging Face folder, [`bitsandbytes`] one with its linear layers quantized, [`gguf`] the file that
//! llama.cpp runs. Adapters are written by `adapter`, checkpoints by `checkpoint`.

pub mod bitsandbytes;
pub mod gguf;
pub mod hf;
