//! Tokens of a row that count in the loss: `data.train_on`.

use std::path::Path;

use toml::{Table, Value};

use super::enums::{TrainedEnds, TrainedTurns};
use super::value::{Setting, ValueRefusal};

/// Roles of messages.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
/// Keys of the table form.
const KEYS: [&str; 3] = ["roles", "turns", "ends"];

/// Tokens of a row that count in the loss.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrainOn {
    /// Every token of a row.
    All,
    /// Messages of some roles; a completion counts as the assistant's message.
    Messages {
        /// Roles that are trained.
        roles: Vec<String>,
        /// Trained messages of these roles.
        turns: TrainedTurns,
        /// Trained end tokens of messages.
        ends: TrainedEnds,
    },
}

impl Default for TrainOn {
    /// The assistant's turns of a chat, or the completion of a prompt.
    fn default() -> Self {
        TrainOn::Messages { roles: vec![ASSISTANT.into()], turns: TrainedTurns::All, ends: TrainedEnds::Turn }
    }
}

const ASSISTANT: &str = "assistant";

impl TrainOn {
    /// Returns true if messages of `role` are trained.
    pub fn trains(&self, role: &str) -> bool {
        match self {
            TrainOn::All => true,
            TrainOn::Messages { roles, .. } => roles.iter().any(|trained| trained == role),
        }
    }

    /// Trained end tokens of messages.
    pub fn ends(&self) -> TrainedEnds {
        match self {
            TrainOn::All => TrainedEnds::All,
            TrainOn::Messages { ends, .. } => *ends,
        }
    }

    fn with_roles(roles: Vec<String>) -> Self {
        TrainOn::Messages { roles, turns: TrainedTurns::All, ends: TrainedEnds::Turn }
    }

    /// Reads the table form.
    fn table(table: &Table, folder: &Path) -> Result<Self, ValueRefusal> {
        if let Some(unknown) = table.keys().find(|key| !KEYS.contains(&key.as_str())) {
            let why = format!("unknown key `{unknown}`; accepted: {}", KEYS.join(", "));
            return Err(ValueRefusal::Unusable(why));
        }
        let roles = match table.get("roles") {
            None => vec![ASSISTANT.to_owned()],
            Some(roles) => read_roles(roles, folder)?,
        };
        let (turns, ends) = (choice(table, "turns", folder)?, choice(table, "ends", folder)?);
        Ok(TrainOn::Messages { roles, turns, ends })
    }
}

/// Reads a list of roles.
fn read_roles(value: &Value, folder: &Path) -> Result<Vec<String>, ValueRefusal> {
    let roles = Vec::<String>::read(value, folder)?;
    let unknown = roles.iter().find(|role| !ROLES.contains(&role.as_str()));
    match (unknown, roles.is_empty()) {
        (Some(role), _) => {
            let why = format!("\"{role}\" is not a role; accepted: {}", ROLES.join(", "));
            Err(ValueRefusal::Unusable(why))
        }
        (None, true) => Err(ValueRefusal::Unusable("an empty list of roles trains nothing".into())),
        (None, false) => Ok(roles),
    }
}

/// Returns the value of `key`, or its default.
fn choice<T: Setting + Default>(table: &Table, key: &str, folder: &Path) -> Result<T, ValueRefusal> {
    let Some(value) = table.get(key) else { return Ok(T::default()) };
    let refused = |_| ValueRefusal::Unusable(format!("its `{key}` is {value}; accepted: {}", T::accepted()));
    T::read(value, folder).map_err(refused)
}

impl Setting for TrainOn {
    fn accepted() -> String {
        r#""assistant", "all", "last", a list of roles such as ["assistant", "tool"], a table such as { roles = ["assistant"], turns = "last", ends = "none" }"#.into()
    }

    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        match value {
            Value::String(text) => match text.as_str() {
                ASSISTANT => Ok(TrainOn::default()),
                "all" => Ok(TrainOn::All),
                "last" => Ok(TrainOn::Messages {
                    roles: vec![ASSISTANT.into()],
                    turns: TrainedTurns::Last,
                    ends: TrainedEnds::Turn,
                }),
                _ => Err(ValueRefusal::Shape),
            },
            Value::Array(_) => read_roles(value, folder).map(TrainOn::with_roles),
            Value::Table(table) => TrainOn::table(table, folder),
            _ => Err(ValueRefusal::Shape),
        }
    }

    fn write(&self) -> Option<Value> {
        let TrainOn::Messages { roles, turns, ends } = self else { return Some(Value::String("all".into())) };
        let is_assistant = roles.len() == 1 && roles[0] == ASSISTANT;
        match (is_assistant, turns, ends) {
            (true, TrainedTurns::All, TrainedEnds::Turn) => Some(Value::String(ASSISTANT.into())),
            (true, TrainedTurns::Last, TrainedEnds::Turn) => Some(Value::String("last".into())),
            (false, TrainedTurns::All, TrainedEnds::Turn) => roles.write(),
            _ => Some(Value::Table(Table::from_iter([
                ("roles".to_owned(), roles.write()?),
                ("turns".to_owned(), turns.write()?),
                ("ends".to_owned(), ends.write()?),
            ]))),
        }
    }

    fn choices() -> Vec<&'static str> {
        vec![ASSISTANT, "all", "last"]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<TrainOn, ValueRefusal> {
        let table: Table = format!("key = {text}").parse().unwrap();
        TrainOn::read(&table["key"], Path::new("."))
    }

    #[test]
    fn each_form_is_written_as_it_is_read() {
        for text in [
            r#""assistant""#,
            r#""all""#,
            r#""last""#,
            r#"["assistant", "tool"]"#,
            r#"{ roles = ["user"], turns = "last", ends = "none" }"#,
            r#"{ roles = ["assistant"], turns = "all", ends = "all" }"#,
        ] {
            let value = read(text).unwrap();
            assert_eq!(value.write().unwrap().to_string(), text);
        }
        assert_eq!(read(r#"{ turns = "last" }"#).unwrap(), read(r#""last""#).unwrap());
        assert_eq!(read(r#"["assistant"]"#).unwrap(), TrainOn::default());
    }

    #[test]
    fn other_values_are_refused() {
        let why = |text: &str| match read(text) {
            Err(ValueRefusal::Unusable(why)) => why,
            read => panic!("{read:?}"),
        };
        assert_eq!(
            why(r#"["bot"]"#),
            r#""bot" is not a role; accepted: system, developer, user, assistant, tool"#
        );
        assert_eq!(why("[]"), "an empty list of roles trains nothing");
        assert_eq!(why(r#"{ end = "none" }"#), "unknown key `end`; accepted: roles, turns, ends");
        assert_eq!(
            why(r#"{ ends = "eos" }"#),
            r#"its `ends` is "eos"; accepted: "turn", "all", "last", "none""#
        );
        assert!(matches!(read(r#""completion""#), Err(ValueRefusal::Shape)));
    }
}
