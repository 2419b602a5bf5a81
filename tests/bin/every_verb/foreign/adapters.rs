//! Adapters of other programs: tensor names, folders and configuration keys.

use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::{
    LOSS, Stored, assert_near, edit, json, loss_with, noise, refused, rename, succeed, test_dir, write,
};
use crate::test_dir::{TestDir, copy_folder, golden};

/// The loss of tiny-llama3 with the adapter, computed by PEFT.
const ADAPTED: f64 = 8.302_933;
const WEIGHTS: &str = "adapter/adapter_model.safetensors";
const CONFIG: &str = "adapter/adapter_config.json";

/// tiny-llama3 with an adapter on q_proj and v_proj in the folder `adapter`.
fn adapted() -> TestDir {
    let dir = test_dir("tiny-llama3");
    std::fs::create_dir(dir.path("adapter")).unwrap();
    let (mut tensors, mut seed) = (Stored::new(), 1);
    let mut add = |name: String, shape: [usize; 2], seed: u64| {
        let values = noise(shape[0] * shape[1], 0.2, seed);
        let bytes = values.iter().flat_map(|value| (*value as f32).to_le_bytes()).collect();
        tensors.insert(name, (Dtype::F32, shape.to_vec(), bytes));
    };
    for layer in 0..2 {
        for (part, out) in [("q_proj", 64), ("v_proj", 16)] {
            seed += 7;
            let module = format!("base_model.model.model.layers.{layer}.self_attn.{part}");
            add(format!("{module}.lora_A.weight"), [4, 64], seed);
            add(format!("{module}.lora_B.weight"), [out, 4], seed + 1000);
        }
    }
    write(&dir.path(WEIGHTS), &tensors);
    let config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny-llama3", "r": 4,
        "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none", "target_modules": ["q_proj", "v_proj"],
        "inference_mode": true
    });
    std::fs::write(dir.path(CONFIG), config.to_string()).unwrap();
    dir
}

fn loss(dir: &TestDir) -> (f64, String) {
    loss_with(dir, "model", &["--adapter", "adapter"])
}

fn set(dir: &TestDir, key: &str, value: Value) {
    edit(&dir.path(CONFIG), |config| config[key] = value);
}

#[test]
fn names_of_wrappers_and_of_adapters_are_left_out() {
    let names: [fn(&str) -> String; 7] = [
        str::to_owned,
        |name| name.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default."),
        |name| name.replace("lora_A.", "lora_A.my-run_2.").replace("lora_B.", "lora_B.my-run_2."),
        |name| name.replace("self_attn", "_checkpoint_wrapped_module.self_attn"),
        |name| format!("_orig_mod.module.{}", name.replace(".layers", ".language_model.layers")),
        |name| name.replace("base_model.model.model.", ""),
        |name| format!("base_model.model.{}", name.replace("q_proj", "q_proj._fsdp_wrapped_module")),
    ];
    let dir = adapted();
    let original = std::fs::read(dir.path(WEIGHTS)).unwrap();
    for (at, name) in names.into_iter().enumerate() {
        std::fs::write(dir.path(WEIGHTS), &original).unwrap();
        rename(&dir.path(WEIGHTS), name);
        let (actual, _) = loss(&dir);
        assert!((actual - ADAPTED).abs() < 2e-6, "names {at}: {actual}");
    }
    // The merged model has the same values.
    succeed(
        &dir,
        &["merge", "--model", "model", "--adapter", "adapter", "--output", "merged", "--dtype", "f32"],
    );
    assert!((super::loss(&dir, "merged").0 - ADAPTED).abs() < 1e-3);
    assert_near(super::loss(&dir, "model").0, LOSS);
}

#[test]
fn two_adapters_in_one_file_are_refused() {
    let dir = adapted();
    let mut tensors = super::read(&dir.path(WEIGHTS));
    let others: Stored = tensors
        .iter()
        .map(|(name, tensor)| (name.replace(".weight", ".other.weight"), tensor.clone()))
        .collect();
    tensors.extend(others);
    write(&dir.path(WEIGHTS), &tensors);
    let said =
        refused(&dir, &["eval", "--model", "model", "--adapter", "adapter", "--dataset", "rows.jsonl"]);
    assert!(said.contains("which mean the same tensor"), "{said}");
}

#[test]
fn the_one_adapter_below_a_folder_is_read() {
    let dir = adapted();
    std::fs::create_dir(dir.path("folder")).unwrap();
    std::fs::rename(dir.path("adapter"), dir.path("folder/default")).unwrap();
    assert_near(loss_with(&dir, "model", &["--adapter", "folder"]).0, ADAPTED);
    let (printed, _) = succeed(&dir, &["inspect", "folder"]);
    assert!(printed.contains("PEFT adapter"), "{printed}");
    copy_folder(&dir.path("folder/default"), &dir.path("folder/second"));
    let said = refused(&dir, &["eval", "--model", "model", "--adapter", "folder", "--dataset", "rows.jsonl"]);
    insta::assert_snapshot!(said, @r"
    error: cannot choose an adapter in [DIR]/folder
      caused by: these folders hold one each: [DIR]/folder/default, [DIR]/folder/second
    hint: give one of them, such as [DIR]/folder/default
    ");
}

/// PEFT saves the sentencepiece model of a slow tokenizer beside the adapter.
#[test]
fn only_a_tokenizer_json_replaces_that_of_the_base() {
    let dir = adapted();
    dir.write("adapter/tokenizer.model", "pieces");
    let (actual, warnings) = loss(&dir);
    assert_near(actual, ADAPTED);
    assert_eq!(warnings, "");
    let merge = |output: &str| {
        succeed(&dir, &["merge", "--model", "model", "--adapter", "adapter", "--output", output]);
    };
    let text = |name: &str| std::fs::read_to_string(dir.path(name)).unwrap();
    merge("merged");
    assert_eq!(text("merged/tokenizer.json"), text("model/tokenizer.json"));
    assert!(!dir.path("merged/tokenizer.model").exists());
    dir.write("adapter/tokenizer.json", &format!("{} ", text("model/tokenizer.json")));
    merge("replaced");
    assert_eq!(text("replaced/tokenizer.json"), text("adapter/tokenizer.json"));
}

#[test]
fn keys_without_effect_pass() {
    let dir = adapted();
    for (key, value) in [
        ("init_lora_weights", json!(true)),
        ("loftq_config", json!({"loftq_bits": 4, "loftq_iter": 1})),
        ("eva_config", json!({"rho": 2.0})),
        ("corda_config", json!({"corda_method": "ipm"})),
        ("lora_ga_config", json!({"direction": "ArB2r"})),
        ("qalora_group_size", json!(32)),
        ("use_qalora", json!(false)),
        ("fan_in_fan_out", json!(true)),
        ("layer_replication", json!([])),
        ("megatron_core", json!("megatron.core")),
        ("peft_version", json!("0.21.0")),
    ] {
        set(&dir, key, value);
    }
    let (actual, warnings) = loss(&dir);
    assert_near(actual, ADAPTED);
    assert_eq!(warnings, "");
}

#[test]
fn keys_that_nobody_knows_are_told_or_refused() {
    let dir = adapted();
    set(&dir, "notes", json!(["x"]));
    set(&dir, "saved_by", json!("trainer 9"));
    let (actual, warnings) = loss(&dir);
    assert_near(actual, ADAPTED);
    insta::assert_snapshot!(warnings, @"warning: adapter_config.json of [DIR]/adapter has keys that finetune and PEFT 0.21 do not know; finetune ignores them: notes, saved_by");
    set(&dir, "use_tomorrow", json!(true));
    let said =
        refused(&dir, &["eval", "--model", "model", "--adapter", "adapter", "--dataset", "rows.jsonl"]);
    insta::assert_snapshot!(said, @r"
    error: cannot use [DIR]/adapter/adapter_config.json
      caused by: `use_tomorrow` is true: this key is unknown and may enable a variant of LoRA
    hint: if the adapter computes the same without the key, delete `use_tomorrow` from adapter_config.json
    ");
}

#[test]
fn target_modules_may_be_a_pattern() {
    let dir = test_dir("tiny-qwen2");
    let train = |output: &str, modules: &str| {
        let modules = format!("adapter.target_modules={modules}");
        let args = ["--model", "model", "--recipe", "lora", "--dataset", "rows.jsonl", "--output", output];
        let set = ["--set", "train.max_steps=1", "--set", &modules];
        dir.command(&[&args[..], &set].concat()).output().unwrap()
    };
    let trained = train("out", r".*layers\.1\..*(q|v)_proj");
    assert!(trained.status.success(), "{}", dir.told(&trained.stderr));
    let written = json(&dir.path("out/adapter_config.json"));
    let modules = ["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"];
    assert_eq!(written["target_modules"], json!(modules));
    // The run's own recipe repeats it.
    let args = ["--recipe", "out/recipe.toml", "--output", "again"];
    let again = dir.command(&args).output().unwrap();
    assert!(again.status.success(), "{}", dir.told(&again.stderr));
    assert_eq!(json(&dir.path("again/adapter_config.json"))["target_modules"], json!(modules));
    let unmatched = train("none", r".*layers\.9\..*");
    assert!(dir.told(&unmatched.stderr).contains("matches no module"));
    // A pattern must match a whole module name; a word without pattern characters counts as a name.
    let word = train("word", "q_proj");
    assert!(
        dir.told(&word.stderr)
            .contains(r#"`adapter.target_modules` is "q_proj"; accepted: "all-linear", a list"#)
    );
}

/// PEFT's adapter of the tensors of all experts becomes one of each expert.
#[test]
fn adapters_of_all_experts_train_on() {
    let dir = test_dir("tiny-qwen3-moe");
    copy_folder(&golden("families/train/lora_experts_qwen3-moe/adapter_final"), &dir.path("adapter"));
    let (printed, _) = succeed(&dir, &["inspect", "adapter"]);
    let line = "model.layers.0.mlp.experts.gate_up_proj  r 8  scale 2, of each expert";
    assert!(printed.contains(line), "{printed}");
    let (actual, _) = loss(&dir);
    let merge = ["merge", "--model", "model", "--adapter", "adapter", "--output", "merged", "--dtype", "f32"];
    succeed(&dir, &merge);
    assert_near(super::loss(&dir, "merged").0, actual);
    let train = ["--model", "model", "--dataset", "rows.jsonl", "--output", "more"];
    let keys =
        ["adapter.kind=lora", "adapter.path=adapter", "train.max_steps=2", "optimizer.learning_rate=1e-3"];
    let more = keys.map(|key| ["--set", key]).concat();
    succeed(&dir, &[&train[..], &more].concat());
    let (printed, _) = succeed(&dir, &["inspect", "more"]);
    for line in ["mlp.experts.7.up_proj  r 8  scale 2", "mlp.experts.7.down_proj  r 4  scale 2"] {
        assert!(printed.contains(line), "{printed}");
    }
    let (trained, _) = loss_with(&dir, "model", &["--adapter", "more"]);
    assert!(trained < actual, "{trained} {actual}");
    set(&dir, "rank_pattern", json!({}));
    let args = ["eval", "--model", "model", "--adapter", "adapter", "--dataset", "rows.jsonl"];
    insta::assert_snapshot!(refused(&dir, &args), @"
    error: cannot use adapter [DIR]/adapter with this model
      caused by: tensor `base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight` has shape [64, 64]; r = 4 of 8 experts makes it [32, in]
    hint: give the model it was trained on as `--model`: tiny-qwen3-moe
    ");
    set(&dir, "target_parameters", json!(null));
    insta::assert_snapshot!(refused(&dir, &args), @"
    error: cannot read adapter [DIR]/adapter
      caused by: adapter_model.safetensors has LoRA on 2 tensors of `model.layers.0.mlp.experts`, and `target_parameters` in adapter_config.json names 0; accepted: as many, of gate_up_proj and down_proj
    ");
}
