//! The rules by which transformers 5.24 builds a tokenizer from a sentencepiece model.
//!
//! `AutoTokenizer` chooses a class by `model_type` of config.json and `tokenizer_class` of
//! tokenizer_config.json (`models/auto/tokenization_auto.py`).

use serde_json::{Map, Value};

/// The rules for a sentencepiece model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SpmClass {
    /// `LlamaTokenizer`: BPE after `▁` for spaces.
    Llama,
    /// `GemmaTokenizer`: BPE without a space before the text.
    Gemma,
    /// `TokenizersBackend`: the settings in the sentencepiece model.
    Generic,
}

/// Types of models whose tokenizer transformers always builds without a class.
const GENERIC: [&str; 22] = [
    "ernie4_5",
    "ernie4_5_moe",
    "glm",
    "glm4",
    "glm4_moe",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "internlm2",
    "internlm3",
    "minicpm3",
    "ministral",
    "ministral3",
    "mistral",
    "mistral3",
    "mixtral",
    "nemotron",
    "olmo2",
    "olmo3",
    "phi3",
    "stablelm",
];
/// Types of models whose class is `GemmaTokenizer`, unless tokenizer_config.json names another.
const GEMMA: [&str; 7] =
    ["gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "recurrent_gemma"];
/// Types of models whose class reads no sentencepiece model, with that class.
const WITHOUT_PIECES: [(&str, &str); 7] = [
    ("cohere", "CohereTokenizer"),
    ("cohere2", "CohereTokenizer"),
    ("olmoe", "GPTNeoXTokenizer"),
    ("qwen2_moe", "Qwen2Tokenizer"),
    ("qwen3", "Qwen2Tokenizer"),
    ("qwen3_moe", "Qwen2Tokenizer"),
    ("starcoder2", "GPT2Tokenizer"),
];

/// Chooses the rules by the contents of config.json and tokenizer_config.json.
///
/// # Errors
/// Fails with the name of a class whose rules finetune does not have.
pub(super) fn spm_class(model: &Map<String, Value>, config: &Map<String, Value>) -> Result<SpmClass, String> {
    refuse_code(config)?;
    let text = |file: &Map<String, Value>, key| file.get(key).and_then(Value::as_str).map(str::to_owned);
    let model_type = text(model, "model_type").unwrap_or_default();
    let named = text(config, "tokenizer_class").or_else(|| text(model, "tokenizer_class"));
    let without_pieces = WITHOUT_PIECES.iter().find(|(known, _)| *known == model_type);
    let name = match (named, without_pieces) {
        _ if GENERIC.contains(&model_type.as_str()) => return Ok(SpmClass::Generic),
        // transformers ignores the name in tokenizer_config.json.
        _ if model_type == "qwen2" => "Qwen2Tokenizer".to_owned(),
        (Some(named), _) => named,
        (None, _) if GEMMA.contains(&model_type.as_str()) => return Ok(SpmClass::Gemma),
        (None, Some((_, class))) => (*class).to_owned(),
        (None, None) => return Ok(SpmClass::Generic),
    };
    match name.strip_suffix("Fast").unwrap_or(&name) {
        "LlamaTokenizer" => Ok(SpmClass::Llama),
        "GemmaTokenizer" => Ok(SpmClass::Gemma),
        "PreTrainedTokenizer" | "TokenizersBackend" | "PythonBackend" => Ok(SpmClass::Generic),
        other => Err(format!(
            "its class is {other}; accepted for a sentencepiece model: LlamaTokenizer, GemmaTokenizer, PreTrainedTokenizerFast"
        )),
    }
}

/// Refuses a tokenizer whose rules are Python code beside the model.
///
/// # Errors
/// Fails if tokenizer_config.json names such code.
pub(super) fn refuse_code(config: &Map<String, Value>) -> Result<(), String> {
    let code = config.get("auto_map");
    let code = code.and_then(|map| if map.is_array() { Some(map) } else { map.get("AutoTokenizer") });
    match code {
        None => Ok(()),
        Some(code) => Err(format!(
            "`auto_map` of tokenizer_config.json names Python code for it ({code}), which finetune never runs"
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn class(model_type: &str, config: &Value) -> Result<SpmClass, String> {
        let model = json!({ "model_type": model_type });
        spm_class(model.as_object().unwrap(), config.as_object().unwrap())
    }

    /// The classes are those that `AutoTokenizer` of transformers 5.24 returns.
    #[test]
    fn classes_are_those_of_transformers() {
        let llama = json!({"tokenizer_class": "LlamaTokenizerFast"});
        let gemma = json!({"tokenizer_class": "GemmaTokenizer"});
        let fast = json!({"tokenizer_class": "PreTrainedTokenizerFast"});
        assert_eq!(class("llama", &llama), Ok(SpmClass::Llama));
        assert_eq!(class("llama", &json!({})), Ok(SpmClass::Generic));
        assert_eq!(class("llama", &fast), Ok(SpmClass::Generic));
        assert_eq!(class("mistral", &llama), Ok(SpmClass::Generic));
        assert_eq!(class("phi3", &llama), Ok(SpmClass::Generic));
        assert_eq!(class("gemma2", &json!({})), Ok(SpmClass::Gemma));
        assert_eq!(class("gemma2", &gemma), Ok(SpmClass::Gemma));
        assert_eq!(class("gemma", &llama), Ok(SpmClass::Llama));
        assert_eq!(class("gemma", &fast), Ok(SpmClass::Generic));
        assert_eq!(class("qwen3", &llama), Ok(SpmClass::Llama));
    }

    #[test]
    fn other_classes_are_refused_by_name() {
        assert!(
            class("llama", &json!({"tokenizer_class": "T5Tokenizer"})).unwrap_err().contains("T5Tokenizer")
        );
        let llama = json!({"tokenizer_class": "LlamaTokenizer"});
        assert!(class("qwen2", &llama).unwrap_err().contains("Qwen2Tokenizer"));
        assert!(class("cohere", &json!({})).unwrap_err().contains("CohereTokenizer"));
        for code in [json!({"AutoTokenizer": ["a.B", null]}), json!(["a.B", null])] {
            assert!(class("llama", &json!({"auto_map": code})).unwrap_err().contains("a.B"));
        }
        assert_eq!(class("llama", &json!({"auto_map": {"AutoModel": "a.B"}})), Ok(SpmClass::Generic));
    }
}
