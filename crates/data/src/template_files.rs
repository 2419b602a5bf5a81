//! The chat templates in the folder of a tokenizer, and the difference between two.

use std::io;
use std::path::Path;

use super::tokenizer::Tokenizer;
use crate::error::input_file;
use crate::error::{Error, Result};

/// File of a folder's template, and the folder of further ones.
const TEMPLATE_FILE: &str = "chat_template.jinja";
const NAMED_TEMPLATES: &str = "additional_chat_templates";

/// Maximum number of shown characters of a line, and of those before a difference.
const LONGEST: usize = 60;
const BEFORE: usize = 20;

/// Names and texts of the templates in a tokenizer's folder; a file wins over
/// tokenizer_config.json.
///
/// # Errors
/// Fails with a user error if a template cannot be read, or `chat_template` in
/// tokenizer_config.json is no template.
pub fn stored_templates(tokenizer: &Tokenizer) -> Result<Vec<(String, String)>> {
    let mut templates: Vec<(String, String)> = Vec::new();
    let file = tokenizer.folder().join(TEMPLATE_FILE);
    if file.is_file() {
        templates.push(("default".to_owned(), read(&file)?));
        let more = tokenizer.folder().join(NAMED_TEMPLATES);
        if more.is_dir() {
            let cannot = |e: io::Error| Error::io("list the chat templates in", &more, &e);
            for entry in std::fs::read_dir(&more).map_err(cannot)? {
                let path = entry.map_err(cannot)?.path();
                if path.extension().is_some_and(|e| e == "jinja")
                    && let Some(name) = path.file_stem().and_then(|n| n.to_str())
                {
                    templates.push((name.to_owned(), read(&path)?));
                }
            }
            templates.sort();
        }
        return Ok(templates);
    }
    let bad = |why: &str| {
        Error::user(format!(
            "cannot use `chat_template` of {}",
            tokenizer.folder().join("tokenizer_config.json").display()
        ))
        .because(why)
    };
    match tokenizer.config().get("chat_template") {
        None | Some(serde_json::Value::Null) => {}
        Some(serde_json::Value::String(text)) => templates.push(("default".to_owned(), text.clone())),
        Some(serde_json::Value::Array(named)) => {
            for entry in named {
                match (entry["name"].as_str(), entry["template"].as_str()) {
                    (Some(name), Some(text)) => templates.push((name.to_owned(), text.to_owned())),
                    _ => return Err(bad("its list holds an entry without `name` and `template`")),
                }
            }
        }
        Some(serde_json::Value::Object(named)) => {
            for (name, template) in named {
                match template.as_str() {
                    Some(text) => templates.push((name.clone(), text.to_owned())),
                    None => return Err(bad(&format!("its template `{name}` is not a text"))),
                }
            }
        }
        Some(_) => return Err(bad("it is neither a text nor a list or object of named templates")),
    }
    Ok(templates)
}

/// Converts the line ends of a template like Jinja does before parsing.
pub(super) fn with_line_feeds(text: String) -> String {
    if text.contains('\r') { text.replace("\r\n", "\n").replace('\r', "\n") } else { text }
}

/// The first line in which two templates differ, with the text of each there; `None` if they are
/// equal.
pub(super) fn first_difference(one: &str, other: &str) -> Option<(usize, [String; 2])> {
    let (one, other) = (with_line_feeds(one.to_owned()), with_line_feeds(other.to_owned()));
    if one == other {
        return None;
    }
    let line = (0..).find(|line| one.split('\n').nth(*line) != other.split('\n').nth(*line))?;
    let [one, other] = [&one, &other].map(|text| text.split('\n').nth(line).unwrap_or_default());
    let same = one.chars().zip(other.chars()).take_while(|(a, b)| a == b).count();
    // A template may be one line, so the shown text begins shortly before the difference.
    let shown = |text: &str| text.chars().skip(same.saturating_sub(BEFORE)).take(LONGEST).collect();
    Some((line + 1, [shown(one), shown(other)]))
}

fn read(path: &Path) -> Result<String> {
    input_file::read_text("read the chat template", path)
}
