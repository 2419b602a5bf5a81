//! Checkpoints of other tools that a run keeps packed: the values of each weight equal those that
//! are dequantized while they are read, bit for bit.

use std::path::{Path, PathBuf};

use finetune::model::{ModelConfig, settle};
use finetune::quant::QuantBuffer;
use finetune::weights::{EMBED_PER_LAYER, MODEL_FILE, ModelFiles};
use half::bf16;
use insta::assert_snapshot;
use serde_json::Value;

use crate::gguf_base::described;
use crate::logits::floats;
use crate::packed_bases::sha256;

fn golden(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qbases/models").join(model)
}

/// Opens a golden model as runs do that keep weights packed.
fn open_packed(folder: &Path) -> ModelFiles {
    let mut files = ModelFiles::open(folder).unwrap();
    assert!(files.keep_packed());
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let mut config = ModelConfig::from_json(&text, "config.json").unwrap();
    settle(&mut config, &mut files).unwrap();
    files
}

/// Compares every kept weight with its dequantized values, in f32 and rounded to bf16. Returns the
/// formats in words.
fn same_values(files: &ModelFiles) -> Vec<String> {
    let mut formats = Vec::new();
    for name in files.names() {
        let Some(format) = files.quantized_format(name) else { continue };
        assert!(format.is_kept() && files.quantized(name).unwrap().is_none());
        let wanted = floats(files, name);
        let mut matrix = QuantBuffer::zeros(format, wanted.len());
        assert!(files.copy_quantized(name, &mut matrix.view_mut()).unwrap());
        let (mut values, mut rounded) = (vec![0f32; wanted.len()], vec![bf16::ONE; wanted.len()]);
        matrix.view().dequantize(0, &mut values);
        matrix.view().dequantize(0, &mut rounded);
        let same = |(ours, wanted): (&f32, &f32)| ours.to_bits() == wanted.to_bits();
        assert!(values.iter().zip(&wanted).all(same), "{name}");
        assert!(rounded.iter().zip(&wanted).all(|(ours, wanted)| *ours == bf16::from_f32(*wanted)), "{name}");
        formats.push(format!(
            "{}: {} bytes",
            format.scheme().describe(),
            format.scheme().bytes(wanted.len())
        ));
    }
    formats.sort();
    formats.dedup();
    formats
}

#[test]
fn kept_weights_have_the_dequantized_values() {
    let of = |model: &str| {
        let files = open_packed(&golden(model));
        let notes: Vec<&str> = files.warnings().collect();
        format!("{}\n{}", notes.join("\n"), same_values(&files).join("\n"))
    };
    assert_snapshot!(of("tiny-gptq-4-g32-act"), @"
    finetune keeps 14 weights stored as gptq int4 packed in memory
    int4 in groups of 32 (scales in f16), as stored: 1344 bytes
    int4 in groups of 32 (scales in f16), as stored: 2560 bytes
    int4 in groups of 32 (scales in f16), as stored: 3776 bytes
    int4 in groups of 32 (scales in f16), as stored: 3840 bytes
    ");
    assert_snapshot!(of("tiny-awq-4-g32"), @"
    finetune keeps 14 weights stored as awq int4 packed in memory
    int4 in groups of 32 (scales in f16), as stored: 1216 bytes
    int4 in groups of 32 (scales in f16), as stored: 2432 bytes
    int4 in groups of 32 (scales in f16), as stored: 3648 bytes
    ");
    assert_snapshot!(of("tiny-ct-int4-g32-asym"), @"
    finetune keeps 14 weights stored as compressed-tensors int4 packed in memory
    int4 in groups of 32 (scales in bf16), as stored: 1216 bytes
    int4 in groups of 32 (scales in bf16), as stored: 2432 bytes
    int4 in groups of 32 (scales in bf16), as stored: 3648 bytes
    ");
    assert_snapshot!(of("tiny-fp8-block"), @"
    finetune keeps 7 weights stored as fp8 packed in memory
    fp8 in blocks of 128x128 (scales in f32), as stored: 40972 bytes
    fp8 with one scale for 128 rows (scales in f32), as stored: 16388 bytes
    fp8 with one scale for 128 rows (scales in f32), as stored: 40972 bytes
    fp8 with one scale for 128 rows (scales in f32), as stored: 8196 bytes
    ");
    assert_snapshot!(of("tiny-mxfp4"), @"
    finetune keeps 4 weights stored as mxfp4 packed in memory
    mxfp4 in groups of 32 (scales in e8m0), as stored: 2176 bytes
    mxfp4 with one scale a row (scales in e8m0), as stored: 1088 bytes
    ");
}

/// A table of per-layer inputs is read by rows, so that it does not stay packed.
#[test]
fn a_table_of_per_layer_inputs_is_dequantized() {
    let (folder, source) = (tempfile::tempdir().unwrap(), golden("tiny-fp8-block"));
    std::fs::copy(source.join("config.json"), folder.path().join("config.json")).unwrap();
    let bytes = std::fs::read(source.join(MODEL_FILE)).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + length]).unwrap();
    let renamed = header.replace("model.layers.0.mlp.up_proj.", "model.embed_tokens_per_layer.");
    assert_ne!(renamed, header);
    let length = (renamed.len() as u64).to_le_bytes();
    let whole = [&length[..], renamed.as_bytes(), &bytes[8 + header.len()..]].concat();
    std::fs::write(folder.path().join(MODEL_FILE), whole).unwrap();
    let mut files = ModelFiles::open(folder.path()).unwrap();
    assert!(files.keep_packed());
    let [table, gate] = [EMBED_PER_LAYER, "model.layers.0.mlp.gate_proj.weight"];
    assert!(files.quantized_format(gate).is_some() && files.quantized_format(table).is_none());
    let up = floats(&ModelFiles::open(&source).unwrap(), "model.layers.0.mlp.up_proj.weight");
    assert_eq!(floats(&files, table), up);
}

/// The values of the packages compressed-tensors, nvidia-modelopt and hqq (make_packages.py),
/// packed and dequantized.
#[test]
fn weights_have_the_values_of_the_packages() {
    let file = golden("..").join("sha256_packages.json");
    let digests: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let of = |model: &str| {
        let files = open_packed(&golden(model));
        let weights = digests[model].as_object().unwrap();
        assert!(weights.len() > 10 && files.names().len() == weights.len(), "{model}");
        for (name, digest) in weights {
            assert_eq!(sha256(&floats(&files, name)), digest.as_str().unwrap(), "{model}: {name}");
            assert_eq!(
                files.quantized_format(name).is_some(),
                name.contains("proj.weight"),
                "{model}: {name}"
            );
        }
        let stored: u64 = files.names().map(|name| files.stored_bytes(name)).sum();
        assert_eq!(files.file_bytes().map(|(_, bytes)| bytes).collect::<Vec<_>>(), [stored], "{model}");
        same_values(&files).join("\n")
    };
    assert_snapshot!(of("tiny-ct-nvfp4"), @"
    nvfp4 in groups of 16 (scales in e4m3), as stored: 1152 bytes
    nvfp4 in groups of 16 (scales in e4m3), as stored: 2304 bytes
    nvfp4 in groups of 16 (scales in e4m3), as stored: 4608 bytes
    ");
    assert_snapshot!(of("tiny-ct-mxfp4"), @"
    mxfp4 in groups of 32 (scales in e8m0), as stored: 1088 bytes
    mxfp4 in groups of 32 (scales in e8m0), as stored: 2176 bytes
    mxfp4 in groups of 32 (scales in e8m0), as stored: 4352 bytes
    ");
    assert_snapshot!(of("tiny-modelopt-nvfp4"), @"
    nvfp4 in groups of 16 (scales in e4m3), as stored: 1152 bytes
    nvfp4 in groups of 16 (scales in e4m3), as stored: 2304 bytes
    nvfp4 in groups of 16 (scales in e4m3), as stored: 4608 bytes
    ");
    assert_snapshot!(of("tiny-hqq-4"), @"
    int4 in groups of 64 (scales in bf16), as stored: 4608 bytes
    int4 with one scale a row (scales in bf16), as stored: 1152 bytes
    int4 with one scale a row (scales in bf16), as stored: 2304 bytes
    int4 with one scale a row (scales in bf16), as stored: 4608 bytes
    ");
    assert_snapshot!(of("tiny-hqq-8"), @"
    int8 in groups of 64 (scales in bf16), as stored: 8704 bytes
    int8 with one scale a row (scales in bf16), as stored: 2176 bytes
    int8 with one scale a row (scales in bf16), as stored: 4352 bytes
    int8 with one scale a row (scales in bf16), as stored: 8704 bytes
    ");
    assert_snapshot!(of("tiny-modelopt-fp8"), @"
    fp8 with one scale for 128 rows (scales in f32), as stored: 8196 bytes
    fp8 with one scale for 32 rows (scales in f32), as stored: 2052 bytes
    fp8 with one scale for 64 rows (scales in f32), as stored: 4100 bytes
    fp8 with one scale for 64 rows (scales in f32), as stored: 8196 bytes
    ");
}

#[test]
fn kept_weights_of_gguf_files_have_the_dequantized_values() {
    let of = |model: &str| {
        let folder = described(&golden(model).join("model.gguf"));
        let files = open_packed(folder.path());
        let notes: Vec<&str> = files.warnings().collect();
        format!("{}\n{}", notes.join("\n"), same_values(&files).join("\n"))
    };
    assert_snapshot!(of("tiny-gguf-q4_0"), @"
    finetune keeps 14 weights stored as q4_0 packed in memory
    finetune dequantizes 1 weight stored as q8_0 while it reads the model: embedding and head do not stay packed
    int4 in groups of 32 (scales in f16), as stored: 1152 bytes
    int4 in groups of 32 (scales in f16), as stored: 2304 bytes
    int4 in groups of 32 (scales in f16), as stored: 3456 bytes
    ");
    assert_snapshot!(of("tiny-gguf-q8_0"), @"
    finetune keeps 7 weights stored as q8_0 packed in memory
    finetune dequantizes 1 weight stored as q8_0 while it reads the model: embedding and head do not stay packed
    int8 in groups of 32 (scales in f16), as stored: 17408 bytes
    int8 in groups of 32 (scales in f16), as stored: 6528 bytes
    int8 in groups of 32 (scales in f16), as stored: 8704 bytes
    ");
    assert_snapshot!(of("tiny-gguf-q4_k"), @"
    finetune keeps 5 weights stored as q4_K packed in memory
    finetune dequantizes 1 weight stored as q4_K while it reads the model: embedding and head do not stay packed
    finetune keeps 2 weights stored as q6_K packed in memory
    finetune dequantizes 1 weight stored as q6_K while it reads the model: embedding and head do not stay packed
    q4_K, as stored: 18432 bytes
    q4_K, as stored: 36864 bytes
    q6_K, as stored: 26880 bytes
    q6_K, as stored: 53760 bytes
    ");
}
