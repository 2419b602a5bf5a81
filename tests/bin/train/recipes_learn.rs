//! Recipes that learn from few rows: default rows of a step, warm-up, checkpoints and warnings, for
//! users who set none of them.

use std::collections::BTreeSet;

use serde_json::json;

use crate::golden_run::{metrics, number};
use crate::test_dir::{TestDir, copy_folder};

/// A folder with `rows` rows of text.
fn test_dir(rows: usize) -> TestDir {
    let dir = TestDir::new();
    let row =
        |i: usize| json!({ "text": format!("row {i} of a quiet island in the sea") }).to_string() + "\n";
    dir.write("rows.jsonl", &(0..rows).map(row).collect::<String>());
    dir
}

/// The arguments of a run of `recipe` with unpacked rows.
fn words<'a>(recipe: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut words =
        vec!["--model", "model", "--dataset", "rows.jsonl", "--recipe", recipe, "--output", "out"];
    for set in ["data.packing=false", "log.tensorboard=false"] {
        words.extend(["--set", set]);
    }
    words.extend(more);
    words
}

/// Runs a command that must end with `code`; returns errors and warnings, and stdout.
fn ends(dir: &TestDir, args: &[&str], code: i32) -> [String; 2] {
    let done = dir.command(args).output().unwrap();
    let said = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(code), "{args:?}: {said}");
    [said, dir.told(&done.stdout)]
}

/// Returns the value of `key` in the recipe that a dry run prints.
fn resolved(dir: &TestDir, recipe: &str, more: &[&str], key: &str) -> String {
    let [_, text] = ends(dir, &words(recipe, &[more, &["--dry-run"]].concat()), 0);
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{key} = ")));
    line.unwrap_or_else(|| panic!("no {key} in {text}")).to_owned()
}

/// Returns the steps of the checkpoints in `output`.
fn checkpoints(dir: &TestDir, output: &str) -> BTreeSet<u64> {
    let entries = std::fs::read_dir(dir.path(output)).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    names.filter_map(|name| name.strip_prefix("checkpoint-")?.parse().ok()).collect()
}

fn steps(dir: &TestDir, output: &str) -> usize {
    metrics(&dir.path(output), "loss").len()
}

#[test]
fn the_rows_of_a_step_come_from_the_data() {
    let accumulation = "gradient_accumulation_steps";
    for (rows, ranks, wanted) in
        [(20, "1", "1"), (60, "1", "2"), (100, "1", "3"), (60, "2", "1"), (240, "2", "4")]
    {
        let dir = test_dir(rows);
        let actual = resolved(&dir, "lora", &["--ranks", ranks], accumulation);
        assert_eq!(actual, wanted, "{rows} rows on {ranks} ranks");
    }
    let dir = test_dir(60);
    for recipe in ["lora", "qlora", "qlora-8bit-optimizer", "dora", "full"] {
        assert_eq!(resolved(&dir, recipe, &[], accumulation), "2", "{recipe}");
        assert_eq!(resolved(&dir, recipe, &[], "epochs"), "3.0", "{recipe}");
    }
    assert_eq!(resolved(&dir, "lora", &["--set", "train.micro_batch_size=4"], accumulation), "1");
    assert_eq!(resolved(&dir, "lora", &["--set", "train.gradient_accumulation_steps=5"], accumulation), "5");
}

/// On resume "auto" keeps the checkpoint's number of rows, also with other ranks.
#[test]
fn a_resumed_run_keeps_the_rows_of_its_steps() {
    let dir = test_dir(24);
    let sets = ["--set", "checkpoint.save_steps=2", "--set", "train.epochs=1"];
    let four = ["--set", "train.gradient_accumulation_steps=4"];
    ends(&dir, &words("lora", &[&sets[..], &four].concat()), 0);
    let losses = |output: &str| -> Vec<f64> {
        metrics(&dir.path(output), "loss").iter().map(|step| number(step, "loss")).collect()
    };
    for (output, ranks) in [("one", "1"), ("two", "2")] {
        std::fs::create_dir(dir.path(output)).unwrap();
        copy_folder(&dir.path("out/checkpoint-4"), &dir.path(&format!("{output}/checkpoint-4")));
        let args = words("lora", &[&sets[..], &["--ranks", ranks, "--resume"]].concat());
        let args: Vec<_> = args.into_iter().map(|arg| if arg == "out" { output } else { arg }).collect();
        ends(&dir, &args, 0);
        let (actual, wanted) = (losses(output), losses("out"));
        let near = actual.iter().zip(&wanted[4..]).all(|(actual, wanted)| (actual - wanted).abs() < 1e-4);
        assert!(actual.len() == 2 && near, "{actual:?} {wanted:?}");
    }
}

#[test]
fn a_global_batch_is_the_same_on_any_number_of_ranks() {
    let dir = test_dir(24);
    let sets = ["--set", "train.global_batch_size=8", "--set", "train.max_steps=3"];
    let mut all = Vec::new();
    for (output, ranks, accumulation) in [("one", "1", "8"), ("two", "2", "4"), ("four", "4", "2")] {
        let args = words("lora", &[&sets[..], &["--ranks", ranks]].concat());
        let args: Vec<_> = args.into_iter().map(|arg| if arg == "out" { output } else { arg }).collect();
        ends(&dir, &args, 0);
        let recipe = std::fs::read_to_string(dir.path(output).join("recipe.toml")).unwrap();
        assert!(recipe.contains("\nglobal_batch_size = 8\n"), "{recipe}");
        let (first, _) = recipe.split_once('\n').unwrap();
        let share = format!("gradient_accumulation_steps was {accumulation} on each rank.");
        assert!(first.starts_with('#') && first.ends_with(&share), "{recipe}");
        let losses: Vec<f64> =
            metrics(&dir.path(output), "loss").iter().map(|step| number(step, "loss")).collect();
        all.push(losses);
    }
    assert_eq!(all[0].len(), 3);
    for other in &all[1..] {
        assert!(all[0].iter().zip(other).all(|(one, other)| (one - other).abs() < 1e-4), "{all:?}");
    }
    let uneven = ["--set", "train.global_batch_size=10", "--set", "train.micro_batch_size=2", "--ranks", "2"];
    let [said, _] = ends(&dir, &words("lora", &[&uneven[..], &["--dry-run"]].concat()), 1);
    assert!(
        said.contains(
            "error: cannot make steps of 10 rows
  caused by: `train.global_batch_size` is 10; accepted: multiples of 4, which is `train.micro_batch_size` 2 x 2 ranks; nearest: 8 and 12
hint: write one of the nearest (8 and 12), or another `train.micro_batch_size`"
        ),
        "{said}"
    );
}

/// The recipe written by two ranks gives the same steps on one rank, from the start and from a
/// checkpoint.
#[test]
fn the_recipe_of_a_global_batch_repeats_and_resumes_on_other_ranks() {
    let dir = test_dir(24);
    let sets = [
        "--ranks",
        "2",
        "--set",
        "train.global_batch_size=8",
        "--set",
        "train.max_steps=2",
        "--set",
        "checkpoint.save_steps=1",
    ];
    ends(&dir, &words("lora", &sets), 0);
    ends(&dir, &["--recipe", "out/recipe.toml", "--output", "again"], 0);
    let values = |output: &str, key: &str| -> Vec<f64> {
        metrics(&dir.path(output), "loss").iter().map(|step| number(step, key)).collect()
    };
    let tokens = values("out", "tokens");
    assert_eq!(tokens.len(), 2);
    assert_eq!(values("again", "tokens"), tokens);
    let near = values("again", "loss").iter().zip(values("out", "loss")).all(|(a, b)| (a - b).abs() < 1e-4);
    assert!(near, "{:?} {:?}", values("again", "loss"), values("out", "loss"));
    ends(&dir, &["--resume", "--output", "out", "--steps", "3"], 0);
    ends(&dir, &["--recipe", "again/recipe.toml", "--output", "longer", "--steps", "3"], 0);
    assert_eq!(values("out", "tokens"), values("longer", "tokens"));
    for output in ["out", "again", "longer"] {
        let recipe = std::fs::read_to_string(dir.path(output).join("recipe.toml")).unwrap();
        assert!(recipe.contains("\nglobal_batch_size = 8\n"), "{recipe}");
    }
}

#[test]
fn a_run_that_would_learn_nothing_is_refused() {
    let dir = test_dir(8);
    let one = ["--set", "train.epochs=1", "--set", "train.gradient_accumulation_steps=8"];
    let warm_up = [&one[..], &["--set", "scheduler.warmup_steps=1"]].concat();
    for more in [&["--dry-run"][..], &[]] {
        let [said, _] = ends(&dir, &words("lora", &[&warm_up[..], more].concat()), 1);
        assert!(
            said.ends_with(
                "error: this run would learn nothing: its 8 rows make one step, and that is warm-up
hint: try `--set train.gradient_accumulation_steps=1 --set train.epochs=3`\n"
            ),
            "{said}"
        );
        assert!(!dir.path("out").exists());
    }
    // The built-in recipes' ratio is rounded down.
    ends(&dir, &words("lora", &one), 0);
    assert!(metrics(&dir.path("out"), "loss").iter().all(|step| number(step, "learning_rate") > 0.0));
}

#[test]
fn checkpoints_come_by_default_and_more_epochs_go_on_from_the_end() {
    let dir = test_dir(6);
    let two = ["--set", "train.gradient_accumulation_steps=2"];
    let run = |epochs: &str, save: &str, output: &str, more: &[&str]| {
        let (epochs, save) = (format!("train.epochs={epochs}"), format!("checkpoint.save_steps={save}"));
        let args = [&two[..], &["--set", &epochs, "--set", &save, "--set", "checkpoint.keep_last=9"], more];
        let args = args.concat();
        let args = words("lora", &args).into_iter().map(|arg| if arg == "out" { output } else { arg });
        ends(&dir, &args.collect::<Vec<_>>(), 0)
    };
    run("2", "auto", "out", &[]);
    assert_eq!(checkpoints(&dir, "out"), [3, 6].into());
    let [said, _] = run("3", "auto", "out", &["--resume"]);
    assert!(said.contains("resuming from out/checkpoint-6"), "{said}");
    assert_eq!((checkpoints(&dir, "out"), steps(&dir, "out")), ([3, 6, 9].into(), 9));
    for (save, epochs, wanted) in
        [("epoch", "1.5", &[3, 5][..]), ("never", "2", &[]), ("2", "2", &[2, 4, 6]), ("4", "2", &[4])]
    {
        let output = format!("out-{save}");
        run(epochs, save, &output, &[]);
        assert_eq!(checkpoints(&dir, &output), wanted.iter().copied().collect(), "{save}");
    }
}

/// Uses a planted clock, so that the result does not depend on the machine: a step takes ten
/// minutes on one rank.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_slow_epoch_is_saved_every_thirty_minutes() {
    let dir = test_dir(14);
    for (output, save, wanted) in [("auto", "auto", &[3, 6, 7][..]), ("epoch", "epoch", &[7])] {
        let save = format!("checkpoint.save_steps={save}");
        let more =
            ["--ranks", "2", "--set", "train.epochs=1", "--set", "checkpoint.keep_last=9", "--set", &save];
        let args: Vec<_> =
            words("lora", &more).into_iter().map(|arg| if arg == "out" { output } else { arg }).collect();
        let mut command = dir.command(&args);
        command.env("FINETUNE_CLOCK", "planted").env("FINETUNE_FAULT", "1:data:slow=600000ms");
        let done = command.output().unwrap();
        assert!(done.status.success(), "{}", dir.told(&done.stderr));
        assert_eq!(checkpoints(&dir, output), wanted.iter().copied().collect(), "{save}");
    }
}

#[test]
fn rows_are_as_long_as_the_model_allows() {
    let dir = test_dir(8);
    let path = dir.path("model/config.json");
    let mut config: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    for (positions, wanted) in [(60, "60"), (4096, "2048")] {
        config["max_position_embeddings"] = json!(positions);
        std::fs::write(&path, config.to_string()).unwrap();
        assert_eq!(resolved(&dir, "lora", &[], "max_seq_len"), wanted);
    }
    assert_eq!(resolved(&dir, "lora", &["--set", "data.max_seq_len=3000"], "max_seq_len"), "3000");
}

#[test]
fn a_constant_learning_rate_works_with_built_in_recipes() {
    let dir = test_dir(8);
    let [said, recipe] = ends(&dir, &words("lora", &["--set", "scheduler.kind=constant", "--dry-run"]), 0);
    let line = "lora (built in):29:16: `scheduler.warmup_ratio` has no effect with `kind = \"constant\"` \
                (--set scheduler.kind=constant), and is ignored";
    assert_eq!(said.matches("warmup_ratio").count(), 1, "{said}");
    assert!(
        said.contains(line) && recipe.contains("kind = \"constant\"") && !recipe.contains("warmup_ratio"),
        "{said}"
    );
}

#[test]
fn settings_that_are_seldom_meant_are_said() {
    let dir = test_dir(8);
    let said = |recipe: &str, more: &[&str]| {
        let [said, _] = ends(&dir, &words(recipe, &[more, &["--dry-run"]].concat()), 0);
        said.lines().filter_map(|line| Some(line.strip_prefix("warning: ")?.to_owned())).collect::<Vec<_>>()
    };
    assert_eq!(said("lora", &[]), [""; 0], "24 steps of the recipe");
    for (recipe, set, wanted) in [
        (
            "lora",
            "optimizer.learning_rate=0.01",
            "the learning rate 1e-2 is 50 times the usual for an adapter, 2e-4",
        ),
        (
            "full",
            "optimizer.learning_rate=2e-4",
            "the learning rate 2e-4 is 10 times the usual for all weights, 2e-5",
        ),
        (
            "lora",
            "adapter.r=1000",
            "`adapter.r` is 1000, above the smaller side of 14 of 14 layers that it adapts",
        ),
        ("lora", "train.epochs=1", "this run has only 8 steps"),
        (
            "lora",
            "scheduler.warmup_ratio=0.5",
            "`scheduler.warmup_ratio` is 0.5, and a ratio gives a tenth of the steps",
        ),
    ] {
        let actual = said(recipe, &["--set", set]);
        assert!(actual.len() == 1 && actual[0].starts_with(wanted), "{set}: {actual:?}");
    }
    let late = ["--eval-dataset", "rows.jsonl", "--set", "eval.steps=1000"];
    let actual = said("lora", &late);
    assert!(
        actual.len() == 2
            && actual[0].starts_with("8 of 8 held-out rows equal training rows")
            && actual[1].starts_with("`eval.steps` is 1000, beyond the 24 steps"),
        "{actual:?}"
    );
    assert_eq!(said("lora", &["--eval-dataset", "rows.jsonl", "--set", "eval.steps=24"]), actual[..1]);
}

/// The model memorizes one text, and its loss on another one rises.
#[test]
fn a_held_out_loss_that_rises_is_said() {
    let dir = test_dir(1);
    dir.write("held.jsonl", &(json!({ "text": "zebras fly 1234567 quickly" }).to_string() + "\n"));
    let more = ["--eval-dataset", "held.jsonl", "--set", "eval.steps=10", "--set", "train.max_steps=100"];
    let rate = ["--set", "optimizer.learning_rate=1e-2"];
    let [said, _] = ends(&dir, &words("lora", &[&more[..], &rate].concat()), 0);
    assert!(
        said.contains("warning: step ")
            && said.contains(": the held-out loss has risen 3 evaluations in a row"),
        "{said}"
    );
}

/// The adapter's share of the output is too small for f32, on one repeated row.
#[test]
fn a_dead_model_ends_the_run() {
    let dir = test_dir(1);
    let dead = ["--set", "adapter.lora_alpha=1e-60", "--set", "train.max_steps=20"];
    for ranks in ["1", "2"] {
        let output = format!("out-{ranks}");
        let args =
            words("lora", &[&dead[..], &["--ranks", ranks, "--set", "train.global_batch_size=2"]].concat());
        let args: Vec<_> = args.into_iter().map(|arg| if arg == "out" { &output } else { arg }).collect();
        let [said, _] = ends(&dir, &args, 4);
        assert!(
            said.contains("the model is dead at step 10: it learns nothing\n  caused by: the loss was "),
            "{said}"
        );
        assert!(
            !said.contains("saved") && !dir.path(&output).join("adapter_model.safetensors").exists(),
            "{said}"
        );
    }
}
