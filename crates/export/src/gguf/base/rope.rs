//! The rotary settings of config.json from keys and tensors: the reverse of `rope` above.

use serde_json::{Map, Value, json};

use super::keys::{ArchKeys, shortest};
use crate::error::Result;
use crate::model::{GgufFacts, GgufLocalRope, GgufNoPositions};

/// The base of llama.cpp without a key.
const BASE: f64 = 1e4;
/// The divisors of llama3's scaling.
pub(super) const LLAMA3: &str = "rope_freqs.weight";
/// The divisors of longrope beyond and up to the original context.
pub(super) const LONG: &str = "rope_factors_long.weight";
pub(super) const SHORT: &str = "rope_factors_short.weight";

/// Returns the settings; `layers` is the number of blocks.
///
/// # Errors
/// User: a key is mistyped, or the divisors follow no rule of transformers.
pub(super) fn settings(
    keys: &ArchKeys<'_>,
    facts: &GgufFacts,
    head_dim: usize,
    layers: usize,
) -> Result<Map<String, Value>> {
    let mut json = Map::new();
    let mut set = |key: &str, value: Value| json.insert(key.to_owned(), value);
    let base = keys.float("rope.freq_base")?;
    if facts.no_positions == GgufNoPositions::AllByKey
        && keys.flag("rope.scaling.finetuned")? == Some(false)
        && base.is_none()
    {
        set("position_embedding_type", "nope".into());
        set("num_local_experts", 0.into());
        set("layer_types", vec!["attention"; layers].into());
        return Ok(json);
    }
    // The flag changes nothing in architectures with positions.
    keys.flag("rope.scaling.finetuned")?;
    let theta = base.unwrap_or(BASE);
    set("rope_theta", theta.into());
    let width = keys.size("rope.dimension_count")?.unwrap_or(head_dim);
    if width != head_dim || facts.rotates_partly {
        set("partial_rotary_factor", (width as f64 / head_dim.max(1) as f64).into());
    }
    if facts.local_rope.is_some() {
        let local = keys.float("rope.freq_base_swa")?;
        if facts.local_rope == Some(GgufLocalRope::OwnBase) {
            set("rope_local_base_freq", local.unwrap_or(BASE).into());
        }
    }
    // The names of GPT-NeoX.
    set("rotary_emb_base", theta.into());
    set("rotary_pct", (width as f64 / head_dim.max(1) as f64).into());
    if facts.own_heads {
        let of_sliding = json.get("rope_local_base_freq").cloned().unwrap_or(BASE.into());
        json.insert("rope_parameters".to_owned(), by_layer_type(keys, theta, width, of_sliding)?);
        return Ok(json);
    }
    let rope = RopeKeys { keys, theta, width };
    let scaling = rope.scaling()?;
    if scaling.is_none() && facts.scales_by_default {
        json.insert("rope_parameters".to_owned(), json!({ "rope_type": "default", "rope_theta": theta }));
    }
    if let Some(mut scaling) = scaling {
        if facts.rounds_yarn_ramp && scaling.contains_key("factor") {
            scaling.insert("truncate".to_owned(), false.into());
        }
        if let Some(all) = keys.float("rope.scaling.yarn_log_multiplier")?.filter(|all| *all != 0.0) {
            // llama.cpp has a tenth of it.
            let all: Value = shortest((10.0 * all) as f32).into();
            scaling.insert("mscale".to_owned(), all.clone());
            scaling.insert("mscale_all_dim".to_owned(), all);
        }
        if let Some(beta) = keys.float("attention.temperature_scale")? {
            scaling.insert("llama_4_scaling_beta".to_owned(), beta.into());
        }
        if scaling.contains_key("short_factor") {
            let original = scaling.get("original_max_position_embeddings").cloned();
            let mut set = |key: &str, value: Value| json.insert(key.to_owned(), value);
            set("original_max_position_embeddings", original.unwrap_or(Value::Null));
        }
        json.insert("rope_scaling".to_owned(), scaling.into());
    }
    Ok(json)
}

/// Returns the ropes of full and of sliding attention in Gemma 4: the divisors of the first are 1
/// for the pairs that turn.
fn by_layer_type(keys: &ArchKeys<'_>, theta: f64, width: usize, of_sliding: Value) -> Result<Value> {
    let divisors = keys.file.values(LLAMA3).unwrap_or_default();
    let turning = divisors.iter().take_while(|divisor| **divisor < 1.001).count();
    let known = divisors.len() == width / 2 && divisors[turning..].iter().all(|divisor| *divisor >= 1e20);
    if !known || turning == 0 {
        return Err(keys.file.refused(format!(
            "its tensor `{LLAMA3}` is no {} divisors, first of 1 and then of 1e30",
            width / 2
        )));
    }
    let part = 2.0 * turning as f64 / width as f64;
    Ok(json!({
        "full_attention": { "rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": part },
        "sliding_attention": { "rope_type": "default", "rope_theta": of_sliding },
    }))
}

struct RopeKeys<'a> {
    keys: &'a ArchKeys<'a>,
    theta: f64,
    width: usize,
}

impl RopeKeys<'_> {
    /// Returns the scaling object, if frequencies are scaled.
    fn scaling(&self) -> Result<Option<Map<String, Value>>> {
        let (keys, file) = (self.keys, self.keys.file);
        let named = keys.text("rope.scaling.type")?;
        let factor = keys.float("rope.scaling.factor")?;
        let original = keys.size("rope.scaling.original_context_length")?;
        let attention = keys.float("rope.scaling.attn_factor")?;
        let has = |name: &str| file.tensor(name).is_some();
        let (has_long, is_plain) = (has(LONG), matches!(named, None | Some("none")));
        if has_long != has(SHORT) || (has(LLAMA3) && (has_long || !is_plain)) {
            let names = [LLAMA3, LONG, SHORT].into_iter().filter(|name| has(name));
            return Err(file.refused(format!(
                "its tensors {} do not fit together, or not its key `{}.rope.scaling.type`, {named:?}",
                names.collect::<Vec<_>>().join(", "),
                keys.arch
            )));
        }
        let mut json = Map::new();
        let mut set = |key: &str, value: Value| json.insert(key.to_owned(), value);
        let mut set_common = |factor: Option<f64>, original: Option<usize>| {
            factor.map(|factor| set("factor", factor.into()));
            original.map(|original| set("original_max_position_embeddings", original.into()));
        };
        if let Some((long, short)) = file.values(LONG).zip(file.values(SHORT)) {
            set_common(factor, original);
            set("rope_type", "longrope".into());
            set("long_factor", numbers(&long));
            set("short_factor", numbers(&short));
            attention.map(|attention| set("attention_factor", attention.into()));
            return Ok(Some(json));
        }
        match named {
            Some("linear") => {
                set_common(factor, None);
                set("rope_type", "linear".into());
            }
            Some("yarn") => {
                set_common(factor, original);
                set("rope_type", "yarn".into());
                // llama.cpp multiplies the paper's factor by the key.
                if let Some(rest) = attention {
                    let factor = factor.unwrap_or(1.0);
                    let natural = if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 };
                    set("attention_factor", (rest * natural).into());
                }
                for (key, setting) in [("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")] {
                    if let Some(beta) = keys.float(&format!("rope.scaling.{key}"))? {
                        set(setting, beta.into());
                    }
                }
            }
            None | Some("none") => match file.values(LLAMA3) {
                None => return Ok(None),
                Some(divisors) => return self.llama3(&divisors).map(Some),
            },
            Some(other) => {
                return Err(file.refused(format!(
                    "its key `{}.rope.scaling.type` is \"{other}\"; accepted: none, linear, yarn",
                    keys.arch
                )));
            }
        }
        Ok(Some(json))
    }

    /// Returns the parameters of llama3's scaling with these divisors: the low factor is 1 and the
    /// high one 4, as in most models of Meta, or 1, as in Llama 4.
    fn llama3(&self, divisors: &[f32]) -> Result<Map<String, Value>> {
        let factor = divisors.iter().copied().fold(1.0, f32::max);
        let wavelengths: Vec<f64> = (0..divisors.len())
            .map(|i| 1.0 / (self.theta as f32).powf((2 * i) as f32 / self.width as f32))
            .map(|frequency| std::f64::consts::TAU / f64::from(frequency))
            .collect();
        let both = || divisors.iter().zip(&wavelengths);
        let fits = |high: f64, original: f64| {
            let near = |(frequency, wavelength): (&f32, &f64)| {
                // A high factor of 1 makes a step, by a division by 0.
                let unscaled = ((original / wavelength - 1.0) / (high - 1.0)).clamp(0.0, 1.0);
                let wanted = 1.0 / ((1.0 - unscaled) / f64::from(factor) + unscaled);
                (f64::from(*frequency) / wanted - 1.0).abs() < 1e-5
            };
            divisors.len() == self.width / 2 && both().all(near)
        };
        // A divisor between the extremes gives the original context; without one, any that fits.
        let between = both().filter(|(divisor, _)| (1.001..factor * 0.999).contains(*divisor));
        let solved = between.map(|(divisor, wavelength)| {
            let rest = 1.0 / f64::from(factor);
            let unscaled = (1.0 / f64::from(*divisor) - rest) / (1.0 - rest);
            (wavelength * (3.0 * unscaled + 1.0)).round()
        });
        let powers = (4..24).map(|power| f64::from(1u32 << power));
        let ramp = solved.chain([8192.0]).chain(powers).map(|original| (4.0, original));
        // The first whole number beyond the wavelengths of divisor 1.
        let undivided = both().filter(|(divisor, _)| **divisor < 1.001).map(|(_, wavelength)| *wavelength);
        let step = [8192.0, undivided.fold(0.0, f64::max).floor() + 1.0].map(|original| (1.0, original));
        let candidate = ramp.chain(step).find(|(high, original)| fits(*high, *original));
        let (high, original) = candidate.ok_or_else(|| {
            self.keys.file.refused(format!(
                "its tensor `{LLAMA3}` holds no divisors of llama3 with the factors 1 and 4, or 1 and 1"
            ))
        })?;
        let json = json!({
            "rope_type": "llama3", "factor": shortest(factor), "low_freq_factor": 1.0, "high_freq_factor": high,
            "original_max_position_embeddings": original as u64,
        });
        Ok(json.as_object().cloned().unwrap_or_default())
    }
}

fn numbers(values: &[f32]) -> Value {
    values.iter().map(|value| shortest(*value)).collect()
}
