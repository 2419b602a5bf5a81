//! The keys that say what a model is: `general.*` and those of its architecture.
//!
//! Key names are those of gguf-py/gguf/constants.py; what each architecture of llama.cpp reads, and what it computes
//! without asking, is in its src/models/*.cpp. A model that llama.cpp would compute otherwise, and that no key can mend,
//! is refused; one that it computes otherwise beyond some length is exported with a note.

use serde_json::{Map, Value as Json};

use super::description::{ModelDescription, architecture, count, refused};
use super::rope;
use super::types::GgufType;
use super::writer::MetadataValue;
use crate::error::Result;
use crate::model::{Family, ModelConfig};
use crate::ops::glu::Activation;

/// The version of the block formats (`GGML_QNT_VERSION`).
const QUANTIZATION_VERSION: u32 = 2;

/// The model `config`, read from `raw`, its config.json; `name` is for people.
///
/// # Errors
/// The user's: llama.cpp cannot compute this model.
pub(super) fn describe(
    config: &ModelConfig,
    raw: &Map<String, Json>,
    name: &str,
    kind: GgufType,
) -> Result<ModelDescription> {
    refuse_unsupported(config)?;
    let arch = architecture(config);
    let mut description = ModelDescription::default();
    let metadata = &mut description.metadata;
    metadata.text("general.architecture", arch);
    metadata.text("general.type", "model");
    metadata.text("general.name", name);
    metadata.set("general.file_type", MetadataValue::U32(kind.file_type()));
    metadata.set("general.quantization_version", MetadataValue::U32(QUANTIZATION_VERSION));
    let heads = config.heads;
    for (key, number) in [
        ("vocab_size", config.vocab_size),
        ("context_length", config.max_position_embeddings),
        ("embedding_length", config.hidden_size),
        ("block_count", config.num_layers()),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", heads.num_heads),
        ("attention.head_count_kv", heads.num_kv_heads),
        ("attention.key_length", heads.head_dim),
        ("attention.value_length", heads.head_dim),
    ] {
        metadata.set(format!("{arch}.{key}"), count(key, number)?);
    }
    let eps = MetadataValue::F32(config.norm.eps as f32);
    metadata.set(format!("{arch}.attention.layer_norm_rms_epsilon"), eps);
    let caps = [
        ("attn_logit_softcapping", config.attention_softcap),
        ("final_logit_softcapping", config.logit_softcap),
    ];
    for (key, cap) in caps {
        if let Some(cap) = cap {
            metadata.set(format!("{arch}.{key}"), MetadataValue::F32(cap as f32));
        }
    }
    windows(config, arch, &mut description)?;
    rope::describe(config, raw, arch, &mut description)?;
    Ok(description)
}

/// What llama.cpp computes without asking, where the model has something else.
fn refuse_unsupported(config: &ModelConfig) -> Result<()> {
    let (family, arch) = (config.family, architecture(config));
    let gemma = matches!(family, Family::Gemma2 | Family::Gemma3);
    let activation = if gemma { Activation::GeluTanh } else { Activation::Silu };
    let width = config.heads.q_width();
    let faults = [
        (config.activation != activation, format!("the activation {:?}", config.activation)),
        (
            matches!(family, Family::Qwen2 | Family::Phi3) && width != config.hidden_size,
            format!("heads that are {width} wide together, not hidden_size {}", config.hidden_size),
        ),
        (config.o_bias && arch != "llama", "a bias in o_proj".to_owned()),
        (config.mlp_bias && arch != "llama", "biases in the MLP".to_owned()),
        (
            config.attention_softcap.is_some() != (family == Family::Gemma2),
            format!("`attn_logit_softcapping` {:?}", config.attention_softcap),
        ),
        (
            config.logit_softcap.is_some() && !gemma
                || config.logit_softcap.is_none() && family == Family::Gemma2,
            format!("`final_logit_softcapping` {:?}", config.logit_softcap),
        ),
        (family == Family::Gemma2 && !config.tie_word_embeddings, "a head of its own".to_owned()),
    ];
    match faults.into_iter().find(|(found, _)| *found) {
        Some((_, fault)) => Err(refused(format!("it has {fault}, which llama.cpp's {arch} has no key for"))),
        None => Ok(()),
    }
}

fn windows(config: &ModelConfig, arch: &str, description: &mut ModelDescription) -> Result<()> {
    let windows = || config.layers.iter().filter_map(|layer| layer.window);
    let Some(shortest) = windows().min() else {
        if config.family == Family::Gemma2 {
            pattern(config, arch, description);
        }
        return no_local_rope_without_window(config);
    };
    if !matches!(config.family, Family::Gemma2 | Family::Gemma3) {
        if shortest < config.max_position_embeddings {
            description.notes.push(format!(
                "llama.cpp's {arch} ignores the sliding window of {shortest} tokens: its results differ for longer texts"
            ));
        }
        return Ok(());
    }
    if windows().any(|window| window != shortest) {
        return Err(refused("its layers have several sliding windows".into()));
    }
    let window = count("sliding_window", shortest)?;
    description.metadata.set(format!("{arch}.attention.sliding_window"), window);
    pattern(config, arch, description);
    no_local_rope_without_window(config)
}

/// Which layers slide, where it is not what the architecture takes for granted.
fn pattern(config: &ModelConfig, arch: &str, description: &mut ModelDescription) {
    let period = if config.family == Family::Gemma2 { 2 } else { 6 };
    let slides: Vec<bool> = config.layers.iter().map(|layer| layer.window.is_some()).collect();
    if slides.iter().enumerate().any(|(i, slides)| *slides != (i % period < period - 1)) {
        let key = format!("{arch}.attention.sliding_window_pattern");
        description.metadata.set(key, MetadataValue::Bools(slides));
    }
}

fn no_local_rope_without_window(config: &ModelConfig) -> Result<()> {
    if config.layers.iter().any(|layer| layer.rope != 0 && layer.window.is_none()) {
        Err(refused("it has layers with local rotary positions and no sliding window".into()))
    } else {
        Ok(())
    }
}
