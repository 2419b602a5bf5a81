//! adapter_config.json: PEFT's LoRA configuration.
//!
//! Reading checks the supported keys by name and type. An unsupported key passes if it is null,
//! empty, at PEFT's default or without effect on an existing adapter. Otherwise it is an error,
//! since the adapter would compute another function. A key that peft 0.21 does not know either
//! passes with a warning. Writing uses the keys that every PEFT since 0.5 knows, and a newer key
//! only if its value is not the default, because an older PEFT refuses unknown keys. Key list: peft
//! 0.21 `LoraConfig`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::targets::{PARAMETERS, ends_with_name};
use super::{ModulePattern, NamePattern, TargetSpec};
use crate::error::input_file;
use crate::error::{Error, ErrorContext as _, Result};

/// The name of the file.
pub const CONFIG_FILE: &str = "adapter_config.json";

/// The initialisation that PEFT would use for the adapter; none of these changes the base. PEFT's
/// other methods that keep the base (orthogonal, EVA, MiCA) are read as the default: the values are
/// in the file, and an older PEFT does not know their names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum InitLoraWeights {
    /// A uniform (Kaiming), B zero.
    #[default]
    Default,
    /// A normal, B zero.
    Gaussian,
    /// A and B random: the adapter changes the model from the start. For tests.
    Random,
}

/// The contents of adapter_config.json.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    /// The base: a hub id or a folder.
    pub base_model_name_or_path: Option<String>,
    /// The base's revision.
    pub revision: Option<String>,
    /// Modules, ranks and scales.
    pub spec: TargetSpec,
    /// Tensors of all experts of a layer that have LoRA.
    pub target_parameters: Vec<String>,
    /// The dropout probability of inputs of A in training.
    pub lora_dropout: f64,
    /// True if PEFT loads it frozen.
    pub inference_mode: bool,
    /// The initialisation of the adapter.
    pub init_lora_weights: InitLoraWeights,
    /// True if a saved embedding or head also replaces the one it is tied to.
    pub ensure_weight_tying: bool,
}

/// Prefixes of inits that subtract the initial adapter from the base (peft 0.21
/// `LoraModel._convert_state_dict_for_initial_model`).
const MUTATED: [&str; 4] = ["pissa", "corda", "olora", "lora_ga"];

/// Number of characters of a key shown in messages.
const LONGEST_KEY: usize = 60;

/// Keys of peft 0.21 without effect here, for any value: PEFT's own notes, settings of
/// initialisations, the storage of activations for the backward, and the weight layout of layers
/// other than `Linear` and `Embedding`.
const WITHOUT_EFFECT: [&str; 11] = [
    "peft_version",
    "auto_mapping",
    "runtime_config",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "velora_config",
    "qalora_group_size",
    "megatron_core",
    "fan_in_fan_out",
];

/// Keys of peft 0.21 that request an unsupported computation, unless they have their default.
const UNSUPPORTED: [&str; 10] = [
    "bias",
    "lora_bias",
    "layer_replication",
    "megatron_config",
    "alora_invocation_tokens",
    "use_qalora",
    "monteclora_config",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
];

/// Returns whether `value` has no effect: it is null, false, empty, or the default of `key`.
fn passes(key: &str, value: &Value) -> bool {
    match (key, value) {
        (_, Value::Null | Value::Bool(false)) => true,
        (_, Value::String(text)) if text.is_empty() => true,
        (_, Value::Array(list)) if list.is_empty() => true,
        (_, Value::Object(map)) if map.is_empty() => true,
        ("bias", Value::String(text)) => text == "none",
        _ => WITHOUT_EFFECT.contains(&key),
    }
}

/// Returns whether a key that peft 0.21 does not have may change the result: PEFT names the
/// switches of LoRA's variants `use_…` and `…_config`.
fn may_be_a_switch(key: &str) -> bool {
    key.starts_with("use_") || key.ends_with("_config")
}

impl AdapterConfig {
    /// Reads `folder`/adapter_config.json.
    ///
    /// # Errors
    /// User: the file is missing or malformed, is not of LoRA for a causal language model, or
    /// requests something unsupported.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(CONFIG_FILE);
        if !path.exists() {
            return Err(Error::user(format!("cannot read adapter {}", folder.display()))
                .because(format!("it has no {CONFIG_FILE}"))
                .hint(format!("give the folder that holds {CONFIG_FILE} and {}", super::WEIGHTS_FILE)));
        }
        let text = input_file::read("read", &path)?;
        Self::parse(&text).map(|(config, _)| config).during(|| format!("cannot use {}", path.display()))
    }

    /// Parses the configuration. Also returns the unread keys.
    fn parse(text: &[u8]) -> Result<(Self, Map<String, Value>)> {
        let invalid = |error: serde_json::Error| Error::user(format!("it is not valid: {error}"));
        let mut keys = ConfigKeys(serde_json::from_slice(text).map_err(invalid)?);
        for (key, accepted) in [("peft_type", "LORA"), ("task_type", "CAUSAL_LM")] {
            let value: Option<String> = keys.take(key, "a text")?;
            if value.as_deref().is_some_and(|value| value != accepted)
                || (value.is_none() && key == "peft_type")
            {
                let actual = value.unwrap_or("missing".into());
                return Err(Error::user(format!("`{key}` is {actual}; accepted: {accepted}")));
            }
        }
        let target_parameters = keys.parameters()?;
        let target_modules = match keys.names("target_modules")? {
            Some(NamePattern::Regex(all)) if all.eq_ignore_ascii_case("all-linear") => {
                ModulePattern::AllLinear
            }
            Some(names) => ModulePattern::Named(names),
            None if !target_parameters.is_empty() => ModulePattern::Named(NamePattern::NONE),
            None => return Err(Error::user("`target_modules` is missing")),
        };
        let spec = TargetSpec {
            target_modules,
            exclude_modules: keys.names("exclude_modules")?.unwrap_or(NamePattern::NONE),
            modules_to_save: keys.take("modules_to_save", "a list of names")?.unwrap_or_default(),
            layers_to_transform: keys
                .one_or_many("layers_to_transform", "a layer, or a list of layers, from 0")?,
            layers_pattern: keys
                .one_or_many("layers_pattern", "a name or a list of names")?
                .unwrap_or_default(),
            r: keys.take("r", "a whole number from 1")?.unwrap_or(8),
            lora_alpha: keys.take("lora_alpha", "a number")?.unwrap_or(8.0),
            use_rslora: keys.take("use_rslora", "true or false")?.unwrap_or(false),
            use_dora: keys.take("use_dora", "true or false")?.unwrap_or(false),
            rank_pattern: keys.pattern("rank_pattern", "a whole number from 1")?,
            alpha_pattern: keys.pattern("alpha_pattern", "a number")?,
            trainable_token_indices: keys.tokens()?,
        };
        let config = Self {
            base_model_name_or_path: keys.take("base_model_name_or_path", "a text")?,
            revision: keys.take("revision", "a text")?,
            spec,
            target_parameters,
            lora_dropout: keys.take("lora_dropout", "a number")?.unwrap_or(0.0),
            inference_mode: keys.take("inference_mode", "true or false")?.unwrap_or(false),
            init_lora_weights: init(&mut keys)?,
            ensure_weight_tying: keys.take("ensure_weight_tying", "true or false")?.unwrap_or(false),
        };
        if !(0.0..1.0).contains(&config.lora_dropout) {
            let dropout = config.lora_dropout;
            return Err(Error::user(format!("`lora_dropout` is {dropout}; accepted: from 0 to below 1")));
        }
        if !config.target_parameters.is_empty() && config.spec.use_dora {
            return Err(Error::user(
                "`use_dora` is true; accepted beside `target_parameters`, as in PEFT: false",
            ));
        }
        refuse_unsupported(&keys.0)?;
        Ok((config, keys.0))
    }

    /// Returns the keys of `folder`/adapter_config.json that neither this program nor peft 0.21
    /// knows and that [`AdapterConfig::read`] ignores; empty if it refuses the file.
    pub fn unknown_keys(folder: &Path) -> Vec<String> {
        let text = input_file::read("read", &folder.join(CONFIG_FILE)).unwrap_or_default();
        let Ok((_, unread)) = Self::parse(&text) else { return Vec::new() };
        let unknown = unread.iter().filter(|(key, value)| !passes(key, value));
        unknown.map(|(key, _)| key.chars().take(LONGEST_KEY).collect()).collect()
    }

    /// Returns the same configuration with other names in its lists of modules.
    #[must_use]
    pub(super) fn translated(&self, name: impl Fn(&str) -> String) -> Self {
        Self { spec: self.spec.translated(name), ..self.clone() }
    }

    /// Returns the text of adapter_config.json: deterministic, with `target_modules` sorted.
    pub fn to_json(&self) -> String {
        let spec = &self.spec;
        let list = |names: &[String]| if names.is_empty() { Value::Null } else { json!(names) };
        let mut config = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "auto_mapping": null,
            "base_model_name_or_path": self.base_model_name_or_path,
            "revision": self.revision,
            "inference_mode": self.inference_mode,
            "r": spec.r,
            "lora_alpha": number(spec.lora_alpha),
            "lora_dropout": self.lora_dropout,
            "target_modules": match &spec.target_modules {
                ModulePattern::AllLinear => json!("all-linear"),
                ModulePattern::Named(names) => names_value(names),
            },
            "modules_to_save": list(&spec.modules_to_save),
            "bias": "none",
            "fan_in_fan_out": false,
            "init_lora_weights": match self.init_lora_weights {
                InitLoraWeights::Default => json!(true),
                InitLoraWeights::Gaussian => json!("gaussian"),
                InitLoraWeights::Random => json!(false),
            },
            "layers_to_transform": spec.layers_to_transform,
            "layers_pattern": list(&spec.layers_pattern),
        });
        let mut newer = |key: &str, value: Value| {
            if !passes(key, &value) {
                config[key] = value;
            }
        };
        newer("rank_pattern", spec.rank_pattern.iter().map(|(key, r)| (key.clone(), json!(r))).collect());
        newer("alpha_pattern", spec.alpha_pattern.iter().map(|(key, a)| (key.clone(), number(*a))).collect());
        newer("exclude_modules", names_value(&spec.exclude_modules));
        newer("target_parameters", json!(self.target_parameters));
        newer("use_rslora", json!(spec.use_rslora));
        newer("use_dora", json!(spec.use_dora));
        newer("trainable_token_indices", tokens_value(&spec.trainable_token_indices));
        newer("ensure_weight_tying", json!(self.ensure_weight_tying));
        format!("{config:#}\n")
    }
}

/// Refuses keys that would change the adapter's computation. Other unknown keys pass, because PEFT
/// ignores them.
fn refuse_unsupported(keys: &Map<String, Value>) -> Result<()> {
    for (key, value) in keys.iter().filter(|(key, value)| !passes(key, value)) {
        if UNSUPPORTED.contains(&key.as_str()) {
            return Err(Error::user(format!(
                "`{key}` is {value}, which is not supported; accepted: no such key, or its default"
            )));
        }
        if may_be_a_switch(key) {
            let what = format!("`{key}` is {value}: this key is unknown and may enable a variant of LoRA");
            return Err(Error::user(what).hint(format!(
                "if the adapter computes the same without the key, delete `{key}` from {CONFIG_FILE}"
            )));
        }
    }
    Ok(())
}

fn init(keys: &mut ConfigKeys) -> Result<InitLoraWeights> {
    let value: Value = keys.take("init_lora_weights", "true, false or a name")?.unwrap_or(json!(true));
    let name = value.as_str().unwrap_or_default().to_ascii_lowercase();
    match (&value, name.as_str()) {
        // EVA chose the initial A and the ranks, which rank_pattern holds.
        (Value::Bool(true), _) | (_, "orthogonal" | "mica" | "eva") => return Ok(InitLoraWeights::Default),
        (Value::Bool(false), _) => return Ok(InitLoraWeights::Random),
        (_, "gaussian") => return Ok(InitLoraWeights::Gaussian),
        _ => {}
    }
    let accepted = r#"accepted: true, false, "gaussian", "orthogonal", "eva", "mica""#;
    let (effect, hint) = match name.as_str() {
        "loftq" => (
            "with which PEFT replaces the base's weights by quantized ones",
            "save the base that PEFT trained on with `model.unload().save_pretrained(folder)`, give that, and write `true` here",
        ),
        name if MUTATED.iter().any(|start| name.starts_with(start)) => (
            "with which PEFT subtracts the initial adapter from the base's weights",
            "save it from PEFT as an adapter of the unchanged base: `model.save_pretrained(folder, path_initial_model_for_weight_conversion=start)`, where `start` holds the adapter as it was before training",
        ),
        _ => {
            return Err(Error::user(format!("`init_lora_weights` is {value}, which is unknown; {accepted}")));
        }
    };
    Err(Error::user(format!("`init_lora_weights` is {value}, {effect}; {accepted}")).hint(hint))
}

/// Writes whole numbers like PEFT: 16, not 16.0.
fn number(value: f64) -> Value {
    // Up to 2^53 every whole f64 is exact as an integer.
    if value.fract() == 0.0 && value.abs() < 9_007_199_254_740_992.0 {
        json!(value as i64)
    } else {
        json!(value)
    }
}

/// Returns a list if only the embedding has tokens, as in PEFT's documentation, otherwise an
/// object.
fn tokens_value(tokens: &BTreeMap<String, Vec<u32>>) -> Value {
    let embedding = |name: &str| name == "embed_tokens" || name.ends_with(".embed_tokens");
    match tokens.first_key_value() {
        Some((name, ids)) if tokens.len() == 1 && embedding(name) => json!(ids),
        _ => json!(tokens),
    }
}

fn names_value(names: &NamePattern) -> Value {
    match names {
        NamePattern::Regex(pattern) => json!(pattern),
        NamePattern::List(list) => json!(list.iter().collect::<BTreeSet<_>>()),
    }
}

/// The keys that are not read yet.
struct ConfigKeys(Map<String, Value>);

impl ConfigKeys {
    /// Removes `key` and returns its value, or `None` if it is missing or null.
    fn take<T: DeserializeOwned>(&mut self, key: &str, accepted: &str) -> Result<Option<T>> {
        match self.0.shift_remove(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match T::deserialize(&value) {
                Ok(taken) => Ok(Some(taken)),
                Err(_) => Err(Error::user(format!("`{key}` is {value}; accepted: {accepted}"))),
            },
        }
    }

    fn one_or_many<T: DeserializeOwned>(&mut self, key: &str, accepted: &str) -> Result<Option<Vec<T>>> {
        match self.0.get(key) {
            Some(Value::Array(_)) => self.take(key, accepted),
            _ => Ok(self.take(key, accepted)?.map(|one| vec![one])),
        }
    }

    fn names(&mut self, key: &str) -> Result<Option<NamePattern>> {
        let accepted = "a list of names, or a regular expression";
        match self.0.get(key) {
            Some(Value::String(_)) => Ok(self.take(key, accepted)?.map(NamePattern::Regex)),
            _ => Ok(self.take(key, accepted)?.map(NamePattern::List)),
        }
    }

    /// Returns `target_parameters`, which may name the tensors of experts alone.
    fn parameters(&mut self) -> Result<Vec<String>> {
        let key = "target_parameters";
        let names: Vec<String> = self.take(key, "a list of names")?.unwrap_or_default();
        let is_known = |name: &String| PARAMETERS.iter().any(|known| ends_with_name(name, known));
        match names.iter().find(|name| !is_known(name)) {
            Some(name) => {
                let accepted = PARAMETERS.map(|known| format!("`{known}`")).join(" or ");
                Err(Error::user(format!("`{key}` has `{name}`; accepted: {accepted} of experts")))
            }
            None => Ok(names),
        }
    }

    fn tokens(&mut self) -> Result<BTreeMap<String, Vec<u32>>> {
        let key = "trainable_token_indices";
        let accepted = "a list of token ids, or an object from module names to such lists";
        if let Some(Value::Object(_)) = self.0.get(key) {
            return Ok(self.take(key, accepted)?.unwrap_or_default());
        }
        let ids: Vec<u32> = self.take(key, accepted)?.unwrap_or_default();
        let table = |ids| BTreeMap::from([("embed_tokens".to_owned(), ids)]);
        Ok(if ids.is_empty() { BTreeMap::new() } else { table(ids) })
    }

    fn pattern<T: DeserializeOwned>(&mut self, key: &str, accepted: &str) -> Result<Vec<(String, T)>> {
        let map: Map<String, Value> = self.take(key, "an object from names to numbers")?.unwrap_or_default();
        let value = |(pattern, value): (String, Value)| match T::deserialize(&value) {
            Ok(value) => Ok((pattern, value)),
            Err(_) => Err(Error::user(format!("`{key}` has {value} for `{pattern}`; accepted: {accepted}"))),
        };
        map.into_iter().map(value).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::Target;
    use crate::model::{Module, ModuleKind};

    fn parse(extra: &str) -> Result<AdapterConfig> {
        let text = format!(r#"{{"peft_type":"LORA","target_modules":["q_proj"]{extra}}}"#);
        AdapterConfig::parse(text.as_bytes()).map(|(config, _)| config)
    }

    /// The written patterns give each expert the rank and alpha that it has.
    #[test]
    fn experts_of_each_layer_keep_their_ranks() {
        let names = |layer: usize, r: usize| {
            (0..2).map(move |expert| {
                let name = format!("model.layers.{layer}.mlp.experts.{expert}.up_proj");
                Target { name, kind: ModuleKind::Linear, r, alpha: 16.0, scale: 16.0 / r as f64 }
            })
        };
        let module = |target: &Target| Module {
            name: target.name.clone(),
            shape: vec![8, 8],
            kind: ModuleKind::Linear,
        };
        for (ranks, patterns) in [([4, 4], 1), ([4, 2], 2), ([8, 8], 0)] {
            let targets: Vec<Target> = names(1, ranks[0]).chain(names(11, ranks[1])).collect();
            let modules: Vec<Module> = targets.iter().map(module).collect();
            let keys = r#","target_parameters":["up_proj"],"layers_to_transform":[1],"lora_alpha":16"#;
            let mut config = parse(&keys.replace("up_proj", "gate_up_proj")).expect("a config");
            config.name_experts(&targets, &modules);
            assert_eq!(config.spec.rank_pattern.len(), patterns, "{ranks:?}");
            let again = super::super::targets::resolve(&config.spec, &modules).expect("targets");
            assert_eq!(again, targets);
        }
    }

    #[test]
    fn defaults_are_peft_s() {
        let config = parse("").expect("minimal");
        assert_eq!((config.spec.r, config.spec.lora_alpha, config.lora_dropout), (8, 8.0, 0.0));
        assert_eq!(config.init_lora_weights, InitLoraWeights::Default);
    }

    #[test]
    fn every_value_survives_writing() {
        let config = parse(concat!(
            r#","r":4,"lora_alpha":2.5,"lora_dropout":0.1,"use_rslora":true,"exclude_modules":".*o_proj","#,
            r#""rank_pattern":{"z":2,"a":3},"alpha_pattern":{"q_proj":32},"modules_to_save":["lm_head"],"#,
            r#""layers_to_transform":3,"layers_pattern":"layers","init_lora_weights":"gaussian","#,
            r#""base_model_name_or_path":"b","revision":"main","inference_mode":true,"ensure_weight_tying":true,"target_parameters":["mlp.experts.down_proj"]"#
        ))
        .expect("valid");
        assert_eq!(config.spec.layers_to_transform, Some(vec![3]));
        assert_eq!(config.spec.rank_pattern, [("z".into(), 2), ("a".into(), 3)]);
        let read = AdapterConfig::parse(config.to_json().as_bytes());
        assert_eq!(read.expect("valid").0, config);
    }

    #[test]
    fn inits_that_leave_the_base_alone_are_read_as_the_default() {
        for name in ["orthogonal", "mica", "eva"] {
            let config = parse(&format!(r#","init_lora_weights":"{name}","eva_config":null"#)).expect(name);
            assert_eq!(config.init_lora_weights, InitLoraWeights::Default);
        }
        assert!(parse(r#","init_lora_weights":"eva","eva_config":{"rho":2.0}"#).is_ok());
        // Settings of an initialisation that was not used.
        for key in ["eva_config", "loftq_config", "corda_config", "lora_ga_config"] {
            assert!(parse(&format!(r#","init_lora_weights":true,"{key}":{{"a":4}}"#)).is_ok(), "{key}");
        }
        let refusal = parse(r#","init_lora_weights":"pissa""#).expect_err("changes the base");
        assert!(refusal.in_one_line().contains("path_initial_model_for_weight_conversion"));
    }

    #[test]
    fn tokens_of_the_embedding_are_a_list() {
        let config = parse(r#","trainable_token_indices":[7,3]"#).expect("valid");
        assert_eq!(
            config.spec.trainable_token_indices,
            BTreeMap::from([("embed_tokens".into(), vec![7, 3])])
        );
        let written = |config: &AdapterConfig| -> Value {
            let keys: Value = serde_json::from_str(&config.to_json()).expect("JSON");
            keys["trainable_token_indices"].clone()
        };
        assert_eq!(written(&config), json!([7, 3]));
        let config = parse(r#","trainable_token_indices":{"lm_head":[1]}"#).expect("valid");
        assert_eq!(written(&config), json!({"lm_head": [1]}));
        assert_eq!(written(&parse(r#","trainable_token_indices":[]"#).expect("valid")), Value::Null);
    }

    #[test]
    fn only_old_keys_are_written_by_default() {
        let mut config = parse("").expect("minimal");
        config.spec.target_modules =
            ModulePattern::Named(NamePattern::List(["v_proj", "q_proj", "v_proj"].map(String::from).into()));
        config.spec.lora_alpha = 16.0;
        insta::assert_snapshot!(config.to_json(), @r#"
        {
          "peft_type": "LORA",
          "task_type": "CAUSAL_LM",
          "auto_mapping": null,
          "base_model_name_or_path": null,
          "revision": null,
          "inference_mode": false,
          "r": 8,
          "lora_alpha": 16,
          "lora_dropout": 0.0,
          "target_modules": [
            "q_proj",
            "v_proj"
          ],
          "modules_to_save": null,
          "bias": "none",
          "fan_in_fan_out": false,
          "init_lora_weights": true,
          "layers_to_transform": null,
          "layers_pattern": null
        }
        "#);
    }

    #[test]
    fn what_would_compute_something_else_is_refused() {
        let refusals: Vec<String> = [
            r#","bias":"all""#,
            r#","lora_bias":true"#,
            r#","layer_replication":[[0,2]]"#,
            r#","target_parameters":["experts.w"]"#,
            r#","target_parameters":["experts.down_proj"],"use_dora":true"#,
            r#","trainable_token_indices":[-1]"#,
            r#","trainable_token_indices":{"embed_tokens":5}"#,
            r#","use_qalora":true"#,
            r#","kasa_config":{"beta":1e-4}"#,
            r#","megatron_config":{"a":1}"#,
            r#","alora_invocation_tokens":[5]"#,
            r#","init_lora_weights":"pissa_niter_16""#,
            r#","init_lora_weights":"loftq","loftq_config":{"loftq_bits":4}"#,
            r#","init_lora_weights":"tomorrow""#,
            r#","use_tomorrow":1"#,
            r#","tomorrow_config":{"a":1}"#,
            r#","task_type":"SEQ_CLS""#,
            r#","r":"eight""#,
            r#","lora_dropout":1.0"#,
            r#","rank_pattern":{"q_proj":-1}"#,
        ]
        .iter()
        .map(|extra| parse(extra).expect_err(extra).what().to_owned())
        .collect();
        insta::assert_snapshot!(refusals.join("\n"), @r#"
        `bias` is "all", which is not supported; accepted: no such key, or its default
        `lora_bias` is true, which is not supported; accepted: no such key, or its default
        `layer_replication` is [[0,2]], which is not supported; accepted: no such key, or its default
        `target_parameters` has `experts.w`; accepted: `gate_up_proj` or `down_proj` of experts
        `use_dora` is true; accepted beside `target_parameters`, as in PEFT: false
        `trainable_token_indices` is [-1]; accepted: a list of token ids, or an object from module names to such lists
        `trainable_token_indices` is {"embed_tokens":5}; accepted: a list of token ids, or an object from module names to such lists
        `use_qalora` is true, which is not supported; accepted: no such key, or its default
        `kasa_config` is {"beta":0.0001}, which is not supported; accepted: no such key, or its default
        `megatron_config` is {"a":1}, which is not supported; accepted: no such key, or its default
        `alora_invocation_tokens` is [5], which is not supported; accepted: no such key, or its default
        `init_lora_weights` is "pissa_niter_16", with which PEFT subtracts the initial adapter from the base's weights; accepted: true, false, "gaussian", "orthogonal", "eva", "mica"
        `init_lora_weights` is "loftq", with which PEFT replaces the base's weights by quantized ones; accepted: true, false, "gaussian", "orthogonal", "eva", "mica"
        `init_lora_weights` is "tomorrow", which is unknown; accepted: true, false, "gaussian", "orthogonal", "eva", "mica"
        `use_tomorrow` is 1: this key is unknown and may enable a variant of LoRA
        `tomorrow_config` is {"a":1}: this key is unknown and may enable a variant of LoRA
        `task_type` is SEQ_CLS; accepted: CAUSAL_LM
        `r` is "eight"; accepted: a whole number from 1
        `lora_dropout` is 1; accepted: from 0 to below 1
        `rank_pattern` has -1 for `q_proj`; accepted: a whole number from 1
        "#);
        assert!(AdapterConfig::parse(br#"{"peft_type":"IA3"}"#).is_err());
        assert!(AdapterConfig::parse(br#"{"peft_type":"LORA"}"#).is_err());
        assert!(AdapterConfig::parse(b"[1]").is_err());
    }
}
