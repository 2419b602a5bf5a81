//! Chat forms on which templates disagree, through `finetune data`: content parts, calls with
//! arguments other than strings, chosen sides that repeat their prompt, and unknown keys and roles.

use serde_json::{Value, json};

use crate::test_dir::{TestDir, golden};

/// Returns the text of the rows `text`, as `finetune data` prints it for the model `name` with
/// `settings`.
fn shown(name: &str, text: &str, settings: &[&str]) -> String {
    let dir = TestDir::with_model(name);
    dir.write("chats.jsonl", text);
    for template in ["args-as-text", "think-in-the-last-turn-alone"] {
        let file = golden("field").join(template).join("chat.jinja");
        std::fs::copy(file, dir.path(&format!("{template}.jinja"))).unwrap();
    }
    let mut args =
        vec!["data", "--model", "model", "--dataset", "chats.jsonl", "--set", "data.max_seq_len=2000"];
    settings.iter().for_each(|setting| args.extend(["--set", setting]));
    dir.said(&args)
}

/// A folder with a model, a row in `chats.jsonl` and a template in `t.jinja`, and the command that
/// shows the row.
fn with_template(row: &str, template: &str) -> (TestDir, [&'static str; 7]) {
    let dir = TestDir::with_model("tiny-qwen2");
    dir.write("chats.jsonl", row);
    dir.write("t.jinja", template);
    (dir, ["data", "--model", "model", "--dataset", "chats.jsonl", "--set", "data.chat_template=t.jinja"])
}

/// A chat whose assistant calls `get_temp` with these arguments.
fn call(arguments: &str) -> String {
    format!(
        r#"{{"messages": [{{"role": "user", "content": "How warm is it?"}}, {{"role": "assistant", "content": "", "tool_calls": [{{"type": "function", "id": "call00000", "function": {{"name": "get_temp", "arguments": {arguments}}}}}]}}, {{"role": "tool", "name": "get_temp", "tool_call_id": "call00000", "content": "7"}}, {{"role": "assistant", "content": "7 degrees."}}]}}"#
    )
}

#[test]
fn parts_are_no_text_to_a_template_that_prints_text() {
    let row = r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "Name a river."}]}, {"role": "assistant", "content": [{"type": "text", "text": "The Elph."}]}]}"#;
    for (model, settings) in [
        ("tiny-llama3", &[][..]),
        ("tiny-gemma3", &[]),
        ("tiny-qwen2", &["data.chat_template=llama3"]),
        ("tiny-qwen2", &["data.chat_template=gemma"]),
    ] {
        let said = shown(model, row, settings);
        assert!(
            said.contains("Name a river.") && said.contains("⟦The Elph.<"),
            "{model} {settings:?}: {said}"
        );
        assert!(!said.contains("'text'") && !said.contains("warning: the chat template"), "{said}");
    }
    // finetune searches for each part separately: the template may print its own text between two
    // parts.
    let two = r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]}, {"role": "assistant", "content": "b"}]}"#;
    let (dir, args) = with_template(
        two,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content | e }}{% else %}{% for p in m.content %}{{ p.text }}\n--\n{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    );
    let said = dir.said(&args);
    assert!(said.contains("One\n--\ntwo\n--") && !said.contains("warning: the chat template"), "{said}");
}

/// Arguments may end in a string or a number: the end of the call is found in both cases.
#[test]
fn calls_are_trained_whatever_their_arguments_are() {
    let qwen = |arguments: &str, whole: &str| {
        let said = shown("tiny-qwen2", &call(arguments), &["data.chat_template=qwen"]);
        let wanted = format!(
            "⟦<tool_call>\n{{\"name\": \"get_temp\", \"arguments\": {whole}}}\n</tool_call><|im_end|>⟧"
        );
        assert!(said.contains(&wanted) && said.contains("⟦7 degrees.<|im_end|>⟧"), "{arguments}: {said}");
    };
    for arguments in [
        r#"{"city": "Brno", "days": 3}"#,
        r#"{"n": 1}"#,
        r#"{"exact": true, "at": null}"#,
        r#"{"l": ["a"]}"#,
        r#"{"at": {"lat": 49.2}}"#,
        r#"{"city": "Brno"}"#,
    ] {
        qwen(arguments, arguments);
    }
    for template in ["args-as-text", "think-in-the-last-turn-alone"] {
        let setting = format!("data.chat_template={template}.jinja");
        for arguments in [r#"{"city": "Brno", "days": 3}"#, r#"{"n": 1}"#, r#""{\"n\": 1}""#] {
            let said = shown("tiny-qwen2", &call(arguments), &[&setting]);
            let (end, result) = (
                arguments.trim_matches('"').replace('\\', ""),
                "warning: the chat template prints no tool results",
            );
            assert!(said.contains(&end), "{end}: {said}");
            assert!(said.contains("⟦7 degrees.") || said.contains("7 degrees.<|im_end|>⟧"), "{said}");
            assert!(!said.contains(result), "{template} prints results: {said}");
        }
    }
    let text = shown("tiny-qwen2", &call("\"\""), &["data.chat_template=args-as-text.jinja"]);
    assert!(text.contains("⟦7 degrees."), "{text}");
}

#[test]
fn the_first_calls_have_all_their_forms() {
    let row = |call: &str, content: &str| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": "q"}}, {{"role": "assistant", "content": {content}, "function_call": {call}}}, {{"role": "user", "content": "r"}}, {{"role": "assistant", "content": "ok"}}]}}"#
        )
    };
    let none = shown("tiny-qwen3", &row(r#"{"name": "g"}"#, "null"), &[]);
    assert!(none.contains(r#"{"name": "g", "arguments": {}}"#), "{none}");
    let text = shown("tiny-qwen3", &row(r#""{\"name\": \"g\", \"arguments\": {\"a\": 1}}""#, "null"), &[]);
    assert!(text.contains(r#"{"name": "g", "arguments": {"a": 1}}"#), "{text}");
    let empty = shown("tiny-qwen3", &row("{}", "\"Ahoy.\""), &[]);
    assert!(empty.contains("Ahoy.<|im_end|>⟧"), "{empty}");
    let beside = row(r#"{"name": "g", "arguments": {}}"#, r#""", "tool_calls": []"#);
    let beside = shown("tiny-qwen3", &beside, &[]);
    assert!(beside.contains(r#"{"name": "g", "arguments": {}}"#), "{beside}");
}

/// Trains the chosen answers of pairs.
const CHOSEN: [&str; 1] = ["data.format=preference_chosen"];

/// Cross-entropy trains one answer a row: pairs are refused until the recipe names the side.
#[test]
fn pairs_of_answers_are_refused_until_a_side_is_named() {
    let row = r#"{"prompt": "Hi", "chosen": " Ahoy.", "rejected": " No."}"#;
    let dir = TestDir::with_model("tiny-qwen3");
    dir.write("pairs.jsonl", row);
    let args = ["data", "--model", "model", "--dataset", "pairs.jsonl"];
    let refused = dir.refused(&args);
    assert!(refused.contains("cannot train on the preference rows of"), "{refused}");
    assert!(refused.contains("pairs.jsonl"), "{refused}");
    assert!(refused.contains("`objective.kind` is \"cross_entropy\""), "{refused}");
    assert!(
        refused.contains("or `data.format = \"preference_chosen\"` to train the chosen answers alone"),
        "{refused}"
    );
    for named in ["data.format=preference", "data.format=auto"] {
        let refused = dir.refused(&[&args[..], &["--set", named]].concat());
        assert!(refused.contains("preference rows"), "{named}: {refused}");
    }
    let said = shown("tiny-qwen3", row, &CHOSEN);
    assert!(said.contains("Ahoy.") && !said.contains("No."), "{said}");
}

/// UltraFeedback's form: `chosen` holds the prompt and the answer, beside `prompt`.
#[test]
fn a_chosen_side_that_repeats_its_prompt_is_one_chat() {
    let answer = |text: &str| {
        format!(r#"[{{"role": "user", "content": "Hi"}}, {{"role": "assistant", "content": "{text}"}}]"#)
    };
    for prompt in [r#""Hi""#, r#"[{"role": "user", "content": "Hi"}]"#] {
        let row = format!(
            r#"{{"prompt": {prompt}, "chosen": {}, "rejected": {}}}"#,
            answer("Ahoy."),
            answer("No.")
        );
        for model in ["tiny-qwen3", "tiny-gemma2"] {
            let said = shown(model, &row, &CHOSEN);
            assert_eq!(said.matches("Hi").count(), 1, "{model}: {said}");
            assert!(said.contains("Ahoy.<"), "{said}");
        }
    }
}

/// A prompt turn that recurs in the chosen side is not a repeated prompt.
#[test]
fn a_turn_that_comes_again_is_no_repeated_prompt() {
    let turn = |role: &str, text: &str| json!({ "role": role, "content": text });
    let again = [
        turn("user", "go on"),
        turn("assistant", "FIRST"),
        turn("user", "go on"),
        turn("assistant", "SECOND"),
    ];
    let row = json!({ "prompt": again[..1], "chosen": again, "rejected": again[..2] }).to_string();
    let said = shown("tiny-qwen3", &row, &CHOSEN);
    assert!(said.contains("FIRST<|im_end|>⟧") && said.contains("SECOND<|im_end|>⟧"), "{said}");
    assert_eq!(said.matches("go on").count(), 2, "{said}");
    let chosen = [turn("assistant", "HELLO"), turn("user", "yes"), turn("assistant", "BYE")];
    let row =
        json!({ "prompt": [turn("user", "yes")], "chosen": chosen, "rejected": chosen[..1] }).to_string();
    let said = shown("tiny-qwen3", &row, &CHOSEN);
    assert_eq!(said.matches("yes").count(), 2, "{said}");
    assert!(said.contains("HELLO<|im_end|>⟧") && said.contains("BYE<|im_end|>⟧"), "{said}");
}

/// A template whose head depends on a later message is refused for its row, not as an internal
/// error.
#[test]
fn turns_that_cannot_be_told_apart_are_refused() {
    let row = r#"{"messages": [{"role": "user", "content": "read"}, {"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}, {"role": "assistant", "content": "two and three"}]}"#;
    let template = "[{{ messages[-1].content | length }}]{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
    let (dir, args) = with_template(row, template);
    let refused = dir.refused(&args);
    assert!(refused.contains("cannot locate the assistant's text in message 3"), "{refused}");
}

#[test]
fn keys_without_a_place_are_named() {
    for (row, names) in [
        (
            r#"{"system": "S", "tools": [1], "chat_template_kwargs": {"a": 1}, "prompt": "Hi", "completion": " Ahoy."}"#,
            "`chat_template_kwargs` (1 row), `system` (1 row), `tools` (1 row)",
        ),
        (
            r#"{"system": "S", "question": "q", "chosen": "b", "rejected": "c"}"#,
            "`question` (1 row), `system` (1 row)",
        ),
        (
            r#"{"messages": [{"role": "system", "content": "S", "tools": [{"name": "f"}], "functions": [{"name": "f"}]}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#,
            "`messages.functions` (1 row), `messages.tools` (1 row)",
        ),
    ] {
        let is_pair = row.contains("rejected");
        let said = shown("tiny-qwen3", row, if is_pair { &CHOSEN } else { &[] });
        assert!(said.contains(&format!("not used: {names}\n")), "{said}");
    }
}

/// A file of one row is one row, whatever lists its other keys hold.
#[test]
fn a_file_of_one_row_holds_no_rows() {
    for (row, trained) in [
        (r#"{"question": "q", "answer": "Ahoy", "contexts": [{"text": "CONTEXT"}]}"#, "Ahoy"),
        (r#"{"instruction": "i", "output": "Ahoy", "meta": [{"a": 1}]}"#, "Ahoy"),
        (r#"{"text": "Ahoy", "meta": [{"a": "CONTEXT"}]}"#, "hoy"),
    ] {
        let said = shown("tiny-qwen3", row, &[]);
        assert!(said.contains(trained) && !said.contains("CONTEXT"), "{said}");
        assert!(said.contains("not used: "), "{said}");
    }
    // Rows inside a row of the same format are ambiguous.
    let dir = TestDir::with_model("tiny-qwen3");
    dir.write("chats.json", r#"{"text": "Three stories", "rows": [{"text": "One"}, {"text": "Two"}]}"#);
    let refused = dir.refused(&["data", "--model", "model", "--dataset", "chats.json"]);
    assert!(
        refused.contains("has the keys of a row, and so have those in its `rows`: write one row a line"),
        "{refused}"
    );
}

#[test]
fn special_tokens_are_looked_for_in_all_texts_of_a_chat() {
    let row = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "x <|im_end|> y"}], "tools": [{"type": "function", "function": {"name": "f", "description": "use <|im_start|>", "parameters": {}}}]}"#;
    let said = shown("tiny-qwen3", row, &[]);
    for token in ["<|im_end|>", "<|im_start|>"] {
        let warning =
            format!("warning: messages hold {token:?} as text, which becomes the special token (1 row");
        assert!(said.contains(&warning), "{said}");
    }
}

#[test]
fn roles_that_nobody_knows_are_named() {
    let row = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "Asistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}"#;
    let said = shown("tiny-qwen2", row, &["data.chat_template=chatml"]);
    let warning = "warning: messages of the role \"asistant\" are not trained (1 in 1 row); known roles: system, developer, user, assistant, tool\n";
    assert!(said.contains(warning), "{said}");
    let dir = TestDir::with_model("tiny-qwen3");
    dir.write(
        "chats.jsonl",
        r#"{"conversations": [{"from": "Question", "value": "Hi"}, {"from": "Answer", "value": "Ahoy."}]}"#,
    );
    let refused = dir.refused(&["data", "--model", "model", "--dataset", "chats.jsonl"]);
    assert!(
        refused.contains("no message is trained: its roles are answer, question; known: system"),
        "{refused}"
    );
}

#[test]
fn a_setting_for_chats_without_chats_is_said() {
    let said =
        shown("tiny-qwen3", r#"{"text": "One <|im_end|> two."}"#, &["data.sanitize_control_tokens=true"]);
    assert!(
        said.contains("warning: `data.sanitize_control_tokens` has no effect: no row is a chat"),
        "{said}"
    );
}

/// If a template prints only part of an answer, only that part is trained.
#[test]
fn an_answer_that_is_cut_by_its_template_is_said() {
    let row = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "One line.\nAnother line."}]}"#;
    let (dir, args) = with_template(
        row,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('\n')[0] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    );
    let said = dir.said(&args);
    assert!(
        said.contains("warning: the chat template leaves out some assistant messages (1 in 1 row)"),
        "{said}"
    );
}

/// With `data.sanitize_control_tokens`, control tokens inside a chat's texts stay text. The ids
/// equal those of transformers.
#[test]
fn control_tokens_in_a_text_stay_text() {
    let cases = std::fs::read_to_string(golden("chat/sanitized.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&cases).unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let dir = TestDir::with_model(case["model"].as_str().unwrap());
        dir.write(
            "chats.jsonl",
            &json!({ "messages": case["messages"], "tools": case["tools"] }).to_string(),
        );
        let args = ["data", "--model", "model", "--dataset", "chats.jsonl", "--tokens"];
        let sanitized = ["--set", "data.sanitize_control_tokens=true", "--set", "data.max_seq_len=2000"];
        let said = dir.said(&[&args[..], &sanitized].concat());
        let fields = said.lines().map(|line| line.split_whitespace().take(2).collect::<Vec<_>>());
        let ids: Vec<u64> = fields
            .filter(|fields| fields.len() == 2 && fields[0].parse::<usize>().is_ok())
            .filter_map(|fields| fields[1].parse().ok())
            .collect();
        let wanted: Vec<u64> = serde_json::from_value(case["ids"].clone()).unwrap();
        // A template that ends its last turn differently gets the EOS that stops generation.
        assert!(ids.starts_with(&wanted) && ids.len() <= wanted.len() + 1, "{case}\n{said}");
        assert!(!said.contains("becomes the special token"), "{said}");
    }
}
