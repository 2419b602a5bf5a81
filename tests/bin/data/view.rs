//! `finetune data`: rows as text with marked trained parts, as tokens, as JSON and as a page; and
//! statistics of all rows.

use serde_json::Value;

use crate::pseudo_terminal::PseudoTerminal;
use crate::test_dir::TestDir;

/// Two chats, one of them twice.
fn test_dir() -> TestDir {
    let dir = TestDir::new();
    let rows = std::fs::read_to_string(dir.path("rows.jsonl")).unwrap();
    let first = rows.lines().next().unwrap();
    dir.write("two.jsonl", &format!("{first}\n{}\n{first}\n", rows.lines().nth(1).unwrap()));
    dir
}

const DATA: [&str; 5] = ["data", "--model", "model", "--dataset", "two.jsonl"];

fn args<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&DATA[..], more].concat()
}

#[test]
fn rows_are_text_with_marks() {
    let dir = test_dir();
    let said = dir.said(&args(&["--rows", "1"]));
    let row = "row 1, [DIR]/two.jsonl:1: 59 tokens, 8 trained\n<|im_start|>system\nYou are a rapid helper.<|im_end|>\n\
               <|im_start|>user\nCount to 4<|im_end|>\n<|im_start|>assistant\n⟦1 2 3 4<|im_end|>⟧\n\n3 rows in 1 file";
    assert!(said.starts_with(row) || said.contains(&row.replace("⟧\n", "⟧\n\n")), "{said}");
    assert!(!said.contains("row 2, "), "{said}");
    assert!(
        said.contains(
            "\ntokens of an example: half up to 59, 90 % up to 64, 99 % up to 64, the longest 64\n"
        ),
        "{said}"
    );
    assert!(said.contains("\ntrained parts end with \"<|im_end|>\" (3)\n"), "{said}");
    assert!(said.contains("\none example has the same tokens as an earlier one\n"), "{said}");
}

#[test]
fn tokens_are_a_table() {
    let dir = test_dir();
    let said = dir.said(&args(&["--rows", "1", "--tokens"]));
    assert!(said.contains("  train  <|im_end|>"), "{said}");
    assert!(said.contains("\n      0      478         <|im_start|>"), "{said}");
    assert!(!said.contains('⟦'), "{said}");
    let refused = dir.command(&args(&["--tokens", "--json"])).output().unwrap();
    assert!(!refused.status.success());
}

/// Labels follow transformers: -100 for untrained tokens.
#[test]
fn json_has_ids_labels_and_figures() {
    let dir = test_dir();
    let held = ["--set", "data.eval=[\"two.jsonl\"]", "--json", "--rows", "2", "--quiet"];
    let output = dir.command(&args(&held)).output().unwrap();
    assert!(output.status.success(), "{}", dir.told(&output.stderr));
    let page: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = page["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    let (ids, labels) = (rows[0]["input_ids"].as_array().unwrap(), rows[0]["labels"].as_array().unwrap());
    assert_eq!(ids.len(), labels.len());
    let trained: Vec<usize> = (0..ids.len()).filter(|at| labels[*at] != -100).collect();
    assert_eq!(trained.len(), 8);
    assert!(trained.iter().all(|at| labels[*at] == ids[*at]));
    let pieces = rows[0]["text"].as_array().unwrap();
    let text: String = pieces
        .iter()
        .filter(|piece| piece["trained"] == true)
        .map(|piece| piece["text"].as_str().unwrap())
        .collect();
    assert_eq!(text, "1 2 3 4<|im_end|>");
    assert_eq!(page["data"]["rows"], 3);
    assert_eq!(page["figures"]["repeated"], 1);
    assert_eq!(page["figures"]["tokens"]["max"], 64);
    assert_eq!(page["held_out"]["rows_that_are_trained"], 3);
}

#[test]
fn a_page_of_rows_replaces_only_its_like() {
    let dir = test_dir();
    dir.said(&args(&["--html", "rows.html"]));
    let page = std::fs::read_to_string(dir.path("rows.html")).unwrap();
    assert!(page.contains("<mark>1 2 3 4&lt;|im_end|&gt;"), "{page}");
    assert!(!page.contains("<script"), "{page}");
    dir.said(&args(&["--html", "rows.html", "--rows", "1"]));
    assert!(std::fs::read_to_string(dir.path("rows.html")).unwrap().len() < page.len());
    dir.write("mine.html", "<p>mine</p>");
    let refused = dir.refused(&args(&["--html", "mine.html"]));
    assert!(
        refused.contains("a file of that name exists, and it is not a page of `finetune data`"),
        "{refused}"
    );
    assert_eq!(std::fs::read_to_string(dir.path("mine.html")).unwrap(), "<p>mine</p>");
}

/// Colours appear on a terminal only, beside the marks.
#[test]
fn marks_are_green_on_a_terminal() {
    let dir = test_dir();
    let terminal = PseudoTerminal::open();
    let mut command = dir.command(&args(&["--rows", "1"]));
    command.stdout(terminal.stdout());
    let mut child = terminal.start(command);
    assert!(terminal.end_of(&mut child).success());
    terminal.wait_for("\u{1b}[32m⟦1 2 3 4<|im_end|>⟧\u{1b}[0m");
}
