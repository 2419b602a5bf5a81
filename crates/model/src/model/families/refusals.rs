//! Refusals that hold for every family.

use super::parts;
use crate::error::{Error, Result};
use crate::model::config::ModelConfig;
use crate::model::config_reader::{ConfigReader, refused};
use crate::model::layout::{BlockLayout, WeightShape};

/// Maximum number of parameters: a thousand times that of the largest models, with byte counts that
/// fit into 64 bits.
const MOST_PARAMETERS: u128 = 1 << 50;

/// Keys of features that the engine does not compute, unless the value is zero or false.
const UNSUPPORTED: [&str; 1] = ["use_bidirectional_attention"];

/// Keys of experts, in the families that have none here.
const EXPERTS: [&str; 2] = ["num_local_experts", "num_experts"];

/// Keys of dropout inside a model, which transformers computes in training and the engine does not.
const DROPOUTS: [&str; 6] = [
    "attention_dropout",
    "residual_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "embedding_dropout",
    "hidden_dropout",
];

/// Returns the keys of dropout above 0 with their values: "`attention_dropout` 0.1".
pub(super) fn dropouts(keys: &ConfigReader<'_>) -> Result<Vec<String>> {
    let mut warnings = Vec::new();
    for key in DROPOUTS {
        match keys.f64_or(key, 0.0)? {
            0.0 => {}
            above if (0.0..1.0).contains(&above) => warnings.push(format!("`{key}` {above}")),
            other => return Err(refused(key, other, "from 0 to below 1")),
        }
    }
    Ok(warnings)
}

pub(super) fn refuse_unsupported(keys: &ConfigReader<'_>) -> Result<()> {
    refuse(keys, &UNSUPPORTED, "choose a causal model")
}

/// Refuses ropes of a part of each head, in a family whose code in transformers rotates whole heads
/// whatever `partial_rotary_factor` is.
pub(super) fn refuse_partial_rope(keys: &ConfigReader<'_>) -> Result<()> {
    let refuse = |keys: &ConfigReader<'_>| {
        let key = "partial_rotary_factor";
        let part = keys.opt_f64(key)?.filter(|part| *part != 1.0);
        let accepted = "1, no such key: this family rotates whole heads";
        part.map_or(Ok(()), |part| Err(refused(key, part, accepted)))
    };
    refuse(keys)?;
    let Some(scaling) = parts::rope_scaling(keys)? else { return Ok(()) };
    refuse(&scaling)?;
    for kind in ["full_attention", "sliding_attention"] {
        scaling.opt_keys(kind)?.map_or(Ok(()), |of_kind| refuse(&of_kind))?;
    }
    Ok(())
}

/// Refuses experts in a family that has none.
pub(super) fn refuse_experts(keys: &ConfigReader<'_>) -> Result<()> {
    // One expert is an MLP.
    let is_one = |key: &&str| keys.get(key).and_then(serde_json::Value::as_f64) == Some(1.0);
    let several: Vec<&str> = EXPERTS.into_iter().filter(|key| !is_one(key)).collect();
    refuse(keys, &several, "choose a model without experts")
}

fn refuse(keys: &ConfigReader<'_>, unsupported: &[&str], hint: &str) -> Result<()> {
    for key in unsupported {
        // Bidirectional "vision" attention is among the tokens of images alone.
        let asks = keys.get(key).is_some_and(|v| {
            v.as_f64() != Some(0.0) && v.as_bool() != Some(false) && v.as_str() != Some("vision")
        });
        if asks {
            let value = keys.get(key).map(ToString::to_string).unwrap_or_default();
            return Err(Error::user(format!("`{key}` is {value}"))
                .because("this engine does not compute it; accepted: no such key, null, 0, false")
                .hint(hint));
        }
    }
    Ok(())
}

/// Refuses sizes whose product is too large. Each may be valid alone, but shapes and memory are
/// computed in 64 bits.
pub(super) fn refuse_too_large(config: &ModelConfig) -> Result<()> {
    let elements = |weight: WeightShape| weight.dims().iter().map(|dim| *dim as u128).product::<u128>();
    let block = |layer| -> u128 {
        BlockLayout::new(config, layer).modules().iter().map(|module| elements(module.weight)).sum()
    };
    let blocks: u128 = (0..config.num_layers()).map(block).sum();
    let per_layer: u128 =
        config.blocks.iter().flat_map(|block| &block.per_layer_input).map(|input| input.width as u128).sum();
    let tables = config.vocab_size as u128 * 2 * config.hidden_size as u128
        + config.per_layer_rows() as u128 * per_layer;
    let all = blocks + tables;
    if all <= MOST_PARAMETERS {
        return Ok(());
    }
    Err(Error::user(format!("the sizes in config.json give {all} parameters"))
        .because(format!("num_hidden_layers {}, {}", config.num_layers(), config.dimensions()))
        .because(format!("accepted: up to {MOST_PARAMETERS}")))
}
