//! Sums of the ranks' pieces in ascending order of ranks, `((x0 + x1) + x2) + …`, from raw
//! addresses. The result equals that of one rank that adds the pieces in order, bit for bit. bf16
//! is summed in f32 and rounded once.
//!
//! A tile of sums stays in the first-level cache while the pieces stream through, so no large
//! buffer is allocated and each piece is read once.

use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::slice::{from_raw_parts, from_raw_parts_mut};

use half::bf16;

use crate::error::{Error, Result};
use crate::rounding::Rounded;
use crate::runtime::buffer::ElementType;
use crate::runtime::cpu_tensor::FloatElement;

/// Replaces `out` by the sum of `pieces`, addresses of `elements` elements each; one piece may be
/// `out` itself.
///
/// # Errors
/// Internal error for bytes, which have no sum.
///
/// # Safety
/// All addresses are aligned for `element`, valid for `elements` and, except for `out` among
/// `pieces`, do not overlap `out`; no other thread writes them meanwhile, nor reads `out`.
pub unsafe fn ascending(element: ElementType, pieces: &[usize], elements: usize, out: usize) -> Result<()> {
    // SAFETY: by this function's contract.
    unsafe {
        match element {
            ElementType::F32 => add::<f32, f32>(pieces, elements, out, |x| x, |x| x),
            ElementType::F64 => add::<f64, f64>(pieces, elements, out, |x| x, |x| x),
            ElementType::Bf16 => add::<bf16, f32>(pieces, elements, out, bf16::widen, bf16::nearest),
            ElementType::U8 => return Err(Error::internal("bytes are not added up")),
        }
    }
    Ok(())
}

/// Adds `pieces` in order to the sums at `sums`, f32 for f32 and bf16, f64 for f64; `fresh` starts
/// from the first piece.
///
/// # Errors
/// Same as [`ascending`].
///
/// # Safety
/// Same as [`ascending`]; the sums overlap no piece.
pub unsafe fn go_on(
    element: ElementType,
    pieces: &[usize],
    elements: usize,
    sums: usize,
    fresh: bool,
) -> Result<()> {
    // SAFETY: by this function's contract.
    unsafe {
        match element {
            ElementType::F32 => add_to::<f32, f32>(pieces, elements, sums, fresh, |x| x),
            ElementType::F64 => add_to::<f64, f64>(pieces, elements, sums, fresh, |x| x),
            ElementType::Bf16 => add_to::<bf16, f32>(pieces, elements, sums, fresh, bf16::widen),
            ElementType::U8 => return Err(Error::internal("bytes are not added up")),
        }
    }
    Ok(())
}

/// Rounds the sums of [`go_on`] to elements at `out`.
///
/// # Errors
/// Same as [`ascending`].
///
/// # Safety
/// Same as [`go_on`]; `out` does not overlap the sums.
pub unsafe fn rounded(element: ElementType, sums: usize, elements: usize, out: usize) -> Result<()> {
    // SAFETY: by this function's contract.
    unsafe {
        match element {
            ElementType::F32 => round_to::<f32, f32>(sums, elements, out, |x| x),
            ElementType::F64 => round_to::<f64, f64>(sums, elements, out, |x| x),
            ElementType::Bf16 => round_to::<f32, bf16>(sums, elements, out, bf16::nearest),
            ElementType::U8 => return Err(Error::internal("bytes are not added up")),
        }
    }
    Ok(())
}

/// # Safety
/// Same as [`rounded`], for sums of type `S` and elements of type `T`.
unsafe fn round_to<S: Copy, T>(sums: usize, elements: usize, out: usize, narrow: impl Fn(S) -> T) {
    // SAFETY: by this function's contract.
    let (sums, out) = unsafe {
        (
            from_raw_parts(with_exposed_provenance::<S>(sums), elements),
            from_raw_parts_mut(with_exposed_provenance_mut::<T>(out), elements),
        )
    };
    out.iter_mut().zip(sums).for_each(|(x, sum)| *x = narrow(*sum));
}

/// # Safety
/// Same as [`go_on`], for elements of type `T` and sums of type `S`.
unsafe fn add_to<T: Copy, S: Copy + std::ops::AddAssign>(
    pieces: &[usize],
    elements: usize,
    sums: usize,
    fresh: bool,
    widen: impl Fn(T) -> S,
) {
    // SAFETY: by this function's contract.
    let sums = unsafe { from_raw_parts_mut(with_exposed_provenance_mut::<S>(sums), elements) };
    for (index, piece) in pieces.iter().enumerate() {
        // SAFETY: as above.
        let piece = unsafe { from_raw_parts(with_exposed_provenance::<T>(*piece), elements) };
        let each = sums.iter_mut().zip(piece);
        if fresh && index == 0 {
            each.for_each(|(sum, x)| *sum = widen(*x));
        } else {
            each.for_each(|(sum, x)| *sum += widen(*x));
        }
    }
}

/// Elements per tile: 16 KiB of f32.
const TILE: usize = 4096;

/// # Safety
/// Same as [`ascending`], for elements of type `T`.
unsafe fn add<T: Copy, S: Copy + Default + std::ops::AddAssign>(
    pieces: &[usize],
    elements: usize,
    out: usize,
    widen: impl Fn(T) -> S,
    narrow: impl Fn(S) -> T,
) {
    let mut sums = vec![S::default(); TILE.min(elements)];
    for begin in (0..elements).step_by(TILE) {
        let sums = &mut sums[..TILE.min(elements - begin)];
        for (rank, piece) in pieces.iter().enumerate() {
            // SAFETY: `begin + sums.len() <= elements`; `out`, possibly a piece, is written after
            // this slice ends.
            let piece =
                unsafe { from_raw_parts(with_exposed_provenance::<T>(*piece).add(begin), sums.len()) };
            let each = sums.iter_mut().zip(piece);
            // The first piece is copied, not added to zero, so that -0.0 stays.
            if rank == 0 {
                each.for_each(|(sum, x)| *sum = widen(*x));
            } else {
                each.for_each(|(sum, x)| *sum += widen(*x));
            }
        }
        // SAFETY: as above, and no slice of a piece is alive.
        let out = unsafe { from_raw_parts_mut(with_exposed_provenance_mut::<T>(out).add(begin), sums.len()) };
        out.iter_mut().zip(sums).for_each(|(x, sum)| *x = narrow(*sum));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_may_be_a_piece_and_lengths_need_not_fill_tiles() {
        for elements in [0, 1, TILE - 1, TILE, TILE + 1, 2 * TILE + 7] {
            let first: Vec<f64> = (0..elements).map(|i| i as f64).collect();
            let mut second = vec![0.5_f64; elements];
            let address = second.as_mut_ptr().expose_provenance();
            let pieces = [first.as_ptr().expose_provenance(), address, first.as_ptr().expose_provenance()];
            // SAFETY: all are vectors of `elements` f64.
            unsafe { ascending(ElementType::F64, &pieces, elements, address).unwrap() };
            assert!(second.iter().zip(&first).all(|(sum, x)| *sum == x + 0.5 + x), "{elements}");
        }
    }

    #[test]
    fn bytes_have_no_sum() {
        // SAFETY: no element is touched.
        assert!(unsafe { ascending(ElementType::U8, &[], 0, 0) }.is_err());
    }
}
