//! `eval.samples`: the model's answers to held-out rows at each evaluation, on the terminal, in
//! metrics.jsonl and in the report.

use serde_json::{Value, json};

use crate::test_dir::{TestDir, lora};

const PROMPTS: [&str; 3] = ["Count to 4", "Name a color", "Say it again"];

/// A folder with three held-out rows.
fn test_dir() -> TestDir {
    let dir = TestDir::new();
    let row = |prompt: &&str| json!({ "prompt": prompt, "completion": " one two" }).to_string();
    dir.write("held-out.jsonl", &PROMPTS.iter().map(row).collect::<Vec<_>>().join("\n"));
    dir
}

fn words<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let settings = ["--eval-dataset", "held-out.jsonl", "--set", "eval.steps=2", "--lr", "1e-2"];
    lora(&[&settings[..], more].concat())
}

/// Returns the evaluations of the run in `output`.
fn evaluations(dir: &TestDir, output: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(dir.path(output).join("metrics.jsonl")).unwrap();
    let entries = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    entries.filter(|entry| entry["eval_loss"].is_f64()).collect()
}

/// Returns the result's answer from `generate`, in one line.
fn generated(dir: &TestDir, prompt: &str) -> String {
    let args =
        ["generate", "--adapter", "out", "--prompt", prompt, "--max-new-tokens", "64", "--temperature", "0"];
    let output = dir.command(&[&args[..], &["--json"]].concat()).output().unwrap();
    assert!(output.status.success(), "{}", dir.told(&output.stderr));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    said["answer"].as_str().unwrap().trim().replace('\n', " ")
}

#[test]
fn each_evaluation_answers_held_out_rows() {
    let dir = test_dir();
    dir.said(&words(&[]));
    std::fs::rename(dir.path("out"), dir.path("plain")).unwrap();
    let said = dir.said(&words(&["--set", "eval.samples=2"]));
    let evaluated = evaluations(&dir, "out");
    assert_eq!(
        evaluated.iter().map(|report| report["step"].as_u64().unwrap()).collect::<Vec<_>>(),
        [0, 2, 4]
    );
    for (report, plain) in evaluated.iter().zip(evaluations(&dir, "plain")) {
        assert_eq!(report["eval_loss"], plain["eval_loss"], "answers change no number");
        assert!(plain.get("eval_samples").is_none());
        let samples = report["eval_samples"].as_array().unwrap();
        assert_eq!(samples.len(), 2);
        for (sample, prompt) in samples.iter().zip(PROMPTS) {
            assert_eq!((&sample["prompt"], &sample["expected"]), (&json!(prompt), &json!("one two")));
        }
    }
    let answers = |report: &Value| -> Vec<String> {
        let samples = report["eval_samples"].as_array().unwrap();
        samples.iter().map(|sample| sample["answer"].as_str().unwrap().to_owned()).collect()
    };
    assert_ne!(answers(&evaluated[0]), answers(&evaluated[2]), "the run learns");
    assert_eq!(answers(&evaluated[2]), [0, 1].map(|at| generated(&dir, PROMPTS[at])));
    let shown =
        format!("  {}\n    expected: one two\n    answer:   {}\n", PROMPTS[1], answers(&evaluated[2])[1]);
    assert!(said.contains(&shown), "{said}");
    let page = std::fs::read_to_string(dir.path("out/report.html")).unwrap();
    assert!(page.contains("Answers at each evaluation") && page.contains("<td>step 2</td>"));
    assert!(page.contains("Answers before and after"));
}

/// The terminal shows the question of a chat, not only the answer.
#[test]
fn the_question_of_a_chat_is_shown() {
    let dir = test_dir();
    let rows = std::fs::read_to_string(dir.path("rows.jsonl")).unwrap();
    dir.write("held-out.jsonl", rows.lines().next().unwrap());
    let row: Value = serde_json::from_str(rows.lines().next().unwrap()).unwrap();
    let messages = row["messages"].as_array().unwrap();
    let asked = messages.iter().find(|message| message["role"] == "user").unwrap();
    let said = dir.said(&words(&["--set", "eval.samples=1"]));
    let end = asked["content"].as_str().unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(said.contains(&end), "{end}: {said}");
}

/// Ranks that hold shards of the model answer together.
#[test]
fn shards_answer_together() {
    let dir = test_dir();
    dir.said(&words(&["--set", "eval.samples=1", "--ranks", "2", "--set", "parallel.strategy=fsdp"]));
    let last = evaluations(&dir, "out").pop().unwrap();
    assert_eq!(last["eval_samples"][0]["answer"], json!(generated(&dir, PROMPTS[0])));
}

#[test]
fn rows_that_ask_nothing_are_refused() {
    let dir = test_dir();
    let without = dir.refused(&lora(&["--set", "eval.samples=2"]));
    assert!(without.contains("needs held-out rows"), "{without}");
    dir.write("texts.jsonl", "{\"text\": \"A text of some words.\"}\n");
    let texts = dir.refused(&lora(&["--eval-dataset", "texts.jsonl", "--set", "eval.samples=2"]));
    assert!(
        texts.contains("no held-out row can be answered") && texts.contains("remove `eval.samples`"),
        "{texts}"
    );
}
