//! Checkpoints that other tools packed (FP8, GPTQ, AWQ, compressed-tensors, MXFP4), dequantized
//! while they are read: bit for bit as tests/golden/scripts/make_qbases.py computes them, and small
//! ones made here, with their errors.

use std::ops::Range;
use std::path::{Path, PathBuf};

use finetune::error::Result;
use finetune::model::{ModelConfig, StoredModel, parameters, settle};
use finetune::weights::{ModelFiles, ModelIdentity, RangeReader, RemoteRange, StoredDtype};
use half::bf16;
use insta::assert_snapshot;
use proptest::prelude::*;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::logits::floats;

const GPTQ: &str = "tiny-gptq-4-g32-act";
const AWQ: &str = "tiny-awq-4-g32";
const WORDS: &str = "tiny-ct-int4-g32-asym";
const FP8: &str = "tiny-fp8-block";
const MODELS: [&str; 7] =
    [GPTQ, AWQ, WORDS, FP8, "tiny-gptq-8-g32-asym", "tiny-ct-int8-channel", "tiny-ct-w8a8"];
const MXFP4: &str = "tiny-mxfp4";
const DOWN: &str = "model.layers.0.mlp.down_proj.weight";

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qbases").join(path)
}

fn open(model: &str) -> ModelFiles {
    ModelFiles::open(&golden("models").join(model)).unwrap()
}

pub(crate) fn sha256(values: &[f32]) -> String {
    // The reference adds 0.0, so that -0.0 counts as 0.0.
    let bytes = values.iter().flat_map(|value| (value + 0.0).to_le_bytes());
    Sha256::digest(bytes.collect::<Vec<u8>>()).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn every_weight_has_the_values_of_the_reference() {
    let digests: Value = serde_json::from_slice(&std::fs::read(golden("sha256_f32.json")).unwrap()).unwrap();
    for model in MODELS {
        let files = open(model);
        let weights = digests[model].as_object().unwrap();
        assert!(weights.len() > 10 && files.names().len() == weights.len(), "{model}");
        for (name, digest) in weights {
            assert_eq!(sha256(&floats(&files, name)), digest.as_str().unwrap(), "{model}: {name}");
            assert_eq!(files.stored_format(name).is_some(), name.contains("proj.weight"), "{model}: {name}");
            assert!(files.quantized(name).unwrap().is_none() && files.quantized_format(name).is_none());
        }
        let is_half = ["tiny-gptq", "tiny-awq"].iter().any(|tool| model.starts_with(tool));
        let dtype = if is_half { StoredDtype::F16 } else { StoredDtype::BF16 };
        assert!(files.tensors().all(|(_, info)| info.dtype == dtype), "{model}");
        // Nothing is counted twice, and no companion is left out.
        let stored: u64 = files.names().map(|name| files.stored_bytes(name)).sum();
        assert_eq!(files.file_bytes().map(|(_, bytes)| bytes).collect::<Vec<_>>(), [stored], "{model}");
        assert!(files.bytes(DOWN).is_err());
    }
}

/// gpt-oss stores the experts of a layer in blocks of `[E, out, in]`; the reference has the stack
/// `[E, in, out]` of an unquantized model.
#[test]
fn stacks_in_mxfp4_have_the_values_of_the_reference() {
    let digests: Value = serde_json::from_slice(&std::fs::read(golden("sha256_f32.json")).unwrap()).unwrap();
    let model = settled_model(MXFP4);
    checked(&model).unwrap();
    let (_, files) = &model;
    for (name, digest) in digests[MXFP4].as_object().unwrap() {
        let parts = (0..).map(|expert| name.replace("experts.", &format!("experts.{expert}.")) + ".weight");
        let parts: Vec<String> = parts.take_while(|part| files.info(part).is_some()).collect();
        assert_eq!(parts.len(), if name.contains("experts") && name.ends_with("_proj") { 4 } else { 0 });
        let mut values = Vec::new();
        for part in &parts {
            let (of_part, width) = (floats(files, part), files.info(part).unwrap().shape[1]);
            assert_eq!(files.stored_format(part), Some("mxfp4"));
            values.extend((0..width).flat_map(|column| of_part.iter().skip(column).step_by(width).copied()));
        }
        let values = if parts.is_empty() { floats(files, name) } else { values };
        assert_eq!(sha256(&values), digest.as_str().unwrap(), "{name}");
    }
    let stored: u64 = files.names().map(|name| files.stored_bytes(name)).sum();
    assert_eq!(files.file_bytes().map(|(_, bytes)| bytes).collect::<Vec<_>>(), [stored]);
    assert_snapshot!(files.warnings().collect::<Vec<_>>().join("\n"), @"finetune dequantizes 4 weights stored as mxfp4 while it reads the model");
}

/// Opens a golden model as runs do.
fn settled_model(model: &str) -> (ModelConfig, ModelFiles) {
    let mut files = open(model);
    let text = std::fs::read_to_string(golden("models").join(model).join("config.json")).unwrap();
    let mut config = ModelConfig::from_json(&text, "config.json").unwrap();
    settle(&mut config, &mut files).unwrap();
    (config, files)
}

#[test]
fn halves_of_bytes_and_exponents() {
    let settings = json!({"quant_method": "mxfp4"});
    let blocks = || ("x_proj_blocks", Dtype::U8, vec![1, 2, 1, 16], (0..32).map(|i| i * 8 + 7).collect());
    let scales = || ("x_proj_scales", Dtype::U8, vec![1, 2, 1], vec![127, 130]);
    let of = |change: &dyn Fn(&mut Vec<Tensor>)| {
        let mut tensors = vec![blocks(), scales()];
        change(&mut tensors);
        refused(&settings, &tensors)
    };
    assert_snapshot!(of(&|tensors| drop(tensors.remove(0))), @"mxfp4: blocks is missing");
    assert_snapshot!(of(&|tensors| drop(tensors.remove(1))), @"mxfp4: scales is missing");
    assert_snapshot!(of(&|tensors| tensors[1].2 = vec![1, 1, 2]), @"mxfp4: scales has shape [1, 1, 2]; accepted: [1, 2, 1]");
    assert_snapshot!(of(&|tensors| tensors[0].2 = vec![2, 1, 16]), @"mxfp4: blocks has shape [2, 1, 16]; accepted: four dimensions");
    assert_snapshot!(of(&|tensors| tensors[0].2 = vec![1, 2, 2, 8]), @"mxfp4: blocks has shape [1, 2, 2, 8]; accepted: [1, 2, 2, 16]");
    assert_snapshot!(of(&|tensors| tensors[0].1 = Dtype::I8), @"mxfp4: blocks has dtype I8; accepted: U8");
    assert_snapshot!(of(&|tensors| {
        tensors.push(("x_proj", Dtype::F32, vec![1], f32s(&[1.0])));
    }), @"mxfp4: it is stored twice, as itself and as blocks");
}

/// Ranges within a row, over rows, from a row's middle, and of rows alone.
#[test]
fn parts_are_parts_of_the_whole() {
    for model in MODELS {
        let files = open(model);
        let whole = floats(&files, DOWN);
        let (n, width) = (whole.len(), files.info(DOWN).unwrap().shape[1]);
        let starts = [0, 1, width - 1, width, 3 * width + 7, n - 1];
        for (start, len) in starts.into_iter().flat_map(|start| {
            [0, 1, 2, width - 1, width, width + 1, 5 * width + 3, 40 * width, n].map(|len| (start, len))
        }) {
            let len = len.min(n - start);
            let mut part = vec![0f32; len];
            files.read_part(DOWN, start, &mut part).unwrap();
            assert_eq!(part, whole[start..start + len], "{model}: {start}, {len}");
        }
        let mut rounded = vec![bf16::ZERO; n];
        files.read_into(DOWN, &mut rounded).unwrap();
        assert!(rounded.iter().zip(&whole).all(|(ours, value)| *ours == bf16::from_f32(*value)), "{model}");
        assert!(files.read_part(DOWN, n - 1, &mut [0f32; 2]).is_err());
    }
}

/// A model of which only headers and labels are read.
struct Elsewhere(PathBuf, Vec<String>);

impl RangeReader for Elsewhere {
    fn files(&self) -> &[String] {
        &self.1
    }

    fn read(&self, file: &str, range: Range<u64>) -> Result<RemoteRange> {
        let bytes = std::fs::read(self.0.join(file)).unwrap();
        let part = &bytes[range.start as usize..bytes.len().min(range.end as usize)];
        Ok(RemoteRange { bytes: part.to_vec(), file_bytes: bytes.len() as u64 })
    }
}

#[test]
fn headers_alone_tell_all_but_values() {
    for model in MODELS {
        let whole = open(model);
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(golden("models").join(model).join("config.json"), folder.path().join("config.json"))
            .unwrap();
        let elsewhere = Elsewhere(golden("models").join(model), vec!["model.safetensors".to_owned()]);
        let files = ModelFiles::open_in_place(folder.path(), &elsewhere).unwrap();
        assert!(files.names().eq(whole.names()), "{model}");
        for (name, info) in whole.tensors() {
            let actual = files.info(name).unwrap();
            assert_eq!((actual.dtype, &actual.shape), (info.dtype, &info.shape), "{model}: {name}");
            assert_eq!(files.stored_bytes(name), whole.stored_bytes(name), "{model}: {name}");
        }
        if model != WORDS {
            // In a model this small, the labels are read together with the data between them.
            assert!(files.read_f32(DOWN, &mut floats(&whole, DOWN)).is_err(), "{model}");
        }
    }
}

type Tensor = (&'static str, Dtype, Vec<usize>, Vec<u8>);

fn write(path: &Path, tensors: &[Tensor]) {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// A folder with these tensors and `quantization_config`.
fn folder(settings: &Value, tensors: &[Tensor]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({"model_type": "llama", "quantization_config": settings});
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    write(&folder.path().join("model.safetensors"), tensors);
    folder
}

/// Packs codes into words, the first into the lowest bits.
fn words(codes: &[u32], bits: usize) -> Vec<u8> {
    let word = |codes: &[u32]| codes.iter().rev().fold(0u32, |word, code| word << bits | code);
    codes.chunks(32 / bits).flat_map(|codes| word(codes).to_le_bytes()).collect()
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn bf16s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect()
}

fn sizes(values: &[i64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn indices(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Settings of compressed-tensors with one group.
fn compressed(format: &str, weights: Value) -> Value {
    json!({
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    })
}

fn weights(kind: &str, bits: u32, strategy: &str, symmetric: bool, group: Value) -> Value {
    json!({"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": symmetric, "group_size": group})
}

/// 1, 2, 0.5, -1 in e4m3.
const FLOATS: [u8; 4] = [0x38, 0x40, 0x30, 0xb8];

/// Checks the only weight of a checkpoint.
fn gives(settings: &Value, tensors: &[Tensor], format: &str, wanted: &[f32]) {
    let folder = folder(settings, tensors);
    let files = ModelFiles::open(folder.path()).unwrap();
    assert_eq!(files.names().collect::<Vec<_>>(), ["x.weight"], "{settings}");
    assert_eq!(files.stored_format("x.weight"), Some(format));
    assert_eq!(floats(&files, "x.weight"), wanted, "{settings}");
}

#[test]
fn floats_of_eight_bits() {
    let codes = || ("x.weight", Dtype::F8_E4M3, vec![2, 2], FLOATS.to_vec());
    let one = |name| (name, Dtype::F32, vec![], f32s(&[0.1]));
    let unused = ("x.input_scale", Dtype::F32, vec![], f32s(&[9.0]));
    for settings in
        [json!({"quant_method": "fp8"}), json!({"quant_method": "fp8", "weight_block_size": null})]
    {
        for name in ["x.weight_scale", "x.weight_scale_inv"] {
            gives(&settings, &[codes(), one(name), unused.clone()], "fp8", &[0.1, 0.2, 0.05, -0.1]);
        }
    }
    let blocks = json!({"quant_method": "fp8", "weight_block_size": [1, 2], "fmt": "e4m3"});
    let scales = ("x.weight_scale_inv", Dtype::BF16, vec![2, 1], bf16s(&[2.0, 4.0]));
    gives(&blocks, &[codes(), scales.clone()], "fp8", &[2.0, 4.0, 2.0, -4.0]);
    let rows = json!({"quant_method": "fp8", "weight_block_size": null});
    gives(&rows, &[codes(), scales], "fp8", &[2.0, 4.0, 2.0, -4.0]);
    let name = "compressed-tensors fp8";
    let tensor = compressed("float-quantized", weights("float", 8, "tensor", true, Value::Null));
    gives(&tensor, &[codes(), one("x.weight_scale"), unused], name, &[0.1, 0.2, 0.05, -0.1]);
    let channel = compressed("float-quantized", weights("float", 8, "channel", true, Value::Null));
    let scales = ("x.weight_scale", Dtype::BF16, vec![2, 1], bf16s(&[2.0, 4.0]));
    gives(&channel, &[codes(), scales], name, &[2.0, 4.0, 2.0, -4.0]);
    let mut block = weights("float", 8, "block", true, Value::Null);
    block["block_structure"] = json!([2, 1]);
    let scales = ("x.weight_scale", Dtype::BF16, vec![1, 2], bf16s(&[2.0, 4.0]));
    gives(&compressed("float-quantized", block), &[codes(), scales], name, &[2.0, 8.0, 1.0, -4.0]);
}

/// The layer of ModelOpt with 2 outputs and 16 inputs.
fn modelopt_layer() -> Vec<Tensor> {
    let scales = ("x.weight_scale", Dtype::F8_E4M3, vec![2, 1], vec![0x38, 0x40]);
    let factor = ("x.weight_scale_2", Dtype::F32, vec![], f32s(&[0.5]));
    vec![("x.weight", Dtype::U8, vec![2, 8], (0..16).map(|i| i * 17).collect()), scales, factor]
}

#[test]
fn floats_of_four_bits() {
    // Both halves of a byte are equal.
    const VALUES: [f32; 16] =
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    let wanted = |factor: [f32; 2]| -> Vec<f32> { (0..32).map(|i| VALUES[i / 2] * factor[i / 16]).collect() };
    let settings = json!({"quant_method": "modelopt", "quant_algo": "NVFP4"});
    gives(&settings, &modelopt_layer(), "modelopt nvfp4", &wanted([0.5, 1.0]));
    // compressed-tensors divides by its factor.
    let group = weights("float", 4, "tensor_group", true, json!(16));
    let nvfp4 = compressed("nvfp4-pack-quantized", group.clone());
    let mut layer = modelopt_layer();
    layer[0].0 = "x.weight_packed";
    layer[2].0 = "x.weight_global_scale";
    gives(&nvfp4, &layer, "compressed-tensors nvfp4", &wanted([2.0, 4.0]));
    let mxfp4 = compressed("mxfp4-pack-quantized", weights("float", 4, "group", true, json!(16)));
    layer[1] = ("x.weight_scale", Dtype::U8, vec![2, 1], vec![127, 128]);
    gives(&mxfp4, &layer[..2], "compressed-tensors mxfp4", &wanted([1.0, 2.0]));
}

#[test]
fn malformed_floats_of_four_bits() {
    let settings = json!({"quant_method": "modelopt", "quant_algo": "NVFP4"});
    let of = |change: &dyn Fn(&mut Vec<Tensor>)| {
        let mut tensors = modelopt_layer();
        change(&mut tensors);
        refused(&settings, &tensors)
    };
    assert_snapshot!(of(&|tensors| drop(tensors.remove(2))), @"modelopt: weight_scale_2 is missing");
    assert_snapshot!(of(&|tensors| tensors[2].3 = f32s(&[f32::NAN])), @"modelopt: weight_scale_2 is NaN; accepted: normal numbers");
    assert_snapshot!(of(&|tensors| tensors[2] = ("x.weight_scale_2", Dtype::F32, vec![2], f32s(&[1.0, 2.0]))), @"modelopt: weight_scale_2 has dtype F32 and shape [2]; accepted: one number of F32");
    assert_snapshot!(of(&|tensors| tensors[1].2 = vec![1, 2]), @"modelopt: weight_scale has shape [1, 2]; accepted: [2, 1]");
    assert_snapshot!(of(&|tensors| tensors[1].1 = Dtype::U8), @"modelopt: weight_scale has dtype U8; accepted: F8_E4M3");
    assert_snapshot!(refused(&json!({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}), &modelopt_layer()), @r#"`quantization_config.quant_algo` is "NVFP4_AWQ"; accepted: "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4""#);
}

/// The layer of HQQ with 2 outputs and 4 inputs in groups of 2.
fn hqq_layer() -> Vec<Tensor> {
    vec![
        ("x.W_q", Dtype::U8, vec![2, 2], vec![0x18, 0x29, 0x3a, 0x4f]),
        ("x.scale", Dtype::BF16, vec![4, 1], bf16s(&[1.0, 2.0, 0.5, 4.0])),
        ("x.zero", Dtype::BF16, vec![4, 1], bf16s(&[0.0, 2.5, 8.0, 1.0])),
        ("x.shape", Dtype::I64, vec![2], sizes(&[2, 4])),
        ("x.axis", Dtype::I32, vec![], indices(&[1])),
    ]
}

#[test]
fn groups_of_hqq() {
    let settings = json!({"quant_method": "hqq", "quant_config": {}});
    // The high halves of the bytes are the first two groups.
    gives(&settings, &hqq_layer(), "hqq int4", &[1.0, 2.0, 1.0, 3.0, 0.0, 0.5, 36.0, 56.0]);
    let mut wide = hqq_layer();
    wide[0] = ("x.W_q", Dtype::U8, vec![4, 2], vec![1, 2, 3, 4, 200, 255, 0, 1]);
    gives(&settings, &wide, "hqq int8", &[1.0, 2.0, 1.0, 3.0, 96.0, 123.5, -4.0, 0.0]);
    // A router of Gemma 4 has a `scale` of its own.
    let router = [("router.scale", Dtype::BF16, vec![2], bf16s(&[1.0, 2.0]))];
    let folder = folder(&settings, &[&router[..], &hqq_layer()].concat());
    let files = ModelFiles::open(folder.path()).unwrap();
    assert_eq!(files.names().collect::<Vec<_>>(), ["router.scale", "x.weight"]);
    assert_eq!(floats(&files, "router.scale"), [1.0, 2.0]);
    let of = |change: &dyn Fn(&mut Vec<Tensor>)| {
        let mut tensors = hqq_layer();
        change(&mut tensors);
        refused(&settings, &tensors)
    };
    assert_snapshot!(of(&|tensors| drop(tensors.remove(0))), @"hqq: W_q is missing");
    assert_snapshot!(of(&|tensors| drop(tensors.remove(2))), @"hqq: zero is missing");
    assert_snapshot!(of(&|tensors| drop(tensors.remove(3))), @"hqq: shape is missing");
    assert_snapshot!(of(&|tensors| tensors[1].2 = vec![1, 4]), @"hqq: scale has shape [1, 4]; accepted: one column, of groups along axis 1");
    assert_snapshot!(of(&|tensors| tensors[2].2 = vec![4]), @"hqq: zero has shape [4]; accepted: [4, 1]");
    assert_snapshot!(of(&|tensors| tensors[3].3 = sizes(&[4, 4])), @"hqq: shape is [4, 4], and scale has 4 groups of 2; accepted: whole groups in each row");
    assert_snapshot!(of(&|tensors| tensors[3].3 = sizes(&[-1, 4])), @"hqq: shape is [-1, 4]; accepted: two numbers from 0");
    assert_snapshot!(of(&|tensors| tensors[0] = ("x.W_q", Dtype::U8, vec![1, 2], vec![0, 0])), @"hqq: W_q has shape [1, 2]; accepted: [4, 2] (8 bits), [2, 2] (4 bits)");
    assert_snapshot!(of(&|tensors| tensors[0] = ("x.W_q", Dtype::BF16, vec![1, 2], vec![0; 4])), @"hqq: W_q has dtype BF16; accepted: U8");
}

/// Large enough for several tasks, from the start of a row and from its middle.
#[test]
fn threads_read_what_one_thread_does() {
    let (rows, columns) = (700, 512);
    let codes = (0..rows * columns).map(|i| FLOATS[(i % 4) ^ (i / columns % 3)]).collect::<Vec<u8>>();
    let scales: Vec<f32> = (0..6 * 4).map(|i| 1.0 + i as f32).collect();
    let tensors = [
        ("x.weight", Dtype::F8_E4M3, vec![rows, columns], codes),
        ("x.weight_scale_inv", Dtype::F32, vec![6, 4], f32s(&scales)),
    ];
    let folder = folder(&json!({"quant_method": "fp8", "weight_block_size": [128, 128]}), &tensors);
    let files = ModelFiles::open(folder.path()).unwrap();
    let value = |at: usize| {
        let (row, column) = (at / columns, at % columns);
        scales[row / 128 * 4 + column / 128] * [1.0, 2.0, 0.5, -1.0][(at % 4) ^ (row % 3)]
    };
    let n = rows * columns;
    for (start, end) in [(0, n), (columns, n), (columns + 17, n - 33), (5, n)] {
        let mut part = vec![0f32; end - start];
        files.read_part("x.weight", start, &mut part).unwrap();
        assert!(part.into_iter().eq((start..end).map(value)), "{start}, {end}");
    }
}

#[test]
fn whole_numbers_in_bytes() {
    let codes = ("x.weight", Dtype::I8, vec![2, 2], vec![1, 0xff, 0x80, 0x7f]);
    let scales = ("x.weight_scale", Dtype::F32, vec![2, 1], f32s(&[0.5, 2.0]));
    let symmetric = compressed("int-quantized", weights("int", 8, "channel", true, Value::Null));
    let name = "compressed-tensors int8";
    gives(&symmetric, &[codes.clone(), scales.clone()], name, &[0.5, -0.5, -256.0, 254.0]);
    let other = compressed("int-quantized", weights("int", 8, "channel", false, Value::Null));
    let zeros = ("x.weight_zero_point", Dtype::I8, vec![2, 1], vec![2, 0xfe]);
    gives(&other, &[codes, scales, zeros], name, &[-0.5, -1.5, -252.0, 258.0]);
}

#[test]
fn words_along_rows() {
    // Six columns: the last word of a row is not full.
    let shape = || ("x.weight_shape", Dtype::I64, vec![2], sizes(&[1, 6]));
    let codes = ("x.weight_packed", Dtype::I32, vec![1, 2], words(&[0, 1, 128, 255, 127, 130, 9, 9], 8));
    let scales = ("x.weight_scale", Dtype::BF16, vec![1, 1], bf16s(&[0.5]));
    let channel = compressed("pack-quantized", weights("int", 8, "channel", true, Value::Null));
    let wanted = [-64.0, -63.5, 0.0, 63.5, -0.5, 1.0];
    gives(&channel, &[codes, scales, shape()], "compressed-tensors int8", &wanted);
    // Columns that name their groups.
    let codes = ("x.weight_packed", Dtype::I32, vec![1, 1], words(&[0, 1, 8, 15, 7, 9, 3, 3], 4));
    let scales = ("x.weight_scale", Dtype::BF16, vec![1, 3], bf16s(&[1.0, 2.0, 4.0]));
    let groups = ("x.weight_g_idx", Dtype::I32, vec![6], indices(&[2, 0, 1, 2, 0, 1]));
    let mut group = weights("int", 4, "group", true, json!(2));
    group["actorder"] = json!("group");
    let grouped = compressed("pack-quantized", group);
    let wanted = [-32.0, -7.0, 0.0, 28.0, -1.0, 2.0];
    let tensors = [codes.clone(), scales.clone(), groups, shape()];
    gives(&grouped, &tensors, "compressed-tensors int4", &wanted);
    // Indices that were not set: groups are consecutive.
    let groups = ("x.weight_g_idx", Dtype::I32, vec![6], indices(&[-1; 6]));
    let wanted = [-8.0, -7.0, 0.0, 14.0, -4.0, 4.0];
    gives(&grouped, &[codes, scales, groups, shape()], "compressed-tensors int4", &wanted);
}

/// Two entries of `config_groups`: each weight is of the one that its tensors match.
#[test]
fn weights_of_several_groups() {
    let mut settings = compressed("pack-quantized", weights("int", 8, "channel", true, Value::Null));
    settings["format"] = json!("mixed-precision");
    let groups = settings["config_groups"].as_object_mut().unwrap();
    groups["group_0"]["format"] = json!("pack-quantized");
    let of_bytes = weights("float", 8, "tensor", true, Value::Null);
    groups.insert("group_1".into(), json!({"format": "float-quantized", "weights": of_bytes}));
    let tensors = [
        ("x.weight", Dtype::F8_E4M3, vec![2, 2], FLOATS.to_vec()),
        ("x.weight_scale", Dtype::F32, vec![1], f32s(&[2.0])),
        ("y.weight_packed", Dtype::I32, vec![1, 2], words(&[0, 128, 255, 129, 1, 0, 0, 0], 8)),
        ("y.weight_scale", Dtype::F32, vec![1, 1], f32s(&[2.0])),
        ("y.weight_shape", Dtype::I64, vec![2], sizes(&[1, 5])),
        ("z.weight", Dtype::F32, vec![1], f32s(&[7.0])),
    ];
    let folder = folder(&settings, &tensors);
    let files = ModelFiles::open(folder.path()).unwrap();
    assert_eq!(floats(&files, "x.weight"), [2.0, 4.0, 1.0, -2.0]);
    assert_eq!(floats(&files, "y.weight"), [-256.0, 0.0, 254.0, 2.0, -254.0]);
    assert_eq!(floats(&files, "z.weight"), [7.0]);
}

/// GPTQ's layer with 8 outputs and 8 inputs in two groups.
fn gptq_layer() -> Vec<Tensor> {
    let codes: Vec<u32> = (0..64).map(|i| i * 5 % 16).collect();
    vec![
        ("x.qweight", Dtype::I32, vec![1, 8], words(&codes, 4)),
        ("x.qzeros", Dtype::I32, vec![2, 1], words(&[15, 6, 7, 7, 0, 1, 2, 7, 3, 3, 3, 3, 3, 3, 3, 3], 4)),
        ("x.scales", Dtype::F32, vec![2, 8], f32s(&[0.5; 16])),
        ("x.g_idx", Dtype::I32, vec![8], indices(&[0, 1, 0, 1, 0, 1, 0, 1])),
    ]
}

fn gptq(more: &[(&str, Value)]) -> Value {
    let mut settings = json!({"quant_method": "gptq", "bits": 4, "group_size": 4, "desc_act": false});
    more.iter().for_each(|(key, value)| settings[*key] = value.clone());
    settings
}

#[test]
fn both_versions_of_gptq() {
    // Version 1 subtracts 1 from all zeros of a word at once: a zero of 0 borrows from the next.
    let first = [[0, 7 + 1, 8, 8, 1, 2, 3, 8], [4; 8]];
    let second = [[15, 6, 7, 7, 0, 1, 2, 7], [3; 8]];
    let wanted = |zeros: [[u32; 8]; 2], group: fn(usize) -> usize| -> Vec<f32> {
        let value = |row: usize, column: usize| {
            0.5 * ((row * 8 + column) as u32 * 5 % 16) as f32 - 0.5 * zeros[group(column)][row] as f32
        };
        (0..64).map(|at| value(at / 8, at % 8)).collect()
    };
    gives(&gptq(&[]), &gptq_layer(), "gptq int4", &wanted(first, |column| column % 2));
    let settings = [
        gptq(&[("checkpoint_format", json!("gptq_v2")), ("dynamic", json!({"-:.*head": {}}))]),
        gptq(&[
            ("checkpoint_format", Value::Null),
            ("format", json!("GPTQ_V2")),
            ("pack_dtype", Value::Null),
        ]),
    ];
    for settings in settings {
        gives(&settings, &gptq_layer(), "gptq int4", &wanted(second, |column| column % 2));
    }
    // Without g_idx or with zeros in it, groups are consecutive.
    let mut layer = gptq_layer();
    layer[3].3 = indices(&[0; 8]);
    for tensors in [&layer[..3], &layer] {
        gives(&gptq(&[("format", json!("gptq"))]), tensors, "gptq int4", &wanted(first, |column| column / 4));
    }
}

/// Returns the last cause of the refusal of such a checkpoint.
fn refused(settings: &Value, tensors: &[Tensor]) -> String {
    let folder = folder(settings, tensors);
    let error = ModelFiles::open(folder.path()).unwrap_err();
    let causes = error.causes();
    let cause = causes.last().unwrap();
    cause.split_once("quantized by ").map_or(cause.as_str(), |(_, cause)| cause).to_owned()
}

/// Returns the refusal of GPTQ's layer after a change.
fn refused_layer(change: impl FnOnce(&mut Vec<Tensor>)) -> String {
    let mut tensors = gptq_layer();
    change(&mut tensors);
    refused(&gptq(&[("desc_act", json!(true))]), &tensors)
}

#[test]
fn layers_of_gptq_that_do_not_fit() {
    assert_snapshot!(refused_layer(|tensors| drop(tensors.remove(0))), @"gptq: qweight is missing");
    assert_snapshot!(refused_layer(|tensors| drop(tensors.remove(1))), @"gptq: qzeros is missing");
    assert_snapshot!(refused_layer(|tensors| drop(tensors.remove(2))), @"gptq: scales is missing");
    assert_snapshot!(refused_layer(|tensors| drop(tensors.remove(3))), @"gptq: g_idx, the groups of its inputs, is missing although `desc_act` is true");
    assert_snapshot!(refused_layer(|tensors| tensors[2].2 = vec![1, 16]), @"gptq: scales has shape [1, 16]; accepted: [2, 8]");
    assert_snapshot!(refused_layer(|tensors| tensors[1].2 = vec![1, 2]), @"gptq: qzeros has shape [1, 2]; accepted: [2, 1]");
    assert_snapshot!(refused_layer(|tensors| tensors[3].3 = indices(&[0, 1, 0, 2, 0, 1, 0, 1])), @"gptq: g_idx gives column 3 the group 2; accepted: 0 to 1");
    assert_snapshot!(refused_layer(|tensors| tensors[3].3 = indices(&[0, 1, 0, -1, 0, 1, 0, 1])), @"gptq: g_idx gives column 3 the group -1; accepted: 0 to 1");
    assert_snapshot!(refused_layer(|tensors| tensors[2].1 = Dtype::I32), @"gptq: scales has dtype I32; accepted: F32, F16, BF16");
    assert_snapshot!(refused_layer(|tensors| tensors[0].1 = Dtype::F32), @"gptq: qweight has dtype F32; accepted: I32");
    assert_snapshot!(refused_layer(|tensors| tensors[0].2 = vec![8]), @"gptq: qweight has shape [8]; accepted: two dimensions");
    assert_snapshot!(refused_layer(|tensors| {
        tensors.push(("x.weight", Dtype::F32, vec![1], f32s(&[1.0])));
    }), @"gptq: it is stored twice, as weight and as qweight");
}

#[test]
fn settings_that_are_not_supported() {
    let of = |settings: &Value| refused(settings, &gptq_layer());
    assert_snapshot!(of(&gptq(&[("bits", json!(3))])), @"`quantization_config.bits` is 3; accepted: 4, 8");
    assert_snapshot!(of(&gptq(&[("bits", Value::Null)])), @"`quantization_config.bits` is null; accepted: 4, 8");
    assert_snapshot!(of(&gptq(&[("group_size", json!(0))])), @"`quantization_config.group_size` is 0; accepted: -1, or a number from 1");
    assert_snapshot!(of(&gptq(&[("checkpoint_format", json!("marlin"))])), @r#"`quantization_config.checkpoint_format` is "marlin"; accepted: "gptq", "gptq_v2""#);
    assert_snapshot!(of(&gptq(&[("pack_dtype", json!("int16"))])), @r#"`quantization_config.pack_dtype` is "int16"; accepted: "int32""#);
    assert_snapshot!(of(&gptq(&[("dynamic", json!({"+:.*mlp.*": {"bits": 8}}))])), @r#"`quantization_config.dynamic` is {"bits":8} for "+:.*mlp.*"; accepted: patterns of modules that are not quantized ("-:")"#);
    let awq = |key: &str, value: Value| {
        let mut settings = json!({"quant_method": "awq", "bits": 4, "group_size": 32});
        settings[key] = value;
        of(&settings)
    };
    assert_snapshot!(awq("format", json!("gemv_fast")), @r#"`quantization_config.format` is "gemv_fast"; accepted: "gemm""#);
    assert_snapshot!(awq("version", json!("gemv")), @r#"`quantization_config.version` is "gemv"; accepted: "gemm""#);
    assert_snapshot!(awq("backend", json!("llm-awq")), @r#"`quantization_config.backend` is "llm-awq"; accepted: "autoawq""#);
    assert_snapshot!(awq("bits", json!(8)), @"`quantization_config.bits` is 8; accepted: 4");
    assert_snapshot!(awq("zero_point", json!(false)), @"`quantization_config.zero_point` is false; accepted: true");
    let fp8 = |key: &str, value: Value| {
        let mut settings = json!({"quant_method": "fp8"});
        settings[key] = value;
        of(&settings)
    };
    assert_snapshot!(fp8("fmt", json!("e5m2")), @r#"`quantization_config.fmt` is "e5m2"; accepted: "e4m3""#);
    assert_snapshot!(fp8("weight_block_size", json!([128, 0])), @"`quantization_config.weight_block_size` is [128, 0]; accepted: null, or two numbers from 1");
    assert_snapshot!(fp8("weight_block_size", json!(128)), @"`quantization_config.weight_block_size` is 128; accepted: null, or two numbers from 1");
}

#[test]
fn settings_of_compressed_tensors_that_are_not_supported() {
    let good = weights("int", 4, "group", true, json!(32));
    let with = |key: &str, value: Value| {
        let mut settings = compressed("pack-quantized", good.clone());
        settings[key] = value;
        refused(&settings, &[])
    };
    assert_snapshot!(with("format", json!("nvfp4-pack-quantized")), @r#"`quantization_config.format` is "nvfp4-pack-quantized" with weights of type "int" in 4 bits; accepted: "pack-quantized" (int in 4 or 8 bits), "int-quantized" (int in 8 bits), "float-quantized" (float in 8 bits, symmetric), "nvfp4-pack-quantized" or "mxfp4-pack-quantized" (float in 4 bits, symmetric)"#);
    assert_snapshot!(with("format", Value::Null), @r#"`quantization_config.format` is missing with weights of type "int" in 4 bits; accepted: "pack-quantized" (int in 4 or 8 bits), "int-quantized" (int in 8 bits), "float-quantized" (float in 8 bits, symmetric), "nvfp4-pack-quantized" or "mxfp4-pack-quantized" (float in 4 bits, symmetric)"#);
    assert_snapshot!(with("sparsity_config", json!({"format": "sparse-24-bitmask"})), @r#"`quantization_config.sparsity_config` is {"format":"sparse-24-bitmask"}; accepted: null, or the format "dense""#);
    assert_snapshot!(with("transform_config", json!({"config_groups": {"u": {}}})), @r#"`quantization_config.transform_config` is {"config_groups":{"u":{}}}; accepted: null"#);
    let of = |change: &dyn Fn(&mut Value)| {
        let mut weights = good.clone();
        change(&mut weights);
        refused(&compressed("pack-quantized", weights), &[])
    };
    assert_snapshot!(of(&|weights| weights["num_bits"] = json!(3)), @r#"`quantization_config.format` is "pack-quantized" with weights of type "int" in 3 bits; accepted: "pack-quantized" (int in 4 or 8 bits), "int-quantized" (int in 8 bits), "float-quantized" (float in 8 bits, symmetric), "nvfp4-pack-quantized" or "mxfp4-pack-quantized" (float in 4 bits, symmetric)"#);
    assert_snapshot!(of(&|weights| weights["strategy"] = json!("attn_head")), @r#"`quantization_config.config_groups.group_0.weights.strategy` is "attn_head"; accepted: "tensor", "channel", "group", "tensor_group", "block""#);
    assert_snapshot!(of(&|weights| weights["group_size"] = Value::Null), @"`quantization_config.config_groups.group_0.weights.group_size` is null; accepted: a number from 1");
    assert_snapshot!(of(&|weights| {
        weights["strategy"] = json!("tensor");
        weights["symmetric"] = json!(false);
    }), @r#"`quantization_config.config_groups.group_0.weights.symmetric` is false; accepted: true for the strategy "tensor""#);
    assert_snapshot!(of(&|weights| weights["strategy"] = json!("block")), @"`quantization_config.config_groups.group_0.weights.block_structure` is null; accepted: two numbers from 1");
    assert_snapshot!(of(&|weights| weights["num_bits"] = json!("4")), @r#"invalid type: string "4", expected usize"#);
    assert_snapshot!(with("config_groups", Value::Null), @"invalid type: null, expected a map");
    assert_snapshot!(of(&|weights| weights["dynamic"] = json!(true)), @"`quantization_config.config_groups.group_0.weights.dynamic` is true; accepted: false");
    assert_snapshot!(of(&|weights| weights["type"] = json!("float")), @r#"`quantization_config.format` is "pack-quantized" with weights of type "float" in 4 bits; accepted: "pack-quantized" (int in 4 or 8 bits), "int-quantized" (int in 8 bits), "float-quantized" (float in 8 bits, symmetric), "nvfp4-pack-quantized" or "mxfp4-pack-quantized" (float in 4 bits, symmetric)"#);
}

#[test]
fn weights_that_the_settings_do_not_describe() {
    let group = compressed("pack-quantized", weights("int", 4, "group", true, json!(2)));
    let tensors = || -> Vec<Tensor> {
        vec![
            ("x.weight_packed", Dtype::I32, vec![1, 1], words(&[0; 8], 4)),
            ("x.weight_scale", Dtype::BF16, vec![1, 3], bf16s(&[1.0; 3])),
            ("x.weight_shape", Dtype::I64, vec![2], sizes(&[1, 6])),
        ]
    };
    let of = |change: &dyn Fn(&mut Vec<Tensor>)| {
        let mut tensors = tensors();
        change(&mut tensors);
        refused(&group, &tensors)
    };
    assert_snapshot!(of(&|tensors| drop(tensors.remove(1))), @"compressed-tensors: weight_scale is missing");
    assert_snapshot!(of(&|tensors| drop(tensors.remove(2))), @"compressed-tensors: weight_shape is missing");
    assert_snapshot!(of(&|tensors| tensors[1].2 = vec![3, 1]), @"compressed-tensors: weight_scale has shape [3, 1]; accepted: [1, 3]");
    assert_snapshot!(of(&|tensors| tensors[2].3 = sizes(&[1, 60])), @"compressed-tensors: weight_packed has shape [1, 1]; accepted for weight_shape [1, 60]: [1, 8] (4 bits), [1, 15] (8 bits)");
    assert_snapshot!(of(&|tensors| tensors[2].3 = sizes(&[1, -6])), @"compressed-tensors: weight_shape is [1, -6]; accepted: two numbers from 0");
    assert_snapshot!(of(&|tensors| {
        tensors.push(("x.weight_zero_point", Dtype::I32, vec![1, 3], words(&[0; 24], 4)));
    }), @"compressed-tensors: weight_zero_point is present, but symmetric is true");
    assert_snapshot!(of(&|tensors| {
        tensors.push(("x.weight_g_idx", Dtype::I32, vec![6], indices(&[0, 1, 2, 3, 0, 0])));
    }), @"compressed-tensors: weight_g_idx gives column 3 the group 3; accepted: 0 to 2");
    assert_snapshot!(of(&|tensors| {
        *tensors = vec![
            ("x.weight", Dtype::F8_E4M3, vec![2, 2], FLOATS.to_vec()),
            ("x.weight_scale", Dtype::F32, vec![1], f32s(&[2.0])),
        ];
    }), @"compressed-tensors: it is stored as compressed-tensors fp8, which no entry of `config_groups` describes");
    let codes = ("x.weight", Dtype::F8_E4M3, vec![2, 2], FLOATS.to_vec());
    let whole = json!({"quant_method": "fp8", "weight_block_size": null});
    let scales = ("x.weight_scale", Dtype::F32, vec![1, 2], f32s(&[2.0, 3.0]));
    assert_snapshot!(refused(&whole, &[codes.clone(), scales]), @"fp8: weight_scale has shape [1, 2]; accepted: [1], [2, 1], or [1, 1], one scale for each block of 128 by 128");
    let fp8 = json!({"quant_method": "fp8", "weight_block_size": [2, 1]});
    assert_snapshot!(refused(&fp8, std::slice::from_ref(&codes)), @"fp8: weight_scale_inv, the scales of its blocks, is missing");
    let scales = ("x.weight_scale_inv", Dtype::F32, vec![2, 1], f32s(&[2.0, 3.0]));
    assert_snapshot!(refused(&fp8, &[codes.clone(), scales]), @"fp8: weight_scale_inv has shape [2, 1]; accepted: [1, 2], one scale for each block of 2 by 1");
    let scales = ("x.weight_scale_inv", Dtype::F32, vec![], f32s(&[2.0]));
    assert_snapshot!(refused(&fp8, &[codes, scales]), @"fp8: weight_scale_inv has shape []; accepted: [1, 2], one scale for each block of 2 by 1");
}

/// Opens a copy of a golden model of GPTQ with `more` tensors as runs do.
fn settled(more: &[Tensor], headers_only: bool) -> (ModelConfig, ModelFiles) {
    let folder = tempfile::tempdir().unwrap();
    let model = golden("models").join(GPTQ);
    std::fs::copy(model.join("config.json"), folder.path().join("config.json")).unwrap();
    let bytes = std::fs::read(model.join("model.safetensors")).unwrap();
    let stored = SafeTensors::deserialize(&bytes).unwrap();
    let views = more
        .iter()
        .map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    let away = if headers_only { folder.path().join("away") } else { folder.path().to_owned() };
    std::fs::create_dir_all(&away).unwrap();
    let all = stored.iter().chain(views);
    safetensors::serialize_to_file(all, None, &away.join("model.safetensors")).unwrap();
    let mut files = if headers_only {
        let elsewhere = Elsewhere(away, vec!["model.safetensors".to_owned()]);
        ModelFiles::open_in_place(folder.path(), &elsewhere).unwrap()
    } else {
        ModelFiles::open(folder.path()).unwrap()
    };
    let text = std::fs::read_to_string(folder.path().join("config.json")).unwrap();
    let mut config = ModelConfig::from_json(&text, "config.json").unwrap();
    settle(&mut config, &mut files).unwrap();
    (config, files)
}

fn checked((config, files): &(ModelConfig, ModelFiles)) -> Result<()> {
    let parameters = parameters(config);
    let parameters = parameters.iter().map(|parameter| (&*parameter.name, &*parameter.shape));
    StoredModel { config, files, stored_tokens: config.vocab_size }.check("load", parameters)
}

#[test]
fn tensors_beside_packed_weights_that_the_model_does_not_use() {
    let bias = |value| ("model.layers.0.mlp.down_proj.bias", Dtype::F32, vec![2], f32s(&[0.0, value]));
    let cache = |name| (name, Dtype::F32, vec![], f32s(&[9.0]));
    let more = [
        bias(0.0),
        cache("model.layers.0.self_attn.k_scale"),
        cache("model.layers.1.self_attn.v_scale"),
        cache("model.layers.0.self_attn.k_proj.output_scale"),
    ];
    let model = settled(&more, false);
    checked(&model).unwrap();
    assert_snapshot!(model.1.warnings().collect::<Vec<_>>().join("\n"), @"
    finetune dequantizes 14 weights stored as gptq int4 while it reads the model
    finetune does not use the zero biases of 1 quantized weight: the model has no such biases
    finetune does not use 3 tensors of the key-value cache's quantization
    ");
    // Other values belong to another model. Headers have none.
    let error = checked(&settled(&[bias(0.5)], false)).unwrap_err();
    assert_snapshot!(error.causes().join("\n"), @"model.layers.0.mlp.down_proj.bias is not part of the model that config.json describes");
    checked(&settled(&[bias(0.5)], true)).unwrap();
    // A bias of a layer that is not packed stays refused.
    let norm = ("model.norm.bias", Dtype::F32, vec![1], f32s(&[0.0]));
    assert!(checked(&settled(&[norm], false)).is_err());
}

/// Every part counts, also the groups of columns.
#[test]
fn the_identity_covers_every_part() {
    let identity = |tensors: &[Tensor], settings: &Value| {
        let folder = folder(settings, tensors);
        let files = ModelFiles::open(folder.path()).unwrap();
        ModelIdentity::named("x", None).of_files(&files).unwrap().digest().unwrap().to_owned()
    };
    let plain = identity(&gptq_layer(), &gptq(&[]));
    for part in 0..4 {
        let mut tensors = gptq_layer();
        tensors[part].3[0] ^= 1;
        assert_ne!(identity(&tensors, &gptq(&[])), plain, "{}", tensors[part].0);
    }
    assert_ne!(identity(&gptq_layer(), &gptq(&[("checkpoint_format", json!("gptq_v2"))])), plain);
    assert_eq!(identity(&gptq_layer(), &gptq(&[("damp_percent", json!(0.1))])), plain);
    // Tables of equal codes are no copies: the scales of the head count.
    let tables = |scale| {
        let codes = |name| (name, Dtype::F8_E4M3, vec![2, 2], FLOATS.to_vec());
        let one = |name, scale| (name, Dtype::F32, vec![1], f32s(&[scale]));
        let embedding = [codes("model.embed_tokens.weight"), one("model.embed_tokens.weight_scale", 1.0)];
        let head = [codes("lm_head.weight"), one("lm_head.weight_scale", scale)];
        identity(&[embedding, head].concat(), &json!({"quant_method": "fp8"}))
    };
    assert_ne!(tables(2.0), tables(3.0));
}

proptest! {
    /// Any bytes of the right sizes are values; no size makes the decoder read beyond them.
    #[test]
    fn any_bytes_are_decoded(
        bytes in prop::collection::vec(any::<u8>(), 512..1024),
        [rows, columns, block] in [1usize..20, 1usize..30, 1usize..12],
        start in 0usize..600,
        len in 0usize..600,
    ) {
        let cut = |n: usize| bytes.iter().copied().cycle().take(n).collect::<Vec<u8>>();
        let groups = columns.div_ceil(block);
        let group = compressed("pack-quantized", weights("int", 4, "group", false, json!(block)));
        let [wide, high] = [columns.div_ceil(8), rows.div_ceil(8)];
        let packed = [
            ("x.weight_packed", Dtype::I32, vec![rows, wide], cut(4 * rows * wide)),
            ("x.weight_scale", Dtype::BF16, vec![rows, groups], cut(2 * rows * groups)),
            ("x.weight_zero_point", Dtype::I32, vec![high, groups], cut(4 * high * groups)),
            ("x.weight_shape", Dtype::I64, vec![2], sizes(&[rows as i64, columns as i64])),
        ];
        let blocks = json!({"quant_method": "fp8", "weight_block_size": [block, block]});
        let grid = vec![rows.div_ceil(block), groups];
        let scales = cut(4 * grid.iter().product::<usize>());
        let floats = [
            ("x.weight", Dtype::F8_E4M3, vec![rows, columns], cut(rows * columns)),
            ("x.weight_scale_inv", Dtype::F32, grid, scales),
        ];
        let awq = json!({"quant_method": "awq", "bits": 4, "group_size": block});
        let interleaved = [
            ("x.qweight", Dtype::I32, vec![columns, high], cut(4 * columns * high)),
            ("x.qzeros", Dtype::I32, vec![groups, high], cut(4 * groups * high)),
            ("x.scales", Dtype::F16, vec![groups, 8 * high], cut(16 * groups * high)),
        ];
        for (settings, tensors) in [(group, &packed[..]), (blocks, &floats), (awq, &interleaved)] {
            let folder = folder(&settings, tensors);
            let files = ModelFiles::open(folder.path()).unwrap();
            let mut whole = vec![0f32; files.info("x.weight").unwrap().elements()];
            files.read_f32("x.weight", &mut whole).unwrap();
            let start = start.min(whole.len());
            let mut part = vec![0f32; len.min(whole.len() - start)];
            files.read_part("x.weight", start, &mut part).unwrap();
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&part), bits(&whole[start..start + part.len()]));
        }
    }
}
