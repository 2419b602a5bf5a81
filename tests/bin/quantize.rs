//! Checkpoints in bitsandbytes' formats, read, refused if inconsistent, and written by `finetune
//! quantize` (tests/golden/quant, made by make_golden.py and make_llm_int8.py).

mod mxfp4;

use std::path::Path;

use crate::logits::{base, distance, floats};
use crate::test_dir::{TestDir, copy_folder, golden, lora, tiny_models};
use finetune::loading::Trains;
use finetune::quant::{
    BlockCodes as _, BlockFormat, FourBit, NESTED_BLOCK, QuantFormat, QuantTensor, RunMeaning, RunsViewMut,
};
use finetune::weights::{ModelFiles, StoredDtype};
use insta::assert_snapshot;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};

const NF4: &str = "quant/tiny-llama-bnb-nf4";
const INT8: &str = "quant/tiny-llama-bnb-int8";
const Q_PROJ: &str = "model.layers.0.self_attn.q_proj.weight";
const STATE: &str = "model.layers.0.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4";

/// A folder with a quantized model and the tokenizer of its original.
fn test_dir(checkpoint: &str) -> TestDir {
    let dir = TestDir::new();
    std::fs::remove_file(dir.path("model/model.safetensors")).unwrap();
    copy_folder(&golden(checkpoint), &dir.path("model"));
    std::fs::remove_file(dir.path("model/expected_forward.safetensors")).unwrap();
    dir
}

#[test]
fn logits_equal_transformers() {
    for checkpoint in [NF4, INT8] {
        let folder = golden(checkpoint);
        let distance = distance(&folder.join("expected_forward.safetensors"), &folder);
        assert!(distance < 1e-4, "{checkpoint}: {distance}");
    }
}

#[test]
fn a_quantized_model_looks_like_the_one_it_was_made_from() {
    let original = ModelFiles::open(&golden("models/tiny-llama")).unwrap();
    for (checkpoint, dtype) in [(NF4, StoredDtype::F32), (INT8, StoredDtype::F16)] {
        let files = ModelFiles::open(&golden(checkpoint)).unwrap();
        assert!(files.names().eq(original.names()), "{checkpoint}");
        for (name, info) in files.tensors() {
            assert_eq!(info.shape, original.info(name).unwrap().shape, "{checkpoint}: {name}");
            assert_eq!(info.dtype, dtype, "{checkpoint}: {name}");
            assert_eq!(
                files.quantized(name).unwrap().is_some(),
                name.contains("_proj."),
                "{checkpoint}: {name}"
            );
        }
        // Half the widest gap between two codes of nf4, relative to a block's largest magnitude.
        let (ours, theirs) = (floats(&files, Q_PROJ), floats(&original, Q_PROJ));
        let limit = theirs.iter().fold(0f32, |max, x| max.max(x.abs())) / 6.0;
        assert!(ours.iter().zip(&theirs).all(|(a, b)| (a - b).abs() < limit), "{checkpoint}");
        let whole: u64 = files.names().map(|name| files.stored_bytes(name)).sum();
        assert_eq!(files.file_bytes().map(|(_, bytes)| bytes).collect::<Vec<_>>(), [whole]);
    }
}

#[test]
fn rows_of_llm_int8_are_dequantized_as_bitsandbytes_does() {
    let files = ModelFiles::open(&golden(INT8)).unwrap();
    let expected = ModelFiles::open_file(&golden(INT8).join("expected_forward.safetensors")).unwrap();
    let name = "model.layers.0.self_attn.k_proj.weight";
    assert_eq!(floats(&files, name), floats(&expected, &format!("dequantized.{name}")));
}

#[test]
fn parts_of_a_quantized_tensor_are_parts_of_the_whole() {
    for checkpoint in [NF4, INT8] {
        let files = ModelFiles::open(&golden(checkpoint)).unwrap();
        let whole = floats(&files, Q_PROJ);
        for (start, len) in [(0, 1), (1, 1), (63, 2), (64, 64), (65, 1000), (4095, 1), (0, 4096), (4096, 0)] {
            let mut part = vec![0f32; len];
            files.read_part(Q_PROJ, start, &mut part).unwrap();
            assert_eq!(part, whole[start..start + len], "{checkpoint}: {start}, {len}");
        }
        let mut rounded = vec![half::bf16::ZERO; whole.len()];
        files.read_into(Q_PROJ, &mut rounded).unwrap();
        assert!(rounded.iter().zip(&whole).all(|(ours, value)| *ours == half::bf16::from_f32(*value)));
        assert!(files.read_part(Q_PROJ, 4000, &mut [0f32; 97]).is_err());
    }
}

/// Large enough for several reading threads.
#[test]
fn threads_read_what_one_thread_does() {
    let n = 300_000;
    let folder = tempfile::tempdir().unwrap();
    let values: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
    let format = BlockFormat { codes: FourBit::Fp4, block_size: 128, double_quant: false };
    let (mut codes, mut absmax) = (vec![0u8; format.code_bytes(n)], vec![0f32; format.blocks(n)]);
    format.quantize(&values, &mut codes, &mut absmax);
    let state =
        json!({"quant_type": "fp4", "blocksize": 128, "dtype": "bfloat16", "shape": [3, n / 3]}).to_string();
    let le = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let tensors: Vec<Tensor> = vec![
        ("w.weight".into(), Dtype::U8, vec![codes.len(), 1], codes),
        ("w.weight.absmax".into(), Dtype::F32, vec![absmax.len()], le(&absmax)),
        ("w.weight.quant_map".into(), Dtype::F32, vec![16], le(format.codes.table())),
        ("w.weight.quant_state.bitsandbytes__fp4".into(), Dtype::U8, vec![state.len()], state.into_bytes()),
    ];
    write_tensors(&folder.path().join("model.safetensors"), &tensors);
    let files = ModelFiles::open(folder.path()).unwrap();
    assert_eq!(files.info("w.weight").unwrap().dtype, StoredDtype::BF16);
    assert_eq!(files.quantized("w.weight").unwrap().unwrap().format(), QuantFormat::FourBit(format));
    let whole = floats(&files, "w.weight");
    let mut pieces = Vec::new();
    for start in (0..n).step_by(999) {
        let mut piece = vec![0f32; 999.min(n - start)];
        files.read_part("w.weight", start, &mut piece).unwrap();
        pieces.extend(piece);
    }
    assert_eq!(whole, pieces);
    assert!(whole.iter().zip(&values).all(|(a, b)| (a - b).abs() < 0.2));
}

#[test]
fn codes_and_scales_are_the_files_own() {
    let files = ModelFiles::open(&golden(NF4)).unwrap();
    let raw = ModelFiles::open_file(&golden(NF4).join("model.safetensors")).unwrap();
    let tensor = files.quantized(Q_PROJ).unwrap().unwrap();
    assert_eq!(tensor.format(), QuantFormat::default());
    let (blocks, mut offset) = (4096 / 64, 0f32);
    let (mut codes, mut nested) = (vec![0u8; 4096 / 2], vec![0u8; blocks]);
    let mut scales = vec![0f32; blocks.div_ceil(NESTED_BLOCK)];
    let bytes = [(RunMeaning::Codes, &mut codes[..]), (RunMeaning::ScaleCodes, &mut nested)];
    let runs = RunsViewMut::new(bytes, [(RunMeaning::NestedScales, &mut scales[..])], &mut offset);
    tensor.copy_to(&mut QuantTensor { format: tensor.format(), runs });
    assert_eq!(codes, raw.bytes(Q_PROJ).unwrap());
    assert_eq!(nested, raw.bytes(&format!("{Q_PROJ}.absmax")).unwrap());
    assert_eq!(scales, floats(&raw, &format!("{Q_PROJ}.nested_absmax")));
    let state: Value = serde_json::from_slice(raw.bytes(STATE).unwrap()).unwrap();
    assert_eq!(f64::from(offset), state["nested_offset"].as_f64().unwrap());
    assert_eq!((tensor.codes(), tensor.offset()), (&codes[..], offset));
    // Tensors that are not quantized return None and their bytes; quantized ones have no plain
    // bytes.
    assert!(files.quantized("lm_head.weight").unwrap().is_none());
    assert_eq!(files.bytes("lm_head.weight").unwrap(), raw.bytes("lm_head.weight").unwrap());
    assert!(files.bytes(Q_PROJ).is_err());
}

fn printed(dir: &TestDir, args: &[&str]) -> String {
    let output = dir.command(args).output().unwrap();
    let said = dir.told(&output.stderr);
    assert!(output.status.success(), "{said}");
    dir.told(&output.stdout)
}

#[test]
fn the_verbs_read_quantized_models() {
    let dir = test_dir(NF4);
    assert_snapshot!(printed(&dir, &["inspect", "model"]), @"
    architecture  LlamaForCausalLM
    model_type    llama
    parameters    135K in 21 tensors, 296 KiB
      F32         61.8K in 7 tensors, 241 KiB
      nf4         73.7K in 14 tensors, 54.3 KiB
    tensors by group
      embedding   30.7K in 1 tensor, 120 KiB
      attention   24.6K in 8 tensors, 22.2 KiB
      mlp         49.2K in 6 tensors, 32.1 KiB
      norm        320 in 5 tensors, 1.25 KiB
      head        30.7K in 1 tensor, 120 KiB
    files
      model.safetensors  296 KiB
    ");
    let eval =
        ["eval", "--model", "model", "--dataset", "rows.jsonl", "--json", "--set", "data.max_seq_len=96"];
    let loss: Value = serde_json::from_str(&printed(&dir, &eval)).unwrap();
    assert!(loss["loss"].as_f64().unwrap().is_finite());
    printed(&dir, &["generate", "--model", "model", "--prompt", "a", "--max-new-tokens", "2"]);
}

#[test]
fn an_adapter_trains_on_a_quantized_model() {
    for checkpoint in [NF4, INT8] {
        let dir = test_dir(checkpoint);
        printed(&dir, &lora(&[]));
        let log = std::fs::read_to_string(dir.path("out/metrics.jsonl")).unwrap();
        assert_eq!(log.lines().filter(|line| line.contains("\"loss\"")).count(), 4, "{checkpoint}: {log}");
    }
}

/// Adds a run's adapter on this base to the dequantized weights.
#[test]
fn merge_gives_a_model_that_is_not_quantized() {
    let dir = test_dir(NF4);
    copy_folder(&golden("train/qlora/adapter_final"), &dir.path("adapter"));
    printed(&dir, &["merge", "--model", "model", "--adapter", "adapter", "--output", "merged"]);
    let config = std::fs::read_to_string(dir.path("merged/config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert!(config.get("quantization_config").is_none());
    assert_eq!(config["vocab_size"], 480);
    let (merged, base) = (dir.path("merged"), dir.path("model"));
    let (merged, base) = (ModelFiles::open(&merged).unwrap(), ModelFiles::open(&base).unwrap());
    assert!(merged.names().eq(base.names()));
    assert!(merged.quantized(Q_PROJ).unwrap().is_none());
    assert_ne!(floats(&merged, Q_PROJ), floats(&base, Q_PROJ));
}

type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

fn write_tensors(path: &Path, tensors: &[Tensor]) {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// Rewrites the folder's weights with changed tensors.
fn change_tensors(dir: &TestDir, change: impl FnOnce(&mut Vec<Tensor>)) {
    let path = dir.path("model/model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap().tensors();
    let own = |(name, view): (String, TensorView<'_>)| {
        (name, view.dtype(), view.shape().to_vec(), view.data().to_vec())
    };
    let mut tensors: Vec<Tensor> = all.into_iter().map(own).collect();
    change(&mut tensors);
    write_tensors(&path, &tensors);
}

/// Returns the error for a checkpoint with changed tensors.
fn refused(checkpoint: &str, change: impl FnOnce(&mut Vec<Tensor>)) -> String {
    let dir = test_dir(checkpoint);
    change_tensors(&dir, change);
    refusal(&dir, &["inspect", "model"])
}

fn refusal(dir: &TestDir, args: &[&str]) -> String {
    let output = dir.command(args).output().unwrap();
    let said = dir.told(&output.stderr);
    assert_eq!(said.lines().filter(|line| line.starts_with("error: ")).count(), 1, "one error: {said}");
    assert!(!said.contains("internal error") && output.stdout.is_empty(), "{said}");
    format!("exit {}\n{said}", output.status.code().unwrap())
}

fn tensor<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
    tensors.iter_mut().find(|tensor| tensor.0 == name).unwrap()
}

/// Returns the error for a checkpoint with a changed first quant_state.
fn refused_state(change: impl FnOnce(&mut Value)) -> String {
    refused(NF4, |tensors| {
        let (_, _, shape, data) = tensor(tensors, STATE);
        let mut state = serde_json::from_slice(data).unwrap();
        change(&mut state);
        *data = state.to_string().into_bytes();
        *shape = vec![data.len()];
    })
}

/// Returns the error for a checkpoint without the tensor `name`.
fn refused_without(checkpoint: &str, name: &str) -> String {
    refused(checkpoint, |tensors| {
        let before = tensors.len();
        tensors.retain(|tensor| tensor.0 != name);
        assert_eq!(tensors.len(), before - 1);
    })
}

/// Returns the one line in which such errors differ.
fn cause(refused: String) -> String {
    let lines: Vec<&str> = refused.lines().collect();
    assert_eq!(
        lines[..2],
        ["exit 1", "error: cannot read weights [DIR]/model/model.safetensors"],
        "{refused}"
    );
    assert_eq!(lines.len(), 4, "{refused}");
    assert!(lines[3].starts_with("hint: quantize the model again: `finetune quantize"), "{refused}");
    let start = "  caused by: tensor `model.layers.0.self_attn.q_proj.weight`, quantized by bitsandbytes: ";
    lines[2].strip_prefix(start).unwrap_or(lines[2]).to_owned()
}

#[test]
fn a_quant_state_that_is_cut_short() {
    assert_snapshot!(refused(NF4, |tensors| {
        let (_, _, shape, data) = tensor(tensors, STATE);
        data.truncate(40);
        *shape = vec![40];
    }), @"
    exit 1
    error: cannot read weights [DIR]/model/model.safetensors
      caused by: tensor `model.layers.0.self_attn.q_proj.weight`, quantized by bitsandbytes: its quant_state (40 bytes) is not valid: EOF while parsing a string at line 1 column 40
    hint: quantize the model again: `finetune quantize --model ORIGINAL --kind nf4 --output NEW`
    ");
}

#[test]
fn quant_states_that_do_not_fit() {
    assert_snapshot!(cause(refused_state(|state| state["quant_type"] = json!("fp4"))), @r#"its quant_state is called bitsandbytes__nf4, but says quant_type "fp4""#);
    assert_snapshot!(cause(refused_state(|state| state["shape"] = json!([64, 65]))), @"it has 2048 bytes of codes; the shape of its quant_state, [64, 65], needs 2080");
    assert_snapshot!(cause(refused_state(|state| state["shape"] = json!([u64::MAX, 2]))), @"it has 2048 bytes of codes; the shape of its quant_state, [18446744073709551615, 2], needs more than a file can hold");
    assert_snapshot!(cause(refused_state(|state| state["blocksize"] = json!(128))), @"absmax has 64 scales for 32 blocks (shape [64, 64], blocksize 128)");
    assert_snapshot!(cause(refused_state(|state| state["blocksize"] = json!(0))), @"its quant_state has blocksize 0; accepted: [32, 64, 128, 256, 512, 1024, 2048, 4096]");
    assert_snapshot!(cause(refused_state(|state| state["dtype"] = json!("int8"))), @r#"its quant_state has dtype "int8"; accepted: float32, float16, bfloat16"#);
    assert_snapshot!(cause(refused_state(|state| state["nested_blocksize"] = json!(64))), @"nested_blocksize is 64; accepted: 256");
    assert_snapshot!(cause(refused_state(|state| {
        state.as_object_mut().unwrap().remove("nested_offset");
    })), @"its quant_state has no nested_offset");
    assert_snapshot!(cause(refused(NF4, |tensors| {
        tensor(tensors, STATE).0 = STATE.replace("nf4", "nf5");
    })), @"its quant_state is called bitsandbytes__nf5; accepted: bitsandbytes__nf4, bitsandbytes__fp4");
    assert_snapshot!(cause(refused(NF4, |tensors| {
        let mut second = tensor(tensors, STATE).clone();
        second.0 = STATE.replace("nf4", "fp4");
        tensors.push(second);
    })), @"it has two quant_states, bitsandbytes__fp4 and bitsandbytes__nf4");
}

#[test]
fn formats_of_others() {
    let dir = test_dir(NF4);
    let config = std::fs::read_to_string(dir.path("model/config.json")).unwrap();
    dir.write(
        "model/config.json",
        &config.replace("\"quant_method\": \"bitsandbytes\"", "\"quant_method\": \"quip\""),
    );
    assert_snapshot!(refusal(&dir, &["generate", "--model", "model", "--prompt", "a"]), @r#"
    exit 1
    error: cannot use the model of [DIR]/model/config.json
      caused by: the model is quantized in a format that this program does not read
      caused by: `quantization_config.quant_method` is "quip"; accepted: "bitsandbytes", "fp8", "gptq", "awq", "compressed-tensors", "mxfp4", "modelopt", "hqq"
    hint: give the model that was not quantized
    "#);
}

#[test]
fn companions_that_are_missing() {
    assert_snapshot!(cause(refused_without(NF4, STATE)), @"absmax is present, but its quant_state is missing");
    assert_snapshot!(cause(refused_without(NF4, Q_PROJ)), @"its codes are missing");
    for end in ["absmax", "quant_map", "nested_absmax", "nested_quant_map"] {
        let cause = cause(refused_without(NF4, &format!("{Q_PROJ}.{end}")));
        assert!(cause.contains(end) && cause.contains("missing"), "{end}: {cause}");
    }
    assert_snapshot!(cause(refused_without(INT8, &Q_PROJ.replace("weight", "SCB"))), @"it has weight_format, but SCB, the scales of its rows, is missing");
}

#[test]
fn companions_that_do_not_fit() {
    assert_snapshot!(cause(refused(NF4, |tensors| {
        let (_, _, shape, data) = tensor(tensors, Q_PROJ);
        data.truncate(1000);
        *shape = vec![1000, 1];
    })), @"it has 1000 bytes of codes; the shape of its quant_state, [64, 64], needs 2048");
    // The table of another kind has slightly different values.
    assert_snapshot!(cause(refused(NF4, |tensors| {
        tensor(tensors, &format!("{Q_PROJ}.quant_map")).3 =
            FourBit::Fp4.table().iter().flat_map(|value| value.to_le_bytes()).collect();
    })), @"quant_map is not the table of nf4: the value of code 0 is not -1");
    assert_snapshot!(cause(refused(NF4, |tensors| {
        tensor(tensors, &format!("{Q_PROJ}.absmax")).1 = Dtype::I8;
    })), @"absmax has dtype I8 beside nested_absmax; accepted: U8");
    assert_snapshot!(cause(refused(INT8, |tensors| {
        let (_, _, shape, data) = tensor(tensors, &Q_PROJ.replace("weight", "SCB"));
        data.truncate(4 * 63);
        *shape = vec![63];
    })), @"SCB has 63 values for 64 rows");
    assert_snapshot!(cause(refused(INT8, |tensors| {
        tensor(tensors, &Q_PROJ.replace("weight", "weight_format")).3 = vec![2];
    })), @"weight_format is [2]; accepted: 0 (rows)");
    assert_snapshot!(cause(refused(INT8, |tensors| tensor(tensors, Q_PROJ).1 = Dtype::U8)), @"it has dtype U8 beside SCB; accepted: I8");
}

/// Runs `finetune quantize` on the place's model.
fn quantize(dir: &TestDir, more: &[&str]) -> String {
    let args = ["quantize", "--model", "model", "--output", "quantized"];
    let output = dir.command(&args).args(more).output().unwrap();
    let said = dir.told(&output.stderr);
    assert!(output.status.success() && output.stdout.is_empty(), "{said}");
    said
}

fn raw(dir: &TestDir) -> ModelFiles {
    ModelFiles::open_file(&dir.path("quantized/model.safetensors")).unwrap()
}

fn json_of(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn nf4_is_written_as_transformers_writes_it() {
    let dir = TestDir::new();
    let said = quantize(&dir, &["--kind", "nf4"]);
    let first = "quantized 14 tensors to nf4, copied 7: 306 KiB in quantized, 529 KiB before\n";
    assert!(said.starts_with(first), "{said}");
    let (ours, theirs) = (raw(&dir), ModelFiles::open_file(&golden(NF4).join("model.safetensors")).unwrap());
    assert!(ours.names().eq(theirs.names()));
    for (name, info) in theirs.tensors() {
        assert_eq!(
            (info.dtype, &info.shape),
            (ours.info(name).unwrap().dtype, &ours.info(name).unwrap().shape)
        );
        assert_eq!(ours.bytes(name).unwrap(), theirs.bytes(name).unwrap(), "{name}");
    }
    let (ours, theirs) =
        (json_of(&dir.path("quantized/config.json")), json_of(&golden(NF4).join("config.json")));
    assert_eq!(ours["quantization_config"], theirs["quantization_config"]);
    assert!(dir.path("quantized/tokenizer.json").exists());
    assert_eq!(ours["torch_dtype"], "float32");
}

#[test]
fn llm_int8_is_written_as_transformers_writes_it() {
    let dir = TestDir::new();
    quantize(&dir, &["--kind", "int8"]);
    let (ours, theirs) = (raw(&dir), ModelFiles::open_file(&golden(INT8).join("model.safetensors")).unwrap());
    let original = ModelFiles::open(&dir.path("model")).unwrap();
    assert!(ours.names().eq(theirs.names()));
    for (name, info) in theirs.tensors() {
        // The golden one was loaded in f16; finetune keeps the f32 of tensors that are not
        // quantized.
        let wanted = if info.dtype == StoredDtype::F16 { original.bytes(name) } else { theirs.bytes(name) };
        assert_eq!(ours.bytes(name).unwrap(), wanted.unwrap(), "{name}");
        assert_eq!(ours.info(name).unwrap().shape, info.shape, "{name}");
    }
    let config = json_of(&dir.path("quantized/config.json"));
    assert_eq!(
        config["quantization_config"],
        json_of(&golden(INT8).join("config.json"))["quantization_config"]
    );
}

/// Every family in every kind: only linear layers are quantized, and values stay close.
#[test]
fn every_family_is_quantized() {
    let kinds: [(&[&str], f32); 3] = [
        (&["--kind", "nf4", "--block-size", "32"], 0.16),
        (&["--kind", "fp4", "--block-size", "4096", "--no-double-quant"], 0.17),
        (&["--kind", "int8"], 0.005),
    ];
    let models = tiny_models("models");
    for (model, (flags, widest)) in models.iter().flat_map(|model| kinds.map(|kind| (model, kind))) {
        let dir = TestDir::with_model(model);
        quantize(&dir, flags);
        let (original, quantized) = (dir.path("model"), dir.path("quantized"));
        base(&quantized).check(Trains::Nothing).unwrap();
        let (original, quantized) =
            (ModelFiles::open(&original).unwrap(), ModelFiles::open(&quantized).unwrap());
        assert!(quantized.names().eq(original.names()), "{model}");
        for (name, info) in original.tensors() {
            if !name.ends_with("proj.weight") {
                assert_eq!(quantized.info(name).unwrap().dtype, info.dtype, "{model}: {name}");
                assert_eq!(quantized.bytes(name).unwrap(), original.bytes(name).unwrap(), "{model}: {name}");
                continue;
            }
            assert!(quantized.quantized(name).unwrap().is_some(), "{model}: {name}");
            let (ours, theirs) = (floats(&quantized, name), floats(&original, name));
            let limit = widest * theirs.iter().fold(0f32, |max, x| max.max(x.abs()));
            let off = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(off > 0.0 && off < limit, "{model} {flags:?} {name}: {off}, {limit}");
        }
    }
}

/// Classes with names of their own: tensors and lists of modules have these, as in the source, and
/// `--skip` knows them too.
#[test]
fn names_are_those_of_the_source() {
    let skipped = |folder: &Path| {
        let config = json_of(&folder.join("config.json"));
        let names = config["quantization_config"]["llm_int8_skip_modules"].as_array().unwrap().clone();
        names.into_iter().map(|name| name.as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    for (model, block, heads) in [
        ("tiny-gpt-neox", "gpt_neox.layers.0", &["lm_head", "embed_out"][..]),
        ("tiny-falcon", "transformer.h.0", &["lm_head"]),
        ("tiny-lfm2", "model.layers.0", &["lm_head"]),
    ] {
        for kind in ["nf4", "int8"] {
            let dir = TestDir::with_model(model);
            quantize(&dir, &["--kind", kind, "--skip", block]);
            let [source, output] = ["model", "quantized"]
                .map(|folder| ModelFiles::open_file(&dir.path(folder).join("model.safetensors")).unwrap());
            let lost: Vec<&str> = source.names().filter(|name| output.info(name).is_none()).collect();
            assert!(lost.is_empty(), "{model} {kind}: {lost:?}");
            let names = skipped(&dir.path("quantized"));
            assert_eq!(&names[..heads.len()], heads, "{model} {kind}");
            let of_block: Vec<&String> = names.iter().filter(|name| name.starts_with(block)).collect();
            assert!(of_block.len() > 1, "{model} {kind}: {names:?}");
            assert!(
                of_block.iter().all(|name| source.info(&format!("{name}.weight")).is_some()),
                "{names:?}"
            );
        }
    }
    let dir = TestDir::with_model("tiny-gpt-neox");
    let said = not_quantized(&dir, &["--kind", "nf4", "--skip", "q_proj"]);
    assert!(said.contains("as in `gpt_neox.layers.0."), "{said}");
}

#[test]
fn layers_that_are_skipped_stay_as_they_are() {
    let dir = TestDir::new();
    quantize(&dir, &["--kind", "fp4", "--skip", "down_proj", "--skip", "layers.1.mlp"]);
    let (original, quantized) = (dir.path("model"), dir.path("quantized"));
    let (original, files) = (ModelFiles::open(&original).unwrap(), ModelFiles::open(&quantized).unwrap());
    let skipped: Vec<&str> = original
        .names()
        .filter(|name| name.ends_with("proj.weight") && files.quantized(name).unwrap().is_none())
        .map(|name| name.strip_suffix(".weight").unwrap())
        .collect();
    let wanted = [
        "layers.0.mlp.down_proj",
        "layers.1.mlp.down_proj",
        "layers.1.mlp.gate_proj",
        "layers.1.mlp.up_proj",
    ];
    assert_eq!(skipped, wanted.map(|name| format!("model.{name}")));
    let config = json_of(&dir.path("quantized/config.json"));
    let mut names: Vec<&str> = config["quantization_config"]["llm_int8_skip_modules"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .collect();
    names.sort_unstable();
    assert_eq!(names, [&["lm_head"][..], &skipped].concat());
    assert_eq!(files.quantized(Q_PROJ).unwrap().unwrap().format().scheme().name(), "fp4");
}

/// Returns the error of a command that leaves no output.
fn not_quantized(dir: &TestDir, more: &[&str]) -> String {
    let said = refusal(dir, &[&["quantize", "--model", "model", "--output", "quantized"], more].concat());
    assert!(!dir.path("quantized").exists(), "{said}");
    let left = std::fs::read_dir(dir.path("")).unwrap().flatten();
    assert!(!left.into_iter().any(|entry| entry.file_name().to_string_lossy().contains(".tmp-")), "{said}");
    said
}

#[test]
fn models_that_are_not_quantized_again() {
    assert_snapshot!(not_quantized(&test_dir(NF4), &["--kind", "nf4"]), @"
    exit 1
    error: cannot quantize [DIR]/model
      caused by: it is quantized already: `model.layers.0.mlp.down_proj.weight` is quantized to nf4
    hint: give the model that was not quantized
    ");
    assert_snapshot!(not_quantized(&test_dir(INT8), &["--kind", "int8"]), @"
    exit 1
    error: cannot quantize [DIR]/model
      caused by: it is quantized already: `model.layers.0.mlp.down_proj.weight` is quantized to int8 rows
    hint: give the model that was not quantized
    ");
    let dir = TestDir::new();
    std::fs::create_dir(dir.path("full")).unwrap();
    dir.write("full/notes.txt", "mine");
    assert_snapshot!(refusal(&dir, &["quantize", "--model", "model", "--kind", "nf4", "--output", "full"]), @"
    exit 1
    error: cannot write to full
      caused by: the folder is not empty
    hint: give a new or empty folder as `--output`
    ");
    assert_eq!(std::fs::read_dir(dir.path("full")).unwrap().count(), 1);
}

#[test]
fn flags_that_do_not_fit() {
    let dir = TestDir::new();
    assert_snapshot!(not_quantized(&dir, &["--kind", "int8", "--block-size", "64"]), @"
    exit 2
    error: cannot use `--block-size` with `--kind int8`
      caused by: LLM.int8(), the 8-bit format that transformers loads, has one f32 scale for each row
    hint: remove `--block-size`
    ");
    assert_snapshot!(not_quantized(&dir, &["--kind", "int8", "--no-double-quant"]), @"
    exit 2
    error: cannot use `--no-double-quant` with `--kind int8`
      caused by: LLM.int8(), the 8-bit format that transformers loads, has one f32 scale for each row
    hint: remove `--no-double-quant`
    ");
    assert_snapshot!(not_quantized(&dir, &["--kind", "nf4", "--skip", "down_prj"]), @"
    exit 1
    error: cannot skip `down_prj`
      caused by: no linear layer has this name; accepted: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, each also with the parts before it, as in `model.layers.0.self_attn.q_proj`
    ");
    assert_snapshot!(not_quantized(&dir, &["--kind", "nf4", "--skip", "lm_head"]), @"
    exit 1
    error: cannot skip `lm_head`
      caused by: no linear layer has this name; accepted: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, each also with the parts before it, as in `model.layers.0.self_attn.q_proj`
    ");
    assert_snapshot!(not_quantized(&dir, &["--kind", "nf4", "--skip", "layers"]), @"
    exit 1
    error: cannot quantize the model
      caused by: every linear layer is skipped
    hint: leave one of the names out
    ");
    assert_snapshot!(not_quantized(&dir, &["--kind", "nf4", "--block-size", "48"]), @"
    exit 2
    error: invalid value '48' for '--block-size <N>': accepted: 32, 64, 128, 256, 512, 1024, 2048, 4096

    For more information, try '--help'.
    ");
}

/// A folder in which one value of q_proj in layer 0 is `value`.
fn place_with(value: f32) -> TestDir {
    let dir = TestDir::new();
    change_tensors(&dir, |tensors| {
        tensor(tensors, Q_PROJ).3[4 * 77..4 * 78].copy_from_slice(&value.to_le_bytes());
    });
    dir
}

#[test]
fn values_that_have_no_code() {
    assert_snapshot!(not_quantized(&place_with(f32::NAN), &["--kind", "nf4"]), @"
    exit 1
    error: cannot quantize tensor `model.layers.0.self_attn.q_proj.weight`
      caused by: its value 77 is NaN; accepted: finite numbers
    hint: leave it as it is with `--skip model.layers.0.self_attn.q_proj`, or repair the model
    ");
    assert_snapshot!(not_quantized(&place_with(f32::NEG_INFINITY), &["--kind", "fp4"]), @"
    exit 1
    error: cannot quantize tensor `model.layers.0.self_attn.q_proj.weight`
      caused by: its value 77 is -inf; accepted: finite numbers
    hint: leave it as it is with `--skip model.layers.0.self_attn.q_proj`, or repair the model
    ");
    assert_snapshot!(not_quantized(&place_with(70_000.0), &["--kind", "int8"]), @"
    exit 1
    error: cannot quantize tensor `model.layers.0.self_attn.q_proj.weight`
      caused by: its value 77 is 70000; accepted: numbers within the range of f16, from which LLM.int8() quantizes
    hint: leave it as it is with `--skip model.layers.0.self_attn.q_proj`, or repair the model
    ");
}
