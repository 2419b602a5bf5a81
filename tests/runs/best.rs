//! `eval.keep_best` and `eval.patience`: a run leaves the weights of its best evaluation, keeps
//! their checkpoint, and ends early if it does not improve. Killed and resumed runs do the same.

use serde_json::Value;

use crate::test_dir::TestDir;

/// A folder with four rows to memorize in `few.jsonl`, and held-out rows in `others.jsonl`.
fn test_dir() -> TestDir {
    let dir = TestDir::new();
    let rows = std::fs::read_to_string(dir.path("rows.jsonl")).unwrap();
    let rows: Vec<&str> = rows.lines().collect();
    dir.write("few.jsonl", &rows[..4].join("\n"));
    dir.write("others.jsonl", &rows[rows.len() - 8..].join("\n"));
    dir
}

/// A run of at most 24 steps, evaluated every second step, whose best evaluation is in the middle.
fn words<'a>(output: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    of_recipe("lora", output, more)
}

fn of_recipe<'a>(recipe: &'a str, output: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["--model", "model", "--dataset", "few.jsonl", "--eval-dataset", "others.jsonl"];
    args.extend(["--recipe", recipe, "--output", output]);
    for pair in [
        "data.max_seq_len=96",
        "data.packing=false",
        "data.shuffle=false",
        "train.gradient_accumulation_steps=1",
        "scheduler.kind=constant",
        "log.tensorboard=false",
        "checkpoint.save_steps=6",
        "checkpoint.keep_last=1",
        "eval.steps=2",
        "train.max_steps=24",
        "optimizer.learning_rate=1e-2",
    ] {
        args.extend(["--set", pair]);
    }
    args.extend(more);
    args
}

const KEEP_BEST: [&str; 2] = ["--set", "eval.keep_best=true"];

/// Returns step and loss of each evaluation after the first step.
fn evaluations(dir: &TestDir, output: &str) -> Vec<(u64, f64)> {
    let text = std::fs::read_to_string(dir.path(output).join("metrics.jsonl")).unwrap();
    let entries = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let evaluated = entries.filter_map(|entry| Some((entry["step"].as_u64()?, entry["eval_loss"].as_f64()?)));
    evaluated.filter(|(step, _)| *step > 0).collect()
}

fn best_of(evaluations: &[(u64, f64)]) -> (u64, f64) {
    *evaluations.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap()
}

fn adapter(dir: &TestDir, output: &str) -> Vec<u8> {
    std::fs::read(dir.path(output).join("adapter_model.safetensors")).unwrap()
}

fn checkpoints(dir: &TestDir, output: &str) -> Vec<String> {
    let entries = std::fs::read_dir(dir.path(output)).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("checkpoint-")).collect();
    names.sort();
    names
}

/// Checks that the result `[flag, folder]` of a run has the held-out loss `wanted`.
fn assert_evaluates_to(dir: &TestDir, [flag, folder]: [&str; 2], wanted: f64) {
    let recipe = format!("{folder}/recipe.toml");
    let said = dir.said(&["eval", flag, folder, "--dataset", "others.jsonl", "--recipe", &recipe]);
    let loss = said.split_whitespace().skip_while(|word| *word != "loss").nth(1).unwrap();
    let loss: f64 = loss.parse().unwrap();
    // The result may be stored in another dtype than the trained weights.
    assert!((loss / wanted - 1.0).abs() < 1e-4, "{loss} and not {wanted}: {said}");
}

/// Keeping the best changes no step; the best weights equal those of a run that ends at that step.
#[test]
fn the_best_weights_are_what_is_left() {
    let dir = test_dir();
    let plain = dir.said(&words("plain", &[]));
    let said = dir.said(&words("best", &KEEP_BEST));
    let evaluated = evaluations(&dir, "best");
    assert_eq!(evaluated, evaluations(&dir, "plain"), "keeping the best changes no number");
    assert_eq!(
        evaluated.iter().map(|(step, _)| *step).collect::<Vec<_>>(),
        (2..=24).step_by(2).collect::<Vec<_>>()
    );
    let ((step, loss), last) = (best_of(&evaluated), evaluated[11].1);
    assert!(step < 24 && loss < last, "{evaluated:?}");
    let line = format!(
        "best: step {step}, held-out loss {loss:.4}: these weights are saved; last: step 24, {last:.4}, in checkpoint-24\n"
    );
    assert!(said.contains(&line) && !plain.contains("best: "), "{said}");
    assert_eq!(checkpoints(&dir, "best"), ["checkpoint-24".to_owned(), format!("checkpoint-{step}")]);
    // The learning rate is constant, so a run that ends at the best step took the same steps.
    let steps = format!("train.max_steps={step}");
    dir.said(&words("short", &["--set", &steps]));
    assert!(adapter(&dir, "best") == adapter(&dir, "short"));
    assert!(adapter(&dir, "best") != adapter(&dir, "plain"));
    assert_evaluates_to(&dir, ["--adapter", "best"], loss);
    let card = std::fs::read_to_string(dir.path("best/README.md")).unwrap();
    assert!(card.contains(&format!("The weights are those of step {step}, which did best")), "{card}");
    // A finished run reports that it is finished.
    let ended = dir.said(&["--resume", "--output", "best"]);
    assert!(ended.contains("nothing is left to do"), "{ended}");
}

/// Two ranks, with an adapter under ddp and with fully trained, sharded weights.
#[test]
fn ranks_keep_the_best_alike() {
    let dir = test_dir();
    for (recipe, strategy) in [("lora", "ddp"), ("full", "fsdp")] {
        let strategy = format!("parallel.strategy={strategy}");
        let rate = "optimizer.learning_rate=3e-3";
        let ranks = ["--ranks", "2", "--set", &strategy, "--set", rate];
        let said = dir.said(&of_recipe(recipe, recipe, &[&KEEP_BEST[..], &ranks].concat()));
        let (step, loss) = best_of(&evaluations(&dir, recipe));
        assert!(said.contains(&format!("best: step {step}, ")), "{said}");
        let result = if recipe == "full" { ["--model", recipe] } else { ["--adapter", recipe] };
        assert_evaluates_to(&dir, result, loss);
    }
}

#[test]
fn a_run_that_gets_no_better_ends_early() {
    let dir = test_dir();
    let said = dir.said(&words("out", &["--set", "eval.patience=2"]));
    let evaluated = evaluations(&dir, "out");
    let (step, loss) = best_of(&evaluated);
    let last = step + 4;
    assert_eq!(evaluated.last().unwrap().0, last, "{evaluated:?}");
    let line = format!(
        "ended early, after step {last} of 24: 2 evaluations since step {step} did not get below its held-out loss of {loss:.4}"
    );
    assert!(said.contains(&line), "{said}");
    assert!(said.contains(&format!("best: step {step}, ")), "{said}");
    let ended = dir.said(&["--resume", "--output", "out"]);
    assert!(ended.contains("nothing is left to do"), "{ended}");
    // With more patience it continues as if it had had it from the first step.
    dir.said(&["--resume", "--output", "out", "--set", "eval.patience=100"]);
    dir.said(&words("whole", &["--set", "eval.patience=100"]));
    assert_eq!(evaluations(&dir, "out"), evaluations(&dir, "whole"));
    assert!(adapter(&dir, "out") == adapter(&dir, "whole"));
}

/// A killed run resumes with the best evaluation from before the kill.
#[test]
fn a_killed_run_goes_on_with_its_best() {
    let dir = test_dir();
    dir.said(&words("whole", &KEEP_BEST));
    // Killed between the best and the last evaluation, and between the last checkpoint and the
    // result.
    for (name, variable, value) in
        [("middle", "FINETUNE_FAULT", "0:forward:20:exit"), ("end", "FINETUNE_KILL_AT", "last_step")]
    {
        let done = dir.command(&words(name, &KEEP_BEST)).env(variable, value).output().unwrap();
        assert!(!done.status.success(), "{}", dir.told(&done.stderr));
        assert!(!dir.path(name).join("adapter_model.safetensors").exists());
        dir.said(&words(name, &[&KEEP_BEST[..], &["--resume"]].concat()));
        assert!(adapter(&dir, name) == adapter(&dir, "whole"), "{name}");
        assert_eq!(checkpoints(&dir, name), checkpoints(&dir, "whole"));
    }
    // If the best checkpoint is missing, finetune ignores its evaluation and prints that.
    std::fs::remove_dir_all(dir.path("end").join(&checkpoints(&dir, "end")[1])).unwrap();
    std::fs::remove_file(dir.path("end/adapter_model.safetensors")).unwrap();
    let said = dir.said(&words("end", &[&KEEP_BEST[..], &["--resume"]].concat()));
    assert!(said.contains("are in no checkpoint in end: the best is chosen from here on"), "{said}");
    assert!(said.contains("best: step 24, the last, "), "{said}");
}

/// A finished run that is extended keeps its best evaluation, whose checkpoint still exists.
#[test]
fn a_run_that_is_trained_longer_knows_its_best() {
    let dir = test_dir();
    dir.said(&words("whole", &KEEP_BEST));
    let (step, _) = best_of(&evaluations(&dir, "whole"));
    let steps = format!("train.max_steps={step}");
    let short = dir.said(&words("out", &[&KEEP_BEST[..], &["--set", &steps]].concat()));
    assert!(short.contains(&format!("best: step {step}, the last, ")), "{short}");
    dir.said(&words("out", &[&KEEP_BEST[..], &["--resume"]].concat()));
    assert!(adapter(&dir, "out") == adapter(&dir, "whole"));
    assert_eq!(checkpoints(&dir, "out"), checkpoints(&dir, "whole"));
    // Another folder has no checkpoint of those steps, so only its own evaluations count.
    let from = format!("out/checkpoint-{}", 24);
    let moved = dir.said(&words(
        "other",
        &[&KEEP_BEST[..], &["--resume", &from, "--set", "train.max_steps=28"]].concat(),
    ));
    assert!(!moved.contains("is missing or damaged") && moved.contains("best: step 2"), "{moved}");
}

#[test]
fn what_keeping_the_best_needs_is_said() {
    let dir = test_dir();
    let few = ["--model", "model", "--dataset", "few.jsonl", "--recipe", "lora", "--output", "out"];
    let none = dir.refused(&[&few[..], &["--set", "eval.patience=2"]].concat());
    assert!(none.contains("`eval.patience` needs held-out rows"), "{none}");
    let at_end = dir.refused(&words("out", &["--set", "eval.patience=2", "--set", "eval.at_end=false"]));
    assert!(
        at_end.contains("`eval.at_end` is false, but `patience` needs the evaluation of the last weights"),
        "{at_end}"
    );
    let never = ["--set", "checkpoint.save_steps=never"];
    let never = dir.refused(&words("out", &[&KEEP_BEST[..], &never].concat()));
    assert!(
        never.contains("`eval.keep_best` needs checkpoints, but `checkpoint.save_steps` is \"never\""),
        "{never}"
    );
    let seldom = dir.refused(&words("out", &[&KEEP_BEST[..], &["--set", "eval.steps=never"]].concat()));
    assert!(seldom.contains("`eval.keep_best` has no effect with `steps = \"never\"`"), "{seldom}");
    // `steps = "auto"` evaluates once an epoch.
    let said = dir.said(&words(
        "out",
        &[&KEEP_BEST[..], &["--set", "eval.steps=auto", "--set", "train.max_steps=12"]].concat(),
    ));
    assert_eq!(
        evaluations(&dir, "out").iter().map(|(step, _)| *step).collect::<Vec<_>>(),
        [4, 8, 12],
        "{said}"
    );
}
