//! Chats in the forms that users bring, through `finetune data`: the text of a row, with ⟦ and ⟧
//! around trained text.
//!
//! The cases of tests/golden/field follow public bug reports of other tools; their texts are
//! original.

use std::process::Output;

use crate::test_dir::{TestDir, golden};

/// Runs `finetune data` on a case's files, copied into `dir`.
fn data(dir: &TestDir, case: &str, files: &[&str], more: &[&str]) -> Output {
    let mut args =
        vec!["data", "--tokens", "--model", "model", "--rows", "10", "--set", "data.max_seq_len=400"];
    for file in files {
        std::fs::copy(golden("field").join(case).join(file), dir.path(file)).unwrap();
        if !file.ends_with(".jinja") {
            args.extend(["--dataset", file]);
        }
    }
    args.extend(more);
    dir.command(&args).output().unwrap()
}

/// Returns the texts of the rows in the table of `finetune data`.
pub(crate) fn texts(output: &Output) -> Vec<String> {
    let stdout = String::from_utf8(output.stdout.clone()).unwrap();
    let (mut rows, mut trained): (Vec<String>, bool) = (Vec::new(), false);
    for line in stdout.lines() {
        if line.starts_with("row ") {
            rows.push(String::new());
            trained = false;
            continue;
        }
        let Some(row) = rows.last_mut() else { continue };
        let mut fields = line.split_whitespace();
        let is_token = fields.next().is_some_and(|at| at.parse::<usize>().is_ok())
            && fields.next().is_some_and(|id| id.parse::<u32>().is_ok());
        let Some(piece) = line.rfind("  \"").filter(|_| is_token).map(|at| &line[at + 3..line.len() - 1])
        else {
            continue;
        };
        if (fields.next() == Some("train")) != trained {
            row.push(if trained { '⟧' } else { '⟦' });
            trained = !trained;
        }
        row.push_str(&piece.replace("\\n", "\n").replace("\\\"", "\"").replace("\\\\", "\\"));
    }
    for row in &mut rows {
        if row.matches('⟦').count() > row.matches('⟧').count() {
            row.push('⟧');
        }
    }
    rows
}

fn report(dir: &TestDir, output: &Output) -> String {
    let text = dir.told(&[&output.stdout[..], &output.stderr].concat());
    assert!(output.status.success(), "{text}");
    text
}

#[test]
fn content_and_arguments_have_the_form_that_the_template_reads() {
    let dir = TestDir::with_model("tiny-qwen2");
    let template = ["--set", "data.chat_template=chat.jinja"];
    let output = data(&dir, "args-as-text", &["rows.jsonl", "chat.jinja"], &template);
    let call = "<|im_start|>assistant\n⟦<call>get_temp\n{\"city\": \"Brno\"}\n</call><|im_end|>⟧\n";
    assert!(texts(&output)[0].contains(call), "{}", report(&dir, &output));
    let output = data(&dir, "parts-alone", &["rows.jsonl", "chat.jinja"], &template);
    let whole = "<|im_start|>user\nName a river.<|im_end|>\n<|im_start|>assistant\n⟦The Elph.<|im_end|>⟧\n";
    assert_eq!(texts(&output), [whole, whole], "{}", report(&dir, &output));
}

#[test]
fn turns_are_trained_where_they_stand_in_the_whole_chat() {
    let dir = TestDir::with_model("tiny-qwen2");
    let template = ["--set", "data.chat_template=chat.jinja"];
    let output = data(&dir, "think-in-the-last-turn-alone", &["rows.jsonl", "chat.jinja"], &template);
    let whole = "<|im_start|>user\nName a river.<|im_end|>\n<|im_start|>assistant\n⟦The Elph.<|im_end|>⟧\n\
                 <|im_start|>user\nAnd a town?<|im_end|>\n<|im_start|>assistant\n\
                 ⟦<think>\n\n</think>\n\nStrelsau.<|im_end|>⟧\n";
    assert_eq!(texts(&output), [whole], "{}", report(&dir, &output));
    assert!(report(&dir, &output).contains("83 tokens, 34 trained"), "{}", report(&dir, &output));
}

#[test]
fn calls_of_every_dialect_are_calls() {
    let dir = TestDir::with_model("tiny-qwen3");
    let call = "⟦<tool_call>\n{\"name\": \"get_temp\", \"arguments\": {\"city\": \"Brno\"}}\n</tool_call><|im_end|>⟧";
    let output = data(&dir, "function-call-of-2023", &["rows.jsonl"], &[]);
    let rows = texts(&output);
    assert_eq!(rows.len(), 2, "{}", report(&dir, &output));
    for row in &rows {
        assert!(row.contains(call) && row.contains("\"name\": \"get_temp\", \"description\""), "{row}");
    }
    let output = data(&dir, "tool-call-and-tool-response", &["rows.jsonl"], &[]);
    let rows = texts(&output);
    assert!(rows[0].contains(call), "{rows:?}");
    assert!(rows[0].contains("<tool_response>\n7\n</tool_response>"), "{rows:?}");
}

#[test]
fn keys_beside_the_messages_are_read_or_named() {
    let dir = TestDir::with_model("tiny-qwen3");
    let rows = texts(&data(&dir, "system-beside-messages", &["rows.jsonl"], &[]));
    assert!(
        rows[0].starts_with("<|im_start|>system\nTalk like a pirate.<|im_end|>\n<|im_start|>user\nHi"),
        "{rows:?}"
    );
    let rows = texts(&data(&dir, "loss-of-a-message", &["rows.jsonl"], &[]));
    assert!(rows[0].contains("assistant\nb<|im_end|>") && rows[0].contains("d<|im_end|>⟧"), "{rows:?}");
    let rows = texts(&data(&dir, "reasoning-under-another-name", &["rows.jsonl"], &[]));
    for row in &rows {
        assert!(row.ends_with("⟦<think>\nSum.\n</think>\n\n4<|im_end|>⟧\n"), "{row}");
    }
    assert_eq!(rows.len(), 3);
    dir.write("odd.jsonl", concat!(
        r#"{"id": 7, "messages": [{"role": "user", "content": "a", "mood": "x"}, {"role": "assistant", "content": "b"}]}"#,
        "\n",
        r#"{"id": 8, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train": false}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}"#,
    ));
    let args = ["data", "--tokens", "--model", "model", "--dataset", "odd.jsonl"];
    let output = dir.command(&args).output().unwrap();
    let said = report(&dir, &output);
    assert!(said.contains("not used: `id` (2 rows), `messages.mood` (1 row)"), "{said}");
    assert!(texts(&output)[1].contains("assistant\nb<|im_end|>"), "{:?}", texts(&output));
}

#[test]
fn roles_are_known_in_any_case() {
    let dir = TestDir::with_model("tiny-qwen3");
    for (case, rows) in [("roles-with-capitals", 1), ("from-with-capitals", 2)] {
        let texts_of_rows = texts(&data(&dir, case, &["rows.jsonl"], &[]));
        assert_eq!(texts_of_rows.len(), rows, "{case}");
        assert!(
            texts_of_rows[0].starts_with("<|im_start|>user\nHi") && texts_of_rows[0].contains("⟦"),
            "{case}: {texts_of_rows:?}"
        );
    }
}

#[test]
fn each_file_has_its_own_format() {
    let dir = TestDir::with_model("tiny-qwen3");
    let output = data(&dir, "two-sets-of-two-formats", &["tasks.jsonl", "chats.jsonl"], &[]);
    let said = report(&dir, &output);
    assert_eq!(texts(&output).len(), 5, "{said}");
    assert!(said.contains("tasks.jsonl: alpaca: ") && said.contains("chats.jsonl: messages: "), "{said}");
}

#[test]
fn special_tokens_in_a_text_are_named() {
    let dir = TestDir::with_model("tiny-qwen2");
    let said = report(&dir, &data(&dir, "special-tokens-in-a-text", &["rows.jsonl"], &[]));
    for token in ["<|im_end|>", "<|im_start|>"] {
        let warning = format!(
            "warning: messages hold {token:?} as text, which becomes the special token (1 row, first [DIR]/rows.jsonl:1)"
        );
        assert!(said.contains(&warning), "{said}");
    }
}

/// `finetune data` counts messages that the template omits; an empty trained turn is an error.
#[test]
fn what_the_template_leaves_out_is_said() {
    let dir = TestDir::new();
    dir.write("t.jinja", "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}");
    dir.write("calls.jsonl", concat!(
        r#"{"tools": [{"name": "f", "parameters": {}}], "messages": [{"role": "developer", "content": "Obey."}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "It is 7."}]}"#,
        "\n",
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}]}"#,
        "\n",
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}"#,
    ));
    let args =
        ["data", "--model", "model", "--dataset", "calls.jsonl", "--set", "data.chat_template=t.jinja"];
    let said = report(&dir, &dir.command(&args).output().unwrap());
    for part in [
        "reasoning (1 in 1 row)",
        "tool calls (1 in 1 row)",
        "developer messages (1 in 1 row)",
        "tool results (1 in 1 row)",
        "tools (1 row)",
    ] {
        assert!(said.contains(&format!("prints no {part}")), "{part}: {said}");
    }
    assert!(said.contains("warning: the chat template prints no"), "{said}");
    assert!(said.contains("calls.jsonl:2: message 1 (assistant) comes out empty: the chat template prints nothing of its tool calls"), "{said}");
    assert!(said.contains("warning: empty answers (1 in 1 row)"), "{said}");
}
