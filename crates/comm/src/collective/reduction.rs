//! A sum over ranks as a value, for [`Collective::start_reduction`].

use super::{Call, Collective};
use crate::error::Result;
use crate::runtime::buffer::Buffer;

/// A sum over ranks that may run in parallel with computation.
#[derive(Debug, Clone, Copy)]
pub enum Reduction<'a> {
    /// Sum of [`Collective::all_reduce`], for all ranks.
    AllReduce(&'a Buffer),
    /// Sum of [`Collective::reduce_scatter`], or with replicas of
    /// [`Collective::reduce_scatter_across`].
    ReduceScatter {
        /// Data to sum.
        full: &'a Buffer,
        /// Destination of this rank's part of the sum; it may be inside `full`.
        shard: &'a Buffer,
        /// Ranks with the same shard in other groups.
        replicas: Option<&'a dyn Collective>,
    },
}

impl<'a> Reduction<'a> {
    /// Memory to sum.
    pub(super) fn full(self) -> &'a Buffer {
        match self {
            Reduction::AllReduce(buffer) | Reduction::ReduceScatter { full: buffer, .. } => buffer,
        }
    }

    /// Memory of the sum.
    pub(super) fn sum(self) -> &'a Buffer {
        match self {
            Reduction::AllReduce(buffer) | Reduction::ReduceScatter { shard: buffer, .. } => buffer,
        }
    }

    /// Makes the call, which has finished on return.
    pub(super) fn make<C: Collective + ?Sized>(self, end: &C, call: Call) -> Result<()> {
        match self {
            Reduction::AllReduce(buffer) => end.all_reduce(call, buffer),
            Reduction::ReduceScatter { full, shard, replicas: None } => end.reduce_scatter(call, full, shard),
            Reduction::ReduceScatter { full, shard, replicas: Some(replicas) } => {
                end.reduce_scatter_across(call, replicas, full, shard)
            }
        }
    }
}
