//! Chat templates against Jinja2 as configured by transformers
//! (tests/golden/scripts/make_jinja.py).

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use chrono::DateTime;
use finetune::data::ChatTemplate;
use finetune::data::template::TemplateInputs;
use serde_json::Value;

use super::golden;
use crate::skipped::skipped;

const TOKENS: [(&str, &str); 4] =
    [("bos_token", "<s>"), ("eos_token", "</s>"), ("pad_token", "<pad>"), ("unk_token", "<unk>")];

/// Templates whose output intentionally differs from Jinja2's (see the module `jinja`).
const DIFFERENT: [&str; 7] = [
    // Names of characters.
    r"{{ '\N{BULLET}' }}",
    // Bytes.
    "{{ 'ab'.encode() }}",
    // Lookups that Python refuses.
    "{{ [1,2,3][1.0] }}|",
    "{{ {'x': 1}.items()[0] }}|",
    "{{ ([1,2,3]|select('odd'))[0] }}|",
    // An empty namespace is false.
    "{{ 'x' if namespace() else 'y' }}",
    // A list, not a tuple.
    "{% macro w(a, b=1) %}{% endmacro %}{{ w.name }}{{ w.arguments }}{{ w.caller }}",
];

/// A dict with the keys 1 and True, which are one key in Python. In minijinja the two are equal but
/// have different hashes: a map mostly holds both, and one entry if parts of the hashes collide.
const LEFT_TO_CHANCE: &str = "{{ (1, 2)|tojson }}{{ {1: 2, true: 3, none: 4, 1.5: 5}|tojson }}";

fn read(path: PathBuf) -> Value {
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap()
}

#[test]
fn small_templates_print_what_jinja_prints() {
    let goldens = read(golden("jinja/cases.json"));
    let messages = goldens["messages"].as_array().unwrap();
    let inputs =
        TemplateInputs { tools: Some(&goldens["tools"]), add_generation_prompt: false, options: None };
    let (mut failures, mut different) = (Vec::new(), Vec::new());
    let cases = goldens["cases"].as_array().unwrap();
    for case in cases {
        let text = case["template"].as_str().unwrap();
        let actual = ChatTemplate::from_text(text, &TOKENS)
            .and_then(|template| template.render(messages, &inputs))
            .map(|rendered| rendered.text)
            .map_err(|error| error.to_string());
        let panics = |why: &String| why.contains("internal") || why.contains("called `");
        assert!(!actual.as_ref().is_err_and(panics), "{text}: {actual:?}");
        if text != LEFT_TO_CHANCE && actual.as_deref().ok() != case["text"].as_str() {
            let failed = if DIFFERENT.contains(&text) { &mut different } else { &mut failures };
            failed.push(format!("{text}\n    {actual:?}\n    instead of {}{}", case["text"], case["error"]));
        }
    }
    assert!(failures.is_empty(), "{} of {} differ:\n{}", failures.len(), cases.len(), failures.join("\n"));
    assert_eq!(different.len(), DIFFERENT.len(), "these are no longer different: {different:#?}");
    assert!(cases.len() >= 600, "{} cases", cases.len());
}

/// Whole templates from outside the project, with the output that the script stored.
#[test]
fn whole_templates_print_what_transformers_prints() {
    let Some(file) = std::env::var_os("FINETUNE_JINJA_RENDERINGS") else {
        skipped("tests on whole templates", "set FINETUNE_JINJA_RENDERINGS to a file of make_jinja.py");
        return;
    };
    let goldens = read(file.into());
    let now = DateTime::parse_from_rfc3339(goldens["now"].as_str().unwrap()).unwrap();
    let chats: BTreeMap<&str, &Value> = goldens["chats"]
        .as_array()
        .unwrap()
        .iter()
        .map(|chat| (chat["name"].as_str().unwrap(), chat))
        .collect();
    let mut templates: BTreeMap<(&str, &str), ChatTemplate> = BTreeMap::new();
    let (mut failures, results) = (Vec::new(), goldens["results"].as_array().unwrap());
    for result in results {
        let (path, name) = (result["path"].as_str().unwrap(), result["name"].as_str().unwrap());
        let template = templates
            .entry((path, name))
            .or_insert_with(|| ChatTemplate::from_text(&template_text(path, name), &TOKENS).unwrap().at(now));
        let chat = chats[result["chat"].as_str().unwrap()];
        let prompt = result["prompt"].as_bool().unwrap();
        let inputs =
            TemplateInputs { tools: chat.get("tools"), add_generation_prompt: prompt, options: None };
        let actual = template.render(chat["messages"].as_array().unwrap(), &inputs);
        let agrees = match &actual {
            Ok(actual) => {
                result["text"] == actual.text.as_str()
                    && result["spans"] == characters(&actual.text, &actual.spans)
            }
            Err(_) => result["error"].is_string(),
        };
        if !agrees {
            failures.push(format!(
                "{path} {name}: {} {prompt}: {actual:?}\n    instead of {result}",
                chat["name"]
            ));
        }
    }
    let count =
        format!("{} of {} renderings of {} templates", failures.len(), results.len(), templates.len());
    assert!(failures.is_empty(), "{count} differ:\n{}", failures.join("\n"));
}

/// Returns the text of a template file, or of the template `name` in a tokenizer_config.json.
fn template_text(path: &str, name: &str) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    if path.ends_with(".jinja") {
        return text;
    }
    let config: Value = serde_json::from_str(&text).unwrap();
    let actual = match &config["chat_template"] {
        Value::Array(named) => {
            named.iter().find(|entry| entry["name"] == name).map(|entry| &entry["template"])
        }
        Value::Object(named) => named.get(name),
        text => Some(text),
    };
    actual.and_then(Value::as_str).unwrap().to_owned()
}

/// Converts spans to characters, as transformers counts them.
fn characters(text: &str, spans: &[Range<usize>]) -> Value {
    let character_index = |at: usize| text[..at].chars().count();
    spans
        .iter()
        .map(|span| Value::from(vec![character_index(span.start), character_index(span.end)]))
        .collect()
}

#[test]
fn line_ends_of_a_template_are_not_those_of_its_rows() {
    let render = |text: &str| {
        let messages = [serde_json::json!({"role": "user", "content": "a\r\nb"})];
        ChatTemplate::from_text(text, &[])
            .unwrap()
            .render(&messages, &TemplateInputs::default())
            .unwrap()
            .text
    };
    assert_eq!(render("x\r\ny\r{{ messages[0].content }}\r\n"), "x\ny\na\r\nb");
    assert_eq!(render("{% if true %}\r\nx{% endif %}\r\n\r\n"), "x");
}
