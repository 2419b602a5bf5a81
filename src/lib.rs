//! `finetune` fine-tunes Hugging Face language models without Python.
//!
//! The library is a house with floors; a module imports only from lower floors, and two modules of one floor
//! do not see each other (`tests/house.rs` checks it):
//!
//! | floor | modules | what lives there |
//! |---|---|---|
//! | 0 | [`error`], [`units`] | the one error type, human-readable sizes |
//! | 1 | `hub`, [`report`] | downloads; everything a run prints or logs |
//! | 2 | [`ops`] | every tensor operation with its backward |
//! | 3 | [`weights`], [`data`] | safetensors in and out; rows to tokens, masks and batches |
//! | 4 | [`model`], [`optim`], [`adapter`] | the block and its segments; AdamW and schedules; PEFT files |
//! | 5 | [`strategy`], [`checkpoint`], [`export`] | where parameters live; what goes to disk |
//! | 6 | [`engine`], [`recipe`] | the training step and loop; what the TOML may say |
//! | 7 | [`plan`] | the one place where a recipe meets parts |
//! | 8 | [`cli`], [`commands`] | the verbs |

pub mod adapter;
pub mod checkpoint;
pub mod cli;
pub mod collective;
pub mod commands;
pub mod data;
pub mod engine;
pub mod error;
pub mod export;
pub mod hub;
pub mod model;
pub mod ops;
pub mod optim;
pub mod plan;
pub mod quant;
pub mod recipe;
pub mod report;
pub mod run;
pub mod runtime;
pub mod setup;
pub mod sharding;
pub mod units;
pub mod weights;
