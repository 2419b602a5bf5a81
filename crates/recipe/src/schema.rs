//! One declaration per key: macros that turn a list of documented keys into a struct with its
//! defaults, reader, writer and the table for help and error messages.
//!
//! A key is declared once, as `/// doc`, name, type, default and, for numbers, range.
//! `recipe::enums` does the same for closed lists of texts.

use std::path::Path;

use toml::Value;

use super::value::{Bounds, Setting, ValueRefusal};

/// Facts about one key for the reference and error messages.
#[derive(Debug)]
pub(super) struct Key {
    /// Name inside its section.
    pub(super) name: &'static str,
    /// Documentation from its declaration.
    pub(super) doc: &'static str,
    /// Accepted values in words.
    pub(super) accepted: fn() -> String,
    /// The closed list of texts of the key, or an empty list.
    pub(super) choices: fn() -> Vec<&'static str>,
}

/// One table of the recipe, whose keys are read and written by name.
pub(super) trait Section {
    /// Name of the table.
    fn name(&self) -> &'static str;

    /// Documentation of the table.
    fn doc(&self) -> &'static str;

    /// Its keys, in declaration order.
    fn keys(&self) -> &'static [Key];

    /// Reads `value` into the key `name`; relative paths start at `folder`. An unknown name changes
    /// nothing: callers check [`Section::keys`] first.
    ///
    /// # Errors
    /// The value is not accepted.
    fn set(&mut self, name: &str, value: &Value, folder: &Path) -> Result<(), ValueRefusal>;

    /// Value of each key, in declaration order; `None` if it is not set.
    fn values(&self) -> Vec<Option<Value>>;

    /// Resets the key `name` to its default.
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

/// Declares a section; see the module's documentation.
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

        impl $crate::schema::Section for $type {
            fn name(&self) -> &'static str {
                $name
            }

            fn doc(&self) -> &'static str {
                concat!($($doc, "\n"),+)
            }

            fn keys(&self) -> &'static [$crate::schema::Key] {
                &[$( $crate::schema::Key {
                    name: stringify!($key),
                    doc: concat!($($key_doc, "\n"),+),
                    accepted: || {
                        let range = $crate::schema::range!($($range)?);
                        <$kind as $crate::value::Setting>::accepted() + &range.describe()
                    },
                    choices: <$kind as $crate::value::Setting>::choices,
                }, )+]
            }

            fn set(
                &mut self,
                name: &str,
                value: &toml::Value,
                folder: &std::path::Path,
            ) -> Result<(), $crate::value::ValueRefusal> {
                match name {
                    $( stringify!($key) => {
                        let range = $crate::schema::range!($($range)?);
                        self.$key = $crate::schema::read(value, range, folder)?;
                    } )+
                    _ => {}
                }
                Ok(())
            }

            fn values(&self) -> Vec<Option<toml::Value>> {
                vec![$( $crate::value::Setting::write(&self.$key), )+]
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

/// Range of a key; without one, every number.
macro_rules! range {
    () => {
        $crate::value::Bounds::Any
    };
    ($range:expr) => {
        $range
    };
}

pub(super) use {range, section};
