//! No type name stands twice in the crate.

use std::collections::BTreeMap;

use super::Source;

/// Names that stand twice: the name, its files, and why.
const TWICE: &[(&str, &[&str], &str)] = &[
    (
        "Recompute",
        &["engine/trainer.rs", "recipe/enums.rs"],
        "what a trainer does mirrors what the recipe says, until the engine takes the recipe's",
    ),
    (
        "Step",
        &["data/batch.rs", "plan/fit.rs"],
        "a training step, and a step of the search for what would fit, which will get its own name",
    ),
    (
        "Offload",
        &["recipe/enums.rs", "sharding/offload.rs"],
        "what the sharding does mirrors what the recipe says, until it takes the recipe's",
    ),
];

/// The types that a source declares: structs, enums, traits, unions and aliases outside of blocks.
fn types(source: &Source) -> Vec<String> {
    let head = regex!(
        r"(?m)^(?:[ \t]*(?:pub(?:\([^)]*\))? )?(?:unsafe )?(?:struct|enum|trait|union)|(?:pub(?:\([^)]*\))? )?type) (\w+)"
    );
    head.captures_iter(&source.code).map(|found| found[1].to_owned()).collect()
}

pub(super) fn faults(sources: &[&Source]) -> Vec<String> {
    let mut places: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for source in sources {
        for name in types(source) {
            places.entry(name).or_default().push(&source.path);
        }
    }
    places.retain(|_, files| files.len() > 1);
    let mut faults = Vec::new();
    for (name, files) in &places {
        if !TWICE.iter().any(|(known, theirs, _)| known == name && *theirs == files.as_slice()) {
            faults.push(format!("type `{name}` stands twice: {}", files.join(", ")));
        }
    }
    let gone = TWICE.iter().filter(|(name, _, _)| !sources.is_empty() && !places.contains_key(*name));
    faults.extend(gone.map(|(name, _, _)| format!("`{name}` stands once: take it out of TWICE")));
    faults
}

#[test]
fn names_that_stand_twice() {
    let source = |path: &str, text: &str| Source::new(path, text);
    let text = "pub struct A;\nenum B {}\npub(crate) trait C {\n    type Item;\n}\nfn f() {\n    struct D;\n}\n\
                type E = u8; // struct F\nunion G {}\n#[cfg(test)]\nmod tests {\n    struct H;\n}\n";
    assert_eq!(types(&source("data/a.rs", text)), ["A", "B", "C", "D", "E", "G"]);
    let twice = [source("data/a.rs", text), source("ops/a.rs", "pub(super) enum G {}\ntype Item = u8;")];
    let found = faults(&twice.each_ref());
    assert!(found.contains(&"type `G` stands twice: data/a.rs, ops/a.rs".to_owned()), "{found:?}");
    assert_eq!(found.len(), 1 + TWICE.len());
    let known: Vec<Source> = TWICE
        .iter()
        .flat_map(|(name, files, _)| {
            files.iter().map(move |path| Source::new(path, &format!("pub enum {name} {{}}")))
        })
        .collect();
    assert_eq!(faults(&known.iter().collect::<Vec<_>>()), [""; 0]);
}
