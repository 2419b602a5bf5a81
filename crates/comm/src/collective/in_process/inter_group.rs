//! Sums over the ranks of several groups that share the same data (HSDP), in ascending order of all
//! ranks of the world: 2 groups of 2 give the bits of one rank that adds 4 micro-batches.
//!
//! A rank posts its full data in its group. Then it posts all full data of its group to its
//! replicas (the ranks with the same shard in other groups), so that each has the full data of
//! every rank. Each replica sums its part of the shard and copies the others' parts. It returns
//! after its replicas, which read only its shard's range in every rank's data, and then its group,
//! each rank of which has waited for its own replicas: then all have finished reading.

use super::InProcess;
use super::partition::{check_parts, check_sum};
use super::pending_calls::{CallFingerprint, CallId, CallState, Payload};
use super::shared::ReadGuard;
use crate::collective::{Call, Op};
use crate::error::{Error, Result};
use crate::runtime::buffer::Buffer;

/// Buffers of the replicas.
struct KnownBuffers {
    /// Full data of all ranks, ascending.
    fulls: Vec<Buffer>,
    /// Shards of the replicas.
    shards: Vec<Buffer>,
}

impl InProcess {
    pub(super) fn across(
        &self,
        call: Call,
        replicas: &InProcess,
        full: &Buffer,
        shard: &Buffer,
    ) -> Result<()> {
        check_sum(call, full)?;
        let range = check_parts(call, (self.member, self.size), shard, full)?;
        if !std::ptr::eq(self.shared(), replicas.shared())
            || self.rank_handle.rank != replicas.rank_handle.rank
        {
            return Err(Error::internal("the replicas' end is another rank's")
                .because(format!("{replicas:?}; this end is {self:?}")));
        }
        let print = |memory: &Buffer, root| CallFingerprint {
            op: Op::ReduceScatterAcross,
            call,
            data: Some((memory.element(), memory.elements())),
            root: Some(root),
        };
        let in_group = print(full, replicas.member);
        let inner = self.post(Some(Op::ReduceScatter), in_group, Payload::Memory(full.clone()))?;
        let posted = self.posted(inner)?;
        let among_replicas = print(shard, self.member);
        let outer =
            replicas.post(Some(Op::AllReduce), among_replicas, Payload::Across(posted, shard.clone()))?;
        let (known, reading) = replicas.known(outer)?;
        replicas.sum_and_share(outer, shard, range, &known.fulls, &known.shards, reading)?;
        self.reach(inner, CallState::Summed);
        self.all(inner, CallState::Summed)?.leave(inner);
        Ok(())
    }

    /// Returns the memory of each member, with its rank in the world.
    fn posted(&self, call_id: CallId) -> Result<Vec<(usize, Buffer)>> {
        let mut state = self.all(call_id, CallState::Posted)?;
        let memories = state.entry(call_id).memories();
        Ok(state.groups[self.group].ranks.iter().copied().zip(memories).collect())
    }

    /// Returns the memory that the replicas have posted, which does not change while the second
    /// value lives.
    fn known(&self, call_id: CallId) -> Result<(KnownBuffers, ReadGuard<'_>)> {
        let mut state = self.all(call_id, CallState::Posted)?;
        let (mut fulls, mut shards) = (Vec::new(), Vec::new());
        for payload in &state.entry(call_id).payloads {
            if let Payload::Across(theirs, shard) = payload {
                fulls.extend(theirs.iter().cloned());
                shards.push(shard.clone());
            }
        }
        let reading = ReadGuard::start(self.shared(), state)?;
        fulls.sort_by_key(|(rank, _)| *rank);
        let differ = fulls.windows(2).any(|pair| pair[0].0 == pair[1].0)
            || fulls.iter().any(|(_, full)| full.elements() != fulls[0].1.elements());
        if differ {
            return Err(Error::internal("the groups of the replicas overlap or differ in size").because(
                format!("their ranks: {:?}", fulls.iter().map(|(rank, _)| *rank).collect::<Vec<_>>()),
            ));
        }
        Ok((KnownBuffers { fulls: fulls.into_iter().map(|(_, full)| full).collect(), shards }, reading))
    }
}
