//! Files of every kind to rows, and rows of every format to records.

use finetune::recipe::enums::{DataFormat, ObjectiveRows};
use std::path::Path;
use std::sync::Arc;

use parquet::data_type::ByteArrayType;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use serde_json::{Value, json};

use finetune::data::format::{convert, detect as detect_for};
use finetune::data::source::{DataFile, RawRow, read};
use finetune::data::{Origin, ParsedRow, RowOrigin, Split, Task};

use super::folder;

fn source(name: &str, bytes: &[u8]) -> DataFile {
    let folder = folder(&[(name, bytes)]);
    read(&folder.path().join(name), Split::Train).unwrap()
}

fn places(source: &DataFile) -> Vec<(RowOrigin, Value)> {
    source.rows.iter().map(|row| (row.origin.row, Value::Object(row.value.clone()))).collect()
}

#[test]
fn json_lines_are_located() {
    let text =
        b"\xEF\xBB\xBF{\"a\": 1}\r\n\n  {\"a\": 2}\n[3]\n{\"a\": \"\\ud800\"}\n{\"a\": \"\xff\"}\n{\"a\": 7}";
    let actual = source("a.jsonl", text);
    assert_eq!(
        places(&actual),
        [
            (RowOrigin::Line(1), json!({"a": 1})),
            (RowOrigin::Line(3), json!({"a": 2})),
            (RowOrigin::Line(5), json!({"a": null})),
            (RowOrigin::Line(7), json!({"a": 7}))
        ]
    );
    let bad: Vec<_> = actual.bad.iter().map(|bad| bad.origin.row).collect();
    assert_eq!(bad, [RowOrigin::Line(4), RowOrigin::Line(6)]);
    assert_eq!(actual.bad[0].fault.why, "the row is an array; an object is needed");
}

#[test]
fn json_files_hold_an_array_an_object_or_lines() {
    let rows = [(RowOrigin::Line(2), json!({"t": "a]}"})), (RowOrigin::Line(3), json!({"t": "\\\"["}))];
    let array = "[\n {\"t\": \"a]}\"},\n\n{\"t\": \"\\\\\\\"[\"}\n]";
    assert_eq!(places(&source("a.json", array.replace("\n\n", "\n").as_bytes())), rows);
    let object = "{\"version\": [1], \"data\":\n[{\"t\": 1},\n {\"t\": 2}]}";
    let actual = places(&source("a.json", object.as_bytes()));
    assert_eq!(actual, [(RowOrigin::Line(2), json!({"t": 1})), (RowOrigin::Line(3), json!({"t": 2}))]);
    let lines = "{\"t\": 1}\n{\"t\": 2}\n";
    let actual = places(&source("a.json", lines.as_bytes()));
    assert_eq!(actual, [(RowOrigin::Line(1), json!({"t": 1})), (RowOrigin::Line(2), json!({"t": 2}))]);
    let more = "[{\"t\": 1}]\n{\"t\": 2}[\n{\"t\": 3}]";
    let lines: Vec<RowOrigin> = places(&source("a.json", more.as_bytes())).iter().map(|row| row.0).collect();
    assert_eq!(lines, [RowOrigin::Line(1), RowOrigin::Line(2), RowOrigin::Line(3)]);
    let one = "{\"messages\": [{\"role\": \"user\"}]}";
    assert_eq!(places(&source("a.json", one.as_bytes())).len(), 1);
    let bad = source("a.json", b"[{\"t\": 1},\n{\"t\" 2},\n{\"t\": 3}]");
    assert_eq!((bad.rows.len(), bad.bad.len(), bad.bad[0].origin.row), (2, 1, RowOrigin::Line(2)));
}

#[test]
fn unusable_files_say_why() {
    for (name, text, why) in [
        ("a.json", "[{\"t\": 1}", "does not end"),
        ("a.json", "3", "a JSON array or object is needed"),
        ("a.json", "{\"a\": [{}], \"b\": [{}]}", "2 arrays of objects"),
        ("a.xlsx", "", "accepted: .jsonl"),
        ("a.jsonl.xz", "", "xz -dk a.jsonl.xz"),
        ("a.parquet", "PAR1", "a.parquet"),
        ("a.csv", "a,a\n1,2\n", "twice"),
    ] {
        let folder = folder(&[(name, text.as_bytes())]);
        let error = read(&folder.path().join(name), Split::Train).unwrap_err().to_string();
        assert!(error.contains(why), "{name} {text}: {error}");
    }
}

#[test]
fn tables_keep_quotes_and_lines() {
    let actual = source("a.csv", b"prompt,completion\n\"a, \"\"b\"\"\nc\",d\nonly one\n1,2\n");
    assert_eq!(
        places(&actual),
        [
            (RowOrigin::Line(2), json!({"prompt": "a, \"b\"\nc", "completion": "d"})),
            (RowOrigin::Line(5), json!({"prompt": "1", "completion": "2"}))
        ]
    );
    assert_eq!(actual.bad[0].to_string().rsplit_once('/').unwrap().1, "a.csv:4: 1 fields; the header has 2");
    let actual = source("a.tsv", b"text\nx,y\n");
    assert_eq!(places(&actual), [(RowOrigin::Line(2), json!({"text": "x,y"}))]);
}

#[test]
fn parquet_keeps_nested_messages() {
    let schema =
        "message rows { optional binary id (UTF8); required group messages (LIST) { repeated group list {
        required group element { required binary role (UTF8); required binary content (UTF8); } } } }";
    let schema = Arc::new(parquet::schema::parser::parse_message_type(schema).unwrap());
    let mut file = Vec::new();
    let mut writer =
        SerializedFileWriter::new(&mut file, schema, Arc::new(WriterProperties::default())).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let columns: [(&[&str], &[i16], &[i16]); 3] = [
        (&["x"], &[1, 0], &[0, 0]),
        (&["user", "assistant", "user"], &[1, 1, 1], &[0, 1, 0]),
        (&["hi", "ho", "é"], &[1, 1, 1], &[0, 1, 0]),
    ];
    for (values, definition, repetition) in columns {
        let mut column = group.next_column().unwrap().unwrap();
        let values: Vec<_> = values.iter().map(|text| (*text).into()).collect();
        column.typed::<ByteArrayType>().write_batch(&values, Some(definition), Some(repetition)).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    assert_eq!(
        places(&source("a.parquet", &file)),
        [
            (
                RowOrigin::Row(1),
                json!({"id": "x", "messages": [message("user", "hi"), message("assistant", "ho")]})
            ),
            (RowOrigin::Row(2), json!({"messages": [message("user", "é")]})),
        ]
    );
}

/// Files of pyarrow in rare codecs (tests/golden/scripts/make_parquet.py).
#[test]
fn parquet_is_unpacked_from_each_codec() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/data");
    let texts = ["lantern", "Brücke", "河流"].iter().enumerate();
    let texts: Vec<Value> = texts
        .map(|(number, word)| json!({"text": format!("{}{number}.", format!("The {word} ").repeat(12))}))
        .collect();
    for codec in ["gzip", "brotli", "lz4"] {
        let actual = read(&golden.join(format!("packed_{codec}.parquet")), Split::Train).unwrap();
        let rows: Vec<Value> = places(&actual).into_iter().map(|(_, value)| value).collect();
        assert_eq!(rows, texts, "{codec}");
    }
}

/// No tool here writes LZO, so the codec number of a gzip file is changed wherever it may be.
#[test]
fn a_codec_that_cannot_be_read_is_named() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/data/packed_gzip.parquet");
    let bytes = std::fs::read(golden).unwrap();
    // Numbers are stored doubled: 4 is gzip, 6 is LZO.
    let refusals = (0..bytes.len()).filter(|at| bytes[*at] == 4).filter_map(|at| {
        let mut changed = bytes.clone();
        changed[at] = 6;
        let folder = folder(&[("a.parquet", &changed[..])]);
        Some(read(&folder.path().join("a.parquet"), Split::Train).err()?.to_string())
    });
    let wanted = r#"its column "text" is packed with LZO; accepted: none, snappy, zstd, gzip, brotli, lz4; write it again with zstd"#;
    let refusals: Vec<String> = refusals.collect();
    assert!(refusals.iter().any(|why| why.contains(wanted)), "{refusals:#?}");
}

#[test]
fn a_folder_gives_its_split() {
    let files: [(&str, &[u8]); 5] = [
        ("README.md", b"about"),
        ("data/test-00000-of-00001.jsonl", b"{\"t\": \"test\"}"),
        ("data/train-00001-of-00002.jsonl", b"{\"t\": \"b\"}"),
        ("data/train-00000-of-00002.jsonl", b"{\"t\": \"a\"}"),
        ("dataset_infos.json", b"{}"),
    ];
    let folder = folder(&files);
    let texts = |split| {
        let actual = read(folder.path(), split).unwrap();
        let texts: Vec<String> =
            actual.rows.iter().map(|r| r.value["t"].as_str().unwrap().to_owned()).collect();
        (texts, actual.notes)
    };
    assert_eq!(
        texts(Split::Train),
        (vec!["a".into(), "b".into()], vec!["took the train split: 2 of 3 files".into()])
    );
    assert_eq!(texts(Split::Eval).0, ["test"]);

    let empty = super::folder(&[("notes.pdf", b"")]);
    let why = read(empty.path(), Split::Train).unwrap_err().to_string();
    assert!(why.contains("the folder holds no data file"), "{why}");
}

#[test]
fn texts_are_documents() {
    let folder = folder(&[("b.txt", b"two"), ("a.md", b"one")]);
    let actual = read(folder.path(), Split::Train).unwrap();
    let texts: Vec<_> =
        actual.rows.iter().map(|row| (row.value["text"].as_str().unwrap(), row.document)).collect();
    assert_eq!(texts, [("one", true), ("two", true)]);
}

fn rows(values: &[Value]) -> Vec<RawRow> {
    let origin =
        |i: usize| Origin { file: Arc::from(Path::new("x.jsonl")), row: RowOrigin::Line(i as u64 + 1) };
    let row = |(i, value): (usize, &Value)| RawRow {
        value: value.as_object().unwrap().clone(),
        origin: origin(i),
        document: false,
        format: None,
    };
    values.iter().enumerate().map(row).collect()
}

#[test]
fn formats_are_recognised() {
    let chat = json!([{"role": "user", "content": "a"}]);
    let table = [
        (json!({"messages": chat, "tools": []}), DataFormat::Messages),
        (json!({"messages": chat, "label": true}), DataFormat::Messages),
        (json!({"id": "1", "conversations": [{"from": "human", "value": "a"}]}), DataFormat::Sharegpt),
        (json!({"conversations": [], "chosen": {}, "rejected": {}}), DataFormat::Preference),
        (json!({"prompt": "a", "chosen": "b", "rejected": "c"}), DataFormat::Preference),
        (json!({"instruction": "a", "input": "", "output": "b"}), DataFormat::Alpaca),
        (json!({"instruction": "a", "output": "b"}), DataFormat::Alpaca),
        (
            json!({"instruction": "a", "context": "", "response": "b", "category": "c"}),
            DataFormat::Instruction,
        ),
        (json!({"prompt": "a", "completion": "b"}), DataFormat::PromptCompletion),
        (
            json!({"task_id": "1", "prompt": "a", "canonical_solution": "b", "test": "c"}),
            DataFormat::PromptCompletion,
        ),
        (json!({"question": "a", "answer": "b"}), DataFormat::QuestionAnswer),
        (json!({"text": "a", "meta": 1}), DataFormat::Text),
    ];
    for (row, format) in table {
        let (actual, why) = detect(&rows(&[row.clone(), row.clone()])).unwrap();
        assert_eq!(actual, format, "{row}");
        assert!(why.starts_with(&format!("{format}: every row has `")), "{why}");
    }
    let (actual, why) =
        detect(&rows(&[json!({"text": "a"}), json!({"text": "b"}), json!({"x": 1})])).unwrap();
    assert_eq!((actual, why.as_str()), (DataFormat::Text, "text: 2 of 3 rows have `text`"));
    let error = detect(&rows(&[json!({"text": "a"}), json!({"body": "b", "n": 1})])).unwrap_err().to_string();
    assert!(error.contains("1 of 2 rows have the keys of text"), "{error}");
    assert!(error.contains("x.jsonl:2 has the keys body, n"), "{error}");
}

fn detect(rows: &[RawRow]) -> finetune::error::Result<(DataFormat, String)> {
    detect_for(rows, ObjectiveRows::Single)
}

fn record(row: Value, format: DataFormat) -> Result<Option<ParsedRow>, String> {
    convert(row.as_object().unwrap(), format, ObjectiveRows::Single).map_err(|fault| fault.why)
}

fn messages(row: Value, format: DataFormat) -> (Vec<Value>, Option<Value>) {
    match record(row, format) {
        Ok(Some(ParsedRow::Messages { messages, tools, .. })) => (messages, tools),
        other => panic!("{other:?}"),
    }
}

#[test]
fn sharegpt_becomes_messages() {
    let row = json!({
        "system": "s",
        "conversations": [
            {"from": "human", "value": "h"},
            {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {\"x\": 1}}"},
            {"from": "observation", "value": "{\"t\": 7}"},
            {"from": "gpt", "value": "g {{name}}"},
        ],
        "tools": "[{\"name\": \"f\", \"parameters\": {}}]",
    });
    let (actual, tools) = messages(row, DataFormat::Sharegpt);
    assert_eq!(
        actual,
        [
            json!({"role": "system", "content": "s"}),
            json!({"role": "user", "content": "h"}),
            json!({"role": "assistant", "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}),
            json!({"role": "tool", "content": "{\"t\": 7}"}),
            json!({"role": "assistant", "content": "g {{name}}"}),
        ]
    );
    assert_eq!(tools, Some(json!([{"type": "function", "function": {"name": "f", "parameters": {}}}])));
    let none = json!({"conversations": [{"from": "human", "value": "h"}], "tools": "[]"});
    assert_eq!(messages(none, DataFormat::Sharegpt).1, None);
}

#[test]
fn parts_and_calls_become_regular() {
    let row = json!({"messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "value": "b"}], "name": null},
        {"role": "assistant", "content": [
            {"type": "reasoning", "value": "why"},
            {"type": "tool_call", "value": "{\"name\": \"f\", \"arguments\": {}}"},
        ]},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "g", "arguments": "{\"y\": [2]}"}}]},
    ]});
    let (actual, _) = messages(row, DataFormat::Messages);
    assert_eq!(
        actual,
        [
            json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
            json!({"role": "assistant", "content": "", "reasoning_content": "why",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}),
            json!({"role": "assistant", "content": "",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "g", "arguments": "{\"y\": [2]}"}}]}),
        ]
    );
}

#[test]
fn other_formats_become_records() {
    let task = |input: &str| ParsedRow::Task {
        task: Task { system: None, instruction: "a".into(), input: input.into() },
        output: "b".into(),
    };
    let pair = |prompt: &str, completion: &str| ParsedRow::Pair {
        prompt: prompt.into(),
        completion: completion.into(),
    };
    let cases = [
        (json!({"instruction": "a", "input": "i", "output": "b"}), DataFormat::Alpaca, task("i")),
        (json!({"instruction": "a", "input": null, "output": "b"}), DataFormat::Alpaca, task("")),
        (json!({"instruction": "a", "context": "c", "response": "b"}), DataFormat::Instruction, task("c")),
        (json!({"question": "a", "answer": "b"}), DataFormat::QuestionAnswer, task("")),
        (json!({"prompt": "a", "completion": "b"}), DataFormat::PromptCompletion, pair("a", "b")),
        (json!({"prompt": "a", "canonical_solution": "b"}), DataFormat::PromptCompletion, pair("a", "b")),
        (json!({"prompt": "a", "chosen": "b", "rejected": "c"}), DataFormat::Preference, pair("a", "b")),
        (
            json!({"chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
                "rejected": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: e"}),
            DataFormat::Preference,
            pair("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", " d"),
        ),
        (json!({"text": "a"}), DataFormat::Text, ParsedRow::Text("a".into())),
        (json!({"text": "a"}), DataFormat::Auto, ParsedRow::Text("a".into())),
    ];
    for (row, format, expected) in cases {
        assert_eq!(record(row.clone(), format).unwrap(), Some(expected), "{row}");
    }
    let history =
        json!({"instruction": "c", "input": "", "output": "d", "history": [["a", "b"]], "system": "s"});
    let contents: Vec<Value> =
        messages(history, DataFormat::Alpaca).0.into_iter().map(|m| m["content"].clone()).collect();
    assert_eq!(contents, ["s", "a", "b", "c", "d"]);
    let labelled = json!({"messages": [{"role": "user", "content": "a"}], "label": false});
    assert_eq!(record(labelled, DataFormat::Messages).unwrap(), None);
}

#[test]
fn malformed_rows_say_what_is_wrong() {
    let messages = |message: Value| json!({"messages": [message]});
    for (row, format, why) in [
        (messages(json!("a")), DataFormat::Messages, "`messages[0]` is a string; an object is needed"),
        (messages(json!({"content": "a"})), DataFormat::Messages, "has no `role`"),
        (messages(json!({"role": "user"})), DataFormat::Messages, "has no `content`"),
        (messages(json!({"role": "user", "content": 3})), DataFormat::Messages, "has a number as `content`"),
        (
            messages(json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]})),
            DataFormat::Messages,
            "has a part of the type `image_url` without text",
        ),
        (
            messages(json!({"role": "assistant", "tool_calls": [{}]})),
            DataFormat::Messages,
            "a tool call without `name`",
        ),
        (
            messages(json!({"role": "assistant", "content": "", "weight": 2})),
            DataFormat::Messages,
            "the `weight` 2",
        ),
        (json!({"messages": []}), DataFormat::Messages, "`messages` is empty"),
        (
            json!({"messages": "a"}),
            DataFormat::Messages,
            "`messages` is a string; a list of messages is needed",
        ),
        (
            json!({"messages": [{"role": "user", "content": "a"}], "label": "maybe"}),
            DataFormat::Messages,
            "`label` is",
        ),
        (
            json!({"messages": [{"role": "user", "content": "a"}], "tools": "{"}),
            DataFormat::Messages,
            "`tools` is not JSON",
        ),
        (json!({"conversations": [{"from": "", "value": "a"}]}), DataFormat::Sharegpt, "has an empty `role`"),
        (
            json!({"conversations": [{"from": "function_call", "value": "f(x)"}]}),
            DataFormat::Sharegpt,
            "is a function call that is not JSON",
        ),
        (
            json!({"prompt": "a", "completion": []}),
            DataFormat::PromptCompletion,
            "`prompt` is a string and `completion` is an array",
        ),
        (json!({"txt": "a"}), DataFormat::Text, "it has no `text`; its keys are txt"),
        (
            json!({"instruction": "a", "output": null}),
            DataFormat::Alpaca,
            "`output` is null; a string is needed",
        ),
    ] {
        let actual = record(row.clone(), format).unwrap_err();
        assert!(actual.contains(why), "{row}: {actual}");
    }
}
