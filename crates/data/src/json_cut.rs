//! Finds the top-level values of a JSON file, with line ends, white space or nothing between them.
//!
//! One object a line, objects over several lines, objects joined without anything between them, and
//! arrays one after the other are all sequences of values. The cut counts only brackets and
//! strings. A line that cannot continue a value is a part by itself, so that one broken line gets
//! its own error and later lines are read.

use std::ops::Range;

use super::python_json;

/// A top-level value, or a line without one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct JsonPart {
    /// The line of its first byte, counted from 1.
    pub(super) line: u64,
    /// Its byte range in the file.
    pub(super) range: Range<usize>,
}

/// Cuts `bytes` into parts, in order.
///
/// # Errors
/// Fails with the reason if the file is one broken value.
pub(super) fn cut(bytes: &[u8]) -> Result<Vec<JsonPart>, String> {
    let mut cutter = Cutter { bytes, at: 0, line: 1, parts: Vec::new(), in_vain: 0 };
    while cutter.skip_to_text() {
        cutter.cut_region()?;
    }
    Ok(cutter.parts)
}

/// The non-empty lines of `bytes`, as parts.
pub(super) fn lines(bytes: &[u8]) -> Vec<JsonPart> {
    let mut parts = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let end = line_end(bytes, at);
        let text = trimmed(bytes, at..end);
        if !text.is_empty() {
            parts.push(JsonPart { line, range: text });
        }
        at = end + line_end_bytes(bytes, end);
        line += 1;
    }
    parts
}

/// The number of line ends in `bytes`: LF, CR LF, or CR alone.
pub(super) fn line_ends(bytes: &[u8]) -> u64 {
    let ends = |at: &usize| bytes[*at] == b'\n' || (bytes[*at] == b'\r' && bytes.get(at + 1) != Some(&b'\n'));
    (0..bytes.len()).filter(ends).count() as u64
}

/// `range` without the white space at its ends.
pub(super) fn trimmed(bytes: &[u8], range: Range<usize>) -> Range<usize> {
    let part = &bytes[range.clone()];
    let front = part.len() - part.trim_ascii_start().len();
    let len = part.trim_ascii().len();
    range.start + front..range.start + front + len
}

/// The end of the line that holds the byte `at`.
fn line_end(bytes: &[u8], at: usize) -> usize {
    let end = bytes[at..].iter().position(|byte| matches!(byte, b'\n' | b'\r'));
    end.map_or(bytes.len(), |end| at + end)
}

/// The number of bytes of the line end at `at`; zero at the end of the file.
fn line_end_bytes(bytes: &[u8], at: usize) -> usize {
    match bytes[at..] {
        [b'\r', b'\n', ..] => 2,
        [b'\r' | b'\n', ..] => 1,
        _ => 0,
    }
}

/// Lines that belong together by their brackets.
struct Region {
    values: Vec<JsonPart>,
    /// Begin of text outside of values, which extends to the end of the line.
    stray: Option<usize>,
    /// A value that does not end.
    open: Option<JsonPart>,
    /// The end of the last line.
    end: usize,
    /// Number of line ends in the region.
    line_ends: u64,
    /// True if the last line ends within a string.
    in_string: bool,
}

/// Maximum bytes scanned in vain for each byte of a file. Beyond them, the cut stops searching for
/// values of several lines.
const IN_VAIN_FOR_EACH: usize = 64;

struct Cutter<'a> {
    bytes: &'a [u8],
    at: usize,
    line: u64,
    parts: Vec<JsonPart>,
    /// Number of bytes scanned beyond a line for values that turned out broken.
    in_vain: usize,
}

impl Cutter<'_> {
    /// Skips white space; returns true if a byte follows.
    fn skip_to_text(&mut self) -> bool {
        while let Some(byte) = self.bytes.get(self.at) {
            match byte {
                b'\n' | b'\r' => {
                    self.at += line_end_bytes(self.bytes, self.at);
                    self.line += 1;
                }
                _ if byte.is_ascii_whitespace() => self.at += 1,
                _ => return true,
            }
        }
        false
    }

    fn cut_region(&mut self) -> Result<(), String> {
        let region = self.region();
        let text = trimmed(self.bytes, self.at..region.end);
        if region.line_ends == 0 {
            // A line with stray text or an open value is one part.
            let whole = JsonPart { line: self.line, range: text };
            if region.stray.is_some() || region.open.is_some() {
                if region.open.as_ref().is_some_and(|open| self.holds_all_rows(open)) {
                    return Err(self.unended(&region));
                }
                self.parts.push(whole);
            } else {
                self.parts.extend(region.values);
            }
            self.at = region.end;
            return Ok(());
        }
        let is_broken = |part: &&JsonPart| {
            self.bytes[part.range.start] == b'{' && !python_json::is_json(&self.bytes[part.range.clone()])
        };
        if let Some(index) = region.values.iter().position(|part| is_broken(&part)) {
            let part = region.values[index].clone();
            let is_all = self.parts.is_empty() && index == 0 && self.is_last(part.range.end);
            if is_all && self.restart(&part, self.bytes.len()).is_none_or(|at| !self.is_row_line(at)) {
                return Err(self.broken_file(&part));
            }
            self.parts.extend_from_slice(&region.values[..index]);
            let end = part.range.end;
            self.pass_broken(part, region.end, end);
        } else if let Some(open) = &region.open {
            if self.holds_all_rows(open) {
                return Err(self.unended(&region));
            }
            self.parts.extend_from_slice(&region.values);
            self.pass_broken(open.clone(), region.end, self.bytes.len());
        } else {
            self.parts.extend_from_slice(&region.values);
            self.line += region.line_ends;
            self.at = region.end;
            if let Some(stray) = region.stray {
                self.parts.push(JsonPart { line: self.line, range: trimmed(self.bytes, stray..region.end) });
            }
        }
        Ok(())
    }

    /// Scans the region that begins here, to the first end of a line without an open value.
    fn region(&self) -> Region {
        let one_line = self.in_vain > IN_VAIN_FOR_EACH * self.bytes.len() + (1 << 20);
        let mut region = Region {
            values: Vec::new(),
            stray: None,
            open: None,
            end: self.bytes.len(),
            line_ends: 0,
            in_string: false,
        };
        let (mut at, mut depth, mut escaped) = (self.at, 0_usize, false);
        let mut from = JsonPart { line: self.line, range: at..at };
        while let Some(&byte) = self.bytes.get(at) {
            match byte {
                b'\n' | b'\r' => {
                    region.end = at;
                    if region.in_string || depth == 0 || one_line {
                        break;
                    }
                    region.line_ends += 1;
                    at += line_end_bytes(self.bytes, at);
                    region.end = self.bytes.len();
                    continue;
                }
                _ if region.in_string => match byte {
                    _ if escaped => escaped = false,
                    b'\\' => escaped = true,
                    b'"' => region.in_string = false,
                    _ => {}
                },
                b'[' | b'{' => {
                    if depth == 0 {
                        from = JsonPart { line: self.line + region.line_ends, range: at..at };
                    }
                    depth += 1;
                }
                b']' | b'}' if depth > 0 => {
                    depth -= 1;
                    if depth == 0 {
                        region.values.push(JsonPart { line: from.line, range: from.range.start..at + 1 });
                    }
                }
                b'"' if depth > 0 => region.in_string = true,
                _ if depth == 0 && !byte.is_ascii_whitespace() => {
                    region.stray = Some(at);
                    region.end = line_end(self.bytes, at);
                    return region;
                }
                _ => {}
            }
            at += 1;
        }
        region.open = (depth > 0).then_some(JsonPart { range: from.range.start..region.end, ..from });
        region
    }

    /// Makes the broken value `part` one part, up to the line of the next object, or to `end`. The
    /// scan for it reached `scanned`.
    fn pass_broken(&mut self, part: JsonPart, scanned: usize, end: usize) {
        let start = part.range.start;
        self.in_vain += scanned - start;
        let next = self.restart(&part, end).unwrap_or(end);
        self.parts.push(JsonPart { line: part.line, range: trimmed(self.bytes, start..next) });
        self.line = part.line + line_ends(&self.bytes[start..next]);
        self.at = next;
    }

    /// Finds the first line before `before`, after the first line of `part`, that begins with an
    /// object and is indented no deeper.
    fn restart(&self, part: &JsonPart, before: usize) -> Option<usize> {
        let indent = self.indent(part.range.start);
        let mut at = line_end(self.bytes, part.range.start);
        while at < before {
            at += line_end_bytes(self.bytes, at);
            if at >= before {
                break;
            }
            let end = line_end(self.bytes, at);
            let text = trimmed(self.bytes, at..end);
            if text.start - at <= indent && self.bytes[text].first() == Some(&b'{') {
                return Some(at);
            }
            at = end;
        }
        None
    }

    /// Number of spaces and tabs at the beginning of the line of the byte `at`.
    fn indent(&self, at: usize) -> usize {
        let start =
            self.bytes[..at].iter().rposition(|byte| matches!(byte, b'\n' | b'\r')).map_or(0, |end| end + 1);
        self.bytes[start..].iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count()
    }

    /// Returns whether the line at `at` holds one whole object.
    fn is_row_line(&self, at: usize) -> bool {
        python_json::is_json(&self.bytes[trimmed(self.bytes, at..line_end(self.bytes, at))])
    }

    fn is_last(&self, end: usize) -> bool {
        self.bytes[end..].iter().all(u8::is_ascii_whitespace)
    }

    /// Returns whether `open` is an array that begins the file, and not the first of lines with a
    /// row each.
    fn holds_all_rows(&self, open: &JsonPart) -> bool {
        let begins = self.parts.is_empty() && self.bytes[open.range.start] == b'[';
        begins && self.restart(open, self.bytes.len()).is_none_or(|at| !self.is_row_line(at))
    }

    fn unended(&self, region: &Region) -> String {
        let first = self.line;
        if region.in_string {
            let line = first + region.line_ends;
            return format!(
                "the array that begins on line {first} has a text that does not end on its line, {line}"
            );
        }
        format!("the array that begins on line {first} does not end")
    }

    fn broken_file(&self, part: &JsonPart) -> String {
        let bytes = &self.bytes[part.range.clone()];
        let error = python_json::parse(bytes).err();
        error.map_or_else(|| "it is not JSON".to_owned(), |error| python_json::placed(&error, part.line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> Vec<(u64, &str)> {
        let parts = cut(text.as_bytes()).unwrap();
        parts.into_iter().map(|part| (part.line, &text[part.range])).collect()
    }

    #[test]
    fn values_are_cut_whatever_is_between_them() {
        for (text, parts) in [
            ("{\"a\": 1}\n\n {\"a\": \"}\"} \n", vec![(1, "{\"a\": 1}"), (3, "{\"a\": \"}\"}")]),
            (
                "{\"a\": 1}\r{\"a\": 2}\r\r{\"a\": 3}",
                vec![(1, "{\"a\": 1}"), (2, "{\"a\": 2}"), (4, "{\"a\": 3}")],
            ),
            ("{\"a\": 1}\r\n{\"a\": 2}\r\n", vec![(1, "{\"a\": 1}"), (2, "{\"a\": 2}")]),
            ("{\"a\":1}{\"a\":2} {\"a\":3}", vec![(1, "{\"a\":1}"), (1, "{\"a\":2}"), (1, "{\"a\":3}")]),
            (
                "{\n \"a\": [\n  {}\n ]\n}{\n\"a\": 2}\n[\n1]\n",
                vec![(1, "{\n \"a\": [\n  {}\n ]\n}"), (5, "{\n\"a\": 2}"), (7, "[\n1]")],
            ),
            ("", vec![]),
            (" \n\r\n", vec![]),
        ] {
            assert_eq!(shown(text), parts, "{text:?}");
        }
    }

    #[test]
    fn a_broken_part_hides_none_of_the_others() {
        let good = "{\"a\": 1}";
        for bad in [
            "{\"a\": \"1}",
            "{\"a\": {\"b\": 1",
            "{\"a\": [1, 2}",
            "{\"a\": 1}}",
            "{\"a\": 1} x",
            "no",
            "\"a",
            "3",
            "[1, 2",
            "{\"a\" 1}",
            "}",
            "{",
            "{'a': 'it\"s'}",
        ] {
            for text in [
                format!("{good}\n{bad}\n{good}\n{good}"),
                format!("{bad}\n{good}\n{good}\n{good}"),
                format!("{good}\r{good}\r{good}\r{bad}"),
            ] {
                let parts: Vec<(u64, &str)> = (1..).zip(text.split(['\n', '\r'])).collect();
                assert_eq!(shown(&text), parts, "{text:?}");
            }
        }
        let spread = "{\n  \"a\" 1,\n  \"b\": {\"c\": 2}\n}\n{\n  \"a\": 1\n}\n";
        assert_eq!(shown(spread), [(1, "{\n  \"a\" 1,\n  \"b\": {\"c\": 2}\n}"), (5, "{\n  \"a\": 1\n}")]);
    }

    #[test]
    fn one_broken_value_is_the_fault_of_its_file() {
        for (text, why) in [
            ("[\n{\"a\": 1},\n{\"a\": 2}", "the array that begins on line 1 does not end"),
            (
                "[\n{\"a\": \"1},\n{\"a\": 2}]",
                "the array that begins on line 1 has a text that does not end on its line, 2",
            ),
            ("\n{\n\"data\": [\n{\"a\" 1}\n]}", "not JSON: expected `:` at line 4, column 6"),
        ] {
            assert_eq!(cut(text.as_bytes()), Err(why.to_owned()), "{text:?}");
        }
    }

    #[test]
    fn a_file_of_open_brackets_takes_time_in_proportion() {
        for piece in ["{\n", "{\"a\"\n", "{\nx}", "[\n", "{\"a\": [\n \n", "[]{x\n}\n"] {
            let text = piece.repeat(200_000);
            let begun = std::time::Instant::now();
            let _ = cut(text.as_bytes());
            assert!(begun.elapsed().as_secs() < 300, "{piece:?} takes {:?}", begun.elapsed());
        }
    }
}
