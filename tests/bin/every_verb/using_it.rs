//! The command line in daily use: verbs, common settings as flags, names of other trainers, a bare
//! `--resume`, and the model named by an adapter.

use std::path::Path;

use crate::test_dir::{TestDir, lora};

/// Returns exit code, stdout and stderr of a command.
fn told(dir: &TestDir, args: &[&str]) -> (i32, String, String) {
    let output = dir.command(args).output().unwrap();
    let (out, err) = (dir.told(&output.stdout), dir.told(&output.stderr));
    (output.status.code().unwrap(), out, err)
}

/// Returns the stdout of a command that must succeed.
fn done(dir: &TestDir, args: &[&str]) -> String {
    let (code, out, err) = told(dir, args);
    assert_eq!(code, 0, "{args:?}\n{err}");
    out
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn train_and_help_are_verbs() {
    let dir = TestDir::new();
    let dry = |verb: &[&'static str]| done(&dir, &[verb, &lora(&["--dry-run"])].concat());
    assert_eq!(dry(&["train"]), dry(&[]));
    let (code, _, help) = told(&dir, &["train"]);
    assert!(code == 2 && help.contains("Usage: finetune train [OPTIONS]"), "{help}");
    assert_eq!(done(&dir, &["help"]), done(&dir, &["--help"]));
    assert_eq!(done(&dir, &["help", "plan"]), done(&dir, &["plan", "--help"]));
    assert_eq!(done(&dir, &["help", "train"]), done(&dir, &["train", "--help"]));
}

#[test]
fn common_settings_are_flags() {
    let dir = TestDir::new();
    let resolved = |more: &[&'static str]| {
        let args = ["--model", "model", "--dataset", "rows.jsonl", "--recipe", "lora", "--dry-run"];
        done(&dir, &[&args, more].concat())
    };
    let flags =
        ["--lr", "3e-4", "--epochs", "2", "--batch", "4", "--seq-len", "128", "--lora-r", "8", "--seed", "7"];
    let recipe = resolved(&flags);
    for line in [
        "learning_rate = 0.0003",
        "epochs = 2.0",
        "micro_batch_size = 4",
        "max_seq_len = 128",
        "r = 8",
        "seed = 7",
    ] {
        assert!(recipe.lines().any(|l| l == line), "no {line} in\n{recipe}");
    }
    assert!(resolved(&["--steps", "3"]).contains("max_steps = 3"));
    assert!(resolved(&["--batch", "auto"]).contains("micro_batch_size = "));
    // `--set` wins, and errors name the flag.
    assert!(
        resolved(&["--lr", "3e-4", "--set", "optimizer.learning_rate=5e-4"])
            .contains("learning_rate = 0.0005")
    );
    let refused = |more: &[&'static str]| told(&dir, &lora(more)).2;
    assert!(refused(&["--lr", "fast"]).contains("--lr: `optimizer.learning_rate` is \"fast\""));
    assert!(refused(&["--lr", "-1"]).contains("--lr: `optimizer.learning_rate` is -1"));
    assert!(refused(&["--steps", "3", "--epochs", "2"]).contains("cannot be used with"));
    // A length in epochs overrides the steps of a recipe.
    dir.write("steps.toml", "[train]\nmax_steps = 3\n[optimizer]\nlearning_rate = 1e-3\n");
    let args = ["--model", "model", "--dataset", "rows.jsonl", "--recipe", "steps.toml", "--dry-run"];
    assert!(done(&dir, &args).contains("max_steps = 3"));
    assert!(!done(&dir, &[&args[..], &["--epochs", "2"]].concat()).contains("max_steps"));
}

#[test]
fn flags_of_other_trainers_lead_to_ours() {
    let dir = TestDir::new();
    for (typed, wanted) in [
        (&["--learning_rate", "1e-4"][..], "write `--lr VALUE` or `--set optimizer.learning_rate=VALUE`"),
        (&["train", "--num_train_epochs=3"], "write `--epochs VALUE` or `--set train.epochs=VALUE`"),
        (
            &["--per_device_train_batch_size", "4"],
            "write `--batch VALUE` or `--set train.micro_batch_size=VALUE`",
        ),
        (&["--output_dir", "x"], "write `--output DIR`"),
        (&["--model_name_or_path", "x"], "write `--model MODEL`"),
        (&["--warmup-ratio", "0.1"], "write `--set scheduler.warmup_ratio=VALUE`"),
        (&["--max_samples", "100"], "write `--dataset 'FILE?limit=1000'`"),
    ] {
        let (code, _, err) = told(&dir, typed);
        assert!(code == 2 && err.contains(wanted) && err.matches("tip:").count() == 1, "{typed:?}\n{err}");
    }
    let (_, _, err) = told(&dir, &["merge", "--learning_rate", "1"]);
    assert!(!err.contains("--lr"), "{err}");
}

#[test]
fn words_of_other_trainers_lead_to_ours_in_recipes() {
    let dir = TestDir::new();
    let refused = |text: &str| {
        dir.write("r.toml", text);
        let (code, _, err) = told(&dir, &["--recipe", "r.toml", "--dry-run"]);
        assert_eq!(code, 1, "{err}");
        err
    };
    for (text, wanted) in [
        ("[lora]\nr = 8\n", "write `[adapter]`"),
        ("[model]\ntorch_dtype = \"bfloat16\"\n", "write `dtype`"),
        ("[model]\ndtype = \"bfloat16\"\n", "write `dtype = \"bf16\"`"),
        ("[model]\ndtype = \"float16\"\n", "computing in f16 is not available"),
        ("[model]\nattention = \"sdpa\"\n", "write `attention = \"flash\"`"),
        ("[scheduler]\nkind = \"wsd\"\n", "write `kind = \"warmup_stable_decay\"`"),
        ("[optimizer]\nkind = \"adamw_8bit\"\n", "write `kind = \"adamw\"` and `state = \"int8\"`"),
        ("[data]\ntrain_on = \"completion\"\n", "remove `train_on`: only completions are trained by default"),
        ("[quantization]\nkind = \"int4\"\n", "write `kind = \"nf4\"` (or \"fp4\") for 4 bits"),
        ("[train]\nnum_train_epochs = 3\n", "write `epochs`"),
        ("[data]\nmax_samples = 1000\n", "hint: write `limit = 1000` in a `[[data.train]]` table"),
        ("max_samples = 1000\n", "hint: write `limit = 1000` in a `[[data.train]]` table"),
        (
            "[data]\ndataset_text_field = \"body\"\n",
            "hint: write `columns = { text = \"COLUMN\" }` in a `[[data.train]]` table",
        ),
        ("[data]\nval_set_size = 0.05\n", "hint: write `eval_split`;"),
        ("[train]\ntest_size = 0.05\n", "hint: write `eval_split` under `[data]`"),
        ("[data]\nvalidation_split = 0.05\n", "hint: write `eval_split`;"),
        ("val_size = 0.05\n", "hint: write `eval_split` under `[data]`"),
        ("[data]\nroles_to_train = [\"assistant\"]\n", "hint: write `train_on`;"),
        ("[eval]\nevals_per_epoch = 1\n", "hint: write `steps = \"epoch\"`;"),
        ("saves_per_epoch = 1\n", "hint: write `save_steps = \"epoch\"` under `[checkpoint]`"),
    ] {
        let err = refused(text);
        assert!(err.contains(wanted), "{text}\n{err}");
    }
    let yaml = refused("# axolotl\nbase_model: x\nlearning_rate: 1e-4\nadapter: lora\n");
    assert!(yaml.contains("r.toml: this is YAML, and recipes are TOML"), "{yaml}");
    assert!(!yaml.contains("not TOML"), "{yaml}");
    assert!(refused("{\"model\": 1}\n").contains("this is JSON, and recipes are TOML"));
}

#[test]
fn resume_alone_takes_everything_from_the_folder() {
    let dir = TestDir::new();
    let saves = ["--set", "checkpoint.save_steps=2", "--eval-dataset", "rows.jsonl"];
    done(&dir, &lora(&saves));
    // Four steps more, whichever flag names the folder; flags override the recipe.
    for (args, steps) in [
        (&["--resume", "--output", "out", "--steps", "6"][..], 6),
        (&["--resume", "out", "--steps", "8"], 8),
        (&["train", "--resume", "out/checkpoint-8", "--set", "train.max_steps=10"], 10),
    ] {
        done(&dir, args);
        let lines = read(&dir.path("out/metrics.jsonl"));
        let last = lines.lines().rfind(|line| line.contains("\"loss\"")).unwrap();
        assert!(last.contains(&format!("\"step\":{steps},")), "{last}");
    }
    let (code, _, err) = told(&dir, &["--resume", "--output", "nothing"]);
    assert_eq!(code, 1);
    assert!(err.contains("nothing/recipe.toml is missing, which every run writes"), "{err}");
    // One sentence for a folder without a run.
    std::fs::create_dir(dir.path("foreign")).unwrap();
    dir.write("foreign/notes", "mine");
    let (code, _, err) = told(&dir, &[&lora(&["--resume"])[..], &["--output", "foreign"]].concat());
    assert!(code != 0 && !err.contains("starting from the beginning"), "{err}");
}

#[test]
fn a_recipe_of_two_ranks_repeats_and_resumes_on_one() {
    let dir = TestDir::new();
    let more =
        ["--ranks", "2", "--set", "checkpoint.save_steps=2", "--set", "train.gradient_accumulation_steps=1"];
    done(&dir, &lora(&more));
    let recipe = read(&dir.path("out/recipe.toml"));
    assert!(recipe.starts_with("# Trained by 2 ranks with strategy \"ddp\"."), "{recipe}");
    assert!(recipe.contains("strategy = \"auto\""), "{recipe}");
    done(&dir, &["--resume", "--output", "out", "--steps", "6"]);
    done(&dir, &["--recipe", "out/recipe.toml", "--output", "again"]);
}

#[test]
fn names_without_an_owner_are_paths() {
    let dir = TestDir::new();
    let online = |args: &[&str]| {
        // Nothing answers at this hub's address: the command must not ask it.
        let mut command = dir.command(args);
        command.env_remove("HF_HUB_OFFLINE").env("HF_ENDPOINT", "http://127.0.0.1:9");
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        dir.told(&output.stderr)
    };
    let eval = |data: &'static str| ["eval", "--model", "model", "--dataset", data];
    for (args, wanted) in [
        (&["inspect", "nope"][..], "no such file or folder: [DIR]/nope"),
        (&eval("nope"), "--dataset: no such file or folder: [DIR]/nope"),
        (&eval("nope.jsonl"), "--dataset: no such file or folder: [DIR]/nope.jsonl"),
        (&eval("data.xlsx"), "--dataset: no such file or folder: [DIR]/data.xlsx"),
        (&["data", "--model", "nope", "--dataset", "rows.jsonl"], "--model: no such file or folder:"),
    ] {
        let told = online(args);
        assert!(told.contains(wanted) && !told.contains("trying again"), "{args:?}\n{told}");
    }
}

#[test]
fn the_adapter_names_its_model() {
    let dir = TestDir::new();
    done(&dir, &lora(&[]));
    let adapter = ["--adapter", "out"];
    let with = |args: &[&'static str]| done(&dir, &[args, &adapter].concat());
    let prompt = ["generate", "--prompt", "the island", "--max-new-tokens", "4"];
    assert_eq!(with(&prompt), with(&[&prompt[..], &["--model", "model"]].concat()));
    assert!(with(&["eval", "--dataset", "rows.jsonl"]).contains("loss"));
    with(&["merge", "--output", "merged"]);
    with(&["export", "--format", "gguf", "--output", "adapter.gguf"]);
    with(&["export", "--merge", "--format", "gguf", "--output", "merged.gguf"]);
    let (_, _, err) = told(&dir, &[&prompt[..], &adapter].concat());
    assert!(err.contains("model [DIR]/model, which the adapter names"), "{err}");
    // The adapter names no base, or a missing one.
    let config = read(&dir.path("out/adapter_config.json"));
    std::fs::rename(dir.path("model"), dir.path("moved")).unwrap();
    let (code, _, err) = told(&dir, &[&prompt[..], &adapter].concat());
    assert_eq!(code, 1);
    assert!(
        err.contains("cannot find the model of adapter out") && err.contains("add `--model MODEL`"),
        "{err}"
    );
    let real = dir.path("model").display().to_string();
    dir.write("out/adapter_config.json", &config.replace(&format!("\"{real}\""), "null"));
    let (code, _, err) = told(&dir, &[&prompt[..], &adapter].concat());
    assert!(code == 1 && err.contains("has no `base_model_name_or_path`"), "{err}");
    let (code, _, err) = told(&dir, &prompt);
    assert!(code == 2 && err.contains("--model"), "{err}");
}

/// Manual pages are roff, for the program and for one verb.
#[test]
fn manual_pages() {
    let dir = TestDir::new();
    let whole = dir.said(&["completions", "man"]);
    assert!(whole.contains("\n.TH finetune 1 ") && whole.contains("finetune\\-plan(1)"), "{whole}");
    let plan = dir.said(&["completions", "man", "plan"]);
    assert!(plan.contains("\n.TH finetune-plan 1 ") && plan.contains("\\-\\-price"), "{plan}");
    let unknown = dir.refused(&["completions", "man", "plant"]);
    assert!(unknown.contains("the verb is `plant`; accepted: train, plan, "), "{unknown}");
    let part = dir.refused(&["completions", "bash", "plan"]);
    assert!(part.contains("cannot print a part of a completion script"), "{part}");
}
