//! Licences, origin and known faults of the crates that are built in, by what `cargo metadata` and Cargo.lock say.
//!
//! `deny.toml` holds the rules, for this test and for `cargo deny`, which sees more (crates of other systems, yanked
//! versions, today's advisories) and is run by `.ci/run` where it is installed. Advisories are those of the copy in
//! `.ci/advisories.toml`, which `scripts/advisories.py` renews from a clone of RustSec's database: what was found since is
//! not known to it. With `FINETUNE_ALL_CRATES=1` the crates of all features are looked at, which may fetch them.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use semver::{Version, VersionReq};
use serde::Deserialize;

use super::root;

#[derive(Deserialize)]
struct Rules {
    licenses: Licences,
    advisories: Ignored,
}

#[derive(Deserialize)]
struct Licences {
    allow: Vec<String>,
    exceptions: Vec<LicenceException>,
}

#[derive(Deserialize)]
struct LicenceException {
    allow: Vec<String>,
    #[serde(rename = "crate")]
    name: String,
}

#[derive(Deserialize)]
struct Ignored {
    ignore: Vec<IgnoredAdvisory>,
}

#[derive(Deserialize)]
struct IgnoredAdvisory {
    id: String,
}

#[derive(Deserialize)]
struct CargoMetadata {
    packages: Vec<CratePackage>,
}

#[derive(Deserialize)]
struct CratePackage {
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
}

#[derive(Deserialize)]
struct AdvisoryCopy {
    date: String,
    advisories: BTreeMap<String, Advisory>,
}

#[derive(Deserialize)]
struct Advisory {
    package: String,
    /// None for a fault; else `unmaintained`, `unsound` or `notice`.
    informational: Option<String>,
    patched: Vec<String>,
    unaffected: Vec<String>,
}

fn rules() -> Rules {
    toml::from_str(&fs::read_to_string(root().join("deny.toml")).unwrap()).unwrap()
}

/// The crates that are built on this machine, or those of all features.
fn crates() -> Vec<CratePackage> {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(root()).args(["metadata", "--locked", "--format-version", "1"]);
    if std::env::var_os("FINETUNE_ALL_CRATES").is_some_and(|value| value == "1") {
        command.arg("--all-features");
    } else {
        let rustc = Command::new("rustc").arg("-vV").output().unwrap();
        let text = String::from_utf8(rustc.stdout).unwrap();
        let host = text.lines().find_map(|line| line.strip_prefix("host: ")).unwrap().to_owned();
        command.args(["--offline", "--filter-platform", &host]);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice::<CargoMetadata>(&output.stdout).unwrap().packages
}

/// Whether an expression of SPDX, or the older form with a slash for `OR`, holds when `is_allowed` licences do.
fn is_licensed(expression: &str, is_allowed: &dyn Fn(&str) -> bool) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    either(&words, &mut at, is_allowed) && at == words.len()
}

fn either(words: &[&str], at: &mut usize, is_allowed: &dyn Fn(&str) -> bool) -> bool {
    let mut holds = both(words, at, is_allowed);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        holds |= both(words, at, is_allowed);
    }
    holds
}

fn both(words: &[&str], at: &mut usize, is_allowed: &dyn Fn(&str) -> bool) -> bool {
    let mut holds = one(words, at, is_allowed);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        holds &= one(words, at, is_allowed);
    }
    holds
}

fn one(words: &[&str], at: &mut usize, is_allowed: &dyn Fn(&str) -> bool) -> bool {
    let Some(word) = words.get(*at) else { return false };
    *at += 1;
    if *word == "(" {
        let holds = either(words, at, is_allowed);
        let is_closed = words.get(*at) == Some(&")");
        *at += 1;
        return holds && is_closed;
    }
    if words.get(*at) == Some(&"WITH") {
        let name = format!("{word} WITH {}", words.get(*at + 1).unwrap_or(&""));
        *at += 2;
        return is_allowed(&name);
    }
    is_allowed(word)
}

#[test]
fn licences_are_read_as_spdx_means_them() {
    let holds = |text: &str| is_licensed(text, &|name| ["MIT", "Zlib", "A WITH B"].contains(&name));
    for text in
        ["MIT", "GPL-3.0 OR MIT", "MIT/GPL-3.0", "(GPL-3.0 OR MIT) AND Zlib", "A WITH B", "MIT AND Zlib OR X"]
    {
        assert!(holds(text), "{text}");
    }
    for text in
        ["", "GPL-3.0", "MIT AND GPL-3.0", "(MIT", "MIT GPL-3.0", "A", "GPL-3.0 OR (MIT AND X)", "A WITH"]
    {
        assert!(!holds(text), "{text}");
    }
}

#[test]
fn every_crate_has_a_licence_and_comes_from_where_it_may() {
    let rules = rules().licenses;
    let crates = crates();
    assert!(crates.len() > 100, "{} crates only", crates.len());
    let mut faults = Vec::new();
    for package in &crates {
        let CratePackage { name, version, license, source } = package;
        // Our own have no source.
        let Some(source) = source else { continue };
        if source != "registry+https://github.com/rust-lang/crates.io-index" {
            faults.push(format!("{name} {version} comes from {source}, not from crates.io"));
        }
        let exceptions = rules.exceptions.iter().filter(|exception| exception.name == *name);
        let allowed: Vec<&String> = rules.allow.iter().chain(exceptions.flat_map(|own| &own.allow)).collect();
        let is_allowed = |licence: &str| allowed.iter().any(|known| *known == licence);
        match license {
            Some(text) if is_licensed(text, &is_allowed) => {}
            Some(text) => faults
                .push(format!("{name} {version} is licensed under {text}, which deny.toml does not allow")),
            None => faults.push(format!("{name} {version} names no licence")),
        }
    }
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

fn copy_of_advisories() -> AdvisoryCopy {
    toml::from_str(&fs::read_to_string(root().join(".ci/advisories.toml")).unwrap()).unwrap()
}

/// Whether an advisory is about this version of its crate.
fn is_affected(advisory: &Advisory, version: &Version) -> bool {
    let mut ranges = advisory.patched.iter().chain(&advisory.unaffected);
    !ranges.any(|range| VersionReq::parse(range).unwrap().matches(version))
}

#[test]
fn versions_are_held_against_the_ranges_of_an_advisory() {
    let copy = copy_of_advisories();
    let snow = &copy.advisories["RUSTSEC-2024-0011"];
    assert_eq!((snow.package.as_str(), &snow.informational), ("snow", &None));
    for (version, affected) in [("0.9.4", true), ("0.9.5", false), ("0.10.0", false)] {
        assert_eq!(is_affected(snow, &version.parse().unwrap()), affected, "{version}");
    }
}

/// Of all crates in Cargo.lock, whatever system or feature they are for.
#[test]
fn no_crate_has_a_fault_that_the_copy_of_the_advisories_knows() {
    let (copy, ignored) = (copy_of_advisories(), rules().advisories.ignore);
    assert!(copy.advisories.len() > 500, "{} advisories only", copy.advisories.len());
    let lock: toml::Table = toml::from_str(&fs::read_to_string(root().join("Cargo.lock")).unwrap()).unwrap();
    let (mut seen, mut faults) = (Vec::new(), Vec::new());
    for package in lock["package"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        let version: Version = package["version"].as_str().unwrap().parse().unwrap();
        for (id, advisory) in copy.advisories.iter().filter(|(_, advisory)| advisory.package == name) {
            if is_affected(advisory, &version) {
                seen.push(id);
                if !ignored.iter().any(|known| known.id == *id) {
                    let kind = advisory.informational.as_deref().unwrap_or("vulnerable");
                    faults.push(format!("{name} {version} is {kind}: https://rustsec.org/advisories/{id}"));
                }
            }
        }
    }
    let idle = ignored.iter().filter(|known| !seen.contains(&&known.id));
    faults.extend(idle.map(|known| format!("deny.toml ignores {}, which is about no crate here", known.id)));
    assert!(faults.is_empty(), "\nas of {}:\n{}", copy.date, faults.join("\n"));
}
