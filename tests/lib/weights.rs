//! Safetensors in and out: malformed and hostile files, shards, round trips, sidecar files.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::skipped::skipped;
use candle_core::Device;
use finetune::error::{ErrorCategory, Result};
use finetune::export::hf;
use finetune::weights::{
    INDEX_FILE, MODEL_FILE, ModelFiles, ModelIdentity, RangeReader, RemoteRange, StoredDtype, TensorGroup,
    TensorInfo, WriteEntry, summary, write_file, write_sharded,
};
use half::{bf16, f16};
use proptest::prelude::*;
use tempfile::TempDir;

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path)
}

/// Returns the path of a third-party model beside the repository, if present.
fn shared(path: &str) -> Option<PathBuf> {
    let root = std::env::var_os("FINETUNE_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared"), PathBuf::from);
    let path = root.join(path);
    if !path.exists() {
        let why = format!("{} is not there; set FINETUNE_SHARED", path.display());
        skipped("tests on weights of pretrained models", &why);
        return None;
    }
    Some(path)
}

fn temp() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// Builds a safetensors file: header length, header, data.
fn file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

fn put(folder: &Path, name: &str, contents: impl AsRef<[u8]>) {
    fs::write(folder.join(name), contents).expect("written");
}

fn shown(error: &finetune::error::Error, folder: &Path) -> String {
    error.to_string().replace(&folder.display().to_string(), "<dir>")
}

fn open_error(folder: &Path) -> String {
    let error = ModelFiles::open(folder).expect_err("refused");
    assert_eq!(error.kind(), ErrorCategory::User);
    shown(&error, folder)
}

fn index(pairs: &[(&str, &str)]) -> String {
    let pairs: Vec<String> = pairs.iter().map(|(tensor, shard)| format!("{tensor:?}:{shard:?}")).collect();
    format!(r#"{{"metadata":{{"total_size":"wrong"}},"weight_map":{{{}}}}}"#, pairs.join(","))
}

/// Builds a file with the U8 tensors `names`, one byte each.
fn bytes_file(names: &[&str]) -> Vec<u8> {
    let tensor = |(i, name): (usize, &&str)| {
        format!(r#"{name:?}:{{"dtype":"U8","shape":[1],"data_offsets":[{i},{}]}}"#, i + 1)
    };
    let tensors: Vec<String> = names.iter().enumerate().map(tensor).collect();
    file(&format!("{{{}}}", tensors.join(",")), &vec![7; names.len()])
}

#[test]
fn malformed_files_each_get_their_error() {
    let one = |tensor: &str| file(&format!(r#"{{"a":{tensor}}}"#), &[0; 8]);
    let two = |a: &str, b: &str| {
        let tensor = |offsets: &str| format!(r#"{{"dtype":"U8","shape":[4],"data_offsets":{offsets}}}"#);
        file(&format!(r#"{{"a":{},"b":{}}}"#, tensor(a), tensor(b)), &[0; 8])
    };
    let good = r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let long_name = "n".repeat(1 << 20);
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("empty", vec![]),
        ("seven bytes", vec![1; 7]),
        ("length 2^63", [&(1u64 << 63).to_le_bytes()[..], b"{}"].concat()),
        ("length over the cap", [&100_000_001u64.to_le_bytes()[..], b"{}"].concat()),
        ("length past the end", [&100u64.to_le_bytes()[..], b"{}"].concat()),
        ("a pickle in disguise", b"PK\x03\x04\x00\x00\x00\x00\x00\x00".to_vec()),
        ("no brace", file("[]", &[])),
        ("leading space", file(" {}", &[])),
        ("broken JSON", file(r#"{"a":"#, &[])),
        ("not UTF-8", [&7u64.to_le_bytes()[..], b"{\"\xff\":1}"].concat()),
        ("deep nesting", file(&format!("{{\"a\":{}", "[".repeat(100_000)), &[])),
        ("not a tensor", one("5")),
        ("missing key", one(r#"{"dtype":"F32","shape":[2]}"#)),
        ("unknown dtype", one(r#"{"dtype":"F7","shape":[2],"data_offsets":[0,8]}"#)),
        ("negative size", one(r#"{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}"#)),
        ("huge size", one(r#"{"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,8]}"#)),
        ("size overflow", one(r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}"#)),
        (
            "many dimensions",
            one(&format!(r#"{{"dtype":"F32","shape":[{}1],"data_offsets":[0,8]}}"#, "1,".repeat(50))),
        ),
        ("three offsets", one(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4,8]}"#)),
        ("reversed offsets", one(r#"{"dtype":"F32","shape":[2],"data_offsets":[8,0]}"#)),
        ("offsets and shape differ", one(r#"{"dtype":"F32","shape":[3],"data_offsets":[0,8]}"#)),
        ("duplicate key", file(&format!(r#"{{"a":{good},"a":{good}}}"#), &[0; 8])),
        ("overlap", two("[0,4]", "[2,6]")),
        ("hole", two("[0,4]", "[5,9]")),
        ("hole at the start", two("[1,5]", "[5,9]")),
        ("truncated data", file(&format!(r#"{{"a":{good}}}"#), &[0; 7])),
        ("bytes left over", file(&format!(r#"{{"a":{good}}}"#), &[0; 9])),
        (
            "long name",
            file(&format!(r#"{{"{long_name}":{{"dtype":"F7","shape":[],"data_offsets":[0,0]}}}}"#), &[]),
        ),
        (
            "control characters",
            file(r#"{"\u001b[2J\u0000":{"dtype":"F7","shape":[],"data_offsets":[0,0]}}"#, &[]),
        ),
    ];
    let mut causes = Vec::new();
    for (case, contents) in cases {
        let dir = temp();
        put(dir.path(), MODEL_FILE, contents);
        let error = open_error(dir.path());
        let lines: Vec<&str> = error.lines().collect();
        assert_eq!(lines[0], "error: cannot read weights <dir>/model.safetensors", "{case}");
        assert_eq!(lines[2], "hint: download or save the file again", "{case}");
        causes.push(format!("{case}: {}", lines[1].trim_start_matches("  caused by: ")));
    }
    insta::assert_snapshot!(causes.join("\n"), @r"
    empty: it has 0 bytes; a safetensors file has at least 8
    seven bytes: it has 7 bytes; a safetensors file has at least 8
    length 2^63: its first 8 bytes give a header of 9223372036854775808 bytes; accepted: up to 100000000 (not a safetensors file?)
    length over the cap: its first 8 bytes give a header of 100000001 bytes; accepted: up to 100000000 (not a safetensors file?)
    length past the end: it is truncated: the header should have 100 bytes, at least 2; 2 follow
    a pickle in disguise: its header does not start with `{` (not a safetensors file?)
    no brace: its header does not start with `{` (not a safetensors file?)
    leading space: its header does not start with `{` (not a safetensors file?)
    broken JSON: its header is not valid: tensor `a`: EOF while parsing a value at line 1 column 5
    not UTF-8: its header is not valid: invalid unicode code point at line 1 column 3
    deep nesting: its header is not valid: tensor `a`: invalid type: sequence, expected a string at line 1 column 6
    not a tensor: its header is not valid: tensor `a`: invalid type: integer `5`, expected an object with dtype, shape and data_offsets at line 1 column 6
    missing key: its header is not valid: tensor `a`: missing field `data_offsets` at line 1 column 32
    unknown dtype: tensor `a` has dtype `F7`; accepted: F32, F16, BF16, F64, F8_E4M3, F8_E5M2, F8_E8M0, I64, I32, I16, I8, U64, U32, U16, U8, BOOL
    negative size: its header is not valid: tensor `a`: invalid type: integer `-2`, expected a whole number from 0 to 2^64 - 1 at line 1 column 31
    huge size: its header is not valid: tensor `a`: invalid type: floating point `1e+20`, expected a whole number from 0 to 2^64 - 1 at line 1 column 49
    size overflow: tensor `a` has shape [4294967296, 4294967296], more than 2^64 bytes
    many dimensions: its header is not valid: tensor `a`: more than 32 dimensions at line 1 column 95
    three offsets: its header is not valid: tensor `a`: data_offsets has 3 numbers, accepted: 2 at line 1 column 56
    reversed offsets: tensor `a` has data_offsets [8, 0], which end before they start
    offsets and shape differ: tensor `a` has data_offsets [0, 8], 8 bytes; its shape [3] of F32 needs 12
    duplicate key: tensor `a` is in its header twice
    overlap: tensor `b` starts at byte 2 and overlaps `a`, which ends at 4
    hole: no tensor covers bytes 4 to 5 of its data, before tensor `b`
    hole at the start: no tensor covers bytes 0 to 1 of its data, before tensor `a`
    truncated data: it is truncated: its tensors need 8 bytes, the file has 7
    bytes left over: its tensors cover 8 bytes of data, the file has 9
    long name: its header is not valid: the name of tensor `nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn…` has 1048576 bytes; accepted: up to 4096 at line 1 column 1048579
    control characters: tensor `\u{1b}[2J\0` has dtype `F7`; accepted: F32, F16, BF16, F64, F8_E4M3, F8_E5M2, F8_E8M0, I64, I32, I16, I8, U64, U32, U16, U8, BOOL
    ");
}

#[test]
fn a_header_of_spaces_and_empty_tensors_is_fine() {
    let dir = temp();
    let header = r#"{"a":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]},"b":{"dtype":"F16","shape":[],"data_offsets":[0,2]}}      "#;
    put(dir.path(), MODEL_FILE, file(header, &f16::from_f32(1.5).to_le_bytes()));
    let files = ModelFiles::open(dir.path()).expect("valid");
    assert_eq!(files.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(files.info("a").map(|info| info.elements()), Some(0));
    let mut value = [0.0];
    files.read_f32("b", &mut value).expect("read");
    files.discard("a");
    files.discard("b");
    files.read_f32("b", &mut value).expect("read again");
    assert_eq!(value, [1.5]);
}

#[test]
fn folders_without_safetensors_say_what_they_have() {
    let dir = temp();
    insta::assert_snapshot!(open_error(dir.path()), @"
    error: cannot read a model from <dir>
      caused by: it has neither model.safetensors nor model.safetensors.index.json
    hint: give a folder that holds config.json and the weights, or a hub id such as `org/name`
    ");
    put(dir.path(), "model.Q4_K_M.gguf", "GGUF");
    insta::assert_snapshot!(open_error(dir.path()), @"
    error: cannot read a model from <dir>
      caused by: its weights are GGUF (model.Q4_K_M.gguf); accepted: model.safetensors, or model.safetensors.index.json and its shards
    hint: give the path of one GGUF file itself as the model
    ");
    put(dir.path(), "pytorch_model-00001-of-00002.bin", "");
    insta::assert_snapshot!(open_error(dir.path()), @r#"
    error: cannot read a model from <dir>
      caused by: its weights are pickle files (pytorch_model-00001-of-00002.bin), which can run code when opened; accepted: model.safetensors, or model.safetensors.index.json and its shards
    hint: convert it once with Python: python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained('<dir>').save_pretrained('<dir>-safetensors')"
    "#);
    put(dir.path(), "adapter_config.json", "{}");
    insta::assert_snapshot!(open_error(dir.path()), @"
    error: cannot read a model from <dir>
      caused by: it holds a PEFT adapter, not a model
    hint: give the base model, and the adapter as `--adapter <dir>` (in training `--set adapter.path=<dir>`)
    ");
    insta::assert_snapshot!(open_error(&dir.path().join("absent")), @"
    error: cannot read a model from <dir>
      caused by: No such file or directory (os error 2)
    hint: give a folder that holds config.json and the weights, or a hub id such as `org/name`
    ");
}

#[test]
fn an_index_that_does_not_fit_is_refused() {
    let (x, y) = ("x.safetensors", "y.safetensors");
    let try_index = |text: &str| {
        let dir = temp();
        put(dir.path(), x, bytes_file(&["a", "b"]));
        put(dir.path(), y, bytes_file(&["c"]));
        put(dir.path(), "twice.safetensors", bytes_file(&["b", "d"]));
        put(dir.path(), INDEX_FILE, text);
        match ModelFiles::open(dir.path()) {
            Ok(files) => format!("ok: {}", files.names().collect::<Vec<_>>().join(" ")),
            Err(error) => shown(&error, dir.path()),
        }
    };
    let cases = [
        index(&[("a", x), ("b", x), ("c", y)]),
        index(&[("a", x), ("c", y)]),
        index(&[("a", x), ("c", "z.safetensors")]),
        index(&[("a", x), ("c", x)]),
        index(&[("a", x), ("c", y), ("e", y)]),
        index(&[("a", x), ("d", "twice.safetensors")]),
        index(&[("a", "../x.safetensors")]),
        index(&[("a", "/etc/x.safetensors")]),
        index(&[("a", r"C:\x.safetensors")]),
        index(&[("a", r"..\x.safetensors")]),
        r#"{"weight_map":{"a":"x\u0000.safetensors"}}"#.into(),
        index(&[("a", "pytorch_model.bin")]),
        index(&[("a", x), ("a", y)]),
        index(&[]),
        r#"{"metadata":{}}"#.into(),
        "not JSON".into(),
    ];
    let results: Vec<String> = cases.iter().map(|case| try_index(case)).collect();
    insta::assert_snapshot!(results.join("\n"), @r"
    ok: a b c
    ok: a b c
    error: cannot read weights in <dir>
      caused by: model.safetensors.index.json puts tensor `c` in z.safetensors, which is missing
    hint: download the whole model again
    error: cannot read weights in <dir>
      caused by: model.safetensors.index.json puts tensor `c` in x.safetensors, but no shard has it
    hint: download the whole model again
    error: cannot read weights in <dir>
      caused by: model.safetensors.index.json puts tensor `e` in y.safetensors, but no shard has it
    hint: download the whole model again
    error: cannot read weights in <dir>
      caused by: tensor `b` is both in <dir>/twice.safetensors and in <dir>/x.safetensors
    hint: download the whole model again
    error: cannot read index <dir>/model.safetensors.index.json
      caused by: tensor `a` is in `../x.safetensors`; accepted: a file name ending in .safetensors, in the same folder
    hint: download or save the model again
    error: cannot read index <dir>/model.safetensors.index.json
      caused by: tensor `a` is in `/etc/x.safetensors`; accepted: a file name ending in .safetensors, in the same folder
    hint: download or save the model again
    error: cannot read index <dir>/model.safetensors.index.json
      caused by: tensor `a` is in `C:\\x.safetensors`; accepted: a file name ending in .safetensors, in the same folder
    hint: download or save the model again
    error: cannot read index <dir>/model.safetensors.index.json
      caused by: tensor `a` is in `..\\x.safetensors`; accepted: a file name ending in .safetensors, in the same folder
    hint: download or save the model again
    error: cannot read index <dir>/model.safetensors.index.json
      caused by: tensor `a` is in `x\0.safetensors`; accepted: a file name ending in .safetensors, in the same folder
    hint: download or save the model again
    error: cannot read index <dir>/model.safetensors.index.json
      caused by: tensor `a` is in `pytorch_model.bin`; accepted: a file name ending in .safetensors, in the same folder
    hint: download or save the model again
    error: cannot read index <dir>/model.safetensors.index.json
      caused by: it is not valid: tensor `a` is in its weight_map twice at line 1 column 89
    hint: download or save the model again
    error: cannot read index <dir>/model.safetensors.index.json
      caused by: its weight_map names no tensor
    hint: download or save the model again
    error: cannot read index <dir>/model.safetensors.index.json
      caused by: it is not valid: missing field `weight_map` at line 1 column 15
    hint: download or save the model again
    error: cannot read index <dir>/model.safetensors.index.json
      caused by: it is not valid: expected ident at line 1 column 2
    hint: download or save the model again
    ");
}

#[test]
fn a_folder_in_place_of_a_file_is_no_weights() {
    let dir = temp();
    fs::create_dir(dir.path().join(MODEL_FILE)).expect("made");
    insta::assert_snapshot!(open_error(dir.path()), @"
    error: cannot open weights <dir>/model.safetensors
      caused by: it is not a file
    ");
}

#[test]
fn reading_converts_and_checks() {
    let dir = temp();
    let values = [1.0f64, -2.5, 3.25, 1e-3];
    let entry = |name: &str, dtype| WriteEntry { name: name.into(), dtype, shape: vec![2, 2], stack: None };
    let entries = [
        entry("f64", StoredDtype::F64),
        entry("f32", StoredDtype::F32),
        entry("f16", StoredDtype::F16),
        entry("bf16", StoredDtype::BF16),
        entry("i64", StoredDtype::I64),
    ];
    write_file(&dir.path().join(MODEL_FILE), &entries, |entry, sink| match entry.dtype {
        StoredDtype::I64 => sink.write_bytes(&[0; 32]),
        _ => sink.write_values(&values.map(|v| v as f32)),
    })
    .expect("written");
    let files = ModelFiles::open(dir.path()).expect("opens");
    let mut out = [0f32; 4];
    let f32s = values.map(|v| v as f32);
    for (name, expected) in [
        ("f64", f32s),
        ("f32", f32s),
        ("f16", f32s.map(|v| f16::from_f32(v).to_f32())),
        ("bf16", f32s.map(|v| bf16::from_f32(v).to_f32())),
    ] {
        files.read_f32(name, &mut out).expect(name);
        assert_eq!(out, expected, "{name}");
    }
    let mut part = [bf16::ZERO; 2];
    files.read_part("f32", 1, &mut part).expect("inside");
    assert_eq!(part.map(|v| v.to_f32()), [-2.5, 3.25]);
    assert_eq!(files.read_part("f32", 3, &mut part).expect_err("outside").kind(), ErrorCategory::Internal);
    assert_eq!(files.read_into("f32", &mut part).expect_err("too short").kind(), ErrorCategory::Internal);
    let error =
        |name: &str, out: &mut [f32]| shown(&files.read_f32(name, out).expect_err("refused"), dir.path());
    insta::assert_snapshot!(error("i64", &mut out), @"
    error: cannot read weights <dir>/model.safetensors
      caused by: tensor `i64` has dtype I64; accepted: F32, F16, BF16, F64
    hint: give the unquantized model
    ");
    insta::assert_snapshot!(error("bf61", &mut out), @"
    error: cannot read weights in <dir>
      caused by: tensor `bf61` is missing; the nearest is `bf16`
    ");
}

#[test]
fn candle_reads_what_we_write() {
    let dir = temp();
    let entries = [
        WriteEntry { name: "half".into(), dtype: StoredDtype::BF16, shape: vec![3], stack: None },
        WriteEntry { name: "full".into(), dtype: StoredDtype::F32, shape: vec![2, 1], stack: None },
    ];
    let path = dir.path().join("x.safetensors");
    let written = write_file(&path, &entries, |entry, sink| {
        (0..entry.shape[0]).try_for_each(|i| sink.write_values(&[i as f32 + 0.5]))
    })
    .expect("written");
    let bytes = fs::read(&path).expect("there");
    assert_eq!(written.bytes, bytes.len() as u64);
    assert_eq!(written.digest, blake3::hash(&bytes));
    // The wider type first, so that an odd number of halves leaves no float unaligned.
    let parsed = safetensors::SafeTensors::deserialize(&bytes).expect("the reference reader takes it");
    assert_eq!(
        parsed.tensor("full").expect("there").data(),
        [0.5f32.to_le_bytes(), 1.5f32.to_le_bytes()].concat()
    );
    let tensors = candle_core::safetensors::load(&path, &Device::Cpu).expect("candle takes it");
    let half: Vec<bf16> = tensors["half"].to_vec1().expect("bf16");
    assert_eq!(half, [0.5, 1.5, 2.5].map(bf16::from_f32));
    assert_eq!(fs::read_dir(dir.path()).expect("folder").count(), 1, "no temporary left");
}

/// The reason why finetune does not read with the crate `safetensors`:
/// crates/weights/src/header.rs.
#[test]
fn the_reference_reader_judges_these_otherwise() {
    let reads = |bytes: &[u8]| safetensors::SafeTensors::read_metadata(bytes).is_ok();
    let tensor = r#""a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let whole = file(&format!("{{{tensor}}}"), &[0; 8]);
    assert!(reads(&whole));
    assert!(!reads(&whole[..whole.len() - 8]), "it takes a header alone");
    assert!(reads(&file(&format!("{{{tensor},{tensor}}}"), &[0; 8])), "it refuses a name that comes twice");
    let number = file(&format!(r#"{{"__metadata__":{{"version":1}},{tensor}}}"#), &[0; 8]);
    assert!(!reads(&number), "it takes metadata that is no text");
    let dir = temp();
    put(dir.path(), MODEL_FILE, number);
    assert!(ModelFiles::open(dir.path()).expect("ours passes over it").names().eq(["a"]));
}

#[test]
fn writers_that_give_the_wrong_amount_are_caught() {
    let dir = temp();
    let path = dir.path().join("x.safetensors");
    let entry = |dtype| [WriteEntry { name: "a".into(), dtype, shape: vec![2], stack: None }];
    let mut errors = Vec::new();
    for values in [&[1.0f32][..], &[1.0; 3]] {
        errors.push(write_file(&path, &entry(StoredDtype::F32), |_, sink| sink.write_values(values)));
    }
    errors.push(write_file(&path, &entry(StoredDtype::I32), |_, sink| sink.write_values(&[1.0f32; 2])));
    let twice = [entry(StoredDtype::F32), entry(StoredDtype::F32)].concat();
    errors.push(write_file(&path, &twice, |_, sink| sink.write_values(&[1.0f32; 2])));
    let texts: Vec<String> =
        errors.into_iter().map(|error| error.expect_err("refused").to_string()).collect();
    insta::assert_snapshot!(texts.join("\n"), @"
    error: cannot write tensor `a`
      caused by: 4 of its 8 bytes were not given
    error: cannot write tensor `a`
      caused by: more than its 8 bytes were given
    error: cannot write tensor `a`
      caused by: floats were given for I32
    error: cannot write weights
      caused by: tensor `a` is to be written twice
    ");
    assert_eq!(fs::read_dir(dir.path()).expect("folder").count(), 0, "nothing left");
}

#[cfg(unix)]
#[test]
fn a_link_at_the_temporary_name_is_not_followed() {
    let dir = temp();
    let path = dir.path().join(MODEL_FILE);
    put(dir.path(), MODEL_FILE, "before");
    put(dir.path(), "victim", "precious");
    let temporary = dir.path().join(format!("{MODEL_FILE}.tmp-{}", std::process::id()));
    std::os::unix::fs::symlink("victim", &temporary).expect("linked");
    let entries = [WriteEntry { name: "a".into(), dtype: StoredDtype::F32, shape: vec![2], stack: None }];
    let error = write_file(&path, &entries, |_, sink| sink.write_values(&[0f32; 2])).expect_err("a link");
    assert_eq!(error.kind(), ErrorCategory::Storage, "{error}");
    assert_eq!(fs::read(&path).expect("still there"), b"before");
    assert_eq!(fs::read(dir.path().join("victim")).expect("still there"), b"precious");
}

#[test]
fn shards_have_their_hugging_face_names_and_index() {
    let dir = temp();
    let entries: Vec<WriteEntry> = (0..3)
        .map(|i| WriteEntry { name: format!("t{i}"), dtype: StoredDtype::F32, shape: vec![10], stack: None })
        .collect();
    let write = |entry: &WriteEntry, sink: &mut finetune::weights::TensorSink<'_>| {
        sink.write_values(&[entry.name.len() as f32; 10])
    };
    write_sharded(dir.path(), &entries, 80, write).expect("written");
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(dir.path().join(INDEX_FILE)).expect("there")).expect("JSON");
    assert_eq!(
        index,
        serde_json::json!({
            "metadata": { "total_size": 120 },
            "weight_map": {
                "t0": "model-00001-of-00002.safetensors",
                "t1": "model-00001-of-00002.safetensors",
                "t2": "model-00002-of-00002.safetensors",
            }
        })
    );
    let files = ModelFiles::open(dir.path()).expect("opens");
    assert!(files.is_indexed());
    assert_eq!(files.files().map(|(_, tensors)| tensors.len()).collect::<Vec<_>>(), [2, 1]);
    // The same layout is replaced; another one would leave two models in one folder.
    write_sharded(dir.path(), &entries, 80, write).expect("written again");
    let error = write_sharded(dir.path(), &entries, 1000, write).expect_err("refused");
    insta::assert_snapshot!(shown(&error, dir.path()), @"
    error: cannot write weights to <dir>
      caused by: it holds other weights (model-00001-of-00002.safetensors), which readers would take for part of these
    hint: give an empty folder as `--output`
    ");
}

#[test]
fn a_model_folder_is_exported_with_its_companions() {
    let (dir, source) = (temp(), golden("models/tiny-mistral"));
    let base = ModelFiles::open(&source).expect("opens");
    let entries: Vec<WriteEntry> = base
        .tensors()
        .map(|(name, info)| WriteEntry {
            name: name.into(),
            dtype: StoredDtype::F32,
            shape: info.shape.clone(),
            stack: None,
        })
        .collect();
    let output = dir.path().join("a/b");
    hf::write_model(&output, &source, None, &entries, hf::SHARD_BYTES, |entry, sink| {
        let mut values = vec![0f32; entry.shape.iter().product()];
        base.read_f32(&entry.name, &mut values)?;
        sink.write_values(&values)
    })
    .expect("exported");
    let names: Vec<String> = {
        let entries = fs::read_dir(&output).expect("folder").flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    };
    assert_eq!(
        names,
        [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer_config.json"
        ]
    );
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(output.join("config.json")).expect("there")).expect("JSON");
    assert_eq!(config["torch_dtype"], "float32");
    let files = ModelFiles::open(&output).expect("opens");
    assert_eq!(files.names().collect::<Vec<_>>(), base.names().collect::<Vec<_>>());
    for name in base.names() {
        let mut pair = [vec![0f32; 1], vec![0f32; 1]];
        for (files, out) in [&base, &files].into_iter().zip(&mut pair) {
            out.resize(files.info(name).expect("there").elements(), 0.0);
            files.read_f32(name, out).expect("read");
        }
        assert_eq!(pair[0], pair[1], "{name}");
    }
}

#[test]
fn summaries_come_from_headers() {
    let model = summary(&golden("models/tiny-mistral")).expect("a model");
    assert_eq!(model.architecture.as_deref(), Some("MistralForCausalLM"));
    assert_eq!(model.model_type.as_deref(), Some("mistral"));
    // 305,792 bytes of bf16, by transformers' total_size.
    assert_eq!((model.total.tensors, model.total.elements, model.total.bytes), (21, 152_896, 305_792));
    assert_eq!(model.dtypes.keys().copied().collect::<Vec<_>>(), [StoredDtype::BF16]);
    assert_eq!(model.groups[&TensorGroup::Norm].tensors, 5);
    assert_eq!(model.groups[&TensorGroup::Attention].tensors, 8);
    let names: Vec<&str> = model.files.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]);
}

#[test]
fn identities_tell_models_apart() {
    let identity = |folder: &Path| {
        let files = ModelFiles::open(folder).expect("opens");
        ModelIdentity::named("m", None).of_files(&files).expect("is read")
    };
    let llama = identity(&golden("models/tiny-llama"));
    assert_eq!(llama.is_same(&identity(&golden("models/tiny-llama"))), Some(true));
    // The same architecture, other weights.
    assert_eq!(llama.is_same(&identity(&golden("train/lora/merged"))), Some(false));
    assert_eq!(llama.is_same(&identity(&golden("quant/tiny-llama-bnb-nf4"))), Some(false));
    // Without weights, the commits decide if both are known.
    let named = |commit| ModelIdentity::named("m", commit);
    assert_eq!(named(Some("c0")).is_same(&named(Some("c0"))), Some(true));
    assert_eq!(named(Some("c0")).is_same(&named(Some("c1"))), Some(false));
    assert_eq!((named(Some("c0")).is_same(&named(None)), llama.is_same(&named(None))), (None, None));
    assert_eq!(ModelIdentity::from_json(&llama.to_json()).expect("JSON"), llama);

    // However it is sharded, and with any stored tensors that loading ignores.
    let dir = tempfile::tempdir().expect("a temporary folder");
    let files = ModelFiles::open(&golden("models/tiny-llama")).expect("opens");
    let entry = |(name, info): (&str, &TensorInfo)| WriteEntry {
        name: name.into(),
        dtype: info.dtype,
        shape: info.shape.clone(),
        stack: None,
    };
    let mut entries: Vec<WriteEntry> = files.tensors().map(entry).collect();
    let buffer = "model.layers.0.self_attn.rotary_emb.inv_freq";
    entries
        .insert(3, WriteEntry { name: buffer.into(), dtype: StoredDtype::F32, shape: vec![8], stack: None });
    let written = write_sharded(dir.path(), &entries, 100_000, |entry, sink| match entry.name.as_str() {
        name if name == buffer => sink.write_values(&[0f32; 8]),
        name => sink.write_bytes(files.bytes(name)?),
    });
    assert!(written.expect("written").len() > 3);
    assert_eq!(identity(dir.path()).is_same(&llama), Some(true));
}

#[test]
fn real_models_open_where_they_are() {
    for (path, tensors, elements) in [
        ("models/stories260K", 47, 260_032),
        ("models/stories260K-sharded-bf16", 47, 260_032),
        ("models/stories3M", 56, 3_148_224),
        ("models/TinyStories-656K", 20, 656_000),
    ] {
        let Some(folder) = shared(path) else { continue };
        let model = summary(&folder).expect(path);
        assert_eq!((model.total.tensors, model.total.elements), (tensors, elements), "{path}");
        let files = ModelFiles::open(&folder).expect(path);
        for (name, info) in files.tensors() {
            let mut values = vec![0f32; info.elements()];
            files.read_f32(name, &mut values).expect(name);
            assert!(values.iter().all(|value| value.is_finite()), "{path}: {name}");
        }
    }
}

fn any_entries() -> impl Strategy<Value = Vec<(WriteEntry, Vec<f32>)>> {
    let dtype = prop_oneof![
        Just(StoredDtype::F32),
        Just(StoredDtype::F16),
        Just(StoredDtype::BF16),
        Just(StoredDtype::F64)
    ];
    let tensor = (dtype, prop::collection::vec(0usize..5, 0..4)).prop_flat_map(|(dtype, shape)| {
        let values = prop::collection::vec(-1000f32..1000.0, shape.iter().product::<usize>());
        (Just(dtype), Just(shape), values)
    });
    prop::collection::vec(("[a-z.é\"\\\\]{0,8}", tensor), 1..12).prop_map(|tensors| {
        let numbered = tensors.into_iter().enumerate();
        numbered
            .map(|(i, (name, (dtype, shape, values)))| {
                (WriteEntry { name: format!("{i}{name}"), dtype, shape, stack: None }, values)
            })
            .collect()
    })
}

proptest! {
    // Each case flushes files to disk.
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn what_is_written_is_read(tensors in any_entries(), shard_bytes in 1u64..400) {
        let (once, again) = (temp(), temp());
        let entries: Vec<WriteEntry> = tensors.iter().map(|(entry, _)| entry.clone()).collect();
        let mut digests = Vec::new();
        for dir in [&once, &again] {
            let written = write_sharded(dir.path(), &entries, shard_bytes, |entry, sink| {
                let (_, values) = tensors.iter().find(|(other, _)| other == entry).expect("listed");
                sink.write_values(values)
            }).expect("written");
            digests.push(written.iter().map(|file| file.digest).collect::<Vec<_>>());
        }
        prop_assert_eq!(&digests[0], &digests[1]);
        let files = ModelFiles::open(once.path()).expect("opens");
        prop_assert_eq!(files.names().len(), entries.len());
        for (entry, values) in &tensors {
            let info = files.info(&entry.name).expect("there");
            prop_assert_eq!((info.dtype, &info.shape), (entry.dtype, &entry.shape));
            let mut actual = vec![0f32; values.len()];
            files.read_f32(&entry.name, &mut actual).expect("read");
            let expected: Vec<f32> = values.iter().map(|&value| match entry.dtype {
                StoredDtype::F16 => f16::from_f32(value).to_f32(),
                StoredDtype::BF16 => bf16::from_f32(value).to_f32(),
                _ => value,
            }).collect();
            prop_assert_eq!(actual, expected);
        }
    }

    #[test]
    fn no_bytes_make_the_parser_panic(header in ".{0,200}", data in prop::collection::vec(any::<u8>(), 0..50)) {
        let dir = temp();
        put(dir.path(), MODEL_FILE, file(&format!("{{{header}"), &data));
        prop_assert!(ModelFiles::open(dir.path()).is_err() || data.is_empty());
    }
}

/// Weights in another folder, which stands for the hub.
struct Elsewhere(PathBuf, Vec<String>);

impl RangeReader for Elsewhere {
    fn files(&self) -> &[String] {
        &self.1
    }

    fn read(&self, file: &str, range: Range<u64>) -> Result<RemoteRange> {
        let bytes = std::fs::read(self.0.join(file)).expect("a golden file");
        let part = &bytes[range.start as usize..bytes.len().min(range.end as usize)];
        Ok(RemoteRange { bytes: part.to_vec(), file_bytes: bytes.len() as u64 })
    }
}

#[test]
fn headers_alone_tell_all_but_values() {
    for model in ["models/tiny-llama", "quant/tiny-llama-bnb-nf4", "quant/tiny-llama-bnb-int8"] {
        let whole = ModelFiles::open(&golden(model)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let elsewhere = Elsewhere(golden(model), vec!["model.safetensors".to_owned()]);
        let files = ModelFiles::open_in_place(folder.path(), &elsewhere).unwrap();
        assert!(files.is_header_only() && !whole.is_header_only());
        assert_eq!(files.names().collect::<Vec<_>>(), whole.names().collect::<Vec<_>>());
        for (name, info) in whole.tensors() {
            let actual = files.info(name).unwrap();
            assert_eq!((actual.dtype, &actual.shape, &actual.range), (info.dtype, &info.shape, &info.range));
            assert_eq!(files.quantized_format(name), whole.quantized_format(name));
            assert_eq!(files.stored_bytes(name), whole.stored_bytes(name));
            if model.starts_with("quant/") {
                // In a model this small, the labels are read together with the data between them.
                continue;
            }
            let mut values = vec![0.0f32; info.elements()];
            let error = files.read_f32(name, &mut values).unwrap_err();
            assert!(error.to_string().contains("only the header was read"), "{error}");
            assert_eq!(error.kind(), ErrorCategory::Internal);
            assert!(files.bytes(name).is_err());
            files.discard(name);
        }
        // Without bytes to sample no digest can be compared.
        let identity = |files: ModelFiles| ModelIdentity::named("model", None).of_files(&files).unwrap();
        assert!(identity(files).digest().is_none() && identity(whole).digest().is_some(), "{model}");
    }
}
