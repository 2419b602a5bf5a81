//! Suggests the key nearest to an unknown one.

use super::Recipe;
use super::peers::KEYS;

/// Maximum length of a compared name, in bytes; no key or choice is that long.
const LONGEST: usize = 64;

/// Returns the entry of `names` that is most similar to `name`; none below a minimum.
pub fn nearest<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > LONGEST {
        return None;
    }
    let name = name.to_lowercase();
    let alike = |other: &'a str| match strsim::damerau_levenshtein(&name, other) {
        // One typing error; Jaro-Winkler would punish it too much in a short name.
        1 => (1.0, other),
        _ => (strsim::jaro_winkler(&name, other), other),
    };
    let best = names.into_iter().map(alike).max_by(|(a, _), (b, _)| a.total_cmp(b));
    best.filter(|(likeness, _)| *likeness > 0.75).map(|(_, other)| other)
}

/// The section and key that `section.key` probably means: the same name elsewhere, another
/// trainer's name, or a similar name in the section.
pub(super) fn nearest_key(section: &str, key: &str) -> Option<(&'static str, &'static str)> {
    let recipe = Recipe::complete();
    let sections = recipe.sections();
    let mut all =
        sections.iter().flat_map(|section| section.keys().iter().map(|key| (section.name(), key.name)));
    let elsewhere = all.find(|(_, name)| *name == key);
    let translated = KEYS.iter().find(|(.., theirs)| theirs.contains(&key)).map(|(s, k, _)| (*s, *k));
    let here = || {
        let section = recipe.section(section)?;
        let name = nearest(key, section.keys().iter().map(|key| key.name))?;
        Some((section.name(), name))
    };
    elsewhere.or(translated).or_else(here)
}

/// The section and key of the exact name `name`, of this program or another trainer.
pub fn key_of_peers(name: &str) -> Option<(&'static str, &'static str)> {
    nearest_key("", name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_names_lead_to_keys_that_exist() {
        let mut recipe = Recipe::complete();
        for (section, key, names) in KEYS.iter().copied() {
            let keys = recipe.section_mut(section).unwrap().keys();
            assert!(keys.iter().any(|known| known.name == key), "{section}.{key}");
            for theirs in names {
                assert_eq!(nearest_key("train", theirs), Some((section, key)));
            }
        }
    }

    #[test]
    fn alike_elsewhere_or_nothing() {
        assert_eq!(nearest_key("train", "epoch"), Some(("train", "epochs")));
        assert_eq!(nearest_key("train", "learning_rate"), Some(("optimizer", "learning_rate")));
        assert_eq!(nearest_key("train", "zzz"), None);
        assert_eq!(nearest("lgo", ["log", "data"]), Some("log"));
        assert_eq!(nearest("qlroa", ["lora", "qlora", "full"]), Some("qlora"));
    }
}
