//! The chat template through the binary: chosen by name, saved with every result, and read from
//! there.

use std::path::Path;

use insta::assert_snapshot;
use serde_json::Value;

use crate::data::chats::texts;
use crate::test_dir::{TestDir, lora};

/// A template of no model, whose generation prompt names the speaker.
const OWN: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}\
                   {% if add_generation_prompt %}<assistant>{% endif %}";

const CHAT: &str = r#"{"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "No"}]}"#;

/// Renders the chat with the template `name`, with ⟦ and ⟧ around trained text.
fn rendered(name: &str) -> String {
    let dir = TestDir::new();
    dir.write("chat.jsonl", CHAT);
    let set = format!("data.chat_template={name}");
    let args = ["data", "--tokens", "--model", "model", "--dataset", "chat.jsonl", "--set", &set];
    let output = dir.command(&args).output().unwrap();
    let told = dir.told(&[&output.stdout[..], &output.stderr].concat());
    assert!(told.contains(&format!("chat template: `{name}`")), "{told}");
    texts(&output).remove(0)
}

#[test]
fn every_name_is_the_template_that_the_field_knows() {
    assert_snapshot!(rendered("chatml"), @"
    <|im_start|><|im_start|>system
    Be kind.<|im_end|>
    <|im_start|>user
    Hi<|im_end|>
    <|im_start|>assistant
    ⟦Yes<|im_end|>⟧
    <|im_start|>user
    Bye<|im_end|>
    <|im_start|>assistant
    ⟦No<|im_end|>⟧
    ");
    assert_snapshot!(rendered("llama3"), @"
    <|im_start|><|start_header_id|>system<|end_header_id|>

    Be kind.<|eot_id|><|start_header_id|>user<|end_header_id|>

    Hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>

    ⟦Yes<|eot_id|>⟧<|start_header_id|>user<|end_header_id|>

    Bye<|eot_id|><|start_header_id|>assistant<|end_header_id|>

    ⟦No<|eot_id|><|im_end|>⟧
    ");
    assert_snapshot!(rendered("gemma"), @"
    <|im_start|><start_of_turn>user
    Be kind.

    Hi<end_of_turn>
    <start_of_turn>model
    ⟦Yes<end_of_turn>
    ⟧<start_of_turn>user
    Bye<end_of_turn>
    <start_of_turn>model
    ⟦No<end_of_turn>
    <|im_end|>⟧
    ");
    assert_snapshot!(rendered("mistral"), @"
    <|im_start|>[INST] Hi[/INST]⟦ Yes<|im_end|>⟧[INST] Be kind.

    Bye[/INST]⟦ No<|im_end|>⟧
    ");
    assert_snapshot!(rendered("phi"), @"
    <|system|>
    Be kind.<|end|>
    <|user|>
    Hi<|end|>
    <|assistant|>
    ⟦Yes<|end|>
    ⟧<|user|>
    Bye<|end|>
    <|assistant|>
    ⟦No<|end|>
    <|im_end|>⟧
    ");
    assert_snapshot!(rendered("qwen"), @"
    <|im_start|>system
    Be kind.<|im_end|>
    <|im_start|>user
    Hi<|im_end|>
    <|im_start|>assistant
    ⟦Yes<|im_end|>⟧
    <|im_start|>user
    Bye<|im_end|>
    <|im_start|>assistant
    ⟦No<|im_end|>⟧
    ");
    assert_snapshot!(rendered("alpaca"), @"
    <|im_start|>Be kind.

    ### Instruction:
    Hi

    ### Response:
    ⟦Yes<|im_end|>⟧

    ### Instruction:
    Bye

    ### Response:
    ⟦No<|im_end|>⟧
    ");
    assert_snapshot!(rendered("vicuna"), @"<|im_start|>Be kind. USER: Hi ASSISTANT:⟦ Yes<|im_end|>⟧USER: Bye ASSISTANT:⟦ No<|im_end|>⟧");
    assert_snapshot!(rendered("zephyr"), @"
    <|system|>
    Be kind.<|im_end|>
    <|user|>
    Hi<|im_end|>
    <|assistant|>
    ⟦Yes<|im_end|>⟧
    <|user|>
    Bye<|im_end|>
    <|assistant|>
    ⟦No<|im_end|>⟧
    ");
}

#[test]
fn a_name_that_is_none_is_refused_with_the_names() {
    let dir = TestDir::new();
    let args = ["data", "--model", "model", "--dataset", "rows.jsonl", "--set", "data.chat_template=chatlm"];
    assert_snapshot!(dir.refused(&args), @r#"
    error: cannot use these settings
      caused by: --set data.chat_template=chatlm: `data.chat_template` is "chatlm": cannot read [DIR]/chatlm: No such file or directory (os error 2); accepted: Jinja text, a file that holds it, a name (chatml, llama3, gemma, mistral, phi, qwen, alpaca, vicuna, zephyr)
    "#);
}

/// Returns the chat template of the folder `name`, which must hold it once.
fn template_in(dir: &TestDir, name: &str) -> String {
    let config = std::fs::read_to_string(dir.path(name).join("tokenizer_config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config.get("chat_template"), None, "{name}");
    assert!(dir.path(name).join("tokenizer.json").is_file(), "{name}");
    std::fs::read_to_string(dir.path(name).join("chat_template.jinja")).unwrap()
}

/// Trains with [`OWN`] and saves a checkpoint.
fn train(dir: &TestDir, recipe: &str, output: &str) {
    dir.write("own.jinja", OWN);
    let mut args = lora(&["--set", "data.chat_template=own.jinja", "--set", "checkpoint.save_steps=2"]);
    args.iter_mut().for_each(|arg| match *arg {
        "lora" => *arg = recipe,
        "out" => *arg = output,
        _ => {}
    });
    let told = dir.said(&args);
    assert!(
        told.contains("has a chat template of its own, which is not used: they differ in line 1"),
        "{told}"
    );
}

/// The loss of `finetune eval` with `more`.
fn loss(dir: &TestDir, more: &[&str]) -> f64 {
    let args = ["eval", "--dataset", "rows.jsonl", "--json", "--set", "data.max_seq_len=96"];
    let output = dir.command(&[&args[..], more].concat()).output().unwrap();
    assert!(output.status.success(), "{}", dir.told(&output.stderr));
    let figures: Value = serde_json::from_slice(&output.stdout).unwrap();
    figures["loss"].as_f64().unwrap()
}

#[test]
fn an_adapter_keeps_its_template_and_verbs_read_it() {
    let dir = TestDir::new();
    train(&dir, "lora", "out");
    for folder in ["out", "out/checkpoint-2"] {
        assert_eq!(template_in(&dir, folder), OWN);
    }
    let adapter = ["--model", "model", "--adapter", "out"];
    let own = loss(&dir, &adapter);
    let given = [&adapter[..], &["--set", "data.chat_template=own.jinja"]].concat();
    assert_eq!(loss(&dir, &given), own);
    let other = [&["eval", "--dataset", "rows.jsonl"], &adapter[..], &["--set", "data.chat_template=zephyr"]];
    assert_snapshot!(dir.refused(&other.concat()), @r#"
    error: `data.chat_template` is not the chat template that the adapter in [DIR]/out was trained with
      caused by: they differ in line 1: "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_t" in its own, "{%- for message in messages -%}" in `zephyr`
    hint: remove `data.chat_template`: the adapter's own is used then
    "#);
    // A merged model and its GGUF file hold the template, and the loss is the same.
    dir.said(&["merge", "--model", "model", "--adapter", "out", "--output", "merged"]);
    assert_eq!(template_in(&dir, "merged"), OWN);
    assert!((loss(&dir, &["--model", "merged"]) - own).abs() < 1e-4);
    dir.said(&["export", "--model", "merged", "--format", "gguf", "--output", "m.gguf"]);
    assert!(holds(&dir.path("m.gguf"), OWN));
    // A run that continues from the adapter uses the adapter's template.
    let go_on = ["--set", "adapter.path=out", "--output", "on"];
    let mut args = lora(&go_on);
    args.retain(|arg| *arg != "out");
    let at = args.iter().position(|arg| *arg == "--output").unwrap();
    args.remove(at);
    let recipe = args.iter().position(|arg| *arg == "--recipe").unwrap();
    args.drain(recipe..recipe + 2);
    args.extend(["--set", "optimizer.learning_rate=1e-4"]);
    dir.said(&args);
    assert_eq!(template_in(&dir, "on"), OWN);
}

/// Returns true if the file at `path` holds `text`.
fn holds(path: &Path, text: &str) -> bool {
    std::fs::read(path).unwrap().windows(text.len()).any(|part| part == text.as_bytes())
}

#[test]
fn a_model_keeps_the_template_it_was_trained_with() {
    let dir = TestDir::new();
    train(&dir, "full", "out");
    assert_eq!(template_in(&dir, "out"), OWN);
    let answer = dir.said(&["generate", "--model", "out", "--prompt", "a", "--max-new-tokens", "1"]);
    assert!(!answer.contains("warning"), "{answer}");
    // Without a configured template, the model's own one stays.
    let plain = lora(&[]);
    let plain: Vec<&str> = plain.into_iter().map(|arg| if arg == "out" { "plain" } else { arg }).collect();
    dir.said(&plain);
    let config = |folder: &str| std::fs::read(dir.path(folder).join("tokenizer_config.json")).unwrap();
    assert_eq!(config("plain"), config("model"));
    assert!(!dir.path("plain/chat_template.jinja").exists());
}

#[test]
fn further_templates_of_the_tokenizer_do_not_outlive_the_one_that_is_used() {
    let dir = TestDir::with_model("tiny-qwen3");
    std::fs::create_dir(dir.path("model/additional_chat_templates")).unwrap();
    dir.write("model/additional_chat_templates/tool_use.jinja", "{{ tools }}");
    train(&dir, "lora", "out");
    assert_eq!(template_in(&dir, "out"), OWN);
    assert!(!dir.path("out/additional_chat_templates").exists());
}

#[test]
fn markers_of_several_tokens_are_named() {
    let dir = TestDir::new();
    dir.write("chat.jsonl", CHAT);
    let data = ["data", "--model", "model", "--dataset", "chat.jsonl", "--rows", "0"];
    let sets = ["--set", "data.chat_template=phi"];
    let warning = "`model.new_tokens = [\"<|assistant|>\", \"<|end|>\"]` to make each one token";
    let told = dir.said(&[&data[..], &sets].concat());
    assert!(told.contains("warning: markers of the chat template are several tokens here"), "{told}");
    assert!(told.contains(warning), "{told}");
    let new = ["--set", r#"model.new_tokens=["<|assistant|>", "<|end|>"]"#];
    let told = dir.said(&[&data[..], &sets, &new].concat());
    assert!(!told.contains("several tokens"), "{told}");
}

#[test]
fn answers_that_lose_their_end_are_counted() {
    let dir = TestDir::new();
    dir.write("chat.jsonl", CHAT);
    let data = ["data", "--model", "model", "--dataset", "chat.jsonl", "--rows", "0"];
    let told = dir.said(&[&data[..], &["--set", "data.max_seq_len=58"]].concat());
    assert!(
        told.contains("1 row cut to data.max_seq_len, within the answer, whose end is not trained"),
        "{told}"
    );
}

#[test]
fn a_tokenizer_without_an_eos_is_a_warning() {
    let dir = TestDir::new();
    for name in ["tokenizer_config.json", "special_tokens_map.json"] {
        let path = dir.path("model").join(name);
        let text = std::fs::read_to_string(&path).unwrap();
        let mut object: serde_json::Map<String, Value> = serde_json::from_str(&text).unwrap();
        object.remove("eos_token");
        std::fs::write(&path, Value::Object(object).to_string()).unwrap();
    }
    dir.write("pairs.jsonl", r#"{"prompt": "2 + 2?", "completion": "4"}"#);
    let told = dir.said(&["data", "--model", "model", "--dataset", "pairs.jsonl"]);
    assert!(told.contains("names no EOS token: rows end without one"), "{told}");
}

#[test]
fn an_end_that_cannot_be_learned_is_named_with_the_way_out() {
    let dir = TestDir::new();
    dir.write("pairs.jsonl", r#"{"prompt": "2 + 2?", "completion": "4"}"#);
    untrain(&dir);
    let args = ["--dry-run", "--model", "model", "--recipe", "lora", "--dataset", "pairs.jsonl", "--set"];
    let told = dir.said(&[&args[..], &["train.max_steps=20"]].concat());
    assert!(
        told.contains("which this run cannot learn to write: the output layer has the same row for 20 other"),
        "{told}"
    );
    assert!(
        told.contains("so its loss stays above 3.0; write `model.new_tokens = [\"<|im_end|>\"]`"),
        "{told}"
    );
    let new = [&args[..], &["train.max_steps=20", "--set", r#"model.new_tokens=["<|im_end|>"]"#]].concat();
    let told = dir.said(&new);
    assert!(!told.contains("cannot learn"), "{told}");
    let told = dir.said(&[&args[..], &[r#"adapter.modules_to_save=["lm_head"]"#]].concat());
    assert!(!told.contains("cannot learn"), "{told}");
}

/// Gives 20 other tokens the EOS token's row of the output layer.
fn untrain(dir: &TestDir) {
    let path = dir.path("model/model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let names: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let head = names.get("lm_head.weight").unwrap_or(&names["model.embed_tokens.weight"]);
    let [start, end] = [0, 1].map(|at| head["data_offsets"][at].as_u64().unwrap() as usize + 8 + header);
    let row = (end - start) / head["shape"][0].as_u64().unwrap() as usize;
    let mut bytes = bytes.clone();
    let eos = 479;
    let of_eos = bytes[start + eos * row..start + (eos + 1) * row].to_vec();
    for token in 100..120 {
        bytes[start + token * row..start + (token + 1) * row].copy_from_slice(&of_eos);
    }
    std::fs::write(path, bytes).unwrap();
}
