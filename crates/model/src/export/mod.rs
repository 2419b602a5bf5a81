//! Exports of trained models in the layouts of other programs.
//!
//! [`hf`] writes a Hugging Face folder, [`bitsandbytes`] one with its linear layers quantized,
//! [`gguf`] the file that llama.cpp runs. `adapter` writes adapters, and `checkpoint` checkpoints.

pub mod bitsandbytes;
pub mod gguf;
pub mod hf;
