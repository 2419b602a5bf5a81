//! Characters as Python's `str` classes them.

use std::sync::OnceLock;

use regex::Regex;

/// Digits that are no decimal digits, such as superscripts.
const OTHER_DIGITS: [(u32, u32); 20] = [
    (178, 179),
    (185, 185),
    (4969, 4977),
    (6618, 6618),
    (8304, 8304),
    (8308, 8313),
    (8320, 8329),
    (9312, 9320),
    (9332, 9340),
    (9352, 9360),
    (9450, 9450),
    (9461, 9469),
    (9471, 9471),
    (10102, 10110),
    (10112, 10120),
    (10122, 10130),
    (68160, 68163),
    (69216, 69224),
    (69714, 69722),
    (127232, 127242),
];

/// Ideographs that stand for numbers.
const NUMBER_IDEOGRAPHS: &str = concat!(
    "㐅㒃㠪㭍一七万三九二五亖亿什仟仨伍佰億兆兩八六十千卄卅卌叁参參叄四壱壹幺廾廿弌弍弎弐拾捌柒漆玖百肆萬貮貳贰阡陆陌陸零\u{f96b}\u{f973}\u{f978}",
    "\u{f9b2}\u{f9d1}\u{f9d3}\u{f9fd}\u{20001}\u{20064}\u{200e2}\u{20121}\u{2092a}\u{20983}",
    "\u{2098c}\u{2099c}\u{20aea}\u{20afd}\u{20b19}\u{22390}\u{22998}\u{23b1b}\u{2626d}",
    "\u{2f890}",
);

/// Returns whether Python strips `c` and splits at it.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Returns whether a line ends with `c`.
pub(super) fn ends_line(c: char) -> bool {
    matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

fn is_in(cell: &'static OnceLock<Option<Regex>>, class: &str, c: char) -> bool {
    let class = cell.get_or_init(|| Regex::new(&format!("^{class}$")).ok());
    class.as_ref().is_some_and(|class| class.is_match(c.encode_utf8(&mut [0; 4])))
}

/// `str.isalpha` of one character.
pub(super) fn is_alpha(c: char) -> bool {
    static LETTERS: OnceLock<Option<Regex>> = OnceLock::new();
    if c.is_ascii() { c.is_ascii_alphabetic() } else { is_in(&LETTERS, r"\p{L}", c) }
}

/// `str.isdecimal` of one character.
pub(super) fn is_decimal(c: char) -> bool {
    static DECIMALS: OnceLock<Option<Regex>> = OnceLock::new();
    if c.is_ascii() { c.is_ascii_digit() } else { is_in(&DECIMALS, r"\p{Nd}", c) }
}

/// `str.isdigit` of one character.
pub(super) fn is_digit(c: char) -> bool {
    is_decimal(c) || OTHER_DIGITS.iter().any(|(first, last)| (*first..=*last).contains(&u32::from(c)))
}

/// `str.isnumeric` of one character.
pub(super) fn is_numeric(c: char) -> bool {
    c.is_numeric() || NUMBER_IDEOGRAPHS.contains(c)
}

/// `str.isalnum` of one character.
pub(super) fn is_alnum(c: char) -> bool {
    is_alpha(c) || is_digit(c) || is_numeric(c)
}

/// Returns whether `c` is a letter that has a case by itself, as `ǅ`.
pub(super) fn is_title(c: char) -> bool {
    static TITLES: OnceLock<Option<Regex>> = OnceLock::new();
    !c.is_ascii() && is_in(&TITLES, r"\p{Lt}", c)
}

/// Returns whether `c` has a case.
pub(super) fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase() || is_title(c)
}

/// Appends `c` to `out` in title case.
pub(super) fn push_title(c: char, out: &mut String) {
    match c {
        'Ǆ' | 'ǅ' | 'ǆ' => out.push('ǅ'),
        'Ǉ' | 'ǈ' | 'ǉ' => out.push('ǈ'),
        'Ǌ' | 'ǋ' | 'ǌ' => out.push('ǋ'),
        'Ǳ' | 'ǲ' | 'ǳ' => out.push('ǲ'),
        // Georgian letters have capitals that begin no title.
        '\u{10d0}'..='\u{10ff}' => out.push(c),
        c => {
            let mut upper = c.to_uppercase();
            out.extend(upper.next());
            out.extend(upper.flat_map(char::to_lowercase));
        }
    }
}

/// Python's `str.capitalize` of a text.
pub(super) fn capitalize(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut characters = text.chars();
    if let Some(first) = characters.next() {
        push_title(first, &mut out);
    }
    out.push_str(&characters.as_str().to_lowercase());
    out
}

/// Python's `str.title` of a text.
pub(super) fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut within = false;
    for c in text.chars() {
        if within {
            out.extend(c.to_lowercase())
        } else {
            push_title(c, &mut out)
        }
        within = is_cased(c);
    }
    out
}

/// The lines of `text`, with their ends if `keep`.
pub(super) fn lines(text: &str, keep: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ends_line) {
        let end = &rest[at..];
        let length = if end.starts_with("\r\n") { 2 } else { end.chars().next().map_or(0, char::len_utf8) };
        lines.push(&rest[..if keep { at + length } else { at }]);
        rest = &rest[at + length..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}
