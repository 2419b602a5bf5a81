//! Bad input through the binary: each kind ends in one clear error with the right exit code and
//! leaves no file.

use std::path::Path;

use crate::test_dir::{TestDir, copy_folder, flip, golden, lora};
use insta::assert_snapshot;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};

/// Runs a command that must fail; returns its exit code and all its output.
fn refused(dir: &TestDir, args: &[&str]) -> String {
    let output = dir.command(args).arg("--quiet").output().unwrap();
    let said = dir.told(&output.stderr);
    let code = output.status.code().expect("ended by itself");
    assert_ne!(code, 0, "{said}");
    assert_eq!(said.lines().filter(|line| line.starts_with("error: ")).count(), 1, "one error: {said}");
    assert!(!said.contains("internal error"), "{said}");
    assert!(output.stdout.is_empty(), "errors go to stderr alone");
    format!("exit {code}\n{said}")
}

/// A training run that must fail before its first step, and so leaves no output folder.
fn no_run(dir: &TestDir, more: &[&str]) -> String {
    let text = refused(dir, &lora(more));
    assert!(!dir.path("out").exists(), "an output folder after: {text}");
    text
}

/// Like [`no_run`], over `rows`.
fn no_run_on(rows: &str) -> String {
    let dir = TestDir::new();
    dir.write("rows.jsonl", rows);
    no_run(&dir, &[])
}

fn change_json(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
}

/// A run on tiny-llama with one changed key in config.json.
fn no_run_with_config(key: &str, value: Value) -> String {
    let dir = TestDir::new();
    change_json(&dir.path("model/config.json"), |config| config[key] = value);
    no_run(&dir, &[])
}

/// A table of per-layer inputs has a row for each token, and the keys of E2B fit one another.
#[test]
fn gemma4_e2b_takes_no_new_tokens_and_no_other_keys() {
    let dir = TestDir::new();
    copy_folder(&golden("families/models/tiny-gemma4-e2b"), &dir.path("model"));
    assert_snapshot!(no_run(&dir, &["--set", "model.new_tokens=[\"<tool>\"]"]), @"
    exit 1
    error: cannot use 385 tokens with this model
      caused by: it has per-layer inputs, whose table has rows for its own 384 tokens; finetune adds none
    hint: use tokens that the model has, such as its unused ones
    ");
    for (key, value, cause) in [
        ("num_kv_shared_layers", 6, "`num_kv_shared_layers` is 6"),
        ("vocab_size_per_layer_input", 380, "`vocab_size_per_layer_input` is 380"),
    ] {
        copy_folder(&golden("families/models/tiny-gemma4-e2b"), &dir.path("model"));
        change_json(&dir.path("model/config.json"), |config| config[key] = json!(value));
        let said = no_run(&dir, &[]);
        assert!(said.contains(cause) && said.contains("accepted: "), "{said}");
    }
}

type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

/// Rewrites a safetensors file with changed tensors.
fn change_tensors(path: &Path, change: impl FnOnce(&mut Vec<Tensor>)) {
    let bytes = std::fs::read(path).unwrap();
    let mut tensors: Vec<Tensor> = SafeTensors::deserialize(&bytes)
        .unwrap()
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        .collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

fn tensor<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
    tensors.iter_mut().find(|tensor| tensor.0 == name).unwrap()
}

fn no_run_with_tensors(change: impl FnOnce(&mut Vec<Tensor>)) -> String {
    no_run_with_tensors_and(&[], change)
}

fn no_run_with_tensors_and(more: &[&str], change: impl FnOnce(&mut Vec<Tensor>)) -> String {
    let dir = TestDir::new();
    change_tensors(&dir.path("model/model.safetensors"), change);
    no_run(&dir, more)
}

// Recipes and flags.

#[test]
fn an_unknown_key() {
    let dir = TestDir::new();
    dir.write("my.toml", "[adapter]\nr = 8\nlora_aplha = 16\n\n[optimizer]\nlearning_rate = 1e-4\n");
    assert_snapshot!(refused(&dir, &["--model", "model", "--dataset", "rows.jsonl", "--recipe", "my.toml"]), @"
    exit 1
    error: cannot use recipe my.toml
      caused by: my.toml:3:1: unknown key `adapter.lora_aplha`; nearest: `adapter.lora_alpha`; [adapter] has: kind, r, lora_alpha, lora_dropout, target_modules, exclude_modules, modules_to_save, rank_pattern, alpha_pattern, use_rslora, init, path
    hint: write `lora_alpha`
    ");
}

#[test]
fn values_of_the_wrong_type() {
    let dir = TestDir::new();
    dir.write(
        "my.toml",
        "[adapter]\nr = \"8\"\n\n[optimizer]\nlearning_rate = -1\n\n[train]\nrecompute = \"yes\"\n",
    );
    assert_snapshot!(refused(&dir, &["--model", "model", "--dataset", "rows.jsonl", "--recipe", "my.toml"]), @r#"
    exit 1
    error: cannot use recipe my.toml
      caused by: my.toml:2:5: `adapter.r` is "8"; accepted: a whole number from 1 to 65536
      caused by: my.toml:5:17: `optimizer.learning_rate` is -1; accepted: a number above 0
      caused by: my.toml:8:13: `train.recompute` is "yes"; accepted: "auto", "none", "selective", "block", "every:sqrt", "first:N" and "every:N" with a number of blocks, at least 1, for N
    hint: `finetune recipes show reference` documents every key
    "#);
}

#[test]
fn a_recipe_that_is_not_there() {
    let dir = TestDir::new();
    assert_snapshot!(refused(&dir, &["--recipe", "lorra"]), @"
    exit 1
    error: cannot find recipe `lorra`
      caused by: no such file
      caused by: unknown built-in recipe `lorra`
      caused by: built in: quickstart, pretrain-tiny, lora, qlora, qlora-8bit-optimizer, dora, full, dpo, kto, orpo, cpo, simpo, ddp-lora, fsdp-full, fsdp-qlora, hsdp-full
    hint: write `lora`
    ");
    assert_snapshot!(refused(&dir, &["--recipe", "mine/my.toml"]), @"
    exit 1
    error: cannot find recipe `mine/my.toml`
      caused by: no such file
      caused by: unknown built-in recipe `mine/my`
      caused by: built in: quickstart, pretrain-tiny, lora, qlora, qlora-8bit-optimizer, dora, full, dpo, kto, orpo, cpo, simpo, ddp-lora, fsdp-full, fsdp-qlora, hsdp-full
    hint: `finetune recipes` lists the built-in recipes and their purposes
    ");
}

#[test]
fn a_recipe_that_is_not_toml() {
    let dir = TestDir::new();
    dir.write("my.toml", "[adapter]\nr = = 8\n");
    assert_snapshot!(refused(&dir, &["--recipe", "my.toml"]), @"
    exit 1
    error: cannot use recipe my.toml
      caused by: my.toml:2:5: not TOML: extra `=`, expected nothing
      caused by: my.toml:2:7: not TOML: unexpected key or value, expected newline, `#`
    ");
}

#[test]
fn no_learning_rate_and_no_data() {
    let dir = TestDir::new();
    assert_snapshot!(refused(&dir, &["--model", "model"]), @r#"
    exit 1
    error: cannot use these settings
      caused by: `data.train` is not set
      caused by: `optimizer.learning_rate` is not set
    hint: add what is missing: `finetune --model model --quiet --dataset rows.jsonl --recipe lora`; each line of rows.jsonl is a row, such as {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    "#);
}

/// A new user's first command, without `--dataset`.
#[test]
fn the_one_flag_that_is_missing_is_shown_in_the_command() {
    let dir = TestDir::new();
    let typed = ["--model", "meta-llama/Llama-2-7b", "--recipe", "qlora.toml", "--output", "my run"];
    assert_snapshot!(refused(&dir, &typed), @r#"
    exit 1
    error: cannot use recipe qlora (built in)
      caused by: `data.train` is not set
    hint: add what is missing: `finetune --model meta-llama/Llama-2-7b --recipe qlora.toml --output 'my run' --quiet --dataset rows.jsonl`; each line of rows.jsonl is a row, such as {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    "#);
    // The suggested command works, and its example row is valid.
    dir.write(
        "rows.jsonl",
        r#"{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}"#,
    );
    let typed =
        ["--model", "model", "--recipe", "qlora.toml", "--output", "my run", "--dataset", "rows.jsonl"];
    let done = dir.command(&typed).arg("--dry-run").output().unwrap();
    assert!(done.status.success(), "{}", dir.told(&done.stderr));
}

#[test]
fn ranks_and_strategies_that_do_not_fit() {
    let dir = TestDir::new();
    let ranks = |set: &str| no_run(&dir, &["--ranks", "3", "--set", set]);
    assert_snapshot!(ranks("parallel.strategy=single"), @r#"
    exit 1
    error: cannot use `parallel.strategy = "single"`
      caused by: the run has 3 ranks; accepted with more than one: auto, ddp, zero1, zero2, fsdp, hsdp
    hint: leave the strategy out, or use one rank
    "#);
    assert_snapshot!(ranks("parallel.shard_size=2"), @r#"
    exit 1
    error: cannot use these settings
      caused by: --set parallel.shard_size=2: `parallel.shard_size` has no effect with `strategy = "auto"`
    hint: write `strategy = "hsdp"`, or remove `shard_size`
    "#);
    assert_snapshot!(ranks("parallel.offload_folder=."), @r#"
    exit 1
    error: cannot use these settings
      caused by: --set parallel.offload_folder=.: `parallel.offload_folder` has no effect with `offload = "none"`
    hint: write `offload = "params"`, or remove `offload_folder`
    "#);
    let nowhere = ["--set", "parallel.offload=params", "--set", "parallel.offload_folder=./nowhere"];
    assert_snapshot!(no_run(&dir, &nowhere), @r#"
    exit 1
    error: cannot use these settings
      caused by: --set parallel.offload_folder=./nowhere: `parallel.offload_folder` is "./nowhere": [DIR]/nowhere is not a folder
    "#);
    let hsdp = ["--ranks", "3", "--set", "parallel.strategy=hsdp", "--set", "parallel.shard_size=2"];
    assert_snapshot!(no_run(&dir, &hsdp), @r#"
    exit 1
    error: cannot divide the ranks into groups for `parallel.strategy = "hsdp"`
      caused by: `parallel.shard_size` is 2
      caused by: accepted for 3 ranks: 1, 3
    hint: give a divisor of the number of ranks as `parallel.shard_size`
    "#);
    let bench = ["bench", "scaling", "--model", "model", "--dataset", "rows.jsonl", "--recipe", "lora"];
    assert_snapshot!(refused(&dir, &[&bench[..], &["--gpus", "0,1", "--ranks", "1,4"]].concat()), @"
    exit 1
    error: cannot measure 4 ranks
      caused by: `--gpus` names 2; each rank needs one of its own
    hint: name more with `--gpus`, or give smaller numbers with `--ranks`
    ");
    if finetune::collective::CONNECTS_PROCESSES {
        return;
    }
    assert_snapshot!(no_run(&dir, &["--world-size", "2", "--rank", "0", "--master-addr", "127.0.0.1"]), @"
    exit 1
    error: cannot train over several processes
      caused by: the world size is 2, from --world-size and --rank
      caused by: this binary was built without MPI, which CPU ranks in several processes need
    hint: on one host, start one process with `--ranks N`; over hosts, start a build with `--features mpi` (`cargo build --release --features mpi`) under `mpirun`; torchrun cannot replace mpirun
    ");
    assert_snapshot!(no_run(&dir, &["--set", "parallel.strategy=fsdp"]), @r#"
    exit 1
    error: cannot use `parallel.strategy = "fsdp"`
      caused by: the run has one rank; accepted with one: auto, single
    hint: give more ranks, or leave the strategy out
    "#);
}

#[test]
fn quantized_bases() {
    let dir = TestDir::new();
    let full = |more: &[&str]| {
        let line = ["--model", "model", "--dataset", "rows.jsonl", "--output", "out", "--recipe", "full"];
        refused(&dir, &[&line, more].concat())
    };
    assert_snapshot!(full(&["--set", "quantization.kind=nf4"]), @"
    exit 1
    error: cannot train all weights of a quantized model
      caused by: its linear layers are kept in nf4 in blocks of 64 with double-quantized scales, which takes no updates; the recipe has no `[adapter]`
    hint: add `[adapter]` to train an adapter on it, or remove `[quantization]`
    ");
    assert_snapshot!(no_run(&dir, &["--set", "quantization.block_size=48"]), @"
    exit 1
    error: cannot use these settings
      caused by: --set quantization.block_size=48: `quantization.block_size` is 48; accepted: a whole number: one of 32, 64, 128, 256, 512, 1024, 2048, 4096
    hint: `finetune recipes show reference` documents every key
    ");
    // A checkpoint that is already quantized.
    for name in ["config.json", "model.safetensors"] {
        let from =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/quant/tiny-llama-bnb-nf4").join(name);
        std::fs::copy(from, dir.path("model").join(name)).unwrap();
    }
    assert_snapshot!(full(&[]), @"
    exit 1
    error: cannot train all weights of a quantized model
      caused by: its linear layers are kept in nf4 in blocks of 64 with double-quantized scales, which takes no updates; the recipe has no `[adapter]`
    hint: add `[adapter]` to train an adapter on it, or give the unquantized model
    ");
    assert_snapshot!(no_run(&dir, &["--set", "quantization.kind=fp4"]), @"
    exit 1
    error: cannot quantize [DIR]/model
      caused by: it is quantized already, to nf4 in blocks of 64 with double-quantized scales; `[quantization]` asks for fp4 in blocks of 64 with double-quantized scales
    hint: remove `[quantization]` to use the checkpoint as it is, or give the unquantized model
    ");
    assert_snapshot!(no_run(&dir, &["--set", "adapter.init=pissa"]), @r#"
    exit 1
    error: cannot start the adapter from this model's weights
      caused by: `adapter.init` is "pissa" or "loftq", which factor the weights before they are quantized; the model is stored in nf4 in blocks of 64 with double-quantized scales
    hint: give the unquantized model and `[quantization]`, or write `init = "default"`
    "#);
}

#[test]
fn adapters_that_cannot_be() {
    let dir = TestDir::new();
    let dora = ["--set", "adapter.kind=dora", "--set", "adapter.target_modules=[\"q_proj\",\"lm_head\"]"];
    assert_snapshot!(no_run(&dir, &dora), @r#"
    exit 1
    error: `lm_head` cannot carry DoRA
      caused by: `adapter.kind` is "dora"; accepted with it: the linear layers of the blocks
    hint: write `kind = "lora"`, or train the table whole: name it in `adapter.modules_to_save`
    "#);
    assert_snapshot!(no_run(&dir, &["--set", "adapter.init=pissa", "--set", "adapter.r=100"]), @r#"
    exit 1
    warning: `adapter.r` is 100, above the smaller side of 14 of 14 layers that it adapts, such as model.layers.0.self_attn.k_proj (32): ranks above it add parameters and nothing that can be learned; write `adapter.r = 32` or less
    error: cannot factor a weight to initialize the adapter
      caused by: r is 100; the weight is 64 x 64; accepted: r up to the smaller dimension
    hint: lower `adapter.r`, or start with `init = "default"`
    "#);
    assert_snapshot!(no_run(&dir, &["--set", "adapter.target_modules=[\"norm\"]"]), @r#"
    exit 1
    error: cannot choose the modules that get LoRA
      caused by: `target_modules` matches `model.norm`, a norm; accepted: linear layers, the embedding, the head
    hint: write `modules_to_save = ["norm"]` to train it whole
    "#);
}

#[test]
fn bases_that_cannot_be_in_fp8() {
    let dir = TestDir::new();
    let fp8 = ["--set", "train.base_products=fp8"];
    assert_snapshot!(no_run(&dir, &fp8), @"
    exit 1
    error: cannot multiply the frozen weights in fp8 (`train.base_products`)
      caused by: the run computes in f32; accepted beside fp8: bf16
    hint: add `--set model.dtype=bf16`, or remove `base_products`
    ");
    let full = ["--model", "model", "--dataset", "rows.jsonl", "--output", "out", "--recipe", "full"];
    assert_snapshot!(refused(&dir, &[&full[..], &fp8].concat()), @"
    exit 1
    error: cannot use these settings
      caused by: --set train.base_products=fp8: `train.base_products` has no effect without [adapter]: weights that train are not multiplied in fp8
    hint: add `[adapter]`, or remove `base_products`
    ");
    let copy = ["--set", "quantization.kind=nf4", "--set", "quantization.bf16_copy=true"];
    assert_snapshot!(no_run(&dir, &[&fp8[..], &copy].concat()), @r#"
    exit 1
    error: cannot use these settings
      caused by: --set quantization.bf16_copy=true: `quantization.bf16_copy` has no effect with `train.base_products = "fp8"`, which keeps codes of fp8 instead
    hint: remove `bf16_copy`, or `base_products` under `[train]`
    "#);
    assert_snapshot!(no_run(&dir, &["--set", "train.base_products=fp4"]), @r#"
    exit 1
    error: cannot use these settings
      caused by: --set train.base_products=fp4: `train.base_products` is "fp4"; accepted: "dtype", "fp8"
    hint: write `base_products = "fp8"`
    "#);
}

#[test]
fn blocks_without_cuda_graphs() {
    let dir = TestDir::new();
    let graphs = ["--set", "train.cuda_graphs=true"];
    assert_snapshot!(no_run(&dir, &[&graphs[..], &["--set", "adapter.kind=dora"]].concat()), @r#"
    exit 1
    error: cannot launch the model's blocks as CUDA graphs (`train.cuda_graphs`)
      caused by: a graph holds finetune's kernels and products alone, and no kernel divides DoRA's magnitudes
    hint: write `kind = "lora"` under `[adapter]`, or remove `cuda_graphs`
    "#);
    copy_folder(&golden("families/models/tiny-olmo2"), &dir.path("model"));
    assert_snapshot!(no_run(&dir, &graphs), @"
    exit 1
    error: cannot launch the model's blocks as CUDA graphs (`train.cuda_graphs`)
      caused by: a graph holds finetune's kernels and products alone, and every block of the model has other operations on tensors, such as experts, gates or norms of whole queries
    hint: remove `cuda_graphs`
    ");
}

#[test]
fn weights_that_cannot_be_quantized() {
    let text = no_run_with_tensors_and(&["--set", "quantization.kind=nf4"], |tensors| {
        let data = &mut tensor(tensors, "model.layers.1.mlp.up_proj.weight").3;
        data[40..44].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    assert_snapshot!(text, @"
    exit 1
    error: cannot load model.layers.1.mlp.up_proj.weight
      caused by: it holds NaN; accepted: finite numbers
    hint: download the model again, or give another
    ");
}

#[test]
fn training_in_f16() {
    assert_snapshot!(no_run(&TestDir::new(), &["--set", "model.dtype=f16"]), @r#"
    exit 1
    error: cannot use these settings
      caused by: --set model.dtype=f16: `model.dtype` is "f16"; accepted: "auto", "f32", "bf16"
    hint: write `dtype = "bf16"`: computing in f16 is not available
    "#);
}

#[test]
fn gpus_that_are_not_there() {
    let dir = TestDir::new();
    if !cfg!(feature = "cuda") {
        assert_snapshot!(no_run(&dir, &["--gpus", "0"]), @"
        exit 1
        error: cannot use GPU 0
          caused by: this binary was built for the CPU only
        hint: build it with `cargo build --release --features cuda`, or leave out `--gpus`
        ");
        assert_snapshot!(no_run(&dir, &["--gpus", "2,3"]), @"
        exit 1
        error: cannot use GPU 2
          caused by: this binary was built for the CPU only
        hint: build it with `cargo build --release --features cuda`, or leave out `--gpus`
        ");
    }
}

/// Threads instead of processes need several GPUs to be threads of.
#[test]
fn threads_of_one_gpu() {
    let dir = TestDir::new();
    assert_snapshot!(no_run(&dir, &["--gpus", "0", "--gpus-in-process"]), @"
    exit 2
    error: cannot use `--gpus-in-process` with one GPU
      caused by: one GPU has one process anyway; accepted: two or more in `--gpus`
    hint: leave out `--gpus-in-process`, or name more GPUs with `--gpus`
    ");
}

/// An error that each process of a run finds appears once.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions read the variable")]
fn ranks_in_processes_report_an_error_once() {
    if finetune::collective::CONNECTS_PROCESSES {
        return;
    }
    let dir = TestDir::new();
    ["rank-0", "rank-1"].iter().for_each(|name| dir.write(name, ""));
    let mut command = dir.command(&lora(&["--ranks", "2", "--quiet"]));
    let done = command.env("FINETUNE_MPI_PROCESSES", dir.path(".")).output().unwrap();
    assert_snapshot!(dir.told(&done.stderr), @"
    error: cannot train over several processes
      caused by: the world size is 2, from --world-size and --rank
      caused by: this binary was built without MPI, which CPU ranks in several processes need
    hint: on one host, start one process with `--ranks N`; over hosts, start a build with `--features mpi` (`cargo build --release --features mpi`) under `mpirun`; torchrun cannot replace mpirun
    ");
    assert_eq!(done.status.code(), Some(1));
    assert!(!dir.path("out").exists());
}

// The model folder.

#[test]
fn a_model_folder_that_is_not_there() {
    let dir = TestDir::new();
    assert_snapshot!(refused(&dir, &["--model", "./modle", "--dataset", "rows.jsonl", "--recipe", "lora"]), @"
    exit 1
    error: cannot use these settings
      caused by: --model: no such file or folder: [DIR]/modle
    ");
}

#[test]
fn a_hub_id_that_is_not_cached_while_offline() {
    let dir = TestDir::new();
    assert_snapshot!(refused(&dir, &["--model", "org/name", "--dataset", "rows.jsonl", "--recipe", "lora"]), @"
    exit 1
    error: model `org/name` is not in the cache, and this run is offline
      caused by: looked for revision `main` in [DIR]/hf/hub
    hint: run once without `--offline` and HF_HUB_OFFLINE to download it, or give a folder
    ");
}

#[test]
fn no_config() {
    let dir = TestDir::new();
    std::fs::remove_file(dir.path("model/config.json")).unwrap();
    assert_snapshot!(no_run(&dir, &[]), @"
    exit 1
    error: folder `[DIR]/model` has no config.json
      caused by: a model is a config.json, a tokenizer and safetensors
    hint: give a folder that holds config.json, or a hub id such as `owner/name`
    ");
}

#[test]
fn a_config_that_is_not_json() {
    let dir = TestDir::new();
    dir.write("model/config.json", "{\"model_type\": \"llama\",\n \"hidden_size\": 64,,}");
    assert_snapshot!(no_run(&dir, &[]), @"
    exit 1
    error: cannot read [DIR]/model/config.json
      caused by: it is not JSON: key must be a string at line 2 column 20
    hint: download or save the model again
    ");
}

#[test]
fn a_config_without_a_key_it_needs() {
    let dir = TestDir::new();
    change_json(&dir.path("model/config.json"), |config| {
        config.as_object_mut().unwrap().remove("hidden_size");
    });
    assert_snapshot!(no_run(&dir, &[]), @"
    exit 1
    error: cannot use the model of [DIR]/model/config.json
      caused by: `hidden_size` is missing
      caused by: every model of this family has it
    ");
    assert_snapshot!(no_run_with_config("num_key_value_heads", json!(3)), @"
    exit 1
    error: cannot use the model of [DIR]/model/config.json
      caused by: the head counts do not fit each other
      caused by: num_attention_heads is 4, num_key_value_heads 3; the first must be a multiple of the second
    ");
    assert_snapshot!(no_run_with_config("hidden_size", json!("wide")), @r#"
    exit 1
    error: cannot use the model of [DIR]/model/config.json
      caused by: `hidden_size` is "wide"
      caused by: accepted: a whole number
    "#);
}

#[test]
fn a_family_that_is_not_known() {
    assert_snapshot!(no_run_with_config("model_type", json!("mamba2")), @r#"
    exit 1
    error: cannot use the model of [DIR]/model/config.json
      caused by: `model_type` is "mamba2"
      caused by: accepted: llama, mistral, qwen2, qwen3, gemma2, gemma3_text, gemma3n_text, gemma4_text, gemma4_unified_text, phi3, granite, granitemoehybrid, smollm3, seed_oss, ministral, ministral3, olmo2, olmo3, exaone4, glm4, ernie4_5, arcee, starcoder2, nemotron, stablelm, cohere, cohere2, mixtral, qwen2_moe, qwen3_moe, olmoe, qwen3_5_text, qwen3_5_moe_text, qwen3_next, granitemoe, glm4_moe, deepseek_v3, kimi_k2, glm4_moe_lite, mistral4, minimax_m2, gpt_oss, gpt_neox, falcon, ernie4_5_moe, hunyuan_v1_dense, hunyuan_v1_moe, llama4_text, lfm2, lfm2_moe, apertus
    hint: choose a model of one of these families
    "#);
}

#[test]
fn features_of_a_config_that_are_not_supported() {
    assert_snapshot!(no_run_with_config("attention_dropout", json!(1.5)), @"
    exit 1
    error: cannot use the model of [DIR]/model/config.json
      caused by: `attention_dropout` is 1.5
      caused by: accepted: from 0 to below 1
    ");
    assert_snapshot!(no_run_with_config("hidden_act", json!("xielu")), @r#"
    exit 1
    error: cannot use the model of [DIR]/model/config.json
      caused by: `hidden_act` is "xielu"
      caused by: accepted: silu, gelu_pytorch_tanh
    "#);
    assert_snapshot!(no_run_with_config("quantization_config", json!({"quant_method": "aqlm", "bits": 4})), @r#"
    exit 1
    error: cannot use the model of [DIR]/model/config.json
      caused by: the model is quantized in a format that this program does not read
      caused by: `quantization_config.quant_method` is "aqlm"; accepted: "bitsandbytes", "fp8", "gptq", "awq", "compressed-tensors", "mxfp4", "modelopt", "hqq"
    hint: give the model that was not quantized
    "#);
    let rope = json!({"rope_type": "spiral", "factor": 2.0});
    assert_snapshot!(no_run_with_config("rope_scaling", rope), @r#"
    exit 1
    error: cannot use the model of [DIR]/model/config.json
      caused by: `rope_scaling` has type "spiral"
      caused by: accepted: default, linear, dynamic, llama3, yarn, longrope, proportional
    "#);
}

#[test]
fn weights_cut_short() {
    let dir = TestDir::new();
    let path = dir.path("model/model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 1000]).unwrap();
    assert_snapshot!(no_run(&dir, &[]), @"
    exit 1
    error: cannot read weights [DIR]/model/model.safetensors
      caused by: it is truncated: its tensors need 541952 bytes, the file has 540952
    hint: download or save the file again
    ");
    std::fs::write(&path, &bytes[..5]).unwrap();
    assert_snapshot!(no_run(&dir, &[]), @"
    exit 1
    error: cannot read weights [DIR]/model/model.safetensors
      caused by: it has 5 bytes; a safetensors file has at least 8
    hint: download or save the file again
    ");
}

#[test]
fn weights_with_a_damaged_header() {
    let dir = TestDir::new();
    let path = dir.path("model/model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let mut damaged = bytes.clone();
    damaged[8..12].fill(b'x');
    std::fs::write(&path, &damaged).unwrap();
    assert_snapshot!(no_run(&dir, &[]), @"
    exit 1
    error: cannot read weights [DIR]/model/model.safetensors
      caused by: its header does not start with `{` (not a safetensors file?)
    hint: download or save the file again
    ");
    damaged = bytes;
    damaged[..8].fill(0xff);
    std::fs::write(&path, &damaged).unwrap();
    assert_snapshot!(no_run(&dir, &[]), @"
    exit 1
    error: cannot read weights [DIR]/model/model.safetensors
      caused by: its first 8 bytes give a header of 18446744073709551615 bytes; accepted: up to 100000000 (not a safetensors file?)
    hint: download or save the file again
    ");
}

#[test]
fn a_tensor_of_another_shape() {
    assert_snapshot!(no_run_with_config("intermediate_size", json!(96)), @"
    exit 1
    error: cannot load [DIR]/model/model.safetensors
      caused by: model.layers.0.mlp.gate_proj.weight has shape [128, 64], config.json makes it [96, 64] (hidden_size 64, intermediate_size 96, vocab_size 480, 4 and 2 heads of 16)
    hint: give config.json and weights of one and the same model
    ");
}

#[test]
fn a_tensor_is_missing() {
    assert_snapshot!(no_run_with_tensors(|tensors| {
        tensors.retain(|tensor| tensor.0 != "model.layers.1.mlp.up_proj.weight");
    }), @"
    exit 1
    error: cannot read weights in [DIR]/model
      caused by: tensor `model.layers.1.mlp.up_proj.weight` is missing; the nearest is `model.layers.0.mlp.up_proj.weight`
    hint: give config.json and weights of one and the same model
    ");
}

#[test]
fn a_tensor_too_many() {
    assert_snapshot!(no_run_with_tensors(|tensors| {
        let bias = "model.layers.0.self_attn.q_proj.bias".to_owned();
        tensors.push((bias, Dtype::F32, vec![64], vec![0; 256]));
    }), @"
    exit 1
    error: cannot load [DIR]/model/model.safetensors
      caused by: model.layers.0.self_attn.q_proj.bias is not part of the model that config.json describes
    hint: give config.json and weights of one and the same model
    ");
}

#[test]
fn weights_that_are_whole_numbers() {
    assert_snapshot!(no_run_with_tensors(|tensors| {
        tensor(tensors, "model.norm.weight").1 = Dtype::I32;
    }), @"
    exit 1
    error: cannot read weights [DIR]/model/model.safetensors
      caused by: tensor `model.norm.weight` has dtype I32; accepted: F32, F16, BF16, F64
    hint: give the unquantized model
    ");
}

#[test]
fn a_missing_shard() {
    let dir = TestDir::with_model("tiny-mistral");
    std::fs::remove_file(dir.path("model/model-00002-of-00002.safetensors")).unwrap();
    assert_snapshot!(no_run(&dir, &[]), @"
    exit 1
    error: cannot read weights in [DIR]/model
      caused by: model.safetensors.index.json puts tensor `lm_head.weight` in model-00002-of-00002.safetensors, which is missing
    hint: download the whole model again
    ");
}

#[test]
fn an_index_that_leads_out_of_the_folder() {
    let dir = TestDir::with_model("tiny-mistral");
    std::fs::rename(
        dir.path("model/model-00002-of-00002.safetensors"),
        dir.path("model-00002-of-00002.safetensors"),
    )
    .unwrap();
    let index = dir.path("model/model.safetensors.index.json");
    let text = std::fs::read_to_string(&index).unwrap();
    std::fs::write(&index, text.replace("\"model-00002", "\"../model-00002")).unwrap();
    assert_snapshot!(no_run(&dir, &[]), @"
    exit 1
    error: cannot read index [DIR]/model/model.safetensors.index.json
      caused by: tensor `lm_head.weight` is in `../model-00002-of-00002.safetensors`; accepted: a file name ending in .safetensors, in the same folder
    hint: download or save the model again
    ");
}

#[test]
fn an_index_that_is_damaged() {
    let dir = TestDir::with_model("tiny-mistral");
    dir.write("model/model.safetensors.index.json", "{\"weight_map\": [");
    assert_snapshot!(no_run(&dir, &[]), @"
    exit 1
    error: cannot read index [DIR]/model/model.safetensors.index.json
      caused by: it is not valid: invalid type: sequence, expected an object from tensor names to file names at line 1 column 15
    hint: download or save the model again
    ");
}

#[test]
fn weights_in_other_formats() {
    let dir = TestDir::new();
    std::fs::remove_file(dir.path("model/model.safetensors")).unwrap();
    assert_snapshot!(no_run(&dir, &[]), @"
    exit 1
    error: folder `[DIR]/model` has no weights
      caused by: accepted: model.safetensors, or model.safetensors.index.json with its shards
    ");
    dir.write("model/model-q4_k_m.gguf", "GGUF");
    assert_snapshot!(no_run(&dir, &[]), @"
    exit 1
    error: cannot read weights [DIR]/model/model-q4_k_m.gguf
      caused by: it has 4 bytes; a GGUF file has at least 24
    hint: download or save the file again
    ");
    std::fs::remove_file(dir.path("model/model-q4_k_m.gguf")).unwrap();
    dir.write("model/pytorch_model.bin", "PK");
    assert_snapshot!(no_run(&dir, &[]), @r#"
    exit 1
    error: folder `[DIR]/model` holds only pickled weights (pytorch_model.bin)
      caused by: a pickle can run code when it is opened, so it is neither downloaded nor read
      caused by: accepted: model.safetensors, or model.safetensors.index.json with its shards
    hint: look for a repository of the same model that holds safetensors, often the same name with `-hf` at its end; or convert it once with Python: `python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained('MODEL').save_pretrained('OUT', safe_serialization=True)"`, and copy its tokenizer files into OUT
    "#);
}

#[test]
fn no_tokenizer() {
    let dir = TestDir::new();
    std::fs::remove_file(dir.path("model/tokenizer.json")).unwrap();
    assert_snapshot!(no_run(&dir, &[]), @"
    exit 1
    error: cannot read the tokenizer of [DIR]/model
      caused by: it holds no tokenizer.json
      caused by: accepted: tokenizer.json, tekken.json, tiktoken.model, tokenizer.model, qwen.tiktoken
    hint: copy the tokenizer and tokenizer_config.json from the model this one was made from
    ");
    dir.write("model/tokenizer.json", "{\"version\": \"1.0\"}");
    assert_snapshot!(no_run(&dir, &[]), @"
    exit 1
    error: cannot read the tokenizer [DIR]/model/tokenizer.json
      caused by: it is not a tokenizer.json: Model missing. at line 1 column 18
    hint: copy tokenizer.json from the model this one was made from
    ");
}

#[test]
fn a_tokenizer_with_more_tokens_than_the_model() {
    let dir = TestDir::new();
    change_json(&dir.path("model/config.json"), |config| config["vocab_size"] = json!(400));
    change_tensors(&dir.path("model/model.safetensors"), |tensors| {
        for name in ["model.embed_tokens.weight", "lm_head.weight"] {
            let (_, _, shape, data) = tensor(tensors, name);
            shape[0] = 400;
            data.truncate(400 * 64 * 4);
        }
    });
    assert_snapshot!(no_run(&dir, &[]), @r#"
    exit 1
    error: cannot use the data set [DIR]/rows.jsonl
      caused by: cannot use 80 of 80 rows of the data set
      caused by: [DIR]/rows.jsonl:1: token 478 ("<|im_start|>"); the model has the ids below 400
      caused by: [DIR]/rows.jsonl:2: token 478 ("<|im_start|>"); the model has the ids below 400
      caused by: [DIR]/rows.jsonl:3: token 478 ("<|im_start|>"); the model has the ids below 400
      caused by: and 77 more
    hint: give tokenizer files and weights of one and the same model
    "#);
    assert_snapshot!(refused(&dir, &["generate", "--model", "model", "--prompt", "<|im_start|>"]), @r#"
    exit 1
    error: the prompt has a token that the model does not know
      caused by: token 478 ("<|im_start|>"); the model has the ids below 400
    hint: give tokenizer files and weights of one and the same model
    "#);
}

// Data.

#[test]
fn a_data_file_that_is_not_there() {
    let dir = TestDir::new();
    std::fs::remove_file(dir.path("rows.jsonl")).unwrap();
    assert_snapshot!(no_run(&dir, &[]), @"
    exit 1
    error: cannot use these settings
      caused by: --dataset: no such file or folder: [DIR]/rows.jsonl
    ");
}

#[test]
fn a_row_that_is_not_json() {
    let good = r#"{"prompt": "1 + 1 =", "completion": " 2"}"#;
    assert_snapshot!(no_run_on(&format!("{good}\n{{\"prompt\": \"1 + 2 =\", \"completion\": }}\n{good}\n")), @"
    exit 1
    error: cannot use the data set [DIR]/rows.jsonl
      caused by: cannot use 1 of 3 rows of the data set
      caused by: [DIR]/rows.jsonl:2: not JSON: expected value at column 37
    hint: mend the rows
    ");
}

#[test]
fn a_row_without_what_its_format_needs() {
    let good = r#"{"prompt": "1 + 1 =", "completion": " 2"}"#;
    assert_snapshot!(no_run_on(&format!("{good}\n{{\"prompt\": \"1 + 2 =\"}}\n")), @r#"
    exit 1
    error: cannot use the data set [DIR]/rows.jsonl
      caused by: cannot detect the format of the data set
      caused by: 1 of 2 rows have the keys of prompt_completion
      caused by: [DIR]/rows.jsonl:2 has the keys prompt
      caused by: known: preference (chosen, rejected); messages (messages); sharegpt (conversations); alpaca (instruction, output); instruction (instruction, response); prompt_completion (prompt, completion); question_answer (question, answer); text (text); tokens (input_ids)
    hint: rename the keys of the rows, or name them in a `[[data.train]]` table, such as `columns = { prompt = "KEY", completion = "KEY" }`, or write `data.format`, one of auto, messages, sharegpt, preference, preference_chosen, alpaca, instruction, prompt_completion, question_answer, text, tokens
    "#);
    assert_snapshot!(no_run_on("{\"messages\": [{\"role\": \"robot\", \"content\": \"beep\"}]}\n"), @r#"
    exit 1
    error: cannot use the data set [DIR]/rows.jsonl
      caused by: cannot use 1 of 1 row of the data set
      caused by: [DIR]/rows.jsonl:1: no message is trained: its roles are robot; known: system, developer, user, assistant, tool
    hint: write `data.train_on = "all"` to train on every token
    "#);
}

#[test]
fn an_empty_data_set() {
    assert_snapshot!(no_run_on(""), @"
    exit 1
    error: cannot use the data set [DIR]/rows.jsonl
      caused by: the data set is empty
      caused by: no row in [DIR]/rows.jsonl
    ");
    assert_snapshot!(no_run_on("\n\n"), @"
    exit 1
    error: cannot use the data set [DIR]/rows.jsonl
      caused by: the data set is empty
      caused by: no row in [DIR]/rows.jsonl
    ");
}

#[test]
fn a_row_with_nothing_to_learn() {
    let chat = json!({"messages": [{"role": "user", "content": "hello"}]});
    assert_snapshot!(no_run_on(&format!("{chat}\n")), @r#"
    exit 1
    error: cannot use the data set [DIR]/rows.jsonl
      caused by: cannot use 1 of 1 row of the data set
      caused by: [DIR]/rows.jsonl:1: no token is trained
    hint: write `data.train_on = "all"` to train on every token
    "#);
}

#[test]
fn rows_of_no_known_format() {
    assert_snapshot!(no_run_on("{\"frage\": \"1 + 1?\", \"antwort\": \"2\"}\n"), @r#"
    exit 1
    error: cannot use the data set [DIR]/rows.jsonl
      caused by: cannot detect the format of the data set
      caused by: [DIR]/rows.jsonl:1 has the keys frage, antwort
      caused by: known: preference (chosen, rejected); messages (messages); sharegpt (conversations); alpaca (instruction, output); instruction (instruction, response); prompt_completion (prompt, completion); question_answer (question, answer); text (text); tokens (input_ids)
    hint: rename the keys of the rows, or name them in a `[[data.train]]` table, such as `columns = { prompt = "KEY", completion = "KEY" }`, or write `data.format`, one of auto, messages, sharegpt, preference, preference_chosen, alpaca, instruction, prompt_completion, question_answer, text, tokens
    "#);
}

#[test]
fn a_file_of_no_known_kind() {
    let dir = TestDir::new();
    dir.write("rows.xlsx", "PK");
    assert_snapshot!(refused(&dir, &["--model", "model", "--dataset", "rows.xlsx", "--recipe", "lora"]), @r#"
    exit 1
    error: cannot use the data set [DIR]/rows.xlsx
      caused by: cannot read the data file [DIR]/rows.xlsx
      caused by: it is an Excel or OpenDocument table
      caused by: accepted: .jsonl, .ndjson, .json, .parquet, .arrow, .feather, .csv, .tsv, .txt, .md, text files also as .gz or .zst, or a folder of these
    hint: convert it in Python: pandas.read_excel("rows.xlsx").to_json("rows.xlsx.jsonl", orient="records", lines=True)
    "#);
}

#[test]
fn chats_without_a_template() {
    let dir = TestDir::new();
    change_json(&dir.path("model/tokenizer_config.json"), |config| {
        config.as_object_mut().unwrap().remove("chat_template");
    });
    assert_snapshot!(no_run(&dir, &[]), @"
    exit 1
    error: cannot use the data set [DIR]/rows.jsonl
      caused by: cannot use messages rows with the tokenizer in [DIR]/model
      caused by: it has no chat template
    hint: write `data.chat_template`, Jinja text or the path of a file
    ");
    assert_snapshot!(refused(&dir, &["generate", "--model", "model", "--chat"]), @"
    exit 1
    error: cannot chat with this model
      caused by: its tokenizer has no chat template
    hint: give one in a recipe (`data.chat_template`), or use `--prompt`
    ");
}

#[test]
fn a_broken_chat_template() {
    let dir = TestDir::new();
    let template = "data.chat_template=\"{% for m in messages %}{{ m.content }}\"";
    assert_snapshot!(no_run(&dir, &["--set", template]), @"
    exit 1
    error: cannot use `data.chat_template`
      caused by: cannot use the chat template `default`
      caused by: syntax error: unexpected end of input, expected end of block, on line 1 of the template
    ");
    let template = "data.chat_template=\"{{ messages[0].content.nothing.more }}\"";
    assert_snapshot!(no_run(&dir, &["--set", template]), @"
    exit 1
    error: cannot use the data set [DIR]/rows.jsonl
      caused by: cannot use 80 of 80 rows of the data set
      caused by: [DIR]/rows.jsonl:1: cannot render the chat template: undefined value: `messages[0].content.nothing` is undefined, on line 1 of the template
      caused by: [DIR]/rows.jsonl:2: cannot render the chat template: undefined value: `messages[0].content.nothing` is undefined, on line 1 of the template
      caused by: [DIR]/rows.jsonl:3: cannot render the chat template: undefined value: `messages[0].content.nothing` is undefined, on line 1 of the template
      caused by: and 77 more
    hint: mend the rows or the chat template (`data.chat_template` replaces the tokenizer's)
    ");
    assert_snapshot!(no_run(&dir, &["--set", "data.chat_template=chat.jinja"]), @r#"
    exit 1
    error: cannot use these settings
      caused by: --set data.chat_template=chat.jinja: `data.chat_template` is "chat.jinja": cannot read [DIR]/chat.jinja: No such file or directory (os error 2)
    "#);
}

#[test]
fn rows_that_are_too_long() {
    let dir = TestDir::new();
    assert_snapshot!(no_run(&dir, &["--set", "data.max_seq_len=8"]), @"
    exit 1
    error: cannot use the data set [DIR]/rows.jsonl
      caused by: no row of the data set can be used
      caused by: 80 rows in 1 file, messages: every row has `messages`
      caused by: chat template: the tokenizer's own
      caused by: 0 examples, 0 tokens, 0 of them trained (0 %)
      caused by: longest row: 127 tokens ([DIR]/rows.jsonl:46)
      caused by: 80 rows left out: their answer begins after data.max_seq_len tokens
    hint: raise `data.max_seq_len`
    ");
    assert_snapshot!(no_run(&dir, &["--set", "data.max_seq_len=8", "--set", "data.on_long_row=stop"]), @r#"
    exit 1
    error: cannot use the data set [DIR]/rows.jsonl
      caused by: cannot use 80 of 80 rows of the data set
      caused by: [DIR]/rows.jsonl:1: 59 tokens; `data.max_seq_len` is 8
      caused by: [DIR]/rows.jsonl:2: 64 tokens; `data.max_seq_len` is 8
      caused by: [DIR]/rows.jsonl:3: 118 tokens; `data.max_seq_len` is 8
      caused by: and 77 more
    hint: raise `data.max_seq_len`, or write `data.on_long_row = "truncate"` or `"drop"`
    "#);
    assert_snapshot!(no_run(&dir, &["--set", "data.max_seq_len=8", "--set", "data.on_long_row=drop"]), @r#"
    exit 1
    error: cannot use the data set [DIR]/rows.jsonl
      caused by: no row of the data set can be used
      caused by: 80 rows in 1 file, messages: every row has `messages`
      caused by: chat template: the tokenizer's own
      caused by: 0 examples, 0 tokens, 0 of them trained (0 %)
      caused by: longest row: 127 tokens ([DIR]/rows.jsonl:46)
      caused by: 80 rows dropped for their length
    hint: raise `data.max_seq_len`, or write `data.on_long_row = "truncate"`
    "#);
    assert_snapshot!(no_run(&dir, &["--set", "data.max_seq_len=1"]), @r#"
    exit 1
    error: cannot use these settings
      caused by: --set data.max_seq_len=1: `data.max_seq_len` is 1; accepted: "auto", a whole number from 2 to 16777216
    hint: `finetune recipes show reference` documents every key
    "#);
}

// Adapters.

#[test]
fn an_adapter_for_another_model() {
    let dir = TestDir::with_model("tiny-qwen3");
    copy_folder(&golden("train/lora/adapter_final"), &dir.path("adapter"));
    let args = ["generate", "--model", "model", "--adapter", "adapter", "--prompt", "a"];
    assert_snapshot!(refused(&dir, &args), @"
    exit 1
    error: cannot use adapter [DIR]/adapter with this model
      caused by: `base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight` has shape [32, 8], the weight of `model.layers.0.self_attn.k_proj` has [64, 64]
    hint: give the model it was trained on as `--model`: tiny-llama
    ");
    let args = ["merge", "--model", "model", "--adapter", "adapter", "--output", "merged"];
    assert_snapshot!(refused(&dir, &args), @"
    exit 1
    error: cannot use adapter [DIR]/adapter with this model
      caused by: `base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight` has shape [32, 8], the weight of `model.layers.0.self_attn.k_proj` has [64, 64]
    hint: give the model it was trained on as `--model`: tiny-llama
    ");
    assert!(!dir.path("merged").exists());
    assert_snapshot!(no_run(&dir, &["--set", "adapter.path=adapter"]), @"
    exit 1
    error: cannot use adapter [DIR]/adapter with this model
      caused by: `base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight` has shape [32, 8], the weight of `model.layers.0.self_attn.k_proj` has [64, 64]
    hint: give the model it was trained on as `--model`: tiny-llama
    ");
}

#[test]
fn an_adapter_in_another_format() {
    let dir = TestDir::new();
    copy_folder(&golden("train/lora/adapter_final"), &dir.path("adapter"));
    let args = ["generate", "--model", "model", "--adapter", "adapter", "--prompt", "a"];
    let weights = dir.path("adapter/adapter_model.safetensors");
    std::fs::rename(&weights, dir.path("adapter/adapter_model.bin")).unwrap();
    assert_snapshot!(refused(&dir, &args), @r#"
    exit 1
    error: cannot read adapter [DIR]/adapter
      caused by: its weights are a pickle file (adapter_model.bin), which can run code when opened; accepted: adapter_model.safetensors
    hint: convert it once with Python: python -c "import torch; from safetensors.torch import save_file; save_file(torch.load('[DIR]/adapter/adapter_model.bin', weights_only=True), '[DIR]/adapter/adapter_model.safetensors')"
    "#);
    std::fs::remove_file(dir.path("adapter/adapter_model.bin")).unwrap();
    assert_snapshot!(refused(&dir, &args), @"
    exit 1
    error: cannot read adapter [DIR]/adapter
      caused by: it has no adapter_model.safetensors
    hint: give the folder that holds adapter_config.json and adapter_model.safetensors
    ");
    std::fs::remove_file(dir.path("adapter/adapter_config.json")).unwrap();
    assert_snapshot!(refused(&dir, &args), @"
    exit 1
    error: cannot read adapter [DIR]/adapter
      caused by: it has no adapter_config.json
    hint: give the folder that holds adapter_config.json and adapter_model.safetensors
    ");
    copy_folder(&golden("train/lora/adapter_final"), &dir.path("adapter"));
    change_json(&dir.path("adapter/adapter_config.json"), |config| config["lora_bias"] = true.into());
    assert_snapshot!(refused(&dir, &args), @"
    exit 1
    error: cannot use [DIR]/adapter/adapter_config.json
      caused by: `lora_bias` is true, which is not supported; accepted: no such key, or its default
    ");
}

#[test]
fn targets_that_name_nothing() {
    let dir = TestDir::new();
    assert_snapshot!(no_run(&dir, &["--set", "adapter.target_modules=[\"q_proj\", \"query\"]"]), @"
    exit 1
    error: cannot choose the modules that get LoRA
      caused by: `target_modules` has `query`, which matches no module; the model has down_proj, embed_tokens, gate_proj, input_layernorm, k_proj, lm_head, norm, o_proj, post_attention_layernorm, q_proj, up_proj, v_proj
    ");
    assert_snapshot!(no_run(&dir, &["--set", "adapter.modules_to_save=[\"lm_haed\"]"]), @"
    exit 1
    error: cannot choose the modules that get LoRA
      caused by: `modules_to_save` has `lm_haed`, which matches no module; the model has down_proj, embed_tokens, gate_proj, input_layernorm, k_proj, lm_head, norm, o_proj, post_attention_layernorm, q_proj, up_proj, v_proj
    hint: did you mean `lm_head`?
    ");
    assert_snapshot!(no_run(&dir, &["--set", "adapter.target_modules=[]"]), @"
    exit 1
    error: cannot use these settings
      caused by: --set adapter.target_modules=[]: `adapter.target_modules` is []: an empty list trains nothing
    ");
}

// Output and resume.

#[test]
fn an_output_folder_that_is_not_empty() {
    let dir = TestDir::new();
    std::fs::create_dir(dir.path("out")).unwrap();
    dir.write("out/notes.txt", "mine");
    assert_snapshot!(refused(&dir, &lora(&[])), @"
    exit 1
    error: cannot write to out
      caused by: the folder is not empty
    hint: give a new or empty folder with `--output`
    ");
    copy_folder(&golden("train/lora/adapter_final"), &dir.path("adapter"));
    let args = ["merge", "--model", "model", "--adapter", "adapter", "--output", "out"];
    assert_snapshot!(refused(&dir, &args), @"
    exit 1
    error: cannot write to out
      caused by: the folder is not empty
    hint: give a new or empty folder as `--output`
    ");
    assert_eq!(std::fs::read_dir(dir.path("out")).unwrap().count(), 1);
}

#[test]
fn an_output_that_is_a_file() {
    let dir = TestDir::new();
    dir.write("out", "mine");
    assert_snapshot!(refused(&dir, &lora(&[])), @"
    exit 1
    error: cannot write to out
      caused by: Not a directory (os error 20)
    hint: give a new folder with `--output`
    ");
}

/// A run of 4 steps with a checkpoint after the second and the fourth.
fn finished_run() -> TestDir {
    let dir = TestDir::new();
    let output = dir.command(&lora(&["--set", "checkpoint.save_steps=2"])).output().unwrap();
    assert!(output.status.success(), "{}", dir.told(&output.stderr));
    std::fs::remove_file(dir.path("out/adapter_config.json")).unwrap();
    dir
}

#[test]
fn resuming_as_a_different_run() {
    let dir = finished_run();
    let again = refused(&dir, &lora(&[]));
    assert!(again.contains("or `--resume` to go on with the run in this one"), "{again}");
    let more = ["--resume", "--set", "optimizer.learning_rate=1e-3", "--set", "adapter.r=8"];
    assert_snapshot!(refused(&dir, &lora(&more)), @"
    exit 1
    error: cannot resume out/checkpoint-4
      caused by: adapter.r: 16 in the checkpoint, 8 now
      caused by: optimizer.learning_rate: 0.0002 in the checkpoint, 0.001 now
    hint: resume with the recipe, model and data of the first run, or start anew with another --output; add `--allow-change optimizer.learning_rate` to accept that change
    ");
    dir.write("rows.jsonl", "{\"prompt\": \"1 + 1 =\", \"completion\": \" 2\"}\n");
    assert_snapshot!(refused(&dir, &lora(&["--resume"])), @"
    exit 1
    error: cannot resume out/checkpoint-4
      caused by: the training rows differ from those of the checkpoint
    hint: resume with the recipe, model and data of the first run, or start anew with another --output; to go on with the new rows: `--set adapter.path=out/checkpoint-4 --output more`
    ");
    // The suggested command starts a run.
    let args = lora(&["--set", "adapter.path=out/checkpoint-4"]);
    let args: Vec<&str> = args.into_iter().map(|arg| if arg == "out" { "more" } else { arg }).collect();
    let output = dir.command(&args).output().unwrap();
    assert!(output.status.success(), "{}", dir.told(&output.stderr));
}

/// Replaces digests, which mean nothing to a reader of a snapshot.
fn filtered(text: String) -> String {
    regex::Regex::new("[0-9a-f]{16,64}").unwrap().replace_all(&text, "[DIGEST]").into_owned()
}

#[test]
fn a_damaged_checkpoint() {
    let dir = finished_run();
    flip(&dir.path("out/checkpoint-4/optimizer.safetensors"));
    assert_snapshot!(filtered(refused(&dir, &lora(&["--resume", "out/checkpoint-4"]))), @"
    exit 1
    error: cannot use checkpoint out/checkpoint-4
      caused by: optimizer.safetensors is not what was written: its digest differs
    hint: `--resume` without a folder takes the newest sound checkpoint of the output folder
    ");
    // finetune uses the newest sound checkpoint and names the damaged one.
    let output = dir.command(&lora(&["--resume", "--quiet"])).output().unwrap();
    assert!(output.status.success());
    assert_snapshot!(filtered(dir.told(&output.stderr)), @"
    warning: out/checkpoint-4 is damaged: optimizer.safetensors is not what was written: its digest differs; skipped
    ");
}

#[test]
fn only_damaged_checkpoints() {
    let dir = finished_run();
    flip(&dir.path("out/checkpoint-4/adapter_model.safetensors"));
    std::fs::remove_file(dir.path("out/checkpoint-2/trainer_state.json")).unwrap();
    assert_snapshot!(filtered(refused(&dir, &lora(&["--resume"]))), @"
    exit 1
    error: cannot resume from out
      caused by: out/checkpoint-4 is damaged: adapter_model.safetensors is not what was written: its digest differs
      caused by: out/checkpoint-2 is damaged: trainer_state.json is missing
    hint: start again in a new folder, with `--output`
    ");
}

/// Without a checkpoint the run starts from the beginning. finetune warns about a named folder,
/// also with `--quiet`.
#[test]
fn resuming_from_a_folder_that_is_not_there() {
    let dir = TestDir::new();
    let output = dir.command(&lora(&["--resume", "elsewhere", "--quiet"])).output().unwrap();
    assert!(output.status.success());
    assert_snapshot!(dir.told(&output.stderr), @"
    warning: no checkpoint in elsewhere: starting from the beginning
    ");
}

// Numbers.

#[test]
fn weights_that_are_not_numbers() {
    let dir = TestDir::new();
    change_tensors(&dir.path("model/model.safetensors"), |tensors| {
        let (_, _, _, data) = tensor(tensors, "model.layers.1.mlp.down_proj.weight");
        data[400..404].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    assert_snapshot!(refused(&dir, &lora(&["--set", "checkpoint.save_steps=1"])), @"
    exit 4
    error: the numbers diverged at step 1
      caused by: loss NaN, gradient norm NaN; the first bad value is in the weight model.layers.1.mlp.down_proj.weight
      caused by: this step updated nothing
    hint: the model's files contain this value, and no training option changes that: download the model again, or use another one
    ");
    let left = |name: &str| dir.path("out").join(name).exists();
    assert!(!left("checkpoint-1") && !left("adapter_model.safetensors"), "nothing was saved");
    assert_eq!(std::fs::read_to_string(dir.path("out/metrics.jsonl")).unwrap(), "");
    std::fs::remove_dir_all(dir.path("out")).unwrap();
    assert_snapshot!(refused(&dir, &lora(&["--eval-dataset", "rows.jsonl"])), @"
    exit 4
    error: cannot evaluate after step 0
      caused by: the evaluation loss is not finite
      caused by: the loss of row 1 is NaN or infinite
      caused by: the first bad value is in the weight model.layers.1.mlp.down_proj.weight
    ");
    assert_snapshot!(refused(&dir, &["eval", "--model", "model", "--dataset", "rows.jsonl"]), @"
    exit 4
    error: the evaluation loss is not finite
      caused by: the loss of rows 1 to 25 is NaN or infinite
      caused by: the first bad value is in the weight model.layers.1.mlp.down_proj.weight
    ");
    let output = dir.command(&["generate", "--model", "model", "--prompt", "a"]).output().unwrap();
    assert_eq!(output.status.code(), Some(4));
    assert_snapshot!(dir.told(&output.stderr), @"
    error: the model's logits are NaN or infinite
    hint: a weight is NaN, infinite or too large for its dtype: download the model again, or train it again
    ");
}

// Verbs.

#[test]
fn nothing_to_continue() {
    let dir = TestDir::new();
    assert_snapshot!(refused(&dir, &["generate", "--model", "model", "--prompt", ""]), @"
    exit 1
    error: cannot continue an empty prompt
      caused by: this tokenizer puts no token of its own before it
    hint: give a text with `--prompt`
    ");
}

#[test]
fn nothing_to_inspect() {
    let dir = TestDir::new();
    std::fs::create_dir(dir.path("empty")).unwrap();
    assert_snapshot!(refused(&dir, &["inspect", "empty"]), @"
    exit 1
    error: cannot read a model from [DIR]/empty
      caused by: it has neither model.safetensors nor model.safetensors.index.json
    hint: give a folder that holds config.json and the weights, or a hub id such as `org/name`
    ");
    assert_snapshot!(refused(&dir, &["inspect", "./nowhere"]), @"
    exit 1
    error: cannot use `./nowhere`
      caused by: no such file or folder: [DIR]/nowhere
    ");
    assert_snapshot!(refused(&dir, &["inspect", "rows.jsonl"]), @"
    exit 1
    error: cannot read weights [DIR]/rows.jsonl
      caused by: its first 8 bytes give a header of 7449362198107595387 bytes; accepted: up to 100000000 (not a safetensors file?)
    hint: download or save the file again
    ");
}
