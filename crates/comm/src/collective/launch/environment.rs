//! Typed reading of environment variables through a lookup, so that tests need no real environment.

use std::ffi::OsString;

use crate::address;
use crate::error::{Error, Result};
use crate::rendezvous::MAX_WORLD;

/// Variables of a process. An empty one counts as unset, as launchers and shells do.
pub(super) struct LaunchEnvironment<'a> {
    lookup: &'a dyn Fn(&str) -> Option<OsString>,
}

/// A variable and its value.
pub(super) struct Count {
    pub(super) name: &'static str,
    pub(super) value: usize,
}

impl<'a> LaunchEnvironment<'a> {
    pub(super) fn new(lookup: &'a dyn Fn(&str) -> Option<OsString>) -> Self {
        LaunchEnvironment { lookup }
    }

    /// Text of the variable `name`.
    pub(super) fn text(&self, name: &'static str) -> Result<Option<String>> {
        match (self.lookup)(name).filter(|value| !value.is_empty()) {
            None => Ok(None),
            Some(value) => match value.into_string() {
                Ok(value) => Ok(Some(value)),
                Err(value) => Err(refused(name, &value.to_string_lossy(), "UTF-8 text")),
            },
        }
    }

    pub(super) fn is_set(&self, name: &'static str) -> bool {
        (self.lookup)(name).is_some_and(|value| !value.is_empty())
    }

    /// A number of ranks, processes or hosts: at least 1.
    pub(super) fn count(&self, name: &'static str) -> Result<Option<Count>> {
        self.number(name, 1, MAX_WORLD as u64).map(|number| number.map(|n| Count { name, value: n as usize }))
    }

    /// The first of `names` that is set, as a count; see [`LaunchEnvironment::count`].
    pub(super) fn first_count(&self, names: &[&'static str]) -> Result<Option<Count>> {
        names.iter().find(|name| self.is_set(name)).map_or(Ok(None), |name| self.count(name))
    }

    /// An index among ranks, processes or hosts: from 0.
    pub(super) fn index(&self, name: &'static str) -> Result<Option<Count>> {
        let number = self.number(name, 0, MAX_WORLD as u64 - 1)?;
        Ok(number.map(|n| Count { name, value: n as usize }))
    }

    /// The first of `names` that is set, as an index; see [`LaunchEnvironment::index`].
    pub(super) fn first_index(&self, names: &[&'static str]) -> Result<Option<Count>> {
        names.iter().find(|name| self.is_set(name)).map_or(Ok(None), |name| self.index(name))
    }

    /// A TCP port.
    pub(super) fn port(&self, name: &'static str) -> Result<Option<u16>> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        let refused = || refused(name, &text, &format!("a whole number from {}", address::PORTS));
        address::port(&text).map(Some).ok_or_else(refused)
    }

    /// A number from `least` to `most`.
    pub(super) fn number(&self, name: &'static str, least: u64, most: u64) -> Result<Option<u64>> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        match text.parse() {
            Ok(number) if (least..=most).contains(&number) => Ok(Some(number)),
            _ => Err(refused(name, &text, &format!("a whole number from {least} to {most}"))),
        }
    }
}

impl Count {
    /// Refuses an index that is not below `count`.
    pub(super) fn below(&self, count: &Count) -> Result<()> {
        if self.value < count.value {
            return Ok(());
        }
        let accepted = format!("0 to {}, because {} is {}", count.value - 1, count.name, count.value);
        Err(refused(self.name, &self.value.to_string(), &accepted))
    }
}

/// Error of a variable, or of a flag such as `--master-addr`, with an unusable value.
pub(super) fn refused(name: &str, value: &str, accepted: &str) -> Error {
    let value: String = value.chars().take(80).map(|c| if c.is_control() { ' ' } else { c }).collect();
    let (what, hint) = if name.starts_with("--") {
        ("cannot use", "give such a value to every process")
    } else {
        ("cannot use the launcher's variable", "set it to such a value in every process, or unset it")
    };
    Error::user(format!("{what} {name}"))
        .because(format!("{name} is `{value}`; accepted: {accepted}"))
        .hint(hint)
}

/// Error of a missing variable that others require.
pub(super) fn missing(name: &str, because: &str) -> Error {
    Error::user("cannot determine the rank of this process")
        .because(format!("{name} is not set, although {because}"))
}
