//! Rules of this repository that neither the compiler nor clippy checks: floors, sizes of files,
//! modules that name `cuda`, paths of one machine, embedded recipes, recipe keys without effect.
//! The modules have the rules on docs, signatures and circles of imports. `cargo test --test house
//! -- --nocapture` prints the lines of each module.
//!
//! These tests read sources as text, with blanks instead of comments and literals. This suffices
//! because rustfmt fixes the layout. Inline test modules do not count.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// The regular expression of a literal, compiled once.
macro_rules! regex {
    ($text:expr) => {{
        static REGEX: std::sync::LazyLock<regex::Regex> =
            std::sync::LazyLock::new(|| regex::Regex::new($text).unwrap());
        &*REGEX
    }};
}

mod cycles;
mod docs;
mod items;
mod language;
mod signatures;

/// The floor of each top-level module; a module imports only from lower floors. The only table of
/// floors is in docs/design.md; `main` may import everything.
static FLOORS: LazyLock<Vec<(String, u32)>> = LazyLock::new(|| {
    let page = fs::read_to_string(root().join("docs/design.md")).unwrap();
    let mut floors = vec![("main".to_owned(), u32::MAX)];
    for row in regex!(r"(?m)^\| (\d+) \| ([^|]*) \|").captures_iter(&page) {
        let modules = regex!(r"`([\w:]+)`").captures_iter(&row[2]);
        floors.extend(modules.map(|module| (module[1].to_owned(), row[1].parse().unwrap())));
    }
    assert!(floors.len() > 1, "docs/design.md has no table of floors: {floors:?}");
    floors
});

/// Crates with several modules.
const CRATES: [&str; 7] = ["comm", "core", "engine", "model", "ops", "planning", "runtime"];

/// Modules that are a crate each.
const MODULE_CRATES: [&str; 7] = ["backends", "data", "export", "hub", "recipe", "report", "weights"];

/// The error type, which other modules of floor 0 may use.
const ERROR: &str = "error";

/// `recipe` is pure data: floor 0 is all it sees.
const SEES_FLOOR_0_ONLY: &[&str] = &["recipe"];

const FILE_LINES: usize = 600;
/// Lines of all sources of a crate, with their inline tests.
const CRATE_LINES: usize = 24_000;
const MAIN_LINES: usize = 60;
/// A command parses, calls and reports; the code that it calls is on lower floors.
const COMMAND_LINES: usize = 150;

/// Modules that may use the feature `cuda`: operations and their backends, collectives, and the
/// device choice in `runtime`.
const KNOW_CUDA: &[&str] = &["backends", "ops", "collective", "runtime"];

/// One source file of `src` or of a crate, without its test modules.
struct Source {
    /// Path below `src` of its crate, with `/`.
    path: String,
    /// Source with comments and literals blanked out.
    code: String,
    /// Source with only comments blanked out.
    text: String,
    /// Original source.
    raw: String,
    /// Files declared as test modules.
    test_modules: Vec<String>,
}

impl Source {
    fn new(path: &str, source: &str) -> Self {
        let code = blanked(source, true);
        let keep = without_tests(&code);
        let pick = |text: String| {
            let lines =
                text.lines().zip(&keep).filter(|(_, keep)| **keep).map(|(line, _)| line.to_owned() + "\n");
            lines.collect()
        };
        let test = regex!(
            r"#\[cfg\((?:test|all\(test,[^)]*\))\)\]\s*(?:#\[[^\]]*\]\s*)*(?:pub(?:\([^)]*\))? )?mod (\w+);"
        );
        let test_modules = test.captures_iter(&code).map(|name| name[1].to_owned()).collect();
        let (text, raw) = (pick(blanked(source, false)), pick(source.to_owned()));
        Source { path: path.to_owned(), code: pick(code), text, raw, test_modules }
    }

    /// Returns the top-level module.
    fn module(&self) -> &str {
        let first = self.path.split('/').next().unwrap_or_default();
        first.strip_suffix(".rs").unwrap_or(first)
    }

    /// Returns the number of `super::` that lead from this file to the crate's root.
    fn depth(&self) -> usize {
        let parts = self.path.split('/').count();
        if self.path.ends_with("/mod.rs") { parts - 1 } else { parts }
    }
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Returns every file below `folder`, except build outputs, hidden folders and run results.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            let hidden = name.starts_with('.') && name != ".ci";
            if !hidden && !["target", "out", "outputs"].contains(&name.as_str()) {
                paths.extend(files(&path));
            }
        } else if name != ".git" {
            paths.push(path);
        }
    }
    paths.sort();
    paths
}

/// The sources, read once.
fn sources() -> &'static [Source] {
    static SOURCES: LazyLock<Vec<Source>> = LazyLock::new(read_sources);
    &SOURCES
}

fn read_sources() -> Vec<Source> {
    // The lower floors are separate crates, whose modules `finetune` re-exports.
    let of = |src: PathBuf| {
        let rust = files(&src).into_iter().filter(|path| path.extension().is_some_and(|end| end == "rs"));
        let read = |path: PathBuf| {
            let name = path.strip_prefix(&src).unwrap().to_string_lossy().replace('\\', "/");
            Source::new(&name, &fs::read_to_string(&path).unwrap())
        };
        rust.map(read).collect::<Vec<_>>()
    };
    let mut sources = of(root().join("src"));
    for lower in CRATES {
        let sources_of_crate = of(root().join("crates").join(lower).join("src"));
        sources.extend(sources_of_crate.into_iter().filter(|source| source.path != "lib.rs"));
    }
    for module in MODULE_CRATES {
        let folder = root().join("crates").join(module).join("src");
        let rust = files(&folder).into_iter().filter(|path| path.extension().is_some_and(|end| end == "rs"));
        sources.extend(rust.map(|path| source_of_module_crate(module, &folder, &path)));
    }
    sources
}

/// A file of a crate that is one module of `finetune`, with its path in that module.
fn source_of_module_crate(module: &str, folder: &Path, path: &Path) -> Source {
    let name = path.strip_prefix(folder).unwrap().to_string_lossy().replace('\\', "/");
    let name = if name == "lib.rs" { "mod.rs".to_owned() } else { name };
    let text = fs::read_to_string(path).unwrap();
    let own = |captures: &regex::Captures<'_>| {
        let has_own =
            folder.join(&captures[1]).exists() || folder.join(format!("{}.rs", &captures[1])).exists();
        let is_lower = !has_own && FLOORS.iter().any(|(floor, _)| floor == &captures[1]);
        if is_lower { captures[0].to_owned() } else { format!("crate::{module}::{}", &captures[1]) }
    };
    let text = regex!(r"\bcrate::(\w+)").replace_all(&text, own);
    Source::new(&format!("{module}/{name}"), &text)
}

/// The sources without files that only tests use.
fn sources_of_the_product() -> Vec<&'static Source> {
    let mut tests = Vec::new();
    for source in sources() {
        let folder = source.path.strip_suffix("mod.rs").map(str::to_owned);
        let folder = folder.unwrap_or_else(|| source.path.replace(".rs", "/"));
        tests.extend(source.test_modules.iter().map(|name| format!("{folder}{name}.rs")));
    }
    sources().iter().filter(|source| !tests.contains(&source.path)).collect()
}

/// Replaces comments, and optionally the contents of literals, by spaces; line numbers stay.
fn blanked(source: &str, literals_too: bool) -> String {
    let token = regex!(
        r##"(?sx)
        (?P<comment> //[^\n]* | /\*.*?\*/ )
        | (?P<raw> \bb?r(?P<hashes>\#*)" )
        | (?P<literal> "(?:[^"\\]|\\.)*" | '(?:[^'\\\n]|\\[^\n]{1,8}?)' )"##
    );
    let mut out = String::with_capacity(source.len());
    let mut at = 0;
    while let Some(captures) = token.captures_at(source, at) {
        let whole = captures.get(0).unwrap();
        let end = match captures.name("hashes") {
            Some(hashes) => {
                let close = format!("\"{}", hashes.as_str());
                source[whole.end()..].find(&close).map_or(source.len(), |n| whole.end() + n + close.len())
            }
            None => whole.end(),
        };
        out += &source[at..whole.start()];
        let text = &source[whole.start()..end];
        if captures.name("comment").is_some() || literals_too {
            out.extend(text.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        } else {
            out += text;
        }
        at = end;
    }
    out + &source[at..]
}

/// Returns, for each line of blanked code, true if it is outside inline test modules.
fn without_tests(code: &str) -> Vec<bool> {
    let lines: Vec<&str> = code.lines().collect();
    let mut keep = vec![true; lines.len()];
    let mut at = 0;
    while at < lines.len() {
        if lines[at].trim() == "#[cfg(test)]" {
            let end = block_end(&lines, at);
            keep[at..=end].fill(false);
            at = end;
        }
        at += 1;
    }
    keep
}

/// Returns the line that closes the first `{` at or after line `start`, or that ends an item
/// without one.
fn block_end(lines: &[&str], start: usize) -> usize {
    let mut open = 0_i64;
    let mut round = 0_i64;
    for (number, line) in lines.iter().enumerate().skip(start) {
        for c in line.chars() {
            match c {
                '(' | '[' => round += 1,
                ')' | ']' => round -= 1,
                '{' => open += 1,
                '}' => {
                    open -= 1;
                    if open == 0 {
                        return number;
                    }
                }
                ';' if open == 0 && round == 0 => return number,
                _ => {}
            }
        }
    }
    lines.len() - 1
}

fn floor(module: &str) -> Option<u32> {
    FLOORS.iter().find(|(name, _)| name == module).map(|(_, floor)| *floor)
}

/// Returns the top-level modules that a file names.
fn imports(source: &Source) -> Vec<String> {
    let path = regex!(r"\b(crate|finetune|(?:super::)*super)\s*::\s*(\{|recipe::enums\b|[A-Za-z_]\w*)");
    let mut names_of_modules = Vec::new();
    for names in path.captures_iter(&source.code) {
        let from = &names[1];
        if from == "finetune" && source.module() != "main" {
            continue;
        }
        if from.starts_with("super") && from.split("::").count() < source.depth() {
            continue;
        }
        if &names[2] == "{" {
            let group = &source.code[names.get(0).unwrap().end()..];
            names_of_modules.extend(group_heads(group));
        } else {
            names_of_modules.push(names[2].to_owned());
        }
    }
    names_of_modules
}

/// Returns the first names of the entries of `a::b, c::{d, e}, f}`.
fn group_heads(group: &str) -> Vec<String> {
    let (mut depth, mut entry, mut heads) = (0, String::new(), Vec::new());
    for c in group.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => heads.push(std::mem::take(&mut entry)),
            _ => {}
        }
        if depth == 0 && c != ',' {
            entry.push(c);
        }
    }
    heads.push(entry);
    let head = |entry: String| entry.trim().split("::").next().unwrap_or_default().trim().to_owned();
    heads.into_iter().map(head).filter(|head| !head.is_empty()).collect()
}

fn floor_faults(source: &Source) -> Vec<String> {
    let module = source.module();
    if module == "lib" {
        return Vec::new();
    }
    let Some(own) = floor(module) else {
        return vec![format!("{}: module `{module}` has no floor in docs/design.md", source.path)];
    };
    let own = if SEES_FLOOR_0_ONLY.contains(&module) { 1 } else { own };
    let mut faults = Vec::new();
    for other in imports(source) {
        let meets = other == module || other == ERROR;
        // A name that is no module is an item of the crate's root.
        if let Some(theirs) = floor(&other)
            && theirs >= own
            && !meets
        {
            faults.push(format!("{}: `{module}` must not see `{other}` (floor {theirs})", source.path));
        }
    }
    faults
}

fn size_faults(source: &Source) -> Vec<String> {
    let mut faults = Vec::new();
    let lines = source.code.lines().count();
    let limit = match source.module() {
        "main" => MAIN_LINES,
        "commands" => COMMAND_LINES,
        _ => FILE_LINES,
    };
    if lines > limit {
        faults.push(format!("{}: {lines} lines, at most {limit}", source.path));
    }
    faults
}

fn cuda_faults(source: &Source) -> Vec<String> {
    let cuda = regex!(r#"feature\s*=\s*"cuda""#);
    if KNOW_CUDA.contains(&source.module()) || !cuda.is_match(&source.text) {
        return Vec::new();
    }
    vec![format!("{}: feature `cuda` outside {}", source.path, KNOW_CUDA.join(" and "))]
}

/// Returns the folder of a developer's machine that `text` names.
fn machine_path(text: &str) -> Option<&'static str> {
    let folders = [concat!("/ro", "ot/"), concat!("/wo", "rk/")];
    let mut lines = text.lines();
    lines.find_map(|line| {
        folders.into_iter().find(|folder| {
            // Inside a longer path or an address it is no such folder.
            let mut matches = line.match_indices(folder);
            matches.any(|(at, _)| !line[..at].ends_with(|c: char| c.is_alphanumeric() || "._-~}".contains(c)))
        })
    })
}

/// Each crate is read by these rules and has a limit of its lines.
#[test]
fn crates_are_known_and_small() {
    let folders = fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let crates: Vec<PathBuf> = folders.filter(|folder| folder.join("src").is_dir()).collect();
    let name = |folder: &PathBuf| folder.file_name().unwrap().to_string_lossy().into_owned();
    let names: BTreeSet<String> = crates.iter().map(name).collect();
    let known: BTreeSet<String> = CRATES.iter().chain(&MODULE_CRATES).map(ToString::to_string).collect();
    assert_eq!(names, known, "folders of crates, and the crates that the rules read");
    for folder in crates.into_iter().chain([root()]) {
        let sources = files(&folder.join("src"));
        let rust = sources.iter().filter(|path| path.extension().is_some_and(|end| end == "rs"));
        let lines: usize = rust.map(|path| fs::read_to_string(path).unwrap().lines().count()).sum();
        let name = folder.display();
        assert!((1..=CRATE_LINES).contains(&lines), "{name}: {lines} lines, at most {CRATE_LINES}");
    }
}

#[test]
fn sources_keep_the_house_rules() {
    let sources = sources();
    assert!(!sources.is_empty());
    let checks = [floor_faults, size_faults, cuda_faults];
    let faults: Vec<String> = checks.iter().flat_map(|check| sources.iter().flat_map(check)).collect();
    println!("{}", table(sources));
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

/// Finds violations of one rule in one source.
type Check = fn(&Source) -> Vec<String>;

/// The rules on prose and signatures, by name.
const PROSE: &[(&str, Check)] =
    &[("docs", docs::short), ("shapes", docs::shapes), ("tuples", signatures::tuples)];

#[test]
fn sources_keep_the_rules_of_prose() {
    let sources = sources_of_the_product();
    let mut faults = Vec::new();
    for (rule, check) in PROSE {
        let new_faults = sources.iter().flat_map(|source| check(source));
        faults.extend(new_faults.map(|fault| format!("[{rule}] {fault}")));
    }
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn no_circle_of_imports() {
    let faults = cycles::faults(&sources_of_the_product());
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn no_file_names_a_folder_of_one_machine() {
    let mut faults = Vec::new();
    for path in files(&root()) {
        if let Ok(text) = fs::read_to_string(&path)
            && let Some(folder) = machine_path(&text)
        {
            faults.push(format!("{}: {folder}", path.display()));
        }
    }
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn every_recipe_is_in_the_binary() {
    let read = |path: PathBuf| {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        (name, fs::read_to_string(&path).unwrap())
    };
    let on_disk: BTreeMap<String, String> = files(&root().join("recipes")).into_iter().map(read).collect();
    let built_in = finetune::recipe::BUILT_IN.iter();
    let built_in: BTreeMap<String, String> =
        built_in.map(|recipe| (recipe.name.to_owned(), recipe.text.to_owned())).collect();
    assert_eq!(on_disk, built_in, "crates/recipe/src/builtin.rs lists the recipes");
}

/// Finds keys that a recipe accepts and that no code applies.
#[test]
fn every_key_of_a_recipe_is_read() {
    const DECLARE: [&str; 2] = ["recipe/sections.rs", "recipe/conflicts.rs"];
    let (declaring, others): (Vec<_>, Vec<_>) =
        sources_of_the_product().into_iter().partition(|source| DECLARE.contains(&source.path.as_str()));
    let names = |sources: &[&Source], pattern: &regex::Regex| -> BTreeSet<String> {
        let captures = sources.iter().flat_map(|source| pattern.captures_iter(&source.code));
        let fields = captures.filter(|captures| !captures[0].ends_with('('));
        fields.map(|captures| captures[1].to_owned()).collect()
    };
    let keys = names(&declaring, regex!(r"(?m)^        (\w+): [^=]+ = .*;$"));
    let read = names(&others, regex!(r"\.(\w+)\(?"));
    assert!(keys.len() > 60, "{keys:?}");
    let unread: Vec<&String> = keys.difference(&read).collect();
    assert!(unread.is_empty(), "no code reads {unread:?}");
}

/// Formats the lines of each module, without tests.
fn table(sources: &[Source]) -> String {
    let mut modules: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for source in sources {
        let (files, lines) = modules.entry(source.module()).or_default();
        *files += 1;
        *lines += source.code.lines().count();
    }
    let total: usize = modules.values().map(|(_, lines)| lines).sum();
    let row =
        |(module, (files, lines)): (&&str, &(usize, usize))| format!("{module:<12} {files:>5} {lines:>6}\n");
    let rows: String = modules.iter().map(row).collect();
    format!(
        "{:<12} {:>5} {:>6}\n{rows}{:<12} {:>5} {total:>6}",
        "module",
        "files",
        "lines",
        "total",
        sources.len()
    )
}

/// Tests of the checks themselves: each finds its violations, and nothing else.
mod checks {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source::new(path, text)
    }

    #[test]
    fn floors() {
        let bad = [
            ("data/rows.rs", "use crate::model::Config;"),
            ("data/rows.rs", "use crate::weights::Shard;"),
            ("ops/norm.rs", "use crate::{error::Result, engine::{Step, Loop}};"),
            ("ops/norm.rs", "fn f() { crate::planning::go() }"),
            ("ops/norm.rs", "use super::super::data::Row;"),
            ("units.rs", "use super::hub::Hub;"),
            ("recipe/mod.rs", "use crate::report::Bar;"),
            ("attic/mod.rs", ""),
        ];
        for (path, text) in bad {
            assert_eq!(floor_faults(&source(path, text)).len(), 1, "{path}: {text}");
        }
        let good = [
            ("data/rows.rs", "use crate::ops::gather;\nuse crate::error::{Error, Result};"),
            ("data/rows.rs", "use super::formats::Row; use crate::data::Source;"),
            ("ops/norm.rs", "// use crate::engine::Step;\nconst S: &str = \"crate::engine::Step\";"),
            ("ops/norm.rs", "#[cfg(test)]\nmod tests {\n    use crate::engine::Step;\n}\n"),
            ("commands/train.rs", "use crate::cli::TrainArgs; use crate::planning::Plan;"),
            ("main.rs", "use finetune::cli::Cli; use finetune::commands;"),
            ("lib.rs", "pub mod error; pub use crate::engine::Step;"),
        ];
        for (path, text) in good {
            assert_eq!(floor_faults(&source(path, text)), [""; 0], "{path}: {text}");
        }
    }

    #[test]
    fn sizes() {
        let file = "const A: u8 = 1;\n".repeat(FILE_LINES);
        let tests = format!("{file}#[cfg(test)]\nmod tests {{\n{file}}}\n");
        assert_eq!(size_faults(&source("ops/a.rs", &tests)), [""; 0]);
        assert_eq!(size_faults(&source("ops/a.rs", &format!("{file}\n"))).len(), 1);
        assert_eq!(size_faults(&source("main.rs", &file)).len(), 1);
        let command = "const A: u8 = 1;\n".repeat(COMMAND_LINES);
        assert_eq!(size_faults(&source("commands/a.rs", &command)), [""; 0]);
        assert_eq!(size_faults(&source("commands/a.rs", &format!("{command}\n"))).len(), 1);
        assert_eq!(size_faults(&source("run/a.rs", &format!("{command}\n"))), [""; 0]);
    }

    #[test]
    fn the_feature_cuda() {
        let cuda = "#[cfg(feature = \"cuda\")]\nfn f() {}\n";
        assert_eq!(cuda_faults(&source("engine/a.rs", cuda)).len(), 1);
        assert_eq!(cuda_faults(&source("ops/device.rs", cuda)), [""; 0]);
    }

    #[test]
    fn literals_and_comments_are_blank() {
        let text = "let a = '{'; /* { */ let b = r#\"{\"\n\"#; // {\nlet c: &'a str = \"\\\"{\";";
        let code = blanked(text, true);
        assert!(!code.contains('{') && code.contains("&'a str") && code.contains("let c"));
        assert_eq!(code.lines().count(), text.lines().count());
        assert!(blanked("x(\"keep\") // drop", false).trim_end() == "x(\"keep\")");
    }

    #[test]
    fn machine_paths() {
        let root = concat!("/ro", "ot/");
        assert!(machine_path(&format!("cd {root}x")).is_some());
        assert!(machine_path(&format!("\"{root}x\"")).is_some());
        assert!(machine_path(&format!("https://example.org{root}x")).is_none());
        assert!(machine_path("a/b/c").is_none());
    }
}
