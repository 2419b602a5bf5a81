//! Rules of language that a machine can check: how doc comments begin, words that messages avoid,
//! names that fit anything, and the width of prose in pages, comments and docstrings.

use std::fs;

use super::{blanked, files, root, sources};

/// Widest line of prose, in columns.
const COLUMNS: usize = 100;

/// Prose without a width: data that other programs wrote, and the log, which has a line an entry.
const ANY_WIDTH: [&str; 2] = ["tests/golden/", "docs/dev/log.md"];

/// A text file of this repository, whole.
struct Page {
    /// Path below the root, with `/`.
    path: String,
    text: String,
}

impl Page {
    /// Returns true if the file's name ends in one of these suffixes.
    fn ends_in(&self, suffixes: &[&str]) -> bool {
        suffixes.iter().any(|suffix| self.path.ends_with(suffix))
    }
}

/// Reads the pages, programs and settings of this repository.
fn pages() -> Vec<Page> {
    let mut pages = Vec::new();
    for path in files(&root()).into_iter().chain(files(&root().join(".github"))) {
        let name = path.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/");
        if ANY_WIDTH.iter().all(|folder| !name.starts_with(folder))
            && let Ok(text) = fs::read_to_string(&path)
        {
            pages.push(Page { path: name, text });
        }
    }
    pages
}

/// Returns the doc comments that begin with a question word instead of their subject.
fn question_words(page: &Page) -> Vec<String> {
    let is_doc = |line: &str| regex!(r"^\s*//[/!] ?\S").is_match(line);
    let mut faults = Vec::new();
    let mut before = "";
    for line in page.text.lines() {
        if regex!(r"^\s*//[/!] (What|Who|Whether|How)\b").is_match(line) && !is_doc(before) {
            faults.push(format!("{}: begin with the subject: `{}`", page.path, line.trim()));
        }
        before = line;
    }
    faults
}

/// Returns the messages with a passive that names no actor, or with "there are". Messages are the
/// literals of a program without comments; a literal may span several lines.
fn vague_messages(program: &Page) -> Vec<String> {
    let literal = regex!(r##"(?s)'(?:\\.|[^'\\])'|r#"(.*?)"#|"((?:[^"\\]|\\.)*)""##);
    let vague = regex!(r"(?i)\b(is said|of ours|there are|are there)\b");
    let literals = literal.captures_iter(&program.text);
    let texts = literals.filter_map(|literals| literals.get(1).or(literals.get(2)));
    let joined = texts.map(|text| regex!(r"\\?\n\s*").replace_all(text.as_str(), ""));
    joined
        .filter(|text| vague.is_match(text))
        .map(|text| format!("{}: name the subject: `{text}`", program.path))
        .collect()
}

/// Returns the names of a program that do not tell what they hold.
fn vague_names(program: &Page) -> Vec<String> {
    let code = blanked(&program.text, true);
    let names = code.lines().enumerate().flat_map(|(index, line)| {
        let names = regex!(r"\b(place|found|kept|room)\b").find_iter(line);
        names.map(move |name| format!("line {}: name what `{}` is", index + 1, name.as_str()))
    });
    names.map(|fault| format!("{}: {fault}", program.path)).collect()
}

/// Returns a Python or shell program without its comments and docstrings, and with neighbouring
/// literals joined.
fn without_prose(script: &Page) -> Page {
    let text = regex!(r#"(?s)""".*?""""#).replace_all(&script.text, "");
    let text = regex!(r"(?m)^\s*#.*").replace_all(&text, "");
    let text = regex!(r#""\s*\n\s*[fr]?""#).replace_all(&text, "");
    Page { path: script.path.clone(), text: text.into_owned() }
}

/// Returns the lines of prose that are wider than a page, but for tables, code blocks and
/// addresses.
fn wide_lines(page: &Page) -> Vec<String> {
    let is_page = page.ends_in(&[".md"]);
    let is_script = page.ends_in(&[".py"]);
    let mark = if page.ends_in(&[".rs", ".cu", ".cuh", ".cpp", ".h", ".c"]) { "//" } else { "#" };
    let (mut is_code, mut is_open, mut is_docstring) = (false, false, false);
    let mut faults = Vec::new();
    for line in page.text.lines() {
        let text = line.trim_start();
        let is_comment = text.starts_with(mark);
        if is_script {
            // Other triple-quoted literals are data.
            is_docstring = if is_open { is_docstring } else { text.starts_with("\"\"\"") };
            is_open = is_open != (text.matches("\"\"\"").count() % 2 == 1);
        }
        let is_prose = is_page || is_comment || is_docstring;
        is_code = (is_page || is_comment) && is_code != text.contains("```");
        let is_table = text.trim_start_matches(['/', '!', '#', ' ']).starts_with('|');
        let is_free = !is_prose || is_code || is_table || line.contains("://");
        if !is_free && line.chars().count() > COLUMNS {
            faults.push(format!("{}: wrap at {COLUMNS} columns: `{text}`", page.path));
        }
    }
    faults
}

#[test]
fn prose_fits_a_page() {
    let prose = [".md", ".rs", ".cu", ".cuh", ".cpp", ".h", ".c", ".py", ".toml", ".sh", ".yml"];
    let pages = pages();
    let faults: Vec<String> = pages
        .iter()
        .filter(|page| page.ends_in(&prose) || page.path.starts_with(".ci/"))
        .flat_map(wide_lines)
        .collect();
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn comments_and_messages_are_plain_english() {
    let pages = pages();
    let of = |suffixes: &'static [&'static str]| pages.iter().filter(move |page| page.ends_in(suffixes));
    let mut faults: Vec<String> = of(&[".rs"]).flat_map(question_words).collect();
    faults.extend(of(&[".py", ".sh"]).map(without_prose).flat_map(|page| vague_messages(&page)));
    for source in sources() {
        faults.extend(vague_messages(&Page { path: source.path.clone(), text: source.text.clone() }));
    }
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn names_tell_what_they_hold() {
    let pages = pages();
    let programs = pages.iter().filter(|page| page.ends_in(&[".rs"]));
    let faults: Vec<String> = programs.flat_map(vague_names).collect();
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn each_rule_finds_its_fault() {
    let page = |path: &str, text: &str| Page { path: path.to_owned(), text: text.to_owned() };
    let rust = |text: &str| page("a/b.rs", text);
    assert_eq!(question_words(&rust("/// What it is.\nfn f() {}\n")).len(), 1);
    assert_eq!(question_words(&rust("/// The thing,\n/// What it is.\nfn f() {}\n")).len(), 0);

    let message = |text: &str| vague_messages(&rust(text)).len();
    assert_eq!(message("fn f() { g(\"there are 3 ranks\") }\n"), 1);
    assert_eq!(message("fn f() { g(\"a run of 3 ranks; there \\\n        are 2 hosts\") }\n"), 1);
    assert_eq!(message("fn f() { g('\"', \"a\", there, are, \"b\") }\n"), 0);
    assert_eq!(message("fn f() { g(r#\"the \"rank\" is said to run\"#) }\n"), 1);
    let script = |text: &str| vague_messages(&without_prose(&page("a.py", text))).len();
    assert_eq!(script("f(\"registers there \"\n  f\"are {n}\")\n"), 1);
    assert_eq!(script("\"\"\"As it is said.\"\"\"\n# \"there are\"\nf(\"a\", \"b\")\n"), 0);

    let names = |text: &str| vague_names(&rust(text)).len();
    assert_eq!(names("fn f(place: u8, kept: u8) { g(|found| found.room) }\n"), 5);
    assert_eq!(names("// The found place.\nfn in_place() { g(\"{kept}\", places) }\n"), 0);

    let wide = "a ".repeat(60);
    let lines = |path: &str, text: &str| wide_lines(&page(path, text)).len();
    assert_eq!(lines("a.rs", &format!("// {wide}\n")), 1);
    assert_eq!(lines("a.rs", &format!("// | {wide} |\nlet {wide};\n// ```\n// {wide}\n// ```\n")), 0);
    assert_eq!(lines("a.rs", &format!("#[cfg(test)]\nmod tests {{\n    // {wide}\n}}\n")), 1);
    assert_eq!(lines("a.md", &format!("{wide}\n\n- {wide}\n")), 2);
    assert_eq!(lines("a.md", &format!("| {wide} |\n```\n{wide}\n```\n[a](https://b.c) {wide}\n")), 0);
    assert_eq!(lines("a.toml", &format!("# {wide}\na = \"{wide}\"\n")), 1);
    assert_eq!(lines("a.py", &format!("\"\"\"A.\n\n{wide}\n\"\"\"\nf({wide})\n# {wide}\n")), 2);
    assert_eq!(lines("a.py", &format!("a = \"\"\"\n{wide}\n\"\"\"\n\"\"\"{wide}\"\"\"\nf({wide})\n")), 1);
}
