//! The library's facade does what the binary does.

use std::path::Path;

use finetune::{Session, TrainedModel};
use serde_json::Value;

use crate::test_dir::TestDir;

/// Keys of the run, as a recipe and as settings of the command line.
const RECIPE: &str = r#"
adapter = { r = 4 }
train = { max_steps = 4, micro_batch_size = 2, gradient_accumulation_steps = 1 }
optimizer = { learning_rate = 1e-2 }
checkpoint = { save_steps = "never" }
"#;

fn recipe(dir: &TestDir) -> String {
    let path = |name: &str| dir.path(name).display().to_string();
    format!(
        "model = {{ id = {:?} }}\ndata = {{ train = [{:?}], eval = [{:?}] }}\n{RECIPE}",
        path("model"),
        path("rows.jsonl"),
        path("rows.jsonl")
    )
}

fn test_dir() -> TestDir {
    let dir = TestDir::with_model("tiny-llama");
    let row = |i: usize| format!("{{\"prompt\": \"count {i}\", \"completion\": \" {} {}\"}}\n", i + 1, i + 2);
    dir.write("rows.jsonl", &(0..12).map(row).collect::<String>());
    dir
}

#[test]
fn a_session_trains_saves_and_answers_as_the_binary() {
    let dir = test_dir();
    dir.write("recipe.toml", &recipe(&dir));
    dir.said(&["--recipe", "recipe.toml", "--output", "out"]);
    let text = std::fs::read_to_string(dir.path("out/metrics.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let losses: Vec<f64> = lines.iter().filter_map(|line| line["loss"].as_f64()).collect();
    let held_out: Vec<f64> = lines.iter().filter_map(|line| line["eval_loss"].as_f64()).collect();

    let mut session = Session::new(&recipe(&dir), Path::new("")).unwrap();
    let before = session.evaluate().unwrap().unwrap();
    assert_eq!(session.steps().unwrap().total(), 4);
    // An iterator that is dropped early costs no step.
    let mut all_losses: Vec<f64> = session.steps().unwrap().take(1).map(|step| step.unwrap().loss).collect();
    all_losses.extend(session.steps().unwrap().map(|step| step.unwrap().loss));
    assert_eq!(all_losses, losses, "losses of the binary");
    assert_eq!(session.steps().unwrap().count(), 0, "the run is over");
    let after = session.evaluate().unwrap().unwrap();
    assert_eq!([before.loss(), after.loss()], [held_out[0], held_out[held_out.len() - 1]]);

    session.save(&dir.path("saved")).unwrap();
    let bytes = |folder: &str| std::fs::read(dir.path(folder).join("adapter_model.safetensors")).unwrap();
    assert!(bytes("saved") == bytes("out"), "the adapter of the binary");
    let config =
        |folder: &str| std::fs::read_to_string(dir.path(folder).join("adapter_config.json")).unwrap();
    assert_eq!(config("saved"), config("out"), "with the record of its base");
    assert!(session.save(&dir.path("saved")).is_err(), "a folder that exists is never written to");

    let (model, adapter) = (dir.path("model"), dir.path("saved"));
    let trained = TrainedModel::open(&model.display().to_string(), Some(&adapter.display().to_string()));
    let trained = trained.unwrap();
    let answer = trained.generate("count 3", 5).unwrap();
    assert_eq!(answer, session.generate("count 3", 5).unwrap());
    let said = dir.said(&[
        "generate",
        "--model",
        "model",
        "--adapter",
        "saved",
        "--prompt",
        "count 3",
        "--max-new-tokens",
        "5",
    ]);
    assert!(said.contains(&answer), "{said:?} has {answer:?}");
    let logits = trained.logits("count 3").unwrap();
    assert!(logits.iter().all(|row| row.len() == logits[0].len() && row.iter().all(|x| x.is_finite())));
    let embedding = trained.embedding("count 3").unwrap();
    assert!(embedding.iter().any(|x| *x != 0.0) && embedding != trained.embedding("count 4").unwrap());
}

#[test]
fn a_session_refuses_keys_that_it_cannot_follow() {
    let dir = test_dir();
    for (from, to, name) in [
        ("checkpoint = { save_steps = \"never\" }", "eval = { keep_best = true }", "eval.keep_best"),
        ("max_steps = 4", "max_steps = 4, on_nan = \"skip\"", "train.on_nan"),
    ] {
        let error = Session::new(&recipe(&dir).replace(from, to), Path::new("")).err().unwrap();
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn a_session_names_what_is_wrong_with_its_recipe() {
    let error = Session::new("modle = { id = 3 }", Path::new("")).err().unwrap();
    assert!(error.to_string().contains("modle"), "{error}");
}
