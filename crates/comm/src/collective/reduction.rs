//! A sum over ranks as a value: what [`Collective::start_reduction`] starts.

use super::{Call, Collective};
use crate::error::Result;
use crate::runtime::buffer::Buffer;

/// A sum over ranks that may go on beside computation.
#[derive(Debug, Clone, Copy)]
pub enum Reduction<'a> {
    /// What [`Collective::all_reduce`] sums, to all ranks.
    AllReduce(&'a Buffer),
    /// What [`Collective::reduce_scatter`] sums, and with replicas [`Collective::reduce_scatter_across`].
    ReduceScatter {
        /// What is summed.
        full: &'a Buffer,
        /// Where this rank's part of the sum appears; it may lie at its place in `full`.
        shard: &'a Buffer,
        /// The ranks that hold the same shard of other groups.
        replicas: Option<&'a dyn Collective>,
    },
}

impl<'a> Reduction<'a> {
    /// The memory that is summed.
    pub(super) fn full(self) -> &'a Buffer {
        match self {
            Reduction::AllReduce(buffer) | Reduction::ReduceScatter { full: buffer, .. } => buffer,
        }
    }

    /// The memory in which the sum appears.
    pub(super) fn sum(self) -> &'a Buffer {
        match self {
            Reduction::AllReduce(buffer) | Reduction::ReduceScatter { shard: buffer, .. } => buffer,
        }
    }

    /// Makes the call that is done on return.
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
