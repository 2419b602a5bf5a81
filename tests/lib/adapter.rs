//! PEFT adapters: files written by PEFT and by finetune, merging, and refused adapters.

use std::fs;
use std::path::{Path, PathBuf};

use finetune::adapter::{
    self, AdapterConfig, AdapterTensor, BaseValues, MergeOptions, MergeReport, ModulePattern, NamePattern,
    SavedAdapter, TargetSpec, TensorKind, WEIGHTS_FILE, write,
};
use finetune::error::{Error, ErrorCategory, Result};
use finetune::model::{ModelConfig, Module, ModuleKind};
use finetune::recipe::enums::Dtype;
use finetune::weights::{
    ClassNames, EMBED_TOKENS, LM_HEAD, MODEL_FILE, ModelFiles, ModelIdentity, StoredDtype, WriteEntry,
    write_file, write_text,
};
use half::bf16;
use tempfile::TempDir;

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path)
}

fn temp() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

fn shown(error: &Error, folder: &Path) -> String {
    error.to_string().replace(&folder.display().to_string(), "<dir>")
}

/// Merges onto the base as stored, without a check.
fn merge(base: &ModelFiles, adapter: &Path, output: &Path, dtype: Dtype) -> Result<MergeReport> {
    let options = MergeOptions {
        dtype,
        base: BaseValues::AsStored,
        skip: &[],
        requantize: false,
        verify: &|_| Ok(None),
    };
    adapter::merge(base, adapter, output, &options)
}

fn read(files: &ModelFiles, name: &str) -> Vec<f32> {
    let mut values = vec![0f32; files.info(name).expect(name).elements()];
    files.read_f32(name, &mut values).expect(name);
    values
}

fn config_of(folder: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(folder.join("config.json")).expect("there")).expect("JSON")
}

/// A spec with LoRA on the modules whose names end in `names`.
fn lora(names: &[&str]) -> AdapterConfig {
    let list = names.iter().map(|&name| name.into()).collect();
    AdapterConfig {
        base_model_name_or_path: Some("org/base".into()),
        revision: None,
        spec: TargetSpec {
            target_modules: ModulePattern::Named(NamePattern::List(list)),
            r: 2,
            lora_alpha: 4.0,
            ..Default::default()
        },
        target_parameters: Vec::new(),
        lora_dropout: 0.0,
        inference_mode: true,
        init_lora_weights: Default::default(),
        ensure_weight_tying: false,
    }
}

fn tensor(module: &str, kind: TensorKind, shape: &[usize]) -> AdapterTensor {
    AdapterTensor { module: module.into(), kind, shape: shape.into() }
}

/// Writes an adapter whose tensor t has the value `value(t, i)` at index i.
fn put(
    folder: &Path,
    config: &AdapterConfig,
    tensors: &[AdapterTensor],
    value: impl Fn(&AdapterTensor, usize) -> f32,
) {
    fs::create_dir_all(folder).expect("made");
    let base = ModelIdentity::named("base", None);
    write(folder, (config, &ClassNames::USUAL), &base, tensors, StoredDtype::F32, |tensor, sink| {
        let values: Vec<f32> = (0..tensor.shape.iter().product()).map(|i| value(tensor, i)).collect();
        sink.write_values(&values)
    })
    .expect("written");
}

const Q: &str = "model.layers.0.self_attn.q_proj";

fn pair(module: &str, r: usize, [outputs, inputs]: [usize; 2]) -> [AdapterTensor; 2] {
    [tensor(module, TensorKind::LoraA, &[r, inputs]), tensor(module, TensorKind::LoraB, &[outputs, r])]
}

#[test]
fn merging_gives_what_peft_merges() {
    let dir = temp();
    let base = ModelFiles::open(&golden("models/tiny-llama")).expect("opens");
    let output = dir.path().join("merged");
    let report = merge(&base, &golden("train/lora/adapter_final"), &output, Dtype::Auto).expect("merges");
    assert_eq!((report.merged, report.replaced, report.copied, report.untied), (14, 0, 7, false));
    let ours = ModelFiles::open(&output).expect("opens");
    let theirs = ModelFiles::open(&golden("train/lora/merged")).expect("opens");
    assert_eq!(ours.names().collect::<Vec<_>>(), theirs.names().collect::<Vec<_>>());
    for name in ours.names() {
        let distance =
            read(&ours, name).iter().zip(read(&theirs, name)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(distance <= 1e-6, "{name}: {distance}");
    }
    assert_eq!(config_of(&output), config_of(&golden("models/tiny-llama")));
    for name in
        ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
    {
        let source = golden("models/tiny-llama").join(name);
        assert_eq!(fs::read(output.join(name)).expect(name), fs::read(source).expect(name));
    }
    assert_eq!(report.files.len(), 1);
    let bytes = fs::read(&report.files[0].path).expect("the reported file");
    assert_eq!(report.files[0].digest, blake3::hash(&bytes));
    let left: Vec<_> = fs::read_dir(dir.path()).expect("folder").flatten().collect();
    assert_eq!(left.len(), 1, "no temporary left");
}

#[test]
fn rslora_scales_by_the_root_of_the_rank() {
    let dir = temp();
    let base = ModelFiles::open(&golden("models/tiny-llama")).expect("opens");
    let adapter =
        ModelFiles::open_file(&golden("train/rslora/adapter_final").join(WEIGHTS_FILE)).expect("opens");
    let output = dir.path().join("merged");
    merge(&base, &golden("train/rslora/adapter_final"), &output, Dtype::Auto).expect("merges");
    let ours = ModelFiles::open(&output).expect("opens");
    for layer in 0..2 {
        for module in ["q_proj", "k_proj", "v_proj"] {
            let name = format!("model.layers.{layer}.self_attn.{module}");
            let (weight, merged) =
                (read(&base, &format!("{name}.weight")), read(&ours, &format!("{name}.weight")));
            if module == "k_proj" {
                assert_eq!(weight, merged, "not a target");
                continue;
            }
            let a = read(&adapter, &format!("base_model.model.{name}.lora_A.weight"));
            let b = read(&adapter, &format!("base_model.model.{name}.lora_B.weight"));
            // The configuration has r 4, lora_alpha 16, use_rslora: 16 / sqrt(4).
            let (r, inputs, scale) = (4, 64, 8.0);
            for (i, (&weight, &merged)) in weight.iter().zip(&merged).enumerate() {
                let (row, column) = (i / inputs, i % inputs);
                let product: f64 =
                    (0..r).map(|k| f64::from(b[row * r + k]) * f64::from(a[k * inputs + column])).sum();
                let expected = f64::from(weight) + scale * product;
                assert!((expected - f64::from(merged)).abs() < 1e-6, "{name}[{row}, {column}]");
            }
        }
    }
}

#[test]
fn shards_and_dtypes_are_the_base_s_unless_asked() {
    let dir = temp();
    let base = ModelFiles::open(&golden("models/tiny-mistral")).expect("opens");
    let adapter = dir.path().join("adapter");
    put(&adapter, &lora(&["q_proj"]), &pair(Q, 2, [96, 64]), |_, i| (i % 7) as f32 / 8.0);
    for (dtype, stored, named) in
        [(Dtype::Auto, StoredDtype::BF16, "bfloat16"), (Dtype::F32, StoredDtype::F32, "float32")]
    {
        let output = dir.path().join(named);
        let report = merge(&base, &adapter, &output, dtype).expect("merges");
        assert_eq!((report.merged, report.copied, report.files.len()), (1, 20, 3));
        let ours = ModelFiles::open(&output).expect("opens");
        assert!(ours.tensors().all(|(_, info)| info.dtype == stored));
        assert_eq!(config_of(&output)["torch_dtype"], named);
        let places = |files: &ModelFiles| -> Vec<(String, Vec<String>)> {
            let name = |path: &Path| path.file_name().expect("a file").to_string_lossy().into_owned();
            files
                .files()
                .map(|(path, tensors)| (name(path), tensors.into_iter().map(String::from).collect()))
                .collect()
        };
        assert_eq!(places(&ours), places(&base));
        let q = format!("{Q}.weight");
        for name in base.names() {
            if name != q {
                assert_eq!(read(&base, name), read(&ours, name), "{name}");
            }
        }
        // A[k, j] = ((64 k + j) mod 7) / 8, B[i, k] = ((2 i + k) mod 7) / 8, scale 4 / 2.
        let value = |i: usize| (i % 7) as f32 / 8.0;
        for (i, (before, after)) in read(&base, &q).iter().zip(read(&ours, &q)).enumerate() {
            let (row, column) = (i / 64, i % 64);
            let product = value(2 * row) * value(column) + value(2 * row + 1) * value(64 + column);
            let sum = before + 2.0 * product;
            let expected = if stored == StoredDtype::BF16 { bf16::from_f32(sum).to_f32() } else { sum };
            assert!((expected - after).abs() < 1e-6, "[{row}, {column}]: {expected} {after}");
        }
    }
}

/// Merges an adapter of `tensors`, all ones, into a copy of tiny-qwen2, tied, whose embedding is
/// stored as `stored`.
fn merge_tied(stored: &[&str], config: &AdapterConfig, tensors: &[AdapterTensor]) -> (TempDir, Tied) {
    let dir = temp();
    let (folder, output) = (dir.path().join("base"), dir.path().join("merged"));
    let source = ModelFiles::open(&golden("models/tiny-qwen2")).expect("opens");
    fs::create_dir(&folder).expect("made");
    fs::copy(golden("models/tiny-qwen2/config.json"), folder.join("config.json")).expect("copied");
    let entry = |name: &str, of: &str| {
        let info = source.info(of).expect("there");
        WriteEntry { name: name.into(), dtype: info.dtype, shape: info.shape.clone(), stack: None }
    };
    let mut entries: Vec<WriteEntry> =
        source.names().filter(|&name| name != EMBED_TOKENS).map(|name| entry(name, name)).collect();
    entries.extend(stored.iter().map(|name| entry(name, EMBED_TOKENS)));
    write_file(&folder.join(MODEL_FILE), &entries, |entry, sink| {
        let from = if entry.name == LM_HEAD { EMBED_TOKENS } else { &entry.name };
        sink.write_bytes(source.bytes(from)?)
    })
    .expect("written");
    let adapter = dir.path().join("adapter");
    put(&adapter, config, tensors, |tensor, _| if tensor.module == "lm_head" { 1.0 } else { 2.0 });
    let base = ModelFiles::open(&folder).expect("opens");
    let report = merge(&base, &adapter, &output, Dtype::Auto).expect("merges");
    let merged = ModelFiles::open(&output).expect("opens");
    let old = read(&source, EMBED_TOKENS);
    let describe = |name: &str| {
        merged.info(name).map(|_| match read(&merged, name) {
            values if values == old => "base",
            values if values.iter().all(|&v| v == 1.0) => "saved head",
            values if values.iter().all(|&v| v == 2.0) => "saved embedding",
            values if values.iter().zip(&old).all(|(v, old)| (v - old - 4.0).abs() < 1e-6) => "base + 4",
            _ => "wrong",
        })
    };
    let tied = Tied {
        untied: report.untied,
        key: config_of(&output)["tie_word_embeddings"].as_bool(),
        embed: describe(EMBED_TOKENS),
        head: describe(LM_HEAD),
    };
    (dir, tied)
}

#[derive(Debug, PartialEq)]
struct Tied {
    untied: bool,
    key: Option<bool>,
    embed: Option<&'static str>,
    head: Option<&'static str>,
}

#[test]
fn a_tie_holds_until_an_adapter_breaks_it() {
    let shape = [512, 64];
    let head = tensor("lm_head", TensorKind::SavedWeight, &shape);
    let embed = tensor("model.embed_tokens", TensorKind::SavedWeight, &shape);
    let mut config = lora(&["q_proj"]);
    let with = |tensors: &[&AdapterTensor]| -> Vec<AdapterTensor> {
        pair(Q, 2, [64, 64]).into_iter().chain(tensors.iter().map(|&t| t.clone())).collect()
    };
    for stored in [&[EMBED_TOKENS][..], &[LM_HEAD], &[EMBED_TOKENS, LM_HEAD]] {
        let if_stored = |name, value| stored.contains(&name).then_some(value);
        // LoRA elsewhere: the tie stays.
        let (_dir, tied) = merge_tied(stored, &config, &with(&[]));
        let expected = Tied {
            untied: false,
            key: Some(true),
            embed: if_stored(EMBED_TOKENS, "base"),
            head: if_stored(LM_HEAD, "base"),
        };
        assert_eq!(tied, expected, "{stored:?}");
        // One of the two saved: now two tensors.
        let (_dir, tied) = merge_tied(stored, &config, &with(&[&head]));
        let expected = Tied { untied: true, key: Some(false), embed: Some("base"), head: Some("saved head") };
        assert_eq!(tied, expected, "{stored:?}");
        let (_dir, tied) = merge_tied(stored, &config, &with(&[&embed]));
        let expected =
            Tied { untied: true, key: Some(false), embed: Some("saved embedding"), head: Some("base") };
        assert_eq!(tied, expected, "{stored:?}");
        // Both saved with different values.
        let (_dir, tied) = merge_tied(stored, &config, &with(&[&head, &embed]));
        let expected =
            Tied { untied: true, key: Some(false), embed: Some("saved embedding"), head: Some("saved head") };
        assert_eq!(tied, expected, "{stored:?}");
        // LoRA on the head alone: B A = 2 ones, scale 2.
        let (_dir, tied) = merge_tied(stored, &lora(&["lm_head"]), &pair("lm_head", 2, shape));
        let expected = Tied { untied: true, key: Some(false), embed: Some("base"), head: Some("base + 4") };
        assert_eq!(tied, expected, "{stored:?}");
        // One tensor saved for both.
        config.ensure_weight_tying = true;
        let (_dir, tied) = merge_tied(stored, &config, &with(&[&embed]));
        let new = "saved embedding";
        let expected = Tied {
            untied: false,
            key: Some(true),
            embed: if_stored(EMBED_TOKENS, new),
            head: if_stored(LM_HEAD, new),
        };
        assert_eq!(tied, expected, "{stored:?}");
        config.ensure_weight_tying = false;
    }
}

/// LFM2's own key counts before `tie_word_embeddings`.
#[test]
fn an_untied_lfm2_says_so_under_its_own_key() {
    let dir = temp();
    let (adapter, output) = (dir.path().join("adapter"), dir.path().join("merged"));
    let base = golden("families/models/tiny-lfm2");
    assert_eq!(config_of(&base)["tie_embedding"].as_bool(), Some(true));
    let q = pair("model.layers.1.self_attn.q_proj", 2, [48, 48]);
    let head = tensor("lm_head", TensorKind::SavedWeight, &[320, 48]);
    let tensors: Vec<AdapterTensor> = q.into_iter().chain([head]).collect();
    put(&adapter, &lora(&["q_proj"]), &tensors, |_, _| 1.0);
    let report = merge(&ModelFiles::open(&base).expect("opens"), &adapter, &output, Dtype::Auto);
    assert!(report.expect("merges").untied);
    let config = config_of(&output);
    assert_eq!([&config["tie_embedding"], &config["tie_word_embeddings"]], [false, false]);
    let text = fs::read_to_string(output.join("config.json")).expect("there");
    assert!(!ModelConfig::from_json(&text, "config.json").expect("a model").tie_word_embeddings);
    let merged = ModelFiles::open(&output).expect("opens");
    assert!(read(&merged, LM_HEAD).iter().all(|value| *value == 1.0));
}

#[test]
fn an_adapter_reads_as_it_was_written() {
    let dir = temp();
    let mut config = lora(&["q_proj"]);
    config.spec.rank_pattern = vec![("1.self_attn.q_proj".into(), 3)];
    config.spec.modules_to_save = vec!["lm_head".into()];
    let other = "model.layers.1.self_attn.q_proj";
    let saved = tensor("lm_head", TensorKind::SavedWeight, &[5, 4]);
    let tensors: Vec<AdapterTensor> =
        [saved].into_iter().chain(pair(other, 3, [6, 4])).chain(pair(Q, 2, [6, 4])).collect();
    put(dir.path(), &config, &tensors, |tensor, i| tensor.shape[0] as f32 + i as f32);
    let adapter = SavedAdapter::read(dir.path()).expect("reads");
    assert_eq!(adapter.config(), &config);
    let targets: Vec<_> = adapter.targets().iter().map(|t| (t.name.as_str(), t.r, t.scale)).collect();
    assert_eq!(targets, [(Q, 2, 2.0), (other, 3, 4.0 / 3.0)]);
    assert_eq!(adapter.saved().collect::<Vec<_>>(), ["lm_head"]);
    let mut values = [0f32; 8];
    adapter.read_into(Q, TensorKind::LoraA, &mut values).expect("reads");
    assert_eq!(values, [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
    // PEFT's own order: by name.
    let bytes = fs::read(dir.path().join(WEIGHTS_FILE)).expect("there");
    let names = [
        "lm_head.weight",
        "0.self_attn.q_proj.lora_A",
        "0.self_attn.q_proj.lora_B",
        "1.self_attn.q_proj.lora_A",
    ];
    let text = String::from_utf8_lossy(&bytes);
    let places: Vec<_> = names.iter().map(|name| text.find(name)).collect();
    assert!(places.is_sorted() && places[0].is_some(), "{places:?}");
}

#[test]
fn peft_s_own_configuration_reads() {
    let config = AdapterConfig::read(&golden("train/lora/adapter_final")).expect("reads");
    assert_eq!((config.spec.r, config.spec.lora_alpha, config.spec.use_rslora), (8, 16.0, false));
    assert_eq!(config.base_model_name_or_path.as_deref(), Some("tiny-llama"));
    assert!(config.inference_mode);
    let adapter = SavedAdapter::read(&golden("train/rslora/adapter_final")).expect("reads");
    assert!(adapter.targets().iter().all(|target| (target.r, target.scale) == (4, 8.0)));
    assert_eq!(adapter.targets().len(), 4);
}

#[test]
fn adapters_that_cannot_be_used_say_why() {
    let mut errors = Vec::new();
    let mut refuse = |case: &str, prepare: &dyn Fn(&Path)| {
        let dir = temp();
        prepare(dir.path());
        let error = SavedAdapter::read(dir.path()).expect_err(case);
        assert_eq!(error.kind(), ErrorCategory::User, "{case}");
        errors.push(format!("[{case}]\n{}", shown(&error, dir.path())));
    };
    let config = lora(&["q_proj"]);
    let text = |folder: &Path, name: &str, text: &str| {
        write_text(&folder.join(name), text).expect("written");
    };
    refuse("no configuration", &|_| {});
    refuse("no weights", &|dir| text(dir, "adapter_config.json", &config.to_json()));
    refuse("pickle", &|dir| {
        text(dir, "adapter_config.json", &config.to_json());
        text(dir, "adapter_model.bin", "");
    });
    let dora = |magnitudes: Option<&[usize]>, use_dora: bool| {
        let mut config = config.clone();
        config.spec.use_dora = use_dora;
        let magnitudes = magnitudes.map(|shape| tensor(Q, TensorKind::LoraMagnitude, shape));
        (config, pair(Q, 2, [6, 4]).into_iter().chain(magnitudes).collect::<Vec<_>>())
    };
    for (case, magnitudes, use_dora) in [
        ("DoRA without magnitudes", None, true),
        ("magnitudes without DoRA", Some(&[6][..]), false),
        ("magnitudes of the inputs", Some(&[4]), true),
    ] {
        let (config, tensors) = dora(magnitudes, use_dora);
        refuse(case, &|dir| put(dir, &config, &tensors, |_, _| 1.0));
    }
    let rows = |ids: &[u32], rows: usize| {
        let mut config = config.clone();
        if !ids.is_empty() {
            config.spec.trainable_token_indices = [("embed_tokens".into(), ids.into())].into();
        }
        let rows = (rows > 0).then(|| tensor("model.embed_tokens", TensorKind::TokensDelta, &[rows, 4]));
        (config, pair(Q, 2, [6, 4]).into_iter().chain(rows).collect::<Vec<_>>())
    };
    for (case, ids, count) in [
        ("rows of other tokens", &[1, 2][..], 3),
        ("no rows", &[1, 2], 0),
        ("no tokens", &[], 2),
        ("a token twice", &[1, 2, 1], 3),
    ] {
        let (config, tensors) = rows(ids, count);
        refuse(case, &|dir| put(dir, &config, &tensors, |_, _| 1.0));
    }
    refuse("an embedding and a linear layer in one", &|dir| {
        let table =
            [tensor(Q, TensorKind::LoraEmbeddingA, &[2, 6]), tensor(Q, TensorKind::LoraEmbeddingB, &[4, 2])];
        put(dir, &config, &[&pair(Q, 2, [6, 4])[..], &table].concat(), |_, _| 0.0);
    });
    refuse("two names of a tensor", &|dir| {
        let (config, _) = dora(None, true);
        text(dir, "adapter_config.json", &config.to_json());
        let entry = |end: &str| WriteEntry {
            name: format!("base_model.model.{Q}.lora_magnitude_vector{end}"),
            dtype: StoredDtype::F32,
            shape: vec![1],
            stack: None,
        };
        write_file(&dir.join(WEIGHTS_FILE), &[entry(""), entry(".weight")], |_, sink| {
            sink.write_values(&[1f32])
        })
        .expect("written");
    });
    refuse("no tensor", &|dir| put(dir, &config, &[], |_, _| 0.0));
    refuse("half a pair", &|dir| put(dir, &config, &pair(Q, 2, [6, 4])[..1], |_, _| 0.0));
    refuse("another rank", &|dir| put(dir, &config, &pair(Q, 3, [6, 4]), |_, _| 0.0));
    refuse("B on its side", &|dir| {
        let tensors = [tensor(Q, TensorKind::LoraA, &[2, 4]), tensor(Q, TensorKind::LoraB, &[2, 6])];
        put(dir, &config, &tensors, |_, _| 0.0);
    });
    refuse("adapted and saved", &|dir| {
        let saved = tensor(Q, TensorKind::SavedWeight, &[6, 4]);
        put(dir, &config, &[&pair(Q, 2, [6, 4])[..], &[saved]].concat(), |_, _| 0.0);
    });
    refuse("saved module missing", &|dir| {
        let mut config = config.clone();
        config.spec.modules_to_save = vec!["lm_head".into()];
        put(dir, &config, &pair(Q, 2, [6, 4]), |_, _| 0.0);
    });
    refuse("foreign names", &|dir| {
        text(dir, "adapter_config.json", &config.to_json());
        let entry = WriteEntry {
            name: "layers.0.lora_a".into(),
            dtype: StoredDtype::F32,
            shape: vec![1],
            stack: None,
        };
        write_file(&dir.join(WEIGHTS_FILE), &[entry], |_, sink| sink.write_values(&[1f32])).expect("written");
    });
    refuse("truncated", &|dir| {
        put(dir, &config, &pair(Q, 2, [6, 4]), |_, _| 0.0);
        let bytes = fs::read(dir.join(WEIGHTS_FILE)).expect("there");
        fs::write(dir.join(WEIGHTS_FILE), &bytes[..bytes.len() - 1]).expect("cut");
    });
    insta::assert_snapshot!(errors.join("\n"), @r#"
    [no configuration]
    error: cannot read adapter <dir>
      caused by: it has no adapter_config.json
    hint: give the folder that holds adapter_config.json and adapter_model.safetensors
    [no weights]
    error: cannot read adapter <dir>
      caused by: it has no adapter_model.safetensors
    hint: give the folder that holds adapter_config.json and adapter_model.safetensors
    [pickle]
    error: cannot read adapter <dir>
      caused by: its weights are a pickle file (adapter_model.bin), which can run code when opened; accepted: adapter_model.safetensors
    hint: convert it once with Python: python -c "import torch; from safetensors.torch import save_file; save_file(torch.load('<dir>/adapter_model.bin', weights_only=True), '<dir>/adapter_model.safetensors')"
    [DoRA without magnitudes]
    error: cannot read adapter <dir>
      caused by: adapter_model.safetensors has no tensor `base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector`, but `use_dora` is true in adapter_config.json
    [magnitudes without DoRA]
    error: cannot read adapter <dir>
      caused by: adapter_model.safetensors has tensor `base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector`, but `use_dora` is not true in adapter_config.json
    [magnitudes of the inputs]
    error: cannot read adapter <dir>
      caused by: tensor `base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector` has shape [4]; `base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight` makes it [6]
    [rows of other tokens]
    error: cannot read adapter <dir>
      caused by: tensor `base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta` has shape [3, 4]; `trainable_token_indices` in adapter_config.json makes it [2, hidden]
    [no rows]
    error: cannot read adapter <dir>
      caused by: adapter_config.json has `trainable_token_indices` for `embed_tokens`, of which adapter_model.safetensors holds no rows
    [no tokens]
    error: cannot read adapter <dir>
      caused by: adapter_model.safetensors has tensor `base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta`, but adapter_config.json has no `trainable_token_indices` for it
    [a token twice]
    error: cannot read adapter <dir>
      caused by: `trainable_token_indices` has token 1 twice
    [an embedding and a linear layer in one]
    error: cannot read adapter <dir>
      caused by: module `model.layers.0.self_attn.q_proj` has `base_model.model.model.layers.0.self_attn.q_proj.lora_embedding_A` and `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` too
    [two names of a tensor]
    error: cannot read adapter <dir>
      caused by: adapter_model.safetensors has both `base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector` and `base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight`, which mean the same tensor
    [no tensor]
    error: cannot read adapter <dir>
      caused by: adapter_model.safetensors holds no tensor
    [half a pair]
    error: cannot read adapter <dir>
      caused by: adapter_model.safetensors has no tensor `base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight`, though it has the other half
    [another rank]
    error: cannot read adapter <dir>
      caused by: tensor `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` has shape [3, 4]; r = 2 in adapter_config.json makes it [2, in]
    [B on its side]
    error: cannot read adapter <dir>
      caused by: tensor `base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight` has shape [2, 6]; r = 2 in adapter_config.json makes it [out, 2]
    [adapted and saved]
    error: cannot read adapter <dir>
      caused by: module `model.layers.0.self_attn.q_proj` has LoRA and is saved whole too (`base_model.model.model.layers.0.self_attn.q_proj.weight`)
    [saved module missing]
    error: cannot read adapter <dir>
      caused by: adapter_config.json has `modules_to_save` with `lm_head`, of which adapter_model.safetensors holds no tensor
    [foreign names]
    error: cannot read adapter <dir>
      caused by: adapter_model.safetensors has tensor `layers.0.lora_a`; accepted: base_model.model.<module> and .lora_A.weight, .lora_B.weight, .lora_magnitude_vector, .lora_embedding_A, .lora_embedding_B, .token_adapter.trainable_tokens_delta, .base_layer.weight, .weight or .bias
    [truncated]
    error: cannot read weights <dir>/adapter_model.safetensors
      caused by: it is truncated: its tensors need 80 bytes, the file has 79
    hint: download or save the file again
    "#);
}

#[test]
fn merges_that_cannot_be_right_are_refused() {
    let mut errors = Vec::new();
    let mut refuse = |case: &str, module: &str, r: usize, shape: [usize; 2], value: f32| {
        let dir = temp();
        put(dir.path(), &lora(&["q_proj"]), &pair(module, r, shape), |_, _| value);
        let base = ModelFiles::open(&golden("models/tiny-llama")).expect("opens");
        let output = dir.path().join("merged");
        let error = merge(&base, dir.path(), &output, Dtype::Auto).expect_err(case);
        assert!(!output.exists(), "{case}: nothing is left");
        assert_eq!(fs::read_dir(dir.path()).expect("folder").count(), 2, "{case}: no temporary is left");
        errors.push(format!("[{case}]\n{}", shown(&error, dir.path())));
    };
    refuse("another model's module", "transformer.h.0.attn.c_attn", 2, [64, 64], 0.0);
    refuse("another model's size", Q, 2, [64, 32], 0.0);
    refuse("NaN", Q, 2, [64, 64], f32::NAN);
    let dir = temp();
    fs::write(dir.path().join("mine.txt"), "").expect("written");
    let base = ModelFiles::open(&golden("models/tiny-llama")).expect("opens");
    let adapter = golden("train/lora/adapter_final");
    let error = merge(&base, &adapter, dir.path(), Dtype::Auto).expect_err("occupied");
    errors.push(format!("[occupied]\n{}", shown(&error, dir.path())));
    insta::assert_snapshot!(errors.join("\n"), @"
    [another model's module]
    error: cannot use adapter <dir> with this model
      caused by: it has tensors for `model.layers.0.attn.c_attn`, which the model does not have
    hint: give the model it was trained on as `--model`: org/base
    [another model's size]
    error: cannot use adapter <dir> with this model
      caused by: `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` has shape [2, 32], the weight of `model.layers.0.self_attn.q_proj` has [64, 64]
    hint: give the model it was trained on as `--model`: org/base
    [NaN]
    error: cannot read adapter <dir>
      caused by: tensor `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` holds NaN; accepted: finite numbers
    hint: give an earlier checkpoint of that run
    [occupied]
    error: cannot write to <dir>
      caused by: the folder is not empty
    hint: give a new or empty folder as `--output`
    ");
}

#[test]
fn an_adapter_knows_the_models_it_fits() {
    let module = |name: &str, kind, shape: &[usize]| Module { name: name.into(), kind, shape: shape.into() };
    let dir = temp();
    let norm = tensor("model.norm", TensorKind::SavedWeight, &[4]);
    let tensors: Vec<AdapterTensor> = pair(Q, 2, [6, 4]).into_iter().chain([norm]).collect();
    put(dir.path(), &lora(&["q_proj"]), &tensors, |_, _| 0.0);
    let adapter = SavedAdapter::read(dir.path()).expect("reads");
    let model = |inputs, norm| {
        [module(Q, ModuleKind::Linear, &[6, inputs]), module("model.norm", ModuleKind::Norm, &[norm])]
    };
    assert!(adapter.check_fits(&model(4, 4)).is_ok());
    assert!(adapter.check_fits(&model(5, 4)).is_err());
    assert!(adapter.check_fits(&model(4, 5)).is_err());
    assert!(adapter.check_fits(&model(4, 4)[..1]).is_err());

    let rows = |ids: &[u32], hidden: usize| {
        let dir = temp();
        let mut config = lora(&["q_proj"]);
        config.spec.trainable_token_indices = [("embed_tokens".into(), ids.into())].into();
        let rows = tensor("model.embed_tokens", TensorKind::TokensDelta, &[ids.len(), hidden]);
        let tensors: Vec<AdapterTensor> = pair(Q, 2, [6, 4]).into_iter().chain([rows]).collect();
        put(dir.path(), &config, &tensors, |_, _| 0.0);
        let adapter = SavedAdapter::read(dir.path()).expect("reads");
        let embedding = module("model.embed_tokens", ModuleKind::Embedding, &[9, 4]);
        let fits = adapter.check_fits(&[module(Q, ModuleKind::Linear, &[6, 4]), embedding]);
        fits.map_err(|error| shown(&error, dir.path()))
    };
    assert_eq!(rows(&[8, 0], 4), Ok(()));
    assert!(rows(&[8], 5).is_err());
    insta::assert_snapshot!(rows(&[0, 9], 4).expect_err("outside"), @"
    error: cannot use adapter <dir> with this model
      caused by: `trainable_token_indices` has token 9; `model.embed_tokens` has 9 rows; accepted: 0 to 8
    hint: give the model it was trained on as `--model`: org/base
    ");
}

#[test]
fn tables_have_lora_of_their_own_shape() {
    let dir = temp();
    let tensors = [
        tensor("model.embed_tokens", TensorKind::LoraEmbeddingA, &[2, 9]),
        tensor("model.embed_tokens", TensorKind::LoraEmbeddingB, &[4, 2]),
        tensor("lm_head", TensorKind::LoraA, &[2, 4]),
        tensor("lm_head", TensorKind::LoraB, &[9, 2]),
    ];
    put(dir.path(), &lora(&["embed_tokens", "lm_head"]), &tensors, |_, _| 0.0);
    let adapter = SavedAdapter::read(dir.path()).expect("reads");
    let kinds: Vec<_> = adapter.targets().iter().map(|target| (target.name.as_str(), target.kind)).collect();
    assert_eq!(kinds, [("lm_head", ModuleKind::Head), ("model.embed_tokens", ModuleKind::Embedding)]);
    let table = |name: &str, kind, rows| Module { name: name.into(), kind, shape: vec![rows, 4] };
    let model =
        |rows, kind| [table("model.embed_tokens", kind, rows), table("lm_head", ModuleKind::Head, rows)];
    assert!(adapter.check_fits(&model(9, ModuleKind::Embedding)).is_ok());
    assert!(adapter.check_fits(&model(8, ModuleKind::Embedding)).is_err());
    assert!(adapter.check_fits(&model(9, ModuleKind::Linear)).is_err());
}

#[test]
fn new_tokens_make_a_larger_model() {
    let dir = temp();
    let (adapter, output) = (dir.path().join("adapter"), dir.path().join("merged"));
    let base = ModelFiles::open(&golden("models/tiny-llama")).expect("opens");
    let table = |name: &str, rows| tensor(name, TensorKind::SavedWeight, &[rows, 64]);
    let tables = [table("model.embed_tokens", 482), table("lm_head", 482)];
    let tensors = [&pair(Q, 2, [64, 64])[..], &tables].concat();
    put(&adapter, &lora(&["q_proj"]), &tensors, |_, i| (i % 5) as f32);
    write_text(&adapter.join("tokenizer.json"), "its own").expect("written");
    let report = merge(&base, &adapter, &output, Dtype::Auto).expect("merges");
    assert_eq!((report.merged, report.replaced), (1, 2));
    assert_eq!(config_of(&output)["vocab_size"], 482);
    assert_eq!(fs::read_to_string(output.join("tokenizer.json")).expect("there"), "its own");
    let ours = ModelFiles::open(&output).expect("opens");
    assert_eq!(ours.info(EMBED_TOKENS).expect("there").shape, [482, 64]);
    assert_eq!(read(&ours, LM_HEAD)[..6], [0.0, 1.0, 2.0, 3.0, 4.0, 0.0]);
    // The head would not be merged.
    let tensors = [&pair(Q, 2, [64, 64])[..], &tables[..1]].concat();
    put(&adapter, &lora(&["q_proj"]), &tensors, |_, _| 0.0);
    let error = merge(&base, &adapter, &dir.path().join("half"), Dtype::Auto).expect_err("half");
    insta::assert_snapshot!(shown(&error, dir.path()), @"
    error: cannot use adapter <dir>/adapter with this model
      caused by: `base_model.model.model.embed_tokens.weight` has shape [482, 64], the weight of `model.embed_tokens` has [480, 64]
    hint: give the model it was trained on as `--model`: org/base
    ");
}
