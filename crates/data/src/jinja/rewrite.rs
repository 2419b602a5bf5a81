//! Rewrites the parts of a template for which minijinja has no hook to act like Jinja2.
//!
//! Only the text of expressions and a few tags changes: line ends, and the whitespace control of
//! tags, stay. A tag that this module cannot parse stays unchanged, and minijinja reports its
//! error.
//!
//! | template | rewritten |
//! |---|---|
//! | `a % b`, `a * b`, `+a` | `mod__(a, b)`, `mul__(a, b)`, `pos__(a)` |
//! | `a < b`, `a in b`, `a not in b` | `lt__(a, b)`, `in__(a, b)`, `(not in__(a, b))` |
//! | `a ~ b` | `str__(a) ~ str__(b)` |
//! | `a[b:c:d]` | `slice__(a, b, c, d)` |
//! | `a.items`, `a['items']` for methods of Python | `attr__(a, 'items')`, `item__(a, 'items')` |
//! | `for a in b` | `for a in iter__(b)` |
//! | calls of macros with defaults, `varargs` or `kwargs` | see [`super::rewrite_macro`] |
//! | `with a = b, c = d` | `with with0__ = b, with1__ = d, a = with0__, c = with1__` |
//! | the blocks of `set` and `filter` | a `with` around what they hold, for its scope |
//! | `set ns._a = b`, `include`, `import`, `extends` | a call that raises |

use super::edits::SourceEdits;
use super::macro_traits::TemplateMacros;
use super::rewrite_expression::ExpressionReader;
use super::rewrite_macro;
use super::tags::{TagKind, TagToken, TemplateTag, TokenKind, tags};

/// Reason for refusing to set a name.
const UNDERSCORE: &str = "a namespace stores no name that begins with an underscore";
/// Reason for refusing to include another template.
const NO_OTHER: &str = "a chat template cannot use other templates";

/// Rewrites `source` so that minijinja runs it like Jinja2.
pub(crate) fn rewrite(source: &str) -> String {
    let tags = tags(source);
    let macros = TemplateMacros::find(source, &tags);
    let mut edits = SourceEdits::default();
    // True for each open block that got a scope; false if its tag was not parsed.
    let mut scopes = Vec::new();
    for tag in &tags {
        let mark = edits.mark();
        let understood = rewrite_tag(source, tag, &macros, &mut edits).is_some();
        if !understood {
            edits.take_from(mark);
        }
        scope(source, tag, understood, &mut scopes, &mut edits);
    }
    edits.apply(source, 0..source.len())
}

/// Gives the block of a `set` or `filter` a scope, as in Jinja.
fn scope(source: &str, tag: &TemplateTag, understood: bool, scopes: &mut Vec<bool>, edits: &mut SourceEdits) {
    let text = |token: &TagToken| &source[token.range.clone()];
    let Some(name) = tag.tokens.first().filter(|_| tag.kind == TagKind::Block) else {
        return;
    };
    match text(name) {
        // The arguments of a block's filters contain `=`, too.
        "set" if tag.tokens.iter().map(text).take_while(|token| *token != "|").any(|token| token == "=") => {}
        "set" | "filter" => {
            scopes.push(understood);
            if understood {
                let end = &source[tag.close.clone()];
                edits.instead(tag.close.clone(), format!(" %}}{{% with {end}"));
            }
        }
        statement @ ("endset" | "endfilter") if scopes.pop() == Some(true) => {
            edits.instead(name.range.clone(), format!("endwith %}}{{% {statement}"));
        }
        _ => {}
    }
}

/// Rewrites a tag; `None` if it cannot be parsed.
fn rewrite_tag(
    source: &str,
    tag: &TemplateTag,
    macros: &TemplateMacros,
    edits: &mut SourceEdits,
) -> Option<()> {
    let mut reader = ExpressionReader::new(source, &tag.tokens, macros, edits);
    if tag.kind == TagKind::Print {
        reader.list()?;
        return reader.at_end();
    }
    let statement = tag.tokens.first().filter(|token| token.kind == TokenKind::Name)?;
    reader.skip();
    match &source[statement.range.clone()] {
        "if" | "elif" => {
            reader.list()?;
            reader.at_end()
        }
        "for" => for_loop(&mut reader),
        "set" => set(&mut reader),
        "with" => with(&mut reader, tag.close.start),
        "filter" => {
            reader.filters()?;
            reader.at_end()
        }
        "call" => {
            if reader.peek_operator("(") {
                reader.skip_brackets()?;
            }
            reader.expression()?;
            reader.at_end()
        }
        "macro" => rewrite_macro::rewrite(source, tag, macros, edits),
        "include" | "import" | "extends" | "from" => {
            let inner = statement.range.start..tag.close.start;
            edits.instead(inner, format!("set refused__ = raise_exception('{NO_OTHER}') "));
            Some(())
        }
        _ => None,
    }
}

/// `for target in list if condition recursive`
fn for_loop(reader: &mut ExpressionReader<'_, '_>) -> Option<()> {
    reader.target()?;
    reader.name("in")?;
    let (start, end) = reader.loop_list()?;
    reader.wrap(start, "iter__(", end, ")");
    if reader.name("if").is_some() {
        reader.expression()?;
    }
    reader.name("recursive");
    reader.at_end()
}

/// `set target = list`, or `set target | filter` for a block.
fn set(reader: &mut ExpressionReader<'_, '_>) -> Option<()> {
    let hidden = reader.target()?;
    if reader.operator("=").is_none() {
        if reader.peek_operator("|") {
            reader.filters()?;
        }
        return reader.at_end();
    }
    let (start, end) = reader.list()?;
    if let Some(name) = hidden {
        reader.replace(name, "refused__");
        reader.wrap(start, &format!("raise_exception('{UNDERSCORE}', "), end, ")");
    }
    reader.at_end()
}

/// `with a = b, c = d`, whose expressions see no name that it binds.
fn with(reader: &mut ExpressionReader<'_, '_>, close: usize) -> Option<()> {
    let mut names = Vec::new();
    while !reader.is_at_end() {
        names.push(reader.any_name()?);
        reader.operator("=")?;
        reader.expression()?;
        if reader.operator(",").is_none() {
            break;
        }
    }
    reader.at_end()?;
    if names.len() > 1 {
        let mut bound = String::new();
        for (index, name) in names.into_iter().enumerate() {
            bound.push_str(&format!(", {} = with{index}__", reader.text(name.clone())));
            reader.replace(name, &format!("with{index}__"));
        }
        reader.insert(close, &format!("{bound} "));
    }
    Some(())
}
