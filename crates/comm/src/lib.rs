//! Communication between ranks: connecting processes ([`rendezvous`]), and data exchange
//! ([`collective`]). The crate `finetune` re-exports these modules.

pub mod collective;
pub mod rendezvous;

use finetune_core::{address, error, locks, private_file, threads, units};
use finetune_report as report;
use finetune_runtime::runtime;
