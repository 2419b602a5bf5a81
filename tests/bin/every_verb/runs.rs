//! Successful runs through the binary: printed output, written files, and that runs can be
//! repeated, stopped and resumed.

use std::path::Path;
use std::process::{Output, Stdio};

use crate::test_dir::{TestDir, copy_folder, golden, lora};
use finetune::data::Tokenizer;
use finetune::weights::ModelFiles;
use insta::assert_snapshot;
use serde_json::Value;

fn succeed(dir: &TestDir, args: &[&str]) -> Output {
    let output = dir.command(args).output().unwrap();
    assert!(output.status.success(), "{args:?}\n{}", dir.told(&output.stderr));
    output
}

/// Returns the stdout of a command that must succeed.
fn printed(dir: &TestDir, args: &[&str]) -> String {
    dir.told(&succeed(dir, args).stdout)
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The lines of metrics.jsonl.
fn metrics(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn keys(object: &Value) -> Vec<&str> {
    object.as_object().unwrap().keys().map(String::as_str).collect()
}

/// The text that transformers' greedy ids of golden/forward decode to.
#[test]
fn generate_continues_as_transformers_does() {
    for name in ["tiny-llama", "tiny-qwen3"] {
        let dir = TestDir::with_model(name);
        let greedy = &json(&golden("forward/forward.json"))[name]["greedy"];
        let ids = |key: &str| -> Vec<u32> {
            greedy[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        let (prompt, new) = (ids("prompt_ids"), ids("new_ids"));
        let tokenizer = Tokenizer::load(&dir.path("model")).unwrap();
        let text = tokenizer.decode(&prompt, false).unwrap();
        assert_eq!(tokenizer.encode(&text, true).unwrap(), prompt, "{name}: the prompt survives as text");
        let count = new.len().to_string();
        let args = ["generate", "--model", "model", "--prompt", &text, "--max-new-tokens", &count];
        let wanted = tokenizer.decode(&[prompt, new].concat(), false).unwrap();
        assert_eq!(printed(&dir, &args), format!("{wanted}\n"), "{name}");
    }
}

#[test]
fn sampling_repeats_with_its_seed() {
    let dir = TestDir::new();
    let sample = |more: &[&str]| {
        let args = ["generate", "--model", "model", "--prompt", "the island", "--max-new-tokens", "24"];
        printed(&dir, &[&args[..], more].concat())
    };
    let greedy = sample(&[]);
    assert_eq!(greedy, sample(&["--seed", "5"]), "greedy needs no seed");
    let hot = |seed: &str| sample(&["--temperature", "1.5", "--seed", seed]);
    assert_eq!(hot("1"), hot("1"));
    assert_ne!(hot("1"), hot("2"));
    // So small a top-p keeps the likeliest token only.
    assert_eq!(sample(&["--temperature", "1.5", "--top-p", "1e-6"]), greedy);
}

#[test]
fn a_chat_answers_each_line() {
    let dir = TestDir::new();
    let chat = |lines: &str| {
        dir.write("turns", lines);
        let turns = std::fs::File::open(dir.path("turns")).unwrap();
        let args = ["generate", "--model", "model", "--chat", "--max-new-tokens", "6", "--quiet"];
        let output = dir.command(&args).stdin(turns).output().unwrap();
        assert!(output.status.success());
        assert!(output.stderr.is_empty());
        String::from_utf8(output.stdout).unwrap()
    };
    let both = chat("Count to 4\nAnd to 5\n\nnever read\n");
    let first = chat("Count to 4\n");
    assert!(first.len() > 1 && both.starts_with(&first) && both.len() > first.len(), "{first:?} {both:?}");
    assert_eq!(chat(""), "");
}

#[test]
fn eval_measures_what_training_measured() {
    let dir = TestDir::new();
    succeed(&dir, &lora(&["--eval-dataset", "rows.jsonl"]));
    let args = ["eval", "--model", "model", "--adapter", "out", "--dataset", "rows.jsonl", "--json"];
    let text = printed(&dir, &[&args[..], &["--set", "data.max_seq_len=96"]].concat());
    let figures: Value = serde_json::from_str(&text).unwrap();
    let names = ["loss", "perplexity", "token_accuracy", "exact_match", "tokens", "rows"];
    assert_eq!(keys(&figures), names);
    let logged = metrics(&dir.path("out"));
    let last = logged.iter().rfind(|line| line.get("eval_loss").is_some()).unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    assert_eq!(last["step"], 4);
    assert_eq!(figures["tokens"], last["eval_tokens"]);
    assert_eq!(figures["rows"], 80);
    let (loss, logged_loss) = (number(&figures["loss"]), number(&last["eval_loss"]));
    assert!((loss - logged_loss).abs() < 1e-6, "{loss} {logged_loss}");
    assert!((number(&figures["perplexity"]) - loss.exp()).abs() < 1e-9 * loss.exp());
    // Without the adapter: the loss measured before the first step.
    let args = ["eval", "--model", "model", "--dataset", "rows.jsonl", "--json"];
    let base: Value =
        serde_json::from_str(&printed(&dir, &[&args[..], &["--set", "data.max_seq_len=96"]].concat()))
            .unwrap();
    assert!((number(&base["loss"]) - number(&logged[0]["eval_loss"])).abs() < 1e-6);
    assert!(number(&base["loss"]) != loss);
}

/// Compares with PEFT's `merge_and_unload`.
#[test]
fn merge_equals_peft() {
    let dir = TestDir::new();
    copy_folder(&golden("train/lora/adapter_final"), &dir.path("adapter"));
    let said = succeed(&dir, &["merge", "--model", "model", "--adapter", "adapter", "--output", "merged"]);
    assert!(said.stdout.is_empty());
    let ours = ModelFiles::open(&dir.path("merged")).unwrap();
    let theirs = ModelFiles::open(&golden("train/lora/merged")).unwrap();
    assert_eq!(ours.names().collect::<Vec<_>>(), theirs.names().collect::<Vec<_>>());
    let mut changed = false;
    let base = ModelFiles::open(&dir.path("model")).unwrap();
    for (name, info) in theirs.tensors() {
        let read = |files: &ModelFiles| {
            let mut values = vec![0f32; info.elements()];
            files.read_f32(name, &mut values).unwrap();
            values
        };
        let (ours, theirs) = (read(&ours), read(&theirs));
        let difference = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(difference < 1e-6, "{name}: {difference}");
        changed |= ours != read(&base);
    }
    assert!(changed);
    // The merged folder is a complete model.
    assert!(printed(&dir, &["inspect", "merged"]).starts_with("architecture  LlamaForCausalLM\n"));
    succeed(&dir, &["generate", "--model", "merged", "--prompt", "a", "--max-new-tokens", "2"]);
}

#[test]
fn inspect_reads_headers() {
    let dir = TestDir::new();
    assert_snapshot!(printed(&dir, &["inspect", "model"]), @"
    architecture  LlamaForCausalLM
    model_type    llama
    parameters    135K in 21 tensors, 529 KiB
      F32         135K in 21 tensors, 529 KiB
    tensors by group
      embedding   30.7K in 1 tensor, 120 KiB
      attention   24.6K in 8 tensors, 96.0 KiB
      mlp         49.2K in 6 tensors, 192 KiB
      norm        320 in 5 tensors, 1.25 KiB
      head        30.7K in 1 tensor, 120 KiB
    files
      model.safetensors  529 KiB
    ");
    copy_folder(&golden("train/lora/adapter_final"), &dir.path("adapter"));
    assert_snapshot!(printed(&dir, &["inspect", "adapter"]), @"
    PEFT adapter   LoRA
    base           tiny-llama
    r              8
    lora_alpha     16
    lora_dropout   0
    use_rslora     false
    modules        14
      model.layers.0.mlp.down_proj  r 8  scale 2
      model.layers.0.mlp.gate_proj  r 8  scale 2
      model.layers.0.mlp.up_proj  r 8  scale 2
      model.layers.0.self_attn.k_proj  r 8  scale 2
      model.layers.0.self_attn.o_proj  r 8  scale 2
      model.layers.0.self_attn.q_proj  r 8  scale 2
      model.layers.0.self_attn.v_proj  r 8  scale 2
      model.layers.1.mlp.down_proj  r 8  scale 2
      model.layers.1.mlp.gate_proj  r 8  scale 2
      model.layers.1.mlp.up_proj  r 8  scale 2
      model.layers.1.self_attn.k_proj  r 8  scale 2
      model.layers.1.self_attn.o_proj  r 8  scale 2
      model.layers.1.self_attn.q_proj  r 8  scale 2
      model.layers.1.self_attn.v_proj  r 8  scale 2
    ");
}

#[test]
fn data_shows_tokens_and_mask() {
    let dir = TestDir::new();
    dir.write("rows.jsonl", "{\"prompt\": \"What is 2 + 2?\", \"completion\": \" 4\"}\n");
    let args =
        ["data", "--tokens", "--model", "model", "--dataset", "rows.jsonl", "--set", "data.max_seq_len=64"];
    assert_snapshot!(printed(&dir, &args), @r#"
    row 1, [DIR]/rows.jsonl:1: 14 tokens, 3 trained
          0       54         W                 "W"
          1       71         h                 "h"
          2      348         at                "at"
          3      291         Ġi                " i"
          4       82         s                 "s"
          5      220         Ġ                 " "
          6       17         2                 "2"
          7      331         Ġ+                " +"
          8      220         Ġ                 " "
          9       17         2                 "2"
         10       30         ?                 "?"
         11      220  train  Ġ                 " "
         12       19  train  4                 "4"
         13      479  train  <|im_end|>        "<|im_end|>"

    1 row in 1 file, prompt_completion: every row has `prompt`, `completion`
    1 example, 14 tokens, 3 of them trained (21 %)
    longest row: 14 tokens ([DIR]/rows.jsonl:1)
    tokens of an example: half up to 14, 90 % up to 14, 99 % up to 14, the longest 14
    trained ones: half up to 3, 90 % up to 3, 99 % up to 3, the longest 3
    trained parts end with "<|im_end|>" (1)
    an epoch is one step of one packed row (14 tokens on average); a micro-batch has 14 tokens at most and no padding
    packing fills 21.9 % of 64 tokens
    "#);
}

/// `data` reports every bad row and does not stop at the first one.
#[test]
fn data_names_bad_rows() {
    let dir = TestDir::new();
    let good = "{\"prompt\": \"a\", \"completion\": \" b\"}";
    dir.write(
        "rows.jsonl",
        &format!("{good}\nnot a row\n{good}\n{{\"prompt\": 5, \"completion\": \"c\"}}\n"),
    );
    let args = ["data", "--model", "model", "--dataset", "rows.jsonl", "--rows", "0"];
    assert_snapshot!(printed(&dir, &args), @r#"
    4 rows in 1 file, prompt_completion: every row has `prompt`, `completion`
    2 examples, 6 tokens, 4 of them trained (67 %)
    longest row: 3 tokens ([DIR]/rows.jsonl:1)
    1 bad row: unreadable
      [DIR]/rows.jsonl:2: not JSON: expected ident at column 2
    1 bad row: not a row of this format
      [DIR]/rows.jsonl:4: `prompt` is a number and `completion` is a string; two strings or two lists of messages are needed
    tokens of an example: half up to 3, 90 % up to 3, 99 % up to 3, the longest 3
    trained ones: half up to 2, 90 % up to 2, 99 % up to 2, the longest 2
    trained parts end with "<|im_end|>" (2)
    one example has the same tokens as an earlier one
    an epoch is one step of one packed row (6 tokens on average); a micro-batch has 6 tokens at most and no padding
    packing fills 2.3 % of 256 tokens
    "#);
}

#[test]
fn a_dry_run_prints_a_recipe_that_says_the_same() {
    let dir = TestDir::new();
    let recipe = printed(&dir, &lora(&["--dry-run"]));
    assert!(!dir.path("out").exists());
    // Its paths are absolute, so replace the folder's real name.
    let real = std::fs::canonicalize(dir.path("model")).unwrap().parent().unwrap().display().to_string();
    dir.write("again.toml", &recipe.replace("[DIR]", &real));
    assert_eq!(printed(&dir, &["--recipe", "again.toml", "--dry-run"]), recipe);
    assert!(recipe.contains("\nmax_seq_len = 96\n") && recipe.contains("\nlora_alpha = 32"), "{recipe}");
    assert!(!recipe.contains("dtype = \"auto\"\nattention"), "every auto of a run is decided: {recipe}");
}

#[test]
fn the_recipe_of_a_run_repeats_it() {
    let dir = TestDir::new();
    let more = ["--set", "adapter.lora_dropout=0.1", "--set", "train.seed=7", "--set", "data.shuffle=true"];
    succeed(&dir, &lora(&more));
    succeed(&dir, &["--recipe", "out/recipe.toml", "--output", "again"]);
    for file in ["adapter_model.safetensors", "adapter_config.json", "recipe.toml"] {
        let read = |folder: &str| std::fs::read(dir.path(folder).join(file)).unwrap();
        assert!(read("out") == read("again"), "{file} differs");
    }
}

#[test]
fn quiet_says_nothing() {
    let dir = TestDir::new();
    dir.write(
        "held.jsonl",
        r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}"#,
    );
    let adapter = ["--model", "model", "--adapter", "out", "--quiet"];
    let commands = [
        lora(&["--quiet", "--eval-dataset", "held.jsonl", "--set", "checkpoint.save_steps=2"]),
        [&["merge"], &adapter[..], &["--output", "merged"]].concat(),
    ];
    for args in commands {
        let output = succeed(&dir, &args);
        assert_eq!((dir.told(&output.stdout), dir.told(&output.stderr)), Default::default(), "{args:?}");
    }
    let output = succeed(&dir, &[&["eval"], &adapter[..], &["--dataset", "rows.jsonl"]].concat());
    assert!(output.stderr.is_empty() && !output.stdout.is_empty(), "what was asked for is not talk");
}

/// `eval.at_end` disables only the evaluation after the last step.
#[test]
fn each_evaluation_is_made_when_its_key_says() {
    for (keys, wanted) in [
        (&[][..], &[0, 4][..]),
        (&["eval.at_end=false"], &[0]),
        (&["eval.steps=3"], &[0, 3, 4]),
        (&["eval.steps=2", "eval.at_end=false"], &[0, 2]),
    ] {
        let dir = TestDir::new();
        let mut args = lora(&["--eval-dataset", "rows.jsonl"]);
        keys.iter().for_each(|key| args.extend(["--set", key]));
        succeed(&dir, &args);
        let lines = metrics(&dir.path("out"));
        let evaluated = lines.iter().filter(|line| line.get("eval_loss").is_some());
        assert_eq!(
            evaluated.map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(),
            wanted,
            "{keys:?}"
        );
    }
}

/// Results and merges can be stored in f16: an adapter, a model, and a merged model.
#[test]
fn results_are_stored_in_f16_where_that_is_asked_for() {
    let dir = TestDir::new();
    let stored = |file: &str| -> std::collections::BTreeSet<String> {
        let path = dir.path(file);
        let files = if path.is_dir() { ModelFiles::open(&path) } else { ModelFiles::open_file(&path) };
        files.unwrap().tensors().map(|(_, info)| format!("{:?}", info.dtype)).collect()
    };
    let f16 = ["--set", "checkpoint.output_dtype=f16", "--set", "train.max_steps=2"];
    succeed(&dir, &lora(&f16));
    assert_eq!(stored("out/adapter_model.safetensors"), ["F16".to_owned()].into());
    let merge = ["merge", "--model", "model", "--adapter", "out", "--output", "merged", "--dtype", "f16"];
    succeed(&dir, &merge);
    assert_eq!(stored("merged"), ["F16".to_owned()].into());
    let renamed = |arg| match arg {
        "lora" => "full",
        "out" => "whole",
        other => other,
    };
    let full: Vec<&str> = lora(&f16).into_iter().map(renamed).collect();
    succeed(&dir, &full);
    assert_eq!(stored("whole"), ["F16".to_owned()].into());
}

/// Model card, tag, report and plan use one name for the method.
#[test]
fn the_method_is_called_by_its_name() {
    let nf4 = "nf4 in blocks of 64 with double-quantized scales";
    for (keys, tag, wanted) in [
        (&["adapter.r=8"][..], "lora", "LoRA, r 8, on 14 modules".to_owned()),
        (
            &["adapter.r=4", "adapter.rank_pattern={down_proj = 2}"],
            "lora",
            "LoRA, r 2 to 4, on 14 modules".into(),
        ),
        (&["adapter.kind=dora"], "dora", "DoRA, r 16, on 14 modules".into()),
        (&["quantization.kind=nf4"], "qlora", format!("QLoRA, r 16, on 14 modules over {nf4}")),
        (
            &["adapter.kind=dora", "quantization.kind=nf4"],
            "qdora",
            format!("QDoRA, r 16, on 14 modules over {nf4}"),
        ),
        (
            &["quantization.kind=int8", "quantization.double_quant=false"],
            "lora",
            "LoRA, r 16, on 14 modules over int8 in blocks of 64 with f32 scales".into(),
        ),
        (&[], "full", "all weights (full fine-tuning)".into()),
    ] {
        let dir = TestDir::new();
        let recipe = if tag == "full" { "full" } else { "lora" };
        let mut args = lora(&["--set", "train.max_steps=2"]);
        args.iter_mut().filter(|arg| **arg == "lora").for_each(|arg| *arg = recipe);
        keys.iter().for_each(|key| args.extend(["--set", key]));
        let said = dir.told(&succeed(&dir, &args).stderr);
        assert!(said.contains(&format!("training {wanted}: ")), "{said}");
        let card = std::fs::read_to_string(dir.path("out/README.md")).unwrap();
        assert!(card.contains(&format!("tags:\n- finetune\n- \"{tag}\"\n")), "{card}");
        assert!(card.contains(&format!("trained by `finetune` ({wanted}): ")), "{card}");
        let page = std::fs::read_to_string(dir.path("out/report.html")).unwrap();
        assert!(page.contains(&format!("<dt>method</dt><dd>{wanted}</dd>")), "{page}");
    }
}

/// File and field names that other programs read (docs/formats.md).
#[test]
fn a_run_leaves_what_is_promised() {
    let dir = TestDir::new();
    succeed(&dir, &lora(&["--eval-dataset", "rows.jsonl", "--set", "checkpoint.save_steps=4"]));
    let mut files: Vec<String> = std::fs::read_dir(dir.path("out"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    assert_snapshot!(files.join("\n"), @"
    .finetune
    README.md
    adapter_config.json
    adapter_model.safetensors
    checkpoint-4
    metrics.jsonl
    recipe.toml
    report.html
    special_tokens_map.json
    tensorboard
    tokenizer.json
    tokenizer_config.json
    ");
    let lines = metrics(&dir.path("out"));
    let (steps, evaluations): (Vec<&Value>, Vec<&Value>) =
        lines.iter().partition(|line| line.get("loss").is_some());
    assert_eq!((steps.len(), evaluations.len()), (4, 2));
    let step = [
        "step",
        "epoch",
        "loss",
        "learning_rate",
        "grad_norm",
        "tokens",
        "step_secs",
        "tokens_per_sec",
        "peak_bytes",
        "data_secs",
        "forward_secs",
        "backward_secs",
        "exposed_secs",
        "update_secs",
        "save_secs",
        "other_secs",
    ];
    assert!(steps.iter().all(|line| keys(line) == step), "{steps:?}");
    for line in &steps {
        let secs = |key: &str| line[key].as_f64().unwrap();
        let parts: f64 = step[9..].iter().map(|key| secs(key)).sum();
        assert!(parts >= secs("step_secs") - 1e-6, "{line}");
        assert!(["forward_secs", "backward_secs", "update_secs"].iter().all(|key| secs(key) > 0.0), "{line}");
    }
    for line in evaluations {
        assert_eq!(keys(line)[..4], ["step", "eval_loss", "eval_perplexity", "eval_tokens"]);
    }
}

#[cfg(unix)]
mod signals {
    use std::process::{Child, Command};
    use std::thread::sleep;
    use std::time::Duration;

    use super::*;
    use crate::at_work::{MAX_STEPS, go_on, has_stopped, stops_at_work};

    fn start(dir: &TestDir, args: &[&str]) -> Child {
        let mut command = dir.command(args);
        stops_at_work(&mut command).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn send(signal: &str, child: &Child) {
        let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// Returns true if these tests run under `nohup`, whose ignored SIGHUP their runs inherit.
    fn hangups_are_ignored() -> bool {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        ignored.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).unwrap() & 1 == 1)
    }

    /// Waits until metrics.jsonl of `out` has `lines` lines.
    fn wait_for(dir: &TestDir, child: &mut Child, lines: usize) {
        loop {
            let text = std::fs::read_to_string(dir.path("out/metrics.jsonl"));
            if text.is_ok_and(|text| text.lines().count() >= lines) {
                return;
            }
            assert!(child.try_wait().unwrap().is_none(), "the run ended before it was stopped");
            sleep(Duration::from_millis(2));
        }
    }

    /// A run that is long enough to be stopped on the way.
    fn long<'a>(output: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let base = ["--set", MAX_STEPS, "--set", "adapter.lora_dropout=0.1"];
        let base = [&base[..], &["--set", "train.gradient_accumulation_steps=2"]].concat();
        let args = lora(&[&base[..], more].concat());
        args.into_iter().map(|arg| if arg == "out" { output } else { arg }).collect()
    }

    #[test]
    fn a_signal_saves_and_the_run_goes_on_from_there() {
        let dir = TestDir::new();
        succeed(&dir, &long("whole", &[]));
        let mut signals = vec!["-INT", "-TERM", "-USR1", "-USR2", "-XCPU"];
        signals.extend((!hangups_are_ignored()).then_some("-HUP"));
        for signal in signals {
            // The previous run ended with a checkpoint of its last logged step.
            let done = std::fs::read_to_string(dir.path("out/metrics.jsonl")).unwrap_or_default();
            let mut child = start(&dir, &long("out", &["--resume"]));
            wait_for(&dir, &mut child, done.lines().count() + 3);
            has_stopped(&mut child);
            send(signal, &child);
            go_on(&child);
            let output = child.wait_with_output().unwrap();
            let said = dir.told(&output.stderr);
            assert_eq!(output.status.code(), Some(85), "{said}");
            let step = metrics(&dir.path("out")).last().unwrap()["step"].to_string();
            assert!(!said.contains("error: "), "{said}");
            assert_eq!(
                said.lines().last().unwrap(),
                format!(
                    "stopped after step {step} as asked, saved in out/checkpoint-{step}; go on with `finetune --resume --output out`"
                )
            );
            assert!(dir.path(&format!("out/checkpoint-{step}/manifest.json")).exists());
            assert!(!dir.path("out/adapter_model.safetensors").exists());
        }
        succeed(&dir, &long("out", &["--resume"]));
        let read = |folder: &str| std::fs::read(dir.path(folder).join("adapter_model.safetensors")).unwrap();
        assert!(read("out") == read("whole"), "stopped by each signal and continued: the same bytes");
        let losses = |folder: &str| -> Vec<Value> {
            metrics(&dir.path(folder)).into_iter().map(|line| line["loss"].clone()).collect()
        };
        assert_eq!(losses("out"), losses("whole"));
    }

    /// Ends the run with a second SIGINT, sent late enough to count as a new request.
    fn end_at_once(mut child: Child) -> Output {
        while child.try_wait().unwrap().is_none() {
            send("-INT", &child);
            sleep(Duration::from_millis(100));
        }
        child.wait_with_output().unwrap()
    }

    /// The step hangs, so all signals arrive during it. A batch system repeats its warning signal
    /// and adds another one: neither ends the run.
    #[test]
    #[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
    fn a_second_ending_signal_ends_at_once() {
        let dir = TestDir::new();
        let mut run = dir.command(&lora(&[]));
        run.env("FINETUNE_FAULT", "0:backward:spin").stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = run.spawn().unwrap();
        wait_for(&dir, &mut child, 0);
        for signal in ["-USR1", "-USR1", "-XCPU", "-TERM"] {
            send(signal, &child);
            sleep(Duration::from_millis(100));
            assert!(child.try_wait().unwrap().is_none(), "{signal} ended the run");
        }
        let output = end_at_once(child);
        assert_eq!(output.status.code(), Some(130), "{}", dir.told(&output.stderr));
        let saved = std::fs::read_dir(dir.path("out"))
            .unwrap()
            .any(|entry| entry.unwrap().file_name().to_string_lossy().starts_with("checkpoint-"));
        assert!(!saved);
    }

    /// Like under `nohup`: a signal that was ignored at the start stays ignored.
    #[test]
    fn an_ignored_hangup_stays_ignored() {
        let dir = TestDir::new();
        let args = long("out", &["--set", "train.max_steps=60"]);
        let mut run = dir.command(&args);
        stops_at_work(&mut run);
        let mut shell = Command::new("sh");
        shell.args(["-c", "trap '' HUP; exec \"$0\" \"$@\""]).arg(run.get_program()).args(run.get_args());
        for (name, value) in run.get_envs() {
            match value {
                Some(value) => shell.env(name, value),
                None => shell.env_remove(name),
            };
        }
        shell.current_dir(run.get_current_dir().unwrap());
        let mut child = shell.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        wait_for(&dir, &mut child, 3);
        has_stopped(&mut child);
        send("-HUP", &child);
        go_on(&child);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", dir.told(&output.stderr));
    }
}
