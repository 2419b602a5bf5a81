//! Ranks on GPUs, over NCCL that is loaded at run time (`library`). **Not yet run on a GPU**: the logic runs in
//! tests over a stand-in for the library and the device, the library's errors over the real one, the rest compiles.
//!
//! Calls on a GPU's memory put work on the rank's streams and return: sums and broadcasts on the compute stream, which is
//! candle's, so before and after them computation is in order; gathers on their own one, with marks for the order between
//! the two. Memory of the host (sums of losses, saved moments) goes through the GPU by pieces and is there on return
//! (`staged`). [`run_ranks`] runs the ranks of a process as threads, one a GPU. Communicators are non-blocking, so every wait polls
//! (`communicator`), and a thread watches over what is on the streams (`watch`). Failures end all communicators of the process
//! ([`Alarm`]); other processes see NCCL's remote error, the deadline, or the news from the rendezvous session, which is
//! the launcher's to pass on by [`Alarm::raise`].
//!
//! Comparing every call would cost a round trip each. Instead each rank hashes its calls as it makes them, and
//! compares the hash with its peers' at barriers, splits and sums of f64 (once or twice a step): there the first call that
//! differs is named, with the ranks. A difference that stops NCCL before that ends at the deadline, with this rank's call.
//! NCCL picks the order of its sums; `NCCL_ALGO=Ring` makes it the same in every run. hsdp has three communicators a rank, whose
//! kernels wait for peers on both streams: they need room on the GPU at once, which NCCL's channels leave.

mod communicator;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod environment;
mod library;
mod run;
mod staged;
mod trail;
mod watch;

pub use communicator::Alarm;
#[cfg(feature = "cuda")]
pub use cuda::Cuda;
pub use device::{Device, Lane};
pub use environment::one_gpu_environment;
pub use library::{
    Config, LIBRARY_VARIABLE, Library, RawComm, RawStream, SUM, Status, Table, UniqueId, Version, data_type,
};
pub use run::{Crew, run_on_gpus, run_ranks};

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use self::communicator::Communicator;
use self::trail::Trail;
use self::watch::Watch;
use super::memory::{check_shard, check_sum};
use super::record::{Action, Record, Whereabouts};
use super::{Call, Collective, Element, Memory, Op, Phase, Place, Ticket, Traffic};
use crate::error::{Error, Kind, Result};

/// How long a rank waits for its peers unless told otherwise; longer than any evaluation or save.
pub const DEADLINE: Duration = Duration::from_secs(1800);

/// Who meets, and how.
#[derive(Debug, Clone, Copy)]
pub struct Meeting {
    /// Rank 0's [`Library::unique_id`].
    pub id: UniqueId,
    /// This rank.
    pub rank: usize,
    /// All ranks.
    pub size: usize,
    /// How long a call may wait for other ranks.
    pub deadline: Duration,
}

/// One rank's end of a group of GPUs. Its calls come from one thread, that of the device's compute stream.
pub struct Nccl<D: Device> {
    // Dropped in this order: the communicator ends while it is watched.
    communicator: Arc<Communicator>,
    member: Arc<Member<D>>,
    rank: usize,
    /// The ranks of the group by their rank in the world.
    ranks: Vec<usize>,
    state: Mutex<State<D>>,
}

/// What this rank's groups share.
struct Member<D: Device> {
    /// Those of its smaller groups. They end with the last group, not before: a rank that fails drops its groups on the
    /// way out, and ending one in order waits for peers that do not know yet.
    groups: Mutex<Vec<Arc<Communicator>>>,
    watch: Watch<D>,
    device: Arc<D>,
    nccl: Arc<Library>,
    alarm: Arc<Alarm>,
    /// In the world.
    rank: usize,
    place: Mutex<Whereabouts>,
}

struct State<D: Device> {
    trail: Trail,
    tickets: u64,
    gathers: VecDeque<Gather<D>>,
    traffic: Traffic,
    scratch: Option<(usize, D::Scratch)>,
}

impl<D: Device> Default for State<D> {
    fn default() -> Self {
        State {
            trail: Trail::default(),
            tickets: 0,
            gathers: VecDeque::new(),
            traffic: Traffic::default(),
            scratch: None,
        }
    }
}

/// A gather on its stream, with the memory that must live until computation has been told to wait for it.
struct Gather<D: Device> {
    ticket: u64,
    /// None when it is done: over memory of the host.
    mark: Option<D::Mark>,
    _memory: [Memory; 2],
}

/// Refuses data of which a part is on the GPU.
fn check_places(call: Call, shard: &Memory, full: &Memory) -> Result<()> {
    if shard.place() == full.place() {
        return Ok(());
    }
    let what = format!("the shard of {call} is elsewhere than its data");
    Err(Error::internal(what).because(format!("{shard:?}, {full:?}")))
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<D: Device> Nccl<D> {
    /// Meets the other ranks. `alarm` is shared by the ranks that are threads of this process.
    ///
    /// # Errors
    /// NCCL refuses (two ranks on one GPU, no driver, no network), or not all ranks come before the deadline.
    pub fn connect(library: &Arc<Library>, meeting: &Meeting, device: D, alarm: &Arc<Alarm>) -> Result<Self> {
        let Meeting { id, rank, size, deadline } = *meeting;
        let device = Arc::new(device);
        device.bind()?;
        let communicator = Communicator::meet(library, alarm, &id, (rank, size), deadline)?;
        let watch = Watch::start(&device, alarm, rank, deadline)?;
        let (nccl, alarm) = (Arc::clone(library), Arc::clone(alarm));
        let (groups, place) = (Mutex::default(), Mutex::default());
        let member = Arc::new(Member { groups, watch, device, nccl, alarm, rank, place });
        Ok(Nccl { communicator, member, rank, ranks: (0..size).collect(), state: Mutex::default() })
    }

    fn record(&self, action: Action, call: Call) -> Record {
        let phase = locked(&self.member.place).phase;
        Record::new(locked(&self.state).trail.calls(), action, call, phase)
    }

    /// Remembers a call that is about to be made.
    fn note(&self, record: &Record) {
        locked(&self.state).trail.add(record);
        locked(&self.member.place).last = Some(record.clone());
    }

    /// Puts a call on a stream. What fails here fails for good: the first cause is kept for all later calls.
    fn enqueue(
        &self,
        lane: Lane,
        record: &Record,
        call: impl FnOnce(&Table, RawComm, RawStream) -> Status,
    ) -> Result<D::Mark> {
        let member = &*self.member;
        let put = || {
            member.device.bind()?;
            let stream = member.device.stream(lane);
            self.communicator.call(&record.to_string(), |table, comm| call(table, comm, stream))?;
            member.device.mark(lane)
        };
        let mark = put().map_err(|error| member.alarm.raise(error))?;
        member.watch.add(lane, mark.clone(), record.clone());
        Ok(mark)
    }

    /// Waits until all that is before the mark is done.
    fn wait(&self, mark: &D::Mark) -> Result<()> {
        let member = &*self.member;
        while !member.device.reached(mark).map_err(|error| member.alarm.raise(error))? {
            member.alarm.check()?;
            std::thread::sleep(Duration::from_micros(20));
        }
        // An aborted kernel ends as well, with nothing in its memory.
        member.alarm.check()
    }

    /// Compares all calls so far, of which `record` is the last, with the peers'. Returns the records of all.
    fn compare(&self, record: &Record) -> Result<Vec<Record>> {
        let own = locked(&self.state).trail.digest();
        let all = self.exchange(record, &own)?;
        if let Some(records) = trail::agreeing(&all, self.rank) {
            return Ok(records);
        }
        // All ranks saw that: all tell what they called.
        let own = locked(&self.state).trail.tail();
        let tails = self.exchange(record, &own)?;
        let error = Error::new(Kind::Transient, "ranks do not make the same calls");
        let lines = trail::first_difference(&tails, self.ranks.len(), self.rank);
        let name = |(rank, call): (usize, String)| format!("rank {} makes {call}", self.ranks[rank]);
        let error = self.member.alarm.keep(lines.into_iter().map(name).fold(error, Error::because));
        // Stopping now would take the answer from slower ranks: they have it once they come here too.
        let _ = self.exchange(record, &[0; 8]);
        Err(self.member.alarm.raise(error))
    }

    /// The ticket of a gather that was started, or is done when there is no mark to wait for.
    fn started(&self, mark: Option<D::Mark>, shard: &Memory, full: &Memory) -> Ticket {
        let mut state = locked(&self.state);
        state.tickets += 1;
        let ticket = state.tickets;
        state.gathers.push_back(Gather { ticket, mark, _memory: [shard.clone(), full.clone()] });
        Ticket(ticket)
    }

    fn count(&self, op: Op, bytes: usize, is_root: bool) {
        locked(&self.state).traffic.count(op, bytes, self.ranks.len(), is_root);
    }
}

impl<D: Device> Collective for Nccl<D> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn all_reduce(&self, call: Call, buffer: &Memory) -> Result<()> {
        check_sum(call, buffer)?;
        let record = self.record(Action::Op(Op::AllReduce), call).moving(buffer.element(), buffer.elements());
        self.note(&record);
        if buffer.element() == Element::F64 {
            self.compare(&record)?;
        }
        self.count(Op::AllReduce, buffer.bytes(), false);
        if buffer.place() == Place::Host {
            return self.all_reduce_staged(&record, buffer);
        }
        let (at, element) = (buffer.address() as *mut c_void, data_type(buffer.element()));
        self.enqueue(Lane::Compute, &record, |table, comm, stream| {
            // SAFETY: the memory is valid on the device by `Memory`'s contract, freed on the compute stream at the earliest.
            unsafe { (table.all_reduce)(at, at, buffer.elements(), element, SUM, comm, stream) }
        })?;
        Ok(())
    }

    fn reduce_scatter(&self, call: Call, full: &Memory, shard: &Memory) -> Result<()> {
        check_sum(call, full)?;
        check_shard(call, shard, full, self.ranks.len())?;
        check_places(call, shard, full)?;
        let record = self.record(Action::Op(Op::ReduceScatter), call).moving(full.element(), full.elements());
        self.note(&record);
        self.count(Op::ReduceScatter, full.bytes(), false);
        if full.place() == Place::Host {
            return self.reduce_scatter_staged(&record, full, shard);
        }
        let (from, to) = (full.address() as *const c_void, shard.address() as *mut c_void);
        self.enqueue(Lane::Compute, &record, |table, comm, stream| {
            let element = data_type(full.element());
            // SAFETY: as for all_reduce; the lengths were checked.
            unsafe { (table.reduce_scatter)(from, to, shard.elements(), element, SUM, comm, stream) }
        })?;
        Ok(())
    }

    fn start_all_gather(&self, call: Call, shard: &Memory, full: &Memory) -> Result<Ticket> {
        check_shard(call, shard, full, self.ranks.len())?;
        check_places(call, shard, full)?;
        let record = self.record(Action::Op(Op::AllGather), call).moving(full.element(), full.elements());
        self.note(&record);
        self.count(Op::AllGather, full.bytes(), false);
        if full.place() == Place::Host {
            self.all_gather_staged(&record, shard, full)?;
            return Ok(self.started(None, shard, full));
        }
        // The shard was written, and the room for the full data last read, by computation.
        let device = &*self.member.device;
        device.follow(Lane::Gather, &device.mark(Lane::Compute)?)?;
        let (from, to) = (shard.address() as *const c_void, full.address() as *mut c_void);
        let mark = self.enqueue(Lane::Gather, &record, |table, comm, stream| {
            let element = data_type(full.element());
            // SAFETY: as for all_reduce; the memory is kept with the gather until `finish`.
            unsafe { (table.all_gather)(from, to, shard.elements(), element, comm, stream) }
        })?;
        Ok(self.started(Some(mark), shard, full))
    }

    fn finish(&self, ticket: Ticket) -> Result<()> {
        self.member.alarm.check()?;
        let first = locked(&self.state).gathers.pop_front();
        let Some(gather) = first.filter(|gather| gather.ticket == ticket.0) else {
            return Err(Error::internal("a gather is finished out of turn"));
        };
        match &gather.mark {
            Some(mark) => self.member.device.follow(Lane::Compute, mark),
            None => Ok(()),
        }
    }

    fn broadcast(&self, call: Call, root: usize, buffer: &Memory) -> Result<()> {
        if root >= self.ranks.len() {
            return Err(Error::internal(format!("rank {root} of {} broadcasts", self.ranks.len())));
        }
        let record = self.record(Action::Op(Op::Broadcast), call);
        let record = record.moving(buffer.element(), buffer.elements()).number(root);
        self.note(&record);
        self.count(Op::Broadcast, buffer.bytes(), self.rank == root);
        if buffer.place() == Place::Host {
            return self.broadcast_staged(&record, root, buffer);
        }
        let at = buffer.address() as *mut c_void;
        self.enqueue(Lane::Compute, &record, |table, comm, stream| {
            let element = data_type(buffer.element());
            // SAFETY: as for all_reduce; the root is a rank of this group.
            unsafe { (table.broadcast)(at, at, buffer.elements(), element, root as i32, comm, stream) }
        })?;
        Ok(())
    }

    fn barrier(&self, call: Call) -> Result<()> {
        let record = self.record(Action::Op(Op::Barrier), call);
        self.note(&record);
        self.compare(&record)?;
        self.count(Op::Barrier, 0, false);
        Ok(())
    }

    fn split(&self, color: usize) -> Result<Box<dyn Collective>> {
        let record = self.record(Action::Split, Call { what: "ranks", index: 0 }).number(color);
        self.note(&record);
        let records = self.compare(&record)?;
        let members = || (0..records.len()).filter(|rank| records[*rank].number == records[self.rank].number);
        let member = &self.member;
        let communicator =
            self.communicator.split(color, self.rank).map_err(|error| member.alarm.raise(error))?;
        locked(&member.groups).push(Arc::clone(&communicator));
        Ok(Box::new(Nccl {
            communicator,
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
        locked(&self.member.place).phase = Some(phase);
        self.member.alarm.check()
    }

    fn abort(&self, why: &str) {
        let news = locked(&self.member.place).news(self.member.rank, why);
        self.member.alarm.raise(news);
    }
}

impl<D: Device> std::fmt::Debug for Nccl<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {} over {:?}", self.rank, self.ranks.len(), self.member.nccl)
    }
}

#[cfg(test)]
mod stand_in;
#[cfg(test)]
mod tests;
