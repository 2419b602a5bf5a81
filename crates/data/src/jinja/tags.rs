//! Finds the tags of a template and their tokens, like Jinja's lexer.

use std::ops::Range;

/// Kinds of tags with expressions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TagKind {
    /// A tag that prints: `{{ … }}`.
    Print,
    /// A tag that holds a statement: `{% … %}`.
    Block,
}

/// A tag of a template.
#[derive(Debug, Clone)]
pub(crate) struct TemplateTag {
    pub(crate) kind: TagKind,
    /// Byte range of the whole tag, with its delimiters and their whitespace control.
    pub(crate) range: Range<usize>,
    pub(crate) tokens: Vec<TagToken>,
    /// Byte range of the end delimiter.
    pub(crate) close: Range<usize>,
}

/// Kinds of tokens in a tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenKind {
    Name,
    Number,
    Text,
    Operator,
}

/// A token of a tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TagToken {
    pub(crate) kind: TokenKind,
    pub(crate) range: Range<usize>,
}

impl TemplateTag {
    /// The name in a tag that contains nothing else.
    pub(crate) fn only_name<'a>(&self, source: &'a str) -> Option<&'a str> {
        match &self.tokens[..] {
            [token] if token.kind == TokenKind::Name => Some(&source[token.range.clone()]),
            _ => None,
        }
    }
}

/// Finds the tags of `source` in order, without comments and raw text. The list ends at a broken
/// tag, which the parser reports.
pub(crate) fn tags(source: &str) -> Vec<TemplateTag> {
    let mut tags = Vec::new();
    let mut at = 0;
    while let Some(start) = source[at..].find('{').map(|offset| at + offset) {
        at = match source.as_bytes().get(start + 1) {
            Some(b'#') => match source[start + 2..].find("#}") {
                Some(end) => start + 2 + end + 2,
                None => break,
            },
            Some(b'%') => match raw_tag(source, start, "raw") {
                Some(begin) => match raw_end(source, begin) {
                    Some(end) => end,
                    None => break,
                },
                None => match tag(source, start, TagKind::Block) {
                    Some(tag) => push(&mut tags, tag),
                    None => break,
                },
            },
            Some(b'{') => match tag(source, start, TagKind::Print) {
                Some(tag) => push(&mut tags, tag),
                None => break,
            },
            _ => start + 1,
        };
    }
    tags
}

fn push(tags: &mut Vec<TemplateTag>, tag: TemplateTag) -> usize {
    let end = tag.range.end;
    tags.push(tag);
    end
}

/// The end of the raw block whose text begins at `begin`.
fn raw_end(source: &str, begin: usize) -> Option<usize> {
    let mut at = begin;
    loop {
        let next = at + source[at..].find("{%")?;
        match raw_tag(source, next, "endraw") {
            Some(end) => return Some(end),
            None => at = next + 2,
        }
    }
}

/// The end of the tag at `start`, if it contains only `name`.
fn raw_tag(source: &str, start: usize, name: &str) -> Option<usize> {
    let inner = source[start + 2..].trim_start_matches(['-', '+']).trim_start();
    let rest = inner.strip_prefix(name)?.trim_start();
    let end = rest.trim_start_matches(['-', '+']).strip_prefix("%}")?;
    Some(source.len() - end.len())
}

/// The tag that begins at `start`; `None` if it is broken.
fn tag(source: &str, start: usize, kind: TagKind) -> Option<TemplateTag> {
    let end = match kind {
        TagKind::Print => "}}",
        TagKind::Block => "%}",
    };
    let mut at = start + 2;
    if source[at..].starts_with(['-', '+']) {
        at += 1;
    }
    let (mut tokens, mut depth) = (Vec::new(), 0usize);
    loop {
        let rest = &source[at..];
        at += rest.len() - rest.trim_start().len();
        let rest = &source[at..];
        let control = usize::from(rest.starts_with(['-', '+']));
        if depth == 0 && rest[control..].starts_with(end) {
            let close = at..at + control + 2;
            return Some(TemplateTag { kind, range: start..close.end, tokens, close });
        }
        let (kind, length) = token(rest)?;
        match &rest[..length] {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.checked_sub(1)?,
            _ => {}
        }
        tokens.push(TagToken { kind, range: at..at + length });
        at += length;
    }
}

/// The kind and the length of the token that begins `rest`.
fn token(rest: &str) -> Option<(TokenKind, usize)> {
    let first = rest.chars().next()?;
    if first == '"' || first == '\'' {
        let mut escaped = false;
        let end = rest[1..].find(|c: char| {
            let ends = c == first && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        })?;
        return Some((TokenKind::Text, end + 2));
    }
    let word = |c: char| c.is_alphanumeric() || c == '_';
    if first.is_ascii_digit() {
        return Some((TokenKind::Number, number_length(rest)));
    }
    if word(first) {
        return Some((TokenKind::Name, rest.find(|c| !word(c)).unwrap_or(rest.len())));
    }
    let double = ["**", "//", "==", "!=", "<=", ">="].iter().any(|operator| rest.starts_with(operator));
    let known = "+-*/%~[](){}<>=.:|,;!".contains(first);
    known.then_some((TokenKind::Operator, if double { 2 } else { 1 }))
}

/// The length of the number that begins `rest`: its digits, with a fraction and an exponent.
fn number_length(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let digits =
        |at: usize| at + bytes[at..].iter().take_while(|b| b.is_ascii_alphanumeric() || **b == b'_').count();
    let plain = |at: usize| at + bytes[at..].iter().take_while(|b| b.is_ascii_digit() || **b == b'_').count();
    if bytes[0] == b'0' && bytes.get(1).is_some_and(u8::is_ascii_alphabetic) {
        return digits(0);
    }
    let mut end = plain(0);
    if bytes.get(end) == Some(&b'.') && bytes.get(end + 1).is_some_and(u8::is_ascii_digit) {
        end = plain(end + 1);
    }
    if matches!(bytes.get(end), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
        if bytes.get(end + 1 + sign).is_some_and(u8::is_ascii_digit) {
            end = plain(end + 1 + sign);
        }
    }
    end
}
