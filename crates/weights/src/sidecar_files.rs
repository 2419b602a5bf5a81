//! The sidecar files of weights: config.json, the generation settings, the tokenizer and its chat
//! templates.
//!
//! Merged, trained and exported models have new weights with the same sidecar files. All are copied
//! unchanged, with two exceptions. config.json must describe the new weights: their dtype, the
//! number of tokens, the tie of the embedding, their quantization. The chat template changes if a
//! run used another than the tokenizer's.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::readers::QUANTIZATION_CONFIG;
use super::text_config::text_part;
use super::{
    EMBED_TOKENS, LM_HEAD, RetainedTensors, StoredDtype, TIE_EMBEDDING, WriteEntry, names_in, readers, write,
};
use crate::error::input_file;
use crate::error::{Error, Result};
use crate::tokenizer_names::{self, PROCESSOR_FILES, TOKENIZER_JSON, VOCABULARIES};

/// The architecture and its sizes.
pub const CONFIG_FILE: &str = "config.json";

/// The default settings of generation.
const GENERATION_CONFIG: &str = "generation_config.json";

/// Files of a tokenizer that are copied if they exist, besides its vocabularies and all that start
/// with `tokenizer` or `chat_template`.
const TOKENIZER_FILES: [&str; 6] = [
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "sentencepiece.bpe.model",
];
/// Files beside config.json that describe the quantization of weights.
const QUANTIZATION_FILES: [&str; 3] = [MODELOPT_CONFIG, "quantize_config.json", "quant_config.json"];
/// The settings of ModelOpt.
const MODELOPT_CONFIG: &str = "hf_quant_config.json";
/// The chat template of a folder, if it is a separate file.
pub const TEMPLATE_FILE: &str = "chat_template.jinja";
/// The folder in which transformers keeps named chat templates, one `.jinja` file each.
const NAMED_TEMPLATES: &str = "additional_chat_templates";
/// The settings of a tokenizer, which may also hold its chat template.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// The change of `QUANTIZATION_CONFIG`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum QuantizationChange {
    /// The description stays unchanged.
    #[default]
    Keep,
    /// The new weights are not quantized.
    Remove,
    /// The new weights are quantized in this way.
    Set(Value),
}

/// The changes of config.json for new weights; `None` keeps a key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConfigChanges {
    /// The dtype of the new weights.
    pub dtype: Option<StoredDtype>,
    /// True if embedding and head are one tensor.
    pub tie_word_embeddings: Option<bool>,
    /// The number of tokens.
    pub vocab_size: Option<usize>,
    /// The quantization of the new weights.
    pub quantization: QuantizationChange,
    /// True if the new weights are of the whole image-text model, and not of its text part.
    pub whole: bool,
    /// True if the new weights have the layers that predict further tokens.
    pub predict_further: bool,
}

impl ConfigChanges {
    /// Returns the changes for weights with `entries`. The dtype is the float type of most of their
    /// bytes, and the number of tokens is the number of rows of the embedding. The quantization is
    /// removed if none of the entries belongs to a quantized tensor.
    pub fn for_weights(entries: &[WriteEntry]) -> Self {
        let mut bytes = BTreeMap::new();
        for entry in entries.iter().filter(|entry| entry.dtype.is_float()) {
            *bytes.entry(entry.dtype).or_insert(0) += entry.bytes();
        }
        let dtype = bytes.into_iter().max_by_key(|&(_, bytes)| bytes).map(|(dtype, _)| dtype);
        let quantization = if entries.iter().any(|entry| readers::is_companion(&entry.name)) {
            QuantizationChange::Keep
        } else {
            QuantizationChange::Remove
        };
        let table = entries.iter().find(|entry| entry.name == EMBED_TOKENS || entry.name == LM_HEAD);
        let vocab_size = table.filter(|table| table.dtype.is_float()).and_then(|table| table.shape.first());
        Self { dtype, quantization, vocab_size: vocab_size.copied(), ..Self::default() }
    }

    /// Returns the changes for weights with the names, shapes and types of the old ones: none.
    pub fn for_same_files() -> Self {
        Self { whole: true, predict_further: true, ..Self::default() }
    }

    /// Returns the same changes for weights with the tensors that `retained` has.
    #[must_use]
    pub fn with_retained(self, retained: &RetainedTensors) -> Self {
        Self { whole: retained.is_whole(), predict_further: retained.predict_further(), ..self }
    }

    /// Returns the same changes; if `untied`, also with embedding and head as two tensors.
    #[must_use]
    pub fn untied(self, untied: bool) -> Self {
        Self { tie_word_embeddings: untied.then_some(false).or(self.tie_word_embeddings), ..self }
    }
}

/// Reads `folder`/config.json with its keys in order; for a model for images, that of its text
/// part.
///
/// # Errors
/// User: the file is missing or is not a JSON object.
pub fn read_config(folder: &Path) -> Result<Map<String, Value>> {
    let config = read_whole_config(folder)?;
    Ok(text_part(&config).map_or(config, |(text, _)| text))
}

/// Works like [`read_config`]; for a model for images, returns the settings of the whole model.
fn read_whole_config(folder: &Path) -> Result<Map<String, Value>> {
    let path = folder.join(CONFIG_FILE);
    let mut config = read_object(&path)?;
    if !config.contains_key(QUANTIZATION_CONFIG)
        && let Some(settings) = modelopt_settings(folder)?
    {
        config.insert(QUANTIZATION_CONFIG.into(), settings.into());
    }
    Ok(config)
}

fn read_object(path: &Path) -> Result<Map<String, Value>> {
    let text = input_file::read("read", path)?;
    serde_json::from_slice(&text)
        .map_err(|error| Error::user(format!("cannot read {}", path.display())).because(error.to_string()))
}

/// Returns the settings in hf_quant_config.json, in which ModelOpt describes the weights of a
/// folder, in earlier versions there alone. `None` if it does not exist or describes plain weights.
fn modelopt_settings(folder: &Path) -> Result<Option<Map<String, Value>>> {
    let path = folder.join(MODELOPT_CONFIG);
    if facts(&path)?.is_none() {
        return Ok(None);
    }
    let refused = |cause: String| {
        Err(Error::user(format!("cannot read {}", path.display()))
            .because(cause)
            .hint("give the model that was not quantized"))
    };
    let Some(Value::Object(mut settings)) = read_object(&path)?.shift_remove("quantization") else {
        return refused("it has no object `quantization`, which describes the weights".into());
    };
    let accepted = readers::MODELOPT_ALGORITHMS;
    let algorithm = settings.get("quant_algo");
    if algorithm.is_some_and(Value::is_null) {
        return Ok(None);
    }
    let name = algorithm.and_then(Value::as_str);
    if !name.is_some_and(|name| accepted.iter().any(|known| known.eq_ignore_ascii_case(name))) {
        let actual = algorithm.map_or("missing".into(), Value::to_string);
        return refused(format!(
            "`quantization.quant_algo` is {actual}; accepted: null, \"{}\"",
            accepted.join("\", \"")
        ));
    }
    settings.insert("quant_method".into(), readers::MODELOPT.into());
    Ok(Some(settings))
}

/// Returns the place where the files of `folder` describe its weights as quantized.
///
/// # Errors
/// User: a file cannot be read.
pub fn quantization_place(folder: &Path) -> Result<Option<String>> {
    if read_object(&folder.join(CONFIG_FILE))?.contains_key(QUANTIZATION_CONFIG) {
        return Ok(Some(format!("{CONFIG_FILE} has `{QUANTIZATION_CONFIG}`")));
    }
    Ok(modelopt_settings(folder)?.map(|_| format!("{MODELOPT_CONFIG} describes its weights")))
}

/// Works like [`read_config`] for a folder that may have no config.json.
///
/// # Errors
/// User: the file cannot be read or is not a JSON object.
pub(super) fn config_if_any(folder: &Path) -> Result<Option<Map<String, Value>>> {
    facts(&folder.join(CONFIG_FILE))?.map(|_| read_config(folder)).transpose()
}

/// A tokenizer as a run used it: its folder, and files with other contents than there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenizerFiles {
    /// The folder of its files.
    pub folder: PathBuf,
    /// The files that replace those in the folder: names and texts.
    pub changed: Vec<(String, String)>,
    /// True if `changed` has a chat template, which is then the only one.
    pub has_template: bool,
}

impl TokenizerFiles {
    /// Returns the tokenizer in the `folder` of an adapter of `base`, if it replaces the base's.
    /// Only a tokenizer.json replaces a tokenizer.json: PEFT saves the sentencepiece model that a
    /// slow tokenizer was read from, without the rules of the base's file.
    ///
    /// # Errors
    /// Storage: a folder cannot be read.
    pub fn of_adapter(folder: &Path, base: &Path) -> Result<Option<Self>> {
        let own = vocabulary(folder)?;
        let replaces = own == Some(TOKENIZER_JSON) || vocabulary(base)? != Some(TOKENIZER_JSON);
        Ok(own.filter(|_| replaces).map(|_| TokenizerFiles {
            folder: folder.to_owned(),
            changed: Vec::new(),
            has_template: false,
        }))
    }

    /// Writes it into the existing folder `to`, over existing files.
    ///
    /// # Errors
    /// Storage: reading or writing fails.
    pub fn write(&self, to: &Path) -> Result<()> {
        // No other vocabulary has the tokens of a changed tokenizer.json.
        let is_changed = self.changed.iter().any(|(name, _)| name == TOKENIZER_JSON);
        copy_tokenizer(&self.folder, to, if is_changed { &[TOKENIZER_JSON] } else { &VOCABULARIES })?;
        if !self.has_template {
            copy_templates(&self.folder, to)?;
        }
        self.changed.iter().try_for_each(|(name, text)| write::write_text(&to.join(name), text).map(drop))
    }
}

/// Returns the name of the vocabulary in `folder`, if it has one.
fn vocabulary(folder: &Path) -> Result<Option<&'static str>> {
    let names = if facts(folder)?.is_some() { file_names(folder)? } else { Vec::new() };
    Ok(tokenizer_names::vocabulary(|name| names.iter().any(|listed| listed == name)))
}

/// Copies the sidecar files of the weights in `from` to the existing folder `to`. A given
/// `tokenizer` replaces the one in `from`. config.json gets the `changes` and is written last: a
/// folder that has one is complete.
///
/// # Errors
/// User: `from` has no valid config.json. Storage: reading or writing fails.
pub fn copy(
    from: &Path,
    tokenizer: Option<&TokenizerFiles>,
    to: &Path,
    changes: ConfigChanges,
) -> Result<()> {
    let whole = changes.whole;
    let keeps_quantization = changes.quantization == QuantizationChange::Keep;
    let mut config = if whole {
        changed_whole(read_whole_config(from)?, changes)
    } else {
        changed(read_config(from)?, changes)
    };
    if keeps_quantization && modelopt_settings(from)?.is_some() {
        // The copied file has the settings that config.json of `from` does not have.
        if !read_object(&from.join(CONFIG_FILE))?.contains_key(QUANTIZATION_CONFIG) {
            config.shift_remove(QUANTIZATION_CONFIG);
        }
    }
    copy_tokenizer(from, to, if tokenizer.is_some() { &[] } else { &VOCABULARIES })?;
    if facts(&from.join(GENERATION_CONFIG))?.is_some_and(|metadata| metadata.is_file()) {
        copy_file(&from.join(GENERATION_CONFIG), &to.join(GENERATION_CONFIG))?;
    }
    if keeps_quantization {
        for name in file_names(from)?.iter().filter(|name| QUANTIZATION_FILES.contains(&name.as_str())) {
            copy_file(&from.join(name), &to.join(name))?;
        }
    }
    if whole {
        for name in file_names(from)?.iter().filter(|name| PROCESSOR_FILES.contains(&name.as_str())) {
            copy_file(&from.join(name), &to.join(name))?;
        }
    }
    tokenizer.map_or_else(|| copy_templates(from, to), |tokenizer| tokenizer.write(to))?;
    write::write_text(&to.join(CONFIG_FILE), &format!("{:#}\n", Value::Object(config)))?;
    Ok(())
}

/// Copies the existing files of the tokenizer and its settings from `from`, over those in `to`,
/// without its templates. Only the named `vocabularies` are copied.
///
/// # Errors
/// Storage: reading or writing fails.
fn copy_tokenizer(from: &Path, to: &Path, vocabularies: &[&str]) -> Result<()> {
    let is_part = |name: &str| {
        let is_other = TOKENIZER_FILES.contains(&name) || name.starts_with("tokenizer");
        vocabularies.contains(&name) || is_other && !VOCABULARIES.contains(&name)
    };
    let mut names = file_names(from)?.into_iter().filter(|name| is_part(name));
    names.try_for_each(|name| copy_file(&from.join(&name), &to.join(&name)))
}

/// Copies the files of chat templates; tokenizer_config.json already contains its own.
///
/// # Errors
/// Storage: reading or writing fails.
fn copy_templates(from: &Path, to: &Path) -> Result<()> {
    for name in file_names(from)?.into_iter().filter(|name| name.starts_with("chat_template")) {
        copy_file(&from.join(&name), &to.join(&name))?;
    }
    let (templates, copies) = (from.join(NAMED_TEMPLATES), to.join(NAMED_TEMPLATES));
    if facts(&templates)?.is_some_and(|metadata| metadata.is_dir()) {
        std::fs::create_dir_all(&copies).map_err(|error| Error::io("create", &copies, &error))?;
        for name in file_names(&templates)? {
            copy_file(&templates.join(&name), &copies.join(&name))?;
        }
    }
    Ok(())
}

/// Returns the names of the files (or links to files) in `folder`, sorted.
fn file_names(folder: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    for name in names_in(folder)? {
        if facts(&folder.join(&name))?.is_some_and(|metadata| metadata.is_file()) {
            files.push(name);
        }
    }
    Ok(files)
}

/// Returns the metadata of a file or folder, or of a link's target; `None` if it does not exist.
fn facts(path: &Path) -> Result<Option<Metadata>> {
    match path.metadata() {
        Ok(metadata) => Ok(Some(metadata)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("read", path, &error)),
    }
}

/// Copies the contents without the permissions, since a cache keeps its files read-only.
pub(super) fn copy_file(from: &Path, to: &Path) -> Result<()> {
    let contents = std::fs::read(from).map_err(|error| Error::io("read", from, &error))?;
    std::fs::write(to, contents).map_err(|error| Error::io("write", to, &error))
}

/// Keys of the number of layers that predict further tokens (Qwen3.5, GLM-4.5 and DeepSeek).
const FURTHER_LAYERS: [&str; 2] = ["mtp_num_hidden_layers", "num_nextn_predict_layers"];

/// The keys of the dtype: up to transformers 4, since 5.
const DTYPES: [&str; 2] = ["torch_dtype", "dtype"];

/// Applies `changes` to the settings of a whole image-text model and of its text part.
fn changed_whole(mut config: Map<String, Value>, mut changes: ConfigChanges) -> Map<String, Value> {
    let has_dtype = |keys: &Map<String, Value>| DTYPES.iter().any(|key| keys.contains_key(*key));
    let whole_has_dtype = has_dtype(&config);
    let tokens = text_part(&config).and_then(|(text, _)| text.get("vocab_size").cloned());
    if let Some(Value::Object(text)) = config.get_mut("text_config") {
        if changes.vocab_size.is_some_and(|wanted| tokens != Some(wanted.into())) {
            text.entry("vocab_size").or_insert(Value::Null);
        }
        let dtype = changes.dtype.filter(|_| has_dtype(text));
        let of_text = ConfigChanges { dtype, ..changes.clone() };
        changes.dtype = changes.dtype.filter(|_| whole_has_dtype || dtype.is_none());
        *text = changed(std::mem::take(text), of_text);
    }
    changed(config, changes)
}

/// Applies `changes`. `dtype` goes under the key of the file: `torch_dtype` up to transformers 4,
/// `dtype` since 5.
fn changed(mut config: Map<String, Value>, changes: ConfigChanges) -> Map<String, Value> {
    if let Some(name) = changes.dtype.and_then(StoredDtype::config_name) {
        let mut keys = DTYPES.to_vec();
        keys.retain(|key| config.contains_key(*key));
        let keys = if keys.is_empty() { vec!["torch_dtype"] } else { keys };
        for key in keys {
            config.insert(key.into(), name.into());
        }
    }
    if let Some(tied) = changes.tie_word_embeddings {
        config.insert("tie_word_embeddings".into(), tied.into());
        if let Some(of_family) = config.get_mut(TIE_EMBEDDING) {
            *of_family = tied.into();
        }
    }
    if let (Some(tokens), Some(vocab_size)) = (changes.vocab_size, config.get_mut("vocab_size")) {
        *vocab_size = tokens.into();
    }
    for key in FURTHER_LAYERS.into_iter().filter(|_| !changes.predict_further) {
        if let Some(count) = config.get_mut(key).filter(|count| count.is_u64()) {
            *count = 0.into();
        }
    }
    match changes.quantization {
        QuantizationChange::Keep => {}
        QuantizationChange::Remove => {
            // `remove` would move the last key to the position of this one.
            config.shift_remove(QUANTIZATION_CONFIG);
        }
        QuantizationChange::Set(value) => {
            config.insert(QUANTIZATION_CONFIG.into(), value);
        }
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(text: &str, changes: ConfigChanges) -> String {
        let config = serde_json::from_str(text).expect("an object");
        Value::Object(changed(config, changes)).to_string()
    }

    #[test]
    fn dtype_goes_under_the_key_of_its_generation() {
        let bf16 = || ConfigChanges { dtype: Some(StoredDtype::BF16), ..Default::default() };
        assert_eq!(
            change(r#"{"z":1,"torch_dtype":"float32","a":2}"#, bf16()),
            r#"{"z":1,"torch_dtype":"bfloat16","a":2}"#
        );
        assert_eq!(change(r#"{"dtype":"float16"}"#, bf16()), r#"{"dtype":"bfloat16"}"#);
        assert_eq!(change("{}", bf16()), r#"{"torch_dtype":"bfloat16"}"#);
    }

    #[test]
    fn the_dtype_of_a_whole_model_goes_where_it_was() {
        let bf16 = || ConfigChanges { dtype: Some(StoredDtype::BF16), ..Default::default() };
        for (before, after) in [
            (r#"{"text_config":{"dtype":"float32"}}"#, r#"{"text_config":{"dtype":"bfloat16"}}"#),
            (r#"{"text_config":{"a":1},"dtype":"float32"}"#, r#"{"text_config":{"a":1},"dtype":"bfloat16"}"#),
            (r#"{"text_config":{}}"#, r#"{"text_config":{},"torch_dtype":"bfloat16"}"#),
        ] {
            let config = serde_json::from_str(before).expect("an object");
            assert_eq!(Value::Object(changed_whole(config, bf16())).to_string(), after);
        }
    }

    #[test]
    fn quantization_follows_the_weights() {
        let config = r#"{"a":1,"quantization_config":{"quant_method":"bitsandbytes"},"z":2}"#;
        let entry = |name: &str| WriteEntry {
            name: name.into(),
            dtype: StoredDtype::F32,
            shape: vec![1],
            stack: None,
        };
        let of = |quantization| ConfigChanges { quantization, ..Default::default() };
        let plain = ConfigChanges::for_weights(&[entry("a.weight")]).quantization;
        assert_eq!(change(config, of(plain)), r#"{"a":1,"z":2}"#);
        let both = ConfigChanges::for_weights(&[entry("a.weight"), entry("a.SCB")]).quantization;
        assert_eq!(change(config, of(both)), config);
        let set = QuantizationChange::Set("new".into());
        assert_eq!(change(config, of(set)), r#"{"a":1,"quantization_config":"new","z":2}"#);
    }

    #[test]
    fn what_did_not_change_stays() {
        let config = r#"{"tie_word_embeddings":true,"dtype":"float16"}"#;
        assert_eq!(change(config, ConfigChanges::default()), config);
        let plain = ConfigChanges {
            vocab_size: Some(7),
            quantization: QuantizationChange::Remove,
            ..Default::default()
        };
        assert_eq!(
            change(r#"{"quantization_config":{"load_in_4bit":true},"vocab_size":5,"z":1}"#, plain),
            r#"{"vocab_size":7,"z":1}"#
        );
        assert_eq!(
            change(
                r#"{"mtp_num_hidden_layers":1,"num_nextn_predict_layers":null}"#,
                ConfigChanges::default()
            ),
            r#"{"mtp_num_hidden_layers":0,"num_nextn_predict_layers":null}"#
        );
        let untied = ConfigChanges { tie_word_embeddings: Some(false), ..Default::default() };
        assert_eq!(change(config, untied.clone()), r#"{"tie_word_embeddings":false,"dtype":"float16"}"#);
        assert_eq!(
            change(r#"{"tie_embedding":true,"z":1}"#, untied),
            r#"{"tie_embedding":false,"z":1,"tie_word_embeddings":false}"#
        );
    }
}
