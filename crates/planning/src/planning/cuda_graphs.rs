//! Checks if a run can launch its blocks as CUDA graphs (`train.cuda_graphs`).

use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::ops::HELD_BYTES;
use crate::recipe::Recipe;
use crate::recipe::enums::AdapterKind;

/// Refuses CUDA graphs of a model and an adapter whose blocks have none.
///
/// # Errors
/// The recipe sets the key, but candle computes a part of every block.
pub(super) fn check(recipe: &Recipe, config: &ModelConfig) -> Result<()> {
    if !recipe.train.cuda_graphs {
        return Ok(());
    }
    let refused = |cause: &str, hint: &str| {
        let what = "cannot launch the model's blocks as CUDA graphs (`train.cuda_graphs`)";
        Err(Error::user(what).because(cause).hint(hint))
    };
    if recipe.adapter.as_ref().is_some_and(|adapter| adapter.kind == AdapterKind::Dora) {
        let cause =
            "a graph holds finetune's kernels and products alone, and no kernel divides DoRA's magnitudes";
        return refused(cause, "write `kind = \"lora\"` under `[adapter]`, or remove `cuda_graphs`");
    }
    if !(0..config.num_layers()).any(|layer| config.launches_alone(layer)) {
        let cause = "a graph holds finetune's kernels and products alone, and every block of the model has other \
                     operations on tensors, such as experts, gates or norms of whole queries";
        return refused(cause, "remove `cuda_graphs`");
    }
    Ok(())
}

/// Returns the bytes that the launches of a block hold beside its live tensors until they are
/// launched, given those of the inputs and outputs of its linear layers. If memory is short, they
/// are launched earlier.
pub(super) fn held_bytes(linear_bytes: u64) -> u64 {
    linear_bytes.min(HELD_BYTES as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::AdapterSection;

    fn config(family: &str) -> ModelConfig {
        let text = format!(
            r#"{{{family}, "vocab_size": 8, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}}"#
        );
        ModelConfig::from_json(&text, "config.json").unwrap()
    }

    #[test]
    fn models_without_a_block_of_kernels_are_refused() {
        let mut recipe = Recipe::default();
        recipe.train.cuda_graphs = true;
        let accepted = [r#""model_type": "qwen3""#, r#""model_type": "gemma2""#];
        assert!(accepted.iter().all(|family| check(&recipe, &config(family)).is_ok()));
        let error = check(&recipe, &config(r#""model_type": "olmo2""#)).unwrap_err();
        assert!(error.to_string().contains("train.cuda_graphs"), "{error}");
        recipe.adapter = Some(AdapterSection { kind: AdapterKind::Dora, ..AdapterSection::default() });
        let error = check(&recipe, &config(accepted[0])).unwrap_err();
        assert!(error.to_string().contains("DoRA"), "{error}");
        recipe.train.cuda_graphs = false;
        assert!(check(&recipe, &config(r#""model_type": "olmo2""#)).is_ok());
    }

    /// Other blocks are launched as without graphs.
    #[test]
    fn one_block_of_kernels_suffices() {
        let mut recipe = Recipe::default();
        recipe.train.cuda_graphs = true;
        let experts = r#""model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "mlp_only_layers""#;
        assert!(check(&recipe, &config(&format!("{experts}: [0]"))).is_ok());
        assert!(check(&recipe, &config(&format!("{experts}: []"))).is_err());
    }
}
