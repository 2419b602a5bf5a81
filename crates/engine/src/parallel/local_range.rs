//! The part of a whole tensor that a rank computes with, and its positions there.

use std::ops::Range;

use crate::error::{Error, Result};

/// The part of a tensor that a rank computes with: a range of each dimension. Derived from the
/// tensor's placement by [`super::ParamDesc::local_range`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalRange {
    /// The shape of the whole tensor.
    global: Vec<usize>,
    /// The range of each dimension.
    ranges: Vec<Range<usize>>,
}

impl LocalRange {
    pub(super) fn new(global: Vec<usize>, ranges: Vec<Range<usize>>) -> Self {
        LocalRange { global, ranges }
    }

    /// Returns the shape of the part.
    pub fn shape(&self) -> Vec<usize> {
        self.ranges.iter().map(Range::len).collect()
    }

    /// Returns the number of elements of the part.
    pub fn elements(&self) -> usize {
        self.ranges.iter().map(Range::len).product()
    }

    fn is_whole(&self) -> bool {
        self.ranges.iter().zip(&self.global).all(|(range, len)| range.len() == *len)
    }

    /// Returns the shape of the whole tensor, for uses that need all of it on this rank.
    ///
    /// # Errors
    /// Internal: the rank has only a part.
    pub fn whole_shape(&self) -> Result<&[usize]> {
        if self.is_whole() {
            return Ok(&self.global);
        }
        let why = format!("this rank has {:?} of shape {:?}", self.ranges, self.global);
        Err(Error::internal("a part of a tensor is used as the whole").because(why))
    }

    /// Returns the elements `part` of this rank's part as ranges of the whole tensor, in order.
    /// Each range is contiguous in both.
    fn pieces(&self, mut part: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        std::iter::from_fn(move || {
            (!part.is_empty()).then(|| {
                let run = self.contiguous(part.start);
                let len = run.len().min(part.len());
                part.start += len;
                run.start..run.start + len
            })
        })
    }

    /// Returns the position of element `at` of the part in the whole tensor, up to the end of the
    /// run that is contiguous in both.
    fn contiguous(&self, at: usize) -> Range<usize> {
        let (mut start, mut stride, mut rest) = (0, 1, at);
        let (mut run, mut faster_are_whole) = (1, true);
        for (range, len) in self.ranges.iter().zip(&self.global).rev() {
            start += (range.start + rest % range.len()) * stride;
            rest /= range.len();
            stride *= len;
            if faster_are_whole {
                run *= range.len();
                faster_are_whole = range.len() == *len;
            }
        }
        start..start + run - at % run
    }

    /// Fills `out` with the elements of the part from `start` on. Calls `read` for each piece that
    /// is contiguous in the whole tensor, with the position of the piece there.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn read<T>(
        &self,
        start: usize,
        mut out: &mut [T],
        mut read: impl FnMut(usize, &mut [T]) -> Result<()>,
    ) -> Result<()> {
        for piece in self.pieces(start..start + out.len()) {
            let (now, rest) = out.split_at_mut(piece.len());
            read(piece.start, now)?;
            out = rest;
        }
        Ok(())
    }

    /// Returns the elements `part` of this rank's part, given the `whole` tensor.
    pub fn take<T: Copy>(&self, whole: &[T], part: Range<usize>) -> Vec<T> {
        let mut own = Vec::with_capacity(part.len());
        self.pieces(part).for_each(|piece| own.extend_from_slice(&whole[piece]));
        own
    }

    /// Fills the part `out` by `fill`, which writes the whole tensor.
    ///
    /// # Errors
    /// Those of `fill`.
    pub fn fill_from_whole<T: Copy + Default>(
        &self,
        out: &mut [T],
        fill: impl FnOnce(&mut [T]) -> Result<()>,
    ) -> Result<()> {
        if self.is_whole() {
            return fill(out);
        }
        let mut whole = vec![T::default(); self.global.iter().product()];
        fill(&mut whole)?;
        out.copy_from_slice(&self.take(&whole, 0..self.elements()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_read_in_the_runs_that_are_contiguous_in_the_whole() -> Result<()> {
        let runs = |ranges: [Range<usize>; 3]| {
            let part = LocalRange::new(vec![4, 2, 6], ranges.into());
            part.pieces(0..part.elements()).map(|run| [run.start, run.end]).collect::<Vec<_>>()
        };
        assert_eq!(runs([0..4, 0..2, 0..6]), [[0, 48]], "the whole is one run");
        assert_eq!(runs([2..4, 0..2, 0..6]), [[24, 48]], "so is a part of the slowest dimension");
        assert_eq!(runs([0..4, 1..2, 0..6]), [[6, 12], [18, 24], [30, 36], [42, 48]]);
        assert_eq!(runs([1..2, 0..2, 3..6]), [[15, 18], [21, 24]]);
        let part = LocalRange::new(vec![4, 6], vec![0..4, 3..6]);
        let mut out = [0; 7];
        part.read(2, &mut out, |at, piece| {
            piece.iter_mut().enumerate().for_each(|(i, value)| *value = at + i);
            Ok(())
        })?;
        assert_eq!(out, [5, 9, 10, 11, 15, 16, 17]);
        assert_eq!(part.take(&(0..24).collect::<Vec<usize>>(), 2..9), out);
        Ok(())
    }

    #[test]
    fn only_the_whole_is_used_as_the_whole() -> Result<()> {
        let count = |values: &mut [u8]| {
            values.iter_mut().zip(0..).for_each(|(value, i)| *value = i);
            Ok(())
        };
        let [whole, part] = [0..4, 2..4].map(|rows| LocalRange::new(vec![4, 2], vec![rows, 0..2]));
        assert_eq!(whole.whole_shape()?, [4, 2]);
        let error = part.whole_shape().expect_err("a part");
        assert_eq!(error.causes(), ["this rank has [2..4, 0..2] of shape [4, 2]"]);
        let (mut all, mut half) = ([0; 8], [0; 4]);
        whole.fill_from_whole(&mut all, count)?;
        part.fill_from_whole(&mut half, count)?;
        assert_eq!((all, half), ([0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7]));
        Ok(())
    }
}
