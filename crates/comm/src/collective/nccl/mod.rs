//! Ranks on GPUs, over NCCL that is loaded at run time (`library`). **Not yet run on a GPU**: tests
//! run the logic over a fake library and device, and the library's errors over the real one; the
//! rest compiles.
//!
//! Calls on GPU memory put work on the rank's streams and return. Sums and broadcasts use the
//! compute stream, which is candle's, so they are ordered with computation. Gathers use a second
//! stream, and started reductions a third one with separate communicators (`reduction`); marks
//! define the order between the three. Host memory (sums of losses, saved moments) passes through
//! the GPU in pieces and is ready on return (`staged`). [`run_ranks`] runs the ranks of a process
//! as threads, one per GPU. Communicators are non-blocking, so every wait polls (`communicator`),
//! and a thread watches the streams (`watch`). Failures end all communicators of the process
//! ([`AbortFlag`]), on threads of their own because an abort may block (`abort_threads`). Other
//! processes see NCCL's remote error, the deadline, or a message of the rendezvous session, which
//! the launcher passes to [`AbortFlag::raise`].
//!
//! Comparing every call would cost a round trip each. Instead each rank hashes its calls, and
//! compares the hash with its peers' at barriers, splits and sums of f64 (once or twice a step):
//! then the error names the first different call and the ranks. A difference that blocks NCCL
//! before that ends at the deadline, with this rank's call. Messages between two ranks are compared
//! separately, at the cost of a round trip each (`message`). NCCL chooses the order of its sums;
//! `NCCL_ALGO=Ring` makes it the same in every run. hsdp has three groups and so up to six
//! communicators a rank, whose kernels wait for peers on all streams: they must fit on the GPU at
//! once, which NCCL's channels allow. All ranks put their calls on the streams in the same order,
//! and NCCL 2.26 and newer start the kernels so (`runtime::device::set_gpu_environment`).

mod abort_threads;
mod call_log;
mod communicator;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod environment;
mod library;
mod message;
mod rank_group;
mod reduction;
mod staged;
mod watchdog;

pub use communicator::AbortFlag;
#[cfg(feature = "cuda")]
pub use cuda::Cuda;
pub use device::{CommStream, GpuStreams};
pub use environment::one_gpu_environment;
pub use library::{NcclConfig, NcclLibrary, NcclStatus, NcclVersion, RawStream, UniqueId, data_type};
use library::{NcclFunctions, RawComm};
pub use rank_group::{GroupInfo, run_on_gpus, run_ranks};

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use self::call_log::CallLog;
use self::communicator::Communicator;
use self::message::grouped;
use self::watchdog::Watch;
use super::call_record::{CallRecord, MessageCounts, RankStatus};
use super::{Call, Collective, Gather, Op, Operation, Phase, Ticket, Traffic};
use crate::collective::buffer_checks::check_shard;
use crate::error::{Error, ErrorCategory, Result};
use crate::locks::locked;
use crate::runtime::buffer::{Buffer, MemoryKind};

/// Default time that a rank waits for its peers; longer than any evaluation or save.
pub const DEADLINE: Duration = Duration::from_secs(1800);

/// Identity and deadline of a rank.
#[derive(Debug, Clone, Copy)]
pub struct NcclRankInfo {
    /// Rank 0's [`NcclLibrary::unique_id`].
    pub id: UniqueId,
    /// Number of this rank.
    pub rank: usize,
    /// Number of all ranks.
    pub size: usize,
    /// Maximum time that a call waits for other ranks.
    pub deadline: Duration,
}

/// One rank's communicator of a group of GPUs. Its calls are from one thread, that of the device's
/// compute stream.
pub struct Nccl<D: GpuStreams> {
    // Dropped in this order: the communicator is watched while it ends.
    communicator: Arc<Communicator>,
    /// Communicator of started reductions, once it is open.
    reductions: OnceLock<Arc<Communicator>>,
    member: Arc<NcclRank<D>>,
    rank: usize,
    /// Ranks of the group in the world, by rank in the group.
    ranks: Vec<usize>,
    state: Mutex<NcclState<D>>,
}

/// State that this rank's groups share.
struct NcclRank<D: GpuStreams> {
    /// Communicators of its smaller groups and of started reductions. They end with the last group:
    /// a failed rank drops its groups early, and an orderly end would wait for peers that do not
    /// know of the failure yet.
    groups: Mutex<Vec<Arc<Communicator>>>,
    watch: Watch<D>,
    device: Arc<D>,
    nccl: Arc<NcclLibrary>,
    abort_flag: Arc<AbortFlag>,
    /// Rank in the world.
    rank: usize,
    status: Mutex<RankStatus>,
}

struct NcclState<D: GpuStreams> {
    call_log: CallLog,
    messages: MessageCounts,
    tickets: u64,
    gathers: VecDeque<StartedCall<D>>,
    reductions: VecDeque<StartedCall<D>>,
    traffic: Traffic,
    scratch: Option<(usize, D::Scratch)>,
}

impl<D: GpuStreams> Default for NcclState<D> {
    fn default() -> Self {
        NcclState {
            call_log: CallLog::default(),
            messages: MessageCounts::default(),
            tickets: 0,
            gathers: VecDeque::new(),
            reductions: VecDeque::new(),
            traffic: Traffic::default(),
            scratch: None,
        }
    }
}

/// Gathers of one call or a reduction on their stream, with the memory that must live until
/// computation waits for them.
struct StartedCall<D: GpuStreams> {
    ticket: u64,
    /// None if it has finished: over host memory.
    mark: Option<D::Mark>,
    _memory: Vec<Buffer>,
}

/// Refuses data that is only partly on the GPU.
fn check_places(call: Call, shard: &Buffer, full: &Buffer) -> Result<()> {
    if shard.memory_kind() == full.memory_kind() {
        return Ok(());
    }
    let what = format!("the shard of {call} and its data are in different memory");
    Err(Error::internal(what).because(format!("{shard:?}, {full:?}")))
}

impl<D: GpuStreams> Nccl<D> {
    /// Connects to the other ranks. The ranks that are threads of this process share `abort_flag`.
    ///
    /// # Errors
    /// NCCL refuses (two ranks on one GPU, no driver, no network), or ranks are missing at the
    /// deadline.
    pub fn connect(
        library: &Arc<NcclLibrary>,
        rank_info: &NcclRankInfo,
        device: D,
        abort_flag: &Arc<AbortFlag>,
    ) -> Result<Self> {
        let NcclRankInfo { id, rank, size, deadline } = *rank_info;
        let device = Arc::new(device);
        device.bind()?;
        let communicator = Communicator::meet(library, abort_flag, &id, (rank, size), deadline)?;
        let watch = Watch::start(&device, abort_flag, rank, deadline)?;
        let (nccl, abort_flag) = (Arc::clone(library), Arc::clone(abort_flag));
        let (groups, status) = (Mutex::default(), Mutex::default());
        let member = Arc::new(NcclRank { groups, watch, device, nccl, abort_flag, rank, status });
        Ok(Nccl {
            communicator,
            reductions: OnceLock::new(),
            member,
            rank,
            ranks: (0..size).collect(),
            state: Mutex::default(),
        })
    }

    fn record(&self, op: Op, call: Call) -> CallRecord {
        let phase = locked(&self.member.status).phase;
        CallRecord::new(locked(&self.state).call_log.calls(), op, call, phase)
    }

    /// Records a call that is about to be made.
    fn log_call(&self, record: &CallRecord) {
        locked(&self.state).call_log.add(record);
        locked(&self.member.status).last = Some(record.clone());
    }

    /// Puts a call on a stream. A failure here is permanent: later calls return its cause.
    fn enqueue(
        &self,
        lane: CommStream,
        record: &CallRecord,
        call: impl FnOnce(&NcclFunctions, RawComm, RawStream) -> NcclStatus,
    ) -> Result<D::Mark> {
        let member = &*self.member;
        let put = || {
            member.device.bind()?;
            let stream = member.device.stream(lane);
            self.communicator(lane)?.call(&record.to_string(), |table, comm| call(table, comm, stream))?;
            member.device.mark(lane)
        };
        let mark = put().map_err(|error| member.abort_flag.raise(error))?;
        member.watch.add(lane, mark.clone(), record.clone());
        Ok(mark)
    }

    /// Waits until the work before the mark has finished.
    fn wait(&self, mark: &D::Mark) -> Result<()> {
        let member = &*self.member;
        while !member.device.reached(mark).map_err(|error| member.abort_flag.raise(error))? {
            member.abort_flag.check()?;
            std::thread::sleep(Duration::from_micros(20));
        }
        // An aborted kernel also finishes, without a result.
        member.abort_flag.check()
    }

    /// Compares all calls so far, of which `record` is the last, with the peers'. Returns the
    /// records of all.
    fn compare(&self, record: &CallRecord) -> Result<Vec<CallRecord>> {
        let own = locked(&self.state).call_log.digest();
        let all = self.exchange(record, &own)?;
        if let Some(records) = call_log::agreeing(&all, self.rank) {
            return Ok(records);
        }
        // All ranks have seen the difference, so all send their latest calls.
        let own = locked(&self.state).call_log.tail();
        let tails = self.exchange(record, &own)?;
        let error = Error::new(ErrorCategory::Transient, "ranks do not make the same calls");
        let lines = call_log::first_difference(&tails, self.ranks.len(), self.rank);
        let name = |(rank, call): (usize, String)| format!("rank {} makes {call}", self.ranks[rank]);
        let error = self.member.abort_flag.keep(lines.into_iter().map(name).fold(error, Error::because));
        // An abort now would drop the answer to slower ranks, which have it after this exchange.
        let _ = self.exchange(record, &[0; 8]);
        Err(self.member.abort_flag.raise(error))
    }

    /// Ticket of a call on `lane`, which has finished if it has no mark.
    fn started(&self, lane: CommStream, mark: Option<D::Mark>, memory: Vec<Buffer>) -> Ticket {
        let mut state = locked(&self.state);
        state.tickets += 1;
        let ticket = state.tickets;
        let queue = if lane == CommStream::Reduce { &mut state.reductions } else { &mut state.gathers };
        queue.push_back(StartedCall { ticket, mark, _memory: memory });
        Ticket(ticket)
    }

    fn count(&self, op: Op, bytes: usize, is_root: bool) {
        locked(&self.state).traffic.count(op, bytes, self.ranks.len(), is_root);
    }

    /// Starts the gathers as one group of NCCL: a non-blocking communicator creates a thread for
    /// each group.
    fn start_gathers(&self, call: Call, gathers: &[Gather<'_>]) -> Result<Ticket> {
        for Gather { shard, full } in gathers {
            check_shard(call, shard, full, self.ranks.len())?;
            check_places(call, shard, full)?;
        }
        gathers.windows(2).try_for_each(|pair| check_places(call, pair[0].full, pair[1].full))?;
        let mut last = None;
        for &Gather { shard, full } in gathers {
            let record = self.record(Op::AllGather, call).moving(full.element(), full.elements());
            self.log_call(&record);
            if full.memory_kind() == MemoryKind::Host {
                self.all_gather_staged(&record, shard, full)?;
            } else {
                last = Some(record);
            }
        }
        self.count(Op::AllGather, Gather::bytes(gathers), false);
        let mark = last.map(|record| self.gather_together(&record, gathers)).transpose()?;
        let memory = gathers.iter().flat_map(|gather| [gather.shard.clone(), gather.full.clone()]);
        Ok(self.started(CommStream::Gather, mark, memory.collect()))
    }

    /// Puts gathers of GPU memory on their stream; `record` is the last one's.
    fn gather_together(&self, record: &CallRecord, gathers: &[Gather<'_>]) -> Result<D::Mark> {
        // Computation wrote the shards and last read the memory of the full data.
        let device = &*self.member.device;
        device.follow(CommStream::Gather, &device.mark(CommStream::Compute)?)?;
        self.enqueue(CommStream::Gather, record, |table, comm, stream| {
            let put = |Gather { shard, full }: &Gather<'_>| {
                let (from, to) = (shard.address() as *const c_void, full.address() as *mut c_void);
                let element = data_type(full.element());
                // SAFETY: same as for all_reduce; the gather keeps the memory until `finish`.
                unsafe { (table.all_gather)(from, to, shard.elements(), element, comm, stream) }
            };
            let accepted = [NcclStatus::SUCCESS, NcclStatus::IN_PROGRESS];
            let put_all = || gathers.iter().map(put).find(|status| !accepted.contains(status));
            grouped(table, || put_all().unwrap_or(NcclStatus::SUCCESS))
        })
    }

    fn broadcast_from(&self, call: Call, root: usize, buffer: &Buffer) -> Result<()> {
        if root >= self.ranks.len() {
            return Err(Error::internal(format!("rank {root} of {} broadcasts", self.ranks.len())));
        }
        let record = self.record(Op::Broadcast, call);
        let record = record.moving(buffer.element(), buffer.elements()).number(root);
        self.log_call(&record);
        self.count(Op::Broadcast, buffer.bytes(), self.rank == root);
        if buffer.memory_kind() == MemoryKind::Host {
            return self.broadcast_staged(&record, root, buffer);
        }
        let at = buffer.address() as *mut c_void;
        self.enqueue(CommStream::Compute, &record, |table, comm, stream| {
            let element = data_type(buffer.element());
            // SAFETY: same as for all_reduce; the root is a rank of this group.
            unsafe { (table.broadcast)(at, at, buffer.elements(), element, root as i32, comm, stream) }
        })?;
        Ok(())
    }

    fn compare_all(&self, call: Call) -> Result<()> {
        let record = self.record(Op::Barrier, call);
        self.log_call(&record);
        self.compare(&record)?;
        self.count(Op::Barrier, 0, false);
        Ok(())
    }
}

impl<D: GpuStreams> Collective for Nccl<D> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn call(&self, call: Call, operation: Operation<'_>) -> Result<Option<Ticket>> {
        match operation {
            Operation::Reduce(reduction) => self.reduce_on(CommStream::Compute, call, reduction).map(drop),
            Operation::StartReduction(reduction) => return self.start_on_lane(call, reduction),
            Operation::StartAllGathers(gathers) => return self.start_gathers(call, gathers).map(Some),
            Operation::Broadcast { root, buffer } => self.broadcast_from(call, root, buffer),
            Operation::Send { to: peer, buffer } | Operation::Recv { from: peer, buffer } => {
                self.message(operation.op(), call, peer, buffer)
            }
            Operation::Barrier => self.compare_all(call),
        }
        .map(|()| None)
    }

    fn open_reduction_stream(&self) -> Result<bool> {
        self.open_reductions().map(|()| true)
    }

    fn finish(&self, ticket: Ticket) -> Result<()> {
        self.member.abort_flag.check()?;
        let mut state = locked(&self.state);
        let is_reduction = state.reductions.iter().any(|started| started.ticket == ticket.0);
        let queue = if is_reduction { &mut state.reductions } else { &mut state.gathers };
        let Some(started) = queue.pop_front().filter(|started| started.ticket == ticket.0) else {
            return Err(Error::internal("gathers and reductions must finish in the order of their starts"));
        };
        drop(state);
        match &started.mark {
            Some(mark) => self.member.device.follow(CommStream::Compute, mark),
            None => Ok(()),
        }
    }

    fn split(&self, color: usize) -> Result<Box<dyn Collective>> {
        let record = self.record(Op::Split, Call { what: "ranks", index: 0 }).number(color);
        self.log_call(&record);
        let records = self.compare(&record)?;
        let members = || (0..records.len()).filter(|rank| records[*rank].number == records[self.rank].number);
        let member = &self.member;
        let communicator =
            self.communicator.split(color, self.rank).map_err(|error| member.abort_flag.raise(error))?;
        locked(&member.groups).push(Arc::clone(&communicator));
        Ok(Box::new(Nccl {
            communicator,
            reductions: OnceLock::new(),
            member: Arc::clone(member),
            rank: members().position(|rank| rank == self.rank).unwrap_or(0),
            ranks: members().map(|rank| self.ranks[rank]).collect(),
            state: Mutex::default(),
        }))
    }

    fn traffic(&self) -> Traffic {
        locked(&self.state).traffic
    }

    fn enter(&self, phase: Phase) -> Result<()> {
        locked(&self.member.status).phase = Some(phase);
        self.member.abort_flag.check()
    }

    fn abort(&self, why: &str) {
        let news = locked(&self.member.status).news(self.member.rank, why);
        self.member.abort_flag.raise(news);
    }
}

impl<D: GpuStreams> std::fmt::Debug for Nccl<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {} over {:?}", self.rank, self.ranks.len(), self.member.nccl)
    }
}

#[cfg(test)]
mod abort_tests;
#[cfg(test)]
mod fake_nccl;
#[cfg(test)]
mod reduction_tests;
#[cfg(test)]
mod tests;
