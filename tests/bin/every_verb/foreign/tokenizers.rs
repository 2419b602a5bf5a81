//! Tokens listed in files beside tokenizer.json get the ids that `AutoTokenizer` gives them.

use serde_json::{Value, json};

use super::{edit, json, place, refused, succeed};
use crate::place::Place;

/// Returns the ids that `finetune data` shows for the row `text`.
fn ids(place: &Place, text: &str) -> Vec<u32> {
    place.write("rows.jsonl", &json!({ "text": text }).to_string());
    let (printed, _) = succeed(place, &["data", "--tokens", "--model", "model", "--dataset", "rows.jsonl"]);
    let id = |line: &str| {
        let mut words = line.split_whitespace();
        words.next()?.parse::<usize>().ok()?;
        words.next()?.parse().ok()
    };
    printed.lines().filter_map(id).collect()
}

fn special(text: &str) -> Value {
    json!({"content": text, "lstrip": false, "normalized": false, "rstrip": false, "single_word": false,
        "special": true})
}

#[test]
fn a_pad_token_without_an_id_is_no_fault() {
    let place = place("tiny-mistral");
    edit(&place.path("model/tokenizer_config.json"), |config| config["pad_token"] = json!("<pad>"));
    edit(&place.path("model/added_tokens.json"), |list| list["<pad>"] = json!(520));
    assert_eq!(ids(&place, "The river"), [1, 334, 493, 2]);
    for name in ["unk_token", "mask_token", "image_token"] {
        edit(&place.path("model/tokenizer_config.json"), |config| config[name] = json!(format!("<{name}>")));
    }
    assert_eq!(ids(&place, "The river"), [1, 334, 493, 2]);
}

#[test]
fn tokens_of_the_newer_list_have_ids() {
    let place = place("tiny-qwen2");
    edit(&place.path("model/tokenizer_config.json"), |config| {
        config["added_tokens_decoder"]["500"] = special("<x>");
    });
    assert_eq!(ids(&place, "The <x> river"), [260, 220, 500, 407, 499]);
    // The next free id, not the number in the list.
    edit(&place.path("model/tokenizer_config.json"), |config| {
        config["added_tokens_decoder"]["900"] = special("<y>");
        config["additional_special_tokens"] = json!(["<z>"]);
    });
    assert_eq!(ids(&place, "<z><y><x>"), [502, 501, 500, 499]);
}

#[test]
fn tokens_of_the_older_files_have_ids() {
    let place = place("tiny-qwen2");
    edit(&place.path("model/tokenizer_config.json"), |config| {
        config.as_object_mut().unwrap().remove("added_tokens_decoder");
    });
    edit(&place.path("model/added_tokens.json"), |list| *list = json!({"<x>": 600, "<y>": 510}));
    edit(&place.path("model/special_tokens_map.json"), |map| {
        map["mask_token"] =
            json!({"content": "<mask>", "lstrip": false, "rstrip": false, "normalized": false});
        map["additional_special_tokens"] = json!(["<z>", "<x>"]);
    });
    assert_eq!(ids(&place, "<x><y><z><mask>"), [501, 500, 503, 502, 499]);
}

#[test]
fn an_end_of_text_beyond_the_model_is_an_error_of_rows() {
    let place = place("tiny-qwen3");
    edit(&place.path("model/tokenizer_config.json"), |config| config["eos_token"] = json!("<end>"));
    let said = refused(&place, &["eval", "--model", "model", "--dataset", "rows.jsonl"]);
    assert!(said.contains(r#"("<end>"); the model has the ids below"#), "{said}");
}

/// A run's result gives the same ids as training did, including new tokens.
#[test]
fn what_is_saved_is_what_was_used() {
    let place = place("tiny-qwen2");
    edit(&place.path("model/tokenizer_config.json"), |config| {
        config["added_tokens_decoder"]["500"] = special("<x>");
    });
    let used = ids(&place, "The <x> river");
    let train = |output: &str, more: &[&str]| {
        let args = ["--model", "model", "--dataset", "rows.jsonl", "--output", output];
        let set = ["--set", "train.max_steps=1", "--set", "optimizer.learning_rate=1e-3"];
        succeed(&place, &[&args[..], &set, more].concat());
    };
    train("full", &[]);
    train("with-tokens", &["--recipe", "lora", "--set", "model.new_tokens=[\"<tool>\"]"]);
    let written = json(&place.path("with-tokens/tokenizer.json"));
    let added: Vec<&Value> =
        written["added_tokens"].as_array().unwrap().iter().map(|t| &t["content"]).collect();
    assert_eq!(added[added.len() - 2..], ["<x>", "<tool>"]);
    std::fs::rename(place.path("model"), place.path("first")).unwrap();
    std::fs::rename(place.path("full"), place.path("model")).unwrap();
    assert_eq!(ids(&place, "The <x> river"), used);
}
