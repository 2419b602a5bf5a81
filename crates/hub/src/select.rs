//! Selects the files of a repository or folder that finetune uses, from their names alone.
//!
//! A model is its configuration, its tokenizer and its safetensors; a data set is its rows in one
//! format. finetune never selects pickle files (`.bin`, `.pt`, `.pth`) and Python code: opening
//! either can run a stranger's code. Errors name what a repository does not have as precisely as
//! its file names allow.

use std::collections::BTreeSet;
use std::path::Path;

use crate::error::{Error, Result};
use crate::gguf_names::{gguf_models, parts_of};
use crate::tokenizer_names;

/// The configuration, required for every model.
pub(super) const CONFIG: &str = "config.json";
/// The weights of a model in one file.
pub(super) const SINGLE: &str = "model.safetensors";
/// The list of shards of a model in several files.
pub(super) const INDEX: &str = "model.safetensors.index.json";

const TEXTS: [&str; 4] = [CONFIG, "generation_config.json", "hf_quant_config.json", INDEX];
/// Files beside the vocabulary of a tokenizer.
const TOKENIZER: [&str; 4] =
    ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"];

/// The files of a model that the caller needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    /// Configuration, tokenizer and the list of shards.
    Headers,
    /// The same files of a repository that has weights; the weights stay on the hub.
    InPlace,
    /// The same files and the weights.
    Weights,
}

/// The form of a repository's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Weights {
    Single,
    Sharded,
    /// One GGUF model, which needs no other file.
    Gguf,
}

/// The reason for which a repository cannot be used as a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ModelMismatch {
    /// Meta's original checkpoint, `consolidated.*.pth`.
    Consolidated(String),
    /// Weights in the layout of transformers, but pickled.
    Pickle(String),
    /// A repository of several GGUF models, with their names.
    Gguf(String),
    /// A PEFT adapter, which is trained on top of a model.
    Adapter,
    /// Safetensors under other names than transformers uses.
    OtherSafetensors(String),
    /// No weights at all.
    Weights,
    /// A repository without config.json.
    Config,
}

/// Returns the small files of a model: all but the weights.
pub(super) fn texts(names: &[String]) -> Vec<&str> {
    let wanted = |name: &str| {
        TEXTS.contains(&name) || tokenizer_names::PROCESSOR_FILES.contains(&name) || is_tokenizer(name, names)
    };
    names.iter().map(String::as_str).filter(|name| wanted(name)).collect()
}

/// Returns whether this is a file of the tokenizer or a chat template; `names` are all files.
pub(super) fn is_tokenizer(name: &str, names: &[String]) -> bool {
    tokenizer_names::vocabulary(|known| has(names, known)) == Some(name)
        || TOKENIZER.contains(&name)
        || (name.starts_with("additional_chat_templates/") && name.ends_with(".jinja"))
}

/// Returns the form of the weights, given the names of all files.
pub(super) fn weights(names: &[String]) -> Result<Weights, ModelMismatch> {
    // transformers looks for the single file first.
    if has(names, SINGLE) {
        return Ok(Weights::Single);
    }
    if has(names, INDEX) {
        return Ok(Weights::Sharded);
    }
    let first = |test: &dyn Fn(&str) -> bool| names.iter().find(|name| test(name)).cloned();
    Err(if has(names, "adapter_config.json") {
        ModelMismatch::Adapter
    } else if let Some(name) = first(&|name| name.starts_with("pytorch_model") && name.ends_with(".bin")) {
        ModelMismatch::Pickle(name)
    } else if let Some(name) = first(&|name| name.starts_with("consolidated.") && name.ends_with(".pth")) {
        ModelMismatch::Consolidated(name)
    } else if let [_, ..] = gguf_models(names.iter().map(String::as_str))[..] {
        match gguf_models(names.iter().map(String::as_str))[..] {
            [_] => return Ok(Weights::Gguf),
            ref several => ModelMismatch::Gguf(several.join(", ")),
        }
    } else if let Some(name) = first(&|name| name.ends_with(".safetensors")) {
        ModelMismatch::OtherSafetensors(name)
    } else if let Some(name) =
        first(&|name| [".bin", ".pt", ".pth", ".ckpt", ".pkl"].iter().any(|end| name.ends_with(end)))
    {
        ModelMismatch::Pickle(name)
    } else {
        ModelMismatch::Weights
    })
}

/// Returns the files of the only GGUF model among all names.
pub(super) fn gguf_files(names: &[String]) -> Vec<String> {
    let models = gguf_models(names.iter().map(String::as_str));
    let parts = models.first().map(|name| parts_of(Path::new(name))).unwrap_or_default();
    parts.iter().map(|part| part.to_string_lossy().into_owned()).collect()
}

/// Checks that the names make up a model, as far as `scope` requires.
pub(super) fn check_model(names: &[String], scope: Scope) -> Result<(), ModelMismatch> {
    let weights = weights(names);
    match (has(names, CONFIG), weights, scope) {
        (true, Ok(_), _) | (true, Err(_), Scope::Headers) | (false, Ok(Weights::Gguf), _) => Ok(()),
        (true, Err(lack), Scope::InPlace | Scope::Weights) => Err(lack),
        (false, Ok(_) | Err(ModelMismatch::Weights | ModelMismatch::OtherSafetensors(_)), _) => {
            Err(ModelMismatch::Config)
        }
        (false, Err(lack), _) => Err(lack),
    }
}

/// Returns whether a name is among the names.
pub(super) fn has(names: &[String], name: &str) -> bool {
    names.iter().any(|known| known == name)
}

impl ModelMismatch {
    /// Returns the error for `subject`, such as "model `a/b`".
    pub(super) fn error(&self, subject: &str) -> Error {
        let accepted = "accepted: model.safetensors, or model.safetensors.index.json with its shards";
        match self {
            ModelMismatch::Consolidated(file) => {
                Error::user(format!("{subject} holds only Meta's original checkpoint ({file})"))
                    .because("it is a pickle, which can run code when it is opened, and not in the layout of transformers")
                    .because(accepted)
                    .hint(
                        "give the repository of the same model whose name ends in `-hf`, or convert it with Python: \
                         `python -m transformers.models.llama.convert_llama_weights_to_hf --input_dir DIR --output_dir OUT`",
                    )
            }
            ModelMismatch::Pickle(file) => Error::user(format!("{subject} holds only pickled weights ({file})"))
                .because("a pickle can run code when it is opened, so it is neither downloaded nor read")
                .because(accepted)
                .hint(
                    "look for a repository of the same model that holds safetensors, often the same name with `-hf` \
                     at its end; or convert it once with Python: `python -c \"from transformers import AutoModelForCausalLM as M; \
                     M.from_pretrained('MODEL').save_pretrained('OUT', safe_serialization=True)\"`, \
                     and copy its tokenizer files into OUT",
                ),
            ModelMismatch::Gguf(files) => Error::user(format!("{subject} holds several GGUF models"))
                .because(format!("found {files}"))
                .hint("download one of them, such as with `hf download ID FILE`, and give its path as `--model`"),
            ModelMismatch::Adapter => Error::user(format!("{subject} is a PEFT adapter and not a model"))
                .because("it holds adapter_config.json and no model weights")
                .hint(
                    "give its base (`base_model_name_or_path` in adapter_config.json) as the model, \
                     and the adapter with `--adapter` or `adapter.path`",
                ),
            ModelMismatch::OtherSafetensors(file) => {
                Error::user(format!("{subject} has no weights in the layout of transformers"))
                    .because(format!("it holds {file}"))
                    .because(accepted)
            }
            ModelMismatch::Weights => Error::user(format!("{subject} has no weights")).because(accepted),
            ModelMismatch::Config => Error::user(format!("{subject} has no {CONFIG}"))
                .because("a model is a config.json, a tokenizer and safetensors")
                .hint("give a folder that holds config.json, or a hub id such as `owner/name`"),
        }
    }
}

/// Returns the shards that the text of an index file names, each once.
///
/// # Errors
/// The text is no index, or it names a shard that is not a safetensors file of this repository
/// (`names`).
pub(super) fn shards(index: &[u8], names: &[String]) -> Result<Vec<String>> {
    let shards = named_shards(index)?;
    match shards.iter().find(|shard| !has(names, shard)) {
        None => Ok(shards),
        Some(shard) => {
            Err(Error::user(format!("{INDEX} names `{shard}`, which the repository does not hold")))
        }
    }
}

/// Returns the shards that the text of an index file names, each once, in the repository or not.
///
/// # Errors
/// The text is no index, or it names a shard that is not a safetensors file inside the repository.
pub(super) fn named_shards(index: &[u8]) -> Result<Vec<String>> {
    #[derive(serde::Deserialize)]
    struct ShardIndex {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let parsed: ShardIndex = serde_json::from_slice(index)
        .map_err(|error| Error::user(format!("cannot read {INDEX}")).because(error.to_string()))?;
    let shards: BTreeSet<String> = parsed.weight_map.into_values().collect();
    if shards.is_empty() {
        return Err(Error::user(format!("{INDEX} names no shard")).because("its weight_map is empty"));
    }
    super::names::check_files(shards.iter().map(String::as_str))
        .map_err(|error| error.during(format!("cannot use {INDEX}")))?;
    if let Some(shard) = shards.iter().find(|shard| !shard.ends_with(".safetensors")) {
        return Err(Error::user(format!("{INDEX} names `{shard}` as a shard"))
            .because("only .safetensors files are read"));
    }
    Ok(shards.into_iter().collect())
}

/// Formats of data sets, best first. If a repository holds its rows in several formats, finetune
/// reads one of them.
const ROW_ENDINGS: [&str; 13] = [
    ".parquet",
    ".jsonl",
    ".jsonl.gz",
    ".jsonl.zst",
    ".json",
    ".json.gz",
    ".json.zst",
    ".csv",
    ".csv.gz",
    ".csv.zst",
    ".tsv",
    ".arrow",
    ".txt",
];
/// Files with such an ending that hold no rows.
const NOT_ROWS: [&str; 7] = [
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "config.json",
    "requirements.txt",
    "license.txt",
];

/// Returns whether a file of this name may hold rows.
pub(super) fn is_rows(name: &str) -> bool {
    let base = name.rsplit('/').next().unwrap_or(name);
    let is_listed = ROW_ENDINGS.iter().any(|ending| base.ends_with(ending));
    is_listed && !base.starts_with('.') && !NOT_ROWS.contains(&base.to_ascii_lowercase().as_str())
}

/// Returns the accepted endings of files with rows, for an error.
pub(super) fn accepted_rows() -> String {
    format!("accepted: {}", ROW_ENDINGS.join(", "))
}

/// Returns the files with rows of a data set: all that have the best format present.
pub(super) fn rows(names: &[String]) -> Vec<&str> {
    ROW_ENDINGS
        .iter()
        .map(|ending| {
            names.iter().map(String::as_str).filter(|name| name.ends_with(ending) && is_rows(name)).collect()
        })
        .find(|files: &Vec<&str>| !files.is_empty())
        .unwrap_or_default()
}

/// Returns the error for a data set without readable rows.
pub(super) fn no_rows(subject: &str, names: &[String]) -> Error {
    let error = Error::user(format!("{subject} has no file of rows")).because(accepted_rows());
    if names.iter().any(|name| name.ends_with(".py")) {
        error
            .because("a Python script makes its rows, and finetune never runs such a script")
            .hint("add `@refs/convert/parquet` to the id: this branch of the hub holds converted data")
    } else {
        error.hint("download it by hand, write its rows as JSONL and give that file")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_model_is_texts_and_safetensors() {
        let all = names(&[
            ".gitattributes",
            "README.md",
            "additional_chat_templates/tool.jinja",
            "chat_template.jinja",
            "config.json",
            "consolidated.safetensors",
            "model-1.safetensors",
            "model.safetensors.index.json",
            "modeling_x.py",
            "pytorch_model.bin",
            "tokenizer.json",
        ]);
        let expected = [
            "additional_chat_templates/tool.jinja",
            "chat_template.jinja",
            "config.json",
            "model.safetensors.index.json",
            "tokenizer.json",
        ];
        assert_eq!(texts(&all), expected);
        assert_eq!(weights(&all), Ok(Weights::Sharded));
        let vocabularies =
            names(&["tekken.json", "tokenizer.model", "tokenizer.model.v3", "added_tokens.json"]);
        assert_eq!(texts(&vocabularies), ["tekken.json", "added_tokens.json"]);
        assert_eq!(texts(&vocabularies[1..]), ["tokenizer.model", "added_tokens.json"]);
        assert_eq!(weights(&names(&["model.safetensors", INDEX])), Ok(Weights::Single));
    }

    #[test]
    fn what_is_lacking() {
        let lack = |list: &[&str]| check_model(&names(list), Scope::Weights).unwrap_err();
        assert_eq!(
            lack(&["consolidated.00.pth", "params.json"]),
            ModelMismatch::Consolidated("consolidated.00.pth".into())
        );
        assert_eq!(
            lack(&["config.json", "pytorch_model.bin"]),
            ModelMismatch::Pickle("pytorch_model.bin".into())
        );
        assert_eq!(lack(&["config.json", "model.pt"]), ModelMismatch::Pickle("model.pt".into()));
        assert_eq!(lack(&["a.gguf", "b.gguf", "README.md"]), ModelMismatch::Gguf("a.gguf, b.gguf".into()));
        assert_eq!(check_model(&names(&["m.Q4_K.gguf"]), Scope::Headers), Ok(()));
        let split = names(&["README.md", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj.gguf"]);
        assert_eq!(weights(&split), Ok(Weights::Gguf));
        assert_eq!(gguf_files(&split), split[1..3]);
        assert_eq!(lack(&["adapter_config.json", "adapter_model.safetensors"]), ModelMismatch::Adapter);
        assert_eq!(
            lack(&["config.json", "w.safetensors"]),
            ModelMismatch::OtherSafetensors("w.safetensors".into())
        );
        assert_eq!(lack(&["config.json"]), ModelMismatch::Weights);
        assert_eq!(lack(&["model.safetensors"]), ModelMismatch::Config);
        assert_eq!(lack(&["README.md"]), ModelMismatch::Config);
        assert_eq!(check_model(&names(&["config.json"]), Scope::Headers), Ok(()));
        assert_eq!(check_model(&names(&["params.json"]), Scope::Headers), Err(ModelMismatch::Config));
    }

    #[test]
    fn shards_of_an_index() {
        let repository = names(&["b.safetensors", "a.safetensors", "evil.bin"]);
        let index =
            br#"{"metadata":{},"weight_map":{"x":"b.safetensors","y":"a.safetensors","z":"b.safetensors"}}"#;
        assert_eq!(shards(index, &repository).unwrap(), ["a.safetensors", "b.safetensors"]);
        for bad in ["../a.safetensors", "/a.safetensors", "c.safetensors", "evil.bin", "C:\\\\a.safetensors"]
        {
            let index = format!(r#"{{"weight_map":{{"x":"{bad}"}}}}"#);
            assert!(shards(index.as_bytes(), &repository).is_err(), "{bad}");
        }
        for bad in ["", "{}", "[]", r#"{"weight_map":{}}"#, r#"{"weight_map":{"x":1}}"#] {
            assert!(shards(bad.as_bytes(), &repository).is_err(), "{bad}");
        }
    }

    #[test]
    fn rows_in_one_format() {
        let all =
            names(&["README.md", "a.jsonl", "data/train.parquet", "data/test.parquet", "dataset_infos.json"]);
        assert_eq!(rows(&all), ["data/train.parquet", "data/test.parquet"]);
        assert_eq!(rows(&names(&["a.jsonl", "b.csv", ".x.jsonl"])), ["a.jsonl"]);
        assert!(rows(&names(&["x.py", "dataset_infos.json", "requirements.txt"])).is_empty());
        let error = no_rows("data set `x`", &names(&["x.py"])).to_string();
        assert!(error.contains("@refs/convert/parquet"), "{error}");
    }
}
