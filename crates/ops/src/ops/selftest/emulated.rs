//! The self-test through the kernels: their launch code, and the emulator that runs them.

use candle_core::Device;

use super::{CaseOutcome, run};
use crate::ops::gpu::emulator::{Emulator, EmulatorSchedule, Order};

/// Returns the outcomes of every case on the emulator, run by `schedule`.
fn outcomes(schedule: EmulatorSchedule) -> Vec<CaseOutcome> {
    Emulator::run(schedule, || run(&Device::Cpu).collect()).0
}

fn check(schedule: EmulatorSchedule) {
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
    check(EmulatorSchedule::default());
    // Detects a case that bypassed its kernels.
    let launched = Emulator::launched();
    for op in [
        "adamw_f32",
        "adamw_int8",
        "add_bias",
        "add_column_sums",
        "add_into",
        "sum_partials",
        "column_products",
        "columns_of_backward",
        "cross_entropy_bf16",
        "cross_entropy_f32",
        "dora_norms_bf16_bf16",
        "dora_norms_f32",
        "dequantize_4bit",
        "dequantize_int8_rows",
        "dropout",
        "embed_backward",
        "gather_rows_bf16",
        "glu_gelu_backward",
        "glu_silu",
        "rms_norm_backward",
        "rms_norm_gain_partial",
        "rotary_backward",
        "rotary_gain_partial",
        "scale_columns",
        "score_rows",
    ] {
        assert!(launched.iter().any(|kernel| kernel.starts_with(op)), "{op} is not among {launched:?}");
    }
}

#[test]
fn every_op_passes_in_reverse_with_late_copies() {
    check(EmulatorSchedule { order: Order::Reverse, late_copies: true, counts: false });
}
