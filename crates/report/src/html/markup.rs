//! Formats text and numbers for a page.

/// Escapes everything in `text` that HTML would obey, for text and for quoted attributes.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
        .replace('\'', "&#39;")
}

/// Formats a number for an axis: `0.25`, `1200`, `2e-4`.
pub(super) fn short(value: f64) -> String {
    let size = value.abs();
    if size != 0.0 && !(1e-3..1e5).contains(&size) {
        return format!("{value:.1e}").replace(".0e", "e");
    }
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Formats a share of 1 in percent; its sign stays on the number's line.
pub(super) fn percent(share: f64) -> String {
    format!("{:.1}\u{a0}%", 100.0 * share)
}

/// Returns a section with its heading; empty if `body` is empty.
pub(super) fn section(heading: &str, body: &str) -> String {
    if body.is_empty() {
        return String::new();
    }
    format!("<section>\n<h2>{}</h2>\n{body}</section>\n", escape(heading))
}

/// Returns a table of text cells, empty without rows. It scrolls by itself if it is wider than the
/// page, and the first cell of a row is its header.
pub(super) fn table(caption: &str, header: &[&str], rows: &[Vec<String>]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let caption = escape(caption);
    let mut html = format!(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{caption}\"><table><caption>{caption}</caption>\n<thead><tr>"
    );
    header.iter().for_each(|name| html += &format!("<th scope=\"col\">{}</th>", escape(name)));
    html += "</tr></thead>\n<tbody>\n";
    for row in rows {
        html += "<tr>";
        for (column, cell) in row.iter().enumerate() {
            let cell = escape(cell);
            html += &if column == 0 {
                format!("<th scope=\"row\">{cell}</th>")
            } else {
                format!("<td>{cell}</td>")
            };
        }
        html += "</tr>\n";
    }
    html + "</tbody></table></div>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!(short(0.0002), "2e-4");
        assert_eq!(short(1200.0), "1200");
        assert_eq!(short(1.5), "1.5");
        assert_eq!(short(0.0), "0");
        assert_eq!(percent(0.9134), "91.3\u{a0}%");
    }

    #[test]
    fn text_stays_text() {
        assert_eq!(escape("</script><b a=\"'\">&"), "&lt;/script&gt;&lt;b a=&quot;&#39;&quot;&gt;&amp;");
        assert_eq!(section("a", ""), "");
        let html = table("c", &["x<", "y"], &[vec!["<b>".into(), "1".into()]]);
        assert!(html.contains("<th scope=\"col\">x&lt;</th>"), "{html}");
        assert!(html.contains("<tr><th scope=\"row\">&lt;b&gt;</th><td>1</td></tr>"), "{html}");
    }
}
