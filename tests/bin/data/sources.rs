//! Row sources as tables, and rows held out of them, through the binary.

use insta::assert_snapshot;
use serde_json::Value;

use crate::data::chats::texts;
use crate::test_dir::{TestDir, lora};

const ODD: &str = "question,answer_text,about\n2 + 2?,4,sums\n3 + 3?,6,sums\nA river?,The Elph,rivers\n";

/// Returns the rows of `finetune data`, with ⟦ and ⟧ around trained text.
fn rows(dir: &TestDir, more: &[&str]) -> Vec<String> {
    let args = ["data", "--tokens", "--model", "model", "--rows", "20", "--set", "data.max_seq_len=200"];
    let output = dir.command(&[&args[..], more].concat()).output().unwrap();
    assert!(output.status.success(), "{}", dir.told(&output.stderr));
    texts(&output)
}

#[test]
fn columns_have_other_names() {
    let dir = TestDir::new();
    dir.write("odd.csv", ODD);
    let short = ["--dataset", "odd.csv?prompt=question&completion=answer_text&limit=2"];
    let lines = rows(&dir, &short);
    assert_eq!(lines, ["2 + 2?⟦4<|im_end|>⟧", "3 + 3?⟦6<|im_end|>⟧"]);
    dir.write(
        "tables.toml",
        r#"
        [[data.train]]
        path = "odd.csv"
        columns = { completion = "answer_text" }
        prompt_template = "About {about}: {question}\n"
        weight = 2
        [[data.train]]
        path = "rows.jsonl"
        limit = 1
        weight = 0.5
        "#,
    );
    let told = dir.said(&[
        "--dry-run",
        "--recipe",
        "tables.toml",
        "--model",
        "model",
        "--set",
        "optimizer.learning_rate=1e-4",
    ]);
    assert!(told.contains("6 rows of the 3 of [DIR]/odd.csv: weight 2"), "{told}");
    assert!(told.contains("0 rows of the 1 of [DIR]/rows.jsonl: weight 0.5"), "{told}");
    // The resolved recipe holds the same.
    let resolved = told.lines().find(|line| line.starts_with("train = ")).unwrap();
    assert_snapshot!(resolved, @r#"train = [{ "path" = "[DIR]/odd.csv", "columns" = { "completion" = "answer_text" }, "prompt_template" = "About {about}: {question}\n", "weight" = 2.0 }, { "path" = "[DIR]/rows.jsonl", "weight" = 0.5, "limit" = 1 }]"#);
    let args = ["--dataset", r"odd.csv?completion=answer_text&prompt_template=About {about}: {question} "];
    assert_eq!(rows(&dir, &args)[2], "About rivers: A river?⟦ The Elph<|im_end|>⟧");
}

#[test]
fn formats_and_system_messages_belong_to_a_source() {
    let dir = TestDir::new();
    dir.write("a.jsonl", r#"{"instruction": "Name a river.", "output": "Elph", "response": "no"}"#);
    let lines = rows(&dir, &["--dataset", "a.jsonl?format=instruction&system=Be kind."]);
    assert_eq!(lines.len(), 1);
    assert!(lines[0].contains("Be kind.") && lines[0].contains("⟦no<|im_end|>⟧"), "{lines:?}");
    let lines = rows(&dir, &["--dataset", "a.jsonl?format=alpaca"]);
    assert!(lines[0].contains("⟦Elph<|im_end|>⟧"), "{lines:?}");
}

#[test]
fn a_split_of_a_folder_is_named() {
    let dir = TestDir::new();
    std::fs::create_dir(dir.path("set")).unwrap();
    for (name, text) in [("train", "a"), ("validation", "b"), ("test", "c")] {
        let row = format!("{{\"prompt\": \"{text}\", \"completion\": \"{text}\"}}");
        dir.write(&format!("set/{name}.jsonl"), &row);
    }
    for (split, text) in [("train", "a"), ("validation", "b"), ("test", "c")] {
        let lines = rows(&dir, &["--dataset", &format!("./set?split={split}")]);
        assert_eq!(lines, [format!("{text}⟦{text}<|im_end|>⟧")]);
    }
    let data = ["data", "--model", "model", "--dataset"];
    assert!(
        dir.refused(&[&data[..], &["./set?split=dev"]].concat())
            .contains("accepted: train, validation, test")
    );
}

#[test]
fn what_a_source_says_wrongly_is_one_error() {
    let dir = TestDir::new();
    dir.write("odd.csv", ODD);
    let data = ["data", "--model", "model", "--dataset"];
    let unknown = dir.refused(&[&data[..], &["odd.csv"]].concat());
    let columns = "a `[[data.train]]` table, such as `columns = { prompt = \"KEY\", completion = \"KEY\" }`";
    assert!(unknown.contains("odd.csv:2 has the keys question, answer_text, about\n"), "{unknown}");
    assert!(unknown.contains(columns), "{unknown}");
    assert_snapshot!(dir.refused(&[&data[..], &["odd.csv?prompt=ask&completion=answer_text"]].concat()), @"
    error: cannot use the data set [DIR]/odd.csv
      caused by: no row of the data set can be used
      caused by: 3 rows in 1 file, no row is readable
      caused by: 0 examples, 0 tokens, 0 of them trained (0 %)
      caused by: 3 bad rows: not a row of this format
      caused by: [DIR]/odd.csv:2: it has no column `ask`; its columns are question, answer_text, about
      caused by: [DIR]/odd.csv:3: it has no column `ask`; its columns are question, answer_text, about
      caused by: [DIR]/odd.csv:4: it has no column `ask`; its columns are question, answer_text, about
    hint: `finetune data` shows what is wrong with each row
    ");
    assert_snapshot!(dir.refused(&[&data[..], &["odd.csv?weight=0"]].concat()), @r#"
    error: cannot use these settings
      caused by: --dataset: its `weight` is not accepted; accepted: a number above 0
    "#);
    assert_snapshot!(dir.refused(&[&data[..], &["odd.csv?completion=answer_text&prompt_template={ask"]].concat()), @r#"
    error: cannot use the data set [DIR]/odd.csv
      caused by: cannot use the prompt template "{ask"
      caused by: it has a `{` without a `}` after it
    hint: write `{column}` in the place of a value, and `{{` or `}}` for a brace
    "#);
}

/// Runs `more` on 40 rows; returns the output and the evaluations in metrics.jsonl.
fn evaluations(dir: &TestDir, output: &str, more: &[&str]) -> (String, Vec<Value>) {
    let mut args = lora(more);
    args.iter_mut().filter(|arg| **arg == "out").for_each(|arg| *arg = output);
    let told = dir.said(&args);
    let metrics = std::fs::read_to_string(dir.path(output).join("metrics.jsonl")).unwrap();
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    (told, lines.filter(|line| line.get("eval_loss").is_some()).collect())
}

#[test]
fn rows_are_held_out_by_share_and_by_number() {
    let dir = TestDir::new();
    let (told, by_share) = evaluations(&dir, "share", &["--set", "data.eval_split=0.1"]);
    assert!(told.contains("8 of 80 rows, held out of the training rows"), "{told}");
    assert_eq!(by_share.len(), 2, "before and after");
    let (_, by_number) = evaluations(&dir, "number", &["--set", "data.eval_split=8"]);
    assert_eq!(by_number[0]["eval_loss"], by_share[0]["eval_loss"]);
    let (_, of_seed) = evaluations(&dir, "seed", &["--set", "data.eval_split=8", "--set", "train.seed=9"]);
    assert_ne!(of_seed[0]["eval_loss"], by_share[0]["eval_loss"]);
    // The run's own recipe repeats it.
    let again = dir.said(&["--recipe", "share/recipe.toml", "--output", "again"]);
    assert!(again.contains("8 of 80 rows, held out of the training rows"), "{again}");
    let weights = |folder: &str| std::fs::read(dir.path(folder).join("adapter_model.safetensors")).unwrap();
    assert!(weights("again") == weights("share"));
    let both = ["--set", "data.eval_split=0.1", "--eval-dataset", "rows.jsonl"];
    assert!(dir.refused(&lora(&both)).contains("`data.eval_split` has no effect beside `data.eval`"));
    assert!(dir.refused(&lora(&["--set", "data.eval_split=80"])).contains("leaves no row to train on"));
    assert!(dir.refused(&lora(&["--set", "data.eval_split=1.5"])).contains("a whole number of rows"));
}

#[test]
fn held_out_rows_that_are_trained_are_counted() {
    let dir = TestDir::new();
    let text = std::fs::read_to_string(dir.path("rows.jsonl")).unwrap();
    let three: Vec<&str> = text.lines().take(3).collect();
    dir.write(
        "held.jsonl",
        &three
            .join("\n")
            .to_uppercase()
            .replace("\"MESSAGES\"", "\"messages\"")
            .replace("\"ROLE\"", "\"role\"")
            .replace("\"CONTENT\"", "\"content\""),
    );
    let told = dir.said(&lora(&["--eval-dataset", "held.jsonl", "--dry-run"]));
    assert!(told.contains("3 of 3 held-out rows equal training rows, apart from case"), "{told}");
}

#[test]
fn rows_of_tokens_are_trained_as_they_are() {
    let dir = TestDir::new();
    dir.write("t.jsonl", r#"{"input_ids": [64, 65, 66, 67, 0], "labels": [-100, -100, 66, 67, -100], "attention_mask": [1, 1, 1, 1, 0]}"#);
    let lines = rows(&dir, &["--dataset", "t.jsonl"]);
    assert_eq!(lines.len(), 1);
    assert_eq!(lines[0].chars().filter(|c| !"⟦⟧".contains(*c)).count(), 4, "{lines:?}");
    assert!(lines[0].ends_with('⟧') && lines[0].chars().nth(2) == Some('⟦'), "{lines:?}");
    let told = dir.said(&lora(&["--dataset", "t.jsonl"]));
    assert!(told.contains("tokens: every row has `input_ids`"), "{told}");
    let args = ["eval", "--model", "model", "--dataset", "t.jsonl", "--json"];
    let figures: Value = serde_json::from_str(dir.said(&args).lines().next().unwrap()).unwrap();
    assert_eq!(figures["tokens"], 2);
    dir.write("bad.jsonl", r#"{"input_ids": [64, 9000]}"#);
    let data = ["data", "--model", "model", "--dataset", "bad.jsonl"];
    assert!(dir.refused(&data).contains("token 9000"));
}

#[test]
fn a_prompt_that_fills_the_row_is_left_out_and_counted() {
    let dir = TestDir::new();
    let long = format!("{{\"prompt\": \"{}\", \"completion\": \"b\"}}\n", "long ".repeat(100));
    dir.write("p.jsonl", &format!("{long}{{\"prompt\": \"a\", \"completion\": \"b\"}}\n"));
    let told =
        dir.said(&["data", "--model", "model", "--dataset", "p.jsonl", "--set", "data.max_seq_len=64"]);
    assert!(told.contains("1 row left out: its answer begins after data.max_seq_len tokens"), "{told}");
}

/// A split may be a slice, in the notation of Hugging Face datasets.
#[test]
fn a_part_of_a_split_is_taken() {
    let dir = TestDir::new();
    dir.write("odd.csv", ODD);
    let named = "odd.csv?prompt=question&completion=answer_text&split";
    for (split, first, rows_taken) in [
        ("train[:2]", "2 + 2?", 2),
        ("[34%:]", "3 + 3?", 2),
        ("[-1:]", "A river?", 1),
        ("[:100%]", "2 + 2?", 3),
    ] {
        let lines = rows(&dir, &["--dataset", &format!("{named}={split}")]);
        assert_eq!(lines.len(), rows_taken, "{split}: {lines:?}");
        assert!(lines[0].starts_with(first), "{split}: {lines:?}");
    }
    let data = ["data", "--model", "model", "--dataset"];
    let said = dir.said(&[&data[..], &[&format!("{named}=[1:3]")]].concat());
    assert!(said.contains("took rows 2 to 3 of 3 of [DIR]/odd.csv"), "{said}");
    // A bad row outside the slice is ignored.
    dir.write(
        "torn.jsonl",
        "{\"text\": \"One.\"}\n{\"text\": \"Two.\"}\n{\"text\": \n{\"text\": \"Three.\"}\n",
    );
    let part = |taken: &str| dir.command(&lora(&["--dry-run", "--dataset", taken])).output().unwrap();
    assert!(part("torn.jsonl?split=[:2]").status.success() && part("torn.jsonl?limit=2").status.success());
    assert!(!part("torn.jsonl?split=[1:]").status.success(), "the bad row stands among these");
    let none = dir.refused(&[&data[..], &[&format!("{named}=[3:]")]].concat());
    assert!(none.contains("its `split` leaves none of its 3 rows"), "{none}");
    let refused = dir.refused(&[&data[..], &[&format!("{named}=train[5]")]].concat());
    assert!(refused.contains("is not a split; accepted: a name, or rows such as train[:1000]"), "{refused}");
}
