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
    // So that a case which went another way is noticed.
    let launched = Emulator::launched();
    for op in [
        "adamw_f32",
        "add_bias",
        "add_column_sums",
        "add_into",
        "sum_partials",
        "columns_of_backward",
        "dequantize_4bit",
        "dequantize_int8_rows",
        "dropout",
        "embed_backward",
        "glu_gelu_backward",
        "glu_silu",
        "rms_norm_backward",
        "rms_norm_gain_partial",
        "rotary_backward",
        "rotary_gain_partial",
    ] {
        assert!(launched.iter().any(|kernel| kernel.starts_with(op)), "{op} is not among {launched:?}");
    }
}

#[test]
fn every_op_passes_in_any_order_with_late_copies() {
    check(Schedule { order: Order::Reverse, late_copies: true, counts: false });
    check(Schedule { order: Order::Shuffled(5), late_copies: false, counts: false });
}
