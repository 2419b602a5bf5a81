//! Llama 4 (Scout, Maverick), text only: attention within blocks of tokens, layers without
//! positions whose queries grow instead, and experts whose inputs the router weighs, beside a
//! shared one.

use super::architecture::{Architecture, Composition, StackedExperts};
use super::gguf_facts::{GgufExperts, GgufFacts, GgufGrowth, GgufNoPositions, GgufSliding, GgufWindows};
use super::sizes::{MOST_WIDE, ModelSizes, key_heads_or};
use super::{parts, smollm3};
use crate::error::Result;
use crate::model::block_part::BlockPart;
use crate::model::composition::{AttentionMixer, BlockConfig, Experts, QkNormWidth, SharedExpert};
use crate::model::config_reader::{ConfigReader, refused};
use crate::model::rope::Rope;
use crate::ops::experts::{Router, RouterScores};

pub(super) static LLAMA4: Architecture = Architecture {
    head_dim: Some(128),
    intermediate_size: "intermediate_size_mlp",
    module_name,
    stacked_experts: Some(StackedExperts {
        gate_up: "feed_forward.experts.gate_up_proj",
        down: "feed_forward.experts.down_proj",
    }),
    transposes_stacks: true,
    may_be_dense: true,
    num_kv_heads: Some(key_heads_or::<8>),
    gguf: GgufFacts {
        experts: Some(GgufExperts {
            renormalizes: Some(false),
            has_step: true,
            scores: RouterScores::Sigmoid,
            ..GgufExperts::USUAL
        }),
        windows: Some(GgufWindows { period: 4, models: GgufSliding::InBlocks(8192) }),
        no_positions: GgufNoPositions::LastOf(4),
        fixed_growth: Some(GgufGrowth { beta: 0.1, every: 8192 }),
        unnormed_at: Some(128),
        rope_types: &["llama3", "yarn"],
        ..GgufFacts::usual("llama4")
    },
    ..parts::architecture("llama4", &["llama4_text"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let (mlp, experts) = (parts::gated_mlp(keys)?, experts(keys)?);
    let positions = layers_with_positions(keys, sizes.num_layers)?;
    let chunk = chunk(keys)?;
    let kinds = ["full_attention", "chunked_attention"];
    let default = |layer: usize| usize::from(positions[layer] && chunk.is_some());
    let kinds = parts::layer_kinds(keys, sizes, "layer_types", kinds, default)?;
    if chunk.is_none() && kinds.contains(&1) {
        let accepted = "a whole number above 0 beside `layer_types` with \"chunked_attention\"";
        return Err(refused("attention_chunk_size", "null", accepted));
    }
    let qk_norm = keys.bool_or("use_qk_norm", true)?.then_some(QkNormWidth::PlainHeadAfterRope);
    let attention = parts::attention(keys, sizes)?;
    let sparse = layers_with_experts(keys, sizes.num_layers)?;
    let block = |layer: usize| {
        let has_positions = positions[layer];
        let attention = AttentionMixer {
            chunk: chunk.filter(|_| kinds[layer] == 1),
            rope: usize::from(!has_positions),
            qk_norm: qk_norm.filter(|_| has_positions),
            ..attention
        };
        if sparse[layer] {
            BlockConfig::pre_norm(attention, experts)
        } else {
            BlockConfig::pre_norm(attention, mlp)
        }
    };
    let blocks = (0..sizes.num_layers).map(block).collect();
    let rope = parts::rope(keys, &parts::rope_context(keys, sizes, 5e5)?)?;
    let composition = parts::llama_like(keys, blocks, Rope { interleaved: true, ..rope })?;
    let ropes = [composition.ropes, vec![growing_queries(keys)?]].concat();
    parts::with_eps(keys, Composition { ropes, ..composition }, 1e-5)
}

/// Reads the experts: a sigmoid weighs the input of each chosen one, and no loss balances them.
fn experts(keys: &ConfigReader<'_>) -> Result<Experts> {
    let count = parts::expert_count(keys, &["num_local_experts", "num_experts"], 16)?;
    let chosen = parts::chosen_experts(keys, &["num_experts_per_tok"], count, 1)?;
    let width = keys.size("intermediate_size", MOST_WIDE)?;
    let plain = parts::plain_experts(keys, [count, chosen], width)?;
    Ok(Experts {
        router: Router { scores: RouterScores::Sigmoid, ..Router::softmax(chosen, false) },
        has_one_gate_up: true,
        weighs_inputs: true,
        shared: Some(SharedExpert { width, has_gate: false }),
        ..plain
    })
}

/// Reads the length of blocks of tokens; null: attention to all previous tokens.
fn chunk(keys: &ConfigReader<'_>) -> Result<Option<usize>> {
    let key = "attention_chunk_size";
    match if keys.mentions(key) { keys.opt_usize(key)? } else { Some(8192) } {
        Some(0) => Err(refused(key, 0, "a whole number above 0, or null for attention to all tokens")),
        chunk => Ok(chunk),
    }
}

/// Returns for each layer whether it has positions; an empty list counts as none.
fn layers_with_positions(keys: &ConfigReader<'_>, count: usize) -> Result<Vec<bool>> {
    if keys.opt_list("no_rope_layers")?.is_some_and(Vec::is_empty) {
        return smollm3::layers_by_interval(keys, count);
    }
    smollm3::layers_with_positions(keys, count)
}

/// Returns for each layer whether it has experts: those of `moe_layers`, or else each
/// `interleave_moe_layer_step`-th.
fn layers_with_experts(keys: &ConfigReader<'_>, count: usize) -> Result<Vec<bool>> {
    if let Some(listed) = parts::listed_layers(keys, "moe_layers", count)? {
        return Ok(listed);
    }
    let step = keys.opt_size("interleave_moe_layer_step", 1 << 16)?.unwrap_or(1);
    Ok((1..=count).map(|layer| layer.is_multiple_of(step)).collect())
}

/// Returns the rope of layers without positions, whose queries grow unless
/// `attn_temperature_tuning` is false.
fn growing_queries(keys: &ConfigReader<'_>) -> Result<Rope> {
    let rope = Rope::without_positions();
    // The first files have a number there.
    let key = "attn_temperature_tuning";
    let grows = match keys.get(key).and_then(serde_json::Value::as_f64) {
        Some(number) => number != 0.0,
        None => keys.bool_or(key, true)?,
    };
    if !grows {
        return Ok(rope);
    }
    let beta = keys.f64_or("attn_scale", 0.1)?;
    let every = keys.opt_usize("floor_scale")?.unwrap_or(8192);
    if beta < 0.0 {
        return Err(refused("attn_scale", beta, "0 or above"));
    }
    if every == 0 {
        return Err(refused("floor_scale", 0, "a whole number above 0"));
    }
    Ok(rope.with_growth_from_one(beta, every))
}

fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::GateProj => "feed_forward.gate_proj",
        BlockPart::UpProj => "feed_forward.up_proj",
        BlockPart::DownProj => "feed_forward.down_proj",
        BlockPart::Router => "feed_forward.router",
        BlockPart::ExpertGateUp(_) => "feed_forward.experts.{}.gate_up_proj",
        BlockPart::ExpertDown(_) => "feed_forward.experts.{}.down_proj",
        BlockPart::SharedGate => "feed_forward.shared_expert.gate_proj",
        BlockPart::SharedUp => "feed_forward.shared_expert.up_proj",
        BlockPart::SharedDown => "feed_forward.shared_expert.down_proj",
        other => parts::llama_name(other),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use crate::error::Result;
    use crate::model::ModelConfig;

    fn config(changes: &[(&str, Value)]) -> Result<ModelConfig> {
        let plain = json!({ "model_type": "llama4_text", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 8,
            "intermediate_size_mlp": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 4 });
        let mut keys: Map<String, Value> = plain.as_object().cloned().unwrap_or_default();
        keys.extend(changes.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
        ModelConfig::from_json(&Value::Object(keys).to_string(), "config.json")
    }

    #[test]
    fn layers_are_those_of_transformers() {
        let of = |changes: &[(&str, Value)]| {
            let config = config(changes).expect("a model");
            let of_layer = |attention: &crate::model::AttentionMixer| (attention.chunk, attention.rope);
            config.attentions().map(of_layer).collect::<Vec<_>>()
        };
        assert_eq!(
            of(&[("no_rope_layers", json!([])), ("no_rope_layer_interval", json!(2))]),
            [(Some(8192), 0), (None, 1)]
        );
        assert_eq!(
            of(&[("no_rope_layers", json!([0, 1])), ("attention_chunk_size", json!(6))]),
            [(None, 1), (Some(6), 0)]
        );
        assert_eq!(of(&[("attention_chunk_size", Value::Null)]), [(None, 0), (None, 0)]);
        let experts = |changes: &[(&str, Value)]| config(changes).expect("a model").experts().count();
        assert_eq!(experts(&[]), 2);
        assert_eq!(experts(&[("interleave_moe_layer_step", json!(2))]), 1);
        assert_eq!(experts(&[("moe_layers", json!([]))]), 0);
        assert_eq!(experts(&[("moe_layers", json!([1, 2, 40]))]), 1);
        // transformers writes this key beside all models.
        let count = ("num_local_experts", json!(16));
        assert_eq!(experts(&[("moe_layers", json!([])), count.clone()]), 0);
        let step = ("interleave_moe_layer_step", json!(2));
        assert_eq!(experts(&[("num_hidden_layers", json!(1)), step, count]), 0);
    }

    #[test]
    fn the_first_files_have_a_number_for_growing_queries() {
        let grows = |value: Value| {
            let rope = config(&[("attn_temperature_tuning", value)]).expect("a model").ropes.remove(1);
            rope.query_growth.is_some()
        };
        assert_eq!([json!(4), json!(0), json!(true), json!(false)].map(grows), [true, false, true, false]);
    }

    /// Each would train another model than config.json describes.
    #[test]
    fn what_is_not_computed_is_refused_by_key() {
        for (key, value) in [
            ("attention_chunk_size", json!(0)),
            ("floor_scale", json!(0)),
            ("attn_scale", json!(-0.1)),
            ("moe_layers", json!([-1])),
            ("no_rope_layers", json!([2, 1])),
            ("layer_types", json!(["sliding_attention", "full_attention"])),
            ("num_experts_per_tok", json!(17)),
            ("hidden_act", json!("relu")),
        ] {
            let refused = config(&[(key, value.clone())]).expect_err("another model");
            assert!(refused.causes().iter().any(|cause| cause.contains(key)), "{key} {value}: {refused:?}");
        }
        let kinds = ("layer_types", json!(["chunked_attention", "full_attention"]));
        let refused = config(&[("attention_chunk_size", Value::Null), kinds]).expect_err("no length");
        assert!(refused.to_string().contains("attention_chunk_size"), "{refused}");
    }
}
