//! The self-test compares every op with its definition, on the present device: it lists the ops'
//! own cases.

#[cfg(all(test, feature = "kernel-emu"))]
mod emulated;
#[cfg(test)]
mod mutations;
#[cfg(test)]
mod oracle;
mod probe;
#[cfg(all(test, feature = "kernel-emu"))]
pub(in crate::ops) mod random;
#[cfg(all(test, feature = "kernel-emu"))]
mod requests;
mod summary;

use candle_core::Device;

pub use self::probe::ProbeReport;
pub use self::summary::SelftestSummary;
pub use super::case::CaseOutcome;
use super::case::OpCase;
use super::{
    activation, adamw, adamw_int8, attention, attention_sinks, causal_conv, cross_entropy, dora, dropout,
    elementwise, embedding, experts, gated_delta, gated_norm, glu, layer_norm, matmul, matmul_fp8,
    matmul_quantized, noise, rms_norm, rotary, xielu,
};
#[cfg(not(feature = "kernel-emu"))]
use crate::error::Error;
use crate::error::Result;

/// The cases of every op, in display order.
const CASES: &[fn() -> Vec<OpCase>] = &[
    matmul::cases::cases,
    matmul_quantized::cases::cases,
    matmul_fp8::cases::cases,
    dora::cases::cases,
    adamw_int8::cases::cases,
    rms_norm::cases::cases,
    layer_norm::cases::cases,
    rotary::cases::cases,
    glu::cases::cases,
    activation::cases::cases,
    xielu::cases::cases,
    dropout::cases::cases,
    noise::cases::cases,
    elementwise::cases::cases,
    attention::cases::cases,
    attention_sinks::cases::cases,
    causal_conv::cases::cases,
    gated_delta::cases::cases,
    gated_norm::cases::cases,
    embedding::cases::cases,
    experts::cases::cases,
    cross_entropy::cases::cases,
    adamw::cases::cases,
];

/// Runs every case on `device`, lazily one by one.
pub fn run(device: &Device) -> impl Iterator<Item = CaseOutcome> {
    cases().flat_map(move |case| case.outcomes(device))
}

/// Makes this process compute by emulated kernels from now on.
///
/// # Errors
/// Fails with a user error if the build has no emulator, and with an internal error if the process
/// already computed something.
pub fn emulate() -> Result<()> {
    #[cfg(feature = "kernel-emu")]
    return crate::backends::gpu::host_driver::emulate_process();
    #[cfg(not(feature = "kernel-emu"))]
    Err(Error::user("cannot run the self-test emulated")
        .because("this binary was built without the feature `kernel-emu`")
        .hint("`cargo run --features kernel-emu -- doctor --selftest --emulated`; it needs g++"))
}

fn cases() -> impl Iterator<Item = OpCase> {
    CASES.iter().flat_map(|cases| cases())
}
