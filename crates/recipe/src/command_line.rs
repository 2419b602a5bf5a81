//! Programs that a run starts: for alerts, and for its log lines.

use std::path::Path;

use toml::Value;

use super::source::absolute;
use super::value::{Setting, ValueRefusal};
use crate::program;

/// A program and its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine(pub Vec<String>);

impl Setting for CommandLine {
    fn accepted() -> String {
        "a list of strings: a program and its arguments".into()
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
        Ok(CommandLine(words))
    }

    fn write(&self) -> Option<Value> {
        Some(Value::Array(self.0.iter().cloned().map(Value::String).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            CommandLine::read(&Value::Array(list), folder.path())
        };
        assert_eq!(read(&["notify-send", "a/b"]).unwrap().0, ["notify-send", "a/b"]);
        let path = folder.path().join("say");
        assert_eq!(read(&["./say", ""]).unwrap().0, [path.to_str().unwrap(), ""]);
        for (name, why) in
            [("./other", "does not exist"), ("./silent", "is not executable"), ("./", "is not a file")]
        {
            let result = read(&[name]);
            assert!(matches!(&result, Err(ValueRefusal::Unusable(told)) if told.contains(why)), "{result:?}");
        }
        assert!(matches!(read(&[""]), Err(ValueRefusal::Unusable(_))));
        assert!(matches!(read(&[]), Err(ValueRefusal::Empty)));
    }
}
