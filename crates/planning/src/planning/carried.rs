//! The memory of the state beside the hidden states: per-layer inputs, and keys and values that
//! blocks share.

use candle_core::DType;

use crate::model::{Carried, CarriedGradients, ModelConfig};
use crate::parallel::{ParamDesc, per_layer_inputs_train};

/// Returns the bytes of the state of `tokens` tokens, by tensor, and of its gradients, for
/// activations in `dtype`. Models without such a state have none.
pub(super) fn carried_parts(
    config: &ModelConfig,
    descs: &[ParamDesc],
    tokens: usize,
    dtype: DType,
) -> Vec<(&'static str, u64)> {
    let mut parts = Carried::parts(config, tokens, dtype);
    if !parts.is_empty() {
        let is_behind = per_layer_inputs_train(config, descs);
        parts.push(("their gradients", CarriedGradients::bytes(config, tokens, dtype, is_behind)));
    }
    parts.into_iter().map(|(what, bytes)| (what, bytes as u64)).collect()
}

/// Returns the sum of [`carried_parts`].
pub(super) fn carried_bytes(config: &ModelConfig, descs: &[ParamDesc], tokens: usize, dtype: DType) -> u64 {
    carried_parts(config, descs, tokens, dtype).iter().map(|(_, bytes)| bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Result;
    use crate::model::Segment;
    use crate::parallel::{LrGroup, ParamKind, Placements, UpdateRule};

    /// Four blocks of 16 columns each; keys and values of two kinds, with heads of 32 and of 16
    /// columns, two of them.
    #[test]
    fn what_trains_behind_the_inputs_decides_their_gradients() -> Result<()> {
        let text = r#"{"model_type": "gemma4_text", "vocab_size": 8, "vocab_size_per_layer_input": 8,
            "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16, "layer_types": ["sliding_attention", "full_attention",
            "sliding_attention", "full_attention"]}"#;
        let config = ModelConfig::from_json(text, "config.json")?;
        let trained = |name: &str, segment| {
            let kind = ParamKind::Trainable(UpdateRule { decay: true, lr_group: LrGroup::Base });
            ParamDesc::new(name.into(), vec![2, 2], Placements::REPLICATED, segment, kind)
        };
        let (inputs, shared) = (4 * 16, 2 * 2 * (32 + 16));
        let bytes =
            |desc: &ParamDesc| carried_bytes(&config, std::slice::from_ref(desc), 7, DType::BF16) as usize;
        let state = 7 * 2 * (inputs + shared) + 7 * 4 * shared;
        let of_block = trained("model.layers.0.mlp.up_proj.weight", Segment::Block(0));
        assert_eq!(bytes(&of_block), state);
        for (name, segment) in [
            ("model.embed_tokens.weight", Segment::Embed),
            ("model.per_layer_model_projection.lora_A.weight", Segment::Block(0)),
            ("model.per_layer_projection_norm.weight", Segment::Block(0)),
        ] {
            assert_eq!(bytes(&trained(name, segment)), state + 7 * 2 * inputs, "{name}");
        }
        Ok(())
    }
}
