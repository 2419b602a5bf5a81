//! Ranks as threads of this process: sums in ascending order of ranks, directly from the peers'
//! memory.
//!
//! Each group numbers its calls. A rank *posts* its call (fingerprint and addresses) under the
//! world's one lock and waits until its peers have posted theirs; a fingerprint that differs from
//! the first one fails the world. Data then moves outside the lock, in stages. A rank enters a
//! stage after all have left the one before, so the lock orders every write before the peers' reads
//! of it:
//!
//! - *all_reduce*: each sums its own `1/size` of all buffers into its own buffer, where no other
//!   rank reads; *Summed*; each copies the others' parts; *Copied*; return. Small ones post a
//!   private copy and need one meeting.
//! - *reduce_scatter*: the same sum into the shard; *Summed*; return. Across groups: `across`.
//! - *all_gather*: posts the shard and continues; `finish` copies from each peer that has posted.
//!   All-reduce and barrier first copy all pending gathers, so a shard may be written after either,
//!   as the trait requires.
//! - *broadcast*: peers copy; *Copied*; the root returns.
//! - *send*, *recv*: the same between two ranks, as calls of a separate group: `message`.
//!
//! Posts keep the memory allocated until all have left the call. After a failure no rank starts to
//! read, and no call returns its error before all readers have finished (`ReadGuard`): then a rank
//! may write its memory again. A call on which all ranks had agreed still succeeds. A wait spins
//! briefly (not at all with more ranks than cores) and then sleeps. Ranks that all sleep, without
//! one that could wake another, fail at once. A rank that is waited for too long fails with a
//! record of every rank's last action.

mod injected_fault;
mod inter_group;
mod message;
mod partition;
mod pending_calls;
mod run;
mod shared;
mod state;

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

pub use injected_fault::{InjectedFault, InjectedFaultKind};
pub use run::run_ranks;

use super::operation::backend;
use super::{Call, Collective, Gather, Op, Operation, Phase, Reduction, Ticket, Traffic};
use crate::error::{Error, Result};
use crate::locks::locked;
use crate::runtime::buffer::Buffer;
use crate::runtime::rank_sum;
use partition::{addresses, check_aligned, check_parts, check_sum, copy, part, private};
use pending_calls::{CallFingerprint, CallId, CallState, Payload, WaitCondition};
use shared::{RankHandle, ReadGuard, SharedWorld};
use state::{WORLD, WorldState};

/// Maximum size of private copies: for them, one meeting of the ranks is cheaper than three.
const SMALL_BYTES: usize = 4096;

/// Default time that a rank waits for a peer, as in NCCL's users.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Configuration of a world of ranks, before they start.
#[derive(Debug)]
pub struct InProcessWorld {
    size: usize,
    timeout: Duration,
    faults: Vec<InjectedFault>,
}

impl InProcessWorld {
    /// A world of `size` ranks.
    pub fn new(size: usize) -> Self {
        InProcessWorld { size, timeout: TIMEOUT, faults: Vec::new() }
    }

    /// Plants a fault; call it again for more.
    #[must_use]
    pub fn with_fault(mut self, fault: InjectedFault) -> Self {
        self.faults.push(fault);
        self
    }

    /// Sets the time that a rank waits for a peer before the world fails; default 600 s.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        // Bounded to a year, so that the sum with the present time does not overflow.
        self.timeout = timeout.min(Duration::from_secs(365 * 86_400));
        self
    }

    /// Creates a communicator for each rank, in order.
    pub fn communicators(self) -> Vec<InProcess> {
        let shared = Arc::new(SharedWorld::new(self.size, self.timeout, self.faults));
        let end = |rank| {
            let rank_handle = Arc::new(RankHandle { shared: Arc::clone(&shared), rank });
            InProcess { rank_handle, group: WORLD, member: rank, size: self.size, gathers: Mutex::default() }
        };
        (0..self.size).map(end).collect()
    }
}

/// A started gather.
struct StartedGather {
    /// Ticket of its call, which may have started several.
    ticket: u64,
    call_id: CallId,
    shard: Buffer,
    full: Buffer,
    filled: bool,
}

/// One rank's communicator of a group of threads. A rank has left after all its communicators are
/// dropped.
pub struct InProcess {
    rank_handle: Arc<RankHandle>,
    group: usize,
    member: usize,
    size: usize,
    gathers: Mutex<VecDeque<StartedGather>>,
}

impl fmt::Debug for InProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}, {} in the world", self.member, self.size, self.rank_handle.rank)
    }
}

impl InProcess {
    /// This rank in the world, for any group.
    pub fn world_rank(&self) -> usize {
        self.rank_handle.rank
    }

    /// Bytes sent and calls made by this rank over all its groups.
    pub fn rank_traffic(&self) -> Traffic {
        self.shared().lock().ranks[self.rank_handle.rank].traffic
    }

    /// Same as [`Collective::split`], with the concrete type.
    ///
    /// # Errors
    /// Same as [`Collective`].
    pub fn subgroup(&self, color: usize) -> Result<InProcess> {
        let call = Call { what: "ranks", index: 0 };
        let print = CallFingerprint { op: Op::Split, call, data: None, root: None };
        let call_id = self.post(None, print, Payload::Color(color))?;
        let mut state = self.all(call_id, CallState::Posted)?;
        let (group, member) = state.entry(call_id).places[self.member];
        let size = state.groups[group].ranks.len();
        state.leave(call_id);
        let rank_handle = Arc::clone(&self.rank_handle);
        Ok(InProcess { rank_handle, group, member, size, gathers: Mutex::default() })
    }

    fn shared(&self) -> &SharedWorld {
        &self.rank_handle.shared
    }

    /// Posts a call, which counts as `op` on its data.
    fn post(&self, op: Option<Op>, print: CallFingerprint, payload: Payload) -> Result<CallId> {
        let bytes = print.data.map_or(0, |(element, elements)| elements * element.bytes());
        self.shared().post((self.rank_handle.rank, self.group, self.member), (op, bytes), print, payload)
    }

    fn post_op(
        &self,
        op: Op,
        call: Call,
        data: Option<&Buffer>,
        root: Option<usize>,
        payload: Payload,
    ) -> Result<CallId> {
        let data = data.map(|memory| (memory.element(), memory.elements()));
        self.post(Some(op), CallFingerprint { op, call, data, root }, payload)
    }

    /// Counts a call that is not posted, or whose posts are not counted. Returns an earlier
    /// failure.
    fn count(&self, op: Op, bytes: usize) -> Result<()> {
        self.shared().open(self.rank_handle.rank)?.count(self.group, self.member, op, bytes, true);
        Ok(())
    }

    fn wait(&self, call_id: CallId, condition: WaitCondition) -> Result<MutexGuard<'_, WorldState>> {
        self.shared().wait(self.rank_handle.rank, call_id, condition)
    }

    fn all(&self, call_id: CallId, stage: CallState) -> Result<MutexGuard<'_, WorldState>> {
        self.wait(call_id, WaitCondition::All(stage))
    }

    /// Waits until all members have reached `stage`; none leaves it while the returned value lives.
    fn read_all(&self, call_id: CallId, stage: CallState) -> Result<(Vec<Buffer>, ReadGuard<'_>)> {
        let mut state = self.all(call_id, stage)?;
        let memories = state.entry(call_id).memories();
        Ok((memories, ReadGuard::start(self.shared(), state)?))
    }

    fn reach(&self, call_id: CallId, stage: CallState) {
        self.shared().reach(call_id, self.member, stage);
    }

    /// The other members, from the next one, so that not all read from the same at once.
    fn others(&self) -> impl Iterator<Item = usize> {
        (1..self.size).map(|step| (self.member + step) % self.size)
    }

    fn gathers(&self) -> MutexGuard<'_, VecDeque<StartedGather>> {
        locked(&self.gathers)
    }

    /// Copies all shards of a gather into its full buffer.
    fn fill(&self, gather: &mut StartedGather) -> Result<()> {
        if gather.filled {
            return Ok(());
        }
        let (shard, full) = (&gather.shard, &gather.full);
        let at = |member: usize| full.address() + member * shard.bytes();
        if shard.address() != at(self.member) {
            // SAFETY: the shard is outside `full`, which `check_parts` checked; both belong to this
            // rank.
            unsafe { copy(shard.address(), at(self.member), shard.bytes()) };
        }
        for peer in self.others() {
            let mut state = self.wait(gather.call_id, WaitCondition::Post(peer))?;
            let Payload::Memory(theirs) = state.entry(gather.call_id).payloads[peer].clone() else {
                continue;
            };
            let reading = ReadGuard::start(self.shared(), state)?;
            // SAFETY: a posted shard is not written before this rank calls a later all-reduce or
            // barrier, which happens only after this; `full` belongs to this rank.
            unsafe { copy(theirs.address(), at(peer), theirs.bytes()) };
            drop(reading);
        }
        self.shared().lock().leave(gather.call_id);
        gather.filled = true;
        Ok(())
    }

    /// Fills pending gathers: peers may write their shards after this rank's next call.
    fn fill_all(&self) -> Result<()> {
        self.gathers().iter_mut().try_for_each(|gather| self.fill(gather))
    }

    /// Sums buffers that are posted as private copies.
    fn all_reduce_small(&self, call: Call, buffer: &Buffer) -> Result<()> {
        let call_id =
            self.post_op(Op::AllReduce, call, Some(buffer), None, Payload::Memory(private(buffer)))?;
        let mut state = self.all(call_id, CallState::Posted)?;
        let pieces = state.entry(call_id).memories();
        state.leave(call_id);
        drop(state);
        // SAFETY: no rank writes the copies, which `pieces` keeps; `buffer` belongs to this rank.
        unsafe {
            rank_sum::ascending(buffer.element(), &addresses(&pieces, 0), buffer.elements(), buffer.address())
        }
    }

    fn reduce(&self, call: Call, reduction: Reduction<'_>) -> Result<()> {
        let (full, shard, replicas) = match reduction {
            Reduction::AllReduce(buffer) => return self.sum_to_all(call, buffer),
            Reduction::ReduceScatter { full, shard, replicas } => (full, shard, replicas),
        };
        match replicas.and_then(backend::<Self>) {
            Some(other) if self.size > 1 && other.size > 1 => self.across(call, other, full, shard),
            // If one of the two groups has one rank, the other sum decides the order.
            _ => {
                self.sum_to_parts(call, full, shard)?;
                replicas.map_or(Ok(()), |replicas| replicas.all_reduce(call, shard))
            }
        }
    }

    fn sum_to_all(&self, call: Call, buffer: &Buffer) -> Result<()> {
        check_sum(call, buffer)?;
        if self.size == 1 {
            return self.count(Op::AllReduce, buffer.bytes());
        }
        self.fill_all()?;
        if buffer.bytes() <= SMALL_BYTES {
            return self.all_reduce_small(call, buffer);
        }
        let call_id =
            self.post_op(Op::AllReduce, call, Some(buffer), None, Payload::Memory(buffer.clone()))?;
        let (pieces, reading) = self.read_all(call_id, CallState::Posted)?;
        self.sum_and_share(call_id, buffer, 0, &pieces, &pieces, reading)
    }

    /// Sums this rank's part of `buffer` from `fulls`, which have the data of `buffer` from byte
    /// `offset` on, and copies the other parts from `sums`, the ranks' buffers of the same length.
    fn sum_and_share(
        &self,
        call_id: CallId,
        buffer: &Buffer,
        offset: usize,
        fulls: &[Buffer],
        sums: &[Buffer],
        reading: ReadGuard<'_>,
    ) -> Result<()> {
        let bytes = buffer.element().bytes();
        let own = part(buffer.elements(), bytes, self.size, self.member);
        let at = own.start * bytes;
        // SAFETY: all of `fulls` have the same length, which the calls' comparison or `known` has
        // checked. Until Summed only this rank reads the part `own` of this range in any of them,
        // so `buffer` may be inside this rank's own.
        unsafe {
            let pieces = addresses(fulls, offset + at);
            rank_sum::ascending(buffer.element(), &pieces, own.len(), buffer.address() + at)?;
        }
        drop(reading);
        self.reach(call_id, CallState::Summed);
        let reading = ReadGuard::start(self.shared(), self.all(call_id, CallState::Summed)?)?;
        for peer in self.others() {
            let theirs = part(buffer.elements(), bytes, self.size, peer);
            let at = theirs.start * bytes;
            // SAFETY: the peer has finished writing its part; no rank still reads this rank's copy
            // of it.
            unsafe { copy(sums[peer].address() + at, buffer.address() + at, theirs.len() * bytes) };
        }
        drop(reading);
        self.reach(call_id, CallState::Copied);
        self.all(call_id, CallState::Copied)?.leave(call_id);
        Ok(())
    }

    fn sum_to_parts(&self, call: Call, full: &Buffer, shard: &Buffer) -> Result<()> {
        check_sum(call, full)?;
        let at = check_parts(call, (self.member, self.size), shard, full)?;
        if self.size == 1 {
            if shard.address() != full.address() {
                // SAFETY: both belong to this rank and do not overlap, which `check_parts` checked.
                unsafe { copy(full.address(), shard.address(), full.bytes()) };
            }
            return self.count(Op::ReduceScatter, full.bytes());
        }
        let call_id =
            self.post_op(Op::ReduceScatter, call, Some(full), None, Payload::Memory(full.clone()))?;
        let (pieces, reading) = self.read_all(call_id, CallState::Posted)?;
        // SAFETY: all are as long as `full`; `shard` belongs to this rank, which alone reads it
        // inside `full`.
        unsafe {
            rank_sum::ascending(shard.element(), &addresses(&pieces, at), shard.elements(), shard.address())?;
        }
        drop(reading);
        self.reach(call_id, CallState::Summed);
        self.all(call_id, CallState::Summed)?.leave(call_id);
        Ok(())
    }

    /// Posts each gather by itself, so that peers compare each length, and counts one call.
    fn start_gathers(&self, call: Call, gathers: &[Gather<'_>]) -> Result<Ticket> {
        for Gather { shard, full } in gathers {
            check_parts(call, (self.member, self.size), shard, full)?;
        }
        self.count(Op::AllGather, Gather::bytes(gathers))?;
        let mut ticket = None;
        for &Gather { shard, full } in gathers {
            let data = Some((full.element(), full.elements()));
            let print = CallFingerprint { op: Op::AllGather, call, data, root: None };
            let call_id = self.post(None, print, Payload::Memory(shard.clone()))?;
            let ticket = *ticket.get_or_insert(call_id.number);
            let (shard, full) = (shard.clone(), full.clone());
            self.gathers().push_back(StartedGather { ticket, call_id, shard, full, filled: false });
        }
        ticket.map(Ticket).ok_or_else(|| Error::internal(format!("the gather of {call} has no memory")))
    }

    fn broadcast_from(&self, call: Call, root: usize, buffer: &Buffer) -> Result<()> {
        check_aligned(call, buffer)?;
        if root >= self.size {
            let what = format!("cannot broadcast {call} from rank {root}");
            return Err(Error::internal(what).because(format!("the group has {} ranks", self.size)));
        }
        if self.size == 1 {
            return self.count(Op::Broadcast, buffer.bytes());
        }
        let is_small = buffer.bytes() <= SMALL_BYTES;
        let payload = match (root == self.member, is_small) {
            (true, true) => Payload::Memory(private(buffer)),
            (true, false) => Payload::Memory(buffer.clone()),
            (false, _) => Payload::Nothing,
        };
        let call_id = self.post_op(Op::Broadcast, call, Some(buffer), Some(root), payload)?;
        if root != self.member {
            let mut state = self.wait(call_id, WaitCondition::Post(root))?;
            if let Payload::Memory(theirs) = state.entry(call_id).payloads[root].clone() {
                let reading = ReadGuard::start(self.shared(), state)?;
                // SAFETY: as long as the root's memory, which stays until all have reached Copied.
                unsafe { copy(theirs.address(), buffer.address(), buffer.bytes()) };
                drop(reading);
            }
        }
        self.reach(call_id, CallState::Copied);
        let mut state = if root == self.member && !is_small {
            self.all(call_id, CallState::Copied)?
        } else {
            self.shared().lock()
        };
        state.leave(call_id);
        Ok(())
    }

    fn meet(&self, call: Call) -> Result<()> {
        if self.size == 1 {
            return self.count(Op::Barrier, 0);
        }
        self.fill_all()?;
        let call_id = self.post_op(Op::Barrier, call, None, None, Payload::Nothing)?;
        self.all(call_id, CallState::Posted)?.leave(call_id);
        Ok(())
    }
}

impl Collective for InProcess {
    fn rank(&self) -> usize {
        self.member
    }

    fn size(&self) -> usize {
        self.size
    }

    fn call(&self, call: Call, operation: Operation<'_>) -> Result<Option<Ticket>> {
        match operation {
            Operation::Reduce(reduction) | Operation::StartReduction(reduction) => {
                self.reduce(call, reduction)
            }
            Operation::StartAllGathers(gathers) => return self.start_gathers(call, gathers).map(Some),
            Operation::Broadcast { root, buffer } => self.broadcast_from(call, root, buffer),
            Operation::Send { to, buffer } => self.send_to(call, to, buffer),
            Operation::Recv { from, buffer } => self.receive_from(call, from, buffer),
            Operation::Barrier => self.meet(call),
        }
        .map(|()| None)
    }

    fn finish(&self, ticket: Ticket) -> Result<()> {
        let mut gathers = self.gathers();
        if gathers.front().is_none_or(|oldest| oldest.ticket != ticket.0) {
            return Err(Error::internal("gathers are finished in the order in which they were started"));
        }
        while let Some(gather) = gathers.front_mut().filter(|gather| gather.ticket == ticket.0) {
            self.fill(gather)?;
            gathers.pop_front();
        }
        Ok(())
    }

    fn split(&self, color: usize) -> Result<Box<dyn Collective>> {
        Ok(Box::new(self.subgroup(color)?))
    }

    fn traffic(&self) -> Traffic {
        self.shared().lock().groups[self.group].traffic[self.member]
    }

    fn enter(&self, phase: Phase) -> Result<()> {
        self.shared().enter(self.rank_handle.rank, phase)
    }

    fn abort(&self, why: &str) {
        self.shared().abort(self.rank_handle.rank, why);
    }
}
