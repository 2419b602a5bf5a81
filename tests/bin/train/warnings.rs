//! Warnings of runs that continue: before the first step, about recipe and model; later, about the
//! numbers.

use serde_json::{Value, json};

use crate::test_dir::{TestDir, lora};

/// Returns the output of a run that must succeed.
fn said(dir: &TestDir, args: &[&str]) -> String {
    let done = dir.command(args).output().unwrap();
    let said = dir.told(&done.stderr);
    assert!(done.status.success(), "{said}");
    said
}

fn warnings(said: &str) -> Vec<&str> {
    said.lines().filter_map(|line| line.strip_prefix("warning: ")).collect()
}

/// The arguments of a run on rows of text, one a step and in order.
fn on_text<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let base = ["--set", "data.train_on=all", "--set", "train.gradient_accumulation_steps=1"];
    lora(&[&base[..], more].concat())
}

#[test]
fn a_run_without_a_learning_rate_is_refused() {
    let dir = TestDir::new();
    let done = dir.command(&lora(&["--set", "train.max_steps=1", "--dry-run"])).output().unwrap();
    let one = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{one}");
    assert!(
        one.ends_with(
            "error: this run would learn nothing: it has one step, and that is warm-up\n\
             hint: try `--set train.max_steps=30`\n"
        ),
        "{one}"
    );
    assert_eq!(warnings(&said(&dir, &lora(&["--dry-run"]))), [""; 0]);
}

#[test]
fn dropout_inside_the_model_is_said() {
    let dir = TestDir::new();
    with_setting(&dir, "attention_dropout", json!(0.1));
    let shown = said(&dir, &lora(&["--dry-run"]));
    let wanted = "the model's config.json has `attention_dropout` 0.1: transformers drops values with this \
                  probability in training, finetune drops none";
    assert_eq!(warnings(&shown), [wanted]);
}

#[test]
fn graphs_on_a_cpu_are_said() {
    let dir = TestDir::new();
    let shown = said(&dir, &lora(&["--dry-run", "--set", "train.cuda_graphs=true"]));
    let wanted = "`train.cuda_graphs` has no effect on a CPU: operations run at once, without launches";
    assert_eq!(warnings(&shown), [wanted]);
}

fn with_positions(dir: &TestDir, positions: usize) {
    with_setting(dir, "max_position_embeddings", json!(positions));
}

fn with_setting(dir: &TestDir, key: &str, value: Value) {
    let path = dir.path("model/config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    config[key] = value;
    std::fs::write(&path, config.to_string()).unwrap();
}

#[test]
fn rows_longer_than_the_models_positions_are_said() {
    let dir = TestDir::new();
    with_positions(&dir, 60);
    let long = said(&dir, &lora(&["--dry-run"]));
    let shown = warnings(&long);
    assert_eq!(shown.len(), 1, "{long}");
    assert!(
        shown[0].contains(" rows have more tokens than the 60 positions that the model was made for"),
        "{long}"
    );
    assert!(shown[0].contains("write `data.max_seq_len = 60`"), "{long}");
    assert_eq!(
        warnings(&said(
            &dir,
            &lora(&["--dry-run", "--set", "data.max_seq_len=60", "--set", "data.on_bad_row=skip"])
        )),
        [""; 0]
    );
}

/// A row has at least two tokens, so finetune does not suggest a length that the recipe refuses.
#[test]
fn a_length_that_the_recipe_refuses_is_not_advised() {
    let dir = TestDir::new();
    with_positions(&dir, 1);
    let told = said(&dir, &lora(&["--dry-run"]));
    let shown = warnings(&told);
    assert_eq!(shown.len(), 1, "{told}");
    assert!(shown[0].contains("more tokens than the 1 positions"), "{told}");
    assert!(
        !shown[0].contains("data.max_seq_len") && shown[0].ends_with(": give the model a `rope_scaling`"),
        "{told}"
    );
}

#[test]
fn a_prompt_longer_than_the_models_positions_is_said() {
    let dir = TestDir::new();
    with_positions(&dir, 6);
    let run = |prompt: &str, tokens: &str| {
        said(&dir, &["generate", "--model", "model", "--prompt", prompt, "--max-new-tokens", tokens])
    };
    let wanted = " more tokens than the 6 positions that the model was made for, up to ";
    for (prompt, tokens, whom) in [
        ("the quiet river follows the narrow bridge and the gentle market", "1", "the prompt has"),
        ("the", "12", "the prompt and its answer have"),
    ] {
        let told = run(prompt, tokens);
        let shown = warnings(&told);
        assert_eq!(shown.len(), 1, "{told}");
        assert!(shown[0].starts_with(&format!("{whom}{wanted}")), "{told}");
        assert!(shown[0].contains("give a shorter prompt or a smaller `--max-new-tokens`"), "{told}");
    }
    assert_eq!(warnings(&run("the", "1")), [""; 0]);
}

/// The model memorizes one row and then meets another.
#[test]
fn a_loss_far_above_those_before_is_said() {
    let dir = TestDir::new();
    let row = |i| if i == 105 { "zebras fly 1234567 quickly" } else { "the island of a sea was quiet" };
    dir.write(
        "rows.jsonl",
        &(1..=110).map(|i| json!({ "text": row(i) }).to_string() + "\n").collect::<String>(),
    );
    let more = ["--set", "train.max_steps=110", "--set", "optimizer.learning_rate=1e-2"];
    let told = said(&dir, &on_text(&more));
    // The warning about the learning rate comes before the first step.
    let shown: Vec<&str> = warnings(&told).into_iter().filter(|text| text.starts_with("step ")).collect();
    assert_eq!(shown.len(), 1, "{told}");
    assert!(
        shown[0].starts_with("step 105: the loss ") && shown[0].contains("of the 64 steps before it"),
        "{told}"
    );
}

/// No text uses some rows of the embedding, so they never get a gradient.
#[test]
fn a_tensor_without_a_gradient_is_said() {
    let dir = TestDir::new();
    for steps in ["5", "12"] {
        let more = ["--set", r#"model.new_tokens=["<never>"]"#, "--set"];
        let steps_key = format!("train.max_steps={steps}");
        let output = format!("out{steps}");
        let args = on_text(&[&more[..], &[steps_key.as_str()]].concat());
        let args: Vec<&str> =
            args.into_iter().map(|arg| if arg == "out" { output.as_str() } else { arg }).collect();
        let told = said(&dir, &args);
        let shown: Vec<&str> =
            warnings(&told).into_iter().filter(|text| text.contains("had no gradient")).collect();
        assert_eq!(shown.len(), 1, "{told}");
        let judged = if steps == "5" { "5" } else { "10" };
        assert!(shown[0].starts_with("1 of "), "{told}");
        assert!(
            shown[0].contains(&format!(
                "had no gradient in {judged} steps, and learn nothing: model.embed_tokens"
            )),
            "{told}"
        );
    }
    let told = said(&dir, &on_text(&["--set", "train.max_steps=12"]));
    assert_eq!(warnings(&told), [""; 0], "every matrix of an adapter has one");
}

/// The adapter's share of the output is too small for f32.
#[test]
fn a_run_that_does_not_move_is_said() {
    let dir = TestDir::new();
    let told = said(&dir, &on_text(&["--set", "adapter.lora_alpha=1e-60"]));
    let shown = warnings(&told);
    assert_eq!(shown.len(), 1, "{told}");
    assert!(
        shown[0].starts_with("step 3: the gradient norm has been 0 for 3 steps: the model no longer learns"),
        "{told}"
    );
}
