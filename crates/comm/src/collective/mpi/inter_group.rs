//! Sums over the ranks of several groups that share the same data (HSDP), in ascending order of all
//! ranks, as in the in-process backend: 2 groups of 2 give the bits of one rank that adds 4
//! micro-batches.
//!
//! A rank collects its part of its group's data, as in a reduce-scatter. The sums then pass from
//! group to group: each replica (the rank with the same part in another group) adds its group's
//! pieces to the received ones and sends them on; the last one rounds them and sends them to all.
//! The traffic equals a ring's, but the groups add one after the other, in a pipeline of pieces.
//! Sums of bf16 are sent in f32, in which they are added.

use super::tags::MessageKind;
use super::{MpiCommunicator, PIECE_BYTES};
use crate::collective::buffer_checks::{check_host, check_shard, check_sum};
use crate::collective::call_record::CallRecord;
use crate::collective::{Call, Collective, Op};
use crate::error::Result;
use crate::runtime::buffer::{Buffer, ElementType};
use crate::runtime::rank_sum;

impl MpiCommunicator {
    pub(super) fn across(
        &self,
        call: Call,
        replicas: &MpiCommunicator,
        full: &Buffer,
        shard: &Buffer,
    ) -> Result<()> {
        check_sum(call, full)?;
        check_shard(call, shard, full, self.size())?;
        check_host(call, full)?;
        let record = self.record(Op::ReduceScatter, call).moving(full.element(), full.elements());
        self.agree(&record)?;
        let record = replicas.record(Op::AllReduce, call).moving(shard.element(), shard.elements());
        replicas.agree(&record)?;
        let each = PIECE_BYTES / full.element().bytes();
        for begin in (0..shard.elements()).step_by(each) {
            let piece = begin..(begin + each).min(shard.elements());
            self.across_piece(&record, replicas, full, shard, piece)?;
        }
        let last = replicas.size() - 1;
        let mut transfer = replicas.transfer(MessageKind::Data, vec![shard.clone()], Vec::new());
        if replicas.rank == last {
            for peer in replicas.peers() {
                transfer.send(shard.address(), shard.bytes(), peer)?;
            }
        } else {
            transfer.receive(shard.address(), shard.bytes(), last)?;
        }
        transfer.finish(|silent, waited| replicas.late(&record, silent, waited))?;
        self.count(Op::ReduceScatter, full.bytes(), false);
        replicas.count(Op::AllReduce, shard.bytes(), false);
        Ok(())
    }

    /// Sums one piece of the shard, its elements `piece`: adds this group's ranks to the groups
    /// before.
    fn across_piece(
        &self,
        record: &CallRecord,
        replicas: &MpiCommunicator,
        full: &Buffer,
        shard: &Buffer,
        piece: std::ops::Range<usize>,
    ) -> Result<()> {
        let (width, wide) = (full.element().bytes(), sum_bytes(full.element()));
        let (bytes, slot) = (piece.len() * width, (piece.len() * width).next_multiple_of(8));
        // One slot per rank of the group, then the sums.
        let words = (self.size() * slot + piece.len() * wide).div_ceil(8);
        let memory = vec![full.clone(), shard.clone()];
        let mut transfer = self.transfer(MessageKind::Data, memory, vec![0_u64; words]);
        let base = transfer.scratch();
        let at = |rank: usize| full.address() + rank * shard.bytes() + piece.start * width;
        for peer in self.peers() {
            transfer.receive(base + peer * slot, bytes, peer)?;
        }
        for peer in self.peers() {
            transfer.send(at(peer), bytes, peer)?;
        }
        let scratch = transfer.finish(|silent, waited| self.late(record, silent, waited))?;

        let pass_on = |scratch, to: Option<usize>, from: Option<usize>| -> Result<Vec<u64>> {
            let mut transfer = replicas.transfer(MessageKind::Data, Vec::new(), scratch);
            let sums = transfer.scratch() + self.size() * slot;
            from.map_or(Ok(()), |peer| transfer.receive(sums, piece.len() * wide, peer))?;
            to.map_or(Ok(()), |peer| transfer.send(sums, piece.len() * wide, peer))?;
            transfer.finish(|silent, waited| replicas.late(record, silent, waited))
        };
        let before = replicas.rank.checked_sub(1);
        let after = Some(replicas.rank + 1).filter(|rank| *rank < replicas.size());
        let mut scratch = pass_on(scratch, None, before)?;
        let base = scratch.as_mut_ptr() as usize;
        let address_of = |rank| if rank == self.rank { at(rank) } else { base + rank * slot };
        let pieces: Vec<usize> = (0..self.size()).map(address_of).collect();
        let sums = base + self.size() * slot;
        // SAFETY: slots and sums are disjoint in the scratch, aligned to 8; no message is pending.
        unsafe { rank_sum::go_on(full.element(), &pieces, piece.len(), sums, before.is_none())? };
        if after.is_none() {
            let to = shard.address() + piece.start * width;
            // SAFETY: as above; the shard may be inside `full`, whose piece was added.
            unsafe { rank_sum::rounded(full.element(), sums, piece.len(), to)? };
            return Ok(());
        }
        pass_on(scratch, after, None).map(drop)
    }
}

/// Size of the sum of an element in bytes.
fn sum_bytes(element: ElementType) -> usize {
    match element {
        ElementType::Bf16 => 4,
        other => other.bytes(),
    }
}
