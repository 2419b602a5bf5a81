//! One declaration per key: the macros that turn a list of documented keys into a struct with its defaults, its
//! reader, its writer and the table that help and error messages are made from.
//!
//! A key is declared once, as `/// doc`, name, type, default and, for numbers, range; nothing about it is said
//! anywhere else. `choices!` does the same for a closed list of texts.

use std::path::Path;

use toml::Value;

use super::value::{Bounds, Setting, ValueRefusal};

/// What the reference and the error messages say about one key.
#[derive(Debug)]
pub(super) struct Key {
    /// The name inside its section.
    pub(super) name: &'static str,
    /// Its documentation, as declared.
    pub(super) doc: &'static str,
    /// What may be written, in words.
    pub(super) accepted: fn() -> String,
    /// The closed list of texts, if the key has one.
    pub(super) choices: fn() -> Vec<&'static str>,
}

/// One table of the recipe, with its keys open to reading and writing by name.
pub(super) trait Section {
    /// The table's name.
    fn name(&self) -> &'static str;

    /// The table's documentation.
    fn doc(&self) -> &'static str;

    /// Its keys, in the order declared.
    fn keys(&self) -> &'static [Key];

    /// Reads `value` into the key `name`; relative paths start at `folder`. An unknown name changes nothing:
    /// the caller has looked it up in [`Section::keys`].
    ///
    /// # Errors
    /// When the value is not accepted.
    fn set(&mut self, name: &str, value: &Value, folder: &Path) -> Result<(), ValueRefusal>;

    /// The value of each key, in the order declared; `None` where nothing is set.
    fn values(&self) -> Vec<Option<Value>>;

    /// Puts the key `name` back to its default.
    fn reset(&mut self, name: &str);
}

/// Reads one value and checks its range.
pub(super) fn read<T: Setting>(value: &Value, range: Bounds, folder: &Path) -> Result<T, ValueRefusal> {
    let value = T::read(value, folder)?;
    if value.numbers().into_iter().all(|number| range.holds(number)) {
        Ok(value)
    } else {
        Err(ValueRefusal::Shape)
    }
}

/// Declares a section: see the module documentation.
macro_rules! section {
    (
        $(#[doc = $doc:literal])+
        pub struct $type:ident $name:literal {
            $( $(#[doc = $key_doc:literal])+ $key:ident : $kind:ty = $default:expr $(, $range:expr)? ; )+
        }
    ) => {
        $(#[doc = $doc])+
        #[derive(Debug, Clone, PartialEq)]
        pub struct $type {
            $( $(#[doc = $key_doc])+ pub $key: $kind, )+
        }

        impl Default for $type {
            fn default() -> Self {
                $type { $( $key: $default, )+ }
            }
        }

        impl $crate::recipe::schema::Section for $type {
            fn name(&self) -> &'static str {
                $name
            }

            fn doc(&self) -> &'static str {
                concat!($($doc, "\n"),+)
            }

            fn keys(&self) -> &'static [$crate::recipe::schema::Key] {
                &[$( $crate::recipe::schema::Key {
                    name: stringify!($key),
                    doc: concat!($($key_doc, "\n"),+),
                    accepted: || {
                        let range = $crate::recipe::schema::range!($($range)?);
                        <$kind as $crate::recipe::value::Setting>::accepted() + &range.describe()
                    },
                    choices: <$kind as $crate::recipe::value::Setting>::choices,
                }, )+]
            }

            fn set(
                &mut self,
                name: &str,
                value: &toml::Value,
                folder: &std::path::Path,
            ) -> Result<(), $crate::recipe::value::ValueRefusal> {
                match name {
                    $( stringify!($key) => {
                        let range = $crate::recipe::schema::range!($($range)?);
                        self.$key = $crate::recipe::schema::read(value, range, folder)?;
                    } )+
                    _ => {}
                }
                Ok(())
            }

            fn values(&self) -> Vec<Option<toml::Value>> {
                vec![$( $crate::recipe::value::Setting::write(&self.$key), )+]
            }

            fn reset(&mut self, name: &str) {
                match name {
                    $( stringify!($key) => self.$key = $default, )+
                    _ => {}
                }
            }
        }
    };
}

/// The range of a key, every number when it declares none.
macro_rules! range {
    () => {
        $crate::recipe::value::Bounds::Any
    };
    ($range:expr) => {
        $range
    };
}

/// Declares a closed list of texts as an enum; the first is the default.
macro_rules! choices {
    (
        $(#[doc = $doc:literal])+
        pub enum $type:ident {
            $(#[doc = $first_doc:literal])+ $first:ident = $first_text:literal,
            $( $(#[doc = $choice_doc:literal])+ $choice:ident = $text:literal, )*
        }
    ) => {
        $(#[doc = $doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
        pub enum $type {
            $(#[doc = $first_doc])+ #[default] $first,
            $( $(#[doc = $choice_doc])+ $choice, )*
        }

        impl $type {
            /// Every choice, in the order declared.
            pub const ALL: &'static [$type] = &[$type::$first, $($type::$choice,)*];
            /// The text of every choice, in the same order.
            pub const NAMES: &'static [&'static str] = &[$first_text, $($text,)*];

            /// The text that a recipe holds.
            pub fn as_str(self) -> &'static str {
                match self { $type::$first => $first_text, $($type::$choice => $text,)* }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::error::Error;

            fn from_str(text: &str) -> $crate::error::Result<Self> {
                Self::ALL.iter().copied().find(|choice| choice.as_str() == text).ok_or_else(|| {
                    $crate::error::Error::user(format!("unknown choice `{text}`"))
                        .because(format!("accepted: {}", Self::NAMES.join(", ")))
                })
            }
        }

        impl $crate::recipe::value::Setting for $type {
            fn accepted() -> String {
                let quoted: Vec<String> = Self::NAMES.iter().map(|name| format!("{name:?}")).collect();
                quoted.join(", ")
            }

            fn read(
                value: &toml::Value,
                _: &std::path::Path,
            ) -> Result<Self, $crate::recipe::value::ValueRefusal> {
                let text = value.as_str().and_then(|text| text.parse().ok());
                text.ok_or($crate::recipe::value::ValueRefusal::Shape)
            }

            fn write(&self) -> Option<toml::Value> {
                Some(toml::Value::String(self.as_str().to_owned()))
            }

            fn choices() -> Vec<&'static str> {
                Self::NAMES.to_vec()
            }
        }
    };
}

pub(super) use {choices, range, section};
