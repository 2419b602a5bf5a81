//! Reads the `configs` of a data set's README.md, whose front matter is YAML.
//!
//! The hub's own tools write block mappings and sequences of plain or quoted scalars; people also
//! write flow sequences (`[a, b]`). The parser reads these forms. It refuses all others (anchors,
//! flow mappings, block scalars) with their line, since a partial reading could mix rows that do
//! not belong together.

/// A value of the front matter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Node {
    Text(String),
    List(Vec<Node>),
    Map(Vec<(String, Node)>),
}

impl Node {
    /// Returns the value of a key of a mapping.
    pub(super) fn get(&self, key: &str) -> Option<&Node> {
        match self {
            Node::Map(pairs) => pairs.iter().find(|(known, _)| known == key).map(|(_, value)| value),
            _ => None,
        }
    }

    pub(super) fn text(&self) -> Option<&str> {
        match self {
            Node::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// Returns the value of the top-level key `configs` of a README.md; none without front matter or
/// such a key.
pub(super) fn configs(readme: &str) -> Result<Option<Node>, String> {
    let mut lines = readme.trim_start_matches('\u{feff}').lines().enumerate();
    if lines.next().is_none_or(|(_, first)| first.trim_end() != "---") {
        return Ok(None);
    }
    let mut block = Vec::new();
    let mut is_inside = false;
    for (number, line) in lines.take_while(|(_, line)| line.trim_end() != "---") {
        let text = without_comment(line);
        let is_key = !text.starts_with([' ', '-']) && !text.trim().is_empty();
        if is_key {
            is_inside = text.starts_with("configs:");
        }
        if is_inside && !text.trim().is_empty() {
            if text.trim_start_matches(' ').starts_with('\t') {
                return Err(format!("line {}: a tab indents it", number + 1));
            }
            let indent = text.len() - text.trim_start_matches(' ').len();
            block.push(Line { number: number + 1, indent, text: text.trim().to_owned() });
        }
    }
    if block.is_empty() {
        return Ok(None);
    }
    let mut parser = Parser { lines: block, at: 0, depth: 0 };
    let Node::Map(pairs) = parser.mapping(0)? else { return Ok(None) };
    Ok(pairs.into_iter().next().map(|(_, value)| value))
}

/// Returns a line without its comment, which starts after white space and outside of quotes.
fn without_comment(line: &str) -> &str {
    let (mut quote, mut before) = (None, ' ');
    for (at, c) in line.char_indices() {
        match quote {
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None if c == '#' && before.is_whitespace() => return &line[..at],
            None if matches!(c, '"' | '\'') && (before.is_whitespace() || "[,".contains(before)) => {
                quote = Some(c)
            }
            None => {}
        }
        before = c;
    }
    line
}

/// Deeper than any list of configurations.
const MAX_DEPTH: usize = 16;

struct Line {
    number: usize,
    indent: usize,
    text: String,
}

struct Parser {
    lines: Vec<Line>,
    at: usize,
    depth: usize,
}

impl Parser {
    fn fault<T>(&self, why: &str) -> Result<T, String> {
        let line = self.lines.get(self.at).or(self.lines.last());
        Err(format!("line {}: {why}", line.map_or(0, |line| line.number)))
    }

    fn is_item(&self, indent: usize) -> bool {
        self.lines
            .get(self.at)
            .is_some_and(|line| line.indent == indent && (line.text == "-" || line.text.starts_with("- ")))
    }

    /// Parses the mapping whose keys have the indentation `indent`.
    fn mapping(&mut self, indent: usize) -> Result<Node, String> {
        let mut pairs: Vec<(String, Node)> = Vec::new();
        while self.lines.get(self.at).is_some_and(|line| line.indent == indent) && !self.is_item(indent) {
            let text = self.lines[self.at].text.clone();
            let Some((key, value)) = key_and_value(&text) else {
                return self.fault("it is not `key: value`");
            };
            let key = self.scalar(key)?;
            if pairs.iter().any(|(known, _)| *known == key) {
                return self.fault(&format!("the key `{key}` occurs twice"));
            }
            let value = if value.is_empty() {
                self.at += 1;
                self.below(indent)?
            } else {
                let value = self.inline(value)?;
                self.at += 1;
                value
            };
            pairs.push((key, value));
        }
        if self.lines.get(self.at).is_some_and(|line| line.indent > indent) {
            return self.fault("its indentation fits nothing above it");
        }
        Ok(Node::Map(pairs))
    }

    /// Parses the value of a key at `indent` whose line holds only the key. A sequence need not be
    /// indented.
    fn below(&mut self, indent: usize) -> Result<Node, String> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return self.fault("it is nested too deeply");
        }
        let node = match self.lines.get(self.at).map(|line| line.indent) {
            Some(deeper) if deeper > indent && !self.is_item(deeper) => self.mapping(deeper)?,
            Some(deeper) if deeper >= indent && self.is_item(deeper) => self.sequence(deeper)?,
            _ => Node::Text(String::new()),
        };
        self.depth -= 1;
        Ok(node)
    }

    fn sequence(&mut self, indent: usize) -> Result<Node, String> {
        let mut items = Vec::new();
        while self.is_item(indent) {
            let line = &mut self.lines[self.at];
            let rest = line.text[1..].trim_start().to_owned();
            if rest.is_empty() {
                self.at += 1;
                items.push(self.below(indent)?);
            } else if key_and_value(&rest).is_some() && !rest.starts_with('[') {
                // The mapping begins on the line of its dash.
                let inner = indent + line.text.len() - rest.len();
                (line.indent, line.text) = (inner, rest);
                items.push(self.mapping(inner)?);
            } else {
                items.push(self.inline(&rest)?);
                self.at += 1;
            }
        }
        if self.lines.get(self.at).is_some_and(|line| line.indent > indent) {
            return self.fault("its indentation fits nothing above it");
        }
        Ok(Node::List(items))
    }

    /// Parses a scalar, or a flow sequence of scalars.
    fn inline(&self, text: &str) -> Result<Node, String> {
        let Some(inside) = text.strip_prefix('[') else { return self.scalar(text).map(Node::Text) };
        let Some(inside) = inside.strip_suffix(']') else {
            return self.fault("a list in brackets does not end on its line");
        };
        let items = inside.split(',').map(str::trim).filter(|item| !item.is_empty());
        items.map(|item| self.scalar(item).map(Node::Text)).collect::<Result<_, _>>().map(Node::List)
    }

    fn scalar(&self, text: &str) -> Result<String, String> {
        for quote in ['"', '\''] {
            if let Some(inside) = text.strip_prefix(quote) {
                return match inside.strip_suffix(quote) {
                    Some(inside) if !inside.contains(['\\', quote]) => Ok(inside.to_owned()),
                    _ => self.fault("its quotes are not supported"),
                };
            }
        }
        if text.starts_with(['{', '}', '[', ']', '&', '*', '!', '|', '>', '%', '@', '`', '?']) && text != "**"
        {
            // A pattern may begin with a star; an alias is a star and a name.
            if !text.starts_with("*.") && !text.starts_with("**/") && !text.starts_with("*/") {
                return self.fault(&format!("the YAML `{text}` is not supported"));
            }
        }
        Ok(text.to_owned())
    }
}

/// Splits `key: value` or `key:`; none for any other text.
fn key_and_value(text: &str) -> Option<(&str, &str)> {
    if let Some(key) = text.strip_suffix(':') {
        return (!key.contains(": ")).then_some((key.trim_end(), ""));
    }
    text.split_once(": ").map(|(key, value)| (key.trim_end(), value.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Node {
        Node::Text(text.to_owned())
    }

    fn map(pairs: &[(&str, Node)]) -> Node {
        Node::Map(pairs.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect())
    }

    #[test]
    fn what_the_tools_of_the_hub_write() {
        let readme = "---\nlicense: mit\ndataset_info:\n- config_name: x\n  features:\n  - name: a\n    dtype: string\nconfigs:\n\
            - config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n\
            - config_name: socratic\n  default: true\n  data_files:\n  - split: train\n    path:\n    - a/*.parquet\n    - 'b #1.parquet'\n\
            tags:\n- math\n---\n# configs:\n- config_name: no\n";
        let split = |name: &str, path: Node| map(&[("split", text(name)), ("path", path)]);
        let expected = Node::List(vec![
            map(&[
                ("config_name", text("main")),
                (
                    "data_files",
                    Node::List(vec![
                        split("train", text("main/train-*")),
                        split("test", text("main/test-*")),
                    ]),
                ),
            ]),
            map(&[
                ("config_name", text("socratic")),
                ("default", text("true")),
                (
                    "data_files",
                    Node::List(vec![split(
                        "train",
                        Node::List(vec![text("a/*.parquet"), text("b #1.parquet")]),
                    )]),
                ),
            ]),
        ]);
        assert_eq!(configs(readme), Ok(Some(expected)));
    }

    #[test]
    fn what_people_write() {
        let readme = "---\nconfigs: # two\n  - config_name: \"a\"\n    data_files: [\"x.csv\", 'y.csv'] # both\n\n  -\n    config_name: b\n    data_files: \"*.jsonl\"\n---\n";
        let expected = Node::List(vec![
            map(&[
                ("config_name", text("a")),
                ("data_files", Node::List(vec![text("x.csv"), text("y.csv")])),
            ]),
            map(&[("config_name", text("b")), ("data_files", text("*.jsonl"))]),
        ]);
        assert_eq!(configs(readme), Ok(Some(expected)));
        for none in ["", "# title\n", "---\nlicense: mit\n---\n", "text\n---\nconfigs:\n- a\n---\n"] {
            assert_eq!(configs(none), Ok(None), "{none:?}");
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_with_its_line() {
        for (block, line) in [
            ("configs:\n- {config_name: a}", 3),
            ("configs:\n- config_name: a\n  data_files: &x y", 4),
            ("configs:\n- config_name: a\n  data_files: [a,\n    b]", 4),
            ("configs:\n- config_name: |\n    a", 3),
            ("configs:\n- config_name: a\n      data_files: b", 4),
            ("configs:\n- config_name: a\n  config_name: b", 4),
        ] {
            let error = configs(&format!("---\n{block}\n---\n")).unwrap_err();
            assert!(error.starts_with(&format!("line {line}: ")), "{block:?}: {error}");
        }
        let deep = (0..40).map(|n| format!("{}a:\n", " ".repeat(n))).collect::<String>();
        assert!(configs(&format!("---\nconfigs:\n {}---\n", deep.replace('\n', "\n "))).is_err());
    }
}
