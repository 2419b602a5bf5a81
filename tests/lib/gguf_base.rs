//! GGUF files as base models: blocks as gguf-py decodes them, files as transformers reads them, and
//! every golden model that the export writes, read again.

use std::path::{Path, PathBuf};

use finetune::data::Tokenizer;
use finetune::export::gguf::{GgufType, describe_base, stored_type, write_model};
use finetune::model::{ModelConfig, settle};
use finetune::quant::BlockType;
use finetune::weights::ModelFiles;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::logits::floats;

pub(crate) fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path)
}

fn json_of(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden(path)).unwrap()).unwrap()
}

/// The digest of the golden files: -0.0 counts as 0.0.
fn digest(values: &[f32]) -> String {
    let bytes: Vec<u8> = values.iter().flat_map(|value| (value + 0.0).to_le_bytes()).collect();
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn blocks_have_the_values_of_gguf_py() {
    let entries = json_of("qbases/gguf_blocks.json");
    let entries = entries.as_object().unwrap();
    assert_eq!(entries.len(), BlockType::ALL.len());
    for (number, golden) in entries {
        let kind = BlockType::of_number(number.parse().unwrap()).unwrap();
        let hex = golden["blocks"].as_str().unwrap();
        let bytes: Vec<u8> =
            (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
        let mut values = vec![0.0; golden["elements"].as_u64().unwrap() as usize];
        assert_eq!(bytes.len() / kind.bytes() * kind.elements(), values.len(), "{kind}");
        kind.dequantize(&bytes, &mut values);
        assert_eq!(digest(&values), golden["sha256_f32"].as_str().unwrap(), "{kind}");
    }
}

/// A GGUF model, described in a folder of its own.
pub(crate) fn described(file: &Path) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    describe_base(file, folder.path()).unwrap();
    folder
}

pub(crate) fn config(folder: &Path) -> ModelConfig {
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    ModelConfig::from_json(&text, "config.json").unwrap()
}

/// Files of llama and qwen3, with weights that gguf-py dequantizes and a tokenizer that
/// transformers reads.
#[test]
fn files_have_the_weights_and_ids_of_transformers() {
    let all = json_of("qbases/gguf.json");
    for (model, wanted) in all.as_object().unwrap() {
        let folder = described(&golden("qbases/models").join(model).join("model.gguf"));
        let files = ModelFiles::open(folder.path()).unwrap();
        let weights = wanted["weights"].as_object().unwrap();
        assert_eq!(files.names().len(), weights.len(), "{model}");
        for (name, sum) in weights {
            assert_eq!(digest(&floats(&files, name)), sum.as_str().unwrap(), "{model}: {name}");
        }
        let tokenizer = Tokenizer::load(folder.path()).unwrap();
        for text in wanted["encode"].as_array().unwrap() {
            let ids: Vec<u32> =
                text["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
            let text = text["text"].as_str().unwrap();
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{model}: {text:?}");
        }
    }
}

/// Keys of config.json that a file does not hold, and weights that it holds under other names or
/// changed, by the golden model: windows that llama.cpp ignores, another family of the same
/// architecture, a scale of attention that the weights of q absorb, rotated columns as neighbours.
const DIFFERING: [(&str, &[&str], &[&str]); 7] = [
    ("tiny-gemma2", &["attention scale"], &["self_attn.q_proj"]),
    ("tiny-glm4-moe-lite", &["model_type", "token mixers"], &["self_attn.q_proj", "self_attn.kv_a_proj"]),
    ("tiny-granite4", &["model_type"], &["shared_mlp"]),
    ("tiny-ministral", &["model_type", "sliding_window"], &[]),
    ("tiny-mistral", &["model_type", "sliding_window"], &[]),
    ("tiny-phi3", &["sliding_window"], &[]),
    ("tiny-starcoder2", &["sliding_window"], &[]),
];
/// The settings of ropes as text; their frequencies are compared instead.
const ROPES: &str = "rope_theta and rope_scaling";

/// Checks that the model in `folder` is that in `file`.
pub(crate) fn is_the_same(name: &str, folder: &Path, own: &ModelConfig, files: &ModelFiles, file: &Path) {
    let described = described(file);
    let again = config(described.path());
    let (_, keys, modules) = DIFFERING.into_iter().find(|(model, ..)| *model == name).unwrap_or_default();
    let (ours, theirs) = (again.semantics(), own.semantics());
    let differing: Vec<&str> = theirs
        .iter()
        .filter(|(key, value)| *key != ROPES && ours.get(*key) != Some(value))
        .map(|(key, _)| key.as_str())
        .collect();
    assert_eq!(differing, keys, "{name}");
    for (ours, theirs) in again.ropes.iter().zip(&own.ropes) {
        assert_eq!((&ours.inv_freq, &ours.kind), (&theirs.inv_freq, &theirs.kind), "{name}");
        assert!((ours.attention_factor - theirs.attention_factor).abs() < 1e-6, "{name}");
    }
    let read = ModelFiles::open(described.path()).unwrap();
    let same = |weight: &&str| read.info(weight).is_some() && floats(&read, weight) == floats(files, weight);
    let other: Vec<&str> = files.names().filter(|weight| !same(weight)).collect();
    assert!(
        other.iter().all(|weight| modules.iter().any(|module| weight.contains(module))),
        "{name}: {other:?}"
    );
    assert_eq!(other.is_empty(), modules.is_empty(), "{name}");
    let tokenizers = [described.path(), folder].map(|folder| Tokenizer::load(folder).unwrap());
    for text in ["Hello, world! 12345 \n\n  x", " leading", "naïve 日本 🙂", "a  b   c", "it's We'LL"] {
        let [ours, theirs] = [true, false].map(|special| {
            let [ours, theirs] = [0, 1].map(|at| tokenizers[at].encode(text, special).unwrap());
            (ours == theirs, theirs)
        });
        assert!(ours.0 && theirs.0, "{name}: {text:?}");
    }
}

/// Each golden model of the two sets, exported and read again: the arithmetic of its config.json,
/// its weights to the bit, the ids of texts.
#[test]
fn exported_models_are_themselves_again() {
    let mut read = Vec::new();
    for set in ["models", "families/models"] {
        let mut folders: Vec<PathBuf> =
            std::fs::read_dir(golden(set)).unwrap().map(|entry| entry.unwrap().path()).collect();
        folders.sort();
        for folder in folders {
            let name = folder.file_name().unwrap().to_string_lossy().into_owned();
            let Ok(mut files) = ModelFiles::open(&folder) else { continue };
            let mut own = config(&folder);
            settle(&mut own, &mut files).unwrap();
            let kind = stored_type(&files);
            for kind in [GgufType::F32, kind] {
                let dir = tempfile::tempdir().unwrap();
                let file = dir.path().join("model.gguf");
                if write_model(&own, &files, "tiny", kind, &file).is_ok() {
                    is_the_same(&name, &folder, &own, &files, &file);
                    read.push(own.family.gguf.architecture);
                }
            }
        }
    }
    read.sort_unstable();
    read.dedup();
    assert_eq!(
        read.join(" "),
        "apertus arcee command-r deepseek2 ernie4_5 ernie4_5-moe falcon gemma2 gemma3 gemma4 glm4 glm4moe gpt-oss gptneox \
         granite granitemoe hunyuan-dense hunyuan-moe lfm2 llama minimax-m2 mistral3 mistral4 olmo2 olmoe phi3 qwen2 \
         qwen2moe qwen3 qwen35 qwen35moe seed_oss smollm3 stablelm starcoder2"
    );
}

/// Experts that a checkpoint has in MXFP4 are blocks of it in the file, of each type.
#[test]
fn experts_in_mxfp4_stay_in_it() {
    let folder = golden("qbases/models/tiny-mxfp4");
    let mut files = ModelFiles::open(&folder).unwrap();
    let mut own = config(&folder);
    settle(&mut own, &mut files).unwrap();
    for kind in [GgufType::BF16, GgufType::Q8_0] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("model.gguf");
        let written = write_model(&own, &files, "tiny", kind, &file).unwrap();
        assert_eq!(written.types["mxfp4"], 3 * own.num_layers(), "gates, ups and second layers");
        let described = described(&file);
        let read = ModelFiles::open(described.path()).unwrap();
        let of_experts: Vec<&str> = read.names().filter(|name| name.contains("experts.")).collect();
        assert!(of_experts.iter().any(|name| name.contains("experts.3.")), "{of_experts:?}");
        for name in of_experts {
            assert!(floats(&read, name) == floats(&files, name), "{kind}: {name}");
        }
    }
}

/// A model whose file is in two parts.
#[test]
fn parts_of_a_split_file_are_one_model() {
    let dir = tempfile::tempdir().unwrap();
    let whole = std::fs::read(golden("qbases/models/tiny-gguf-q4_0/model.gguf")).unwrap();
    // A second part without tensors and keys.
    let empty = [b"GGUF".as_slice(), &3u32.to_le_bytes(), &[0; 16]].concat();
    let [first, second] = [1, 2].map(|part| dir.path().join(format!("m-0000{part}-of-00002.gguf")));
    std::fs::write(&first, whole).unwrap();
    let refused = describe_base(&first, dir.path()).unwrap_err().to_string();
    assert!(refused.contains("m-00002-of-00002.gguf"), "{refused}");
    std::fs::write(&second, empty).unwrap();
    for path in [first, second] {
        describe_base(&path, &dir.path().join("described")).unwrap();
    }
    let files = ModelFiles::open(&dir.path().join("described")).unwrap();
    assert_eq!((files.files().len(), files.names().len()), (2, 21));
}
