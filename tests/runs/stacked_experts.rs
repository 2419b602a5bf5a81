//! Experts that a checkpoint stacks, through the binary: the same run as over a tensor for each
//! expert, and merged, exported and trained models with the stacks of their base.

use std::collections::BTreeMap;
use std::path::Path;

use crate::test_dir::{TestDir, copy_folder, golden};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;

const RECIPE: &str = "
[data]
max_seq_len = 64
shuffle = false
[train]
max_steps = 2
[optimizer]
learning_rate = 1e-3
";
const EXPERTS: usize = 4;

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn tensors(file: &Path) -> Tensors {
    let bytes = std::fs::read(file).unwrap();
    let read = SafeTensors::deserialize(&bytes).unwrap();
    let owned = |view: TensorView<'_>| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
    read.tensors().into_iter().map(|(name, view)| (name, owned(view))).collect()
}

/// Replaces the experts of each layer by two stacks, as in the files of the hub.
fn stacked(mut tensors: Tensors) -> Tensors {
    for layer in 0..2 {
        let dir = format!("model.layers.{layer}.mlp.experts");
        for (stack, layers) in
            [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"][..])]
        {
            let mut all = Vec::new();
            let mut shape = Vec::new();
            for (expert, layer) in (0..EXPERTS).flat_map(|e| layers.iter().map(move |layer| (e, layer))) {
                let name = format!("{dir}.{expert}.{layer}.weight");
                let (dtype, of_layer, bytes) = tensors.remove(&name).expect(&name);
                assert_eq!(dtype, Dtype::BF16);
                shape = vec![EXPERTS, layers.len() * of_layer[0], of_layer[1]];
                all.extend(bytes);
            }
            tensors.insert(format!("{dir}.{stack}"), (Dtype::BF16, shape, all));
        }
    }
    tensors
}

fn write(tensors: &Tensors, file: &Path) {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views.collect::<Vec<_>>(), None, file).unwrap();
}

/// A folder with the golden model as `apart`, and with stacks as `stacked`.
fn models() -> TestDir {
    let dir = TestDir::new();
    for folder in ["apart", "stacked"] {
        copy_folder(&golden("families/models/tiny-qwen3-5-moe"), &dir.path(folder));
    }
    let file = dir.path("stacked/model.safetensors");
    write(&stacked(tensors(&file)), &file);
    dir.write("run.toml", RECIPE);
    dir
}

fn train(dir: &TestDir, model: &str, output: &str, sets: &[&str]) -> Vec<Value> {
    let mut args =
        vec!["--recipe", "run.toml", "--model", model, "--dataset", "rows.jsonl", "--output", output];
    sets.iter().for_each(|set| args.extend(["--set", set]));
    dir.said(&args);
    let metrics = std::fs::read_to_string(dir.path(output).join("metrics.jsonl")).unwrap();
    let steps = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    steps.filter_map(|step| Some(step.get("loss")?.clone())).collect()
}

#[test]
fn adapters_are_the_same_and_merged_models_keep_the_stacks() {
    let dir = models();
    let sets = ["adapter.r=2", "adapter.target_modules=\"all-linear\""];
    let [apart, stacks] = ["apart", "stacked"].map(|model| train(&dir, model, &format!("of-{model}"), &sets));
    assert_eq!(apart, stacks);
    let [apart, stacks] = ["apart", "stacked"]
        .map(|model| tensors(&dir.path(&format!("of-{model}/adapter_model.safetensors"))));
    assert!(apart == stacks && apart.keys().any(|name| name.contains("experts.3.up_proj.lora_B")));
    for model in ["apart", "stacked"] {
        let (adapter, merged) = (format!("of-{model}"), format!("merged-{model}"));
        dir.said(&["merge", "--model", model, "--adapter", &adapter, "--output", &merged]);
        let exported = format!("exported-{model}");
        dir.said(&["export", "--model", model, "--format", "hf", "--output", &exported]);
    }
    let tensors_of = |folder: &str| tensors(&dir.path(folder).join("model.safetensors"));
    assert!(tensors_of("merged-stacked") == stacked(tensors_of("merged-apart")));
    assert!(tensors_of("exported-stacked") == stacked(tensors_of("exported-apart")));
    assert!(tensors_of("merged-stacked") != tensors_of("exported-stacked"));
}

#[test]
fn trained_models_have_the_tensors_of_their_base() {
    let dir = models();
    let [apart, stacks] = ["apart", "stacked"].map(|model| train(&dir, model, &format!("of-{model}"), &[]));
    assert_eq!(apart, stacks);
    let [apart, stacks] =
        ["apart", "stacked"].map(|model| tensors(&dir.path(&format!("of-{model}/model.safetensors"))));
    assert!(stacks == stacked(apart));
}

/// Checkpoints have the stacks too.
#[test]
fn a_killed_run_resumes_from_stacks() {
    for dir in [models(), transposed("tiny-gpt-oss")] {
        let args = ["--recipe", "run.toml", "--model", "stacked", "--dataset", "rows.jsonl"];
        let steps = ["--set", "train.max_steps=4", "--output", "out"];
        let told = dir.said(&[&["verify-resume"], &args[..], &steps].concat());
        assert!(told.contains("the same bytes"), "{told}");
    }
}

/// A folder with a golden model whose stacks hold transposes.
fn transposed(model: &str) -> TestDir {
    let dir = TestDir::new();
    copy_folder(&golden(&format!("families/models/{model}")), &dir.path("stacked"));
    dir.write("run.toml", &RECIPE.replace("max_seq_len = 64", "max_seq_len = 192"));
    dir
}

fn shapes(tensors: &Tensors) -> Vec<(&String, Dtype, &Vec<usize>)> {
    tensors.iter().map(|(name, (dtype, shape, _))| (name, *dtype, shape)).collect()
}

/// The transposes are those of the base: as bytes, as f32 and back, and under an adapter.
#[test]
fn transposed_stacks_are_written_as_they_were_read() {
    for model in ["tiny-gpt-oss", "tiny-llama4"] {
        stacks_are_written_as_they_were_read(&transposed(model));
    }
}

fn stacks_are_written_as_they_were_read(dir: &TestDir) {
    let tensors_of = |folder: &str| tensors(&dir.path(folder).join("model.safetensors"));
    let base = tensors_of("stacked");
    let export = |from: &str, kind: &str, output: &str| {
        dir.said(&["export", "--model", from, "--format", "hf", "--type", kind, "--output", output]);
    };
    export("stacked", "bf16", "same");
    export("stacked", "f32", "wide");
    export("wide", "bf16", "back");
    assert!(tensors_of("same") == base && tensors_of("back") == base && tensors_of("wide") != base);
    // Adapters of attention change no stack; those of all layers change every one.
    for (modules, changes) in [("[\"q_proj\"]", false), ("\"all-linear\"", true)] {
        let (adapter, merged) = (format!("adapter-{changes}"), format!("merged-{changes}"));
        let target = format!("adapter.target_modules={modules}");
        train(dir, "stacked", &adapter, &["adapter.r=2", &target]);
        let args = ["merge", "--model", "stacked", "--adapter", &adapter, "--output", &merged];
        let told = dir.said(&[&args[..], &["--verify-on", "rows.jsonl"]].concat());
        assert!(told.contains("verified on"), "{told}");
        let merged = tensors_of(&merged);
        assert_eq!(shapes(&merged), shapes(&base));
        for name in base.keys().filter(|name| name.contains("experts")) {
            assert_eq!(merged[name] != base[name], changes && name.ends_with("_proj"), "{name}");
        }
    }
}

/// The layers of experts over NF4, and all weights with sinks and biases of experts.
#[test]
fn transposed_stacks_train_over_nf4_and_whole() {
    let dir = transposed("tiny-gpt-oss");
    let sets = ["adapter.r=2", "adapter.target_modules=\"all-linear\"", "quantization.kind=nf4"];
    train(&dir, "stacked", "qlora", &sets);
    dir.said(&["quantize", "--model", "stacked", "--kind", "nf4", "--output", "nf4"]);
    assert_eq!(train(&dir, "nf4", "of-nf4", &sets[..2]), train(&dir, "stacked", "of-bf16", &sets));
    dir.said(&["quantize", "--model", "stacked", "--kind", "nf4", "--skip", "experts", "--output", "mixed"]);
    // In bf16, two steps are lost in rounding.
    dir.said(&["export", "--model", "stacked", "--format", "hf", "--type", "f32", "--output", "wide"]);
    assert_eq!(train(&dir, "stacked", "full", &["checkpoint.output_dtype=f32"]).len(), 2);
    let [base, trained] = ["wide", "full"].map(|folder| tensors(&dir.path(folder).join("model.safetensors")));
    assert_eq!(shapes(&trained), shapes(&base));
    for name in base.keys() {
        assert!(trained[name] != base[name], "{name}");
    }
}

/// A step with NaNs, which the embedding of one token has, begins again from a checkpoint's stacks.
#[test]
fn a_run_rolls_back_to_stacks() {
    let dir = models();
    let tokenizer = std::fs::read_to_string(dir.path("stacked/tokenizer.json")).unwrap();
    let tokenizer: Value = serde_json::from_str(&tokenizer).unwrap();
    let token = tokenizer["model"]["vocab"]["~"].as_u64().unwrap() as usize;
    let file = dir.path("stacked/model.safetensors");
    let mut all = tensors(&file);
    let (dtype, shape, bytes) = all.get_mut("model.embed_tokens.weight").unwrap();
    assert_eq!(*dtype, Dtype::BF16);
    let row = 2 * shape[1];
    bytes[token * row..token * row + 2].copy_from_slice(&[0xc0, 0x7f]);
    write(&all, &file);
    let row =
        |i: usize| format!("{{\"text\": \"row {i} of a {} here\"}}\n", if i == 2 { "~" } else { "text" });
    dir.write("rows.jsonl", &(0..4).map(row).collect::<String>());
    let sets =
        ["train.on_nan=rollback", "checkpoint.save_steps=1", "train.epochs=1", "train.micro_batch_size=1"];
    let rows = ["train.gradient_accumulation_steps=1", "data.packing=false", "data.train_on=all"];
    let mut args =
        vec!["--recipe", "run.toml", "--model", "stacked", "--dataset", "rows.jsonl", "--output", "out"];
    sets.iter().chain(&rows).for_each(|set| args.extend(["--set", set]));
    dir.write("run.toml", &RECIPE.replace("max_steps = 2", ""));
    let told = dir.said(&args);
    assert!(told.contains("rolled back to checkpoint-2"), "{told}");
}

#[test]
fn stacks_of_another_model_are_refused() {
    let dir = models();
    let file = dir.path("stacked/model.safetensors");
    let (good, name) = (tensors(&file), "model.layers.0.mlp.experts.down_proj");
    let refused = |tensors: &Tensors| {
        write(tensors, &file);
        let output = dir
            .command(&[
                "--recipe",
                "run.toml",
                "--model",
                "stacked",
                "--dataset",
                "rows.jsonl",
                "--output",
                "no",
            ])
            .output()
            .unwrap();
        assert!(!output.status.success() && !dir.path("no").exists());
        dir.told(&output.stderr)
    };
    let mut transposed = good.clone();
    transposed.get_mut(name).unwrap().1.swap(1, 2);
    let text = refused(&transposed);
    assert!(text.contains("has shape [4, 32, 64], config.json makes it [4, 64, 32]"), "{text}");
    let mut both = good.clone();
    let (dtype, shape, bytes) = &good[name];
    let one = bytes[..bytes.len() / EXPERTS].to_vec();
    both.insert("model.layers.0.mlp.experts.0.down_proj.weight".into(), (*dtype, shape[1..].to_vec(), one));
    let text = refused(&both);
    assert!(text.contains("are both stored"), "{text}");
    let mut missing = good.clone();
    missing.remove(name);
    let text = refused(&missing);
    assert!(text.contains("model.layers.0.mlp.experts.0.down_proj.weight"), "{text}");
}
