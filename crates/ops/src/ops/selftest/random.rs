//! Tests every op through its kernels, on random shapes, memory offsets and thread orders, against
//! its reference and within the tolerances of the self-test. Attention's own tests draw theirs.
//!
//! The draws are the same in every run; `PROPTEST_CASES` and `PROPTEST_RNG_SEED` request more or
//! different ones. A failure names the smallest failing case found.

use candle_core::Device;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::RngSeed;

use super::CaseOutcome;
use crate::backends::gpu::emulator::{Emulator, EmulatorSchedule, Order};
use crate::ops::adamw::AdamWStep;
use crate::ops::attention_sinks::cases::SinksCase;
use crate::ops::case::{OpCase, Tolerance};
use crate::ops::causal_conv::cases::ConvCase;
use crate::ops::cross_entropy::cases::{LossCase, WIDTH};
use crate::ops::experts::cases::ExpertSizes;
use crate::ops::gated_delta::DeltaHeads;
use crate::ops::gated_delta::cases::DeltaCase;
use crate::ops::gated_norm::cases::GatedNormCase;
use crate::ops::glu::Activation;
use crate::ops::layer_norm::cases::LayerNormCase;
use crate::ops::matmul::Transpose;
use crate::ops::matmul::cases::{Added, FORMS, MIXTURES, MatmulCase, OperandDtype, bias_cases};
use crate::ops::matmul_quantized::cases::{FORMATS, KEPT, product, whole};
use crate::ops::rms_norm::cases::{Extras, KINDS};
use crate::ops::rotary::Heads;
use crate::ops::rotary::cases::RotaryCase;
use crate::ops::{
    activation, adamw, adamw_int8, cross_entropy, dora, dropout, elementwise, embedding, experts, glu, noise,
    rms_norm, xielu,
};
use crate::quant::QuantFormat;

/// Returns a configuration with this many cases, the same in every run.
pub(in crate::ops) fn config(cases: u32) -> ProptestConfig {
    let asked = ProptestConfig::default();
    ProptestConfig {
        cases: if std::env::var_os("PROPTEST_CASES").is_some() { asked.cases } else { cases },
        rng_seed: if asked.rng_seed == RngSeed::Random { RngSeed::Fixed(12) } else { asked.rng_seed },
        failure_persistence: None,
        max_shrink_iters: 100,
        ..asked
    }
}

/// Returns random thread orders and arrival times of copies.
pub(in crate::ops) fn schedules() -> impl Strategy<Value = EmulatorSchedule> {
    let order =
        prop_oneof![Just(Order::Forward), Just(Order::Reverse), any::<u64>().prop_map(Order::Shuffled)];
    (order, any::<bool>()).prop_map(|(order, late_copies)| EmulatorSchedule {
        order,
        late_copies,
        counts: false,
    })
}

/// The schedule and the memory offset of a case.
#[derive(Debug, Clone, Copy)]
struct Run {
    schedule: EmulatorSchedule,
    /// Number of values before those of each tensor in its memory: few are a multiple of 16 bytes.
    first: usize,
}

fn runs() -> impl Strategy<Value = Run> {
    let first = prop_oneof![2 => Just(0), 1 => 1..16_usize];
    (schedules(), first).prop_map(|(schedule, first)| Run { schedule, first })
}

/// Returns odd widths, and multiples of the values in 16 bytes.
fn widths(least: usize) -> impl Strategy<Value = usize> {
    prop_oneof![least..70, (least.div_ceil(8)..50).prop_map(|eights| 8 * eights)]
}

/// Runs the cases through kernels, and checks that a kernel whose name begins with `kernel` was
/// launched.
fn check(cases: impl IntoIterator<Item = OpCase>, run: Run, kernel: &str) -> Result<(), TestCaseError> {
    for case in cases {
        let outcomes: Vec<CaseOutcome> =
            Emulator::run(run.schedule, || case.outcomes_from(&Device::Cpu, run.first).collect()).0;
        let launched = Emulator::launched();
        prop_assert!(
            launched.iter().any(|name| name.starts_with(kernel)),
            "{kernel} is not among {launched:?}"
        );
        for CaseOutcome { op, what, dtype, error, tolerance, passed, fault, .. } in outcomes {
            let fault = fault.map_or(String::new(), |fault| format!(": {fault}"));
            prop_assert!(
                passed,
                "{op}, {what}, {dtype:?}: error {error:.3e}, at most {tolerance:.3e}{fault}"
            );
        }
    }
    Ok(())
}

proptest! {
    // Each token is a step of its own.
    #![proptest_config(config(6))]

    #[test]
    fn gated_delta_rules(
        (lengths, gap) in (vec(select(&[1_usize, 7, 33, 66][..]), 1..3), 0..3_usize),
        (num_key_heads, group) in (1..3_usize, 1..3_usize),
        // Each kernel, with widths at and below its largest one.
        (key_dim, value_dim) in select(&[(3, 5), (40, 16), (64, 64), (96, 24), (24, 100), (130, 16), (16, 200)][..]),
        (trained, run) in (any::<bool>(), runs()),
    ) {
        let heads = DeltaHeads { num_key_heads, num_value_heads: num_key_heads * group, key_dim, value_dim };
        check(DeltaCase { heads, lengths, gap, trained }.cases(""), run, "gated_delta")?;
    }
}

proptest! {
    #![proptest_config(config(24))]

    #[test]
    fn norms(
        (kind, _) in select(&KINDS[..]),
        shape in (1..100_usize, widths(4)),
        (residual, dweight, normed, run) in (any::<bool>(), any::<bool>(), any::<bool>(), runs()),
    ) {
        let forward = rms_norm::cases::forward_case(String::new(), kind, shape);
        check([forward], run, "rms_norm")?;
        let extras = Extras { residual, dweight, normed };
        let backward = rms_norm::cases::backward_case(String::new(), kind, shape, extras);
        check([backward], run, "rms_norm_backward")?;
    }

    #[test]
    fn layer_norms(
        (rows, width) in (1..100_usize, widths(4)),
        (unit_offset, bias) in any::<(bool, bool)>(),
        (residual, grads, normed, run) in (any::<bool>(), any::<bool>(), any::<bool>(), runs()),
    ) {
        let case = LayerNormCase { rows, width, unit_offset, bias, residual, grads, normed };
        check(case.cases(), run, "layer_norm")?;
    }

    #[test]
    fn rotations(
        rows in 1..40_usize,
        (num_kv_heads, group) in (1..4_usize, 1..5_usize),
        head_dim in select(&[6, 16, 24, 64, 80, 96, 128, 256][..]),
        (turned, norm, trained) in (0.1..1.0_f64, option::of(select(&KINDS[..])), any::<bool>()),
        (whole, interleaved) in any::<(bool, bool)>(),
        run in runs(),
    ) {
        let heads = Heads { num_heads: num_kv_heads * group, num_kv_heads, head_dim };
        let half = if whole { head_dim / 2 } else { ((head_dim / 2) as f64 * turned).ceil() as usize };
        let case = RotaryCase { rows, heads, half, interleaved, norm: norm.map(|(kind, _)| kind), trained };
        check(case.cases(""), run, "rotary")?;
    }

    #[test]
    fn gates(
        activation in select(
            &[Activation::Silu, Activation::GeluTanh, Activation::Sigmoid, Activation::ClampedSilu][..]
        ),
        spread in select(&[1.0, 20.0][..]),
        (rows, half, run) in (1..40_usize, widths(8), runs()),
    ) {
        check(glu::cases::shaped("", activation, spread, (rows, half)), run, "glu")?;
    }

    #[test]
    fn xielus(
        (spread, trained) in (select(&[0.05, 1.0, 20.0][..]), any::<bool>()),
        (shape, run) in ((1..40_usize, widths(8)), runs()),
    ) {
        check(xielu::cases::shaped("", spread, shape, trained), run, "xielu")?;
    }

    #[test]
    fn activations(
        kind in select(&activation::cases::KINDS[..]),
        spread in select(&[1.0, 20.0][..]),
        (shape, run) in ((1..40_usize, widths(8)), runs()),
    ) {
        check(activation::cases::shaped("", kind, spread, shape), run, "activate")?;
    }

    #[test]
    fn dropped(p in 0.0..0.9_f32, (rows, width, run) in (1..80_usize, widths(1), runs())) {
        check([dropout::cases::shaped(String::new(), p, (rows, width))], run, "dropout")?;
    }

    #[test]
    fn noisy((rows, width, run) in (1..80_usize, widths(1), runs())) {
        check([noise::cases::shaped(String::new(), (rows, width))], run, "add_noise")?;
    }

    #[test]
    fn sums_of_tensors(
        shape in (1..80_usize, widths(2)),
        lengths in vec(1..40_000_usize, 1..4),
        run in runs(),
    ) {
        check([elementwise::cases::add_case("", shape)], run, "add_")?;
        check([elementwise::cases::scaled_case("", shape)], run, "scaled_")?;
        check(elementwise::cases::into_cases("", shape).into_iter().filter(|case| case.op == "add_into"), run, "add_into")?;
        let shapes = lengths.into_iter().map(Into::into).collect();
        check([elementwise::cases::squares_case("", shapes)], run, "sum_of_squares")?;
        check([elementwise::cases::stacked_case("", vec![shape.0, 1, 7], shape.1)], run, "gather_rows")?;
    }

    #[test]
    fn weights_of_dora(
        (quantize, shape, rank) in (any::<bool>(), (1..90_usize, widths(4)), 1..24_usize),
        (rows, columns) in (1..140_usize, [0..9_usize, 1..140, 0..9]),
        (accumulate, run) in (any::<bool>(), runs()),
    ) {
        check([dora::cases::norm_case("", quantize, shape, rank)], run, "dora_norms")?;
        let scaled = OpCase::new("scale_columns", "", Tolerance::ROUNDED, move |runner| {
            dora::cases::scaled(runner, rows, columns, accumulate)
        });
        check([scaled], run, "scale_columns")?;
        let magnitudes = OpCase::new("magnitude_backward", "", Tolerance::BACKWARD, move |runner| {
            dora::cases::magnitudes(runner, rows, columns)
        });
        check([magnitudes], run, "column_products")?;
    }

    #[test]
    fn embeddings(
        (factor, count, width) in (0.5..5.0_f64, 1..200_usize, widths(1)),
        (rank, run) in (1..20_usize, runs()),
    ) {
        check(embedding::cases::table_cases("", factor, count, width), run, "embed")?;
        check(embedding::cases::adapter_cases("", count, rank), run, "columns_of")?;
    }

    #[test]
    fn routed_experts(
        (tokens, width) in (1..60_usize, widths(1)),
        (experts, chosen) in (1..200_usize, 1..12_usize),
        (renormalize, is_sigmoid, has_bias) in (any::<bool>(), any::<bool>(), any::<bool>()),
        (groups, run) in (0..9_usize, runs()),
    ) {
        let sizes = ExpertSizes { tokens, experts, chosen: chosen.min(experts), width };
        let router = experts::cases::router(sizes, renormalize, is_sigmoid, groups);
        let [chosen, chosen_backward, balanced] = experts::cases::router_cases("", sizes, router, has_bias);
        let saturated = experts::cases::saturated_case("", sizes);
        check([chosen, chosen_backward, saturated], run, "choose_experts")?;
        check([balanced], run, "balance_experts")?;
        let [scaled, scaled_backward, combined] = experts::cases::row_cases("", sizes);
        check([scaled, scaled_backward], run, "scale_rows")?;
        check([combined], run, "combine_rows")?;
    }

    #[test]
    fn causal_convolutions(
        (lengths, gap, channels) in (vec(1..90_usize, 1..4), 0..3_usize, widths(1)),
        (margin, trained, run) in (0..20_usize, any::<bool>(), runs()),
        (taps, has_silu) in (3..5_usize, any::<bool>()),
    ) {
        let case = ConvCase { lengths, gap, channels, taps, margin, trained, has_silu };
        check(case.cases(""), run, "causal_conv")?;
    }

    #[test]
    fn sinks(
        (rows, heads, width) in (1..90_usize, 1..20_usize, widths(1)),
        (f32_sinks, run) in (any::<bool>(), runs()),
    ) {
        check(SinksCase { rows, heads, width, f32_sinks }.cases(""), run, "attention_sinks")?;
    }

    #[test]
    fn gated_norms(
        (rows, heads, width) in (1..40_usize, 1..5_usize, widths(2)),
        (margin, trained, f32_weight, run) in (0..20_usize, any::<bool>(), any::<bool>(), runs()),
    ) {
        let case = GatedNormCase { rows, heads, width, margin, trained, f32_weight };
        check(case.cases(""), run, "gated_norm")?;
    }

    #[test]
    fn products(
        (form, m, n, k) in (select(&FORMS[..]), 3..70_usize, 3..70_usize, 1..90_usize),
        (margin, alpha, added) in (0..9_usize, select(&[1.0, -0.5][..]), select(&[Added::Nothing, Added::Destination, Added::Matrix][..])),
        (mixture, run) in (option::of(select(&MIXTURES[..])), runs()),
    ) {
        let operands = mixture.unwrap_or([OperandDtype::Run; 3]);
        let tolerance = if mixture.is_some() { Tolerance::BACKWARD.only_bf16() } else { Tolerance::BACKWARD };
        let case = MatmulCase { form, m, n, k, margin, alpha, added, operands }.case(tolerance);
        // A weight that needs no dequantization launches no kernel besides the product.
        let outcomes: Vec<_> = Emulator::run(run.schedule, || case.outcomes_from(&Device::Cpu, run.first).collect()).0;
        for CaseOutcome { error, tolerance, passed, fault, .. } in outcomes {
            prop_assert!(passed, "error {error:.3e}, at most {tolerance:.3e}: {fault:?}");
        }
        let [added, summed] = bias_cases("", m, margin, n);
        check([added], run, "add_bias")?;
        check([summed], run, "column_sums")?;
    }

    #[test]
    fn quantized_weights(
        format in select([&FORMATS[..], &KEPT[..]].concat()),
        shape in (8..90_usize, widths(8)),
        (rows, transposed, accumulate, run) in (1..5_usize, any::<bool>(), any::<bool>(), runs()),
    ) {
        let is_rows = matches!(format, QuantFormat::Int8Rows(_));
        let format = if is_rows { QuantFormat::int8_rows(shape.1) } else { format };
        let shape = whole(&format, shape);
        let form = if transposed { Transpose::Nt } else { Transpose::Nn };
        let case = OpCase::new("matmul_weight", format!("{format:?}"), Tolerance::BACKWARD, move |runner| {
            product(runner, format, shape, rows, form, accumulate)
        });
        check([case], run, "dequantize")?;
    }

    #[test]
    fn updates(
        pieces in vec(1..6000_usize, 1..4),
        (weight_decay, grad_scale) in (0.0..0.2_f64, 0.1..1.0_f64),
        (update, run) in (1..2000_u64, runs()),
    ) {
        let step = AdamWStep { learning_rate: 0.02, betas: [0.9, 0.99], eps: 1e-8, weight_decay, update, grad_scale };
        check([adamw::cases::shaped("", &pieces, step)], run, "adamw_f32")?;
        check([adamw_int8::cases::shaped("", &pieces)], run, "adamw_int8")?;
    }
}

proptest! {
    #![proptest_config(config(12))]

    #[test]
    fn losses(
        // At least one row has a target.
        (rows, vocab) in (2..40_usize, 61..300_usize),
        (ignore_every, softcap) in (select(&[2, 3, 1000][..]), option::of(1.5..30.0_f64)),
        (dweight, adapter, weighted) in (any::<bool>(), any::<bool>(), any::<bool>()),
        run in runs(),
    ) {
        let (width, confident) = (WIDTH, false);
        let case = LossCase { rows, vocab, width, confident, ignore_every, softcap, dweight, adapter, weighted };
        check([case.case("")], run, "cross_entropy")?;
        check([cross_entropy::cases::score_case("", rows, vocab, softcap)], run, "score_rows")?;
    }
}
