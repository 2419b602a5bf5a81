//! Memory of calls: checked before a peer sees it, cut into parts, copied.

use std::ops::Range;
use std::ptr::{copy_nonoverlapping, with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::Arc;

use crate::collective::Call;
use crate::collective::buffer_checks;
use crate::error::{Error, Result};
use crate::runtime::buffer::Buffer;

/// Alignment of the parts that ranks write in parallel, so that no two write one cache line.
const LINE_BYTES: usize = 64;

/// Checks that `full` consists of the `shard`s of `size` members in order, and returns the offset
/// of `member`'s shard in it, in bytes. The shard may be that range of `full`, but may not overlap
/// otherwise.
pub(super) fn check_parts(
    call: Call,
    (member, size): (usize, usize),
    shard: &Buffer,
    full: &Buffer,
) -> Result<usize> {
    check_aligned(call, shard)?;
    check_aligned(call, full)?;
    let fault = |cause: String| Err(Error::internal(format!("cannot share out {call}")).because(cause));
    let fits = shard.elements().checked_mul(size) == Some(full.elements());
    if !fits || shard.element() != full.element() {
        return fault(format!(
            "the full data is {full:?}, the shard {shard:?}; {} ranks need {} times the shard",
            size, size
        ));
    }
    let at = member * shard.bytes();
    let (begin, end) = (full.address(), full.address() + full.bytes());
    let overlaps = shard.address() < end && begin < shard.address() + shard.bytes();
    if overlaps && shard.address() != begin + at {
        return fault(format!("the shard, {shard:?}, lies across the full data, {full:?}"));
    }
    Ok(at)
}

pub(super) fn check_aligned(call: Call, memory: &Buffer) -> Result<()> {
    buffer_checks::check_host(call, memory)?;
    if memory.address().is_multiple_of(memory.element().bytes()) {
        return Ok(());
    }
    Err(Error::internal(format!("cannot move {call}")).because(format!("{memory:?} is not aligned")))
}

pub(super) fn check_sum(call: Call, memory: &Buffer) -> Result<()> {
    buffer_checks::check_sum(call, memory)?;
    check_aligned(call, memory)
}

/// Range of the `part`th of `parts` parts of `elements` elements of `bytes` bytes, in whole cache
/// lines; the last may be short or empty.
pub(super) fn part(elements: usize, bytes: usize, parts: usize, part: usize) -> Range<usize> {
    let each = elements.div_ceil(parts).next_multiple_of(LINE_BYTES / bytes);
    (part * each).min(elements)..((part + 1) * each).min(elements)
}

/// Start addresses of the memories, plus `at` bytes.
pub(super) fn addresses(memories: &[Buffer], at: usize) -> Vec<usize> {
    memories.iter().map(|memory| memory.address() + at).collect()
}

/// Copies memory to a new allocation, which the returned buffer keeps.
pub(super) fn private(memory: &Buffer) -> Buffer {
    let mut words = vec![0_u64; memory.bytes().div_ceil(8)];
    let address = words.as_mut_ptr().expose_provenance();
    // SAFETY: `words` is long enough; `memory` belongs to the caller.
    unsafe { copy(memory.address(), address, memory.bytes()) };
    // SAFETY: a vector inside an Arc does not move; words are aligned for any element; no thread
    // writes it again.
    unsafe { Buffer::new(address, memory.elements(), memory.element(), Arc::new(words)) }
}

/// # Safety
/// `bytes` bytes are readable at `from` and writable at `to`; they do not overlap, and no other
/// thread writes the first or touches the second meanwhile.
pub(super) unsafe fn copy(from: usize, to: usize, bytes: usize) {
    // SAFETY: by this function's contract.
    unsafe {
        copy_nonoverlapping(
            with_exposed_provenance::<u8>(from),
            with_exposed_provenance_mut::<u8>(to),
            bytes,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::buffer::ElementType;

    #[test]
    fn parts_cover_everything_once() {
        for parts in 1..=5 {
            for elements in 0..200 {
                let all: Vec<usize> = (0..parts).flat_map(|i| part(elements, 4, parts, i)).collect();
                assert_eq!(all, (0..elements).collect::<Vec<_>>(), "{elements} in {parts}");
            }
        }
        assert_eq!(part(100, 4, 2, 0), 0..64);
        assert_eq!(part(100, 2, 4, 3), 96..100);
    }

    /// Memory that no test accesses.
    fn at(address: usize, elements: usize, element: ElementType) -> Buffer {
        // SAFETY: only its numbers are read.
        unsafe { Buffer::new(address, elements, element, Arc::new(())) }
    }

    #[test]
    fn a_shard_lies_in_its_place_or_outside() {
        let call = Call { what: "weights of block", index: 3 };
        let full = at(4096, 64, ElementType::F32);
        let check = |shard: usize| check_parts(call, (1, 4), &at(shard, 16, ElementType::F32), &full);
        assert_eq!(check(4096 + 64).unwrap(), 64);
        assert_eq!(check(4096 + 256).unwrap(), 64);
        assert_eq!(check(4096 - 64).unwrap(), 64);
        for inside in [4096 - 60, 4096, 4096 + 60, 4096 + 128, 4096 + 252] {
            let error = check(inside).unwrap_err();
            assert_eq!(error.what(), "cannot share out weights of block 3");
            assert!(error.causes()[0].contains("lies across"), "{error}");
        }
        assert!(check(4096 + 66).unwrap_err().causes()[0].ends_with("is not aligned"));
    }

    #[test]
    fn full_is_the_shards_side_by_side() {
        let call = Call { what: "weights of block", index: 3 };
        let shard = at(64, 16, ElementType::F32);
        for full in
            [at(4096, 63, ElementType::F32), at(4096, 16, ElementType::F32), at(4096, 64, ElementType::Bf16)]
        {
            let error = check_parts(call, (1, 4), &shard, &full).unwrap_err();
            assert!(error.causes()[0].ends_with("4 ranks need 4 times the shard"), "{error}");
        }
    }
}
