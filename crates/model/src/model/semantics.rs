//! The settings of config.json that decide a model's arithmetic, as part of the model's identity.
//!
//! The same weights compute something else with another rotary base, epsilon or activation.
//! Settings that names and shapes of tensors already determine are left out. So are those that
//! change no forward: dtypes, tokens, the distribution of random weights. Adapters and checkpoints
//! store the values as texts, so later versions must write the same text for the same config.json,
//! in each of its notations.

use std::collections::BTreeMap;
use std::fmt::Debug;

use super::composition::{AttentionMixer, Experts, LatentMixer, QkNormWidth, Sharing, TokenMixer, Values};
use super::config::ModelConfig;
use crate::ops::attention::Heads;
use crate::ops::experts::{Router, RouterScores, SUM_OFFSET};
use crate::ops::gated_delta::DeltaHeads;

/// Maximum length of a value in bytes; a longer one becomes its start and a digest.
const LONGEST: usize = 120;

impl ModelConfig {
    /// Returns the settings that decide the model's arithmetic besides its weights, by key; "none"
    /// for a setting that is absent.
    pub fn semantics(&self) -> BTreeMap<String, String> {
        let of_attention = |text: &dyn Fn(&AttentionMixer) -> String| -> String {
            runs(&self.attentions().map(text).collect::<Vec<_>>())
        };
        let activations: Vec<String> =
            self.blocks.iter().map(|block| block.channel_mixer.activation()).collect();
        let settings = |attention: &AttentionMixer| {
            self.ropes.get(attention.rope).map_or_else(String::new, |rope| rope.settings.clone())
        };
        let keys_and_values = [
            ("model_type", self.family.name.to_owned()),
            ("num_hidden_layers", self.num_layers().to_string()),
            ("num_attention_heads", self.heads.num_heads.to_string()),
            ("num_key_value_heads", self.heads.num_kv_heads.to_string()),
            ("head_dim", self.heads.head_dim.to_string()),
            ("sliding_window", of_attention(&|attention| optional(attention.window))),
            ("rms_norm_eps", format!("{:?}", self.norm.eps)),
            ("hidden_act", runs(&activations)),
            ("embedding factor", format!("{:?}", self.embedding_factor)),
            ("attention scale", of_attention(&|attention| format!("{:?}", attention.scale))),
            ("attn_logit_softcapping", of_attention(&|attention| optional(attention.softcap))),
            ("final_logit_softcapping", optional(self.logit_softcap)),
            ("rope_theta and rope_scaling", of_attention(&settings)),
            ("tie_word_embeddings", self.tie_word_embeddings.to_string()),
        ];
        // Texts of these families only: those of others are stored without them.
        let residual: Vec<String> =
            self.blocks.iter().map(|block| format!("{:?}", block.residual_factor)).collect();
        let experts: Vec<String> = self.experts().map(experts_text).collect();
        let token_mixers: Vec<String> =
            self.blocks.iter().map(|block| self.token_mixer_text(&block.token_mixer)).collect();
        let factors = [
            ("token mixers", token_mixers.iter().any(|text| text != ATTENTION), runs(&token_mixers)),
            (
                "residual factor",
                self.blocks.iter().any(|block| block.residual_factor != 1.0),
                runs(&residual),
            ),
            (
                "mixers",
                self.blocks.iter().any(|block| block.residual.is_parallel()),
                "in parallel".to_owned(),
            ),
            ("logit factor", self.logit_factor != 1.0, format!("{:?}", self.logit_factor)),
            ("experts", self.experts().next().is_some(), runs(&experts)),
        ];
        let factors = factors.into_iter().filter(|(_, counts, _)| *counts).map(|(key, _, text)| (key, text));
        keys_and_values.into_iter().chain(factors).map(|(key, value)| (key.to_owned(), value)).collect()
    }

    fn token_mixer_text(&self, mixer: &TokenMixer) -> String {
        match mixer {
            TokenMixer::Attention(attention) if attention.has_gates => "attention with gates".to_owned(),
            TokenMixer::Attention(AttentionMixer { sharing: Sharing::Read { owner }, .. }) => {
                format!("attention to the keys and values of block {owner}")
            }
            TokenMixer::Attention(AttentionMixer { values: Values::Projected, chunk, qk_norm, .. }) => {
                let chunk = chunk.map_or_else(String::new, |chunk| format!(" in blocks of {chunk}"));
                let is_normed = *qk_norm == Some(QkNormWidth::PlainHeadAfterRope);
                format!("{ATTENTION}{chunk}{}", if is_normed { ", rotated heads normed" } else { "" })
            }
            TokenMixer::Attention(AttentionMixer { heads, values, .. }) => {
                let Heads { num_heads, num_kv_heads, head_dim } = heads;
                let of = if *values == Values::NormedKeys { "keys" } else { "values" };
                format!("attention of {num_heads} and {num_kv_heads} heads of {head_dim}, normed {of}")
            }
            TokenMixer::Latent(LatentMixer { attention, plain, rotated, norm, .. }) => {
                let in_pairs = self.ropes.get(attention.rope).is_some_and(|rope| rope.interleaved);
                let how = if in_pairs { "in pairs" } else { "in halves" };
                let width = plain + rotated;
                format!("latent attention, {rotated} of {width} columns rotate {how}, epsilon {:?}", norm.eps)
            }
            TokenMixer::ShortConv(conv) => {
                let biases = if conv.bias { " with biases" } else { "" };
                format!("convolution over {} tokens{biases}", conv.kernel)
            }
            TokenMixer::GatedDelta(delta) => {
                let DeltaHeads { num_key_heads, num_value_heads, .. } = delta.heads;
                format!("Gated DeltaNet of {num_key_heads} key heads and {num_value_heads} value heads")
            }
        }
    }
}

/// Returns the router's settings of a mixture.
fn experts_text(experts: &Experts) -> String {
    let Experts { count, router, has_bias, weighs_inputs, .. } = experts;
    let Router { chosen, scores, renormalize, groups, factor, sum_offset } = router;
    let weights = if *renormalize { "renormalized" } else { "as they are" };
    let scores = if *scores == RouterScores::Sigmoid { ", sigmoids" } else { "" };
    let bias = if *has_bias { ", with a bias" } else { "" };
    let groups = groups
        .map_or_else(String::new, |groups| format!(", in {} of {} groups", groups.chosen, groups.count));
    let factor = if *factor == 1.0 { String::new() } else { format!(", times {factor:?}") };
    let factor =
        if *sum_offset == SUM_OFFSET { factor } else { format!("{factor}, sums and {sum_offset:?}") };
    let inputs = if *weighs_inputs { ", of inputs" } else { "" };
    format!("{chosen} of {count}, weights {weights}{scores}{bias}{groups}{factor}{inputs}")
}

/// The text of attention without gates.
const ATTENTION: &str = "attention";

/// Joins the values of all layers, with equal neighbours as one entry.
fn runs(values: &[String]) -> String {
    let run = |run: &[String]| match run.len() {
        all if all == values.len() => run[0].clone(),
        count => format!("{count} × {}", run[0]),
    };
    short(&values.chunk_by(|one, next| one == next).map(run).collect::<Vec<_>>().join(", "))
}

fn optional(value: Option<impl Debug>) -> String {
    value.map_or_else(|| "none".to_owned(), |value| format!("{value:?}"))
}

fn short(value: &str) -> String {
    if value.len() <= LONGEST {
        return value.to_owned();
    }
    let start: String = value.chars().take(LONGEST / 2).collect();
    format!("{start}… (digest {})", &blake3::hash(value.as_bytes()).to_hex()[..16])
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn semantics(changes: &[(&str, Value)]) -> BTreeMap<String, String> {
        let mut config = json!({ "model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 10000.0 });
        for (key, value) in changes {
            config[*key] = value.clone();
        }
        ModelConfig::from_json(&config.to_string(), "config.json").expect("a model").semantics()
    }

    /// Adapters and checkpoints store these texts: a changed text for the same config.json would
    /// make finetune refuse them all.
    #[test]
    fn texts_that_stay() {
        let lines: Vec<String> =
            semantics(&[]).iter().map(|(key, value)| format!("{key}: {value}")).collect();
        assert_eq!(
            lines,
            [
                "attention scale: 0.5",
                "attn_logit_softcapping: none",
                "embedding factor: 1.0",
                "final_logit_softcapping: none",
                "head_dim: 4",
                "hidden_act: silu",
                "model_type: llama",
                "num_attention_heads: 4",
                "num_hidden_layers: 2",
                "num_key_value_heads: 4",
                "rms_norm_eps: 1e-5",
                "rope_theta and rope_scaling: theta 10000.0 on 4 columns",
                "sliding_window: none",
                "tie_word_embeddings: false",
            ]
        );
    }

    #[test]
    fn what_changes_the_arithmetic_is_seen_and_nothing_else() {
        let plain = semantics(&[]);
        let llama3 = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192 });
        for change in [
            ("rope_theta", json!(500_000.0)),
            ("rms_norm_eps", json!(1e-6)),
            ("hidden_act", json!("gelu_pytorch_tanh")),
            ("num_attention_heads", json!(2)),
            ("rope_scaling", llama3.clone()),
            ("rope_scaling", json!({ "rope_type": "linear", "factor": 2.0 })),
            ("rope_scaling", json!({ "rope_type": "linear", "factor": 4.0 })),
            ("tie_word_embeddings", json!(true)),
        ] {
            assert_ne!(semantics(std::slice::from_ref(&change)), plain, "{change:?}");
        }
        for same in [
            ("torch_dtype", json!("bfloat16")),
            ("vocab_size", json!(9)),
            ("pad_token_id", json!(3)),
            ("rope_scaling", Value::Null),
            // The notation of transformers 5.
            ("rope_parameters", json!({ "rope_theta": 10000, "rope_type": "default" })),
        ] {
            assert_eq!(semantics(std::slice::from_ref(&same)), plain, "{same:?}");
        }
        let mut older = llama3.clone();
        older["factor"] = json!(8);
        older["type"] = json!("llama3");
        assert_eq!(semantics(&[("rope_scaling", older)]), semantics(&[("rope_scaling", llama3)]));
    }
}
