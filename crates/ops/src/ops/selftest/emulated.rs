//! The self-test through the kernels: their launch code, and the emulator that runs them.

use candle_core::{DType, Device, Tensor};

use super::{CaseOutcome, run};
use crate::backends::gpu::emulator::{Emulator, EmulatorSchedule, Order};
use crate::error::Result;
use crate::ops::activation::{self, activate, activate_backward};
use crate::ops::case::{CaseRunner, in_f64};
use crate::ops::empty;
use crate::ops::experts::{ExpertChoice, ExpertRows, Router, RouterScores, choose_experts};
use crate::ops::glu::{Activation, glu, glu_backward};
use crate::ops::layer_norm::{LayerNorm, LayerNormGradients, layer_norm, layer_norm_backward};
use crate::ops::rms_norm::cases::KINDS;
use crate::ops::rms_norm::{rms_norm, rms_norm_backward};
use crate::ops::xielu;

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

/// Beginnings of the names of kernels that the cases launch.
const LAUNCHED: [&str; 55] = [
    "activate_backward",
    "adamw_f32",
    "adamw_int8",
    "add_bias",
    "add_column_sums",
    "add_into",
    "attention_sinks_bf16_f32",
    "attention_sinks_partial_f32",
    "sum_partials",
    "column_products",
    "columns_of_backward",
    "cross_entropy_bf16",
    "cross_entropy_f32",
    "dora_norms_bf16_bf16",
    "dora_norms_f32",
    "dequantize_4bit",
    "dequantize_int8_rows",
    "dequantize_grid_e2m1_bf16",
    "dequantize_grid_e4m3_bf16",
    "dequantize_grid_int4_bf16",
    "dequantize_grid_int8_bf16",
    "dequantize_blocks_bf16",
    "balance_experts",
    "causal_conv_backward",
    "causal_conv_bf16",
    "choose_experts_backward",
    "combine_rows",
    "dropout",
    "embed_backward",
    "gated_delta_64_bf16",
    "gated_delta_backward_columns_64_bf16",
    "gated_delta_backward_decays",
    "gated_delta_backward_inputs",
    "gated_delta_backward_rows_64_bf16",
    "gated_norm_backward",
    "gated_norm_gain_partial",
    "gather_rows_bf16",
    "glu_clamped_backward",
    "glu_gelu_backward",
    "glu_sigmoid",
    "glu_silu",
    "quantize_fp8_bf16",
    "quantize_fp8_f32",
    "transpose_fp8",
    "layer_norm_backward",
    "layer_norm_gain_partial",
    "rms_norm_backward",
    "rms_norm_gain_partial",
    "rotary_backward",
    "rotary_gain_partial",
    "scale_columns",
    "scale_rows_backward",
    "score_rows",
    "xielu_backward",
    "xielu_bf16",
];

#[test]
fn every_op_passes() {
    check(EmulatorSchedule::default());
    // Detects a case that bypassed its kernels.
    let launched = Emulator::launched();
    for op in LAUNCHED {
        assert!(launched.iter().any(|kernel| kernel.starts_with(op)), "{op} is not among {launched:?}");
    }
}

#[test]
fn every_op_passes_in_reverse_with_late_copies() {
    check(EmulatorSchedule { order: Order::Reverse, late_copies: true, counts: false });
}

/// The experts of a token with NaNs exist, and its weights show the fault; other tokens are as
/// before.
#[test]
fn a_router_chooses_experts_by_nans_too() -> Result<()> {
    for (experts, chosen) in [(8, 2), (70, 5)] {
        let sigmoid = Router { scores: RouterScores::Sigmoid, ..Router::softmax(chosen, true) };
        for router in [Router::softmax(chosen, true), sigmoid] {
            let runner = CaseRunner { device: &Device::Cpu, dtype: DType::F32, first: 0 };
            let plain = runner.normal("logits", (4, experts))?.here;
            let mut values: Vec<f32> = plain.flatten_all()?.to_vec1()?;
            values[experts..2 * experts].fill(f32::NAN);
            values[2 * experts + 3] = f32::NAN;
            let logits = Tensor::from_vec(values, (4, experts), &Device::Cpu)?;
            let choose = |logits: &Tensor| {
                Emulator::run(EmulatorSchedule::default(), || choose_experts(logits, None, router)).0
            };
            for (actual, wanted) in [
                (choose(&logits)?, choose(&plain)?),
                (choose_experts(&logits, None, router)?, choose_experts(&plain, None, router)?),
            ] {
                let weights =
                    |choice: &ExpertChoice| -> Result<Vec<Vec<f32>>> { Ok(choice.weights.to_vec2()?) };
                let (actual_weights, wanted_weights) = (weights(&actual)?, weights(&wanted)?);
                for (token, ids) in actual.ids.to_vec2::<u32>()?.into_iter().enumerate() {
                    assert!(ids.iter().all(|id| (*id as usize) < experts), "{ids:?} of {experts}");
                    if token == 1 || token == 2 {
                        assert!(
                            actual_weights[token].iter().all(|weight| weight.is_nan()),
                            "{actual_weights:?}"
                        );
                    } else {
                        assert_eq!(actual_weights[token], wanted_weights[token]);
                    }
                }
                assert_eq!(ExpertRows::of(&actual, experts)?.tokens().len(), 4 * chosen);
            }
        }
    }
    Ok(())
}

/// Two backwards write the result of their forward again. Recomputed and kept results have the same
/// bits.
#[test]
fn results_of_forwards_in_backwards_have_the_same_bits() -> Result<()> {
    let check = |what: &str, got: &Tensor, want: &Tensor| -> Result<()> {
        assert_eq!(in_f64(got)?, in_f64(want)?, "{what}");
        Ok(())
    };
    let outputs = |dtype, width| -> Result<()> {
        let runner = CaseRunner { device: &Device::Cpu, dtype, first: 0 };
        let (x, w, dy) =
            (runner.normal("x", (5, width))?, runner.normal("w", width)?, runner.normal("dy", (5, width))?);
        for (kind, name) in KINDS {
            let normed = empty(5, width, dtype, &Device::Cpu)?;
            rms_norm_backward(&x.here, &w.here, &dy.here, None, None, Some(&normed), kind)?;
            check(name, &normed, &rms_norm(&x.here, &w.here, kind)?)?;
        }
        let b = runner.normal("b", width)?;
        for bias in [None, Some(&*b.here)] {
            let norm = LayerNorm { weight: &w.here, bias, kind: KINDS[1].0 };
            let normed = empty(5, width, dtype, &Device::Cpu)?;
            let grads = LayerNormGradients::default();
            layer_norm_backward(&x.here, norm, &dy.here, None, grads, Some(&normed))?;
            check("layer_norm", &normed, &layer_norm(&x.here, norm)?)?;
        }
        let all = [Activation::Silu, Activation::GeluTanh, Activation::Sigmoid, Activation::ClampedSilu];
        for activation in all {
            let dh = runner.normal("dh", (5, width / 2))?.here;
            glu_backward(&x.here, &dh, activation)?;
            check("glu", &dh, &glu(&x.here, activation)?)?;
        }
        for kind in activation::cases::KINDS {
            let dh = runner.normal("dh", (5, width))?.here;
            activate_backward(&x.here, &dh, kind)?;
            check("activate", &dh, &activate(&x.here, kind)?)?;
        }
        let (dh, curve) = (runner.normal("dh", (5, width))?.here, xielu::cases::curve(&Device::Cpu)?);
        xielu::xielu_backward(&x.here, &dh, &curve, None)?;
        check("xielu", &dh, &xielu::xielu(&x.here, &curve)?)?;
        Ok(())
    };
    for (dtype, width) in [(DType::F32, 64), (DType::BF16, 64), (DType::F32, 38), (DType::BF16, 38)] {
        Emulator::run(EmulatorSchedule::default(), || outputs(dtype, width)).0?;
    }
    Ok(())
}
