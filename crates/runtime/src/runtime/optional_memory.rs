//! Values in device memory that their owner can do without. A request that finds too little memory
//! drops those of its thread before it is repeated, so a run fails only where it would fail without
//! them.

use std::cell::RefCell;
use std::fmt;
use std::rc::{Rc, Weak};

use super::planned_failure::PlannedFailure;

thread_local! {
    /// The slots of this thread.
    static SLOTS: RefCell<Vec<Weak<dyn Release>>> = const { RefCell::new(Vec::new()) };
}

trait Release {
    /// Drops the value; returns false if there is none.
    fn release(&self) -> bool;
}

struct Slot<T> {
    value: RefCell<Option<T>>,
    released: fn(T),
}

impl<T> Release for Slot<T> {
    fn release(&self) -> bool {
        let value = self.value.take();
        value.map(self.released).is_some()
    }
}

/// A slot for a value that a failed request of this thread may drop at any time.
pub struct OptionalMemory<T>(Rc<Slot<T>>);

impl<T> fmt::Debug for OptionalMemory<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OptionalMemory(is_empty: {})", self.0.value.borrow().is_none())
    }
}

impl<T: 'static> OptionalMemory<T> {
    /// Returns an empty slot, which gives its value to `released` when memory is short.
    pub fn new(released: fn(T)) -> Self {
        let slot = Rc::new(Slot { value: RefCell::new(None), released });
        let known: Weak<dyn Release> = Rc::<Slot<T>>::downgrade(&slot);
        SLOTS.with_borrow_mut(|slots| {
            slots.retain(|slot| slot.strong_count() > 0);
            slots.push(known);
        });
        OptionalMemory(slot)
    }

    /// Stores `value` and drops the earlier one.
    pub fn set(&self, value: Option<T>) {
        drop(self.0.value.replace(value));
    }

    /// Takes the value out, unless it was released.
    pub fn take(&self) -> Option<T> {
        self.0.value.take()
    }
}

/// Drops all optional values of this thread.
pub(super) fn release_optional() {
    let slots = SLOTS.with_borrow(Clone::clone);
    // A value that is dropped may call the device, so no slot is borrowed then.
    let released = slots.iter().filter_map(Weak::upgrade).filter(|slot| slot.release()).count();
    if released > 0 {
        PlannedFailure::memory_released();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::error::{DeviceFault, Error, Result};
    use crate::runtime::device_memory::{allocated_if_free, with_room};

    thread_local! {
        /// Free bytes of a device.
        static FREE: Cell<usize> = const { Cell::new(100) };
        static RELEASED: Cell<usize> = const { Cell::new(0) };
    }

    /// Memory of the device.
    struct Held(usize);

    impl Held {
        fn new(bytes: usize) -> Result<Self> {
            let left = FREE.get().checked_sub(bytes);
            FREE.set(left.ok_or_else(|| Error::of_fault(DeviceFault::OutOfMemory, "out of memory"))?);
            Ok(Held(bytes))
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            FREE.set(FREE.get() + self.0);
        }
    }

    fn required(bytes: usize) -> Result<Held> {
        with_room(PlannedFailure::Module, || Ok(()), || Held::new(bytes))
    }

    /// Each request succeeds that would succeed without optional values.
    #[test]
    fn a_request_takes_the_memory_of_optional_values() -> Result<()> {
        let slots = [30, 50].map(|_| OptionalMemory::new(|_: Held| RELEASED.set(RELEASED.get() + 1)));
        let allocated = required(10)?;
        slots[0].set(allocated_if_free(|| Held::new(30))?);
        slots[1].set(allocated_if_free(|| Held::new(50))?);
        // A request that fits takes nothing away.
        let small = required(10)?;
        assert_eq!((RELEASED.get(), FREE.get()), (0, 0));
        let large = required(80)?;
        assert_eq!((RELEASED.get(), FREE.get()), (2, 0));
        assert!(slots.iter().all(|slot| slot.take().is_none()));
        assert!(required(1).is_err());
        drop((allocated, small, large));
        assert_eq!(FREE.get(), 100);
        Ok(())
    }

    /// An optional request fails without effect on other values and without a second attempt.
    #[test]
    fn an_optional_request_takes_no_memory_away() -> Result<()> {
        let slot = OptionalMemory::new(drop::<Held>);
        slot.set(allocated_if_free(|| Held::new(60))?);
        let attempts = Cell::new(0);
        let refused = allocated_if_free(|| {
            attempts.set(attempts.get() + 1);
            Held::new(50)
        })?;
        assert!(refused.is_none() && attempts.get() == 1);
        assert_eq!(slot.take().map(|held| held.0), Some(60));
        let broken = allocated_if_free(|| Err::<(), _>(Error::of_fault(DeviceFault::Kernel, "a fault")));
        assert!(broken.is_err());
        Ok(())
    }

    /// A slot that was dropped is not called.
    #[test]
    fn a_value_lives_as_long_as_its_slot() -> Result<()> {
        let slot = OptionalMemory::new(|_: Held| RELEASED.set(RELEASED.get() + 1));
        slot.set(Some(Held::new(40)?));
        drop(slot);
        assert_eq!(FREE.get(), 100);
        assert!(required(101).is_err() && RELEASED.get() == 0);
        Ok(())
    }
}
