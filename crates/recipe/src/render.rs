//! A recipe as text: the resolved one in a run's output folder, and the reference of every key.

use std::collections::BTreeMap;
use std::fmt::Write;

use toml::Value;

use super::Recipe;
use super::schema::{Key, Section};
use super::suggest::nearest;
use crate::error::{Error, Result};

impl Recipe {
    /// Every set value, as a recipe that reads back to this one. Paths are absolute, and a chat
    /// template is its text.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        for section in self.sections() {
            let set = section.keys().iter().zip(section.values());
            let lines = set.filter_map(|(key, value)| Some(format!("{} = {}\n", key.name, inline(&value?))));
            let gap = if text.is_empty() { "" } else { "\n" };
            text += &format!("{gap}[{}]\n{}", section.name(), lines.collect::<String>());
        }
        text
    }

    /// The TOML value of every set key, by `section.key`.
    pub fn values(&self) -> BTreeMap<String, String> {
        let of = |section: &dyn Section| {
            let set = section.keys().iter().zip(section.values());
            let name = section.name();
            let named =
                set.filter_map(|(key, value)| Some((format!("{name}.{}", key.name), inline(&value?))));
            named.collect::<Vec<_>>()
        };
        self.sections().into_iter().flat_map(of).collect()
    }

    /// Every section and key with its documentation, accepted values and default, as a recipe. A
    /// key without a default is commented out.
    pub fn reference() -> String {
        let mut text = String::from(
            "# Every section and key of a recipe, with its default. A key in a comment is not set by default.\n",
        );
        for section in Recipe::complete().sections() {
            text += &format!("\n{}", documented_section(section));
        }
        text
    }

    /// The part of [`Recipe::reference`] about the section `name`.
    ///
    /// # Errors
    /// User error for an unknown section; the error lists the sections.
    pub fn reference_of(name: &str) -> Result<String> {
        Recipe::complete().section(name).map(documented_section).ok_or_else(|| {
            let names = Recipe::section_names();
            let error = Error::user(format!("unknown section `{name}`"))
                .because(format!("sections: {}", names.join(", ")));
            match nearest(name, names) {
                Some(near) => error.hint(format!("write `{near}`")),
                None => error,
            }
        })
    }
}

/// A section and its keys with their documentation. The header of an optional section is commented
/// out.
fn documented_section(section: &dyn Section) -> String {
    let comment = if Recipe::default().section(section.name()).is_some() { "" } else { "# " };
    let doc: String = section.doc().lines().map(|line| format!("\n# {}", line.trim())).collect();
    let mut text = format!("{}\n{comment}[{}]\n", doc.trim_start(), section.name());
    for (key, value) in section.keys().iter().zip(section.values()) {
        text += &documented(key, value.as_ref(), comment);
    }
    text
}

fn documented(key: &Key, value: Option<&Value>, comment: &str) -> String {
    let doc: String = key.doc.lines().map(|line| format!("# {}\n", line.trim())).collect();
    let line = match value {
        Some(value) => format!("{comment}{} = {}", key.name, inline(value)),
        None => format!("# {} =", key.name),
    };
    format!("{doc}# Accepted: {}.\n{line}\n", (key.accepted)())
}

/// A value on one line. Floats use Rust's format, which keeps `1e-8` short and reads back exactly.
pub(super) fn inline(value: &Value) -> String {
    match value {
        Value::Float(number) => format!("{number:?}"),
        Value::String(text) => quoted(text),
        Value::Array(list) => {
            let entries: Vec<String> = list.iter().map(inline).collect();
            format!("[{}]", entries.join(", "))
        }
        Value::Table(table) if table.is_empty() => "{}".into(),
        Value::Table(table) => {
            let pairs: Vec<String> =
                table.iter().map(|(name, value)| format!("{} = {}", quoted(name), inline(value))).collect();
            format!("{{ {} }}", pairs.join(", "))
        }
        other => other.to_string(),
    }
}

/// A basic TOML string, always on one line.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            '\r' => quoted.push_str("\\r"),
            // Writing to a String cannot fail.
            c if c.is_control() => drop(write!(quoted, "\\u{:04X}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_on_one_line_read_back() {
        let text = "say \"hi\"\n\t\\ é \u{7} \u{85}";
        let table: toml::Table = [("a.b".to_owned(), Value::Integer(3))].into_iter().collect();
        let value = Value::Array(vec![Value::String(text.into()), Value::Float(1e-8), Value::Table(table)]);
        let line = inline(&value);
        assert!(!line.contains('\n') && line.contains("1e-8"));
        assert_eq!(format!("v = {line}").parse::<toml::Table>().unwrap()["v"], value);
    }

    /// Checkpoints hold a recipe in this form.
    #[test]
    fn values_by_key_are_those_of_the_text() {
        let mut recipe = Recipe::complete();
        recipe.data.chat_template = Some(crate::Template::of_text("[a]\nb = \"c\" = 1"));
        recipe.optimizer.learning_rate = Some(2e-4);
        let values = recipe.values();
        assert_eq!(values["data.chat_template"], r#""[a]\nb = \"c\" = 1""#);
        assert_eq!(values["optimizer.learning_rate"], "0.0002");
        assert_eq!(values["optimizer.betas"], "[0.9, 0.999]");
        assert_eq!(values.get("train.max_steps"), None);
        let table: toml::Table = recipe.to_toml().parse().unwrap();
        let keys = table.iter().flat_map(|(_, section)| section.as_table().unwrap().keys());
        assert_eq!(keys.count(), values.len());
        for (name, value) in values {
            let (section, key) = name.split_once('.').unwrap();
            assert_eq!(inline(&table[section][key]), value, "{name}");
        }
    }

    #[test]
    fn the_reference_is_the_default_recipe() {
        let read: toml::Table = Recipe::reference().parse().unwrap();
        let default: toml::Table = Recipe::default().to_toml().parse().unwrap();
        assert_eq!(read, default);
    }
}
