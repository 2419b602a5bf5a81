//! Public signatures name what they take and give; a bool is asked with `if`.

use super::Source;
use super::items::{functions, largest_tuple};

/// The largest tuple in a public signature.
const ELEMENTS: usize = 2;

/// Public functions with tuples of many elements, whose places say nothing.
pub(super) fn tuples(source: &Source) -> Vec<String> {
    let mut faults = Vec::new();
    for one in functions(source).into_iter().filter(|one| one.public) {
        let elements = largest_tuple(&one.parameters).max(largest_tuple(&one.returns));
        if elements > ELEMENTS {
            faults.push(format!("{}: fn {} has a tuple of {elements}", source.path, one.name));
        }
    }
    faults
}

/// Every `match` on a bool, by its arms.
pub(super) fn bool_matches(source: &Source) -> Vec<String> {
    let arm = regex!(r"(?m)(?:^|[{,|])\s*(?:true|false)\s*(?:if\b[^=]*)?=>");
    let whole = arm.find_iter(&source.code);
    let line = |start: usize| source.code[..start].matches('\n').count() + 1;
    // A line names the place only roughly, where tests were left out above it.
    whole.map(|found| format!("{}:{}: `match` on a bool", source.path, line(found.end()))).collect()
}

#[test]
fn tuples_in_signatures() {
    let bad = [
        "pub fn f(a: (u8, u8, u8)) {}",
        "pub fn f() -> Result<(A, B, C)> {}",
        "pub trait T {\n    fn f(&self) -> Vec<(A, B, C)>;\n}",
    ];
    for text in bad {
        assert_eq!(tuples(&Source::new("data/a.rs", text)).len(), 1, "{text}");
    }
    let good = [
        "pub fn f(a: (u8, u8), b: u8, c: u8) {}",
        "pub(crate) fn f() -> (A, B, C) {}",
        "// pub fn f() -> (A, B, C) {}",
    ];
    for text in good {
        assert_eq!(tuples(&Source::new("data/a.rs", text)), [""; 0], "{text}");
    }
}

#[test]
fn matches_on_bools() {
    let bad = [
        "match a {\n    true => b,\n    _ => c,\n}",
        "match a { false => b, x => c }",
        "match a { X | false if y => b }",
    ];
    for text in bad {
        assert_eq!(bool_matches(&Source::new("data/a.rs", text)).len(), 1, "{text}");
    }
    let good = [
        "match a {\n    Some(true) => b,\n    (false, true) => c,\n}",
        "// true => a\nlet x = \"{ true => \";",
    ];
    for text in good {
        assert_eq!(bool_matches(&Source::new("data/a.rs", text)), [""; 0], "{text}");
    }
}
