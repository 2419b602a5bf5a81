//! Memory as a device's pool may hand it out: a request gets the lowest free block of its size, so
//! that passes with the same requests get the same addresses. Whether CUDA's pool does so is not
//! known.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// Bytes of the smallest block that is pooled: more than a node of `FREE` has, which would ask for
/// itself.
const LEAST: usize = 1024;

/// Bytes of the smallest block that is pooled now.
static POOLED: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Free blocks by size and alignment. Its own memory is in smaller pieces than the pool's.
static FREE: Mutex<BTreeMap<[usize; 2], BTreeSet<usize>>> = Mutex::new(BTreeMap::new());

/// Keeps blocks of at least `least` bytes that are freed from now on for requests of the same size.
pub(crate) fn begin(least: usize) {
    POOLED.store(least.max(LEAST), Relaxed);
}

/// Gives freed memory back to the system from now on.
pub(crate) fn end() {
    POOLED.store(usize::MAX, Relaxed);
}

fn free_block(layout: Layout) -> Option<*mut u8> {
    if layout.size() < POOLED.load(Relaxed) {
        return None;
    }
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    let blocks = free.get_mut(&[layout.size(), layout.align()])?;
    blocks.pop_first().map(std::ptr::with_exposed_provenance_mut)
}

/// Allocates from the pool or the system.
///
/// # Safety
/// As [`GlobalAlloc::alloc`].
pub(crate) unsafe fn alloc(layout: Layout) -> *mut u8 {
    // SAFETY: by this function's contract.
    free_block(layout).unwrap_or_else(|| unsafe { System.alloc(layout) })
}

/// Allocates zeros from the pool or the system.
///
/// # Safety
/// As [`GlobalAlloc::alloc_zeroed`].
pub(crate) unsafe fn alloc_zeroed(layout: Layout) -> *mut u8 {
    match free_block(layout) {
        Some(block) => {
            // SAFETY: a free block of this size.
            unsafe { block.write_bytes(0, layout.size()) };
            block
        }
        // SAFETY: by this function's contract.
        None => unsafe { System.alloc_zeroed(layout) },
    }
}

/// Frees memory to the pool or the system.
///
/// # Safety
/// As [`GlobalAlloc::dealloc`].
pub(crate) unsafe fn dealloc(memory: *mut u8, layout: Layout) {
    if layout.size() < POOLED.load(Relaxed) {
        // SAFETY: by this function's contract.
        unsafe { System.dealloc(memory, layout) };
        return;
    }
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    free.entry([layout.size(), layout.align()]).or_default().insert(memory.expose_provenance());
}
