//! Targets of alerts: a program, and a URL, which is a secret.

use std::fmt;
use std::path::Path;

use toml::Value;

use super::source::absolute;
use super::value::{Setting, ValueRefusal};
use crate::{address, program};

/// Prefix of the name of an environment variable.
const VARIABLE: &str = "env:";

/// URL to which alerts are posted.
#[derive(Clone, PartialEq, Eq)]
pub enum WebhookSource {
    /// An http or https address.
    Address(String),
    /// The environment variable that holds the address.
    Variable(String),
}

/// Hides the URL, because it is a secret and must not reach a log.
impl fmt::Debug for WebhookSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WebhookSource::Address(_) => f.write_str("Address(hidden)"),
            WebhookSource::Variable(name) => write!(f, "Variable({name:?})"),
        }
    }
}

impl WebhookSource {
    /// The reason why alerts cannot be posted to `address`; none if they can. It does not quote the
    /// address.
    pub fn refusal(address: &str) -> Option<String> {
        address::http(address).err()
    }
}

impl Setting for WebhookSource {
    fn accepted() -> String {
        "an http or https address, env:NAME".into()
    }

    fn read(value: &Value, _: &Path) -> Result<Self, ValueRefusal> {
        let text = value.as_str().ok_or(ValueRefusal::Shape)?;
        if text.is_empty() {
            return Err(ValueRefusal::Empty);
        }
        if let Some(name) = text.strip_prefix(VARIABLE) {
            let is_name = !name.is_empty() && !name.contains(['=', '\0']);
            let variable = || WebhookSource::Variable(name.to_owned());
            return is_name.then(variable).ok_or(ValueRefusal::Shape);
        }
        match Self::refusal(text) {
            None => Ok(WebhookSource::Address(text.to_owned())),
            Some(why) => Err(ValueRefusal::Unusable(format!("{why}; accepted: {}", Self::accepted()))),
        }
    }

    /// Omits a URL, because users share the files of a run.
    fn write(&self) -> Option<Value> {
        match self {
            WebhookSource::Address(_) => None,
            WebhookSource::Variable(name) => Some(Value::String(format!("{VARIABLE}{name}"))),
        }
    }
}

/// A program and its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AlertProgram(pub Vec<String>);

impl Setting for AlertProgram {
    fn accepted() -> String {
        r#"a list of strings such as ["notify-send", "finetune"]"#.into()
    }

    /// A program name with a slash is a path relative to the recipe's folder, which must exist and
    /// be executable.
    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        let list = value.as_array().ok_or(ValueRefusal::Shape)?;
        let words = list.iter().map(|word| word.as_str().map(str::to_owned));
        let mut words: Vec<String> = words.collect::<Option<_>>().ok_or(ValueRefusal::Shape)?;
        let Some(name) = words.first_mut() else { return Err(ValueRefusal::Empty) };
        if name.is_empty() {
            return Err(ValueRefusal::Unusable("the program has no name".into()));
        }
        if name.contains('/') {
            let path = absolute(name, folder)?;
            program::check(&path).map_err(ValueRefusal::Unusable)?;
            *name = path.to_string_lossy().into_owned();
        }
        Ok(AlertProgram(words))
    }

    fn write(&self) -> Option<Value> {
        Some(Value::Array(self.0.iter().cloned().map(Value::String).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn webhook(text: &str) -> Result<WebhookSource, ValueRefusal> {
        WebhookSource::read(&Value::String(text.into()), Path::new("."))
    }

    #[test]
    fn an_address_is_kept_to_itself() {
        let address = "https://hooks.example/services/canary";
        let read = webhook(address).unwrap();
        assert_eq!(read, WebhookSource::Address(address.into()));
        assert_eq!(read.write(), None);
        assert!(!format!("{read:?}").contains("canary"));
        for wrong in [
            "ftp://h/canary",
            "hooks.example/canary",
            "http:///canary",
            "canary",
            "https://h/ canary",
            "https://h:8o/canary",
        ] {
            let Err(ValueRefusal::Unusable(why)) = webhook(wrong) else { panic!("{wrong}") };
            assert!(!why.contains("canary"), "{why}");
        }
        let variable = webhook("env:HOOK").unwrap();
        assert_eq!(variable.write(), Some(Value::String("env:HOOK".into())));
        assert!(matches!(webhook("env:"), Err(ValueRefusal::Shape)));
        assert!(matches!(webhook(""), Err(ValueRefusal::Empty)));
    }

    #[test]
    fn a_program_is_a_name_or_a_path_of_the_recipes_folder() {
        let folder = tempfile::tempdir().unwrap();
        for (name, mode) in [("say", 0o700), ("silent", 0o600)] {
            std::fs::write(folder.path().join(name), "").unwrap();
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(folder.path().join(name), mode).unwrap();
        }
        let read = |words: &[&str]| {
            let list = words.iter().map(|word| Value::String((*word).to_owned())).collect();
            AlertProgram::read(&Value::Array(list), folder.path())
        };
        assert_eq!(read(&["notify-send", "a/b"]).unwrap().0, ["notify-send", "a/b"]);
        let path = folder.path().join("say");
        assert_eq!(read(&["./say", ""]).unwrap().0, [path.to_str().unwrap(), ""]);
        for (name, why) in
            [("./other", "does not exist"), ("./silent", "is not executable"), ("./", "is not a file")]
        {
            let told = read(&[name]);
            assert!(matches!(&told, Err(ValueRefusal::Unusable(told)) if told.contains(why)), "{told:?}");
        }
        assert!(matches!(read(&[""]), Err(ValueRefusal::Unusable(_))));
        assert!(matches!(read(&[]), Err(ValueRefusal::Empty)));
    }
}
