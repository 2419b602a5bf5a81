//! Exports of trained models in the layouts of other programs.
//!
//! [`hf`] writes a Hugging Face folder, [`quantized`] one with its linear layers quantized,
//! [`gguf`] the file that llama.cpp runs. `adapter` writes adapters, and `checkpoint` checkpoints.

pub mod gguf;
pub mod hf;
pub mod quantized;
