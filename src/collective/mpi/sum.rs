//! Sums of the pieces that ranks send, in ascending order of ranks: `((x0 + x1) + x2) + …`, the order of the
//! in-process backend, so both give the same bits. bf16 is added up in f32 and rounded once.

use half::bf16;

use crate::collective::Element;
use crate::error::{Error, Result};

/// Replaces `out` by the sum of `pieces`, addresses of `elements` elements each; one of them may be `out` itself.
///
/// # Errors
/// An internal error for bytes, which have no sum.
///
/// # Safety
/// All addresses are aligned for `element`, valid for `elements` and, but for `out` among `pieces`, do not overlap.
pub(super) unsafe fn ascending(
    element: Element,
    pieces: &[usize],
    elements: usize,
    out: usize,
) -> Result<()> {
    // SAFETY: by this function's contract.
    unsafe {
        match element {
            Element::F32 => add::<f32, f32>(pieces, elements, out, |x| x, |x| x),
            Element::F64 => add::<f64, f64>(pieces, elements, out, |x| x, |x| x),
            Element::Bf16 => add::<bf16, f32>(pieces, elements, out, bf16::to_f32, bf16::from_f32),
            Element::U8 => return Err(Error::internal("bytes are not added up")),
        }
    }
    Ok(())
}

/// Elements that are added at a time: their sums stay in the first-level cache.
const TILE: usize = 1024;

/// # Safety
/// As [`ascending`], for elements of type `T`.
unsafe fn add<T: Copy, S: Copy + Default + std::ops::AddAssign>(
    pieces: &[usize],
    elements: usize,
    out: usize,
    widen: impl Fn(T) -> S,
    narrow: impl Fn(S) -> T,
) {
    let mut sums = [S::default(); TILE];
    for begin in (0..elements).step_by(TILE) {
        let tile = TILE.min(elements - begin);
        for (rank, piece) in pieces.iter().enumerate() {
            // SAFETY: `begin + tile <= elements`; `out`, which a piece may be, is not written before this tile is summed.
            let piece = unsafe { std::slice::from_raw_parts((*piece as *const T).add(begin), tile) };
            // The first is copied, not added to zero: -0.0 stays.
            let each = sums.iter_mut().zip(piece);
            if rank == 0 {
                each.for_each(|(sum, x)| *sum = widen(*x));
            } else {
                each.for_each(|(sum, x)| *sum += widen(*x));
            }
        }
        // SAFETY: as above, and no slice of a piece is alive.
        let out = unsafe { std::slice::from_raw_parts_mut((out as *mut T).add(begin), tile) };
        out.iter_mut().zip(&sums).for_each(|(x, sum)| *x = narrow(*sum));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_matters_and_is_ascending() {
        let pieces: [Vec<f32>; 3] = [vec![1e8; 1500], vec![1.0; 1500], vec![-1e8; 1500]];
        let addresses: Vec<usize> = pieces.iter().map(|piece| piece.as_ptr() as usize).collect();
        let mut out = vec![7.0_f32; 1500];
        // SAFETY: all are vectors of 1500 f32.
        unsafe { ascending(Element::F32, &addresses, 1500, out.as_mut_ptr() as usize).unwrap() };
        // (1e8 + 1) is 1e8 in f32; any other order keeps the 1.
        assert_eq!(out, vec![0.0; 1500]);
    }

    #[test]
    fn bf16_is_rounded_once() {
        let pieces: Vec<Vec<bf16>> =
            [256.0, 1.0, 1.0].map(|x| vec![bf16::from_f32(x); 3]).into_iter().collect();
        let addresses: Vec<usize> = pieces.iter().map(|piece| piece.as_ptr() as usize).collect();
        let mut out = [bf16::ZERO; 3];
        // SAFETY: all are 3 bf16.
        unsafe { ascending(Element::Bf16, &addresses, 3, out.as_mut_ptr() as usize).unwrap() };
        // Rounded after each addition it would stay at 256.
        assert_eq!(out, [bf16::from_f32(258.0); 3]);
        // SAFETY: no element is touched.
        assert!(unsafe { ascending(Element::U8, &[], 0, 0) }.is_err());
    }
}
