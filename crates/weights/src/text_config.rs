//! The text part of a model for images: its config.json as that of a text model.
//!
//! Such a model has the settings of its text part in `text_config` (Qwen2.5-VL may have them beside
//! `vision_config`). It computes texts without images like a text model of that family
//! (transformers 5.24: `configuration_gemma3.py`, `configuration_gemma4.py`,
//! `configuration_gemma4_unified.py`, `configuration_llama4.py`, `configuration_mistral3.py`,
//! `configuration_qwen2_5_vl.py`, `configuration_qwen3_vl.py`, `configuration_qwen3_5.py`,
//! `configuration_qwen3_5_moe.py`).

use serde_json::{Map, Value, json};

/// A model for images with a supported text part.
struct VisionModel {
    /// The `model_type` of the whole model.
    model_type: &'static str,
    /// The `model_type` of its text part.
    text_type: &'static str,
    /// The `model_type` of the text model with the same computation.
    same_as: &'static str,
    /// The class of that text model.
    class: &'static str,
    /// The tie of embedding and head if the config.json of the whole model has no such key.
    tied: bool,
    /// True if a tie in the text part alone also counts.
    text_ties: bool,
    /// The base of the rotary frequencies if config.json has none; `None` for that of the text
    /// model.
    rope_theta: Option<f64>,
    /// Adds the defaults of keys that the text part may omit; `None` if it has them all.
    add_defaults: Option<fn(&mut Map<String, Value>)>,
}

/// Returns the usual model: embedding and head tied by the config.json of the whole model, the base
/// of the rotary frequencies that of the text model, all keys of the text part in config.json.
const fn vision(
    model_type: &'static str,
    text_type: &'static str,
    same_as: &'static str,
    class: &'static str,
) -> VisionModel {
    VisionModel {
        model_type,
        text_type,
        same_as,
        class,
        tied: true,
        text_ties: false,
        rope_theta: None,
        add_defaults: None,
    }
}

const VISION_MODELS: [VisionModel; 12] = [
    VisionModel {
        add_defaults: Some(fill_gemma3),
        ..vision("gemma3", "gemma3_text", "gemma3_text", "Gemma3ForCausalLM")
    },
    vision("gemma3n", "gemma3n_text", "gemma3n_text", "Gemma3nForCausalLM"),
    vision("gemma4", "gemma4_text", "gemma4_text", "Gemma4ForCausalLM"),
    vision("gemma4_unified", "gemma4_unified_text", "gemma4_unified_text", "Gemma4UnifiedForCausalLM"),
    VisionModel { tied: false, ..vision("llama4", "llama4_text", "llama4_text", "Llama4ForCausalLM") },
    vision("mistral3", "mistral", "mistral", "MistralForCausalLM"),
    vision("mistral3", "ministral3", "ministral3", "Ministral3ForCausalLM"),
    vision("mistral3", "mistral4", "mistral4", "Mistral4ForCausalLM"),
    VisionModel {
        tied: false,
        text_ties: true,
        rope_theta: Some(1e6),
        ..vision("qwen2_5_vl", "qwen2_5_vl_text", "qwen2", "Qwen2ForCausalLM")
    },
    VisionModel {
        tied: false,
        rope_theta: Some(5e5),
        ..vision("qwen3_vl", "qwen3_vl_text", "qwen3", "Qwen3ForCausalLM")
    },
    VisionModel {
        tied: false,
        text_ties: true,
        ..vision("qwen3_5", "qwen3_5_text", "qwen3_5_text", "Qwen3_5ForCausalLM")
    },
    VisionModel {
        tied: false,
        text_ties: true,
        ..vision("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM")
    },
];

/// Keys of the whole model that apply to its text part if that does not have them.
const SHARED: [&str; 7] = [
    "torch_dtype",
    "dtype",
    "quantization_config",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "transformers_version",
];

/// Returns the config.json of the text part of a model for images, with the `model_type` of the
/// whole. Returns `None` if `config` is of another model, or has an unsupported text part.
pub fn text_part(config: &Map<String, Value>) -> Option<(Map<String, Value>, String)> {
    let model_type = config.get("model_type")?.as_str()?;
    let of_type = || VISION_MODELS.iter().filter(|model| model.model_type == model_type);
    let usual = of_type().next()?;
    let flat = || config.contains_key("vision_config").then_some(config);
    let mut text = config.get("text_config").map_or_else(flat, Value::as_object)?.clone();
    text.shift_remove("vision_config");
    let named = text.get("model_type").and_then(Value::as_str).unwrap_or(usual.text_type);
    let named = if named == usual.model_type { usual.text_type } else { named };
    let model = of_type().find(|model| model.text_type == named)?;
    text.insert("model_type".into(), model.same_as.into());
    text.insert("architectures".into(), json!([model.class]));
    let ties = |keys: &Map<String, Value>| keys.get("tie_word_embeddings").and_then(Value::as_bool);
    let by_text = model.text_ties && ties(&text) == Some(true);
    text.insert("tie_word_embeddings".into(), (by_text || ties(config).unwrap_or(model.tied)).into());
    for key in SHARED {
        if let Some(value) = config.get(key).filter(|_| !text.contains_key(key)) {
            text.insert(key.into(), value.clone());
        }
    }
    if let Some(add_defaults) = model.add_defaults {
        add_defaults(&mut text);
    }
    if let Some(theta) = model.rope_theta {
        one_position(&mut text, theta);
    }
    Some((text, model_type.to_owned()))
}

/// Adds the defaults of `Gemma3TextConfig`, which config.json of the larger Gemma 3 omits.
fn fill_gemma3(text: &mut Map<String, Value>) {
    let defaults = json!({
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "pad_token_id": 0
    });
    for (key, value) in defaults.as_object().into_iter().flatten() {
        text.entry(key.clone()).or_insert_with(|| value.clone());
    }
}

/// Reduces Qwen's rotary positions in three directions to one, which is equal for text, by removing
/// the kind and its sections.
fn one_position(text: &mut Map<String, Value>, theta: f64) {
    let mut has_theta = text.contains_key("rope_theta");
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(Value::Object(rope)) = text.get_mut(key) else { continue };
        for section in ["mrope_section", "mrope_interleaved"] {
            rope.shift_remove(section);
        }
        for kind in ["type", "rope_type"] {
            if rope.get(kind).is_some_and(|kind_name| kind_name == "mrope") {
                rope.insert(kind.into(), "default".into());
            }
        }
        has_theta |= rope.contains_key("rope_theta");
    }
    if !has_theta {
        text.insert("rope_theta".into(), json!(theta));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(config: &Value) -> Option<Value> {
        let (text, _) = text_part(config.as_object()?)?;
        Some(Value::Object(text))
    }

    #[test]
    fn the_text_part_is_a_text_model() {
        let gemma = part(
            &json!({"model_type": "gemma3", "text_config": {"hidden_size": 8}, "torch_dtype": "bfloat16"}),
        );
        let gemma = gemma.unwrap_or_default();
        assert_eq!(gemma["model_type"], "gemma3_text");
        assert_eq!((&gemma["hidden_size"], &gemma["vocab_size"]), (&json!(8), &json!(262_208)));
        assert_eq!(
            (&gemma["tie_word_embeddings"], &gemma["torch_dtype"]),
            (&json!(true), &json!("bfloat16"))
        );
        let qwen = part(&json!({"model_type": "qwen2_5_vl", "hidden_size": 8, "vision_config": {},
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}));
        let qwen = qwen.unwrap_or_default();
        assert_eq!(qwen["rope_scaling"], json!({"type": "default"}));
        assert_eq!((&qwen["model_type"], &qwen["rope_theta"]), (&json!("qwen2"), &json!(1e6)));
        assert!(qwen.get("vision_config").is_none());
        for (named, same) in [
            (None, "mistral"),
            (Some("mistral"), "mistral"),
            (Some("ministral3"), "ministral3"),
            (Some("mistral4"), "mistral4"),
        ] {
            let mistral = part(&json!({"model_type": "mistral3", "text_config": {"model_type": named}}));
            assert_eq!(mistral.unwrap_or_default()["model_type"], same);
        }
        let gemma = part(&json!({"model_type": "gemma4_unified", "audio_config": {}, "vision_config": {},
            "text_config": {"model_type": "gemma4_unified_text", "tie_word_embeddings": true}}));
        let gemma = gemma.unwrap_or_default();
        assert_eq!(
            (&gemma["model_type"], &gemma["architectures"][0], &gemma["tie_word_embeddings"]),
            (&json!("gemma4_unified_text"), &json!("Gemma4UnifiedForCausalLM"), &json!(true))
        );
        let qwen =
            part(&json!({"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text"},
            "vision_config": {}, "tie_word_embeddings": true}));
        let qwen = qwen.unwrap_or_default();
        assert_eq!(qwen["model_type"], "qwen3_5_moe_text");
        assert_eq!(
            (&qwen["architectures"][0], &qwen["tie_word_embeddings"]),
            (&json!("Qwen3_5MoeForCausalLM"), &json!(true))
        );
    }

    #[test]
    fn other_models_have_none() {
        assert_eq!(part(&json!({"model_type": "gemma3_text", "hidden_size": 8})), None);
        assert_eq!(part(&json!({"model_type": "mistral3", "text_config": {"model_type": "llama"}})), None);
    }
}
