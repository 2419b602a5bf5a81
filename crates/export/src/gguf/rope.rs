//! Rotary positions as keys and tensors.
//!
//! llama.cpp computes the frequencies from a base, and applies linear and YaRN scaling by keys. It
//! reads the scaling of llama3 and longrope as a tensor of divisors, in the architectures that
//! support it. The divisors are quotients of finetune's own frequencies ([`crate::model::Rope`]).

use serde_json::{Map, Value as Json};

use super::description::{ModelDescription, count, refused};
use super::writer::MetadataValue;
use crate::error::Result;
use crate::model::{GgufFacts, GgufGrowth, GgufLocalRope, ModelConfig, QueryGrowth, Rope, RopeKind};

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

    /// Returns whether the ends of yarn's ramp are whole numbers.
    fn truncates(&self) -> bool {
        self.scaling.and_then(|scaling| scaling.get("truncate")) != Some(&Json::Bool(false))
    }

    /// Returns whether llama.cpp computes the ramp of yarn: the paper's, unless keys set it.
    fn is_usual_yarn(&self, facts: &GgufFacts) -> bool {
        let is = |key: &str, usual: f64| self.number(key).is_none_or(|value| value == usual);
        let known = self.truncates() || facts.rounds_yarn_ramp;
        known && (facts.reads_yarn_ramp || is("beta_fast", 32.0) && is("beta_slow", 1.0))
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
    refuse_other_layers(config, arch)?;
    refuse_other_growth(config, arch)?;
    let Some(rope) = config.ropes.first().filter(|rope| rope.has_positions()) else {
        description.metadata.set(format!("{arch}.rope.scaling.finetuned"), MetadataValue::Bool(false));
        return Ok(());
    };
    let width = 2 * rope.inv_freq.len();
    let rotated = config.attentions().find(|attention| attention.rope == 0);
    let head_dim = rotated.map_or(config.heads.head_dim, |attention| attention.heads.head_dim);
    if width != head_dim && !facts.rotates_partly {
        return Err(refused(format!(
            "it rotates {width} of {head_dim} elements of a head; llama.cpp's {arch} rotates all"
        )));
    }
    let metadata = &mut description.metadata;
    metadata.set(format!("{arch}.rope.dimension_count"), count("rotary width", width)?);
    metadata.set(format!("{arch}.rope.freq_base"), MetadataValue::F32(rope.theta as f32));
    local(config, rope, arch, description)?;
    let full = FullRope { config, spec, rope, arch };
    full.scale(description)?;
    full.growth(description)
}

/// The rope of full attention.
struct FullRope<'a> {
    config: &'a ModelConfig,
    spec: RopeSpec<'a>,
    rope: &'a Rope,
    arch: &'a str,
}

/// Refuses a model whose layers without positions are not those of its architecture.
fn refuse_other_layers(config: &ModelConfig, arch: &str) -> Result<()> {
    let missing: Vec<bool> =
        config.attentions().map(|attention| !config.ropes[attention.rope].has_positions()).collect();
    let slides: Vec<bool> = config.attentions().map(|attention| attention.window.is_some()).collect();
    let wanted = config.family.gguf.no_positions.wanted(&missing, &slides);
    if missing == wanted {
        return Ok(());
    }
    let layers =
        |of: &[bool]| of.iter().enumerate().filter(|(_, is)| **is).map(|(i, _)| i).collect::<Vec<_>>();
    Err(refused(format!(
        "its layers without positions are {:?} (`no_rope_layers`, `layer_types`); those of llama.cpp's {arch} are {:?}",
        layers(&missing),
        layers(&wanted)
    )))
}

/// Refuses a model whose queries in layers without positions do not grow as those of its
/// architecture.
fn refuse_other_growth(config: &ModelConfig, arch: &str) -> Result<()> {
    let Some(GgufGrowth { beta, every }) = config.family.gguf.fixed_growth else { return Ok(()) };
    let ropes = config.attentions().map(|attention| &config.ropes[attention.rope]);
    let fits = |growth: QueryGrowth| growth.first == 1 && growth.beta == beta && growth.original == every;
    let other = ropes.filter(|rope| !rope.has_positions()).find(|rope| !rope.query_growth.is_some_and(fits));
    let Some(other) = other else { return Ok(()) };
    let description = match other.query_growth {
        Some(growth) => format!("grow by {} at each {}", growth.beta, growth.original),
        None => "do not grow".to_owned(),
    };
    Err(refused(format!(
        "queries of its layers without positions {description} (`attn_scale`, `floor_scale`, `attn_temperature_tuning`); those of llama.cpp's {arch} grow by {beta} at each {every} positions"
    )))
}

/// Adds the rotary positions of sliding layers.
fn local(config: &ModelConfig, rope: &Rope, arch: &str, description: &mut ModelDescription) -> Result<()> {
    let is_used = config.attentions().any(|attention| attention.rope == 1);
    let local = config.family.gguf.local_rope.zip(config.ropes.get(1)).filter(|_| is_used);
    let Some((kind, local)) = local else { return Ok(()) };
    if kind == GgufLocalRope::SameBase && local.theta != rope.theta {
        return Err(refused(format!(
            "`rope_theta` is {} in sliding layers and {} in the others; llama.cpp's {arch} has one",
            local.theta, rope.theta
        )));
    }
    if !is_plain(local) {
        return Err(refused("the rotary positions of its sliding layers are scaled".into()));
    }
    let base = MetadataValue::F32(local.theta as f32);
    description.metadata.set(format!("{arch}.rope.freq_base_swa"), base);
    if config.family.gguf.own_heads {
        let width = count("rotary width", 2 * local.inv_freq.len())?;
        description.metadata.set(format!("{arch}.rope.dimension_count_swa"), width);
    }
    Ok(())
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

impl FullRope<'_> {
    /// Adds the growth of queries with their positions. llama.cpp counts from the original context
    /// of yarn.
    fn growth(&self, description: &mut ModelDescription) -> Result<()> {
        let FullRope { config, spec, rope, arch } = self;
        let Some(growth) = rope.query_growth else { return Ok(()) };
        if spec.kind() != "yarn" || rope.trained_positions != growth.original {
            return Err(refused(format!(
                "with `llama_4_scaling_beta` its queries grow from {} positions on; llama.cpp's {arch} lets them grow from the original context of yarn on",
                growth.original
            )));
        }
        let beta = MetadataValue::F32(growth.beta as f32);
        description.metadata.set(format!("{arch}.attention.temperature_scale"), beta);
        if config.family.gguf.has_latents {
            let length = count("original context", growth.original)?;
            description.metadata.set(format!("{arch}.attention.temperature_length"), length);
        }
        Ok(())
    }

    /// Refuses a scaling that the architecture does not have.
    fn refuse_unknown(&self) -> Result<()> {
        let FullRope { config, spec, arch, .. } = self;
        let kind = spec.kind();
        let known = match kind {
            "default" | "linear" | "dynamic" => true,
            kind => {
                let is_known = config.family.gguf.rope_types.contains(&kind);
                is_known && (kind != "yarn" || spec.is_usual_yarn(&config.family.gguf))
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

    /// Returns the keys of yarn.
    fn yarn(&self, factor: f64) -> Result<Vec<(&'static str, MetadataValue)>> {
        let FullRope { config, spec, rope, .. } = self;
        let facts = &config.family.gguf;
        let mut keys = vec![
            ("type", MetadataValue::Text("yarn".into())),
            ("factor", MetadataValue::F32(factor as f32)),
            ("original_context_length", count("original context", rope.trained_positions)?),
        ];
        if facts.has_latents {
            keys.push(("yarn_log_multiplier", self.latent_scale(factor)?));
        } else {
            // llama.cpp applies the paper's factor itself, and multiplies it by the key.
            let natural = if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 };
            let rest = f64::from(rope.attention_factor) / natural;
            if (rest - 1.0).abs() > 1e-6 {
                keys.push(("attn_factor", MetadataValue::F32(rest as f32)));
            }
        }
        let ramp = [("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")];
        for (setting, key) in ramp.into_iter().filter(|_| facts.reads_yarn_ramp) {
            // A zero counts as absent.
            if let Some(beta) = spec.number(setting).filter(|beta| *beta != 0.0) {
                keys.push((key, MetadataValue::F32(beta as f32)));
            }
        }
        Ok(keys)
    }

    /// Returns the key by which llama.cpp scales the scores of latent attention under yarn: a tenth
    /// of `mscale_all_dim`.
    fn latent_scale(&self, factor: f64) -> Result<MetadataValue> {
        let FullRope { config, spec, rope, .. } = self;
        let all = spec.number("mscale_all_dim").unwrap_or(0.0);
        // llama.cpp assumes that the angles are not scaled.
        let is_known = all > 0.0 && (rope.attention_factor - 1.0).abs() < 1e-6;
        let takes_others = config.family.gguf.scales_latents_freely;
        if factor > 1.0 && (!is_known || all != 1.0 && !takes_others) {
            let value_of =
                |key: &str| spec.number(key).map_or("missing".to_owned(), |value| value.to_string());
            return Err(refused(format!(
                "`mscale` is {} and `mscale_all_dim` {}; llama.cpp's {} accepts equal numbers above 0{}",
                value_of("mscale"),
                value_of("mscale_all_dim"),
                config.family.gguf.architecture,
                if takes_others { "" } else { ", 1" }
            )));
        }
        Ok(MetadataValue::F32(0.1 * all as f32))
    }

    /// Adds the scaling of frequencies.
    fn scale(&self, description: &mut ModelDescription) -> Result<()> {
        let FullRope { config, spec, rope, arch } = self;
        self.refuse_unknown()?;
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
                let keys = self.yarn(factor)?;
                keys.into_iter().for_each(|(key, value)| set(key, value));
                if !spec.truncates() {
                    description.notes.push(format!(
                        "llama.cpp's {arch} rounds the ends of yarn's ramp to whole numbers: its results differ slightly"
                    ));
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
            // llama.cpp reads a tensor of divisors in layers of full attention; it has no zero.
            "proportional" => {
                let divisors = plain(rope).zip(&rope.inv_freq);
                let divisors = divisors.map(|(_, divisor)| if *divisor == 0.0 { 1e30 } else { 1.0 });
                description.tensors.push(("rope_freqs.weight", divisors.collect()));
            }
            // Hunyuan stretches the base once for all lengths.
            "dynamic" if is_plain(rope) => {}
            "dynamic" => description.notes.push(format!(
                "llama.cpp has no dynamic rotary scaling: beyond {} tokens its results differ",
                config.max_position_embeddings
            )),
            _ if is_plain(rope) => {}
            _ => {
                return Err(refused(
                    "config.json leaves the scaling of its rotary positions to the family's default; accepted: as `rope_parameters` in config.json".into(),
                ));
            }
        }
        Ok(())
    }
}
