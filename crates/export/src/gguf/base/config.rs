//! config.json from the metadata of a GGUF file: the reverse of `metadata`.
//!
//! The settings come from the keys, the facts of the architecture (`GgufFacts`) and the tensors.
//! Then the exporter describes the composed model again. A key of the file with another value, or
//! one that was not read, is refused: the model would be another.

use serde_json::{Map, Value, json};

use super::super::GgufType;
use super::super::metadata;
use super::super::writer::MetadataValue;
use super::keys::{ArchKeys, is_set, shown, single};
use super::mixers::{self, HeadSettings};
use super::rope;
use crate::error::{ErrorContext as _, Result};
use crate::model::{self, Architecture, GgufSliding, GgufSoftcap, GgufWindows, ModelConfig};
use crate::weights::{GgufFile, GgufValue, StoredDtype};

/// The width of sliding windows in architectures that always have them.
const WINDOW: usize = 4096;

/// A model as config.json describes it.
pub(super) struct Described {
    pub(super) config: ModelConfig,
    /// The number of blocks that predict further tokens.
    pub(super) further_blocks: usize,
    pub(super) json: Map<String, Value>,
}

/// Reads the model that the metadata of `file` describe.
///
/// # Errors
/// User: a key is missing or mistyped, the architecture is unknown, or a key has a meaning that
/// finetune does not compute.
pub(super) fn read(file: &GgufFile) -> Result<Described> {
    let arch = match file.key("general.architecture") {
        Some(GgufValue::Text(arch)) => arch.as_str(),
        _ => return Err(file.refused("its key `general.architecture` is missing")),
    };
    let keys = ArchKeys::new(file, arch);
    let family = family(&keys)?;
    let mut json = settings(&keys, family)?;
    let whole = || format!("cannot use the model of {}", file.path().display());
    let composed = |json: &Map<String, Value>| {
        let text = Value::Object(json.clone()).to_string();
        ModelConfig::from_json(&text, "its metadata").during(whole)
    };
    let mut config = composed(&json)?;
    // In some families the key means the biases of q, k and v, in others also that of the output.
    if config.attentions().any(|attention| attention.o_bias) && !has_bias(file, "attn_output") {
        json.insert("attention_bias".to_owned(), false.into());
        config = composed(&json)?;
    }
    check(&keys, &config, &json).during(whole)?;
    keys.refuse_unread()?;
    Ok(Described { config, further_blocks: keys.further_blocks()?, json })
}

/// Chooses among the families of an architecture. If several differ by windows or by layers without
/// positions, the first has neither.
fn family(keys: &ArchKeys<'_>) -> Result<&'static Architecture> {
    let all = || model::families().filter(|family| !family.gguf.architecture.is_empty());
    let has_experts = keys.size("expert_count")?.is_some_and(|count| count > 0);
    let same = all().filter(|family| family.gguf.architecture == keys.arch);
    let families: Vec<&Architecture> = same.filter(|family| has_such_experts(family, has_experts)).collect();
    let special = keys.size("attention.sliding_window")?.is_some_and(|width| width > 0)
        || keys.flag("rope.scaling.finetuned")? == Some(false) && keys.get("rope.freq_base").is_none();
    let second = families.get(1).filter(|_| special);
    second.or(families.first()).copied().ok_or_else(|| {
        let mut names: Vec<&str> = all().map(|family| family.gguf.architecture).collect();
        names.sort_unstable();
        names.dedup();
        let experts = if has_experts { " with experts" } else { "" };
        keys.file.refused(format!(
            "its `general.architecture` is \"{}\"{experts}; accepted: {}",
            keys.arch.chars().take(80).collect::<String>(),
            names.join(", ")
        ))
    })
}

/// Returns whether models of the family have experts, or none.
fn has_such_experts(family: &Architecture, has_experts: bool) -> bool {
    family.gguf.experts.map_or(!has_experts, |facts| has_experts || facts.has_mlp)
}

/// The settings of config.json.
fn settings(keys: &ArchKeys<'_>, family: &Architecture) -> Result<Map<String, Value>> {
    let (file, facts) = (keys.file, &family.gguf);
    let table = file.tensor("token_embd.weight").filter(|table| table.shape.len() == 2);
    let table =
        table.ok_or_else(|| file.refused("its tensor `token_embd.weight` is missing or no matrix"))?;
    let (heads, hidden) = (keys.required("attention.head_count")?, keys.required("embedding_length")?);
    let layers = block_count(keys)?;
    let HeadSettings { json: mut settings, head_dim } = mixers::heads(keys, family, layers)?;
    keys.size("vocab_size")?;
    let model_type = family.model_types.first().copied().unwrap_or_default();
    let mut set = |key: &str, value: Value| settings.insert(key.to_owned(), value);
    set("architectures", json!([class_name(model_type)]));
    set("model_type", model_type.into());
    set("torch_dtype", dtype(file).config_name().into());
    set("vocab_size", table.shape[0].into());
    set("hidden_size", hidden.into());
    set("num_hidden_layers", layers.into());
    set("max_position_embeddings", keys.required("context_length")?.into());
    set("tie_word_embeddings", file.tensor("output.weight").is_none().into());
    for (key, module) in [
        ("attention_bias", if file.tensor("blk.0.attn_qkv.bias").is_some() { "attn_qkv" } else { "attn_q" }),
        ("qkv_bias", "attn_q"),
        ("attention_out_bias", "attn_output"),
        ("mlp_bias", "ffn_up"),
        ("use_bias", "attn_q"),
    ] {
        set(key, has_bias(file, module).into());
    }
    settings.extend(mixers::inner_widths(keys, family, layers)?);
    settings.extend(factors(keys, family, head_dim, hidden / heads.max(1), layers)?);
    settings.extend(mixers::experts(keys, family)?);
    settings.extend(windows(keys, family, layers)?);
    settings.extend(rope::settings(keys, facts, head_dim, layers)?);
    settings.extend(mixers::others(keys, family, layers)?);
    Ok(settings)
}

/// The largest accepted number of blocks, as in config.json.
const MOST_LAYERS: usize = 1 << 16;

/// Returns the number of blocks, each of which has tensors, without those that predict further
/// tokens.
fn block_count(keys: &ArchKeys<'_>) -> Result<usize> {
    let (all, further) = (keys.required("block_count")?, keys.further_blocks()?);
    let key = format!("{}.block_count", keys.arch);
    if all > MOST_LAYERS {
        return Err(keys.file.refused(format!("its key `{key}` is {all}; accepted: up to {MOST_LAYERS}")));
    }
    let Some(layers) = all.checked_sub(further).filter(|layers| *layers > 0) else {
        let accepted = format!("`{}.nextn_predict_layers`, {further}", keys.arch);
        return Err(keys.file.refused(format!("its key `{key}` is {all}; accepted: more than {accepted}")));
    };
    let last = format!("blk.{}.", layers - 1);
    if !keys.file.tensors().any(|tensor| tensor.name.starts_with(&last)) {
        return Err(keys.file.refused(format!("its key `{key}` is {all}, and it has no tensor `{last}*`")));
    }
    Ok(layers)
}

/// Returns whether the modules of this name have biases.
fn has_bias(file: &GgufFile, module: &str) -> bool {
    file.tensor(&format!("blk.0.{module}.bias")).is_some()
}

/// The class of a `model_type` in transformers.
fn class_name(model_type: &str) -> String {
    let base = model_type.strip_suffix("_text").unwrap_or(model_type);
    let mut name = String::new();
    let mut starts = true;
    for letter in base.chars() {
        let after_digit = name.ends_with(|last: char| last.is_ascii_digit());
        match letter {
            // "ernie4_5" keeps the mark between its digits.
            '_' => starts = true,
            digit if starts && digit.is_ascii_digit() && after_digit => {
                name.extend(['_', digit]);
                starts = false;
            }
            letter if starts => {
                name.extend(letter.to_uppercase());
                starts = false;
            }
            letter => name.push(letter),
        }
    }
    let name = match name.as_str() {
        "Smollm3" => "SmolLM3",
        "GptNeox" => "GPTNeoX",
        "Stablelm" => "StableLm",
        "HunyuanV1Dense" => "HunYuanDenseV1",
        "HunyuanV1Moe" => "HunYuanMoEV1",
        "MinimaxM2" => "MiniMaxM2",
        "Granitemoe" => "GraniteMoe",
        "Ernie4_5Moe" => "Ernie4_5_Moe",
        "Granitemoehybrid" => "GraniteMoeHybrid",
        regular => regular,
    };
    format!("{name}ForCausalLM")
}

/// The type of most bytes of the weights; that before quantization is unknown.
fn dtype(file: &GgufFile) -> StoredDtype {
    let bytes = |dtype: StoredDtype| {
        let of = file.tensors().filter(|tensor| tensor.kind.name() == dtype.name().to_lowercase());
        of.map(|tensor| tensor.range.len()).sum::<usize>()
    };
    let all: usize = file.tensors().map(|tensor| tensor.range.len()).sum();
    let most = [StoredDtype::F32, StoredDtype::F16].into_iter().find(|dtype| 2 * bytes(*dtype) > all);
    most.unwrap_or(StoredDtype::BF16)
}

/// Factors and soft-caps.
fn factors(
    keys: &ArchKeys<'_>,
    family: &Architecture,
    head_dim: usize,
    by_hidden: usize,
    layers: usize,
) -> Result<Map<String, Value>> {
    let (facts, mut json) = (&family.gguf, Map::new());
    if facts.reads_factors {
        let natural = 1.0 / (head_dim as f64).sqrt();
        for (key, name, default) in [
            ("embedding_multiplier", "embedding_scale", 1.0),
            ("attention_multiplier", "attention.scale", natural),
            ("residual_multiplier", "residual_scale", 1.0),
            ("logits_scaling", "logit_scale", 1.0),
        ] {
            // llama.cpp counts 0 as no factor.
            let factor = keys.float(name)?.filter(|factor| *factor != 0.0).unwrap_or(default);
            json.insert(key.to_owned(), factor.into());
        }
    }
    for (key, cap, support) in [
        ("attn_logit_softcapping", "attn_logit_softcapping", facts.attention_softcap),
        ("final_logit_softcapping", "final_logit_softcapping", facts.logit_softcap),
    ] {
        match (support, support == GgufSoftcap::Never) {
            (_, true) => {}
            (support, _) => {
                let value = keys.float(cap)?.filter(|cap| *cap != 0.0);
                if value.is_some() || support == GgufSoftcap::Optional {
                    json.insert(key.to_owned(), value.into());
                }
            }
        }
    }
    if let Some(at) = facts.scales_by_hidden_at {
        let width = if layers == at { by_hidden } else { head_dim };
        json.insert("query_pre_attn_scalar".to_owned(), width.into());
    }
    Ok(json)
}

/// The width of sliding windows and the layers that have one.
fn windows(keys: &ArchKeys<'_>, family: &Architecture, layers: usize) -> Result<Map<String, Value>> {
    let mut json = Map::new();
    const KEY: &str = "attention.sliding_window";
    let given = keys.size(KEY)?;
    let Some(GgufWindows { period, models }) = family.gguf.windows else {
        let given = given.filter(|width| *width > 0);
        // llama.cpp has windows in LFM2, whose family has none, and ignores the key in the others.
        if let Some(width) = given.filter(|_| family.gguf.has_short_convs) {
            let value = GgufValue::Integer(i64::try_from(width).unwrap_or(i64::MAX));
            return Err(keys.refused(KEY, &value, "no such key, 0: this family has no windows"));
        }
        json.extend(given.map(|width| ("sliding_window".to_owned(), width.into())));
        return Ok(json);
    };
    let width = match models {
        GgufSliding::InBlocks(_) if given == Some(0) => {
            let accepted = "no such key: its attention is within blocks of tokens";
            return Err(keys.refused(KEY, &GgufValue::Integer(0), accepted));
        }
        GgufSliding::InBlocks(length) => Some(length),
        GgufSliding::WithKey => given.filter(|width| *width > 0),
        GgufSliding::Always => Some(given.filter(|width| *width > 0).unwrap_or(WINDOW)),
        GgufSliding::OfLayers(count) => {
            (layers == count).then_some(given.filter(|width| *width > 0).unwrap_or(WINDOW))
        }
    };
    let pattern = keys.get("attention.sliding_window_pattern");
    let slides: Option<Vec<bool>> = match pattern {
        None => Some(by_period(period, layers)),
        Some(GgufValue::Integer(period)) => {
            usize::try_from(*period).ok().map(|period| by_period(period, layers))
        }
        Some(_) => keys.of_layers(pattern, layers, is_set)?,
    };
    let slides = slides.filter(|slides| slides.len() == layers).ok_or_else(|| {
        let accepted = format!("a period, or true or false for each of the {layers} layers");
        keys.refused("attention.sliding_window_pattern", pattern.unwrap_or(&GgufValue::Integer(0)), &accepted)
    })?;
    let in_blocks = matches!(models, GgufSliding::InBlocks(_));
    let local = if in_blocks { "chunked_attention" } else { "sliding_attention" };
    let kind = |slides: bool| if slides && width.is_some() { local } else { "full_attention" };
    let key = if in_blocks { "attention_chunk_size" } else { "sliding_window" };
    json.insert(key.to_owned(), width.into());
    json.insert("layer_types".to_owned(), slides.into_iter().map(kind).collect());
    Ok(json)
}

/// Returns the layers that slide: all but the last of each period; with a period of 0 all.
fn by_period(period: usize, layers: usize) -> Vec<bool> {
    (0..layers).map(|layer| period == 0 || layer % period < period - 1).collect()
}

/// Describes the composed model as the exporter does, and compares with the keys of the file.
fn check(keys: &ArchKeys<'_>, config: &ModelConfig, json: &Map<String, Value>) -> Result<()> {
    let described = metadata::describe(config, json, "", GgufType::F32)?;
    let start = format!("{}.", keys.arch);
    for (key, ours) in described.metadata.entries() {
        let Some(own) = key.strip_prefix(&start) else { continue };
        match keys.get(own) {
            // llama.cpp decides by the norm, and its converter writes the key without knowing.
            Some(_) if own == "use_parallel_residual" && config.family.gguf.parallel_by_norm => {}
            // The number of all blocks, from which that of the model has been taken.
            Some(_) if own == "block_count" => {}
            // Sections of axes, which are the same for text.
            Some(_) if own == "rope.dimension_sections" => {}
            Some(GgufValue::List(list)) if !keys.is_of_layers(list, config.num_layers())? => {
                return Err(keys.file.refused(format!(
                    "its key `{key}` has {} entries; accepted: one for each of the {} layers",
                    list.len(),
                    config.num_layers()
                )));
            }
            Some(theirs) if !agree(ours, single(theirs)) => {
                return Err(keys.file.refused(format!(
                    "its key `{key}` is {}; finetune computes such a model with {ours:?}",
                    shown(theirs)
                )));
            }
            // llama.cpp's converter of Phi-3 writes the tensors of longrope alone.
            None if own == "rope.scaling.type" && *ours == MetadataValue::Text("longrope".into()) => {}
            // A model with these keys differs from one without.
            None if own.starts_with("rope.scaling.") || own == "attention.temperature_scale" => {
                return Err(keys.file.refused(format!("its key `{key}` is missing; expected: {ours:?}")));
            }
            _ => {}
        }
    }
    for own in ["rope.scaling.factor", "rope.scaling.attn_factor"] {
        let key = format!("{start}{own}");
        let is_computed = described.metadata.entries().iter().any(|(computed, _)| *computed == key);
        if let Some(value) = keys.float(own)?.filter(|value| !is_computed && ![0.0, 1.0].contains(value)) {
            return Err(keys.file.refused(format!(
                "its key `{key}` is {value}; finetune computes such a model without this key"
            )));
        }
    }
    Ok(())
}

/// Returns whether two values of a key are the same.
fn agree(ours: &MetadataValue, theirs: &GgufValue) -> bool {
    let same = |ours: &i32, theirs: &GgufValue| *theirs == GgufValue::Integer(i64::from(*ours));
    match (ours, theirs) {
        // Those of blocks that predict further tokens may follow.
        (MetadataValue::I32s(ours), GgufValue::List(list)) => {
            ours.iter().zip(list).all(|(ours, theirs)| same(ours, theirs))
        }
        (MetadataValue::I32s(ours), one) => ours.iter().all(|ours| same(ours, one)),
        (MetadataValue::U32(ours), GgufValue::Integer(theirs)) => i64::from(*ours) == *theirs,
        (MetadataValue::F32(ours), GgufValue::Float(theirs)) => {
            (ours - theirs).abs() <= 1e-6 * ours.abs().max(theirs.abs())
        }
        (MetadataValue::Bool(ours), GgufValue::Bool(theirs)) => ours == theirs,
        (MetadataValue::Text(ours), GgufValue::Text(theirs)) => ours == theirs,
        // Lists, which the layers have been read from.
        (MetadataValue::Bools(_), _) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The classes in transformers' configurations of the golden models.
    #[test]
    fn every_family_has_its_class() {
        for (model_type, class) in [
            ("llama", "LlamaForCausalLM"),
            ("qwen2_moe", "Qwen2MoeForCausalLM"),
            ("gemma3_text", "Gemma3ForCausalLM"),
            ("smollm3", "SmolLM3ForCausalLM"),
            ("ernie4_5", "Ernie4_5ForCausalLM"),
            ("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
            ("seed_oss", "SeedOssForCausalLM"),
            ("exaone4", "Exaone4ForCausalLM"),
            ("gpt_neox", "GPTNeoXForCausalLM"),
            ("stablelm", "StableLmForCausalLM"),
            ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
            ("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"),
            ("minimax_m2", "MiniMaxM2ForCausalLM"),
            ("granitemoe", "GraniteMoeForCausalLM"),
            ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
            ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
            ("gpt_oss", "GptOssForCausalLM"),
            ("lfm2_moe", "Lfm2MoeForCausalLM"),
            ("llama4_text", "Llama4ForCausalLM"),
            ("deepseek_v3", "DeepseekV3ForCausalLM"),
        ] {
            assert_eq!(class_name(model_type), class);
        }
    }

    #[test]
    fn all_but_the_last_layer_of_a_period_slide() {
        assert_eq!(by_period(3, 5), [true, true, false, true, true]);
        assert_eq!(by_period(0, 2), [true, true]);
        assert_eq!(by_period(1, 2), [false, false]);
    }
}
