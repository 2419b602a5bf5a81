//! Operations of a group of ranks as values, and the names of its calls.

use std::any::Any;
use std::fmt;

use super::Collective;
use super::named_values::named_values;
use crate::runtime::buffer::Buffer;

named_values! {
    /// Kinds of calls between ranks.
    pub enum Op {
        /// Sum, to all ranks.
        AllReduce = "all-reduce",
        /// Sum, a part to each rank.
        ReduceScatter = "reduce-scatter",
        /// Parts of all ranks, to all ranks.
        AllGather = "all-gather",
        /// Data of one rank, to all ranks.
        Broadcast = "broadcast",
        /// A meeting without data.
        Barrier = "barrier",
        /// New groups of ranks.
        Split = "split",
        /// Message to one other rank: the sender's side.
        Send = "send",
        /// Message to one other rank: the receiver's side.
        Recv = "recv",
        /// Sum over several groups, a part to each rank.
        ReduceScatterAcross = "reduce-scatter-across",
        /// A sum that may run in parallel with computation.
        Reduction = "reduction",
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An operation with its memory, for [`Collective::call`].
#[derive(Debug, Clone, Copy)]
pub enum Operation<'a> {
    /// Sum that is complete on return; on a GPU, in the order of its compute stream.
    Reduce(Reduction<'a>),
    /// Operation of [`Collective::start_reduction`].
    StartReduction(Reduction<'a>),
    /// Operation of [`Collective::start_all_gathers`].
    StartAllGathers(&'a [Gather<'a>]),
    /// Operation of [`Collective::broadcast`].
    Broadcast {
        /// Rank whose data is copied.
        root: usize,
        /// Data of the root, or its destination.
        buffer: &'a Buffer,
    },
    /// Operation of [`Collective::send`].
    Send {
        /// Rank that receives the message.
        to: usize,
        /// Data to send.
        buffer: &'a Buffer,
    },
    /// Operation of [`Collective::recv`].
    Recv {
        /// Rank that sends the message.
        from: usize,
        /// Destination of the data.
        buffer: &'a Buffer,
    },
    /// Operation of [`Collective::barrier`].
    Barrier,
}

impl<'a> Operation<'a> {
    /// Kind of the operation.
    pub fn op(self) -> Op {
        match self {
            Operation::Reduce(Reduction::AllReduce(_)) => Op::AllReduce,
            Operation::Reduce(Reduction::ReduceScatter { replicas: None, .. }) => Op::ReduceScatter,
            Operation::Reduce(Reduction::ReduceScatter { .. }) => Op::ReduceScatterAcross,
            Operation::StartReduction(_) => Op::Reduction,
            Operation::StartAllGathers(_) => Op::AllGather,
            Operation::Broadcast { .. } => Op::Broadcast,
            Operation::Send { .. } => Op::Send,
            Operation::Recv { .. } => Op::Recv,
            Operation::Barrier => Op::Barrier,
        }
    }

    /// Sum of the operation, if it is one.
    pub(super) fn reduction(self) -> Option<Reduction<'a>> {
        match self {
            Operation::Reduce(reduction) | Operation::StartReduction(reduction) => Some(reduction),
            _ => None,
        }
    }
}

/// A gather of one memory.
#[derive(Debug, Clone, Copy)]
pub struct Gather<'a> {
    /// Data of this rank.
    pub shard: &'a Buffer,
    /// Destination of the data of all ranks.
    pub full: &'a Buffer,
}

impl Gather<'_> {
    /// Bytes of all full data of a call.
    pub(super) fn bytes(gathers: &[Self]) -> usize {
        gathers.iter().map(|gather| gather.full.bytes()).sum()
    }
}

/// A sum over ranks.
#[derive(Debug, Clone, Copy)]
pub enum Reduction<'a> {
    /// Sum of [`Collective::all_reduce`], for all ranks.
    AllReduce(&'a Buffer),
    /// Sum of [`Collective::reduce_scatter`].
    ReduceScatter {
        /// Data to sum.
        full: &'a Buffer,
        /// Destination of this rank's part of the sum; it may be inside `full`.
        shard: &'a Buffer,
        /// Ranks with the same shard in other groups, over which the shards are summed too.
        /// In-process and over MPI the order of additions is ascending over all ranks, as for one
        /// rank. NCCL sums inside the groups first, `(x0 + x1) + (x2 + x3)`, and chooses the order
        /// in each, so there hsdp differs from one rank by the rounding of f32 sums.
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

    /// The other group that sums.
    pub(super) fn replicas(self) -> Option<&'a dyn Collective> {
        match self {
            Reduction::AllReduce(_) => None,
            Reduction::ReduceScatter { replicas, .. } => replicas,
        }
    }
}

/// The innermost communicator of `group`, if it is of this backend, for sums across groups.
pub(super) fn backend<B: Collective>(mut group: &dyn Collective) -> Option<&B> {
    while let Some(inner) = group.inner() {
        group = inner;
    }
    (group as &dyn Any).downcast_ref()
}
