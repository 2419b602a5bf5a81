//! Initial values: random weights for `init = "random"` and fresh LoRA matrices. Every value is a
//! function of (seed, parameter name, index), independent of the order of creation and of sharding.

use super::block_part::BlockPart;
use super::layout::ModelPart;
use super::spec::{ParamSpec, Role};
use super::{ModelConfig, Module, ModuleKind};
use crate::runtime::rng::RngStream;

/// Returns the elements `start..start + len` of a fresh value of `spec`. Matrices and tables are
/// normal with `initializer_range`, norms one (Gemma stores them minus one: zero), biases zero, as
/// in transformers' `_init_weights`.
pub fn initial_value(
    config: &ModelConfig,
    spec: &ParamSpec,
    seed: u64,
    start: usize,
    len: usize,
) -> Vec<f32> {
    let stream = RngStream::new(seed).named(&spec.name);
    let std = config.initializer_range as f32;
    if let ModelPart::Block { part, .. } = spec.part {
        match part {
            // transformers: A uniform from 0.01 to 16, stored as its logarithm; ones.
            BlockPart::DeltaRate => {
                let rate = |i: usize| (0.01 + 15.99 * stream.uniform(i as u64)).ln();
                return (start..start + len).map(rate).collect();
            }
            BlockPart::DeltaStep
            | BlockPart::DeltaNorm
            | BlockPart::RouterScale
            | BlockPart::ExpertFactors
            | BlockPart::OutputFactor => return vec![1.0; len],
            // transformers: curvatures of 0.8.
            BlockPart::XieluPositive => return vec![0.8f32.exp_m1().ln(); len],
            BlockPart::XieluNegative => return vec![0.3f32.exp_m1().ln(); len],
            BlockPart::XieluBeta => return vec![0.5; len],
            BlockPart::XieluEps => return vec![-1e-6; len],
            _ => {}
        }
    }
    match spec.role {
        Role::Weight | Role::Gate | Role::Embedding | Role::Recurrence => {
            stream.normals(start as u64..(start + len) as u64, std)
        }
        Role::Norm if !config.norm.unit_offset => vec![1.0; len],
        Role::Norm | Role::Bias | Role::Buffer => vec![0.0; len],
    }
}

/// Returns the random matrix of a fresh adapter, of `shape`; the other one is zero. PEFT's default
/// for A is uniform within 1/√in (Kaiming with a = √5), or normal with standard deviation 1/r. On
/// an embedding B is random and normal.
pub fn initial_lora(module: &Module, shape: &[usize], gaussian: bool, seed: u64) -> Vec<f32> {
    let stream = RngStream::new(seed).named(&module.name).named("lora_A");
    let bound = 1.0 / (module.in_features() as f32).sqrt();
    let len = shape.iter().product::<usize>() as u64;
    let value = |i: u64| match (module.kind, gaussian) {
        (ModuleKind::Embedding, _) => stream.normal(i),
        (_, true) => stream.normal(i) / shape[0] as f32,
        (_, false) => (2.0 * stream.uniform(i) - 1.0) * bound,
    };
    (0..len).map(value).collect()
}
