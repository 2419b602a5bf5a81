//! Initial values: random weights for `init = "random"` and fresh LoRA matrices. Every value is a function of
//! (seed, parameter name, index): it depends neither on the order of creation nor on how the model is split.

use rayon::prelude::*;

use super::spec::{ParamSpec, Role};
use super::{ModelConfig, Module};
use crate::ops::random::Stream;

/// A fresh value of `spec`: matrices and tables normal with `initializer_range`, norms one (Gemma stores them minus
/// one: zero), biases zero. As transformers' `_init_weights`.
pub fn initial_value(config: &ModelConfig, spec: &ParamSpec, seed: u64) -> Vec<f32> {
    let stream = Stream::new(seed).named(&spec.name);
    let std = config.initializer_range as f32;
    match spec.role {
        Role::Weight | Role::Embedding => {
            (0..spec.len() as u64).into_par_iter().map(|i| std * stream.normal(i)).collect()
        }
        Role::Norm if config.norm.unit_offset => vec![0.0; spec.len()],
        Role::Norm => vec![1.0; spec.len()],
        Role::Bias => vec![0.0; spec.len()],
    }
}

/// The A matrix `[r, in]` of a fresh adapter (B is zero): PEFT's default, uniform within 1/√in (Kaiming with a = √5),
/// or normal with standard deviation 1/r.
pub fn initial_lora(module: &Module, r: usize, gaussian: bool, seed: u64) -> Vec<f32> {
    let stream = Stream::new(seed).named(&module.name).named("lora_A");
    let bound = 1.0 / (module.in_features as f32).sqrt();
    (0..(r * module.in_features) as u64)
        .map(|i| match gaussian {
            true => stream.normal(i) / r as f32,
            false => (2.0 * stream.uniform(i) - 1.0) * bound,
        })
        .collect()
}
