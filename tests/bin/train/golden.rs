//! Whole runs through the binary: trajectories of transformers + PEFT step by step, splits, resume,
//! outputs. The golden runs were made by tests/golden/scripts/make_golden.py.

use std::path::{Path, PathBuf};
use std::process::Output;

use crate::exhaustive::each_third;
use crate::golden_run::{self, ONE_RANK, golden, metrics, number};
use crate::logits::floats;
use finetune::weights::ModelFiles;
use serde_json::Value;

fn finetune(args: &[&str]) -> Output {
    let mut command = assert_cmd::Command::cargo_bin("finetune").unwrap();
    command.env("HF_HUB_OFFLINE", "1").args(args).output().unwrap()
}

fn succeed(args: &[&str]) -> Output {
    let output = finetune(args);
    assert!(output.status.success(), "{args:?}\n{}", String::from_utf8_lossy(&output.stderr));
    output
}

fn losses(output: &Path) -> Vec<f64> {
    metrics(output, "loss").iter().map(|step| number(step, "loss")).collect()
}

fn follows(name: &str) {
    golden_run::follows(name, ONE_RANK);
}

#[test]
fn lora_follows_peft() {
    follows("lora");
}

#[test]
fn qlora_follows_peft_on_bitsandbytes() {
    follows("qlora");
}

#[test]
fn dora_follows_peft() {
    follows("dora");
}

#[test]
fn dora_over_nf4_follows_peft_on_bitsandbytes() {
    follows("qdora");
}

#[test]
fn lora_on_embedding_and_head_follows_peft() {
    follows("lora_tables");
    follows("lora_tables_tied");
}

#[test]
fn single_token_rows_follow_peft() {
    follows("lora_tokens");
    follows("lora_tokens_untied");
}

#[test]
fn rslora_follows_peft() {
    follows("rslora");
}

#[test]
fn full_follows_transformers() {
    follows("full");
}

#[test]
fn lora_on_qwen2_follows_peft() {
    follows("lora_qwen2");
}

#[test]
fn lora_on_phi3_follows_peft() {
    follows("lora_phi3");
}

/// Residual and logit factors, layers without positions, norms on outputs, queries that grow with
/// their positions, two sets of rotary divisors, rotated neighbours, MLPs without a gate,
/// layer norms, mixers in parallel, projections by key head, norms after the rotation.
#[test]
fn families_follow_transformers_and_peft() {
    for family in ["granite", "smollm3", "olmo2", "ministral3", "phi4-mini", "glm4"] {
        follows(&format!("lora_{family}"));
        follows(&format!("full_{family}"));
    }
    follows("lora_granite4");
    follows("full_granite4");
    follows("lora_ministral");
    follows("lora_arcee");
    follows("full_arcee");
    follows("lora_starcoder2");
    follows("full_starcoder2");
    follows("full_nemotron");
    follows("lora_stablelm");
    follows("lora_cohere2");
    follows("full_cohere2");
    for family in ["gpt-neox", "falcon", "hunyuan"] {
        follows(&format!("lora_{family}"));
        follows(&format!("full_{family}"));
    }
}

/// Experts that are chosen for each token; one layer of Qwen3's has none.
#[test]
fn experts_follow_transformers_and_peft() {
    for family in ["qwen3-moe", "mixtral"] {
        follows(&format!("lora_{family}"));
        follows(&format!("full_{family}"));
    }
    follows("full_granitemoe");
    for family in ["minimax-m2", "ernie4-5-moe", "hunyuan-moe"] {
        follows(&format!("lora_{family}"));
        follows(&format!("full_{family}"));
    }
}

/// Logits of heads in attention's softmax, and experts with biases whose files hold the transpose.
#[test]
fn sinks_and_experts_with_biases_follow_transformers_and_peft() {
    follows("lora_gpt-oss");
    follows("full_gpt-oss");
}

/// Attention in blocks, queries that grow without positions, experts whose inputs are weighed.
#[test]
fn llama4_follows_transformers_and_peft() {
    follows("lora_llama4");
    follows("full_llama4");
}

/// Short convolutions between gates, with biases, and experts beside them.
#[test]
fn short_convolutions_follow_transformers_and_peft() {
    for family in ["lfm2", "lfm2-bias", "lfm2-moe"] {
        follows(&format!("lora_{family}"));
        follows(&format!("full_{family}"));
    }
}

/// An activation with learned curvatures.
#[test]
fn xielu_follows_transformers_and_peft() {
    follows("lora_apertus");
    follows("full_apertus");
}

/// Latent attention, and experts that sigmoids with a bias choose in groups.
#[test]
fn latent_attention_follows_transformers_and_peft() {
    follows("lora_deepseek-v3");
    follows("full_deepseek-v3");
    follows("full_glm4-moe");
    follows("lora_glm4-moe-lite");
    follows("full_mistral4");
}

/// Heads of another width in layers of full attention, whose values are normed keys, a factor on
/// the output of each block, experts beside an MLP; per-layer inputs, keys and values that two
/// blocks of a kind read from an earlier one, a wider MLP in these.
#[test]
fn gemma4_follows_transformers_and_peft() {
    for model in ["gemma4", "gemma4-moe", "gemma4-e2b"] {
        follows(&format!("lora_{model}"));
        follows(&format!("full_{model}"));
    }
    // LoRA on the table of per-layer inputs, and their norm whole.
    follows("lora_tables_gemma4-e2b");
}

/// Three hidden states of which a block computes one, a residual of low rank, gates that are cut
/// off, layers of other widths, and a table of per-layer inputs with fewer rows than the embedding.
#[test]
fn gemma3n_follows_transformers_and_peft() {
    follows("lora_gemma3n");
    follows("full_gemma3n");
}

/// A recurrence instead of attention in three of four layers, and gates on attention's output.
#[test]
fn gated_deltanet_follows_transformers_and_peft() {
    for family in ["qwen3-5", "qwen3-5-moe", "qwen3-next"] {
        follows(&format!("lora_{family}"));
        follows(&format!("full_{family}"));
    }
}

/// Bases in FP8, in MXFP4, and in 4 bits with groups by importance, across rows, and with zeros.
/// The reference trains on the dequantized weights.
#[test]
fn lora_on_packed_bases_follows_peft() {
    for format in ["gptq", "awq", "ct_int4", "fp8_block", "mxfp4", "gguf_q4_k"] {
        follows(&format!("lora_{format}"));
    }
}

/// The same bases, packed in memory.
#[test]
fn lora_on_bases_that_stay_packed_follows_peft() {
    for format in ["gptq", "awq", "ct_int4", "fp8_block", "mxfp4", "gguf_q4_k"] {
        golden_run::follows_as(
            &format!("lora_{format}"),
            ONE_RANK,
            &["--set", "model.dequantize=false"],
            &[],
        );
    }
}

/// Uses products large enough to be packed; those of the tiny models are not
/// (crates/backends/src/packed_gemm/tests.rs).
#[test]
fn packed_products_follow_the_reference() {
    follows("wide_lora");
    follows("wide_qlora");
    follows("wide_full");
}

const ONE_THREAD: (&str, &str) = ("RAYON_NUM_THREADS", "1");
const TWO_THREADS: (&str, &str) = ("RAYON_NUM_THREADS", "2");

/// Checks the golden run `name` in bf16, with `more` in its recipe: losses within 1 % of f32.
fn follows_in_bf16(name: &str, more: Option<&str>) {
    golden_run::follows_in_bf16(name, &[(TWO_THREADS, more)]);
}

#[test]
fn lora_in_bf16_follows_peft() {
    follows_in_bf16("lora", None);
    follows_in_bf16("lora_qwen2", None);
    follows_in_bf16("lora_phi3", None);
    follows_in_bf16("dora", None);
    for family in ["granite", "smollm3", "olmo2", "ministral3"] {
        follows_in_bf16(&format!("lora_{family}"), None);
    }
}

#[test]
fn qlora_in_bf16_follows_peft_on_bitsandbytes() {
    follows_in_bf16("qlora", None);
}

/// Losses within 2 %: adapters on one layer or several with one input, fused weights, DoRA,
/// quantized weights, experts, latent attention.
#[test]
fn adapters_on_a_base_in_fp8_follow_peft() {
    let tiny = ["lora", "lora_qwen2", "lora_phi3", "dora", "qlora", "qdora"];
    for name in each_third(tiny.into_iter().chain(["lora_qwen3-moe", "lora_deepseek-v3", "wide_lora"]), 2) {
        golden_run::follows_in_fp8(name, [2e-2, 1e-1], &[TWO_THREADS]);
    }
}

/// The tiny model with a recurrence amplifies rounding: bf16 alone moves its gradient norms by up
/// to 10 %. Its gates are not in fp8.
#[test]
fn a_recurrence_on_a_base_in_fp8_follows_peft_within_4_percent() {
    golden_run::follows_in_fp8("lora_qwen3-5", [4e-2, 0.7], &[TWO_THREADS]);
}

#[test]
fn full_in_bf16_follows_transformers() {
    follows_in_bf16("full", None);
}

/// Weights and moments are bf16, too; the tolerance is the same 1 %.
#[test]
fn full_in_bf16_without_masters_follows_transformers() {
    follows_in_bf16("full", Some("optimizer.master=none"));
}

/// Gives the same bits on one thread as on two.
#[test]
fn packed_products_in_bf16_follow_the_reference() {
    golden_run::follows_in_bf16("wide_lora", &[(ONE_THREAD, None), (TWO_THREADS, None)]);
    let others = [("wide_qlora", None), ("wide_full", None), ("wide_full", Some("optimizer.master=none"))];
    each_third(others, 2).into_iter().for_each(|(name, more)| follows_in_bf16(name, more));
}

fn lora_flags<'a>(output: &'a str, model: &'a str, data: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut flags = vec!["--model", model, "--dataset", data, "--output", output, "--recipe", "lora"];
    flags.extend(["--set", "data.max_seq_len=96", "--set", "data.packing=false"]);
    for pair in more {
        flags.extend(["--set", pair]);
    }
    flags
}

fn paths(model: &str) -> (String, String) {
    let text = |path: PathBuf| path.display().to_string();
    (text(golden().join("models").join(model)), text(golden().join("data/sft_messages.jsonl")))
}

/// Micro-batches and accumulation split one global batch: the same curve, with dropout.
#[test]
fn splits_of_a_batch_give_the_same_curve() {
    let (model, data) = paths("tiny-llama");
    let dir = tempfile::tempdir().unwrap();
    let mut curves = Vec::new();
    for (micro, accumulation) in [("1", 8), ("2", 4), ("4", 2), ("8", 1), ("auto", 8)] {
        let output = dir.path().join(format!("{micro}x{accumulation}")).display().to_string();
        let micro = format!("train.micro_batch_size={micro}");
        let accumulation = format!("train.gradient_accumulation_steps={accumulation}");
        let more = [
            micro.as_str(),
            &accumulation,
            "train.max_steps=20",
            "adapter.lora_dropout=0.2",
            "optimizer.learning_rate=2e-3",
        ];
        succeed(&lora_flags(&output, &model, &data, &more));
        curves.push(losses(Path::new(&output)));
    }
    // Short rows: all rows of the step fit in memory at once.
    let decided = std::fs::read_to_string(dir.path().join("autox8/recipe.toml")).unwrap();
    assert!(decided.contains("micro_batch_size = 8\ngradient_accumulation_steps = 1\n"), "{decided}");
    assert_eq!(curves[4], curves[3]);
    assert_eq!(curves[0].len(), 20);
    for curve in &curves[1..] {
        for (a, b) in curve.iter().zip(&curves[0]) {
            assert!((a / b - 1.0).abs() < 1e-5, "{a} {b}");
        }
    }
    assert!(curves[0][19] < curves[0][0]);
}

/// Steps 1–12 at once, and steps 1–7, a kill and 8–12 leave the same bytes, for an adapter and for
/// all weights.
#[test]
fn a_resumed_run_equals_the_unbroken_one() {
    let (model, data) = paths("tiny-qwen2");
    for (recipe, file, rate) in [
        ("lora", "adapter_model.safetensors", "optimizer.learning_rate=1e-3"),
        ("full", "model.safetensors", "optimizer.learning_rate=1e-3"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let output = |name: &str| dir.path().join(name).display().to_string();
        let flags = |output: &str, dropout: bool| -> Vec<String> {
            let mut more = vec![
                rate,
                "train.epochs=2",
                "train.micro_batch_size=3",
                "train.gradient_accumulation_steps=4",
            ];
            more.push("checkpoint.save_steps=7");
            if dropout {
                more.push("adapter.lora_dropout=0.1");
            }
            let flags = lora_flags(output, &model, &data, &more);
            flags
                .iter()
                .map(|flag| if *flag == "lora" { recipe.to_owned() } else { (*flag).to_owned() })
                .collect()
        };
        let (whole, broken) = (output("whole"), output("broken"));
        let run = |flags: Vec<String>| succeed(&flags.iter().map(String::as_str).collect::<Vec<_>>());
        run(flags(&whole, recipe == "lora"));
        run(flags(&broken, recipe == "lora"));
        // State after a kill after step 7.
        for name in ["adapter_model.safetensors", "adapter_config.json", "model.safetensors", "config.json"] {
            let _ = std::fs::remove_file(Path::new(&broken).join(name));
        }
        assert!(Path::new(&broken).join("checkpoint-7/manifest.json").exists());
        let mut again = flags(&broken, recipe == "lora");
        again.push("--resume".into());
        run(again);
        let bytes = |folder: &str| std::fs::read(Path::new(folder).join(file)).unwrap();
        assert!(bytes(&whole) == bytes(&broken), "{recipe}");
        assert_eq!(losses(Path::new(&whole)), losses(Path::new(&broken)), "{recipe}");
    }
}

/// PEFT's `ensure_weight_tying`: one parameter, read under either name and written under both.
#[test]
fn a_tie_that_is_kept_trains_as_one() {
    let (model, data) = paths("tiny-llama3");
    let dir = tempfile::tempdir().unwrap();
    let folder = |name: &str| dir.path().join(name).display().to_string();
    let text = golden().join("data/text.jsonl").display().to_string();
    let loss = |more: &[&str]| {
        let mut args = vec!["eval", "--dataset", &text, "--set", "data.max_seq_len=96", "--json"];
        args.extend(more);
        number(&serde_json::from_slice(&succeed(&args).stdout).unwrap(), "loss")
    };
    for modules in [r#"["lm_head"]"#, r#"["embed_tokens", "lm_head"]"#] {
        let (start, output, merged) =
            (folder(&format!("{modules} start")), folder(modules), folder(&format!("{modules} merged")));
        // With so small a learning rate embedding and head of the second run stay equal, like
        // PEFT's.
        let rate = if modules.contains("embed") { "1e-30" } else { "1e-2" };
        let (modules, rate) =
            (format!("adapter.modules_to_save={modules}"), format!("optimizer.learning_rate={rate}"));
        succeed(&lora_flags(&start, &model, &data, &[&modules, &rate, "train.max_steps=4"]));
        let config = Path::new(&start).join("adapter_config.json");
        let mut keys: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
        keys["ensure_weight_tying"] = true.into();
        std::fs::write(&config, keys.to_string()).unwrap();

        succeed(&["merge", "--model", &model, "--adapter", &start, "--output", &merged, "--dtype", "f32"]);
        let wanted = loss(&["--model", &merged]);
        let ours = loss(&["--model", &model, "--adapter", &start]);
        assert!((ours - wanted).abs() < 1e-5, "{modules}: {ours}, merged {wanted}");

        let path = format!("adapter.path={start:?}");
        let mut flags = vec!["--model", &model, "--dataset", &data, "--output", &output];
        for pair in [&path, "optimizer.learning_rate=1e-2", "train.max_steps=3", "data.max_seq_len=96"] {
            flags.extend(["--set", pair]);
        }
        succeed(&flags);
        let open = |folder: &str| {
            ModelFiles::open_file(&Path::new(folder).join("adapter_model.safetensors")).unwrap()
        };
        let (start, output) = (open(&start), open(&output));
        let (embed, head) = ("base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight");
        assert!(output.bytes(head).unwrap() != start.bytes(head).unwrap(), "{modules}: it does not train");
        assert!(output.bytes(embed).unwrap() == output.bytes(head).unwrap(), "{modules}: it is untied");
    }
}

/// Modules that train whole, by either name, have the names of transformers' class in the adapter
/// and those of the hub in the merged model. PEFT 0.21 loads the same adapters.
#[test]
fn modules_that_train_whole_keep_their_familys_names() {
    let data = golden().join("data/text.jsonl").display().to_string();
    let dir = tempfile::tempdir().unwrap();
    for (name, module, saved, stored) in [
        ("tiny-gpt-neox", "embed_out", "lm_head.weight", "embed_out.weight"),
        ("tiny-gpt-neox", "lm_head", "lm_head.weight", "embed_out.weight"),
        ("tiny-gpt-neox", "embed_in", "gpt_neox.embed_in.weight", "gpt_neox.embed_in.weight"),
        ("tiny-falcon", "lm_head", "lm_head.weight", "lm_head.weight"),
        (
            "tiny-falcon",
            "dense_4h_to_h",
            "transformer.h.1.mlp.dense_4h_to_h.weight",
            "transformer.h.1.mlp.dense_4h_to_h.weight",
        ),
    ] {
        let model = golden().join("families/models").join(name).display().to_string();
        let folder = |end: &str| dir.path().join(format!("{name} {module}{end}")).display().to_string();
        let (adapter, merged) = (folder(""), folder(" merged"));
        let whole = format!("adapter.modules_to_save=[{module:?}]");
        succeed(&lora_flags(
            &adapter,
            &model,
            &data,
            &[&whole, "train.max_steps=3", "optimizer.learning_rate=1e-2"],
        ));
        succeed(&["merge", "--model", &model, "--adapter", &adapter, "--output", &merged, "--dtype", "f32"]);
        let file = |folder: &str, file: &str| ModelFiles::open_file(&Path::new(folder).join(file)).unwrap();
        let (ours, base) = (file(&adapter, "adapter_model.safetensors"), file(&model, "model.safetensors"));
        let trained = floats(&ours, &format!("base_model.model.{saved}"));
        assert!(floats(&file(&merged, "model.safetensors"), stored) == trained, "{name} {module}");
        // Falcon's head is its embedding until it trains by itself.
        let before = if base.info(stored).is_some() { stored } else { "transformer.word_embeddings.weight" };
        assert!(floats(&base, before) != trained, "{name} {module}: it does not train");
        let loss = |more: &[&str]| {
            let mut args = vec!["eval", "--dataset", &data, "--set", "data.max_seq_len=96", "--json"];
            args.extend(more);
            number(&serde_json::from_slice(&succeed(&args).stdout).unwrap(), "loss")
        };
        let (by_adapter, wanted) =
            (loss(&["--model", &model, "--adapter", &adapter]), loss(&["--model", &merged]));
        assert!((by_adapter - wanted).abs() < 1e-5, "{name} {module}: {by_adapter}, merged {wanted}");
    }
}
