//! The program of `log.command`: the lines on its input, and that it can neither slow, harm nor
//! outlive a run.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use finetune::report::MetricsEntry;
use insta::assert_snapshot;
use serde_json::{Value, json};

use crate::test_dir::{TestDir, lora};

/// Upper bound for a run or a program to reach a state on a busy machine.
const LONGEST: Duration = Duration::from_secs(240);

/// The setting for a shell script.
fn shell(script: &str) -> String {
    format!("log.command={}", json!(["sh", "-c", script]))
}

/// The setting for a script that writes its input to the file `got`.
fn keeps(dir: &TestDir) -> String {
    shell(&format!("cat > {}", dir.path("got").display()))
}

fn lines(path: &Path) -> Vec<String> {
    std::fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect()
}

fn events(dir: &TestDir) -> Vec<Value> {
    lines(&dir.path("got")).iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the printed text of a run with these flags, which ends with `code`.
fn ends(dir: &TestDir, args: &[&str], code: i32) -> String {
    let done = dir.command(args).output().unwrap();
    let said = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(code), "{said}");
    said
}

fn warnings(said: &str) -> Vec<&str> {
    said.lines().filter(|line| line.starts_with("warning:")).collect()
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LONGEST, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_program_gets_the_run_and_every_line_of_metrics_jsonl() {
    let dir = TestDir::new();
    dir.write(
        "held.jsonl",
        r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}"#,
    );
    let (command, secret) = (keeps(&dir), "alerts.webhook=http://127.0.0.1:9/canary");
    let more = ["--eval-dataset", "held.jsonl", "--ranks", "2", "--set", &command, "--set", secret];
    let said = ends(&dir, &lora(&more), 0);
    assert_eq!(warnings(&said), [""; 0], "{said}");
    let (got, written) = (lines(&dir.path("got")), lines(&dir.path("out/metrics.jsonl")));
    let expected: Vec<String> =
        written.iter().map(|line| format!("{{\"event\":\"metrics\",{}", &line[1..])).collect();
    assert_eq!(got[1..got.len() - 1], expected);
    assert_eq!(got[got.len() - 1], r#"{"event":"end","status":"finished","dropped":0}"#);
    let mut first: Value = serde_json::from_str(&got[0]).unwrap();
    let recipe = first["recipe"].take();
    assert!(!got[0].contains("canary"), "{}", got[0]);
    let keys: Vec<(&str, Value)> = vec![
        ("train.max_steps", json!(4)),
        ("adapter.r", json!(16)),
        ("data.packing", json!(false)),
        ("adapter.exclude_modules", json!([])),
        ("scheduler.kind", json!("cosine")),
    ];
    for (key, value) in keys {
        assert_eq!(recipe[key], value, "{key}");
    }
    assert!(first["started"].take().as_str().unwrap().starts_with("20"), "{first}");
    let output = dir.path("out").display().to_string();
    assert_eq!(
        first,
        json!({
            "event": "run", "run": "out", "model": "model", "output": output, "started": null,
            "version": env!("CARGO_PKG_VERSION"), "world_size": 2, "total_steps": 4, "resumed_step": null,
            "recipe": null,
        })
    );
}

/// finetune numbers GPUs as `nvidia-smi` does, also in the programs that it starts, unless the
/// environment has another order.
#[test]
fn gpus_are_numbered_by_their_bus() {
    for (given, order) in [(None, "PCI_BUS_ID"), (Some("FASTEST_FIRST"), "FASTEST_FIRST")] {
        let dir = TestDir::new();
        let script = format!("echo $CUDA_DEVICE_ORDER > {}; cat > /dev/null", dir.path("got").display());
        let mut run = dir.command(&lora(&["--set", &shell(&script)]));
        run.env_remove("CUDA_DEVICE_ORDER").envs(given.map(|order| ("CUDA_DEVICE_ORDER", order)));
        assert!(run.output().unwrap().status.success());
        assert_eq!(lines(&dir.path("got")), [order]);
    }
}

/// Starts a long run, stops it by SIGTERM after its first step, and returns the lines.
fn stopped(dir: &TestDir, more: &[&str]) -> Vec<Value> {
    std::fs::remove_file(dir.path("got")).unwrap_or_default();
    let command = keeps(dir);
    let args = lora(&[&["--set", &command, "--set", "train.max_steps=5000"], more].concat());
    let mut run = dir.command(&args).stderr(Stdio::null()).spawn().unwrap();
    until("no step was logged", || {
        assert!(run.try_wait().unwrap().is_none(), "it ended before");
        std::fs::read_to_string(dir.path("got")).is_ok_and(|got| got.contains(r#""loss":"#))
    });
    signal(&run, "-TERM");
    assert_eq!(run.wait().unwrap().code(), Some(85));
    events(dir)
}

fn signal(run: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &run.id().to_string()]).status().unwrap().success());
}

#[test]
fn a_stopped_run_says_so_and_a_resumed_one_names_its_step() {
    let dir = TestDir::new();
    let got = stopped(&dir, &[]);
    assert_eq!(got[got.len() - 1], json!({ "event": "end", "status": "stopped", "dropped": 0 }));
    let last = got[got.len() - 2]["step"].as_u64().unwrap();
    let again = stopped(&dir, &["--resume"]);
    assert_eq!(again[0]["resumed_step"], json!(last));
    assert_eq!(again[1]["step"], json!(last + 1));
}

const DIVERGES: [&str; 6] = [
    "--set",
    "optimizer.learning_rate=1e30",
    "--set",
    "scheduler.kind=constant",
    "--set",
    "scheduler.warmup_steps=0",
];

#[test]
fn a_failed_run_says_why() {
    let dir = TestDir::new();
    let command = keeps(&dir);
    let said = ends(&dir, &lora(&[&DIVERGES[..], &["--set", &command]].concat()), 4);
    let got = events(&dir);
    let end = &got[got.len() - 1];
    assert_eq!((&end["event"], &end["status"]), (&json!("end"), &json!("failed")), "{said}");
    let why = end["error"].as_str().unwrap();
    assert!(why.starts_with("the numbers diverged at step "), "{why}");
}

/// The program sees the record and the report that the run leaves.
#[test]
fn the_last_line_comes_when_the_run_is_complete_on_disk() {
    let dir = TestDir::new();
    let (record, report) = (dir.path("out/.finetune/run.json"), dir.path("out/report.html"));
    let (record, report, seen) = (record.display(), report.display(), dir.path("seen"));
    let command = shell(&format!("cat > /dev/null; cat {record} {report} > {}", seen.display()));
    let said = ends(&dir, &lora(&["--set", &command]), 0);
    assert_eq!(warnings(&said), [""; 0], "{said}");
    let left = ["out/.finetune/run.json", "out/report.html"].map(|name| std::fs::read(dir.path(name)));
    assert!(std::fs::read(&seen).unwrap() == left.map(Result::unwrap).concat(), "{said}");
}

/// The program ends after the last line, and then an alert has been delivered.
#[test]
fn an_alert_does_not_wait_for_the_program() {
    let dir = TestDir::new();
    let (told, seen) = (dir.path("told"), dir.path("seen"));
    let (told, copy) = (told.display(), seen.display());
    let command = shell(&format!("cat > /dev/null; cp {told} {copy}"));
    let alert = format!("alerts.command={}", json!(["sh", "-c", format!("cat > {told}")]));
    let said = ends(&dir, &lora(&[&DIVERGES[..], &["--set", &command, "--set", &alert]].concat()), 4);
    let seen = std::fs::read_to_string(seen).unwrap_or_default();
    assert!(seen.contains("non_finite"), "{seen}\n{said}");
}

/// The run ends although the program neither reads nor ends, and the program ends with it.
#[test]
fn a_program_that_does_nothing_holds_up_no_end() {
    let dir = TestDir::new();
    let command = shell(&format!("echo $$ > {}; exec sleep 4321", dir.path("pid").display()));
    let said = ends(&dir, &lora(&[&DIVERGES[..], &["--set", &command]].concat()), 4);
    let about: Vec<&str> = warnings(&said).into_iter().filter(|line| line.contains("log.command")).collect();
    let expected = "warning: the program of `log.command` may miss lines of this run: `sh` still ran 30 s after the run, and was killed";
    assert_eq!(about, [expected], "{said}");
    if cfg!(target_os = "linux") {
        let pid = std::fs::read_to_string(dir.path("pid")).unwrap();
        let stat = Path::new("/proc").join(pid.trim()).join("stat");
        until("the program lives on", || {
            let stat = std::fs::read_to_string(&stat).unwrap_or_default();
            stat.rsplit_once(')').is_none_or(|(_, rest)| rest.trim_start().starts_with(['Z', 'X']))
        });
    }
}

/// A killed run ends the input of the program, which then ends by itself.
#[test]
fn a_program_sees_that_its_run_was_killed() {
    let dir = TestDir::new();
    let (got, over) = (dir.path("got"), dir.path("over"));
    let command = shell(&format!("cat > {}; echo over > {}", got.display(), over.display()));
    let args = lora(&["--set", &command, "--set", "train.max_steps=5000"]);
    let mut run = dir.command(&args).stderr(Stdio::null()).spawn().unwrap();
    until("no step was logged", || lines(&got).len() > 1);
    signal(&run, "-KILL");
    run.wait().unwrap();
    until("the input does not end", || lines(&over) == ["over"]);
    assert!(lines(&got).iter().all(|line| !line.contains(r#""event":"end""#)));
}

/// All files below a folder, without their times.
fn files(folder: &Path) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("tensorboard") {
            names.extend(files(&path));
        } else {
            names.insert(path.file_name().unwrap().to_string_lossy().into_owned());
        }
    }
    names
}

/// The lines of metrics.jsonl without times.
fn figures(folder: &Path) -> Vec<MetricsEntry> {
    let entries = finetune::report::metrics::read(&folder.join("metrics.jsonl")).unwrap();
    let plain = |entry| match entry {
        MetricsEntry::Step(report) => MetricsEntry::Step(report.without_times()),
        other => other,
    };
    entries.into_iter().map(plain).collect()
}

#[test]
fn a_program_that_dies_is_one_warning_and_changes_nothing() {
    let dir = TestDir::new();
    ends(&dir, &lora(&[]), 0);
    std::fs::rename(dir.path("out"), dir.path("alone")).unwrap();
    let script = "echo no module named such >&2; exit 3";
    let said = ends(&dir, &lora(&["--set", &shell(script)]), 0);
    let told = warnings(&said);
    assert_eq!(told.len(), 1, "{said}");
    assert!(told[0].starts_with("warning: no more lines for `log.command`: `sh` ended "), "{said}");
    assert!(told[0].contains(" with exit status: 3"), "{said}");
    assert!(told[0].ends_with(": no module named such"), "{said}");
    let (alone, out) = (dir.path("alone"), dir.path("out"));
    assert_eq!(files(&alone), files(&out));
    assert!(figures(&alone).len() == 4 && figures(&alone) == figures(&out), "{said}");
    let other: Vec<String> = lines(&out.join("recipe.toml"));
    let other = other.into_iter().filter(|line| !line.starts_with("command = ")).collect::<Vec<_>>();
    assert_eq!(other, lines(&alone.join("recipe.toml")));
    for name in ["adapter_model.safetensors", "adapter_config.json"] {
        assert!(std::fs::read(alone.join(name)).unwrap() == std::fs::read(out.join(name)).unwrap(), "{name}");
    }
}

#[test]
fn a_program_that_cannot_be_started_is_refused_before_training() {
    let dir = TestDir::new();
    assert_snapshot!(dir.refused(&lora(&["--quiet", "--set", r#"log.command=["no-such-program"]"#])), @"
    error: cannot use `log.command`
      caused by: no folder of PATH has a program `no-such-program`
    hint: name a program in a folder of PATH, or write its path
    ");
    let said = dir.refused(&lora(&["--set", r#"log.command=["./none", "x"]"#]));
    assert!(said.contains("`log.command` is") && said.contains("[DIR]/none does not exist"), "{said}");
    let said = dir.refused(&lora(&["--set", "log.command=wandb"]));
    assert!(said.contains("accepted: a list of strings: a program and its arguments"), "{said}");
    assert!(!dir.path("out").exists());
    let command = keeps(&dir);
    ends(&dir, &lora(&["--dry-run", "--set", &command]), 0);
    assert!(!dir.path("got").exists(), "a plan starts it");
}

/// finetune had keys for a client of MLflow.
#[test]
fn a_key_of_before_names_its_replacement() {
    let dir = TestDir::new();
    let old = "[log]\nmlflow = \"http://127.0.0.1:5000\"\nmlflow_experiment = \"a\"\n";
    dir.write("old.toml", old);
    let args = ["--recipe", "old.toml", "--model", "model", "--dataset", "rows.jsonl", "--lr", "1e-4"];
    assert_snapshot!(dir.refused(&args), @r#"
    error: cannot use recipe old.toml
      caused by: old.toml:2:1: unknown key `log.mlflow`; nearest: `log.command`; [log] has: every_steps, tensorboard, metrics_address, peak_tflops, command
      caused by: old.toml:3:1: unknown key `log.mlflow_experiment`; nearest: `log.command`; [log] has: every_steps, tensorboard, metrics_address, peak_tflops, command
    hint: write `command = ["python3", "integrations/mlflow.py"]`
    "#);
    // The recipe of an older run goes on.
    ends(&dir, &lora(&[]), 0);
    let left = std::fs::read_to_string(dir.path("out/recipe.toml")).unwrap();
    std::fs::write(dir.path("out/recipe.toml"), left.replace("[log]\n", old)).unwrap();
    let said = ends(&dir, &["--resume", "--output", "out"], 0);
    let notes: Vec<&str> = said.lines().filter(|line| line.contains("log.mlflow")).collect();
    for (key, note) in ["mlflow", "mlflow_experiment"].into_iter().zip(&notes) {
        let expected = format!(
            "`log.{key}` no longer exists and is ignored; write `command = [\"python3\", \"integrations/mlflow.py\"]`"
        );
        assert!(note.starts_with("out/recipe.toml:") && note.ends_with(&expected), "{said}");
    }
    assert!(notes.len() == 2 && said.contains("nothing is left to do"), "{said}");
    // So do other verbs; `plan` prints the notes.
    let recipe = ["--recipe", "out/recipe.toml"];
    let said = ends(&dir, &[&["plan"], &recipe[..]].concat(), 0);
    assert_eq!(said.matches("no longer exists and is ignored").count(), 2, "{said}");
    let verbs: [&[&str]; 3] = [
        &["data", "--model", "model", "--dataset", "rows.jsonl"],
        &["eval", "--model", "model", "--dataset", "rows.jsonl"],
        &["generate", "--model", "model", "--prompt", "Hi", "--max-new-tokens", "1"],
    ];
    verbs.iter().for_each(|verb| drop(ends(&dir, &[*verb, &recipe].concat(), 0)));
}
