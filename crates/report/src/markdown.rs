//! Renders text of any origin in Markdown on one line, without effect of HTML, links, emphasis or
//! controls in it.

use super::printable::printable;

/// Returns `text` unchanged if Markdown gives it no meaning, else as code.
pub(super) fn name(text: &str) -> String {
    if is_plain(text) { text.to_owned() } else { code(text) }
}

/// Returns `text` as code.
pub(super) fn code(text: &str) -> String {
    let text = printable(text).replace('\n', "\\n").replace('\t', "\\t");
    // Code ends at as many backticks as it begins with; Markdown strips one space at each side.
    let fence = "`".repeat(longest_run(&text) + 1);
    let space = if text.starts_with(['`', ' ']) || text.ends_with(['`', ' ']) { " " } else { "" };
    format!("{fence}{space}{text}{space}{fence}")
}

/// Returns `text` as code in a cell of a table.
pub(super) fn cell(text: &str) -> String {
    code(text).replace('|', "\\|")
}

/// Returns the lines of `text` as a block of code in `language`.
pub(super) fn block(language: &str, text: &str) -> String {
    let text = printable(text);
    let fence = "`".repeat(longest_run(&text).max(2) + 1);
    format!("{fence}{language}\n{}\n{fence}\n", text.trim_end())
}

/// Returns whether `text` is a plain word or words in Markdown.
fn is_plain(text: &str) -> bool {
    let may_stand = |c: char| c.is_alphanumeric() || "-_. ".contains(c);
    let outside = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
    // Underscores within words emphasise nothing; `www.` begins a link.
    outside(text.chars().next())
        && outside(text.chars().next_back())
        && text.chars().all(may_stand)
        && !["__", " _", "_ ", "._", "_.", "-_", "_-", "www."].iter().any(|part| text.contains(part))
}

fn longest_run(text: &str) -> usize {
    text.split(|c| c != '`').map(str::len).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_means_something_is_code() {
        for plain in ["out", "my_run", "Llama-3.2 1B", "run.2", "модель"] {
            assert_eq!(name(plain), plain);
        }
        for (text, shown) in [
            ("<script>alert(1)</script>", "`<script>alert(1)</script>`"),
            ("*a*", "`*a*`"),
            ("_a_", "`_a_`"),
            ("a _b_", "`a _b_`"),
            ("www.evil.org", "`www.evil.org`"),
            ("[a](b)", "`[a](b)`"),
            ("a`<b>`", "`` a`<b>` ``"),
            ("``", "``` `` ```"),
            ("a\n# b\x1b[31m\u{202e}", "`a\\n# b\\u{1b}[31m\\u{202e}`"),
            ("# a", "`# a`"),
        ] {
            assert_eq!(name(text), shown);
        }
        assert_eq!(cell("a|<b>"), "`a\\|<b>`");
        assert_eq!(block("toml", "a = \"```\x1b\"\n\n"), "````toml\na = \"```\\u{1b}\"\n````\n");
    }
}
