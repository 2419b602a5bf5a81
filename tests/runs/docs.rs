//! Runs every command of README.md, CHANGELOG.md, CONTRIBUTING.md and docs/.
//!
//! A command is a line that begins with `$ ` in a block marked `console`; the other lines of such a
//! block are its output. The commands of a page run one after another in one folder. The folder
//! holds `MODEL` (a tiny llama), `MODEL-gptq`, `ADAPTER` (made by PEFT), `ROWS.jsonl`,
//! `TEST.jsonl`, `PAIRS.jsonl` and each file that the page shows in a block marked with a language
//! and a name.
//! Commands that need the hub, a GPU or a launcher are only parsed, and their recipe is assembled,
//! so that a wrong flag or key fails. For commands of other programs, the files of this repository
//! that they name must exist.

use std::fs;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use clap::Parser;
use finetune::cli::{Cli, Verb};
use finetune::recipe::{Recipe, RecipeLayers};

use crate::exhaustive::each_third;
use crate::test_dir::{TestDir, copy_folder, golden};

/// Commands that run too long for this test; other tests or .ci/run run them.
const RUN_ELSEWHERE: [&str; 2] = ["doctor --selftest", "--recipe quickstart"];
/// Programs other than finetune that pages may show.
const OTHERS: [&str; 5] = ["cargo", ".ci/run", ".", "export", "llama-cli"];

/// A fenced block: its language, the name after it, and its lines.
struct Block {
    language: String,
    name: Option<String>,
    lines: Vec<String>,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All pages.
fn pages() -> Vec<PathBuf> {
    let docs = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let mut pages: Vec<PathBuf> = docs.filter(|path| path.extension().is_some_and(|e| e == "md")).collect();
    pages.extend(["README.md", "CHANGELOG.md", "CONTRIBUTING.md"].map(|name| root().join(name)));
    pages.sort();
    pages
}

fn name_of(page: &Path) -> String {
    page.strip_prefix(root()).unwrap().to_string_lossy().into_owned()
}

/// Returns the blocks of a page. Fails on text that looks like a command outside a `console` block,
/// for it would not be tested.
fn blocks(page: &Path) -> Vec<Block> {
    let text = fs::read_to_string(page).unwrap();
    let (mut blocks, mut open): (Vec<Block>, Option<Block>) = (Vec::new(), None);
    for line in text.lines() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (Some(info), None) => {
                let mut words = info.split_whitespace().map(str::to_owned);
                let language = words.next().unwrap_or_default();
                open = Some(Block { language, name: words.next(), lines: Vec::new() });
            }
            (None, Some(block)) => block.lines.push(line.to_owned()),
            (None, None) => {
                let command = ["    finetune ", "    $ ", "    cargo "].iter().any(|c| line.starts_with(c));
                assert!(!command, "{}: not in a block marked `console`: {line}", page.display());
            }
        }
    }
    assert!(open.is_none(), "{}: a block is not closed", page.display());
    for block in blocks.iter().filter(|block| block.language != "console") {
        let command = block.lines.iter().find(|line| line.starts_with("finetune ") || line.starts_with("$ "));
        assert_eq!(command, None, "{}: a command in a block that is not marked `console`", page.display());
    }
    blocks
}

/// Returns the commands of a block with the lines that each prints. A line that ends with `\`
/// continues in the next one.
fn commands(block: &Block) -> Vec<(Vec<String>, Vec<String>)> {
    let mut commands: Vec<(Vec<String>, Vec<String>)> = Vec::new();
    let mut lines = block.lines.iter();
    while let Some(line) = lines.next() {
        let Some(start) = line.strip_prefix("$ ") else {
            if let Some((_, printed)) = commands.last_mut() {
                printed.push(line.trim().to_owned());
            }
            continue;
        };
        let mut command = start.to_owned();
        while let Some(whole) = command.strip_suffix('\\') {
            command = format!("{whole} {}", lines.next().unwrap());
        }
        commands.push((words(&command), Vec::new()));
    }
    commands
}

/// Splits a line as a shell would: quotes, and a comment at the end.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote): (Vec<String>, Option<String>, Option<char>) = (vec![], None, None);
    for c in line.chars() {
        match (c, quote) {
            (_, Some(mark)) if c == mark => quote = None,
            (_, Some(_)) => word.get_or_insert_default().push(c),
            ('"' | '\'', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (' ', None) => words.extend(word.take()),
            ('#', None) if word.is_none() => break,
            _ => word.get_or_insert_default().push(c),
        }
    }
    assert_eq!(quote, None, "a quote is not closed: {line}");
    words.extend(word);
    words
}

/// The folder in which the commands of a page run.
fn test_dir() -> TestDir {
    let dir = TestDir::new();
    fs::rename(dir.path("model"), dir.path("MODEL")).unwrap();
    fs::rename(dir.path("rows.jsonl"), dir.path("ROWS.jsonl")).unwrap();
    fs::copy(dir.path("ROWS.jsonl"), dir.path("TEST.jsonl")).unwrap();
    let pairs = fs::read_to_string(root().join("datasets/pairs-train.jsonl")).unwrap();
    let pairs: String = pairs.lines().take(40).map(|line| format!("{line}\n")).collect();
    fs::write(dir.path("PAIRS.jsonl"), pairs).unwrap();
    copy_folder(&golden("train/lora/adapter_final"), &dir.path("ADAPTER"));
    copy_folder(&golden("qbases/models/tiny-gptq-4-g32-act"), &dir.path("MODEL-gptq"));
    fs::copy(golden("qbases/models/tiny-gguf-q8_0/model.gguf"), dir.path("MODEL.gguf")).unwrap();
    dir
}

/// Parses the arguments, and assembles the recipe of a command that has one.
fn parse(args: &[String], dir: &TestDir) -> Result<(), String> {
    let words = std::iter::once("finetune").chain(args.iter().map(String::as_str));
    let cli = Cli::try_parse_from(words).map_err(|error| error.to_string())?;
    let folder = dir.path(".");
    let layers = match &cli.verb {
        None => cli.train.layers(&folder),
        Some(Verb::Train(args)) => args.layers(&folder),
        Some(Verb::Eval(args)) => {
            args.rows.layers(args.source.model.as_deref().unwrap_or("MODEL"), &args.dataset, &folder)
        }
        Some(Verb::Data(args)) => args.reading.layers(&args.model, &args.dataset, &folder),
        Some(Verb::Plan(args)) => args.layers(&folder),
        _ => return Ok(()),
    };
    let layers: RecipeLayers = layers.map_err(|error| error.to_string())?;
    Recipe::load(&layers).map(drop).map_err(|error| error.to_string())
}

/// Returns true if a model, adapter or data set is on the hub.
fn asks_the_hub(args: &[String], dir: &TestDir) -> bool {
    let is_source = |before: &str| {
        ["--model", "--adapter", "--dataset", "--eval-dataset", "--verify-on", "inspect"].contains(&before)
    };
    let sources = args.windows(2).filter(|pair| is_source(&pair[0])).map(|pair| &pair[1]);
    sources.into_iter().any(|source| source.contains('/') && !dir.path(source).exists())
}

/// Checks that the command prints every line that the page shows of a plan; `...` stands for
/// omitted lines.
fn check_printed(page: &str, shown: &str, printed: &[String], stdout: &[u8]) {
    let text = String::from_utf8(stdout.to_vec()).unwrap();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    for line in printed.iter().filter(|line| !["", "..."].contains(&line.as_str())) {
        assert!(lines.contains(&line.as_str()), "{page}: `{shown}` does not print `{line}` but\n{text}");
    }
}

/// Runs or parses one command of `page`; returns whether it ran.
fn check(page: &str, (words, printed): &(Vec<String>, Vec<String>), dir: &TestDir) -> bool {
    let shown = words.join(" ");
    let ours = ["scripts/", "benchmarks/", ".ci/"];
    for path in words.iter().filter(|word| ours.iter().any(|folder| word.starts_with(folder))) {
        assert!(root().join(path).exists(), "{page}: `{shown}`: there is no {path}");
    }
    let set = words.iter().take_while(|word| word.split_once('=').is_some_and(|(name, _)| is_variable(name)));
    let (variables, command) = words.split_at(set.count());
    let ours = command.iter().position(|word| word == "finetune");
    let cargo = command.iter().position(|word| word == "--").filter(|_| command[..2] == ["cargo", "run"]);
    let Some(start) = ours.or(cargo) else {
        let program = command[0].as_str();
        if program == "cmp" {
            let status = Command::new(program).args(&command[1..]).current_dir(dir.path(".")).status();
            assert!(status.unwrap().success(), "{page}: `{shown}`");
            return true;
        }
        assert!(OTHERS.contains(&program), "{page}: `{shown}` is of no known program");
        return false;
    };
    let args = &command[start + 1..];
    let end = args.iter().position(|word| word == ">").unwrap_or(args.len());
    let (args, file) = (&args[..end], args.get(end + 1));
    if let Err(error) = parse(args, dir) {
        panic!("{page}: `{shown}`\n{error}");
    }
    let line = args.join(" ");
    let elsewhere = RUN_ELSEWHERE.iter().any(|known| line.contains(known));
    let several = args.iter().any(|arg| arg == "--gpus" || arg == "--world-size");
    if start > 0 || elsewhere || several || asks_the_hub(args, dir) {
        return false;
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let variables = variables.iter().filter_map(|variable| variable.split_once('='));
    let output = dir.command(&args).envs(variables).output().unwrap();
    let errors = dir.told(&output.stderr);
    let is_plan = args[0] == "plan" && errors.contains("error: the plan does not fit\n");
    assert!(output.status.success() || is_plan, "{page}: `{shown}`\n{errors}");
    if let Some(file) = file {
        fs::write(dir.path(file), &output.stdout).unwrap();
    }
    if args[0] == "plan" {
        check_printed(page, &shown, printed, &output.stdout);
    }
    true
}

fn is_variable(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_uppercase() || c == '_' || c.is_ascii_digit())
}

/// Runs the commands of a page in order; returns true if one of them ran.
fn follow(page: &Path) -> bool {
    let (dir, mut ran) = (test_dir(), false);
    for block in blocks(page) {
        match &block.name {
            Some(name) => {
                fs::create_dir_all(dir.path(name).parent().unwrap()).unwrap();
                dir.write(name, &(block.lines.join("\n") + "\n"));
            }
            None if block.language == "console" => {
                for command in commands(&block) {
                    ran |= check(&name_of(page), &command, &dir);
                }
            }
            None => {}
        }
    }
    ran
}

#[test]
fn every_command_works() {
    let is_readme = |page: &PathBuf| page.ends_with("README.md");
    let (mut all, others): (Vec<_>, Vec<_>) = pages().into_iter().partition(is_readme);
    all.extend(each_third(others, 0));
    let (pages, ran) = (Mutex::new(all), Mutex::new(Vec::new()));
    let next = || pages.lock().unwrap().pop();
    let work = || {
        while let Some(page) = next() {
            if follow(&page) {
                ran.lock().unwrap().push(name_of(&page));
            }
        }
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (0..2).map(|_| scope.spawn(work)).collect();
        others.into_iter().for_each(|one| one.join().unwrap_or_else(|panic| resume_unwind(panic)));
    });
    let ran: Vec<String> = ran.into_inner().unwrap();
    assert!(ran.iter().any(|page| page == "README.md"), "{ran:?}");
}

/// Links to files, and file names in backticks, name existing files.
#[test]
fn every_file_that_is_named_is_there() {
    let link = regex::Regex::new(r"\]\(([^)#:]+)(#[^)]*)?\)").unwrap();
    let folders = "src|crates|kernels|tests|scripts|benchmarks|datasets|recipes|docs|quickstart";
    let named = regex::Regex::new(&format!(r"`((?:{folders})/[\w./-]*)")).unwrap();
    let mut checked = 0;
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        let folder = page.parent().unwrap();
        let links = link.captures_iter(&text).map(|captures| folder.join(&captures[1]));
        let names = named.captures_iter(&text).map(|captures| root().join(&captures[1]));
        for path in links.chain(names) {
            assert!(path.exists(), "{} names {}", name_of(&page), path.display());
            checked += 1;
        }
    }
    assert!(checked > 0, "no page names a file");
}

/// Every promise of docs/reliability.md names tests, and each test is in a file of its row.
#[test]
fn every_test_that_shows_a_promise_is_there() {
    let page = fs::read_to_string(root().join("docs/reliability.md")).unwrap();
    let backticks = regex::Regex::new("`([^`]+)`").unwrap();
    let mut tests = 0;
    for row in page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| promise |")) {
        let shown = row.rsplit(" | ").next().unwrap();
        let (mut source, mut in_row) = (String::new(), 0);
        for captures in backticks.captures_iter(shown) {
            if captures[1].ends_with(".rs") {
                source = fs::read_to_string(root().join(&captures[1])).unwrap();
            } else {
                assert!(
                    source.contains(&format!("fn {}(", &captures[1])),
                    "{row}: there is no test {}",
                    &captures[1]
                );
                in_row += 1;
            }
        }
        assert!(in_row > 0, "no test shows: {row}");
        tests += in_row;
    }
    assert!(tests > 0, "docs/reliability.md names no test");
}

/// Each prompt of a README command equals the prompt of one of its rows, to the last character.
#[test]
fn the_prompts_of_readme_are_those_of_its_rows() {
    let blocks = blocks(&root().join("README.md"));
    let rows = blocks.iter().find(|block| block.name.as_deref() == Some("rows.jsonl")).unwrap();
    let prompt = |row: &String| serde_json::from_str::<serde_json::Value>(row).unwrap()["prompt"].clone();
    let trained: Vec<_> = rows.lines.iter().map(prompt).collect();
    let console = blocks.iter().filter(|block| block.language == "console");
    let commands: Vec<_> = console.flat_map(commands).map(|(words, _)| words).collect();
    let asked = |words: &Vec<String>| {
        let at = words.iter().position(|word| word == "--prompt" || word == "-p")?;
        Some(words[at + 1].clone())
    };
    let asked: Vec<String> = commands.iter().filter_map(asked).collect();
    assert!(!asked.is_empty(), "README.md asks nothing");
    assert!(asked.iter().all(|prompt| trained.iter().any(|row| row == prompt)), "{asked:?} of {trained:?}");
}

#[test]
fn words_are_cut_as_a_shell_does() {
    assert_eq!(words("a 'b c' --set x=\"y z\"  # why"), ["a", "b c", "--set", "x=y z"]);
    assert_eq!(words("--set 'a.b=[\"c\"]'"), ["--set", "a.b=[\"c\"]"]);
}
