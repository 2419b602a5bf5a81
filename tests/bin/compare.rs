//! `finetune compare` and `--sweep`: runs side by side, and one run for each value of a key.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use insta::assert_snapshot;
use serde_json::Value;

use crate::faulty_run::watched;
use crate::place::{Place, lora};

/// Time limit of a sweep, so that a hang fails the test.
const PATIENCE: Duration = Duration::from_secs(500);

/// Writes a run's folder: a recipe and lines of metrics.
fn write_run(place: &Place, name: &str, recipe: &str, metrics: &[&str]) {
    std::fs::create_dir_all(place.path(name)).unwrap();
    place.write(&format!("{name}/recipe.toml"), recipe);
    place.write(
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
fn two_runs(place: &Place) {
    let common = "[train]\nseed = 1\n[data]\ntrain = [\"a.jsonl\"]\neval = [\"b.jsonl\"]\n";
    let lora =
        format!("{common}[adapter]\nr = 4\n[log]\nevery_steps = 1\n[optimizer]\nlearning_rate = 0.001\n");
    let lines = [eval(0, 3.0), step(1, 2.5, 100), eval(1, 1.5), step(2, 1.25, 200), eval(2, 2.0)];
    write_run(place, "a/first", &lora, &lines.each_ref().map(String::as_str));
    let full = format!("{common}[log]\nevery_steps = 7\n[optimizer]\nlearning_rate = 0.01\n");
    let exact = "{\"step\":1,\"eval_loss\":1.75,\"eval_tokens\":90,\"eval_exact_match\":0.25}";
    write_run(place, "a/second", &full, &[&eval(0, 3.0), &step(1, 2.0, 1024), exact]);
}

#[test]
fn runs_stand_beside_each_other() {
    let place = Place::new();
    two_runs(&place);
    // Equal keys (the seed) and harmless ones (logging) are omitted.
    assert_snapshot!(place.said(&["compare", "a/first", "a/second"]), @"
    run     [adapter]  optimizer.learning_rate  steps  training loss  held-out before     held-out best    held-out last  exact match   time  peak memory  complete
    first        true                    0.001      2         1.2500           3.0000  1.5000 at step 1 *         2.0000            –  4.0 s      200 MiB        no
    second      false                     0.01      1         2.0000           3.0000  1.7500 at step 1           1.7500       25.0 %  2.0 s     1.00 GiB        no
    * the lowest held-out loss after the first step
    ");
    let json: Value =
        serde_json::from_str(&place.said(&["compare", "--json", "a/first", "a/second"])).unwrap();
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
    let place = Place::new();
    let held_out = ["--eval-dataset", "rows.jsonl", "--set", "train.max_steps=2"];
    for (output, rank) in [("one", "4"), ("two", "8")] {
        place.said(&into(output, lora(&[&held_out[..], &["--lora-r", rank]].concat())));
    }
    let json: Value = serde_json::from_str(&place.said(&["compare", "one", "two", "--json"])).unwrap();
    for (run, (name, rank)) in json["runs"].as_array().unwrap().iter().zip([("one", 4), ("two", 8)]) {
        let lines = lines_of(&place.path(name));
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
fn into<'a>(output: &'a str, mut args: Vec<&'a str>) -> Vec<&'a str> {
    args.iter_mut().filter(|word| **word == "out").for_each(|word| *word = output);
    args
}

fn lines_of(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_page_has_the_table_and_the_curves_of_all_runs() {
    let place = Place::new();
    two_runs(&place);
    let compare = ["compare", "a/first", "a/second", "--html", "runs.html"];
    let said = place.said(&compare);
    assert!(said.contains("wrote runs.html"), "{said}");
    let page = std::fs::read_to_string(place.path("runs.html")).unwrap();
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
    place.said(&compare);
    place.write("runs.html", "mine");
    let refused = place.refused(&compare);
    assert!(
        refused.contains("a file of that name exists, and it is not a page of `finetune compare`"),
        "{refused}"
    );
    assert_eq!(std::fs::read_to_string(place.path("runs.html")).unwrap(), "mine");
}

/// Folder names are text in the page, not markup.
#[test]
fn a_page_escapes_the_names_of_runs() {
    let place = Place::new();
    two_runs(&place);
    std::fs::rename(place.path("a/first"), place.path("a/<b>x")).unwrap();
    place.said(&["compare", "a/<b>x", "a/second", "--html", "runs.html"]);
    let page = std::fs::read_to_string(place.path("runs.html")).unwrap();
    assert!(!page.contains("<b>") && page.contains("&lt;b&gt;x"), "{page}");
}

#[test]
fn losses_of_other_rows_are_warned_of() {
    let place = Place::new();
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
        write_run(&place, name, recipe, &lines);
    }
    let warned = |runs: &[&str]| {
        let said = place.said(&[&["compare"], runs].concat());
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
        &place.command(&["compare", "share", "seed", "--json"]).output().unwrap().stdout,
    )
    .unwrap();
    assert_eq!(json["warnings"].as_array().unwrap().len(), 1, "{json}");
}

#[test]
fn a_folder_that_is_no_run_is_refused() {
    let place = Place::new();
    two_runs(&place);
    std::fs::create_dir(place.path("empty")).unwrap();
    assert_snapshot!(place.refused(&["compare", "a/first", "nowhere"]), @"
    error: cannot compare nowhere
      caused by: there is no such folder
      caused by: accepted: output folders of training runs, as `--output` named them
    hint: name folders that hold metrics.jsonl, such as `finetune compare out/r4 out/r8`
    ");
    assert_snapshot!(place.refused(&["compare", "empty", "a/first"]), @"
    error: cannot compare empty
      caused by: it holds neither .finetune/run.json nor metrics.jsonl
      caused by: accepted: output folders of training runs, as `--output` named them
    hint: name folders that hold metrics.jsonl, such as `finetune compare out/r4 out/r8`
    ");
    std::fs::create_dir(place.path("log")).unwrap();
    std::fs::copy(place.path("a/first/metrics.jsonl"), place.path("log/metrics.jsonl")).unwrap();
    let error = place.refused(&["compare", "log", "a/first"]);
    assert!(error.contains("caused by: it holds no recipe.toml\n"), "{error}");
    assert!(!error.contains("has no line of a run"), "{error}");
    place.write("log/metrics.jsonl", "");
    place.write("log/recipe.toml", "");
    let error = place.refused(&["compare", "log", "a/first"]);
    assert!(error.contains("caused by: its metrics.jsonl has no line of a run\n"), "{error}");
    assert!(!error.contains("it holds no recipe.toml"), "{error}");
    assert_snapshot!(place.refused(&["compare", "a/first", "rows.jsonl"]), @"
    error: cannot compare rows.jsonl
      caused by: it is a file
      caused by: accepted: output folders of training runs, as `--output` named them
    hint: name folders that hold metrics.jsonl, such as `finetune compare out/r4 out/r8`
    ");
    assert_snapshot!(place.refused(&["compare", "a/first", "a/second", "./a/first"]), @"
    error: cannot compare ./a/first with itself
      caused by: the command names the folder twice; accepted: different output folders
    hint: name each run once
    ");
    let one = place.command(&["compare", "a/first"]).output().unwrap();
    assert_eq!(one.status.code(), Some(2), "{}", place.told(&one.stderr));
    let many = place.command(&[&["compare"][..], &["a/first"; 21]].concat()).output().unwrap();
    assert_eq!(many.status.code(), Some(2), "{}", place.told(&many.stderr));
}

/// Short runs, with the axes of a sweep.
fn sweep<'a>(axes: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    let mut args = lora(&["--set", "train.max_steps=2", "--set", "train.gradient_accumulation_steps=1"]);
    axes.iter().for_each(|axis| args.extend(["--sweep", axis]));
    args.extend(more);
    args
}

#[test]
fn a_sweep_trains_every_combination() {
    let place = Place::new();
    let axes = ["adapter.r=2,4", "data.train_on=[\"assistant\"],\"all\""];
    let args = sweep(&axes, &["--eval-dataset", "rows.jsonl"]);
    let output = place.command(&[&["train"], &args[..]].concat()).output().unwrap();
    let (table, said) = (place.told(&output.stdout), place.told(&output.stderr));
    assert!(output.status.success(), "{said}");
    let names = ["r2-train_on_assistant", "r2-train_on_all", "r4-train_on_assistant", "r4-train_on_all"];
    for (name, (rank, turns)) in
        names.iter().zip([(2, "assistant"), (2, "all"), (4, "assistant"), (4, "all")])
    {
        let recipe = std::fs::read_to_string(place.path("out").join(name).join("recipe.toml")).unwrap();
        let recipe: toml::Table = recipe.parse().unwrap();
        assert_eq!(recipe["adapter"]["r"].as_integer(), Some(rank), "{name}");
        assert!(recipe["data"]["train_on"].to_string().contains(turns), "{name}: {recipe}");
        assert!(table.lines().any(|line| line.starts_with(name)), "{table}");
    }
    assert!(
        said.contains("run 1 of 4: adapter.r=2 data.train_on=[\"assistant\"] -> out/r2-train_on_assistant\n"),
        "{said}"
    );
    assert!(
        said.contains("run 4 of 4: adapter.r=4 data.train_on=\"all\" -> out/r4-train_on_all\n"),
        "{said}"
    );
    // The best run has the lowest held-out loss, and the table is the one of `compare`.
    let folders = names.map(|name| format!("out/{name}"));
    let words: Vec<&str> = ["compare"].into_iter().chain(folders.iter().map(String::as_str)).collect();
    let compared = place.command(&words).output().unwrap();
    let (same, best) = table.split_once("best by held-out loss: ").unwrap();
    assert_eq!(same, place.told(&compared.stdout));
    let json = place.command(&[&words[..], &["--json"]].concat()).output().unwrap();
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    let is_best = |run: &&Value| run["best"] == true;
    let marked = json["runs"].as_array().unwrap().iter().find(is_best).unwrap();
    assert!(best.starts_with(&format!("{} (", marked["folder"].as_str().unwrap())), "{table}");
}

/// Without held-out rows the sweep compares training losses, and prints that.
#[test]
fn a_sweep_without_held_out_rows_says_by_what_it_chose() {
    let place = Place::new();
    let table = place
        .command(&sweep(&["optimizer.learning_rate=1e-2,1e-9"], &["-q", "--set", "train.max_steps=4"]))
        .output()
        .unwrap();
    let said = place.told(&table.stderr);
    assert!(table.status.success() && !said.contains("run 1 of 2"), "{said}");
    let table = place.told(&table.stdout);
    let names = ["learning_rate1e-2", "learning_rate1e-9"];
    let losses = names.map(|name| lines_of(&place.path("out").join(name))[3]["loss"].as_f64().unwrap());
    let name = if losses[1] < losses[0] { names[1] } else { names[0] };
    let best = format!("best by training loss, because no run has a held-out loss: out/{name} (");
    assert!(losses[0] != losses[1] && table.contains(&best), "{table}");
}

/// The folder that a sweep names holds the best weights. A run's lower loss on the way counts only
/// if the run keeps those weights.
#[test]
fn a_sweep_names_the_folder_with_the_best_weights() {
    let place = Place::new();
    let axes = ["optimizer.learning_rate=1e-3,1e-1"];
    for keeps in ["false", "true"] {
        let keep = format!("eval.keep_best={keeps}");
        let more = ["--eval-dataset", "rows.jsonl", "--set", "eval.steps=1", "--set", &keep];
        let more = [&more[..], &["--set", "checkpoint.save_steps=1", "--set", "train.max_steps=6"]].concat();
        let output = if keeps == "true" { "kept" } else { "last" };
        let done = place.command(&into(output, sweep(&axes, &more))).output().unwrap();
        assert!(done.status.success(), "{}", place.told(&done.stderr));
        let table = place.told(&done.stdout);
        let names = ["learning_rate1e-3", "learning_rate1e-1"].map(|name| format!("{output}/{name}"));
        let evals = names.each_ref().map(|name| {
            let lines = lines_of(&place.path(name));
            lines[1..].iter().filter_map(|line| line["eval_loss"].as_f64()).collect::<Vec<_>>()
        });
        let lowest = evals.each_ref().map(|losses| losses.iter().copied().fold(f64::MAX, f64::min));
        let last = evals.each_ref().map(|losses| *losses.last().unwrap());
        // The run with the high rate is best on the way and worst at the end.
        assert!(lowest[1] < lowest[0] && last[1] > last[0], "{table}");
        let (best, loss) = if keeps == "true" { (1, lowest[1]) } else { (0, last[0]) };
        assert!(
            table.contains(&format!("best by held-out loss: {} ({loss:.4} at step ", names[best])),
            "{table}"
        );
        let lost = format!("{} had {:.4} at step ", names[1], lowest[1]);
        assert_eq!(table.contains(&lost), keeps == "false", "{table}");
    }
}

/// An invalid run of a sweep is one error before the first run.
#[test]
fn a_sweep_is_checked_before_its_first_run() {
    let place = Place::new();
    let refused = |axes: &[&str], more: &[&str]| place.refused(&sweep(axes, more));
    assert_snapshot!(refused(&["adapter.r=4,none"], &[]), @r#"
    error: cannot start the sweep: run 2 of 2, adapter.r=none
      caused by: cannot use these settings
      caused by: --set adapter.r=none: `adapter.r` is "none"; accepted: a whole number from 1 to 65536
    hint: `finetune recipes show reference` documents every key
    "#);
    let unknown = refused(&["adapter.rang=4,8"], &[]);
    assert!(unknown.contains("run 1 of 2, adapter.rang=4\n"), "{unknown}");
    assert!(unknown.contains("unknown key `adapter.rang`; nearest: `adapter.r`"), "{unknown}");
    assert_snapshot!(refused(&["adapter.r=4,8", "adapter.r=16"], &[]), @"
    error: cannot start the sweep
      caused by: two `--sweep` give adapter.r; accepted: one for each key
    hint: put all values of a key into one `--sweep`, separated by commas
    ");
    assert_snapshot!(refused(&["adapter.r=4,4"], &[]), @"
    error: cannot start the sweep
      caused by: two runs would have the folder out/r4, the second with adapter.r=4
    hint: give each value once; a folder's name keeps only letters, digits and . _ + - of a value, so those must differ
    ");
    assert_snapshot!(refused(&["adapter.r=1,2,3,4,5,6,7,8", "train.seed=1,2,3,4,5,6,7,8,9"], &[]), @"
    error: cannot start the sweep
      caused by: it has 72 runs; accepted: 1 to 64
    hint: give fewer values, or sweep one key after another
    ");
    assert_snapshot!(refused(&["adapter.r=4,8"], &["--resume", "elsewhere"]), @"
    error: cannot start the sweep
      caused by: `--resume elsewhere` names one checkpoint for all runs; accepted: `--resume` without a folder
    hint: each run goes on in its own folder; to start from an adapter, `--set adapter.path=DIR`
    ");
    assert!(!place.path("out").exists(), "nothing is trained");
    std::fs::create_dir_all(place.path("out/r8")).unwrap();
    place.write("out/r8/mine", "");
    assert_snapshot!(refused(&["adapter.r=4,8"], &[]), @"
    error: cannot start the sweep: cannot write to out/r8
      caused by: the folder is not empty
    hint: give a new folder with `--output`, or `--resume` to go on with the sweep in this one
    ");
    assert!(!place.path("out/r4").exists(), "nothing is trained");
    for (axis, more) in
        [("adapter.r=4,8", "--dry-run"), ("adapter.r=4,8", "--ui"), ("adapter.r=4,", "-v"), ("r=4", "-v")]
    {
        let done = place.command(&sweep(&[axis], &[more])).output().unwrap();
        assert_eq!(done.status.code(), Some(2), "{axis} {more}: {}", place.told(&done.stderr));
    }
    let mut several = place.command(&sweep(&["adapter.r=4,16"], &[]));
    several.envs([
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29999"),
    ]);
    let several = several.output().unwrap();
    assert_eq!(several.status.code(), Some(1));
    assert_snapshot!(place.told(&several.stderr), @"
    error: cannot sweep over several processes
      caused by: the world size is 2, from RANK and WORLD_SIZE (torchrun); a sweep starts its processes itself
    hint: start the sweep outside of the launcher, with `--gpus` or `--ranks`; or start each run by itself with `--set`
    ");
    assert!(!place.path("out/r4").exists(), "nothing is trained");
}

/// A failed run is named, the others are trained, and the sweep ends with its exit code.
#[test]
fn a_sweep_goes_on_after_a_run_that_fails() {
    let place = Place::new();
    let args = sweep(
        &["optimizer.learning_rate=1e38,1e-3"],
        &["--set", "train.max_grad_norm=0", "--set", "train.max_steps=4"],
    );
    let done = place.command(&args).output().unwrap();
    let (table, said) = (place.told(&done.stdout), place.told(&done.stderr));
    assert_eq!(done.status.code(), Some(4), "{said}");
    assert!(
        said.contains("run 1 of 2 ended with exit code 4; the sweep goes on with the next run"),
        "{said}"
    );
    assert!(said.contains("error: 1 of 2 runs of the sweep failed\n  caused by: run 1, optimizer.learning_rate=1e38, ended with exit code 4\n"), "{said}");
    assert!(place.path("out/learning_rate1e-3/adapter_model.safetensors").exists());
    assert!(table.contains(": out/learning_rate1e-3 ("), "the best is a run that ended well: {table}");
}

/// A signal reaches the run, which saves; the sweep starts no further run. `--resume` then produces
/// the same files as an undisturbed sweep.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_sweep_that_was_stopped_goes_on() {
    let place = Place::new();
    let saving = ["--set", "train.max_steps=40", "--set", "checkpoint.save_steps=1"];
    let mut slow = place.command(&sweep(&["adapter.r=2,4"], &saving));
    // Slow enough to be stopped on the way, also on a busy machine.
    slow.env("FINETUNE_FAULT", "0:data:slow=500ms").stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut run = slow.spawn().unwrap();
    while !place.path("out/r2/checkpoint-1").exists() {
        assert!(run.try_wait().unwrap().is_none(), "the sweep ended before it saved");
        std::thread::sleep(Duration::from_millis(20));
    }
    // SAFETY: a signal to a process that this test started and has not waited for.
    unsafe { libc::kill(libc::pid_t::try_from(run.id()).unwrap(), libc::SIGTERM) };
    let done = watched(run, PATIENCE);
    let said = place.told(&done.stderr);
    assert_eq!(done.status.code(), Some(85), "{said}");
    assert!(said.contains("the sweep stopped in run 1 of 2; the next run was not started"), "{said}");
    assert!(
        !place.path("out/r4").exists() && !place.path("out/r2/adapter_model.safetensors").exists(),
        "{said}"
    );
    let resumed = [&saving[..], &["--resume"]].concat();
    let said = place.said(&sweep(&["adapter.r=2,4"], &resumed));
    assert!(said.contains("resuming from out/r2/checkpoint-"), "{said}");
    assert!(said.contains("run 2 of 2: adapter.r=4 -> out/r4\n"), "{said}");
    place.said(&into("whole", sweep(&["adapter.r=2,4"], &saving)));
    let weights = |folder: &str| std::fs::read(place.path(folder).join("adapter_model.safetensors")).unwrap();
    for name in ["r2", "r4"] {
        assert!(weights(&format!("out/{name}")) == weights(&format!("whole/{name}")), "{name}");
    }
    // Finished runs stay unchanged.
    let log = place.path("out/r2/metrics.jsonl");
    let before = (std::fs::read(&log).unwrap(), log.metadata().unwrap().modified().unwrap());
    let said = place.said(&sweep(&["adapter.r=2,4"], &resumed));
    assert_eq!(said.matches("nothing is left to do").count(), 2, "{said}");
    assert!((std::fs::read(&log).unwrap(), log.metadata().unwrap().modified().unwrap()) == before);
}
