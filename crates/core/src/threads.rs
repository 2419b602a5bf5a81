//! Threads of this process: each is started here, so that one that the system refuses is the same error everywhere.

use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

use crate::error::{Error, Result};

/// Starts a thread named `name`.
///
/// # Errors
/// [`Error::cannot_start`].
pub fn start<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    Builder::new().name(name.to_owned()).spawn(work).map_err(|error| refused(name, &error))
}

/// Starts a thread named `name` that ends before `scope` does; `stack_bytes`: the size of its stack where it is not the
/// usual one.
///
/// # Errors
/// As [`start`].
pub fn start_in<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    stack_bytes: Option<usize>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>> {
    let builder = Builder::new().name(name.to_owned());
    let builder = match stack_bytes {
        Some(bytes) => builder.stack_size(bytes),
        None => builder,
    };
    builder.spawn_scoped(scope, work).map_err(|error| refused(name, &error))
}

fn refused(name: &str, error: &std::io::Error) -> Error {
    Error::cannot_start(format!("the thread `{name}`"), error)
}
