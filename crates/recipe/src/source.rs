//! Things that a recipe can refer to: models, data sets and adapters (a path, a hub id or an asset
//! inside the binary), and chat templates.
//!
//! A text is a path if such a file exists relative to the recipe's folder, if it starts with `/`,
//! `./`, `../` or `~`, if it cannot be a hub id (`name` or `owner/name`, of letters, digits, `.`,
//! `_`, `-`), or if it has a data file's extension. `@revision` may follow an id, and
//! `:configuration/split` the id of a data set; the prefix `hf://` forces an id. A path must exist,
//! so that a typing error is found here, with its line, and not after a download. The hub checks
//! the rest.

use std::fmt;
use std::path::{Path, PathBuf};

use toml::Value;

use super::chat_templates;
use super::value::{Setting, ValueRefusal};
use crate::error::input_file;
use crate::error::{Error, Result};
use crate::private_file::without_user;

/// Prefix of the id of an asset inside the binary.
const BUILTIN: &str = "builtin:";

/// Prefix that forces a hub id, even if such a path exists.
const HUB: &str = "hf://";

/// Extensions that no model or data set on the hub has.
const DATA_EXTENSIONS: [&str; 7] = ["jsonl", "json", "parquet", "csv", "tsv", "txt", "md"];

/// Hub ids without an owner, which redirect to one with an owner: base models and data sets.
const WITHOUT_OWNER: [&str; 16] = [
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "distilgpt2",
    "openai-gpt",
    "ag_news",
    "c4",
    "gsm8k",
    "imdb",
    "openwebtext",
    "samsum",
    "squad",
    "squad_v2",
    "wikitext",
    "xsum",
];

/// Location of a model, a data set or an adapter.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum DataSource {
    /// An absolute path that existed when the recipe was read.
    Path(PathBuf),
    /// An id on the hub.
    Hub(String),
    /// An asset inside the binary, without the prefix `builtin:`.
    Builtin(String),
}

impl DataSource {
    /// Reads the argument of `flag` (or, if `flag` is empty, a bare argument) by the rules of a
    /// recipe value; relative paths start at `folder`.
    ///
    /// # Errors
    /// It is empty, or a path that does not exist.
    pub fn from_argument(flag: &str, text: &str, folder: &Path) -> Result<DataSource> {
        DataSource::parse(text, folder).map_err(|refusal| {
            let shown = format!("{flag} {}", without_user(text));
            let error = Error::user(format!("cannot use `{}`", shown.trim_start()));
            match refusal {
                ValueRefusal::Unusable(why) => error.because(why),
                ValueRefusal::Shape | ValueRefusal::Empty => {
                    error.because(format!("accepted: {}", DataSource::accepted()))
                }
            }
        })
    }

    /// Reads `text` as a recipe value; relative paths start at `folder`.
    ///
    /// # Errors
    /// It is empty, or a path that does not exist.
    pub(super) fn parse(text: &str, folder: &Path) -> Result<DataSource, ValueRefusal> {
        if text.is_empty() {
            return Err(ValueRefusal::Empty);
        }
        if let Some(name) = text.strip_prefix(BUILTIN) {
            return Ok(DataSource::Builtin(name.to_owned()));
        }
        if text.contains("://") && !text.starts_with(HUB) {
            return Err(ValueRefusal::Unusable(format!("it is an address; accepted: {}", Self::accepted())));
        }
        let path = absolute(text, folder)?;
        match path.try_exists() {
            Ok(true) => Ok(DataSource::Path(path)),
            Ok(false) if means_path(text) => {
                Err(ValueRefusal::Unusable(format!("no such file or folder: {}", path.display())))
            }
            Ok(false) if !is_asked_at_hub(text) => Err(ValueRefusal::Unusable(format!(
                "no such file or folder: {}; a hub id looks like `owner/name`",
                path.display()
            ))),
            Ok(false) => Ok(DataSource::Hub(text.to_owned())),
            Err(error) => Err(ValueRefusal::Unusable(format!("cannot look at {}: {error}", path.display()))),
        }
    }
}

impl fmt::Display for DataSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DataSource::Path(path) => path.display().fmt(f),
            DataSource::Hub(id) => id.fmt(f),
            DataSource::Builtin(name) => write!(f, "{BUILTIN}{name}"),
        }
    }
}

impl Setting for DataSource {
    fn accepted() -> String {
        "a path, a hub id".into()
    }

    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        DataSource::parse(value.as_str().ok_or(ValueRefusal::Shape)?, folder)
    }

    fn write(&self) -> Option<Value> {
        Some(Value::String(self.to_string()))
    }
}

/// An existing folder; absolute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Folder(pub PathBuf);

impl Setting for Folder {
    fn accepted() -> String {
        "a folder that exists".into()
    }

    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        let path = absolute(&String::read(value, folder)?, folder)?;
        if path.is_dir() {
            Ok(Folder(path))
        } else {
            Err(ValueRefusal::Unusable(format!("{} is not a folder", path.display())))
        }
    }

    fn write(&self) -> Option<Value> {
        Some(Value::String(self.0.display().to_string()))
    }
}

/// A chat template: Jinja text, the text of a file, or a template inside the binary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    /// The Jinja text.
    pub text: String,
    /// Name of the template inside the binary, if it is one.
    pub name: Option<String>,
}

impl Template {
    /// A template of the Jinja text `text`.
    pub fn of_text(text: impl Into<String>) -> Self {
        Template { text: text.into(), name: None }
    }
}

impl Setting for Template {
    fn accepted() -> String {
        let names: Vec<&str> = chat_templates::names().collect();
        format!("Jinja text, a file that holds it, a name ({})", names.join(", "))
    }

    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        let text = String::read(value, folder)?;
        if is_jinja(&text) {
            return Ok(Template::of_text(text));
        }
        if let Some(named) = chat_templates::named(&text) {
            return Ok(Template { text: named.to_owned(), name: Some(text) });
        }
        let path = absolute(&text, folder)?;
        let refuse = |why: String| Err(ValueRefusal::Unusable(why));
        match input_file::read_text("read", &path) {
            Ok(jinja) if is_jinja(&jinja) => Ok(Template::of_text(jinja)),
            Ok(_) => refuse(format!("{} holds no `{{{{` and no `{{%`", path.display())),
            Err(error) if text.contains(['/', '.']) => refuse(error.in_one_line()),
            Err(error) => refuse(format!("{}; accepted: {}", error.in_one_line(), Self::accepted())),
        }
    }

    fn write(&self) -> Option<Value> {
        Some(Value::String(self.name.as_ref().unwrap_or(&self.text).clone()))
    }
}

fn is_jinja(text: &str) -> bool {
    text.contains("{{") || text.contains("{%")
}

/// Returns true if a possible hub id is requested from the hub: one with an owner, one with
/// `hf://`, or one of the few without an owner.
fn is_asked_at_hub(text: &str) -> bool {
    let id = text.split(['@', ':']).next().unwrap_or(text);
    text.starts_with(HUB) || id.contains('/') || WITHOUT_OWNER.contains(&id)
}

fn means_path(text: &str) -> bool {
    let is_part = |rest: &str| !rest.starts_with("//") && !rest.starts_with('\\');
    // The suffix of an id: `@revision`, or `:configuration/split` of a data set.
    let text = text.strip_prefix(HUB).unwrap_or(text);
    let text = match text.split_once(['@', ':']) {
        Some((id, rest)) if is_part(rest) => id,
        _ => text,
    };
    let rooted = ["/", "./", "../", "~"].iter().any(|start| text.starts_with(start));
    let dots = matches!(text, "." | "..");
    let data_file =
        DATA_EXTENSIONS.iter().any(|end| text.strip_suffix(end).is_some_and(|t| t.ends_with('.')));
    let hub_char = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    let parts: Vec<&str> = text.split('/').collect();
    let hub_id = text.chars().all(hub_char) && parts.len() <= 2 && parts.iter().all(|part| !part.is_empty());
    rooted || dots || data_file || !hub_id
}

/// Absolute path of `text`, relative to `folder`, with `~` as the home folder.
pub(super) fn absolute(text: &str, folder: &Path) -> Result<PathBuf, ValueRefusal> {
    let path = match text.strip_prefix('~') {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => {
            let home = std::env::home_dir()
                .ok_or_else(|| ValueRefusal::Unusable("the home folder `~` is unknown".into()))?;
            home.join(rest.trim_start_matches('/'))
        }
        _ => folder.join(text),
    };
    std::path::absolute(&path).map_err(|error| ValueRefusal::Unusable(format!("{}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_a_path_or_a_hub_id() {
        for path in [
            "/m",
            "./m",
            "../m",
            "~/m",
            "a/b/c",
            "rows.jsonl",
            "d/rows.parquet",
            "a b",
            "m/",
            ".",
            "C:\\m",
            "https://h/x",
            "./m:n",
            "a/b/c:d",
            "rows.jsonl:n",
        ] {
            assert!(means_path(path), "{path}");
        }
        for id in [
            "gpt2",
            "meta-llama/Llama-2-7b-hf",
            "Qwen/Qwen2.5-0.5B",
            "a/json",
            "a/b@v1",
            "a/b:c",
            "a/b:c/d",
            "a/b:/d",
            "hf://a/b",
            "a/b@refs/convert/parquet:c/d",
        ] {
            assert!(!means_path(id), "{id}");
        }
    }

    #[test]
    fn what_exists_is_a_path() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("org/model")).unwrap();
        let parsed = DataSource::parse("org/model", folder.path()).unwrap();
        assert_eq!(parsed, DataSource::Path(folder.path().join("org/model")));
        let id = DataSource::parse("org/other", folder.path()).unwrap();
        assert_eq!(id, DataSource::Hub("org/other".into()));
        let asset = DataSource::parse("builtin:quickstart", folder.path()).unwrap();
        assert_eq!(asset.to_string(), "builtin:quickstart");
        assert!(matches!(DataSource::parse("rows.jsonl", folder.path()), Err(ValueRefusal::Unusable(_))));
        assert!(matches!(DataSource::parse("", folder.path()), Err(ValueRefusal::Empty)));
    }

    #[test]
    fn a_template_is_text_or_a_file() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("chat.jinja"), "{{ messages }}").unwrap();
        std::fs::write(folder.path().join("plain"), "hello").unwrap();
        let read = |text: &str| Template::read(&Value::String(text.into()), folder.path());
        assert_eq!(read("{% if x %}").unwrap().text, "{% if x %}");
        assert_eq!(read("chat.jinja").unwrap().text, "{{ messages }}");
        for name in chat_templates::names() {
            let named = read(name).unwrap();
            assert!(is_jinja(&named.text));
            assert_eq!(named.write(), Some(Value::String(name.into())));
        }
        assert!(matches!(read("plain"), Err(ValueRefusal::Unusable(_))));
        assert!(matches!(read("missing"), Err(ValueRefusal::Unusable(_))));
    }
}
