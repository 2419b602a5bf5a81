//! Gemma 4, text only: plain norms, also of values, and a stored factor on each block's output. Per
//! layer of full attention it has four or five with a sliding window. The two kinds have heads and
//! ropes of their own. The 26B-A4B model has experts beside the MLP. In E2B and E4B blocks have
//! inputs of their own, and the last ones read keys and values of earlier ones of their kind.

use super::architecture::{Architecture, Composition, StackedExperts};
use super::gguf_facts::{GgufExperts, GgufFacts, GgufLocalRope, GgufSliding, GgufSoftcap, GgufWindows};
use super::sizes::{self, MOST_HEADS, MOST_TOKENS, MOST_WIDE, ModelSizes};
use super::{gemma, parts};
use crate::error::{Error, Result};
use crate::model::block_part::BlockPart;
use crate::model::composition::{
    AttentionMixer, BlockConfig, ChannelMixer, Experts, GatedMlp, MlpAndExperts, PerLayerInput, QkNormWidth,
    ResidualPlan, Sharing, Values,
};
use crate::model::config_reader::{ConfigReader, refused};
use crate::model::rope::{Rope, RopeContext};
use crate::ops::attention::Heads;
use crate::ops::experts::{MOST_CHOSEN, MOST_EXPERTS, Router};
use crate::ops::glu::Activation;
use crate::ops::rms_norm::NormKind;

/// The `model_type` of the text part of the 12B model, which has other defaults.
const UNIFIED: &str = "gemma4_unified_text";

/// The layer kinds, in the order of ropes.
pub(super) const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

pub(super) static GEMMA4: Architecture = Architecture {
    head_dim: Some(gemma::HEAD_DIM),
    num_kv_heads: Some(sizes::key_heads_or::<4>),
    ties_embeddings: true,
    module_name,
    stacked_experts: Some(StackedExperts { gate_up: "experts.gate_up_proj", down: "experts.down_proj" }),
    rotates_partly: true,
    gguf: GgufFacts {
        activation: Activation::GeluTanh,
        unscaled_scores: true,
        own_heads: true,
        logit_softcap: GgufSoftcap::Optional,
        experts: Some(GgufExperts { has_mlp: true, ..GgufExperts::USUAL }),
        windows: Some(GgufWindows { period: 1, models: GgufSliding::Always }),
        local_rope: Some(GgufLocalRope::OwnBase),
        rope_types: &["proportional"],
        ..GgufFacts::usual("gemma4")
    },
    ..parts::architecture("gemma4", &["gemma4_text", UNIFIED], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let is_unified = keys.opt_str("model_type")? == Some(UNIFIED);
    let mut kinds = parts::layer_kinds(keys, sizes, "layer_types", KINDS, |layer| {
        usize::from(!(layer + 1).is_multiple_of(6))
    })?;
    // transformers computes full attention in the last layer in any case.
    kinds.last_mut().into_iter().for_each(|kind| *kind = 0);
    let sharing = sharing(keys, &kinds, 0)?;
    let heads = heads_of_kinds(keys, sizes, &kinds)?;
    let keys_are_values = keys.bool_or("attention_k_eq_v", false)?;
    let window = parts::window(keys, Some(if is_unified { 1024 } else { 512 }))?;
    let attention = parts::attention(keys, sizes)?;
    let (mlp, experts) = (gemma::mlp(keys)?, experts(keys)?);
    let per_layer_input = per_layer_input(keys, mlp.activation, is_unified)?;
    let wide = if keys.bool_or("use_double_wide_mlp", false)? {
        Some(2 * keys.size("intermediate_size", MOST_WIDE)?)
    } else {
        None
    };
    let block = |(kind, sharing): (usize, Sharing)| {
        let reads = matches!(sharing, Sharing::Read { .. });
        let own_width = wide.filter(|_| reads);
        let mlp = GatedMlp { own_width, ..mlp };
        let channel_mixer: ChannelMixer = match experts {
            None => mlp.into(),
            Some(experts) => MlpAndExperts { mlp, experts }.into(),
        };
        let is_full = kind == 0;
        let attention = AttentionMixer {
            heads: heads[kind],
            window: window.filter(|_| !is_full),
            rope: kind,
            scale: 1.0,
            softcap: None,
            qk_norm: Some(QkNormWidth::Head),
            values: match () {
                () if reads => Values::Projected,
                () if is_full && keys_are_values => Values::NormedKeys,
                () => Values::Normed,
            },
            sharing,
            ..attention
        };
        BlockConfig {
            residual: ResidualPlan::PreAndPostNorm,
            has_output_factor: true,
            per_layer_input,
            ..BlockConfig::pre_norm(attention, channel_mixer)
        }
    };
    let blocks = kinds.into_iter().zip(sharing).map(block).collect();
    let composition = gemma::compose(keys, sizes, blocks, ropes(keys, sizes, heads)?, None)?;
    Ok(Composition { norm: NormKind { unit_offset: false, ..composition.norm }, ..composition })
}

/// Reads the experts beside the MLP, if the model has some.
fn experts(keys: &ConfigReader<'_>) -> Result<Option<Experts>> {
    if !keys.bool_or("enable_moe_block", false)? {
        return Ok(None);
    }
    let count = keys.size("num_experts", MOST_EXPERTS)?;
    Ok(Some(Experts {
        count,
        router: Router::softmax(keys.size("top_k_experts", count.min(MOST_CHOSEN))?, true),
        has_bias: false,
        has_f32_logits: false,
        layer_biases: false,
        width: keys.size("moe_intermediate_size", MOST_WIDE)?,
        activation: gemma::mlp(keys)?.activation,
        has_one_gate_up: false,
        weighs_inputs: false,
        aux_coefficient: 0.0,
        shared: None,
    }))
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

/// Reads the inputs that blocks have of their own.
fn per_layer_input(
    keys: &ConfigReader<'_>,
    activation: Activation,
    is_unified: bool,
) -> Result<Option<PerLayerInput>> {
    let key = "hidden_size_per_layer_input";
    let width = keys.opt_usize(key)?.unwrap_or(if is_unified { 0 } else { 256 });
    match width {
        0 => return Ok(None),
        1..=MOST_WIDE if !is_unified => {}
        _ if is_unified => return Err(refused(key, width, "0; this model type has no such inputs")),
        _ => return Err(refused(key, width, &format!("0 to {MOST_WIDE}"))),
    }
    let vocabulary = keys.size("vocab_size", MOST_TOKENS)?;
    let rows = keys.opt_usize("vocab_size_per_layer_input")?.unwrap_or(262_144);
    if rows != vocabulary {
        return Err(refused("vocab_size_per_layer_input", rows, &format!("vocab_size, {vocabulary}")));
    }
    Ok(Some(PerLayerInput { width, activation, rows }))
}

/// Returns the origin of the keys and values of each layer: the last `num_kv_shared_layers` read
/// those of the last layer of their kind before them. `default` is the family's number of these.
pub(super) fn sharing(keys: &ConfigReader<'_>, kinds: &[usize], default: usize) -> Result<Vec<Sharing>> {
    let key = "num_kv_shared_layers";
    let shared = keys.opt_usize(key)?.unwrap_or(default);
    let mut all = vec![Sharing::Own; kinds.len()];
    if shared == 0 {
        return Ok(all);
    }
    let first = kinds.len().checked_sub(shared);
    for layer in first.unwrap_or(0)..kinds.len() {
        let owner = first.and_then(|first| kinds[..first].iter().rposition(|kind| *kind == kinds[layer]));
        let Some(owner) = owner else {
            let accepted =
                format!("0, or a number that leaves a layer of {} before them", KINDS[kinds[layer]]);
            return Err(refused(key, shared, &accepted));
        };
        (all[owner], all[layer]) = (Sharing::Stored, Sharing::Read { owner });
    }
    Ok(all)
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
    let mut heads_by_kind: [Option<Heads>; 2] = [None; 2];
    for (layer, kind) in kinds.iter().enumerate() {
        let heads = match layers.opt_keys(&layer.to_string())? {
            Some(own) => heads_of_layer(&own, sizes.heads)?,
            None => sizes.heads,
        };
        if *heads_by_kind[*kind].get_or_insert(heads) != heads {
            return Err(Error::user("`per_layer_config` has different heads in layers of one kind")
                .because(format!("layer {layer} of {} has others than those before it", KINDS[*kind])));
        }
    }
    Ok(heads_by_kind.map(|heads| heads.unwrap_or(sizes.heads)))
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
        let rope_type = of_kind.opt_str("rope_type")?.unwrap_or("default");
        let partial = of_kind.f64_or("partial_rotary_factor", 1.0)?;
        if rope_type == "default" && partial != 1.0 {
            let accepted = "1 with rope_type \"default\"; \"proportional\" turns a part of each head";
            return Err(refused("partial_rotary_factor", partial, accepted));
        }
        let theta = of_kind.above_zero("rope_theta")?.ok_or_else(|| {
            Error::user(format!("`rope_parameters` has no rope_theta for \"{kind}\""))
                .because("every rope of this family needs its base")
        })?;
        Rope::read(Some(&of_kind), &RopeContext { head_dim, theta, ..context })
    };
    KINDS.into_iter().zip(heads).map(rope).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use crate::error::Result;
    use crate::model::ModelConfig;
    use crate::model::composition::Sharing;

    fn config(changes: &[(&str, Value)]) -> Result<ModelConfig> {
        let plain = json!({ "model_type": "gemma4_text", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
            "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"] });
        let mut keys: Map<String, Value> = plain.as_object().cloned().unwrap_or_default();
        keys.extend(changes.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
        ModelConfig::from_json(&Value::Object(keys).to_string(), "config.json")
    }

    /// The hub has the first notation, and transformers writes the second.
    #[test]
    fn both_notations_of_heads_are_equal() {
        let shared = ("attention_k_eq_v", json!(true));
        let hub = [shared.clone(), ("global_head_dim", json!(8)), ("num_global_key_value_heads", json!(1))];
        let own = json!({ "1": { "head_dim": 8, "num_key_value_heads": 1 } });
        let [hub, saved] = [&hub[..], &[shared, ("per_layer_config", own)]].map(config);
        let (hub, saved) = (hub.expect("a model"), saved.expect("a model"));
        assert_eq!((&hub.blocks, &hub.ropes), (&saved.blocks, &saved.ropes));
        let of_layer = |layer: usize| hub.blocks[layer].token_mixer.attention().expect("attention").heads;
        assert_eq!((of_layer(0).head_dim, of_layer(0).num_kv_heads), (4, 2));
        assert_eq!((of_layer(1).head_dim, of_layer(1).num_kv_heads), (8, 1));
        // Without values of keys, full attention has as many heads as the other layers.
        let count = ("num_global_key_value_heads", json!(1));
        let plain = config(&[count]).expect("a model");
        let heads = plain.blocks[1].token_mixer.attention().expect("attention").heads;
        assert_eq!((heads.head_dim, heads.num_kv_heads), (512, 2));
    }

    /// A quarter of a head's pairs turns: the first ones, with the frequencies of a whole head.
    #[test]
    fn the_rope_of_full_attention_is_proportional() {
        let ropes = config(&[("global_head_dim", json!(16))]).expect("a model").ropes;
        let frequency = |pair: i32| 1e6f32.powf(-2.0 * pair as f32 / 16.0);
        assert_eq!(ropes[0].inv_freq.len(), 8);
        for (pair, actual) in (0..).zip(&ropes[0].inv_freq) {
            let expected = if pair < 2 { frequency(pair) } else { 0.0 };
            assert!((actual - expected).abs() <= 1e-6 * expected, "{pair}: {actual}, expected {expected}");
        }
        assert_eq!(ropes[1].inv_freq.len(), 2);
    }

    #[test]
    fn the_last_layer_attends_to_all_tokens() {
        let kinds = json!(["sliding_attention", "sliding_attention"]);
        let model = config(&[("layer_types", kinds)]).expect("a model");
        let windows: Vec<Option<usize>> = model.attentions().map(|attention| attention.window).collect();
        assert_eq!(windows, [Some(512), None]);
        let vision = config(&[("use_bidirectional_attention", json!("vision"))]);
        assert!(vision.is_ok(), "tokens of images alone see what follows them");
    }

    #[test]
    fn the_last_layers_read_keys_of_the_last_layer_of_their_kind_before_them() {
        let kinds = [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ];
        let keys = [
            ("num_hidden_layers", json!(5)),
            ("layer_types", json!(kinds)),
            ("use_double_wide_mlp", json!(true)),
        ];
        let own = [("hidden_size_per_layer_input", json!(4)), ("vocab_size_per_layer_input", json!(8))];
        let shared = [("num_kv_shared_layers", json!(2))];
        let model = config(&[&keys[..], &own, &shared].concat()).expect("a model");
        let sharing: Vec<Sharing> = model.attentions().map(|attention| attention.sharing).collect();
        let read = |owner| Sharing::Read { owner };
        assert_eq!(sharing, [Sharing::Own, Sharing::Stored, Sharing::Stored, read(2), read(1)]);
        let widths: Vec<usize> = model.blocks.iter().map(|block| block.channel_mixer.mlp_width(24)).collect();
        assert_eq!((widths, model.per_layer_width(5)), (vec![24, 24, 24, 48, 48], 20));
        let unified = [("model_type", json!("gemma4_unified_text"))];
        for (changes, key) in [
            (&own[..1], "vocab_size_per_layer_input"),
            (&[&unified[..], &own].concat(), "hidden_size_per_layer_input"),
        ] {
            let refused = config(&[&keys[..], changes].concat()).expect_err("another model");
            assert!(refused.causes().iter().any(|cause| cause.contains(key)), "{refused:?}");
        }
    }

    /// Each would train another model than config.json describes.
    #[test]
    fn what_is_not_computed_is_refused_by_key() {
        let experts = [("enable_moe_block", json!(true)), ("num_experts", json!(4))];
        let width = ("moe_intermediate_size", json!(8));
        assert!(config(&[&experts[..], &[("top_k_experts", json!(2)), width.clone()]].concat()).is_ok());
        let part = json!({ "rope_theta": 1e4, "partial_rotary_factor": 0.5 });
        // Each size is accepted alone; the table of per-layer inputs has their product.
        let (rows, wide) = (json!(1 << 27), json!(1 << 22));
        let table = [("vocab_size", rows.clone()), ("vocab_size_per_layer_input", rows)];
        assert!(config(&table).is_ok());
        let table = [&table[..], &[("hidden_size_per_layer_input", wide)]].concat();
        let refused = config(&table).expect_err("too large").to_string();
        assert!(refused.contains("parameters"), "{refused}");
        for (key, value) in [
            ("hidden_size_per_layer_input", json!(1_u64 << 40)),
            ("num_kv_shared_layers", json!(1)),
            ("num_kv_shared_layers", json!(3)),
            ("use_bidirectional_attention", json!("all")),
            ("global_head_dim", json!(7)),
            ("num_experts", json!(4)),
            ("layer_types", json!(["linear_attention", "full_attention"])),
            ("per_layer_config", json!({ "1": { "sliding_window": 8 } })),
            ("per_layer_config", json!({ "2": { "head_dim": 8 } })),
            ("per_layer_config", json!({ "1": { "num_key_value_heads": 3 } })),
            ("rope_parameters", json!({ "full_attention": { "rope_theta": 1e6 } })),
            ("rope_parameters", json!({ "full_attention": {}, "sliding_attention": { "rope_theta": 1e4 } })),
            (
                "rope_parameters",
                json!({ "full_attention": { "rope_theta": 1e6 }, "sliding_attention": part }),
            ),
            ("hidden_activation", json!("relu")),
        ] {
            let refused = config(&[(key, value.clone())]).expect_err("another model");
            let is_named = refused.causes().iter().any(|cause| cause.contains(key) || cause.contains("head"));
            assert!(is_named, "{key} {value}: {refused:?}");
        }
        for (key, value) in [("top_k_experts", json!(5)), ("top_k_experts", Value::Null)] {
            let keys = [&experts[..], &[(key, value), width.clone()]].concat();
            let refused = config(&keys).expect_err("another model");
            assert!(refused.causes().iter().any(|cause| cause.contains(key)), "{refused:?}");
        }
        let own = json!({ "0": { "head_dim": 8 } });
        let uneven =
            [("layer_types", json!(["full_attention", "full_attention"])), ("per_layer_config", own)];
        assert!(config(&uneven).is_err(), "layers of one kind with different heads");
    }
}
