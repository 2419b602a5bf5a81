//! Tokenizers and chat templates against transformers 5.23 (tests/golden/chat).

use serde_json::Value;

use finetune::data::template::TemplateInputs;
use finetune::data::{DataOptions, Example, ParsedRow, Tokenizer, encode};
use finetune::recipe::enums::OnBadRow;

use super::{MODELS, golden, template, tokenizer};

fn goldens(model: &str) -> Value {
    let path = golden("chat").join(format!("{model}.json"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn ids_and_text_are_those_of_transformers() {
    for model in MODELS {
        let tokenizer = tokenizer(model);
        let goldens = goldens(model);
        let cases = goldens["encode"].as_array().unwrap();
        assert!(!cases.is_empty(), "{model}");
        for case in cases {
            let text = case["text"].as_str().unwrap();
            let with = tokenizer.encode(text, true).unwrap();
            let without = tokenizer.encode(text, false).unwrap();
            assert_eq!(with, ids(&case["ids"]), "{model}: {text:?}");
            assert_eq!(without, ids(&case["ids_no_special"]), "{model}: {text:?}");
            assert_eq!(tokenizer.decode(&without, false).unwrap(), case["decoded"], "{model}: {text:?}");
            assert_eq!(
                tokenizer.decode(&with, true).unwrap(),
                case["decoded_skip_special"],
                "{model}: {text:?}"
            );
        }
        let text =
            |token: Option<&finetune::data::tokenizer::SpecialToken>| token.map(|token| token.text.clone());
        for (actual, key) in [(tokenizer.bos(), "bos"), (tokenizer.eos(), "eos"), (tokenizer.pad(), "pad")] {
            assert_eq!(text(actual).as_deref(), goldens[key].as_str(), "{model}: {key}");
        }
    }
}

#[test]
fn text_streams_as_it_decodes() {
    for model in MODELS {
        let tokenizer = tokenizer(model);
        for case in goldens(model)["encode"].as_array().unwrap() {
            let all = ids(&case["ids_no_special"]);
            let mut stream = tokenizer.stream(false);
            let mut text = String::new();
            for id in &all {
                text.push_str(&stream.push(*id).unwrap());
            }
            text.push_str(&stream.finish().unwrap());
            assert_eq!(text, case["decoded"], "{model}");
        }
    }
}

#[test]
fn chats_render_byte_for_byte() {
    let (mut rendered, mut refused) = (0, 0);
    for model in MODELS {
        let tokenizer = tokenizer(model);
        let template = template(&tokenizer);
        let goldens = goldens(model);
        assert_eq!(template.marks_generation(), goldens["generation_tags_in_template"], "{model}");
        for chat in goldens["chats"].as_array().unwrap() {
            let about = format!("{model}: {} {}", chat["name"], chat["add_generation_prompt"]);
            // Two goldens set `enable_thinking`, which finetune never sets.
            if chat["kwargs"].as_object().unwrap().keys().any(|key| key != "tools") {
                continue;
            }
            let inputs = TemplateInputs {
                tools: chat["kwargs"].get("tools"),
                add_generation_prompt: chat["add_generation_prompt"].as_bool().unwrap(),
                options: None,
            };
            let actual = template.render(chat["messages"].as_array().unwrap(), &inputs);
            match chat["error"].as_str() {
                Some(error) => {
                    refused += 1;
                    assert!(
                        actual.unwrap_err().to_string().ends_with(&format!("caused by: {error}")),
                        "{about}"
                    );
                }
                None => {
                    rendered += 1;
                    let actual = actual.unwrap();
                    assert_eq!(actual.text, chat["text"], "{about}");
                    assert_eq!(tokenizer.encode(&actual.text, false).unwrap(), ids(&chat["ids"]), "{about}");
                }
            }
        }
    }
    assert_eq!((rendered, refused), (134, 13));
}

/// The assistant's tokens, found by the template's tags and by prefix difference. The goldens of
/// templates without tags were made with tags added.
#[test]
fn trained_tokens_are_those_of_transformers() {
    let mut compared = 0;
    for model in MODELS {
        let tokenizer = tokenizer(model);
        for chat in goldens(model)["chats"].as_array().unwrap() {
            let is_plain = chat["kwargs"].as_object().unwrap().keys().all(|key| key == "tools");
            let last = chat["messages"].as_array().unwrap().last().unwrap()["role"].clone();
            if chat["error"].is_string()
                || chat["add_generation_prompt"] == true
                || !is_plain
                || last != "assistant"
            {
                continue;
            }
            let about = format!("{model}: {}", chat["name"]);
            let example = encode(&tokenizer, chat).unwrap_or_else(|why| panic!("{about}: {why}"));
            let mask: Vec<bool> = ids(&chat["assistant_mask"]).into_iter().map(|bit| bit == 1).collect();
            assert_eq!(example.ids, ids(&chat["ids"]), "{about}");
            assert_eq!(example.trained, mask, "{about}");
            compared += 1;
        }
    }
    assert_eq!(compared, 86);
}

/// An assistant that speaks first: its turn is found without a preceding chat.
#[test]
fn an_assistant_may_begin() {
    for model in ["tiny-llama", "tiny-llama3", "tiny-phi3", "tiny-qwen2", "tiny-qwen3"] {
        let tokenizer = tokenizer(model);
        let goldens = goldens(model);
        let chat =
            goldens["chats"].as_array().unwrap().iter().find(|c| c["name"] == "assistant_first").unwrap();
        let example = encode(&tokenizer, chat).unwrap();
        let mask: Vec<bool> = ids(&chat["assistant_mask"]).into_iter().map(|bit| bit == 1).collect();
        assert_eq!((example.ids, example.trained), (ids(&chat["ids"]), mask), "{model}");
    }
}

fn encode(tokenizer: &Tokenizer, chat: &Value) -> Result<Example, String> {
    let template = template(tokenizer);
    let options = DataOptions { on_bad_row: OnBadRow::Stop, ..DataOptions::default() };
    let encoder = encode::Encoder::new(tokenizer, Some(&template), &options);
    let record = ParsedRow::Messages {
        messages: chat["messages"].as_array().unwrap().clone(),
        tools: chat["kwargs"].get("tools").cloned(),
        counts: Vec::new(),
        options: None,
    };
    let origin = finetune::data::Origin {
        file: std::path::Path::new("golden").into(),
        row: finetune::data::RowOrigin::Line(1),
    };
    match encoder.encode(&record, &origin, false).map(|row| row.encoding) {
        Ok(encode::Encoding::Examples(mut examples)) if examples.len() == 1 => Ok(examples.remove(0)),
        other => Err(format!("{other:?}")),
    }
}
