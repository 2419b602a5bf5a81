//! Types of the values of keys: reading from TOML, description for users, and writing.
//!
//! The Rust type of a key decides its accepted values, and [`Bounds`] narrows numbers. Both
//! describe themselves in plain English, for error messages and for `recipes show reference`. They
//! do not use serde, which stops at the first fault and has no ranges or files.

use std::path::Path;

use toml::Value;

use super::enums::{
    AdapterInit, AdapterKind, AlertRule, Attention, BaseProducts, ComputeDtype, DataFormat, Dtype,
    FDivergence, LossType, MasterWeights, ModelInit, ObjectiveKind, Offload, OnBadRow, OnLongRow, OnNan,
    OptimizerKind, QuantKind, Recompute, ReduceDtype, SchedulerKind, StateDtype, Strategy, TrainedEnds,
    TrainedTurns,
};

/// Reason for refusing a value.
#[derive(Debug)]
pub(super) enum ValueRefusal {
    /// The value has the wrong type; the message lists the accepted values.
    Shape,
    /// The type is right, but the value is unusable for the stated reason.
    Unusable(String),
    /// The value means "not set", such as `path = ""`.
    Empty,
}

/// Type of a recipe key.
pub(super) trait Setting: Sized {
    /// Accepted values in words, such as `true | false`.
    fn accepted() -> String;

    /// Reads a TOML value; relative paths start at `folder`.
    ///
    /// # Errors
    /// [`ValueRefusal`], without the key's name, which the caller adds.
    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal>;

    /// TOML value that [`Setting::read`] reads back; `None` if not set.
    fn write(&self) -> Option<Value>;

    /// Numbers in the value, for the range check.
    fn numbers(&self) -> Vec<f64> {
        Vec::new()
    }

    /// The closed list of texts, for suggesting the nearest one.
    fn choices() -> Vec<&'static str> {
        Vec::new()
    }
}

/// Range of a key's numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Bounds {
    /// Any finite number.
    Any,
    /// At least this number.
    AtLeast(f64),
    /// More than this number.
    Above(f64),
    /// From the first to the second, both inclusive.
    Between(f64, f64),
    /// From the first, inclusive, to the second, exclusive.
    FromToBelow(f64, f64),
    /// One of these numbers.
    OneOf(&'static [f64]),
}

impl Bounds {
    /// Returns true if the finite `number` is inside; false for any other.
    pub(super) fn holds(self, number: f64) -> bool {
        number.is_finite()
            && match self {
                Bounds::Any => true,
                Bounds::AtLeast(low) => number >= low,
                Bounds::Above(low) => number > low,
                Bounds::Between(low, high) => (low..=high).contains(&number),
                Bounds::FromToBelow(low, high) => (low..high).contains(&number),
                Bounds::OneOf(list) => list.contains(&number),
            }
    }

    /// Text after `a number`, such as `, at least 1`.
    pub(super) fn describe(self) -> String {
        match self {
            Bounds::Any => String::new(),
            Bounds::AtLeast(low) => format!(", at least {low}"),
            Bounds::Above(low) => format!(" above {low}"),
            Bounds::Between(low, high) => format!(" from {low} to {high}"),
            Bounds::FromToBelow(low, high) => format!(" from {low} to below {high}"),
            Bounds::OneOf(list) => {
                let list: Vec<String> = list.iter().map(f64::to_string).collect();
                format!(": one of {}", list.join(", "))
            }
        }
    }
}

impl Setting for bool {
    fn accepted() -> String {
        "true, false".into()
    }

    fn read(value: &Value, _: &Path) -> Result<Self, ValueRefusal> {
        value.as_bool().ok_or(ValueRefusal::Shape)
    }

    fn write(&self) -> Option<Value> {
        Some(Value::Boolean(*self))
    }
}

impl Setting for f64 {
    fn accepted() -> String {
        "a number".into()
    }

    fn read(value: &Value, _: &Path) -> Result<Self, ValueRefusal> {
        let number = match value {
            Value::Integer(whole) => *whole as f64,
            Value::Float(number) => *number,
            _ => return Err(ValueRefusal::Shape),
        };
        if number.is_finite() { Ok(number) } else { Err(ValueRefusal::Shape) }
    }

    fn write(&self) -> Option<Value> {
        Some(Value::Float(*self))
    }

    fn numbers(&self) -> Vec<f64> {
        vec![*self]
    }
}

macro_rules! whole_number {
    ($($kind:ty),+) => {$(
        impl Setting for $kind {
            fn accepted() -> String {
                "a whole number".into()
            }

            fn read(value: &Value, _: &Path) -> Result<Self, ValueRefusal> {
                let whole = value.as_integer().ok_or(ValueRefusal::Shape)?;
                Self::try_from(whole).map_err(|_| ValueRefusal::Shape)
            }

            fn write(&self) -> Option<Value> {
                i64::try_from(*self).ok().map(Value::Integer)
            }

            fn numbers(&self) -> Vec<f64> {
                vec![*self as f64]
            }
        }
    )+};
}
whole_number!(usize, u64);

impl Setting for String {
    fn accepted() -> String {
        "a string".into()
    }

    fn read(value: &Value, _: &Path) -> Result<Self, ValueRefusal> {
        match value.as_str().ok_or(ValueRefusal::Shape)? {
            "" => Err(ValueRefusal::Empty),
            text => Ok(text.to_owned()),
        }
    }

    fn write(&self) -> Option<Value> {
        Some(Value::String(self.clone()))
    }
}

impl Setting for Vec<String> {
    fn accepted() -> String {
        "a list of strings".into()
    }

    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        read_list(value.as_array().ok_or(ValueRefusal::Shape)?, folder)
    }

    fn write(&self) -> Option<Value> {
        Some(Value::Array(self.iter().filter_map(Setting::write).collect()))
    }
}

impl Setting for Vec<f64> {
    fn accepted() -> String {
        "a list of numbers".into()
    }

    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        read_list(value.as_array().ok_or(ValueRefusal::Shape)?, folder)
    }

    fn write(&self) -> Option<Value> {
        Some(Value::Array(self.iter().filter_map(Setting::write).collect()))
    }

    fn numbers(&self) -> Vec<f64> {
        self.clone()
    }
}

/// Reads every entry of a list and refuses empty ones.
pub(super) fn read_list<T: Setting>(list: &[Value], folder: &Path) -> Result<Vec<T>, ValueRefusal> {
    list.iter()
        .map(|entry| match T::read(entry, folder) {
            Err(ValueRefusal::Empty) => Err(ValueRefusal::Unusable("one of its entries is empty".into())),
            read => read,
        })
        .collect()
}

impl Setting for [f64; 2] {
    fn accepted() -> String {
        "two numbers, each".into()
    }

    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        match value.as_array().map(Vec::as_slice) {
            Some([first, second]) => Ok([f64::read(first, folder)?, f64::read(second, folder)?]),
            _ => Err(ValueRefusal::Shape),
        }
    }

    fn write(&self) -> Option<Value> {
        Some(Value::Array(self.map(Value::Float).to_vec()))
    }

    fn numbers(&self) -> Vec<f64> {
        self.to_vec()
    }
}

impl<T: Setting> Setting for Option<T> {
    fn accepted() -> String {
        T::accepted()
    }

    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        match T::read(value, folder) {
            Ok(value) => Ok(Some(value)),
            Err(ValueRefusal::Empty) => Ok(None),
            Err(refusal) => Err(refusal),
        }
    }

    fn write(&self) -> Option<Value> {
        self.as_ref().and_then(Setting::write)
    }

    fn numbers(&self) -> Vec<f64> {
        self.as_ref().map(Setting::numbers).unwrap_or_default()
    }

    fn choices() -> Vec<&'static str> {
        T::choices()
    }
}

/// A setting that `"auto"` leaves to finetune.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AutoOr<T> {
    /// finetune decides; see the documentation of the key.
    #[default]
    Auto,
    /// The user's value.
    Fixed(T),
}

impl<T> AutoOr<T> {
    const AUTO: &str = "auto";
}

impl<T: Setting> Setting for AutoOr<T> {
    fn accepted() -> String {
        format!("{:?}, {}", Self::AUTO, T::accepted())
    }

    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        if value.as_str() == Some(Self::AUTO) {
            return Ok(AutoOr::Auto);
        }
        T::read(value, folder).map(AutoOr::Fixed)
    }

    fn write(&self) -> Option<Value> {
        match self {
            AutoOr::Auto => Some(Value::String(Self::AUTO.into())),
            AutoOr::Fixed(choice) => choice.write(),
        }
    }

    fn numbers(&self) -> Vec<f64> {
        match self {
            AutoOr::Auto => Vec::new(),
            AutoOr::Fixed(choice) => choice.numbers(),
        }
    }

    fn choices() -> Vec<&'static str> {
        [vec![Self::AUTO], T::choices()].concat()
    }
}

/// Values by module-name pattern, in writing order: PEFT uses the first match.
#[derive(Debug, Clone, PartialEq)]
pub struct Patterns<T>(pub Vec<(String, T)>);

impl<T> Default for Patterns<T> {
    fn default() -> Self {
        Patterns(Vec::new())
    }
}

impl<T: Setting> Setting for Patterns<T> {
    fn accepted() -> String {
        format!("a table from module names to numbers, each {}", T::accepted())
    }

    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        let table = value.as_table().ok_or(ValueRefusal::Shape)?;
        let read = |(name, value): (&String, &Value)| Ok((name.clone(), T::read(value, folder)?));
        table.iter().map(read).collect::<Result<_, _>>().map(Patterns)
    }

    fn write(&self) -> Option<Value> {
        let pairs = self.0.iter().filter_map(|(name, value)| Some((name.clone(), value.write()?)));
        Some(Value::Table(pairs.collect()))
    }

    fn numbers(&self) -> Vec<f64> {
        self.0.iter().flat_map(|(_, value)| value.numbers()).collect()
    }
}

/// Modules that get an adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TargetModules {
    /// Every linear layer except the output head (PEFT's `all-linear`).
    AllLinear,
    /// Modules whose name equals one of these, or ends with a dot and one of them.
    Named(Vec<String>),
    /// Modules whose full name matches this regular expression.
    Pattern(String),
}

impl Setting for TargetModules {
    fn accepted() -> String {
        r#""all-linear", a list of module names such as ["q_proj", "v_proj"], a regular expression for whole names such as ".*(q|v)_proj""#.into()
    }

    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        match value {
            Value::String(text) if text == "all-linear" => Ok(TargetModules::AllLinear),
            Value::String(text) if text.is_empty() => Err(ValueRefusal::Empty),
            // A word without pattern characters is a name: as a pattern it would match no full
            // name. A text like a list is one that `--set` could not parse.
            Value::String(text) if !is_list(text) && text.chars().any(is_pattern_sign) => {
                Ok(TargetModules::Pattern(text.clone()))
            }
            Value::Array(list) if list.is_empty() => {
                Err(ValueRefusal::Unusable("an empty list trains nothing".into()))
            }
            Value::Array(list) => read_list(list, folder).map(TargetModules::Named),
            _ => Err(ValueRefusal::Shape),
        }
    }

    fn write(&self) -> Option<Value> {
        match self {
            TargetModules::AllLinear => Some(Value::String("all-linear".into())),
            TargetModules::Named(names) => names.write(),
            TargetModules::Pattern(pattern) => Some(Value::String(pattern.clone())),
        }
    }

    fn choices() -> Vec<&'static str> {
        vec!["all-linear"]
    }
}

/// Returns true if a text has the form of a list.
fn is_list(text: &str) -> bool {
    text.starts_with('[') && text.ends_with(']')
}

/// Returns true if a character has a special meaning in a regular expression.
fn is_pattern_sign(character: char) -> bool {
    r".\*+?()[]{}|^$".contains(character)
}

/// Implements [`Setting`] for lists of texts from a closed list.
macro_rules! lists_of_choices_are_settings {
    ($($type:ident),* $(,)?) => {$(
        impl Setting for Vec<$type> {
            fn accepted() -> String {
                let quoted: Vec<String> = $type::NAMES.iter().map(|name| format!("{name:?}")).collect();
                format!("a list of {}", quoted.join(", "))
            }

            /// Accepts one text as a list of one, so that `--set alerts.rules=stall` works.
            fn read(value: &Value, _: &Path) -> Result<Self, ValueRefusal> {
                let list = match value {
                    Value::Array(list) => list.as_slice(),
                    Value::String(text) if text.is_empty() => return Err(ValueRefusal::Empty),
                    one => std::slice::from_ref(one),
                };
                let choice = |entry: &Value| {
                    entry.as_str().and_then(|text| text.parse().ok()).ok_or(ValueRefusal::Shape)
                };
                list.iter().map(choice).collect()
            }

            fn write(&self) -> Option<Value> {
                let text = |choice: &$type| Value::String(choice.as_str().to_owned());
                Some(Value::Array(self.iter().map(text).collect()))
            }

            fn choices() -> Vec<&'static str> {
                $type::NAMES.to_vec()
            }
        }
    )*};
}
lists_of_choices_are_settings!(AlertRule, LossType);

impl Setting for Recompute {
    fn accepted() -> String {
        let quoted = |texts: &[&str]| texts.iter().map(|text| format!("{text:?}")).collect::<Vec<_>>();
        let numbers = "with a number of blocks, at least 1, for N";
        format!("{}, {} {numbers}", quoted(Self::NAMES).join(", "), quoted(Self::FORMS).join(" and "))
    }

    fn read(value: &Value, _: &Path) -> Result<Self, ValueRefusal> {
        value.as_str().and_then(|text| text.parse().ok()).ok_or(ValueRefusal::Shape)
    }

    fn write(&self) -> Option<Value> {
        Some(Value::String(self.to_string()))
    }

    fn choices() -> Vec<&'static str> {
        Self::NAMES.to_vec()
    }
}

/// Implements [`Setting`] for the closed lists of texts.
macro_rules! choices_are_settings {
    ($($type:ident),* $(,)?) => {$(
        impl Setting for $type {
            fn accepted() -> String {
                let quoted: Vec<String> = Self::NAMES.iter().map(|name| format!("{name:?}")).collect();
                quoted.join(", ")
            }

            fn read(
                value: &toml::Value,
                _: &std::path::Path,
            ) -> Result<Self, ValueRefusal> {
                let text = value.as_str().and_then(|text| text.parse().ok());
                text.ok_or(ValueRefusal::Shape)
            }

            fn write(&self) -> Option<toml::Value> {
                Some(toml::Value::String(self.as_str().to_owned()))
            }

            fn choices() -> Vec<&'static str> {
                Self::NAMES.to_vec()
            }
        }
    )*};
}
choices_are_settings!(
    ModelInit,
    ComputeDtype,
    Dtype,
    Attention,
    QuantKind,
    AdapterKind,
    AdapterInit,
    DataFormat,
    OnBadRow,
    OnLongRow,
    ObjectiveKind,
    FDivergence,
    OnNan,
    BaseProducts,
    OptimizerKind,
    StateDtype,
    MasterWeights,
    SchedulerKind,
    Strategy,
    Offload,
    ReduceDtype,
    TrainedTurns,
    TrainedEnds
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_at_their_edges() {
        assert!(Bounds::AtLeast(1.0).holds(1.0) && !Bounds::AtLeast(1.0).holds(0.5));
        assert!(Bounds::Above(0.0).holds(1e-300) && !Bounds::Above(0.0).holds(0.0));
        assert!(Bounds::Between(0.0, 1.0).holds(1.0) && !Bounds::Between(0.0, 1.0).holds(1.01));
        assert!(Bounds::FromToBelow(0.0, 1.0).holds(0.0) && !Bounds::FromToBelow(0.0, 1.0).holds(1.0));
        assert!(Bounds::OneOf(&[64.0]).holds(64.0) && !Bounds::OneOf(&[64.0]).holds(63.0));
        assert!(!Bounds::Any.holds(f64::NAN) && !Bounds::AtLeast(0.0).holds(f64::INFINITY));
    }

    #[test]
    fn patterns_keep_their_order() {
        let table: Value = "p = { z = 4, a = 8 }".parse::<toml::Table>().unwrap()["p"].clone();
        let patterns = Patterns::<usize>::read(&table, Path::new(".")).unwrap();
        assert_eq!(patterns.0, [("z".to_owned(), 4), ("a".to_owned(), 8)]);
        assert_eq!(patterns.write(), Some(table));
    }
}
