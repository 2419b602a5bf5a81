//! Options to add to a command so that its recipe becomes another one.

use std::fmt;

use super::schema::Section;
use super::{Recipe, render};

/// Keys to set, and tables or keys that a command line cannot remove.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RecipeDifference {
    /// One `section.key=value` each, for `--set`.
    pub set: Vec<String>,
    /// Tables and keys to remove: `[section]`, or `section.key`.
    pub left_out: Vec<String>,
}

impl Recipe {
    /// The change from the recipe `self` to the recipe `other`.
    pub fn difference(&self, other: &Recipe) -> RecipeDifference {
        let mut difference = RecipeDifference::default();
        for default in Recipe::complete().sections() {
            let name = default.name();
            let before = self.section(name);
            match other.section(name) {
                Some(after) => difference.add_keys(before.unwrap_or(default), after, before.is_none()),
                None if before.is_some() => difference.left_out.push(format!("[{name}]")),
                None => {}
            }
        }
        difference
    }
}

impl RecipeDifference {
    /// Adds the keys of a table that differ. A new table is set through its first key, even at its
    /// default.
    fn add_keys(&mut self, own: &dyn Section, other: &dyn Section, is_new: bool) {
        let values = own.values().into_iter().zip(other.values());
        for (i, (key, (before, after))) in other.keys().iter().zip(values).enumerate() {
            let name = format!("{}.{}", other.name(), key.name);
            match (&before, &after) {
                (_, Some(value)) if before != after || (is_new && i == 0) => {
                    self.set.push(format!("{name}={}", typed(value)));
                }
                (Some(_), None) => self.left_out.push(name),
                _ => {}
            }
        }
    }
}

/// A value as typed after `=`: text has no quotes.
fn typed(value: &toml::Value) -> String {
    value.as_str().map_or_else(|| render::inline(value), str::to_owned)
}

impl fmt::Display for RecipeDifference {
    /// Command-line form: `--set a.b=1 --set c.d=2, without [quantization]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let set: Vec<String> = self.set.iter().map(|set| format!("--set {set}")).collect();
        f.write_str(&set.join(" "))?;
        if self.left_out.is_empty() {
            return Ok(());
        }
        let gap = if set.is_empty() { "the same" } else { "" };
        write!(f, "{gap}, without {}", self.left_out.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AdapterSection, AutoOr, Offload, QuantizationSection, Recompute};

    #[test]
    fn a_difference_is_what_is_typed() {
        let mut recipe = Recipe { adapter: Some(AdapterSection::default()), ..Recipe::default() };
        recipe.parallel.shard_size = Some(4);
        assert_eq!(recipe.difference(&recipe), RecipeDifference::default());
        let mut other = Recipe { quantization: Some(QuantizationSection::default()), ..Recipe::default() };
        other.train.recompute = AutoOr::Fixed(Recompute::Block);
        other.parallel.offload = Offload::Params;
        let difference = recipe.difference(&other);
        let set = ["quantization.kind=nf4", "train.recompute=block", "parallel.offload=params"];
        assert_eq!(difference.set, set);
        assert_eq!(difference.left_out, ["[adapter]", "parallel.shard_size"]);
        let text = "--set quantization.kind=nf4 --set train.recompute=block --set parallel.offload=params, \
                    without [adapter], parallel.shard_size";
        assert_eq!(difference.to_string(), text);
        other.adapter = Some(AdapterSection { r: 64, ..AdapterSection::default() });
        assert!(recipe.difference(&other).set.contains(&"adapter.r=64".to_owned()));
    }
}
