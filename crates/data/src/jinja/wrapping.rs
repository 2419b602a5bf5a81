//! Jinja's filter `wordwrap`: Python's `textwrap.wrap` for each line.

use std::ops::Range;

use minijinja::Error;
use minijinja::value::Value;

use super::characters::{self, is_alnum, is_alpha};
use super::values::{bind, check_text, fault, given, integer, text};

/// Wraps the lines of a text.
///
/// # Errors
/// Fails if the width is not positive or the text grows too large.
pub(super) fn wordwrap(args: &[Value]) -> Result<Value, Error> {
    let parameters = ["s", "width", "break_long_words", "wrapstring", "break_on_hyphens"];
    let [value, width, long, wrap, hyphens] = bind("wordwrap", parameters, 1, args)?;
    let value = value.unwrap_or_default();
    let wrap = given(wrap.as_ref()).map_or(Ok("\n"), text)?;
    let width = width.as_ref().map_or(Ok(79), integer)?;
    let wrapper = LineWrapper {
        width: usize::try_from(width)
            .ok()
            .filter(|width| *width > 0)
            .ok_or_else(|| fault("invalid width"))?,
        long_words: long.is_none_or(|long| long.is_true()),
        hyphens: hyphens.is_none_or(|hyphens| hyphens.is_true()),
    };
    let mut out = String::new();
    for (index, line) in characters::lines(text(&value)?, false).into_iter().enumerate() {
        out.push_str(if index > 0 { wrap } else { "" });
        let characters: Vec<char> = line.chars().collect();
        for (index, parts) in wrapper.wrap(&characters).into_iter().enumerate() {
            out.push_str(if index > 0 { wrap } else { "" });
            out.extend(parts.into_iter().flatten().map(|index| characters[index]));
            check_text(Some(out.len()))?;
        }
    }
    Ok(Value::from(out))
}

struct LineWrapper {
    width: usize,
    long_words: bool,
    hyphens: bool,
}

fn is_blank(c: char) -> bool {
    matches!(c, '\t' | '\n' | '\u{b}' | '\u{c}' | '\r' | ' ')
}

impl LineWrapper {
    /// Wraps a paragraph into lines, each a list of ranges of its characters.
    fn wrap(&self, text: &[char]) -> Vec<Vec<Range<usize>>> {
        let blank = |chunk: &Range<usize>| text[chunk.clone()].iter().all(|c| characters::is_space(*c));
        let mut chunks = self.chunks(text);
        chunks.reverse();
        let mut lines: Vec<Vec<Range<usize>>> = Vec::new();
        while let Some(next) = chunks.last() {
            if !lines.is_empty() && blank(next) {
                chunks.pop();
            }
            let (mut line, mut length) = (Vec::new(), 0);
            while let Some(chunk) = chunks.pop_if(|chunk| length + chunk.len() <= self.width) {
                length += chunk.len();
                line.push(chunk);
            }
            if chunks.last().is_some_and(|chunk| chunk.len() > self.width) {
                self.break_word(text, &mut chunks, &mut line, length);
            }
            line.pop_if(|chunk| blank(chunk));
            if !line.is_empty() {
                lines.push(line);
            }
        }
        lines
    }

    /// Moves the part of a word that fits to `line`, or a whole word to a line of its own.
    fn break_word(
        &self,
        text: &[char],
        chunks: &mut Vec<Range<usize>>,
        line: &mut Vec<Range<usize>>,
        length: usize,
    ) {
        let Some(chunk) = chunks.last_mut().filter(|_| self.long_words || line.is_empty()) else {
            return;
        };
        if !self.long_words {
            line.extend(chunks.pop());
            return;
        }
        let space = self.width - length;
        let mut end = space;
        if self.hyphens && chunk.len() > space {
            let start = &text[chunk.start..chunk.start + space];
            let hyphen = start.iter().rposition(|c| *c == '-').filter(|at| *at > 0);
            if let Some(hyphen) = hyphen.filter(|at| start[..*at].iter().any(|c| *c != '-')) {
                end = hyphen + 1;
            }
        }
        line.push(chunk.start..chunk.start + end);
        chunk.start += end;
    }

    /// Splits a text into words and the space between them; hyphenated words in parts.
    fn chunks(&self, text: &[char]) -> Vec<Range<usize>> {
        let mut chunks = Vec::new();
        let mut at = 0;
        while at < text.len() {
            let mut end = at + 1;
            if is_blank(text[at]) {
                while text.get(end).is_some_and(|c| is_blank(*c)) {
                    end += 1;
                }
            } else if let Some(dash) = self.dash(text, at) {
                end = dash;
            } else {
                end = self.word_end(text, at);
            }
            chunks.push(at..end);
            at = end;
        }
        chunks
    }

    /// The end of an em-dash between words that begins at `at`.
    fn dash(&self, text: &[char], at: usize) -> Option<usize> {
        let before = *text.get(at.checked_sub(1)?)?;
        let end = at + text[at..].iter().take_while(|c| **c == '-').count();
        let word = |c: &char| is_alnum(*c) || *c == '_';
        let breaks = self.hyphens
            && end >= at + 2
            && (word(&before) || "!\"'&.,?".contains(before))
            && text.get(end).is_some_and(word);
        breaks.then_some(end)
    }

    fn word_end(&self, text: &[char], at: usize) -> usize {
        let letter = |index: Option<usize>| {
            index.and_then(|index| text.get(index)).is_some_and(|c| is_alpha(*c) || *c == '_')
        };
        let hyphen = |index: Option<usize>| index.and_then(|index| text.get(index)) == Some(&'-');
        for end in at + 1..text.len() {
            if is_blank(text[end]) || self.dash(text, end).is_some() {
                return end;
            }
            let two = letter(end.checked_sub(1)) && letter(end.checked_sub(2));
            let one = letter(end.checked_sub(1)) && hyphen(end.checked_sub(2)) && letter(end.checked_sub(3));
            let after = if hyphen(Some(end + 2)) { end + 3 } else { end + 2 };
            let follows = letter(Some(end + 1)) && letter(Some(after));
            if self.hyphens && text[end] == '-' && (two || one) && follows {
                return end + 1;
            }
        }
        text.len()
    }
}
