//! No files of one module import each other in a cycle.

use std::collections::{BTreeMap, BTreeSet};

use super::Source;

/// Existing cycles; none may be added.
const KNOWN: &[&[&str]] = &[];

/// One file, identified by its module path.
struct File<'a> {
    source: &'a Source,
    /// Names imported by `use`, with their paths.
    names: BTreeMap<String, Vec<String>>,
    /// Every path that its code names, except re-exports.
    paths: Vec<Vec<String>>,
}

type Files<'a> = BTreeMap<Vec<String>, File<'a>>;

/// Returns the module path of a file: `ops/bench/mod.rs` is `ops::bench`.
fn module_path(path: &str) -> Vec<String> {
    let path = path.strip_suffix(".rs").unwrap_or(path);
    let path = path.strip_suffix("/mod").unwrap_or(path);
    path.split('/').map(str::to_owned).collect()
}

/// Returns every path of the tree `a::{b, c::d}`; `tree` starts with the first name.
fn spread(tree: &str) -> Vec<Vec<String>> {
    let mut names = Vec::new();
    let mut rest = tree;
    loop {
        rest = rest.trim_start();
        if let Some(inside) = rest.strip_prefix('{') {
            let below = entries(inside);
            let all = below.iter().flat_map(|entry| spread(entry));
            return all.map(|tail| [names.clone(), tail].concat()).collect();
        }
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        if end > 0 {
            names.push(rest[..end].to_owned());
        }
        match rest[end..].trim_start().strip_prefix("::") {
            Some(after) if end > 0 => rest = after,
            _ => return if names.is_empty() { Vec::new() } else { vec![names] },
        }
    }
}

/// Returns the entries of `a, b::{c, d}} …` up to the closing brace.
fn entries(inside: &str) -> Vec<String> {
    let (mut depth, mut entries) = (0_i64, vec![String::new()]);
    for c in inside.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            _ => {}
        }
        if c == ',' && depth == 0 {
            entries.push(String::new());
        } else if let Some(last) = entries.last_mut() {
            last.push(c);
        }
    }
    entries
}

/// Returns `path`, as written in module `own`, from the crate's root.
fn absolute(own: &[String], children: &BTreeSet<String>, path: &[String]) -> Option<Vec<String>> {
    let (mut at, mut rest) = (own.to_vec(), path);
    match path.first()?.as_str() {
        "crate" => return Some(path[1..].to_vec()),
        "self" => rest = &path[1..],
        "super" => {
            while rest.first().is_some_and(|name| name == "super") {
                at.pop();
                rest = &rest[1..];
            }
        }
        child if children.contains(child) => {}
        _ => return None,
    }
    at.extend_from_slice(rest);
    Some(at)
}

fn read<'a>(sources: &[&'a Source]) -> Files<'a> {
    let path = regex!(r"(?:^|[^:\w])((?:r#)?[a-z_]\w*)\s*::");
    let uses = regex!(r"(?m)^[ \t]*(pub(?:\([^)]*\))? )?use ([^;]*);");
    let modules: Vec<Vec<String>> = sources.iter().map(|source| module_path(&source.path)).collect();
    let mut files = Files::new();
    for (source, own) in sources.iter().zip(&modules) {
        let below = modules.iter().filter(|other| other.len() == own.len() + 1 && other.starts_with(own));
        let children: BTreeSet<String> = below.filter_map(|other| other.last().cloned()).collect();
        let mut file = File { source, names: BTreeMap::new(), paths: Vec::new() };
        for used in uses.captures_iter(&source.code) {
            for written in spread(&used[2]) {
                if let Some(path) = absolute(own, &children, &written)
                    && let Some(name) = path.last()
                {
                    file.names.insert(name.clone(), path.clone());
                }
            }
        }
        let code = uses.replace_all(&source.code, |used: &regex::Captures<'_>| {
            if used.get(1).is_some() { String::new() } else { used[0].to_owned() }
        });
        for captures in path.captures_iter(&code) {
            let written = spread(&code[captures.get(1).unwrap().start()..]);
            file.paths.extend(written.iter().filter_map(|written| absolute(own, &children, written)));
        }
        files.insert(own.clone(), file);
    }
    files
}

/// Returns the module that declares the item at `path`, following re-exports.
fn home(files: &Files<'_>, path: &[String], hops: usize) -> Option<Vec<String>> {
    let length = (1..=path.len()).rev().find(|length| files.contains_key(&path[..*length]))?;
    let module = path[..length].to_vec();
    let item = path.get(length).and_then(|name| files[&module].names.get(name));
    match item {
        Some(target) if hops > 0 && target != path => home(files, target, hops - 1),
        _ => Some(module),
    }
}

/// Returns true if one is the parent folder of the other: a `mod.rs` and its files belong together.
fn family(one: &[String], other: &[String]) -> bool {
    one.starts_with(other) || other.starts_with(one)
}

/// Returns the cycles: sets of files that all reach each other.
fn circles(sources: &[&Source]) -> BTreeSet<Vec<String>> {
    let files = read(sources);
    let mut reach: BTreeMap<&Vec<String>, BTreeSet<Vec<String>>> = BTreeMap::new();
    for (own, file) in &files {
        let homes = file.paths.iter().filter_map(|path| home(&files, path, 8));
        let other_file = |other: &Vec<String>| other[0] == own[0] && !family(own, other);
        reach.insert(own, homes.filter(other_file).collect());
    }
    loop {
        let mut grown = false;
        for own in files.keys() {
            let further: BTreeSet<Vec<String>> =
                reach[own].iter().flat_map(|next| reach[next].iter().cloned()).collect();
            let before = reach[own].len();
            let all = reach.entry(own).or_default();
            all.extend(further);
            grown |= all.len() > before;
        }
        if !grown {
            break;
        }
    }
    let mut circles = BTreeSet::new();
    for own in files.keys().filter(|own| reach[*own].contains(*own)) {
        let with = reach[own].iter().filter(|other| reach[*other].contains(own));
        circles.insert(with.map(|module| files[module].source.path.clone()).collect());
    }
    circles
}

pub(super) fn faults(sources: &[&Source]) -> Vec<String> {
    let circles = circles(sources);
    let within =
        |circle: &Vec<String>, known: &[&str]| circle.iter().all(|file| known.contains(&file.as_str()));
    let new = circles.iter().filter(|circle| !KNOWN.iter().any(|known| within(circle, known)));
    let mut faults: Vec<String> =
        new.map(|circle| format!("files import each other in a circle: {}", circle.join(", "))).collect();
    let gone = KNOWN.iter().filter(|known| !circles.iter().any(|circle| within(circle, known)));
    faults
        .extend(gone.map(|known| format!("no circle any more, take it out of KNOWN: {}", known.join(", "))));
    faults
}

#[test]
fn circles_are_found() {
    let circle = |files: &[(&str, &str)]| {
        let sources: Vec<Source> = files.iter().map(|(path, text)| Source::new(path, text)).collect();
        circles(&sources.iter().collect::<Vec<_>>())
            .into_iter()
            .map(|circle| circle.join(" "))
            .collect::<Vec<String>>()
            .join("; ")
    };
    let top = ("ops/mod.rs", "mod a;\nmod b;\npub use a::A;\npub use self::b::{B, f};\n");
    let bad = [
        ("use super::B;", "use crate::ops::a::A;"),
        ("fn g() { super::b::f() }", "use super::{A, super::data::Row};"),
        ("use crate::ops::{f};", "use crate::{ops::a::{self, A}};"),
    ];
    for (a, b) in bad {
        assert_eq!(circle(&[top, ("ops/a.rs", a), ("ops/b.rs", b)]), "ops/a.rs ops/b.rs", "{a} {b}");
    }
    let three =
        [("ops/a.rs", "use super::b::B;"), ("ops/b.rs", "use super::c::C;"), ("ops/c.rs", "use super::A;")];
    assert_eq!(circle(&[&[top][..], &three].concat()), "ops/a.rs ops/b.rs ops/c.rs");
    let parent = [("ops/mod.rs", "mod a;\npub struct S;\nfn f() { a::g() }"), ("ops/a.rs", "use super::S;")];
    assert_eq!(circle(&parent), "");
    let uncle = [("ops/mod.rs", ""), ("ops/g.rs", "use super::a::b;"), ("ops/a/mod.rs", "use super::g;")];
    assert_eq!(circle(&uncle), "ops/a/mod.rs ops/g.rs");
    let good = [
        ("use super::B;", "// use super::A;\nconst A: &str = \"super::a::A\";"),
        ("use super::B;", "#[cfg(test)]\nmod tests {\n    use super::super::a::A;\n}\n"),
        ("use super::B;", "use crate::data::a::A; use std::a::A;"),
    ];
    for (a, b) in good {
        assert_eq!(circle(&[top, ("ops/a.rs", a), ("ops/b.rs", b), ("data/a.rs", "")]), "", "{a} {b}");
    }
}
