//! Turns panics of foreign code into errors: a parser that panics on a file must not end the
//! program.
//!
//! Use it only for code that reads a file of unknown origin and leaves no half-changed state
//! behind.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `run` and returns its result, or the message of its panic. A panic hook that calls
/// [`is_contained`] stays silent about this panic.
///
/// # Errors
/// The message of the panic.
pub fn contain<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    let outer = CONTAINED.replace(true);
    // The state that `run` changed is dropped with its error; see the module's doc.
    let outcome = catch_unwind(AssertUnwindSafe(run));
    CONTAINED.set(outer);
    outcome.map_err(|panic| message(panic.as_ref()).to_owned())
}

/// Returns true if this thread runs code inside [`contain`].
pub fn is_contained() -> bool {
    CONTAINED.get()
}

/// The message of a panic's payload.
pub fn message(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| panic.downcast_ref().copied()).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_and_the_next_one_is_not() {
        assert_eq!(contain(|| 3), Ok(3));
        let inside = contain(|| {
            assert!(is_contained());
            contain(|| ()).expect("no panic");
            assert!(is_contained(), "the inner one does not end the outer one");
            panic!("index {}", 7)
        });
        assert_eq!(inside.map(|(): ()| ()), Err("index 7".to_owned()));
        assert!(!is_contained());
    }
}
