//! `finetune merge`: an adapter merged into the format of its base.

mod requantize;
mod requantize_gguf;
