//! `merge --requantize` for GGUF bases: the file of the base with new blocks for the tensors that
//! the adapter changes.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use candle_core::quantized::gguf_file::{Content, Value as Key, write};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use finetune::quant::BlockType;
use finetune::weights::ModelFiles;
use insta::assert_snapshot;
use serde_json::Value;

use crate::logits::floats;
use crate::test_dir::{TestDir, copy_folder, golden, lora};

/// A folder with the GGUF file `model.gguf`, and without any other model.
fn test_dir(model: &str) -> TestDir {
    let dir = TestDir::new();
    std::fs::remove_dir_all(dir.path("model")).unwrap();
    std::fs::copy(golden("qbases/models").join(model).join("model.gguf"), dir.path("model.gguf")).unwrap();
    dir
}

/// Trains an adapter of `model` that changes its weights by more than rounding.
fn train(dir: &TestDir, model: &str, more: &[&str]) {
    let mut args = lora(&[&["--set", "optimizer.learning_rate=0.02"], more].concat());
    (args[1], args[7]) = (model, "adapter");
    dir.said(&args);
}

fn merge<'a>(output: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let args = ["merge", "--model", "model.gguf", "--adapter", "adapter", "--output", output];
    [&args[..], more].concat()
}

/// Opens a model as runs do.
fn opened(path: &Path) -> ModelFiles {
    crate::logits::base(path).files.unwrap()
}

fn record(dir: &TestDir, folder: &str) -> Value {
    serde_json::from_slice(&std::fs::read(dir.path(folder).join("merge.json")).unwrap()).unwrap()
}

/// The bytes of a file before its tensors, and of each tensor, as candle finds them.
struct Parts {
    header: Vec<u8>,
    tensors: BTreeMap<String, (GgmlDType, Vec<u8>)>,
}

fn parts(path: &Path) -> Parts {
    let bytes = std::fs::read(path).unwrap();
    let content = Content::read(&mut File::open(path).unwrap()).unwrap();
    let data = content.tensor_data_offset as usize;
    let part = |(name, info): (&String, &candle_core::quantized::gguf_file::TensorInfo)| {
        let (kind, elements) = (info.ggml_dtype, info.shape.elem_count());
        let start = data + info.offset as usize;
        let size = elements / kind.block_size() * kind.type_size();
        (name.clone(), (kind, bytes[start..start + size].to_vec()))
    };
    Parts { header: bytes[..data].to_vec(), tensors: content.tensor_infos.iter().map(part).collect() }
}

fn distance(one: &[f32], other: &[f32]) -> f64 {
    one.iter().zip(other).map(|(a, b)| f64::from(a - b).powi(2)).sum()
}

/// Checks that weights of `after` which the adapter changes are nearer to the merged ones than
/// those of `before`, and that all others are the same. Returns the number of changed ones.
fn check([before, after, exact]: [&ModelFiles; 3], what: &str) -> usize {
    assert!(after.names().eq(before.names()), "{what}");
    let mut changed = 0;
    for (name, info) in before.tensors() {
        let [old, new, wanted] = [before, after, exact].map(|files| floats(files, name));
        let what = format!("{what}: {name}");
        assert_eq!(after.stored_format(name), before.stored_format(name), "{what}");
        assert_eq!(after.info(name).unwrap().range, info.range, "{what}");
        if old == wanted {
            assert_eq!(old, new, "{what}");
        } else {
            assert!(distance(&new, &wanted) < distance(&old, &wanted), "{what}");
            changed += 1;
        }
    }
    changed
}

/// Keys and unchanged tensors keep their bytes. The share of the adapter's effect that survives is
/// measured. The file is a model for every verb, and a second merge of the adapter is refused.
#[test]
fn files_are_written_again() {
    for (model, least) in [("tiny-gguf-q8_0", 0.9), ("tiny-gguf-q4_0", 0.5), ("tiny-gguf-q4_k", 0.5)] {
        let dir = test_dir(model);
        train(&dir, "model.gguf", &[]);
        let measured = ["--requantize", "--verify-on", "rows.jsonl", "--max-kl", "10"];
        let said = dir.said(&merge("merged", &measured));
        let share = record(&dir, "merged")["certificate"]["effect_kept"].as_f64().unwrap();
        assert!((least..1.2).contains(&share), "{model}: {share}\n{said}");
        assert!(said.contains("kept as they are: the keys of the GGUF file"), "{said}");
        let mut names: Vec<_> =
            std::fs::read_dir(dir.path("merged")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["merge.json", "model.gguf"]);
        dir.said(&merge("exact", &["--dtype", "f32"]));
        let [before, after, exact] = ["model.gguf", "merged", "exact"].map(|name| opened(&dir.path(name)));
        assert!(check([&before, &after, &exact], model) >= 7, "{model}");
        let [ours, theirs] = ["merged/model.gguf", "model.gguf"].map(|name| parts(&dir.path(name)));
        assert!(ours.header == theirs.header, "{model}");
        let same = theirs.tensors.iter().filter(|(name, tensor)| ours.tensors[*name] == **tensor).count();
        assert!(same > 4 && same < theirs.tensors.len(), "{model}: {same}");
        dir.said(&["generate", "--model", "merged", "--prompt", "a", "--max-new-tokens", "2"]);
        let mut args = lora(&[]);
        args[1] = "merged/model.gguf";
        dir.said(&args);
        let again =
            ["merge", "--model", "merged", "--adapter", "adapter", "--output", "twice", "--force-base"];
        let refused = dir.refused(&[&again[..], &["--requantize"]].concat());
        assert!(refused.contains("the adapter is already merged"), "{refused}");
    }
}

/// Blocks of `values` in a type, by an encoder of candle or of finetune.
fn blocks(kind: BlockType, values: &[f32]) -> Vec<u8> {
    if let Some(blocks) = kind.search_blocks(values) {
        return blocks;
    }
    let tensor = Tensor::from_slice(values, values.len(), &Device::Cpu).unwrap();
    let other = match kind {
        BlockType::F16 => GgmlDType::F16,
        BlockType::BF16 => GgmlDType::BF16,
        BlockType::Q4_0 => GgmlDType::Q4_0,
        BlockType::Q4_1 => GgmlDType::Q4_1,
        BlockType::Q5_0 => GgmlDType::Q5_0,
        BlockType::Q5_1 => GgmlDType::Q5_1,
        BlockType::Q8_0 => GgmlDType::Q8_0,
        BlockType::Q2K => GgmlDType::Q2K,
        BlockType::Q3K => GgmlDType::Q3K,
        BlockType::Q5K => GgmlDType::Q5K,
        BlockType::Q6K => GgmlDType::Q6K,
        other => panic!("{other}"),
    };
    QTensor::quantize(&tensor, other).unwrap().data().unwrap().into_owned()
}

/// Writes the model of `from` with the linear layers in these types, one after the other.
fn write_types(from: &Path, kinds: &[BlockType], to: &Path) {
    let mut file = File::open(from).unwrap();
    let content = Content::read(&mut file).unwrap();
    // A last key whose value has no zero ends the keys.
    let end = Key::U8(255);
    let keys = content.metadata.iter().map(|(key, value)| (key.as_str(), value));
    let keys: Vec<(&str, &Key)> = keys.chain([("general.zz", &end)]).collect();
    let mut header = std::io::Cursor::new(Vec::new());
    write(&mut header, &keys, &[]).unwrap();
    let mut header = header.into_inner();
    header.truncate(header.iter().rposition(|byte| *byte == 255).unwrap() + 1);
    header[8..16].copy_from_slice(&(content.tensor_infos.len() as u64).to_le_bytes());
    let (mut data, mut kinds) = (Vec::new(), kinds.iter());
    let mut names: Vec<&String> = content.tensor_infos.keys().collect();
    names.sort();
    for name in names {
        let values = content.tensor(&mut file, name, &Device::Cpu).unwrap().dequantize(&Device::Cpu).unwrap();
        let dims = values.dims().to_vec();
        let values: Vec<f32> = values.flatten_all().unwrap().to_vec1().unwrap();
        let is_linear = name.starts_with("blk.") && dims.len() == 2;
        let (kind, bytes) = match is_linear.then(|| *kinds.next().unwrap()) {
            Some(kind) => (kind, blocks(kind, &values)),
            None => (BlockType::F32, values.iter().flat_map(|value| value.to_le_bytes()).collect()),
        };
        header.extend((name.len() as u64).to_le_bytes());
        header.extend(name.as_bytes());
        header.extend((dims.len() as u32).to_le_bytes());
        dims.iter().rev().for_each(|dim| header.extend((*dim as u64).to_le_bytes()));
        header.extend((kind as u32).to_le_bytes());
        header.extend((data.len() as u64).to_le_bytes());
        data.extend(bytes);
        data.resize(data.len().next_multiple_of(32), 0);
    }
    assert!(kinds.next().is_none(), "each type");
    header.resize(header.len().next_multiple_of(32), 0);
    header.extend(data);
    std::fs::write(to, header).unwrap();
}

/// Each type that a file may have gets new blocks of its own.
#[test]
fn every_type_is_written_again() {
    use BlockType::{BF16, F16, IQ4NL, IQ4XS, MXFP4, Q2K, Q3K, Q4_0, Q4_1, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    for kinds in [[Q2K, Q3K, Q4_1, Q5_0, Q5_1, Q5K, IQ4NL], [IQ4XS, MXFP4, F16, BF16, Q4_0, Q6K, Q8_0]] {
        let dir = test_dir("tiny-gguf-q4_k");
        write_types(&golden("qbases/models/tiny-gguf-q4_k/model.gguf"), &kinds, &dir.path("model.gguf"));
        train(&dir, "model.gguf", &[]);
        dir.said(&merge("merged", &["--requantize"]));
        dir.said(&merge("exact", &["--dtype", "f32"]));
        let [before, after, exact] = ["model.gguf", "merged", "exact"].map(|name| opened(&dir.path(name)));
        assert!(check([&before, &after, &exact], &format!("{kinds:?}")) >= 7, "{kinds:?}");
        dir.said(&["generate", "--model", "merged", "--prompt", "a", "--max-new-tokens", "2"]);
    }
}

/// Files in f32 hold exactly the merged weights, however they order rows and columns: halves of
/// heads in turns, keys transposed, value heads in turns, experts joined.
#[test]
fn every_order_is_written_again() {
    for model in
        ["tiny-llama", "tiny-deepseek-v3", "tiny-gpt-neox", "tiny-qwen3-5", "tiny-gpt-oss", "tiny-lfm2"]
    {
        let dir = TestDir::with_model(model);
        dir.said(&[
            "export",
            "--model",
            "model",
            "--format",
            "gguf",
            "--type",
            "f32",
            "--output",
            "model.gguf",
        ]);
        train(&dir, "model.gguf", &[]);
        dir.said(&merge("merged", &["--requantize"]));
        dir.said(&merge("exact", &["--dtype", "f32"]));
        let [before, after, exact] = ["model.gguf", "merged", "exact"].map(|name| opened(&dir.path(name)));
        let mut changed = 0;
        for name in before.names() {
            let [old, new, wanted] = [&before, &after, &exact].map(|files| floats(files, name));
            assert_eq!(new, wanted, "{model}: {name}");
            changed += usize::from(old != new);
        }
        assert!(changed >= 7, "{model}: {changed}");
    }
}

/// Of a split file, each part is copied and changed.
#[test]
fn parts_of_a_split_file_are_written_again() {
    let dir = test_dir("tiny-gguf-q8_0");
    let mut file = File::open(dir.path("model.gguf")).unwrap();
    let content = Content::read(&mut file).unwrap();
    let mut names: Vec<&String> = content.tensor_infos.keys().collect();
    names.sort();
    let keys: Vec<(&str, &Key)> = content.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    for (at, (names, keys)) in [(&names[..8], &keys[..]), (&names[8..], &[])].into_iter().enumerate() {
        let tensors: Vec<QTensor> =
            names.iter().map(|name| content.tensor(&mut file, name, &Device::Cpu).unwrap()).collect();
        let tensors: Vec<(&str, &QTensor)> = names.iter().map(|name| name.as_str()).zip(&tensors).collect();
        let part = dir.path(&format!("model-0000{}-of-00002.gguf", at + 1));
        write(&mut File::create(part).unwrap(), keys, &tensors).unwrap();
    }
    std::fs::remove_file(dir.path("model.gguf")).unwrap();
    let model = "model-00001-of-00002.gguf";
    train(&dir, model, &[]);
    for (output, more) in [("merged", "--requantize"), ("exact", "--dtype=f32")] {
        dir.said(&["merge", "--model", model, "--adapter", "adapter", "--output", output, more]);
    }
    let [before, after, exact] = [model, "merged", "exact"].map(|name| opened(&dir.path(name)));
    assert_eq!(after.files().len(), 2);
    assert!(check([&before, &after, &exact], "split") >= 7);
}

/// An adapter without effect gives the bytes of the base.
#[test]
fn an_adapter_without_effect_changes_no_byte() {
    for model in ["tiny-gguf-q8_0", "tiny-gguf-q4_0", "tiny-gguf-q4_k"] {
        let dir = test_dir(model);
        train(&dir, "model.gguf", &["--set", "optimizer.learning_rate=1e-30"]);
        dir.said(&merge("merged", &["--requantize"]));
        let [ours, theirs] =
            ["merged/model.gguf", "model.gguf"].map(|name| std::fs::read(dir.path(name)).unwrap());
        assert!(ours == theirs, "{model}");
    }
}

/// Returns the error of a merge that writes nothing.
fn refused(dir: &TestDir, more: &[&str]) -> String {
    let said = dir.refused(&merge("merged", &[&["--requantize"], more].concat()));
    assert!(!dir.path("merged").exists(), "{said}");
    said[said.find("error: ").unwrap()..].to_owned()
}

#[test]
fn what_a_file_cannot_hold_is_refused() {
    let dir = test_dir("tiny-gguf-q4_k");
    copy_folder(&golden("qbases/train/lora_gguf_q4_k/adapter_final"), &dir.path("adapter"));
    let limited = ["--verify-on", "rows.jsonl", "--max-kl", "1e-9"];
    assert!(refused(&dir, &limited).contains("survived the quantization of the merged weights"));
    std::fs::remove_dir_all(dir.path("adapter")).unwrap();
    train(&dir, "model.gguf", &["--set", "quantization.kind=nf4"]);
    assert_snapshot!(refused(&dir, &[]), @"
    error: cannot merge into the format of [DIR]/model.gguf
      caused by: the adapter was trained over nf4 in blocks of 64 with double-quantized scales, made from the weights that the files hold
    hint: merge without `--requantize`; `--base original` adds the adapter to the weights in the files
    ");
    std::fs::remove_dir_all(dir.path("adapter")).unwrap();
    train(&dir, "model.gguf", &["--set", "data.chat_template=zephyr"]);
    assert_snapshot!(refused(&dir, &[]), @"
    error: cannot merge into the format of [DIR]/model.gguf
      caused by: the adapter was trained with another chat template, and the keys of a GGUF file stay
    hint: merge without `--requantize`, then write a GGUF file with `finetune export`
    ");
    std::fs::remove_dir_all(dir.path("adapter")).unwrap();
    train(&dir, "model.gguf", &["--set", "model.new_tokens=[\"<new>\"]"]);
    assert!(refused(&dir, &[]).contains("caused by: the adapter adds tokens: `"));
}
