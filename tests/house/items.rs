//! Functions of a source, with their docs and types, for the rules on docs and signatures.

use super::{Source, block_end};

/// A function declared in a source.
pub(super) struct Function {
    pub(super) name: String,
    /// True if other crates may call it: `pub`, or a method of a `pub trait`.
    pub(super) public: bool,
    /// The text between the parentheses.
    pub(super) parameters: String,
    /// The type after `->`; empty for the unit.
    pub(super) returns: String,
    /// Its doc comment, one line for each `///`.
    pub(super) docs: String,
}

/// Returns every function of `source` in order.
pub(super) fn functions(source: &Source) -> Vec<Function> {
    let head =
        regex!(r"(?m)^[ \t]*(pub(?:\([^)]*\))? )?(?:(?:const|async|unsafe|extern(?: *\S+)?) )*fn (\w+)");
    let traits = public_traits(source);
    let function = |captures: regex::Captures<'_>| {
        let whole = captures.get(0).unwrap();
        let line = source.code[..captures.get(2).unwrap().start()].matches('\n').count();
        let (parameters, returns) = signature(&source.code[whole.end()..]);
        let public = match captures.get(1) {
            Some(visibility) => visibility.as_str() == "pub ",
            None => traits.iter().any(|(start, end)| (start..=end).contains(&&line)),
        };
        Function { name: captures[2].to_owned(), public, parameters, returns, docs: docs_above(source, line) }
    };
    head.captures_iter(&source.code).map(function).collect()
}

/// Returns first and last line of each `pub trait`.
fn public_traits(source: &Source) -> Vec<(usize, usize)> {
    let head = regex!(r"^\s*pub (?:unsafe )?trait \w");
    let lines: Vec<&str> = source.code.lines().collect();
    let starts = lines.iter().enumerate().filter(|(_, line)| head.is_match(line));
    starts.map(|(start, _)| (start, block_end(&lines, start))).collect()
}

/// Returns the doc comment above line `line`, skipping attributes.
fn docs_above(source: &Source, line: usize) -> String {
    let lines: Vec<&str> = source.raw.lines().map(str::trim).collect();
    let mut docs = Vec::new();
    let mut at = line;
    while at > 0 {
        at -= 1;
        if let Some(doc) = lines[at].strip_prefix("///") {
            docs.push(doc);
        } else if lines[at].ends_with(']') {
            // An attribute may span several lines.
            while at > 0 && !lines[at].starts_with("#[") {
                at -= 1;
            }
        } else if !lines[at].starts_with("//") {
            break;
        }
    }
    docs.reverse();
    docs.join("\n")
}

/// Returns parameters and return type of a function; `rest` is the text after its name.
fn signature(rest: &str) -> (String, String) {
    let open = if rest.starts_with('<') { closing(rest) + 1 } else { 0 };
    let rest = &rest[open..];
    let close = closing(rest);
    let parameters = rest.get(1..close).unwrap_or_default().to_owned();
    let after = rest.get(close + 1..).unwrap_or_default();
    let mut depth = 0_i64;
    let end = after.char_indices().find(|(_, c)| {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            _ => {}
        }
        depth == 0 && matches!(c, '{' | ';')
    });
    let after = &after[..end.map_or(after.len(), |(at, _)| at)];
    let returns = after.trim().strip_prefix("->").unwrap_or_default();
    (parameters, returns.split("where").next().unwrap_or_default().trim().to_owned())
}

/// Returns the offset at which the bracket that opens `text` closes.
fn closing(text: &str) -> usize {
    let mut depth = 0_i64;
    let mut before = ' ';
    for (at, c) in text.char_indices() {
        match c {
            '(' | '[' | '<' | '{' => depth += 1,
            '>' if before == '-' => {}
            ')' | ']' | '>' | '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
        before = c;
    }
    text.len()
}

/// Returns the number of elements of the largest tuple type in `types`.
pub(super) fn largest_tuple(types: &str) -> usize {
    let mut largest = 0;
    for (at, _) in types.match_indices('(') {
        let named = types[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        // `Fn(A, B, C)` lists arguments.
        if !named {
            let inside = &types[at + 1..at + closing(&types[at..]).min(types.len() - at)];
            largest = largest.max(elements(inside));
        }
    }
    largest
}

/// Returns the elements of `a, (b, c), d<e, f>,`.
fn elements(list: &str) -> usize {
    let (mut depth, mut count, mut filled, mut before) = (0_i64, 0, false, ' ');
    for c in list.chars() {
        match c {
            '(' | '[' | '<' | '{' => depth += 1,
            '>' if before == '-' => {}
            ')' | ']' | '>' | '}' => depth -= 1,
            _ => {}
        }
        if c == ',' && depth == 0 {
            count += 1;
            filled = false;
        } else if !c.is_whitespace() {
            filled = true;
        }
        before = c;
    }
    count + usize::from(filled)
}

#[test]
fn functions_are_read() {
    let text = "/// Adds two numbers.\n///\n/// # Errors\n#[expect(\n    clippy::x,\n    reason = \"[y]\"\n)]\n\
                pub fn add<T: Fn(u8) -> u8>(\n    a: [u8; 2],\n    b: T,\n) -> Result<(u8, u8), E>\nwhere\n    T: X,\n{\n}\n\
                pub(crate) fn hidden() {}\npub trait T {\n    /// Goes.\n    fn go(&self);\n}\nimpl T for U {\n    fn go(&self) {}\n}\n";
    let functions = functions(&Source::new("ops/a.rs", text));
    let names: Vec<(&str, bool)> = functions.iter().map(|one| (one.name.as_str(), one.public)).collect();
    assert_eq!(names, [("add", true), ("hidden", false), ("go", true), ("go", false)]);
    assert_eq!(functions[0].docs, " Adds two numbers.\n\n # Errors");
    assert_eq!(functions[0].returns, "Result<(u8, u8), E>");
    assert_eq!(functions[0].parameters, "\n    a: [u8; 2],\n    b: T,\n");
    assert_eq!(functions[1].docs, "");
    assert_eq!(functions[2].docs, " Goes.");
}

#[test]
fn tuples_are_counted() {
    for (types, elements) in [
        ("a: u8, b: u8, c: u8", 0),
        ("a: (u8, u8), b: u8", 2),
        ("a: &[(u8, (u16, Vec<(A, B)>), F)]", 3),
        ("Result<(A, B<C, D>, [E; 2], F,)>", 4),
        ("impl Fn(A, B, C) -> (D, E)", 2),
        ("Box<dyn Fn(&A) -> B>, ()", 0),
    ] {
        assert_eq!(largest_tuple(types), elements, "{types}");
    }
}
