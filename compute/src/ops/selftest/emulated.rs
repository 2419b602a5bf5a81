//! The self-test through the kernels: their launch code, and the emulator that runs them.

use candle_core::Device;

use super::{CaseOutcome, run};
use crate::ops::gpu::emulator::{Emulator, Order, Schedule};

/// Every case on the emulator, run by `schedule`.
fn outcomes(schedule: Schedule) -> Vec<CaseOutcome> {
    Emulator::run(schedule, || run(&Device::Cpu).collect()).0
}

fn check(schedule: Schedule) {
    let failed: Vec<String> = outcomes(schedule)
        .into_iter()
        .filter(|outcome| !outcome.passed)
        .map(|outcome| {
            let CaseOutcome { op, what, dtype, error, tolerance, fault, .. } = outcome;
            let fault = fault.map_or(String::new(), |fault| format!(": {fault}"));
            format!("{op}, {what}, {dtype:?}: error {error:.3e}, at most {tolerance:.3e}{fault}")
        })
        .collect();
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn every_op_passes() {
    check(Schedule::default());
}

#[test]
fn every_op_passes_in_any_order_with_late_copies() {
    check(Schedule { order: Order::Reverse, late_copies: true, counts: false });
    check(Schedule { order: Order::Shuffled(5), late_copies: false, counts: false });
}
