//! Checks if a run can multiply by its frozen weights in fp8 (`train.base_products`).

use std::collections::BTreeSet;
use std::sync::Arc;

use candle_core::DType;

use super::memory::MemoryOptions;
use crate::error::{Error, Result};
use crate::loading::EngineOptions;
use crate::model::{ModelConfig, fp8_weights};
use crate::ops::matmul_fp8::Fp8Rows;
use crate::parallel::{ParamDesc, ParamKind, ParamRole};
use crate::recipe::Recipe;
use crate::recipe::enums::BaseProducts;
use crate::runtime::device;

/// Returns the names of the weights that the run multiplies in fp8 while they are frozen.
pub(super) fn weights(recipe: &Recipe, config: &ModelConfig) -> Arc<BTreeSet<String>> {
    match recipe.train.base_products {
        BaseProducts::Dtype => Arc::default(),
        BaseProducts::Fp8 => Arc::new(fp8_weights(config).collect()),
    }
}

impl MemoryOptions<'_> {
    /// True if codes in fp8 are kept: the frozen weights are whole on the device.
    pub(super) fn keeps_codes(&self) -> bool {
        let role = ParamRole::Frozen;
        !self.kind.sharding_spec(role).values.is_sharded() && !self.offload.has_values(role)
    }

    /// Returns the bytes of the kept codes of a parameter in fp8.
    pub(super) fn codes(&self, desc: &ParamDesc) -> u64 {
        let is_frozen = matches!(desc.kind, ParamKind::Frozen { .. } | ParamKind::Quantized(_));
        match desc.global_shape() {
            &[rows, width] if is_frozen && self.keeps_codes() && self.fp8.contains(&desc.name) => {
                Fp8Rows::bytes(rows, width) as u64
            }
            _ => 0,
        }
    }
}

/// Refuses products in fp8 that the run cannot compute.
///
/// # Errors
/// The recipe sets the key, but the run computes in f32, the GPU has no such products, or no linear
/// layer of the model has sizes for them.
pub(super) fn check(recipe: &Recipe, config: &ModelConfig, engine: &EngineOptions) -> Result<()> {
    if recipe.train.base_products != BaseProducts::Fp8 {
        return Ok(());
    }
    let refused = |cause: String| {
        Error::user("cannot multiply the frozen weights in fp8 (`train.base_products`)").because(cause)
    };
    if engine.dtype != DType::BF16 {
        let dtype = engine.dtype.as_str();
        return Err(refused(format!("the run computes in {dtype}; accepted beside fp8: bf16"))
            .hint("add `--set model.dtype=bf16`, or remove `base_products`"));
    }
    if fp8_weights(config).next().is_none() {
        let cause = "every linear layer has an input or output that is not a multiple of 16";
        return Err(refused(cause.to_owned()).hint("remove `base_products`"));
    }
    device::check_fp8(&engine.device)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::recipe::enums::Attention;

    fn config(width: usize) -> ModelConfig {
        let text = format!(
            r#"{{"model_type": "qwen3_moe", "vocab_size": 8, "hidden_size": {width}, "intermediate_size": 48,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}}"#
        );
        ModelConfig::from_json(&text, "config.json").expect("a configuration")
    }

    #[test]
    fn routers_norms_embedding_and_head_are_not_in_fp8() {
        let mut recipe = Recipe::default();
        assert!(weights(&recipe, &config(64)).is_empty());
        recipe.train.base_products = BaseProducts::Fp8;
        let names = weights(&recipe, &config(64));
        assert_eq!(names.len(), 4 + 16 * 3, "{names:?}");
        assert!(names.contains("model.layers.0.self_attn.q_proj.weight"));
        assert!(!names.iter().any(|name| name.ends_with("mlp.gate.weight")), "{names:?}");
    }

    #[test]
    fn what_cannot_be_in_fp8_is_refused() {
        let engine = |dtype| EngineOptions::alone(Device::Cpu, dtype, Attention::Flash, 0);
        let mut recipe = Recipe::default();
        assert!(check(&recipe, &config(56), &engine(DType::F32)).is_ok());
        recipe.train.base_products = BaseProducts::Fp8;
        assert!(check(&recipe, &config(64), &engine(DType::BF16)).is_ok());
        for (width, dtype, cause) in
            [(64, DType::F32, "computes in f32"), (56, DType::BF16, "multiple of 16")]
        {
            let error = check(&recipe, &config(width), &engine(dtype)).expect_err(cause).to_string();
            assert!(error.contains("train.base_products") && error.contains(cause), "{error}");
        }
    }
}
