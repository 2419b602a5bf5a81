//! `finetune data`, and everything that happens to rows before training.

mod chat_forms;
mod chats;
mod files;
mod preference;
mod sources;
mod templates;
mod tokenizer_dropout;
mod train_on;
mod view;
