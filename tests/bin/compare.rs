//! `finetune compare`: runs side by side.

use insta::assert_snapshot;
use serde_json::Value;

use crate::golden_run::metrics;
use crate::test_dir::{TestDir, into, lora};

/// Writes a run's folder: a recipe and lines of metrics.
fn write_run(dir: &TestDir, name: &str, recipe: &str, metrics: &[&str]) {
    std::fs::create_dir_all(dir.path(name)).unwrap();
    dir.write(&format!("{name}/recipe.toml"), recipe);
    dir.write(
        &format!("{name}/metrics.jsonl"),
        &metrics.iter().map(|line| format!("{line}\n")).collect::<String>(),
    );
}

/// The metrics line of a step that took 2 s with a peak of `mib` MiB.
fn step(step: u64, loss: f64, mib: u64) -> String {
    let bytes = mib << 20;
    format!(
        "{{\"step\":{step},\"loss\":{loss},\"grad_norm\":1.0,\"tokens\":9,\"step_secs\":2.0,\"forward_secs\":2.0,\"peak_bytes\":{bytes}}}"
    )
}

fn eval(step: u64, loss: f64) -> String {
    format!("{{\"step\":{step},\"eval_loss\":{loss},\"eval_tokens\":90}}")
}

/// Two runs: a LoRA run with its best evaluation in the middle, and a full run that answers some
/// rows exactly.
fn two_runs(dir: &TestDir) {
    let common = "[train]\nseed = 1\n[data]\ntrain = [\"a.jsonl\"]\neval = [\"b.jsonl\"]\n";
    let lora =
        format!("{common}[adapter]\nr = 4\n[log]\nevery_steps = 1\n[optimizer]\nlearning_rate = 0.001\n");
    let lines = [eval(0, 3.0), step(1, 2.5, 100), eval(1, 1.5), step(2, 1.25, 200), eval(2, 2.0)];
    write_run(dir, "a/first", &lora, &lines.each_ref().map(String::as_str));
    let full = format!("{common}[log]\nevery_steps = 7\n[optimizer]\nlearning_rate = 0.01\n");
    let exact = "{\"step\":1,\"eval_loss\":1.75,\"eval_tokens\":90,\"eval_exact_match\":0.25}";
    write_run(dir, "a/second", &full, &[&eval(0, 3.0), &step(1, 2.0, 1024), exact]);
}

#[test]
fn runs_stand_beside_each_other() {
    let dir = TestDir::new();
    two_runs(&dir);
    // Equal keys (the seed) and harmless ones (logging) are omitted.
    assert_snapshot!(dir.said(&["compare", "a/first", "a/second"]), @"
    run     [adapter]  optimizer.learning_rate  steps  training loss  held-out before     held-out best    held-out last  exact match   time  peak memory  complete
    first        true                    0.001      2         1.2500           3.0000  1.5000 at step 1 *         2.0000            –  4.0 s      200 MiB        no
    second      false                     0.01      1         2.0000           3.0000  1.7500 at step 1           1.7500       25.0 %  2.0 s     1.00 GiB        no
    * the lowest held-out loss after the first step
    ");
    let json: Value = serde_json::from_str(&dir.said(&["compare", "--json", "a/first", "a/second"])).unwrap();
    let first = serde_json::json!({
        "name": "first", "folder": "a/first", "steps": 2, "complete": false, "best": true,
        "recipe": { "[adapter]": true, "optimizer.learning_rate": 0.001 },
        "training_loss": 1.25, "held_out_loss_before": 3.0, "held_out_loss_best": 1.5,
        "held_out_loss_best_step": 1, "held_out_loss_last": 2.0, "exact_match": null,
        "secs": 4.0, "peak_bytes": 200 << 20,
    });
    assert_eq!(json["runs"][0], first);
    assert_eq!((&json["runs"][1]["exact_match"], &json["runs"][1]["best"]), (&0.25.into(), &false.into()));
    assert_eq!(json["warnings"], serde_json::json!([]));
}

/// Figures of real runs equal those of their logs; a finished run counts as complete.
#[test]
fn figures_are_those_of_the_logs() {
    let dir = TestDir::new();
    let held_out = ["--eval-dataset", "rows.jsonl", "--set", "train.max_steps=2"];
    for (output, rank) in [("one", "4"), ("two", "8")] {
        dir.said(&into(output, lora(&[&held_out[..], &["--lora-r", rank]].concat())));
    }
    let json: Value = serde_json::from_str(&dir.said(&["compare", "one", "two", "--json"])).unwrap();
    for (run, (name, rank)) in json["runs"].as_array().unwrap().iter().zip([("one", 4), ("two", 8)]) {
        let lines = metrics(&dir.path(name), "step");
        let evals: Vec<&Value> = lines.iter().filter(|line| line.get("eval_loss").is_some()).collect();
        let steps: Vec<&Value> = lines.iter().filter(|line| line.get("loss").is_some()).collect();
        assert_eq!(run["name"], name);
        assert_eq!(run["recipe"], serde_json::json!({ "adapter.r": rank }), "{run}");
        assert_eq!((&run["steps"], &run["complete"]), (&Value::from(2), &Value::from(true)), "{run}");
        assert_eq!(run["training_loss"], steps[1]["loss"]);
        assert_eq!(run["held_out_loss_before"], evals[0]["eval_loss"]);
        assert_eq!(run["held_out_loss_last"], evals.last().unwrap()["eval_loss"]);
        assert_eq!(run["peak_bytes"], steps[1]["peak_bytes"]);
    }
}

/// Replaces the output folder of `args`.
#[test]
fn a_page_has_the_table_and_the_curves_of_all_runs() {
    let dir = TestDir::new();
    two_runs(&dir);
    let compare = ["compare", "a/first", "a/second", "--html", "runs.html"];
    let said = dir.said(&compare);
    assert!(said.contains("wrote runs.html"), "{said}");
    let page = std::fs::read_to_string(dir.path("runs.html")).unwrap();
    assert!(!page.contains("<script") && page.contains("script-src 'none'"), "{page}");
    for text in
        ["first", "second", "adapter", "0.001", "1.5000 at step 1 *", "Training loss", "Held-out loss"]
    {
        assert!(page.contains(text), "{text}: {page}");
    }
    // Each run has one curve in both charts, in its legend's colour.
    for class in ["s0", "s1"] {
        assert_eq!(page.matches(&format!("<polyline class=\"{class}\"")).count(), 2, "{page}");
    }
    // An older page is replaced; other files are not.
    dir.said(&compare);
    dir.write("runs.html", "mine");
    let refused = dir.refused(&compare);
    assert!(
        refused.contains("a file of that name exists, and it is not a page of `finetune compare`"),
        "{refused}"
    );
    assert_eq!(std::fs::read_to_string(dir.path("runs.html")).unwrap(), "mine");
}

/// Folder names are text in the page, not markup.
#[test]
fn a_page_escapes_the_names_of_runs() {
    let dir = TestDir::new();
    two_runs(&dir);
    std::fs::rename(dir.path("a/first"), dir.path("a/<b>x")).unwrap();
    dir.said(&["compare", "a/<b>x", "a/second", "--html", "runs.html"]);
    let page = std::fs::read_to_string(dir.path("runs.html")).unwrap();
    assert!(!page.contains("<b>") && page.contains("&lt;b&gt;x"), "{page}");
}

#[test]
fn losses_of_other_rows_are_warned_of() {
    let dir = TestDir::new();
    let lines = [step(1, 2.0, 1), eval(1, 1.0)];
    let lines = lines.each_ref().map(String::as_str);
    let others = eval(1, 1.0).replace("90", "91");
    for (name, recipe, lines) in [
        ("file", "[data]\neval = [\"b.jsonl\"]\n", lines),
        ("other", "[data]\neval = [\"c.jsonl\"]\n", lines),
        ("share", "[data]\neval_split = 0.1\n[train]\nseed = 1\n", lines),
        ("seed", "[data]\neval_split = 0.1\n[train]\nseed = 2\n", lines),
        ("masked", "[data]\neval = [\"b.jsonl\"]\ntrain_on = \"all\"\n", [lines[0], &others]),
        ("rate", "[data]\neval = [\"b.jsonl\"]\n[train]\nseed = 2\n", lines),
    ] {
        write_run(&dir, name, recipe, &lines);
    }
    let warned = |runs: &[&str]| {
        let said = dir.said(&[&["compare"], runs].concat());
        said.lines().filter(|line| line.starts_with("warning: ")).map(str::to_owned).collect::<Vec<_>>()
    };
    let rows = |keys: &str| {
        vec![format!("warning: the held-out losses are not of the same rows: the runs differ in {keys}")]
    };
    assert_eq!(warned(&["file", "other"]), rows("data.eval"));
    assert_eq!(warned(&["file", "share", "other"]), rows("data.eval, data.eval_split, train.seed"));
    assert_eq!(warned(&["share", "seed"]), rows("train.seed"));
    assert_eq!(
        warned(&["file", "masked"]),
        ["warning: the held-out losses are of different numbers of tokens: 90, 91"]
    );
    assert_eq!(warned(&["file", "rate"]), [""; 0]);
    let json: Value = serde_json::from_slice(
        &dir.command(&["compare", "share", "seed", "--json"]).output().unwrap().stdout,
    )
    .unwrap();
    assert_eq!(json["warnings"].as_array().unwrap().len(), 1, "{json}");
}

#[test]
fn a_folder_that_is_no_run_is_refused() {
    let dir = TestDir::new();
    two_runs(&dir);
    std::fs::create_dir(dir.path("empty")).unwrap();
    assert_snapshot!(dir.refused(&["compare", "a/first", "nowhere"]), @"
    error: cannot compare nowhere
      caused by: there is no such folder
      caused by: accepted: output folders of training runs, as `--output` named them
    hint: name folders that hold metrics.jsonl, such as `finetune compare out/r4 out/r8`
    ");
    assert_snapshot!(dir.refused(&["compare", "empty", "a/first"]), @"
    error: cannot compare empty
      caused by: it holds neither .finetune/run.json nor metrics.jsonl
      caused by: accepted: output folders of training runs, as `--output` named them
    hint: name folders that hold metrics.jsonl, such as `finetune compare out/r4 out/r8`
    ");
    std::fs::create_dir(dir.path("log")).unwrap();
    std::fs::copy(dir.path("a/first/metrics.jsonl"), dir.path("log/metrics.jsonl")).unwrap();
    let error = dir.refused(&["compare", "log", "a/first"]);
    assert!(error.contains("caused by: it holds no recipe.toml\n"), "{error}");
    assert!(!error.contains("has no line of a run"), "{error}");
    dir.write("log/metrics.jsonl", "");
    dir.write("log/recipe.toml", "");
    let error = dir.refused(&["compare", "log", "a/first"]);
    assert!(error.contains("caused by: its metrics.jsonl has no line of a run\n"), "{error}");
    assert!(!error.contains("it holds no recipe.toml"), "{error}");
    assert_snapshot!(dir.refused(&["compare", "a/first", "rows.jsonl"]), @"
    error: cannot compare rows.jsonl
      caused by: it is a file
      caused by: accepted: output folders of training runs, as `--output` named them
    hint: name folders that hold metrics.jsonl, such as `finetune compare out/r4 out/r8`
    ");
    assert_snapshot!(dir.refused(&["compare", "a/first", "a/second", "./a/first"]), @"
    error: cannot compare ./a/first with itself
      caused by: the command names the folder twice; accepted: different output folders
    hint: name each run once
    ");
    let one = dir.command(&["compare", "a/first"]).output().unwrap();
    assert_eq!(one.status.code(), Some(2), "{}", dir.told(&one.stderr));
    let many = dir.command(&[&["compare"][..], &["a/first"; 21]].concat()).output().unwrap();
    assert_eq!(many.status.code(), Some(2), "{}", dir.told(&many.stderr));
}
