//! No type name stands twice in the crate.

use std::collections::BTreeMap;

use super::Source;

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
    places.iter().map(|(name, files)| format!("type `{name}` stands twice: {}", files.join(", "))).collect()
}

#[test]
fn names_that_stand_twice() {
    let source = |path: &str, text: &str| Source::new(path, text);
    let text = "pub struct A;\nenum B {}\npub(crate) trait C {\n    type Item;\n}\nfn f() {\n    struct D;\n}\n\
                type E = u8; // struct F\nunion G {}\n#[cfg(test)]\nmod tests {\n    struct H;\n}\n";
    assert_eq!(types(&source("data/a.rs", text)), ["A", "B", "C", "D", "E", "G"]);
    let twice = [source("data/a.rs", text), source("ops/a.rs", "pub(super) enum G {}\ntype Item = u8;")];
    assert_eq!(faults(&twice.each_ref()), ["type `G` stands twice: data/a.rs, ops/a.rs"]);
}
