//! Panics of foreign code as errors: parsers of other crates that panic on some files must not end the program.
//!
//! Only for code that is handed a file of unknown origin and leaves nothing half-changed behind that is used again.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// What `run` returns, or the message of the panic that it ended in. A panic hook that asks [`is_contained`] keeps quiet
/// about it.
///
/// # Errors
/// The message of the panic.
pub fn contain<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    let outer = CONTAINED.replace(true);
    // What `run` changed is thrown away with its error; see above.
    let outcome = catch_unwind(AssertUnwindSafe(run));
    CONTAINED.set(outer);
    outcome.map_err(|panic| message(panic.as_ref()).to_owned())
}

/// Whether this thread runs code whose panics become errors.
pub fn is_contained() -> bool {
    CONTAINED.get()
}

/// What a panic says.
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
