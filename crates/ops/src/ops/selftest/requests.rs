//! Kernels that mainly move memory do so with 16 bytes per lane: a warp's request then moves 16
//! sectors of 32 bytes, compared with 2 for one bf16 value per lane.

use candle_core::Device;

use crate::backends::gpu::emulator::{Emulator, EmulatorSchedule};
use crate::ops::activation::PlainActivation;
use crate::ops::case::OpCase;
use crate::ops::glu::Activation;
use crate::ops::rms_norm::cases::{Extras, KINDS};
use crate::ops::rotary::Heads;
use crate::ops::rotary::cases::RotaryCase;
use crate::ops::{activation, glu, rms_norm};

/// Returns the sectors' worth of bytes per request, on average over all launches of a case in both
/// dtypes.
fn sectors_of_a_request(case: OpCase) -> f64 {
    let (op, what) = (case.op, case.what.clone());
    let schedule = EmulatorSchedule { counts: true, ..EmulatorSchedule::default() };
    let (passed, counters) =
        Emulator::run(schedule, || case.outcomes(&Device::Cpu).all(|outcome| outcome.passed));
    assert!(passed, "{op}, {what}");
    // Up to a quarter more: a host allocation may start in the middle of a sector.
    let share = counters.global_sectors as f64 / counters.global_least_sectors as f64;
    assert!(share < 1.3, "{op}, {what}: {share} of the sectors that would hold what is moved");
    counters.global_least_sectors as f64 / counters.global_requests as f64
}

#[test]
fn activations_move_16_bytes_a_lane() {
    let (heads, norm) = (Heads { num_heads: 8, num_kv_heads: 4, head_dim: 128 }, Some(KINDS[0].0));
    let frozen = RotaryCase { rows: 4, heads, half: 64, interleaved: false, norm, trained: false };
    let [rotary, rotary_backward] = frozen.cases("");
    let [activate, activate_backward] = activation::cases::shaped("", PlainActivation::Gelu, 1.0, (4, 2048));
    let [glu, glu_backward] = glu::cases::shaped("", Activation::Silu, 1.0, (4, 2048));
    let norm = rms_norm::cases::forward_case(String::new(), KINDS[0].0, (4, 2048));
    let frozen = Extras { residual: true, normed: true, dweight: false };
    let norm_backward = rms_norm::cases::backward_case(String::new(), KINDS[0].0, (4, 2048), frozen);
    for case in [rotary, rotary_backward, glu, glu_backward, activate, activate_backward, norm, norm_backward]
    {
        let what = case.op;
        let sectors = sectors_of_a_request(case);
        assert!(sectors > 15.0, "{what}: {sectors} sectors a request");
    }
}

/// The sums of their second stage run column by column, 4 bytes per lane.
#[test]
fn gradients_of_gains_move_16_bytes_a_lane_in_their_first_stage() {
    let heads = Heads { num_heads: 8, num_kv_heads: 4, head_dim: 128 };
    let trained =
        RotaryCase { rows: 12, heads, half: 64, interleaved: false, norm: Some(KINDS[0].0), trained: true };
    let [_, rotary] = trained.cases("");
    let trained = Extras { dweight: true, ..Extras::default() };
    let norm = rms_norm::cases::backward_case(String::new(), KINDS[0].0, (16, 1024), trained);
    for case in [rotary, norm] {
        let what = case.op;
        let sectors = sectors_of_a_request(case);
        assert!(sectors > 7.0, "{what}: {sectors} sectors a request");
    }
}
