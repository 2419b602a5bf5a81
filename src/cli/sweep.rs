//! Parser of `--sweep KEY=V1,V2`, one axis of a sweep.

use std::str::FromStr;

use crate::private_file::{without_address, without_user};

/// Largest number of characters of a value in the name of a folder.
const NAMED_CHARS: usize = 60;
/// Hexadecimal digits of the digest at the end of a shortened name.
const DIGEST_CHARS: usize = 8;

/// A key of the recipe and the values that a sweep gives it, in the order of the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SweepAxis {
    /// Key as `--set` takes it: `adapter.r`.
    pub key: String,
    /// Values as `--set` takes them: TOML, or a text without quotes.
    pub values: Vec<String>,
}

impl FromStr for SweepAxis {
    type Err = String;

    /// Reads `adapter.r=4,8,16`. A comma inside of quotes or brackets belongs to its value.
    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || "accepted: section.key=value,value, such as adapter.r=4,8,16".to_owned();
        let (key, values) = text.split_once('=').ok_or_else(refuse)?;
        let key = key.trim();
        if !key.contains('.') {
            return Err(refuse());
        }
        let values = split_values(values)?;
        if values.iter().any(String::is_empty) {
            return Err(format!("a value is empty; {}", refuse()));
        }
        Ok(SweepAxis { key: key.to_owned(), values })
    }
}

impl SweepAxis {
    /// Returns the part of a folder's name for `value`: the last part of the key, then the value.
    /// Characters that are unsafe in file names become `_`. A long value is shortened and ends with
    /// a digest of the whole value.
    pub fn name_of(&self, value: &str) -> String {
        let key = self.key.rsplit('.').next().unwrap_or(&self.key);
        let named = without_address(&without_user(&format!("{}={value}", self.key)));
        let value = named.split_once('=').map_or("", |(_, value)| value);
        let is_safe = |c: char| c.is_alphanumeric() || "._+".contains(c);
        let words = value.split(|c: char| !is_safe(c) && c != '-').filter(|word| !word.is_empty());
        let mut shown = words.collect::<Vec<_>>().join("_");
        if shown.chars().count() > NAMED_CHARS {
            let digest = blake3::hash(value.as_bytes()).to_hex();
            shown = shown.chars().take(NAMED_CHARS).collect();
            shown = format!("{shown}_{}", &digest[..DIGEST_CHARS]);
        }
        let gap = if shown.starts_with(|c: char| c.is_ascii_digit() || c == '-') { "" } else { "_" };
        let key: String = key.chars().filter(|c| is_safe(*c)).collect();
        format!("{key}{gap}{shown}")
    }
}

/// Splits `text` at the commas outside of quotes and brackets. A value that begins like TOML must
/// be TOML.
fn split_values(text: &str) -> Result<Vec<String>, String> {
    let (mut values, mut value) = (Vec::new(), String::new());
    let (mut depth, mut quote, mut escaped) = (0_u32, None, false);
    for c in text.chars() {
        match (c, quote) {
            (',', None) if depth == 0 => {
                values.push(std::mem::take(&mut value));
                continue;
            }
            // A quote inside a plain text is an ordinary character.
            ('"' | '\'', None) if depth > 0 || value.trim().is_empty() => quote = Some(c),
            ('[' | '{', None) => depth += 1,
            (']' | '}', None) => depth = depth.saturating_sub(1),
            (_, Some(mark)) if c == mark && !escaped => quote = None,
            _ => {}
        }
        escaped = quote == Some('"') && c == '\\' && !escaped;
        value.push(c);
    }
    values.push(value);
    let values: Vec<String> = values.iter().map(|value| value.trim().to_owned()).collect();
    let is_toml = |value: &str| format!("v = {value}").parse::<toml::Table>().is_ok();
    let bad = values.iter().find(|value| value.starts_with(['"', '\'', '[', '{']) && !is_toml(value));
    bad.map_or(Ok(()), |value| Err(format!("`{value}` is not a TOML value")))?;
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_inside_of_values_part_nothing() {
        let axis = |text: &str| text.parse::<SweepAxis>().map(|axis| axis.values);
        assert_eq!(axis("adapter.r=4, 8,16").unwrap(), ["4", "8", "16"]);
        assert_eq!(axis(r#"data.train_on=["assistant"],"all""#).unwrap(), [r#"["assistant"]"#, r#""all""#]);
        assert_eq!(axis(r#"a.b=["x, ]", 'y,'],"\",",z"#).unwrap(), [r#"["x, ]", 'y,']"#, r#""\",""#, "z"]);
        assert_eq!(axis("a.b=it's,one").unwrap(), ["it's", "one"]);
        for wrong in ["adapter.r", "r=4", "adapter.r=", "adapter.r=4,,8", "a.b=[4,8", "a.b=\"x", "=1,2"] {
            assert!(axis(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn names_are_safe_for_files() {
        let name = |text: &str| {
            let axis: SweepAxis = text.parse().unwrap();
            axis.name_of(&axis.values[0])
        };
        assert_eq!(name("adapter.r=4"), "r4");
        assert_eq!(name("optimizer.learning_rate=1e-4"), "learning_rate1e-4");
        assert_eq!(name(r#"data.train_on=["assistant", "tool"]"#), "train_on_assistant_tool");
        assert_eq!(name("quantization.kind=nf4"), "kind_nf4");
        assert_eq!(name("data.train=../a b/c.jsonl"), "train_.._a_b_c.jsonl");
        assert_eq!(name("model.id=http://ada:secret@host/secret"), "id_http_hidden");
        let long = |end: &str| name(&format!("data.train={}{end}", "x".repeat(100)));
        assert!(long("y").len() < 80 && long("y") != long("z"), "{}", long("y"));
    }
}
