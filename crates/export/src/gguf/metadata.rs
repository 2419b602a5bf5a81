//! The keys that describe a model: `general.*` and those of its architecture.
//!
//! Key names are from gguf-py/gguf/constants.py. The keys that each architecture of llama.cpp
//! reads, and its fixed choices, are in src/models/*.cpp. finetune refuses a model that llama.cpp
//! cannot compute with any keys. If only long texts differ, it exports the model with a note.

use serde_json::{Map, Value as Json};

use super::description::{ModelDescription, count, refused};
use super::types::GgufType;
use super::writer::{GgufMetadata, MetadataValue};
use super::{mixers, rope};
use crate::error::Result;
use crate::model::{AttentionMixer, GgufSliding, GgufWindows, MlpActivation, ModelConfig, TokenMixer};
use crate::ops::activation::PlainActivation;

/// The version of the block formats (`GGML_QNT_VERSION`).
const QUANTIZATION_VERSION: u32 = 2;

/// Describes the model `config`, read from its config.json `raw`. `name` is a display name.
///
/// # Errors
/// User: llama.cpp cannot compute this model.
pub(super) fn describe(
    config: &ModelConfig,
    raw: &Map<String, Json>,
    name: &str,
    kind: GgufType,
) -> Result<ModelDescription> {
    refuse_unknown(config)?;
    refuse_unsupported(config)?;
    let arch = config.family.gguf.architecture;
    let mut description = ModelDescription::default();
    let metadata = &mut description.metadata;
    metadata.text("general.architecture", arch);
    metadata.text("general.type", "model");
    metadata.text("general.name", name);
    metadata.set("general.file_type", MetadataValue::U32(kind as u32));
    metadata.set("general.quantization_version", MetadataValue::U32(QUANTIZATION_VERSION));
    for (key, number) in [
        ("vocab_size", config.vocab_size),
        ("context_length", config.max_position_embeddings),
        ("embedding_length", config.hidden_size),
        ("block_count", config.num_layers()),
    ] {
        metadata.set(format!("{arch}.{key}"), count(key, number)?);
    }
    metadata.set(format!("{arch}.feed_forward_length"), inner_widths(config)?);
    mixers::describe(config, arch, metadata)?;
    let attention_softcap = config.attentions().find_map(|attention| attention.softcap);
    let caps =
        [("attn_logit_softcapping", attention_softcap), ("final_logit_softcapping", config.logit_softcap)];
    for (key, cap) in caps {
        if let Some(cap) = cap {
            metadata.set(format!("{arch}.{key}"), MetadataValue::F32(cap as f32));
        }
    }
    factors(config, arch, metadata);
    mixers::experts(config, arch, metadata)?;
    windows(config, arch, &mut description)?;
    if config.plain_mlps().any(|mlp| mlp.activation == MlpActivation::Fixed(PlainActivation::Gelu)) {
        description
            .notes
            .push(format!("llama.cpp's {arch} computes GELU by tanh: its results differ slightly"));
    }
    let latent = config.blocks.iter().find_map(|block| match block.token_mixer {
        TokenMixer::Latent(mixer) => Some(mixer.norm.eps),
        _ => None,
    });
    if let Some(eps) = latent.filter(|eps| *eps != config.norm.eps) {
        description.notes.push(format!(
            "llama.cpp's {arch} computes the norms of latents with the epsilon of the others, {:e} instead of {eps:e}: its results differ slightly",
            config.norm.eps
        ));
    }
    rope::describe(config, raw, arch, &mut description)?;
    Ok(description)
}

/// Returns the inner width of the MLPs; a list if those of some layers are wider.
fn inner_widths(config: &ModelConfig) -> Result<MetadataValue> {
    let width = config.intermediate_size;
    if config.gated_mlps().all(|mlp| mlp.own_width.is_none()) {
        return count("feed_forward_length", width);
    }
    let widths = config.blocks.iter().map(|block| block.channel_mixer.mlp_width(width));
    let widths = widths.map(i32::try_from).collect::<std::result::Result<Vec<_>, _>>();
    let too_wide = |_| refused(format!("its MLPs are wider than {}", i32::MAX));
    widths.map(MetadataValue::I32s).map_err(too_wide)
}

/// Refuses attention within blocks of other lengths than llama.cpp's.
fn refuse_other_blocks(config: &ModelConfig, length: usize, arch: &str) -> Result<()> {
    let lengths = || config.attentions().filter_map(|attention| attention.chunk);
    let other_setting = match lengths().find(|other| *other != length) {
        Some(other) => format!("`attention_chunk_size` is {other}"),
        None if lengths().next().is_some() => return Ok(()),
        None => "no layer attends within blocks (`attention_chunk_size`, `layer_types`)".to_owned(),
    };
    Err(refused(format!("{other_setting}; llama.cpp's {arch} has blocks of {length} tokens")))
}

/// Sets the factors of an architecture that has keys for them.
fn factors(config: &ModelConfig, arch: &str, metadata: &mut GgufMetadata) {
    if config.family.gguf.reads_logit_factor {
        let factor = MetadataValue::F32(config.logit_factor as f32);
        metadata.set(format!("{arch}.logit_scale"), factor);
    }
    let Some(block) = config.blocks.first().filter(|_| config.family.gguf.reads_factors) else { return };
    let Some(attention) = block.token_mixer.attention() else { return };
    for (key, factor) in [
        ("embedding_scale", config.embedding_factor),
        ("attention.scale", attention.scale),
        ("residual_scale", block.residual_factor),
        ("logit_scale", 1.0 / config.logit_factor),
    ] {
        metadata.set(format!("{arch}.{key}"), MetadataValue::F32(factor as f32));
    }
}

/// Refuses a family that finetune does not write as GGUF.
pub(super) fn refuse_unknown(config: &ModelConfig) -> Result<()> {
    let family = config.family;
    if family.gguf.architecture.is_empty() {
        return Err(refused(format!("finetune does not write the family {} as GGUF yet", family.name)));
    }
    Ok(())
}

/// Refuses a model that differs from llama.cpp's fixed choices for its architecture.
fn refuse_unsupported(config: &ModelConfig) -> Result<()> {
    let facts = &config.family.gguf;
    let width = config.heads.q_width();
    let (attentions, mlps) = (|| config.attentions(), || config.gated_mlps());
    let plain = || config.plain_mlps();
    let faults = [
        mlps()
            .find(|mlp| mlp.activation != facts.activation)
            .map(|mlp| format!("the activation {:?}", mlp.activation)),
        (facts.heads_fill_hidden && width != config.hidden_size)
            .then(|| format!("heads of {width} columns in total, not hidden_size {}", config.hidden_size)),
        (!facts.reads_o_bias && attentions().any(|attention| attention.o_bias))
            .then(|| "a bias in o_proj".to_owned()),
        plain().find_map(|mlp| match mlp.activation {
            MlpActivation::Fixed(activation) => (!facts.plain_activations.contains(&activation))
                .then(|| format!("the activation {activation:?}")),
            MlpActivation::Xielu => (!facts.has_xielu).then(|| "the activation xielu".to_owned()),
        }),
        (!facts.reads_mlp_biases && (mlps().any(|mlp| mlp.bias) || plain().any(|mlp| mlp.bias)))
            .then(|| "biases in the MLP".to_owned()),
        (facts.needs_biases && plain().any(|mlp| !mlp.bias)).then(|| "no biases in the MLP".to_owned()),
        attentions()
            .find(|attention| !facts.attention_softcap.fits(attention.softcap))
            .map(|attention| format!("`attn_logit_softcapping` {:?}", attention.softcap)),
        (!facts.logit_softcap.fits(config.logit_softcap))
            .then(|| format!("`final_logit_softcapping` {:?}", config.logit_softcap)),
        mixers::fault(config),
        facts
            .tied_head
            .filter(|tied| *tied != config.tie_word_embeddings)
            .map(|tied| format!("`tie_word_embeddings` {}", !tied)),
    ];
    match faults.into_iter().flatten().next() {
        Some(fault) => {
            let arch = facts.architecture;
            Err(refused(format!("it has {fault}, which llama.cpp's {arch} has no key for")))
        }
        None => Ok(()),
    }
}

fn windows(config: &ModelConfig, arch: &str, description: &mut ModelDescription) -> Result<()> {
    let widths = || config.attentions().filter_map(|attention| attention.window);
    let (facts, shortest) = (config.family.gguf.windows, widths().min());
    let Some(GgufWindows { period, models }) = facts else {
        if let Some(shortest) = shortest.filter(|shortest| *shortest < config.max_position_embeddings) {
            description.notes.push(format!(
                "llama.cpp's {arch} ignores the sliding window of {shortest} tokens: its results differ for longer texts"
            ));
        }
        return no_local_rope_without_window(config);
    };
    if let GgufSliding::InBlocks(length) = models {
        refuse_other_blocks(config, length, arch)?;
    }
    if let GgufSliding::OfLayers(layers) = models
        && (layers == config.num_layers()) != shortest.is_some()
    {
        let actual = shortest.map_or("null".to_owned(), |shortest| shortest.to_string());
        return Err(refused(format!(
            "`sliding_window` is {actual} and `num_hidden_layers` {}; llama.cpp's {arch} slides at {layers} layers, and only then",
            config.num_layers()
        )));
    }
    if let Some(shortest) = shortest {
        if widths().any(|window| window != shortest) {
            return Err(refused(
                "its layers have sliding windows of different widths; llama.cpp reads one width".into(),
            ));
        }
        let window = count("sliding_window", shortest)?;
        description.metadata.set(format!("{arch}.attention.sliding_window"), window);
    }
    if shortest.is_some() || matches!(models, GgufSliding::Always | GgufSliding::InBlocks(_)) {
        pattern(config, period, description);
    }
    no_local_rope_without_window(config)
}

/// Sets the layers that slide, unless they are the architecture's default.
fn pattern(config: &ModelConfig, period: usize, description: &mut ModelDescription) {
    let is_local = |attention: &AttentionMixer| attention.window.is_some() || attention.chunk.is_some();
    let slides: Vec<bool> = config.attentions().map(is_local).collect();
    if slides.iter().enumerate().any(|(i, slides)| *slides != (i % period < period - 1)) {
        let key = format!("{}.attention.sliding_window_pattern", config.family.gguf.architecture);
        description.metadata.set(key, MetadataValue::Bools(slides));
    }
}

fn no_local_rope_without_window(config: &ModelConfig) -> Result<()> {
    let is_local = |rope: usize| rope != 0 && config.ropes[rope].has_positions();
    if config.attentions().any(|attention| is_local(attention.rope) && attention.window.is_none()) {
        Err(refused("it has layers with local rotary positions and no sliding window".into()))
    } else {
        Ok(())
    }
}
