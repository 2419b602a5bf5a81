//! Makes text of any origin safe for a terminal.
//!
//! Names, messages and values come from files and servers, and a terminal obeys control characters:
//! an escape sequence can retitle the window, rewrite lines above, or fill the clipboard; a change
//! of direction shows a path backwards. Escapes replace them; line ends and tabs stay.

use std::borrow::Cow;
use std::fmt::Write;

/// Returns `text` with everything that a terminal would obey instead of showing, as `\u{1b}` and
/// the like.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_obeyed) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        if is_obeyed(character) {
            // Writing to a String cannot fail.
            let _ = write!(shown, "{}", character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown.into()
}

/// Returns whether a terminal obeys the character: controls (C0, DEL, C1) but for `\n` and `\t`,
/// and marks that change the direction of the text (Unicode's Bidi_Control, and the separators that
/// some terminals read as line ends).
fn is_obeyed(character: char) -> bool {
    match character {
        '\n' | '\t' => false,
        '\u{61C}' | '\u{200E}' | '\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}' => true,
        other => other.is_control(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_a_terminal_obeys_is_left() {
        assert!(matches!(printable("a\tb\nc é 😀"), Cow::Borrowed("a\tb\nc é 😀")));
        assert_eq!(printable("\x1b]0;x\x07\r\u{9b}2J"), r"\u{1b}]0;x\u{7}\r\u{9b}2J");
        assert_eq!(printable("a\u{202E}b\x7f"), r"a\u{202e}b\u{7f}");
        for code in (0..0x20).chain(0x7f..0xa0).filter(|code| ![9, 10].contains(code)) {
            let shown = printable(&char::from(code).to_string()).into_owned();
            assert!(shown.starts_with('\\') && shown.bytes().all(|byte| (32..127).contains(&byte)), "{code}");
        }
    }
}
