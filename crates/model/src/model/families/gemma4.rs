//! Gemma 4, text only: plain norms, also of values, and a stored factor on each block's output. Per
//! layer of full attention it has five with a sliding window. The two kinds have heads and ropes of
//! their own. The 26B-A4B model has experts beside the MLP.

use super::architecture::{Architecture, Composition, StackedExperts};
use super::gguf_facts::GgufFacts;
use super::sizes::{self, MOST_HEADS, MOST_WIDE, ModelSizes};
use super::{gemma, parts};
use crate::error::{Error, Result};
use crate::model::block_part::BlockPart;
use crate::model::composition::{
    AttentionMixer, BlockConfig, ChannelMixer, Experts, MlpAndExperts, QkNormWidth, ResidualPlan, Values,
};
use crate::model::config_reader::{ConfigReader, refused};
use crate::model::rope::{Rope, RopeContext};
use crate::ops::attention::Heads;
use crate::ops::experts::{MOST_CHOSEN, MOST_EXPERTS, Router};
use crate::ops::rms_norm::NormKind;

/// The `model_type` of the text part of the 12B model, which has other defaults.
const UNIFIED: &str = "gemma4_unified_text";

/// The layer kinds, in the order of ropes.
const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

pub(super) static GEMMA4: Architecture = Architecture {
    head_dim: Some(gemma::HEAD_DIM),
    ties_embeddings: true,
    module_name,
    stacked_experts: Some(StackedExperts { gate_up: "experts.gate_up_proj", down: "experts.down_proj" }),
    gguf: GgufFacts::NONE,
    ..parts::architecture("gemma4", &["gemma4_text", UNIFIED], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let is_unified = keys.opt_str("model_type")? == Some(UNIFIED);
    refuse_small_models(keys, is_unified)?;
    let mut kinds = parts::layer_kinds(keys, sizes, "layer_types", KINDS, |layer| {
        usize::from(!(layer + 1).is_multiple_of(6))
    })?;
    // transformers computes full attention in the last layer in any case.
    kinds.last_mut().into_iter().for_each(|kind| *kind = 0);
    let heads = heads_of_kinds(keys, sizes, &kinds)?;
    let keys_are_values = keys.bool_or("attention_k_eq_v", false)?;
    let window = parts::window(keys, Some(if is_unified { 1024 } else { 512 }))?;
    let attention = parts::attention(keys, sizes)?;
    let channel_mixer = channel_mixer(keys)?;
    let block = |kind: usize| {
        let is_full = kind == 0;
        let attention = AttentionMixer {
            heads: heads[kind],
            window: window.filter(|_| !is_full),
            rope: kind,
            scale: 1.0,
            softcap: None,
            qk_norm: Some(QkNormWidth::Head),
            values: if is_full && keys_are_values { Values::NormedKeys } else { Values::Normed },
            ..attention
        };
        BlockConfig {
            residual: ResidualPlan::PreAndPostNorm,
            has_output_factor: true,
            ..BlockConfig::pre_norm(attention, channel_mixer)
        }
    };
    let blocks = kinds.into_iter().map(block).collect();
    let composition = gemma::compose(keys, sizes, blocks, ropes(keys, sizes, heads)?, None)?;
    Ok(Composition { norm: NormKind { unit_offset: false, ..composition.norm }, ..composition })
}

/// Reads the MLP, with the experts beside it if the model has some.
fn channel_mixer(keys: &ConfigReader<'_>) -> Result<ChannelMixer> {
    let mlp = parts::gated_mlp(keys)?;
    if !keys.bool_or("enable_moe_block", false)? {
        return Ok(mlp.into());
    }
    let count = keys.size("num_experts", MOST_EXPERTS)?;
    let experts = Experts {
        count,
        router: Router::softmax(keys.size("top_k_experts", count.min(MOST_CHOSEN))?, true),
        has_bias: false,
        width: keys.size("moe_intermediate_size", MOST_WIDE)?,
        activation: mlp.activation,
        aux_coefficient: 0.0,
        shared: None,
    };
    Ok(MlpAndExperts { mlp, experts }.into())
}

fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::Router => "router.proj",
        BlockPart::ExpertGate(_) => "experts.{}.gate_proj",
        BlockPart::ExpertUp(_) => "experts.{}.up_proj",
        BlockPart::ExpertDown(_) => "experts.{}.down_proj",
        other => gemma::module_name(other),
    }
}

/// Refuses the parts of E2B and E4B.
fn refuse_small_models(keys: &ConfigReader<'_>, is_unified: bool) -> Result<()> {
    let width = keys.opt_usize("hidden_size_per_layer_input")?.unwrap_or(if is_unified { 0 } else { 256 });
    let shared = keys.opt_usize("num_kv_shared_layers")?.unwrap_or(0);
    for (key, found, what) in [
        ("hidden_size_per_layer_input", width, "embeddings of each layer"),
        ("num_kv_shared_layers", shared, "keys and values that layers share"),
    ] {
        if found != 0 {
            return Err(refused(key, found, &format!("0; finetune does not compute {what} (E2B, E4B)"))
                .hint("choose the 12B, 26B-A4B or 31B model"));
        }
    }
    Ok(())
}

/// Returns the heads of layers of full and of sliding attention: by `per_layer_config`, as
/// transformers writes it, or else by keys for full attention.
fn heads_of_kinds(keys: &ConfigReader<'_>, sizes: &ModelSizes, kinds: &[usize]) -> Result<[Heads; 2]> {
    let Some(layers) = keys.opt_keys("per_layer_config")? else {
        let own_counts = keys.bool_or("attention_k_eq_v", false)?;
        let count = keys.opt_size("num_global_key_value_heads", MOST_HEADS)?.filter(|_| own_counts);
        let head_dim = keys.opt_size("global_head_dim", MOST_HEADS)?.unwrap_or(512);
        let full = Heads { head_dim, num_kv_heads: count.unwrap_or(sizes.heads.num_kv_heads), ..sizes.heads };
        return Ok([sizes::checked(full)?, sizes.heads]);
    };
    let is_layer = |key: &String| key.parse().is_ok_and(|layer: usize| layer < kinds.len());
    if let Some(other) = layers.texts().keys().find(|key| !is_layer(key)) {
        let accepted = format!("the numbers of layers, 0 to {}", kinds.len() - 1);
        return Err(refused("per_layer_config", format!("of layer \"{other}\""), &accepted));
    }
    let mut found: [Option<Heads>; 2] = [None; 2];
    for (layer, kind) in kinds.iter().enumerate() {
        let heads = match layers.opt_keys(&layer.to_string())? {
            Some(own) => heads_of_layer(&own, sizes.heads)?,
            None => sizes.heads,
        };
        if *found[*kind].get_or_insert(heads) != heads {
            return Err(Error::user("`per_layer_config` has different heads in layers of one kind")
                .because(format!("layer {layer} of {} has others than those before it", KINDS[*kind])));
        }
    }
    Ok(found.map(|heads| heads.unwrap_or(sizes.heads)))
}

/// Returns the heads of a layer with keys of its own.
fn heads_of_layer(own: &ConfigReader<'_>, usual: Heads) -> Result<Heads> {
    let known = ["head_dim", "num_key_value_heads"];
    if let Some(other) = own.texts().keys().find(|key| !known.contains(&key.as_str())) {
        return Err(refused("per_layer_config", format!("a change of \"{other}\""), &known.join(", ")));
    }
    sizes::checked(Heads {
        head_dim: own.opt_size("head_dim", MOST_HEADS)?.unwrap_or(usual.head_dim),
        num_kv_heads: own.opt_size("num_key_value_heads", MOST_HEADS)?.unwrap_or(usual.num_kv_heads),
        ..usual
    })
}

/// Reads the ropes of both kinds of layers.
fn ropes(keys: &ConfigReader<'_>, sizes: &ModelSizes, heads: [Heads; 2]) -> Result<Vec<Rope>> {
    let defaults = serde_json::json!({
        "full_attention": { "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6 },
        "sliding_attention": { "rope_type": "default", "rope_theta": 1e4 },
    });
    let parameters = match keys.opt_keys("rope_parameters")? {
        Some(parameters) => parameters,
        None => ConfigReader::new(&defaults)?,
    };
    let context = parts::rope_context(keys, sizes, 1e4)?;
    let rope = |(kind, Heads { head_dim, .. }): (&str, Heads)| {
        let of_kind = parameters.opt_keys(kind)?.ok_or_else(|| {
            Error::user(format!("`rope_parameters` has no \"{kind}\""))
                .because(format!("every model of this family has {} and {}", KINDS[0], KINDS[1]))
        })?;
        Rope::read(Some(&of_kind), &RopeContext { head_dim, ..context })
    };
    KINDS.into_iter().zip(heads).map(rope).collect()
}
