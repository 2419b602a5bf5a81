//! Gemma 3n, text only: several hidden states of which blocks compute one (AltUp), a residual of
//! low rank, inputs of each block as in Gemma 4 E2B, keys and values that the last blocks share,
//! and gates that are cut off in the first blocks. Per layer of full attention it has four with a
//! sliding window and a rope of their own.

use serde_json::Value;

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::sizes::{MOST_TOKENS, MOST_WIDE, ModelSizes, key_heads_or};
use super::{gemma, gemma4, parts};
use crate::error::{Error, Result};
use crate::model::composition::{
    AltUp, AttentionMixer, BlockConfig, GatedMlp, PerLayerInput, QkNormWidth, ResidualPlan, Sharing, Values,
};
use crate::model::config_reader::{ConfigReader, refused};
use crate::model::rope::RopeContext;
use crate::ops::rms_norm::NormKind;

/// The most hidden states: their factors are computed one by one.
const MOST_STREAMS: usize = 16;
/// Default of `intermediate_size`.
const INNER_WIDTH: usize = 16_384;

pub(super) static GEMMA3N: Architecture = Architecture {
    head_dim: Some(gemma::HEAD_DIM),
    num_kv_heads: Some(key_heads_or::<2>),
    ties_embeddings: true,
    module_name: gemma::module_name,
    inner_width: Some(|keys| Ok(inner_widths(keys)?.into_iter().max().unwrap_or(INNER_WIDTH))),
    // Its streams have tensors in llama.cpp that finetune does not write.
    gguf: GgufFacts { architecture: "", ..GgufFacts::usual("") },
    ..parts::architecture("gemma3n", &["gemma3n_text"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let kinds = parts::layer_kinds(keys, sizes, "layer_types", gemma4::KINDS, |layer| {
        usize::from(!(layer + 1).is_multiple_of(5))
    })?;
    let sharing = gemma4::sharing(keys, &kinds, 15)?;
    let window = parts::window(keys, Some(512))?;
    let attention = AttentionMixer {
        scale: 1.0,
        softcap: None,
        qk_norm: Some(QkNormWidth::Head),
        ..parts::attention(keys, sizes)?
    };
    let mlp = gemma::mlp(keys)?;
    let per_layer_input = Some(per_layer_input(keys, &mlp)?);
    let residual = ResidualPlan::AltUp(alt_up(keys)?);
    let widths = widths_of_layers(keys, sizes)?;
    let deviations = deviations_of_layers(keys, sizes)?;
    let block = |(((kind, sharing), width), gate_deviations): (((usize, Sharing), usize), Option<f64>)| {
        let reads = matches!(sharing, Sharing::Read { .. });
        let attention = AttentionMixer {
            window: window.filter(|_| kind == 1),
            rope: kind,
            values: if reads { Values::Projected } else { Values::Normed },
            sharing,
            ..attention
        };
        let mlp = GatedMlp { own_width: Some(width), gate_deviations, ..mlp };
        BlockConfig { residual, per_layer_input, ..BlockConfig::pre_norm(attention, mlp) }
    };
    let blocks = kinds.into_iter().zip(sharing).zip(widths).zip(deviations).map(block).collect();
    let context = parts::rope_context(keys, sizes, 1e6)?;
    let local = RopeContext { theta: keys.f64_or("rope_local_base_freq", 1e4)?, ..context };
    let ropes = parts::ropes_by_layer_type(keys, &context, &local)?;
    let composition = gemma::compose(keys, sizes, blocks, ropes, Some(30.0))?;
    Ok(Composition { norm: NormKind { unit_offset: false, ..composition.norm }, ..composition })
}

/// Reads the number of hidden states and the rank of the residual.
fn alt_up(keys: &ConfigReader<'_>) -> Result<AltUp> {
    let key = "altup_num_inputs";
    let streams = keys.opt_usize(key)?.unwrap_or(4);
    if !(2..=MOST_STREAMS).contains(&streams) {
        return Err(refused(key, streams, &format!("2 to {MOST_STREAMS}")));
    }
    let active = keys.opt_usize("altup_active_idx")?.unwrap_or(0);
    if active != 0 {
        return Err(refused("altup_active_idx", active, "0"));
    }
    if !keys.bool_or("altup_correct_scale", true)? {
        return Err(refused("altup_correct_scale", false, "true"));
    }
    Ok(AltUp { streams, laurel_rank: keys.opt_size("laurel_rank", MOST_WIDE)?.unwrap_or(64) })
}

/// Reads the inputs that blocks have of their own, and the rows of their table.
fn per_layer_input(keys: &ConfigReader<'_>, mlp: &GatedMlp) -> Result<PerLayerInput> {
    let width = keys.opt_size("hidden_size_per_layer_input", MOST_WIDE)?.unwrap_or(256);
    let rows = keys.opt_size("vocab_size_per_layer_input", MOST_TOKENS)?.unwrap_or(262_144);
    let vocabulary = keys.size("vocab_size", MOST_TOKENS)?;
    if rows > vocabulary {
        return Err(refused("vocab_size_per_layer_input", rows, &format!("up to vocab_size, {vocabulary}")));
    }
    Ok(PerLayerInput { width, activation: mlp.activation, rows })
}

/// Reads `intermediate_size`: a number for all layers, or one for each.
fn inner_widths(keys: &ConfigReader<'_>) -> Result<Vec<usize>> {
    let key = "intermediate_size";
    let Some(Value::Array(widths)) = keys.get(key) else {
        return Ok(vec![keys.opt_size(key, MOST_WIDE)?.unwrap_or(INNER_WIDTH)]);
    };
    let width = |value: &Value| {
        let width = value.as_u64().filter(|width| (1..=MOST_WIDE as u64).contains(width));
        width
            .map(|width| width as usize)
            .ok_or_else(|| refused(key, value, &format!("1 to {MOST_WIDE}, or such a number for each layer")))
    };
    widths.iter().map(width).collect()
}

/// Returns the inner width of each layer.
fn widths_of_layers(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Vec<usize>> {
    let widths = inner_widths(keys)?;
    match widths.len() {
        _ if !matches!(keys.get("intermediate_size"), Some(Value::Array(_))) => {
            Ok(widths.repeat(sizes.num_layers))
        }
        count if count == sizes.num_layers => Ok(widths),
        count => Err(one_for_each("intermediate_size", count, sizes)),
    }
}

/// Returns the cut-off of each layer's gates, in standard deviations; `None` for those without.
fn deviations_of_layers(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Vec<Option<f64>>> {
    let key = "activation_sparsity_pattern";
    let Some(shares) = keys.opt_list(key)? else {
        // As in transformers.
        let cut = if sizes.num_layers > 10 { 10 } else { 0 };
        return Ok((0..sizes.num_layers).map(|layer| (layer < cut).then(|| normal_quantile(0.95))).collect());
    };
    if shares.len() != sizes.num_layers {
        return Err(one_for_each(key, shares.len(), sizes));
    }
    let deviations = |share: &Value| {
        let number = share.as_f64().filter(|number| (0.0..=0.999_999).contains(number));
        let number = number.ok_or_else(|| refused(key, share, "shares from 0 to 0.999999"))?;
        Ok(Some(number).filter(|number| *number > 0.0).map(normal_quantile))
    };
    shares.iter().map(deviations).collect()
}

fn one_for_each(key: &str, count: usize, sizes: &ModelSizes) -> Error {
    Error::user(format!("`{key}` has {count} entries"))
        .because(format!("accepted: {}, one for each layer (num_hidden_layers)", sizes.num_layers))
}

/// Returns the quantile of the normal distribution at `share`, above 0 and at most 0.999999, as
/// transformers rounds it to f32: algorithm AS 241 (Wichura 1988).
fn normal_quantile(share: f64) -> f64 {
    let horner = |coefficients: &[f64], x: f64| coefficients.iter().rev().fold(0.0, |sum, c| sum * x + c);
    let share = f64::from(share as f32);
    let centred = share - 0.5;
    let quantile = if centred.abs() <= 0.425 {
        let r = 0.425 * 0.425 - centred * centred;
        centred * horner(&CENTRE[0], r) / horner(&CENTRE[1], r)
    } else {
        let r = (-share.min(1.0 - share).ln()).sqrt() - 1.6;
        (horner(&TAIL[0], r) / horner(&TAIL[1], r)).copysign(centred)
    };
    f64::from(quantile as f32)
}

/// The polynomials of AS 241 around the median, the numerator's first.
const CENTRE: [[f64; 8]; 2] = [
    [
        3.387_132_872_796_366_5,
        1.331_416_678_917_843_8e2,
        1.971_590_950_306_551_3e3,
        1.373_169_376_550_946e4,
        4.592_195_393_154_987e4,
        6.726_577_092_700_87e4,
        3.343_057_558_358_813e4,
        2.509_080_928_730_122_7e3,
    ],
    [
        1.0,
        4.231_333_070_160_091e1,
        6.871_870_074_920_579e2,
        5.394_196_021_424_751e3,
        2.121_379_430_158_659_7e4,
        3.930_789_580_009_271e4,
        2.872_908_573_572_194_3e4,
        5.226_495_278_852_854e3,
    ],
];
/// Those of its tails.
const TAIL: [[f64; 8]; 2] = [
    [
        1.423_437_110_749_683_5,
        4.630_337_846_156_546,
        5.769_497_221_460_691,
        3.647_848_324_763_204_5,
        1.270_458_252_452_368_4,
        2.417_807_251_774_506e-1,
        2.272_384_498_926_918_4e-2,
        7.745_450_142_783_414e-4,
    ],
    [
        1.0,
        2.053_191_626_637_759,
        1.676_384_830_183_803_8,
        6.897_673_349_851e-1,
        1.481_039_764_274_800_8e-1,
        1.519_866_656_361_645_7e-2,
        5.475_938_084_995_345e-4,
        1.050_750_071_644_416_9e-9,
    ],
];

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;
    use crate::model::ModelConfig;

    fn config(changes: &[(&str, Value)]) -> Result<ModelConfig> {
        let plain = json!({ "model_type": "gemma3n_text", "vocab_size": 8, "vocab_size_per_layer_input": 6,
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 4, "num_kv_shared_layers": 0 });
        let mut keys: Map<String, Value> = plain.as_object().cloned().unwrap_or_default();
        keys.extend(changes.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
        ModelConfig::from_json(&Value::Object(keys).to_string(), "config.json")
    }

    /// As `torch.distributions.Normal(0, 1).icdf` in f32.
    #[test]
    fn quantiles_are_those_of_the_normal_distribution() {
        for (share, quantile) in [
            (0.95, 1.644_853_6),
            (0.5, 0.0),
            (0.1, -1.281_551_6),
            (0.9, 1.281_551_6),
            (0.999, 3.090_232_3),
            (0.01, -2.326_347_8),
        ] {
            let found = normal_quantile(share);
            assert!((found - quantile).abs() < 2e-6 * quantile.abs().max(0.1), "{share}: {found}");
        }
    }

    #[test]
    fn layers_have_widths_and_cut_offs_of_their_own() {
        let widths = json!([24, 24, 20, 20, 8]);
        let shares = json!([0.95, 0.5, 0.0, 0.0, 0.0]);
        let model = config(&[("intermediate_size", widths), ("activation_sparsity_pattern", shares)]);
        let model = model.expect("a model");
        let widths = model.blocks.iter().map(|block| block.channel_mixer.mlp_width(model.intermediate_size));
        assert_eq!(widths.collect::<Vec<_>>(), [24, 24, 20, 20, 8]);
        let cut: Vec<bool> = model.gated_mlps().map(|mlp| mlp.gate_deviations.is_some()).collect();
        assert_eq!((cut, model.streams_width()), (vec![true, true, false, false, false], 64));
        let windows: Vec<bool> = model.attentions().map(|attention| attention.window.is_some()).collect();
        assert_eq!(windows, [true, true, true, true, false]);
        let deep = config(&[("num_hidden_layers", json!(12))]).expect("a model");
        assert_eq!(deep.gated_mlps().filter(|mlp| mlp.gate_deviations.is_some()).count(), 10);
    }

    /// Each would train another model than config.json describes.
    #[test]
    fn what_is_not_computed_is_refused_by_key() {
        for (key, value) in [
            ("altup_num_inputs", json!(1)),
            ("altup_num_inputs", json!(17)),
            ("altup_active_idx", json!(1)),
            ("altup_correct_scale", json!(false)),
            ("vocab_size_per_layer_input", json!(9)),
            ("hidden_size_per_layer_input", json!(0)),
            ("intermediate_size", json!([24, 24])),
            ("intermediate_size", json!([24, 24, 24, 24, 0])),
            ("activation_sparsity_pattern", json!([0.95])),
            ("activation_sparsity_pattern", json!([0.95, 0.0, 0.0, 0.0, 1.0])),
            ("num_kv_shared_layers", json!(4)),
            ("laurel_rank", json!(0)),
        ] {
            let refused = config(&[(key, value.clone())]).expect_err("another model");
            assert!(refused.causes().iter().any(|cause| cause.contains(key)), "{key} {value}: {refused:?}");
        }
    }
}
