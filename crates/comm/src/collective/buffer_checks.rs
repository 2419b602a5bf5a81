//! Checks of the arguments of collectives.

use super::Call;
use crate::error::{Error, Result};
use crate::runtime::buffer::{Buffer, ElementType, MemoryKind};

/// Refuses a shard that is not one of `ranks` equal parts of `full`.
pub(super) fn check_shard(call: Call, shard: &Buffer, full: &Buffer, ranks: usize) -> Result<()> {
    let fits =
        full.element() == shard.element() && shard.elements().checked_mul(ranks) == Some(full.elements());
    if fits {
        return Ok(());
    }
    let what = format!("the shard of {call} does not fit its data");
    Err(Error::internal(what).because(format!("{shard:?}, {full:?}, {ranks} ranks")))
}

/// Refuses memory of a GPU, for backends that access memory with the processor.
pub(super) fn check_host(call: Call, memory: &Buffer) -> Result<()> {
    match memory.memory_kind() {
        MemoryKind::Host => Ok(()),
        MemoryKind::Gpu => Err(Error::internal(format!("cannot move {call}"))
            .because(format!("it is {memory:?}, and these ranks communicate through host memory"))),
    }
}

/// Refuses a message to this rank itself, or to a rank outside the group of `size` ranks.
pub(super) fn check_peer(call: Call, peer: usize, rank: usize, size: usize) -> Result<()> {
    if peer < size && peer != rank {
        return Ok(());
    }
    Err(Error::internal(format!("cannot pass {call} between ranks {rank} and {peer}"))
        .because(format!("a message is between two of the {size} ranks of the group")))
}

/// Refuses sums of bytes.
pub(super) fn check_sum(call: Call, memory: &Buffer) -> Result<()> {
    match memory.element() {
        ElementType::U8 => {
            Err(Error::internal(format!("cannot sum {call}"))
                .because("it is bytes, expected bf16, f32 or f64"))
        }
        ElementType::Bf16 | ElementType::F32 | ElementType::F64 => Ok(()),
    }
}
