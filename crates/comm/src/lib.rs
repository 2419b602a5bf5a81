//! Communication between ranks: how processes meet ([`rendezvous`]), and what they send each other ([`collective`]). The crate
//! `finetune` shows these modules as its own.

pub mod collective;
pub mod rendezvous;

use finetune_core::{address, error, private_file, threads, units};
use finetune_report as report;
use finetune_runtime::runtime;
