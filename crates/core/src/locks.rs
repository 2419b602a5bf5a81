//! Locks of data that stays valid after a panic of another thread.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, also if another thread panicked while it held the lock. The data must be
/// consistent whenever a panic may happen.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_taken_after_a_panic() {
        let number = Mutex::new(1);
        let panicked = std::panic::catch_unwind(|| {
            let guard = locked(&number);
            assert_eq!(*guard, 2, "a planted panic");
        });
        assert!(panicked.is_err() && number.is_poisoned());
        *locked(&number) += 1;
        assert_eq!(*locked(&number), 2);
    }
}
