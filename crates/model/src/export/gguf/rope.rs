//! Rotary positions as keys and tensors.
//!
//! llama.cpp computes the frequencies from a base, and applies linear and YaRN scaling by keys. It
//! reads the scaling of llama3 and longrope as a tensor of divisors, in the architectures that
//! support it. The divisors are quotients of finetune's own frequencies ([`crate::model::Rope`]).

use serde_json::{Map, Value as Json};

use super::description::{ModelDescription, count, refused};
use super::writer::MetadataValue;
use crate::error::Result;
use crate::model::{ModelConfig, Rope, RopeKind};

/// The scaling object of config.json for the rope of full attention.
struct RopeSpec<'a> {
    scaling: Option<&'a Map<String, Json>>,
}

impl<'a> RopeSpec<'a> {
    fn new(raw: &'a Map<String, Json>) -> Self {
        let object = |map: &'a Map<String, Json>, key: &str| map.get(key).and_then(Json::as_object);
        let given = object(raw, "rope_parameters").or_else(|| object(raw, "rope_scaling"));
        let of = |kind: &str| given.and_then(|given| object(given, kind));
        let (full, local) = (of("full_attention"), of("sliding_attention"));
        Self { scaling: if full.is_some() || local.is_some() { full } else { given } }
    }

    fn kind(&self) -> &'a str {
        let named = |key: &str| self.scaling?.get(key)?.as_str();
        let kind = named("rope_type").or_else(|| named("type")).unwrap_or("default");
        let divides = self.scaling.is_some_and(|scaling| scaling.contains_key("short_factor"));
        if kind == "yarn" && divides { "longrope" } else { kind }
    }

    fn number(&self, key: &str) -> Option<f64> {
        self.scaling?.get(key)?.as_f64()
    }

    /// Returns whether the ramp is the paper's: llama.cpp reads no key for it in these
    /// architectures.
    fn is_usual_yarn(&self) -> bool {
        let is = |key: &str, usual: f64| self.number(key).is_none_or(|found| found == usual);
        let truncates = self.scaling.and_then(|scaling| scaling.get("truncate")) != Some(&Json::Bool(false));
        is("beta_fast", 32.0) && is("beta_slow", 1.0) && truncates
    }
}

/// Adds the keys and tensors of the model's ropes.
///
/// # Errors
/// User: the architecture cannot compute this kind of rope.
pub(super) fn describe(
    config: &ModelConfig,
    raw: &Map<String, Json>,
    arch: &str,
    description: &mut ModelDescription,
) -> Result<()> {
    let (spec, facts) = (RopeSpec::new(raw), &config.family.gguf);
    let Some(rope) = config.ropes.first() else { return Ok(()) };
    let width = 2 * rope.inv_freq.len();
    if width != config.heads.head_dim && !facts.rotates_partly {
        return Err(refused(format!(
            "it rotates {width} of {} elements of a head; llama.cpp's {arch} rotates all",
            config.heads.head_dim
        )));
    }
    let metadata = &mut description.metadata;
    metadata.set(format!("{arch}.rope.dimension_count"), count("rotary width", width)?);
    metadata.set(format!("{arch}.rope.freq_base"), MetadataValue::F32(rope.theta as f32));
    if let Some(local) = config.ropes.get(1).filter(|_| facts.has_local_rope) {
        metadata.set(format!("{arch}.rope.freq_base_swa"), MetadataValue::F32(local.theta as f32));
        if !is_plain(local) {
            return Err(refused("the rotary positions of its sliding layers are scaled".into()));
        }
    }
    scale(config, &spec, rope, arch, description)
}

/// Returns whether `rope` has only the unscaled frequencies of its base.
fn is_plain(rope: &Rope) -> bool {
    rope.kind == RopeKind::Fixed
        && rope.attention_factor == 1.0
        && rope.inv_freq.iter().copied().eq(plain(rope))
}

/// Returns the frequencies without scaling, as `model` computes them.
fn plain(rope: &Rope) -> impl Iterator<Item = f32> {
    let (theta, len) = (rope.theta, rope.inv_freq.len());
    (0..len).map(move |i| 1.0 / (theta as f32).powf((2 * i) as f32 / (2 * len) as f32))
}

fn refuse_unknown(config: &ModelConfig, spec: &RopeSpec<'_>, arch: &str) -> Result<()> {
    let kind = spec.kind();
    let known = match kind {
        "default" | "linear" | "dynamic" => true,
        kind => {
            let is_known = config.family.gguf.rope_types.contains(&kind);
            is_known && (kind != "yarn" || spec.is_usual_yarn())
        }
    };
    if known {
        Ok(())
    } else {
        Err(refused(format!(
            "llama.cpp's {arch} cannot compute `rope_scaling` of type \"{kind}\" as it is set here"
        )))
    }
}

fn scale(
    config: &ModelConfig,
    spec: &RopeSpec<'_>,
    rope: &Rope,
    arch: &str,
    description: &mut ModelDescription,
) -> Result<()> {
    refuse_unknown(config, spec, arch)?;
    let mut set = |key: &str, value: MetadataValue| {
        description.metadata.set(format!("{arch}.rope.scaling.{key}"), value)
    };
    let ratio = || config.max_position_embeddings as f64 / rope.trained_positions as f64;
    let factor = spec.number("factor").unwrap_or_else(ratio);
    match spec.kind() {
        "linear" => {
            set("type", MetadataValue::Text("linear".into()));
            set("factor", MetadataValue::F32(factor as f32));
        }
        "yarn" => {
            set("type", MetadataValue::Text("yarn".into()));
            set("factor", MetadataValue::F32(factor as f32));
            set("original_context_length", count("original context", rope.trained_positions)?);
            // llama.cpp applies the paper's factor itself, and multiplies it by the key.
            let natural = if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 };
            let rest = f64::from(rope.attention_factor) / natural;
            if (rest - 1.0).abs() > 1e-6 {
                set("attn_factor", MetadataValue::F32(rest as f32));
            }
        }
        "llama3" => {
            let divisors = plain(rope).zip(&rope.inv_freq).map(|(plain, f)| plain / f);
            description.tensors.push(("rope_freqs.weight", divisors.collect()));
        }
        "longrope" | "su" => {
            set("type", MetadataValue::Text("longrope".into()));
            set("original_context_length", count("original context", rope.trained_positions)?);
            set("attn_factor", MetadataValue::F32(rope.attention_factor));
            if let RopeKind::LongRope { short, long } = &rope.kind {
                description.tensors.push(("rope_factors_long.weight", long.clone()));
                description.tensors.push(("rope_factors_short.weight", short.clone()));
            }
        }
        "dynamic" => description.notes.push(format!(
            "llama.cpp has no dynamic rotary scaling: beyond {} tokens its results differ",
            config.max_position_embeddings
        )),
        _ => {}
    }
    Ok(())
}
