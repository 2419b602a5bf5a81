//! Tensors whose addresses a thread has made arguments of, held while it records its launches.

use std::cell::RefCell;
use std::collections::HashMap;

use candle_core::Tensor;

/// Tensors by the addresses in arguments.
pub(super) type Held = HashMap<u64, Tensor>;

thread_local! {
    /// The tensors of this thread; none if it does not record.
    static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
}

/// Holds a tensor with an argument at `address`, if the thread records.
pub(super) fn hold(address: u64, tensor: &Tensor) {
    HELD.with_borrow_mut(|held| {
        if let Some(held) = held {
            held.entry(address).or_insert_with(|| tensor.clone());
        }
    });
}

/// Returns whether a tensor with an argument at `address` is held.
pub(super) fn is_held(address: u64) -> bool {
    HELD.with_borrow(|held| held.as_ref().is_some_and(|held| held.contains_key(&address)))
}

/// Replaces the held tensors: by none to end. The caller drops them behind their last launch.
pub(super) fn replace_held(held: Option<Held>) -> Option<Held> {
    HELD.replace(held)
}
