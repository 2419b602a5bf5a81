//! The axes of a device mesh, and the numbering of ranks along them.

use crate::error::{Error, Result};

/// The axes of a device mesh, from the slowest to the fastest: neighbouring ranks are neighbours
/// along the last axis that has more than one rank.
///
/// The current strategies use [`MeshAxis::Data`] and [`MeshAxis::Shard`]. The other axes have one
/// rank each, and [`super::DeviceMesh::new`] refuses more. The order is that of Megatron-LM: the
/// axis with the most communication is the fastest, so that it stays within a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MeshAxis {
    /// Stages of the model, each of which holds some of its layers (pipeline parallelism).
    Pipeline,
    /// Replicas: copies of the same shards with different rows (DDP's ranks, hsdp's groups).
    Data,
    /// Ranks that shard one copy and get different rows (ZeRO, FSDP).
    Shard,
    /// Parts of one sequence (context parallelism).
    Context,
    /// Parts of one matrix product (tensor parallelism).
    Tensor,
}

impl MeshAxis {
    /// All axes, the slowest first.
    pub const ALL: [MeshAxis; 5] =
        [MeshAxis::Pipeline, MeshAxis::Data, MeshAxis::Shard, MeshAxis::Context, MeshAxis::Tensor];

    /// Returns the name of the axis in messages, such as `tensor`.
    pub fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// Number of ranks along each axis: a row of the strategy table for one number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeshShape([usize; MeshAxis::ALL.len()]);

impl MeshShape {
    /// A mesh of one rank.
    pub const ONE: MeshShape = MeshShape([1; MeshAxis::ALL.len()]);

    /// Returns the same shape with `size` ranks along `axis`.
    #[must_use]
    pub fn with(mut self, axis: MeshAxis, size: usize) -> Self {
        self.0[axis as usize] = size;
        self
    }

    /// Returns the number of ranks along `axis`.
    pub fn size(self, axis: MeshAxis) -> usize {
        self.0[axis as usize]
    }

    /// Returns the number of ranks of the whole mesh.
    pub fn ranks(self) -> usize {
        self.0.iter().product()
    }

    /// Returns the difference of the rank numbers of two neighbours along `axis`.
    pub fn stride(self, axis: MeshAxis) -> usize {
        self.0[axis as usize + 1..].iter().product()
    }

    /// Returns the coordinate of `rank` of the whole mesh along `axis`.
    pub(crate) fn coordinate(self, rank: usize, axis: MeshAxis) -> usize {
        rank / self.stride(axis) % self.size(axis)
    }

    /// Returns the first rank of the line along `axis` that contains `rank`, the same for all ranks
    /// of that line only.
    pub(super) fn line(self, rank: usize, axis: MeshAxis) -> usize {
        rank - self.coordinate(rank, axis) * self.stride(axis)
    }

    /// Returns the number of ranks that get different rows: those along the data and shard axes.
    pub(crate) fn data_size(self) -> usize {
        self.size(MeshAxis::Data) * self.size(MeshAxis::Shard)
    }

    /// Returns the index of `rank` among those that get different rows, below
    /// [`MeshShape::data_size`]. Ranks that differ along other axes alone have the same index, and
    /// get the same rows.
    pub(crate) fn data_rank(self, rank: usize) -> usize {
        self.coordinate(rank, MeshAxis::Data) * self.size(MeshAxis::Shard)
            + self.coordinate(rank, MeshAxis::Shard)
    }

    /// Refuses shapes that no strategy supports.
    ///
    /// # Errors
    /// An internal error if the mesh does not have `ranks` ranks, or has several along an axis that
    /// no strategy uses.
    pub(super) fn check(self, ranks: usize) -> Result<()> {
        let fault = |why: String| Err(Error::internal("cannot make the device mesh").because(why));
        if self.ranks() != ranks {
            return fault(format!("the product of its axes is {}; the run has {ranks} ranks", self.ranks()));
        }
        let unused = [MeshAxis::Pipeline, MeshAxis::Context, MeshAxis::Tensor];
        match unused.into_iter().find(|axis| self.size(*axis) != 1) {
            Some(axis) => fault(format!(
                "its {} axis has {} ranks; only the data and shard axes may have more than one",
                axis.name(),
                self.size(axis)
            )),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every axis with more than one rank: no two ranks have the same coordinates, and the last
    /// axis is the fastest.
    #[test]
    fn ranks_are_numbered_along_the_axes() {
        let sizes = [2, 3, 4, 2, 2];
        let shape = MeshAxis::ALL.into_iter().zip(sizes).fold(MeshShape::ONE, |s, (axis, n)| s.with(axis, n));
        assert_eq!(shape.ranks(), 96);
        for rank in 0..shape.ranks() {
            let at = MeshAxis::ALL.map(|axis| shape.coordinate(rank, axis));
            let back = at.iter().zip(sizes).fold(0, |rank, (at, size)| rank * size + at);
            assert_eq!(back, rank);
            for (axis, size) in MeshAxis::ALL.into_iter().zip(sizes) {
                let line: Vec<usize> = (0..shape.ranks())
                    .filter(|other| shape.line(*other, axis) == shape.line(rank, axis))
                    .collect();
                assert_eq!(line.len(), size);
                let others = |other: usize| {
                    MeshAxis::ALL
                        .into_iter()
                        .filter(move |one| *one != axis)
                        .map(move |one| shape.coordinate(other, one))
                };
                assert!(line.iter().all(|other| others(*other).eq(others(rank))), "{rank} along {axis:?}");
            }
            assert_eq!(shape.data_rank(rank), at[1] * 4 + at[2]);
        }
        assert_eq!(shape.data_size(), 12);
    }

    /// The layout of hsdp: groups of neighbouring ranks shard one copy.
    #[test]
    fn shard_groups_are_neighbours() {
        let shape = MeshShape::ONE.with(MeshAxis::Data, 2).with(MeshAxis::Shard, 3);
        let along = |axis| (0..6).map(|rank| shape.coordinate(rank, axis)).collect::<Vec<_>>();
        assert_eq!(along(MeshAxis::Shard), [0, 1, 2, 0, 1, 2]);
        assert_eq!(along(MeshAxis::Data), [0, 0, 0, 1, 1, 1]);
        assert_eq!((0..6).map(|rank| shape.data_rank(rank)).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
        let lines = |axis| (0..6).map(|rank| shape.line(rank, axis)).collect::<Vec<_>>();
        assert_eq!(lines(MeshAxis::Shard), [0, 0, 0, 3, 3, 3]);
        assert_eq!(lines(MeshAxis::Data), [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn axes_without_a_strategy_are_refused() {
        let shape = MeshShape::ONE.with(MeshAxis::Data, 2);
        assert!(shape.check(2).is_ok());
        let why = |shape: MeshShape, ranks| shape.check(ranks).unwrap_err().causes()[0].clone();
        assert_eq!(why(shape, 3), "the product of its axes is 2; the run has 3 ranks");
        for axis in [MeshAxis::Pipeline, MeshAxis::Context, MeshAxis::Tensor] {
            let error = why(shape.with(axis, 2), 4);
            assert!(error.starts_with(&format!("its {} axis has 2 ranks; only", axis.name())), "{error}");
        }
    }
}
