//! Ranks on CPUs in the processes of an MPI job (clusters, cargo feature `mpi`), over host memory.
//!
//! Before each call every rank sends every other its 64-byte record (op, name, size, sequence). So
//! a call that does not match, a failed rank and a missing rank give an error that names it. Then
//! only messages between pairs move data, instead of `MPI_Allreduce`, whose order of additions
//! depends on the library and the size. Each rank receives the N pieces of its part, adds them in
//! ascending order of ranks (`rank_sum`) and, for an all-reduce, sends the sum to all: a ring's
//! traffic, and the bits of the in-process backend, also across the groups of hsdp (`across`).
//! Ranks of one process also use messages. `send` and `recv` (`message`) are calls of two ranks,
//! which only exchange their records.
//!
//! The ranks of a process are threads ([`run_ranks`]) that share MPI (`wire`). Tags address
//! messages to ranks (`tags`), so a group is a number and a list of ranks. An [`MpiCommunicator`]'s
//! calls are from one thread, `abort` from any. A process with a failed rank informs the others and
//! exits without `MPI_Finalize`, which mpirun treats as the end of the job; `MPI_Abort` would only
//! add its own text. Gathers progress while any MPI call runs (a property of MPI), and end at the
//! latest in `finish`.

mod inter_group;
mod message;
mod run;
mod tags;
mod transfer;
mod transport;

pub use run::{Stop, run_ranks};

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use self::tags::MessageKind;
use self::transfer::{Transfer, TransferPath};
use self::transport::MpiTransport;
use super::call_record::{CallRecord, MessageCounts, RECORD_BYTES, RankStatus};
use super::operation::backend;
use super::{Call, Collective, Gather, Op, Operation, Phase, Reduction, Ticket, Traffic};
use crate::collective::buffer_checks::{check_host, check_shard, check_sum};
use crate::error::{Error, ErrorCategory, Result};
use crate::locks::locked;
use crate::runtime::buffer::Buffer;
use crate::runtime::rank_sum;

/// Bytes of a part that are exchanged and added at once; bounds the scratch to one such piece per
/// rank.
const PIECE_BYTES: usize = 1 << 20;

/// Default time that a rank waits for its peers; longer than any step, evaluation or save.
pub const DEADLINE: Duration = Duration::from_secs(1800);

/// One rank's communicator of a group of ranks.
pub struct MpiCommunicator {
    member: Arc<MpiRank>,
    /// Number of the group; groups that share ranks have different numbers.
    group: u64,
    rank: usize,
    /// Ranks of the group in the world, by rank in the group.
    ranks: Arc<[usize]>,
    state: Mutex<MpiState>,
}

/// State that a rank's groups share.
struct MpiRank {
    wire: Arc<MpiTransport>,
    /// Rank in the world.
    rank: usize,
    at: Mutex<MpiPosition>,
}

/// Progress of a rank.
struct MpiPosition {
    status: RankStatus,
    /// The lowest number that none of its groups has.
    free_group: u64,
}

impl MpiRank {
    fn new(wire: &Arc<MpiTransport>, rank: usize) -> Self {
        let at = MpiPosition { status: RankStatus::default(), free_group: 1 };
        MpiRank { wire: Arc::clone(wire), rank, at: Mutex::new(at) }
    }

    fn at(&self) -> MutexGuard<'_, MpiPosition> {
        locked(&self.at)
    }

    fn status(&self) -> RankStatus {
        self.at().status.clone()
    }
}

#[derive(Default)]
struct MpiState {
    sequence: u64,
    messages: MessageCounts,
    tickets: u64,
    /// Transfers of each started call, with its ticket.
    gathers: VecDeque<(u64, Vec<Transfer>)>,
    traffic: Traffic,
}

impl MpiCommunicator {
    /// A rank's communicator of the group of all `size` ranks.
    fn world(member: &Arc<MpiRank>, size: usize) -> MpiCommunicator {
        MpiCommunicator::new(member, 0, member.rank, (0..size).collect())
    }

    fn new(member: &Arc<MpiRank>, group: u64, rank: usize, ranks: Arc<[usize]>) -> MpiCommunicator {
        MpiCommunicator { member: Arc::clone(member), group, rank, ranks, state: Mutex::default() }
    }

    fn wire(&self) -> &MpiTransport {
        &self.member.wire
    }

    /// A transfer in this group without messages yet.
    fn transfer(&self, load: MessageKind, memory: Vec<Buffer>, scratch: Vec<u64>) -> Transfer {
        let route = TransferPath { group: self.group, ranks: Arc::clone(&self.ranks), rank: self.rank, load };
        Transfer::new(&self.member.wire, route, memory, scratch)
    }

    fn state(&self) -> MutexGuard<'_, MpiState> {
        locked(&self.state)
    }

    /// The other ranks, from the next one, so that not all send to rank 0 first.
    fn peers(&self) -> impl Iterator<Item = usize> {
        let (rank, size) = (self.rank, self.ranks.len());
        (1..size).map(move |step| (rank + step) % size)
    }

    fn record(&self, op: Op, call: Call) -> CallRecord {
        let phase = self.member.at().status.phase;
        let mut state = self.state();
        state.sequence += 1;
        CallRecord::new(state.sequence - 1, op, call, phase)
    }

    /// Exchanges records with all ranks and checks that they name the same call.
    fn agree(&self, own: &CallRecord) -> Result<Vec<CallRecord>> {
        let records = self.exchange(own, || self.peers())?;
        let same = |(rank, other): (usize, &[u8; RECORD_BYTES])| {
            self.judged(own, rank, other, |other| other.key() == own.key())
        };
        records.iter().enumerate().map(same).collect()
    }

    /// Decodes the record of `rank` and checks that it `fits` this rank's.
    fn judged(
        &self,
        own: &CallRecord,
        rank: usize,
        bytes: &[u8; RECORD_BYTES],
        fits: impl Fn(&CallRecord) -> bool,
    ) -> Result<CallRecord> {
        let other = match CallRecord::decode(bytes) {
            Some(record) if fits(&record) => return Ok(record),
            Some(other) => other.to_string(),
            None => "a message that this version does not know".to_owned(),
        };
        Err(self.wire().fail(self.mismatch(own, rank, &other)))
    }

    /// Sends this rank's record to `peers` and returns theirs, by rank, with this rank's own;
    /// others are zero.
    fn exchange<I: Iterator<Item = usize>>(
        &self,
        own: &CallRecord,
        peers: impl Fn() -> I,
    ) -> Result<Vec<[u8; RECORD_BYTES]>> {
        self.wire().healthy()?;
        self.member.at().status.last = Some(own.clone());
        let size = self.ranks.len();
        let mut scratch = vec![0_u64; size * RECORD_BYTES / 8];
        for (word, bytes) in scratch[self.rank * RECORD_BYTES / 8..].iter_mut().zip(own.encode().chunks(8)) {
            *word = u64::from_ne_bytes(*bytes.first_chunk().unwrap_or(&[0; 8]));
        }
        let mut transfer = self.transfer(MessageKind::Record, Vec::new(), scratch);
        let base = transfer.scratch();
        for peer in peers() {
            transfer.receive(base + peer * RECORD_BYTES, RECORD_BYTES, peer)?;
        }
        for peer in peers() {
            transfer.send(base + self.rank * RECORD_BYTES, RECORD_BYTES, peer)?;
        }
        let scratch = transfer.finish(|silent, waited| self.late(own, silent, waited))?;
        let bytes: Vec<u8> = scratch.iter().flat_map(|word| word.to_ne_bytes()).collect();
        Ok(bytes.as_chunks().0.to_vec())
    }

    fn mismatch(&self, own: &CallRecord, rank: usize, other: &str) -> Error {
        Error::new(ErrorCategory::Transient, "ranks do not make the same call")
            .because(format!("rank {} makes {own}", self.ranks[self.rank]))
            .because(format!("rank {} makes {other}", self.ranks[rank]))
    }

    fn late(&self, own: &CallRecord, silent: &[usize], waited: Duration) -> Error {
        let silent: Vec<String> = silent.iter().map(|rank| self.ranks[*rank].to_string()).collect();
        Error::new(ErrorCategory::Transient, format!("no answer from rank {}", silent.join(", ")))
            .because(format!("waited {} s at {own}", waited.as_secs()))
    }

    /// Range of elements of `part` if `elements` are divided among the ranks as evenly as possible.
    fn part(&self, elements: usize, part: usize) -> Range<usize> {
        let size = self.ranks.len();
        elements * part / size..elements * (part + 1) / size
    }

    /// Writes the sum of this rank's part of all `full` to `out`, which may be inside `full`.
    fn sum_parts(&self, record: &CallRecord, full: &Buffer, out: &Buffer, out_address: usize) -> Result<()> {
        let width = full.element().bytes();
        let own = self.part(full.elements(), self.rank);
        let longest = full.elements().div_ceil(self.ranks.len());
        let piece = PIECE_BYTES / width;
        let cut = |part: Range<usize>, at: usize| {
            let begin = (part.start + at).min(part.end);
            begin..(begin + piece).min(part.end)
        };
        let mut scratch = vec![0_u64; self.ranks.len() * PIECE_BYTES.min(longest * width).div_ceil(8)];
        let slot = scratch.len() / self.ranks.len() * 8;
        for at in (0..longest).step_by(piece) {
            let memory = vec![full.clone(), out.clone()];
            let mut transfer = self.transfer(MessageKind::Data, memory, scratch);
            let base = transfer.scratch();
            let mine = cut(own.clone(), at);
            for peer in self.peers() {
                transfer.receive(base + peer * slot, mine.len() * width, peer)?;
            }
            for peer in self.peers() {
                let theirs = cut(self.part(full.elements(), peer), at);
                transfer.send(full.address() + theirs.start * width, theirs.len() * width, peer)?;
            }
            scratch = transfer.finish(|silent, waited| self.late(record, silent, waited))?;
            let base = scratch.as_ptr() as usize;
            let address_of = |rank| {
                if rank == self.rank { full.address() + mine.start * width } else { base + rank * slot }
            };
            let pieces: Vec<usize> = (0..self.ranks.len()).map(address_of).collect();
            let to = out_address + (mine.start - own.start) * width;
            // SAFETY: pieces are in `full` or in slots of the scratch, aligned to 8; `to` is in
            // `out`, whose length was checked; no message is pending.
            unsafe { rank_sum::ascending(full.element(), &pieces, mine.len(), to)? };
        }
        Ok(())
    }

    /// Starts to send this rank's part of `full` to all and to receive theirs.
    fn start_parts(&self, full: &Buffer) -> Result<Transfer> {
        let mut transfer = self.transfer(MessageKind::Data, vec![full.clone()], Vec::new());
        let width = full.element().bytes();
        let part_memory = |part: usize| {
            let range = self.part(full.elements(), part);
            (full.address() + range.start * width, range.len() * width)
        };
        for peer in self.peers() {
            let (address, bytes) = part_memory(peer);
            transfer.receive(address, bytes, peer)?;
        }
        let (address, bytes) = part_memory(self.rank);
        for peer in self.peers() {
            transfer.send(address, bytes, peer)?;
        }
        Ok(transfer)
    }

    fn count(&self, op: Op, bytes: usize, is_root: bool) {
        self.state().traffic.count(op, bytes, self.ranks.len(), is_root);
    }

    fn reduce(&self, call: Call, reduction: Reduction<'_>) -> Result<()> {
        let (full, shard, replicas) = match reduction {
            Reduction::AllReduce(buffer) => return self.sum_to_all(call, buffer),
            Reduction::ReduceScatter { full, shard, replicas } => (full, shard, replicas),
        };
        match replicas.and_then(backend::<Self>) {
            Some(other) if self.size() > 1 && other.size() > 1 => self.across(call, other, full, shard),
            // If one of the two groups has one rank, the other sum decides the order.
            _ => {
                self.sum_to_parts(call, full, shard)?;
                replicas.map_or(Ok(()), |replicas| replicas.all_reduce(call, shard))
            }
        }
    }

    fn sum_to_all(&self, call: Call, buffer: &Buffer) -> Result<()> {
        check_sum(call, buffer)?;
        check_host(call, buffer)?;
        let record = self.record(Op::AllReduce, call).moving(buffer.element(), buffer.elements());
        self.agree(&record)?;
        let offset = self.part(buffer.elements(), self.rank).start * buffer.element().bytes();
        self.sum_parts(&record, buffer, buffer, buffer.address() + offset)?;
        self.start_parts(buffer)?.finish(|silent, waited| self.late(&record, silent, waited))?;
        self.count(Op::AllReduce, buffer.bytes(), false);
        Ok(())
    }

    fn sum_to_parts(&self, call: Call, full: &Buffer, shard: &Buffer) -> Result<()> {
        check_sum(call, full)?;
        check_host(call, full)?;
        check_shard(call, shard, full, self.ranks.len())?;
        let record = self.record(Op::ReduceScatter, call).moving(full.element(), full.elements());
        self.agree(&record)?;
        self.sum_parts(&record, full, shard, shard.address())?;
        self.count(Op::ReduceScatter, full.bytes(), false);
        Ok(())
    }

    fn start_gathers(&self, call: Call, gathers: &[Gather<'_>]) -> Result<Ticket> {
        let transfers = gathers.iter().map(|gather| self.start_gather(call, *gather));
        let transfers = transfers.collect::<Result<_>>()?;
        self.count(Op::AllGather, Gather::bytes(gathers), false);
        let mut state = self.state();
        state.tickets += 1;
        let ticket = state.tickets;
        state.gathers.push_back((ticket, transfers));
        Ok(Ticket(ticket))
    }

    fn start_gather(&self, call: Call, Gather { shard, full }: Gather<'_>) -> Result<Transfer> {
        check_shard(call, shard, full, self.ranks.len())?;
        check_host(call, full)?;
        let record = self.record(Op::AllGather, call).moving(full.element(), full.elements());
        self.agree(&record)?;
        let target = full.address() + self.rank * shard.bytes();
        // SAFETY: `full` has space for every rank's shard, and no other code uses either memory
        // now. A shard inside `full` is copied to itself.
        unsafe { std::ptr::copy(shard.address() as *const u8, target as *mut u8, shard.bytes()) };
        self.start_parts(full)
    }

    fn broadcast_from(&self, call: Call, root: usize, buffer: &Buffer) -> Result<()> {
        if root >= self.ranks.len() {
            return Err(Error::internal(format!("rank {root} of {} broadcasts", self.ranks.len())));
        }
        check_host(call, buffer)?;
        let record = self.record(Op::Broadcast, call);
        let record = record.moving(buffer.element(), buffer.elements()).number(root);
        self.agree(&record)?;
        let mut transfer = self.transfer(MessageKind::Data, vec![buffer.clone()], Vec::new());
        if self.rank == root {
            for peer in self.peers() {
                transfer.send(buffer.address(), buffer.bytes(), peer)?;
            }
        } else {
            transfer.receive(buffer.address(), buffer.bytes(), root)?;
        }
        transfer.finish(|silent, waited| self.late(&record, silent, waited))?;
        self.count(Op::Broadcast, buffer.bytes(), self.rank == root);
        Ok(())
    }

    fn meet(&self, call: Call) -> Result<()> {
        self.agree(&self.record(Op::Barrier, call))?;
        self.count(Op::Barrier, 0, false);
        Ok(())
    }
}

impl Collective for MpiCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn call(&self, call: Call, operation: Operation<'_>) -> Result<Option<Ticket>> {
        match operation {
            Operation::Reduce(reduction) | Operation::StartReduction(reduction) => {
                self.reduce(call, reduction)
            }
            Operation::StartAllGathers(gathers) => return self.start_gathers(call, gathers).map(Some),
            Operation::Broadcast { root, buffer } => self.broadcast_from(call, root, buffer),
            Operation::Send { to: peer, buffer } | Operation::Recv { from: peer, buffer } => {
                self.message(operation.op(), call, peer, buffer)
            }
            Operation::Barrier => self.meet(call),
        }
        .map(|()| None)
    }

    fn finish(&self, ticket: Ticket) -> Result<()> {
        let first = self.state().gathers.pop_front();
        let Some((_, transfers)) = first.filter(|(first, _)| *first == ticket.0) else {
            return Err(Error::internal("gathers must finish in the order of their starts"));
        };
        for transfer in transfers {
            transfer.finish(|silent, waited| {
                let silent: Vec<String> = silent.iter().map(|rank| self.ranks[*rank].to_string()).collect();
                Error::new(ErrorCategory::Transient, format!("no data from rank {}", silent.join(", ")))
                    .because(format!("waited {} s for gather {} of this group", waited.as_secs(), ticket.0))
            })?;
        }
        Ok(())
    }

    fn split(&self, color: usize) -> Result<Box<dyn Collective>> {
        let call = Call { what: "ranks", index: 0 };
        let mut record = self.record(Op::Split, call).number(color);
        record.elements = self.member.at().free_group;
        let records = self.agree(&record)?;
        // A number that is free on all ranks of this group. Groups of other colors may have it too,
        // because they share no ranks.
        let group = records.iter().map(|record| record.elements).max().unwrap_or(record.elements);
        self.member.at().free_group = group + 1;
        self.wire().tags.check(group).map_err(|error| self.wire().fail(error))?;
        let members = || (0..records.len()).filter(|rank| records[*rank].number == records[self.rank].number);
        let rank = members().position(|rank| rank == self.rank).unwrap_or(0);
        let ranks = members().map(|rank| self.ranks[rank]).collect();
        Ok(Box::new(MpiCommunicator::new(&self.member, group, rank, ranks)))
    }

    fn traffic(&self) -> Traffic {
        self.state().traffic
    }

    fn enter(&self, phase: Phase) -> Result<()> {
        self.member.at().status.phase = Some(phase);
        self.wire().healthy()
    }

    fn abort(&self, why: &str) {
        self.wire().raise(&self.member.status().news(self.member.rank, why));
    }
}

impl std::fmt::Debug for MpiCommunicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {} over MPI", self.rank, self.ranks.len())
    }
}
