//! Rules of language that a machine can check: how doc comments begin, words that messages avoid,
//! and the width of comments.

use super::{Source, sources};

/// Widest line of a comment, in columns.
const COMMENT_COLUMNS: usize = 100;

/// Returns the doc comments that begin with a question word instead of their subject.
fn question_words(source: &Source) -> Vec<String> {
    let is_doc = |line: &str| regex!(r"^\s*//[/!] ?\S").is_match(line);
    let mut faults = Vec::new();
    let mut before = "";
    for line in source.raw.lines() {
        if regex!(r"^\s*//[/!] (What|Who|Whether|How)\b").is_match(line) && !is_doc(before) {
            faults.push(format!("{}: begin with the subject: `{}`", source.path, line.trim()));
        }
        before = line;
    }
    faults
}

/// Returns the messages with a passive that names no actor, or with "there are".
fn vague_messages(source: &Source) -> Vec<String> {
    let vague = regex!(r#""[^"]*\b(is said|of ours|there are|are there)\b[^"]*""#);
    let lines = source.text.lines().filter(|line| vague.is_match(line));
    lines.map(|line| format!("{}: name the subject: `{}`", source.path, line.trim())).collect()
}

/// Returns the comments that are wider than a page, but for tables, code blocks and addresses.
fn wide_comments(source: &Source) -> Vec<String> {
    let mut faults = Vec::new();
    let mut is_code = false;
    for line in source.raw.lines() {
        let comment = line.trim_start();
        is_code = comment.starts_with("//") && is_code != comment.contains("```");
        let is_text = comment.starts_with("//") && !is_code && !line.contains('|') && !line.contains("://");
        if is_text && line.chars().count() > COMMENT_COLUMNS {
            faults.push(format!("{}: wrap at {COMMENT_COLUMNS} columns: `{comment}`", source.path));
        }
    }
    faults
}

#[test]
fn comments_and_messages_are_plain_english() {
    let checks = [question_words, vague_messages, wide_comments];
    let faults: Vec<String> = sources()
        .iter()
        .flat_map(|source| checks.iter().flat_map(|check| check(source)).collect::<Vec<_>>())
        .collect();
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn each_rule_finds_its_fault() {
    let source = |text: &str| Source::new("a/b.rs", text);
    assert_eq!(question_words(&source("/// What it is.\nfn f() {}\n")).len(), 1);
    assert_eq!(question_words(&source("/// The thing,\n/// What it is.\nfn f() {}\n")).len(), 0);
    assert_eq!(vague_messages(&source("fn f() { g(\"there are 3 ranks\") }\n")).len(), 1);
    assert_eq!(vague_messages(&source("// there are 3\nfn f() { g(\"3 ranks\") }\n")).len(), 0);
    assert_eq!(wide_comments(&source(&format!("// {}\n", "a ".repeat(60)))).len(), 1);
    assert_eq!(wide_comments(&source(&format!("// | {} |\n", "a ".repeat(60)))).len(), 0);
}
