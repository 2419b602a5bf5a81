//! A doc comment has at least three words; that of a tensor operation gives shape and dtype.

use super::Source;
use super::items::functions;

/// Least number of words in a doc comment.
const WORDS: usize = 3;

/// Returns doc comments that are too short.
pub(super) fn short(source: &Source) -> Vec<String> {
    let mut faults = Vec::new();
    let mut comment = (String::new(), 0);
    let mut marker = "";
    let mut close = |comment: &mut (String, usize)| {
        let words = comment.0.split_whitespace().filter(|word| word.contains(char::is_alphanumeric)).count();
        if comment.1 > 0 && words < WORDS {
            faults.push(format!("{}: doc comment `{}` under {WORDS} words", source.path, comment.0.trim()));
        }
        *comment = (String::new(), 0);
    };
    for (raw, text) in source.raw.lines().zip(source.text.lines()) {
        let line = raw.trim();
        // In a literal, slashes are no comment.
        let comments = text.trim().is_empty() && !line.starts_with("////");
        let mark = ["///", "//!"].into_iter().find(|mark| comments && line.starts_with(mark));
        if mark.is_none_or(|mark| mark != marker) {
            close(&mut comment);
        }
        marker = mark.unwrap_or_default();
        if !marker.is_empty() {
            comment.0 += &line[3..];
            comment.0.push(' ');
            comment.1 += 1;
        }
    }
    close(&mut comment);
    faults
}

/// Returns public functions of `ops` on tensors that do not document shape or dtype.
pub(super) fn shapes(source: &Source) -> Vec<String> {
    if source.module() != "ops" {
        return Vec::new();
    }
    let tensor = regex!(r"\bTensor(?:Mut)?\b");
    let shape = regex!(r"\[(?:\w|\.\.)[\w ,.·/+*-]*\]|\b(?i:scalars?|any shape|same shape)\b");
    let dtype = regex!(r"\b(?:b?f16|f32|f64|[iu](?:8|16|32|64)|dtypes?)\b");
    let mut faults = Vec::new();
    for one in functions(source) {
        if one.public && (tensor.is_match(&one.parameters) || tensor.is_match(&one.returns)) {
            for (what, said) in [("shape", shape), ("dtype", dtype)] {
                if !said.is_match(&one.docs) {
                    faults.push(format!("{}: fn {} says no {what}", source.path, one.name));
                }
            }
        }
    }
    faults
}

#[test]
fn short_docs() {
    let bad =
        ["/// Two words.\nfn f() {}", "//! A module\n\nfn f() {}", "enum E {\n    /// One `.`.\n    A,\n}"];
    for text in bad {
        assert_eq!(short(&Source::new("data/a.rs", text)).len(), 1, "{text}");
    }
    let good = [
        "//! Two\n//! whole lines\n\n/// Says\n/// what it is.\nfn f() {}",
        "// Short.\nconst A: &str = \"\n/// b\n\";\n//////// line",
        "#[cfg(test)]\nmod tests {\n    /// Short.\n    fn f() {}\n}\n",
    ];
    for text in good {
        assert_eq!(short(&Source::new("data/a.rs", text)), [""; 0], "{text}");
    }
}

#[test]
fn shapes_are_told() {
    let sum = |docs: &str| Source::new("ops/a.rs", &format!("/// {docs}\npub fn sum(x: &Tensor) -> u8 {{}}"));
    assert_eq!(shapes(&sum("The sum of [`Tensor`].")).len(), 2);
    assert_eq!(shapes(&sum("The sum of `[rows, hidden]`.")).len(), 1);
    assert_eq!(shapes(&sum("The sum, a scalar.")).len(), 1);
    assert_eq!(shapes(&sum("The sum of [crate::ops] in f32.")).len(), 1);
    assert_eq!(shapes(&sum("The sum of `[N, 2F]` in f32.")), [""; 0]);
    assert_eq!(shapes(&sum("The sum, a scalar of the same dtype.")), [""; 0]);
    let elsewhere = "pub fn sum(x: &Tensor) -> u8 {}";
    assert_eq!(shapes(&Source::new("model/a.rs", elsewhere)), [""; 0]);
    assert_eq!(shapes(&Source::new("ops/a.rs", "pub(crate) fn sum(x: &Tensor) -> u8 {}")), [""; 0]);
}
