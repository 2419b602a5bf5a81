//! Communication between ranks: sums, gathers, broadcasts, and messages between two ranks, over
//! memory of each rank.
//!
//! A [`Collective`] is one rank's communicator of a group. Every rank of the group makes the same
//! calls in the same order, except messages, which only two ranks make. A call that does not match
//! its peers' is an error that names both, never an endless wait. Backends: `in_process` (ranks are
//! threads of this process; sums in ascending order of ranks, so exact), `nccl` (GPUs) and `mpi`
//! (CPU clusters, feature `mpi`). Traffic is counted as a ring would send it, as in the formulas of
//! the plan.
//!
//! All operations are one method, [`Collective::call`], with an [`Operation`]; callers use named
//! methods that make it. A decorator (`timed`, `fault_injection`) writes that method,
//! [`Collective::inner`], and what else it changes. A new operation consists of a variant of
//! [`Operation`] with its [`Op`], a named method, and its work in each backend.
//!
//! The strategies decide the schedule of gathers; `launch` determines the ranks, and
//! [`crate::rendezvous`] connects their processes.

mod buffer_checks;
mod call_record;
mod fault_injection;
mod hang_watch;
pub mod in_process;
// Tests of other crates use it too; a release build omits it.
#[cfg(debug_assertions)]
pub mod late_reductions;
pub mod launch;
mod memory_marks;
#[cfg(feature = "mpi")]
pub mod mpi;
mod named_values;
pub mod nccl;
mod operation;
mod phase;
mod progress;
mod rank_threads;
mod single_rank;
mod step_clock;
mod timed;
mod traffic;

pub use fault_injection::{FaultInjector, FaultNotice};
pub use hang_watch::{HangLimits, HangReport, HangWatch};
pub use memory_marks::HeldBytes;
pub use operation::{Gather, Op, Operation, Reduction};
pub use phase::Phase;
pub use progress::ProgressBoard;
pub use rank_threads::RankFailure;
pub use single_rank::SingleRank;
pub use step_clock::{StepPart, StepSecs};
pub use timed::{CollectiveTimer, PhaseReader, TimedCollective, WorkGuard};
pub use traffic::Traffic;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use self::launch::Launch;
use crate::error::{Error, Result};
use crate::runtime::buffer::Buffer;

/// True if this build can connect the ranks of several processes on CPUs. NCCL connects GPUs in
/// every build that can use them.
pub const CONNECTS_PROCESSES: bool = cfg!(feature = "mpi");

/// Runs `work` on CPUs for each rank of this process among those of a launcher, with the rank's
/// index in the process. `armed` gets a function that ends the ranks' waits with a failure from
/// elsewhere.
///
/// # Errors
/// The first failure, or that this build has no MPI.
pub fn run_among_processes(
    launch: &Launch,
    armed: impl FnOnce(Box<dyn Fn(Error) + Send>),
    work: impl Fn(usize, Arc<dyn Collective>) -> Result<()> + Sync,
) -> Result<(), RankFailure> {
    #[cfg(feature = "mpi")]
    return mpi::run_ranks(
        launch,
        mpi::DEADLINE,
        |stop| armed(Box::new(move |cause| stop.raise(cause))),
        |local_rank, world| work(local_rank, world),
    )
    .map(drop);
    #[cfg(not(feature = "mpi"))]
    {
        drop((armed, work));
        let what = format!("cannot connect the ranks of {}", launch.source.name());
        Err(RankFailure::heard(Error::internal(what).because("this build has no MPI")))
    }
}

/// Name of a call, for messages and for the check that all ranks make the same one: `("gradients of
/// block", 3)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Call {
    /// Kind of the data.
    pub what: &'static str,
    /// Index among several of this kind.
    pub index: usize,
}

impl Call {
    /// A call for data of which only one exists.
    pub const fn single(what: &'static str) -> Self {
        Call { what, index: usize::MAX }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        named(f, self.what, self.index)
    }
}

/// Text of a call: `gradients of block 3`, `squares of gradients`
fn named(f: &mut fmt::Formatter<'_>, what: &str, index: usize) -> fmt::Result {
    f.write_str(what)?;
    if index == usize::MAX { Ok(()) } else { write!(f, " {index}") }
}

/// Gathers of one call, or a reduction, that were started and not yet finished.
#[derive(Debug)]
#[must_use = "the memory is filled only by `finish`"]
pub struct Ticket(pub(in crate::collective) u64);

/// One rank's communicator of a group of ranks.
///
/// All methods take `&self`: they write memory behind [`Buffer`], as for all tensors of this
/// program. By default a method calls that of [`Collective::inner`], or without one returns what
/// is right for a single rank. So a backend writes `rank`, `size`, `finish`, `split`, `traffic`,
/// `enter` and `abort`. No implementation writes the named methods of operations.
///
/// # Errors
/// [`crate::error::ErrorCategory::Transient`] if a peer failed or made another call: the error
/// names the rank, its phase and its last call.
pub trait Collective: Any + Send + Sync + fmt::Debug {
    /// The communicator that this one decorates.
    fn inner(&self) -> Option<&dyn Collective> {
        None
    }

    /// This rank's index in the group.
    fn rank(&self) -> usize {
        self.inner().map_or(0, |inner| inner.rank())
    }

    /// Number of ranks in the group.
    fn size(&self) -> usize {
        self.inner().map_or(1, |inner| inner.size())
    }

    /// Makes a call of the group, named `call`. Returns the ticket of a started gather, and of a
    /// started reduction that has not finished.
    ///
    /// # Errors
    /// A rank has failed, the ranks' calls differ in kind, length or element, or the memory or the
    /// other rank does not fit the operation.
    fn call(&self, call: Call, operation: Operation<'_>) -> Result<Option<Ticket>>;

    /// Waits for a started gather or reduction. Gathers must finish in the order of their starts,
    /// and so must reductions.
    ///
    /// # Errors
    /// A rank has failed, or an older call is not finished.
    fn finish(&self, ticket: Ticket) -> Result<()> {
        self.inner().map_or(Ok(()), |inner| inner.finish(ticket))
    }

    /// Prepares reductions in parallel with computation, if the backend supports them; returns true
    /// if it does. All ranks call it while no call is pending. Later calls change nothing.
    ///
    /// # Errors
    /// A rank has failed, or another call is made instead.
    fn open_reduction_stream(&self) -> Result<bool> {
        self.inner().map_or(Ok(false), |inner| inner.open_reduction_stream())
    }

    /// Creates the group of the ranks with the same `color`, in ascending order of their rank here.
    /// All ranks call it.
    ///
    /// # Errors
    /// A rank has failed, or another call is made instead.
    fn split(&self, color: usize) -> Result<Box<dyn Collective>> {
        self.inner().map_or_else(|| Ok(Box::new(SingleRank) as _), |inner| inner.split(color))
    }

    /// Bytes sent and calls made by this communicator so far.
    fn traffic(&self) -> Traffic {
        self.inner().map_or_else(Traffic::default, |inner| inner.traffic())
    }

    /// Sets the current phase of this rank, for its peers' messages; planted faults strike here.
    ///
    /// # Errors
    /// A fault is planted here, or a peer has failed.
    fn enter(&self, phase: Phase) -> Result<()> {
        self.inner().map_or(Ok(()), |inner| inner.enter(phase))
    }

    /// Shows between calls that this rank computes. The hang watch treats a rank without progress
    /// for too long as hung; without a watch this does nothing.
    fn heartbeat(&self) {
        self.inner().into_iter().for_each(|inner| inner.heartbeat());
    }

    /// Announces a micro-batch of this many tokens, which decides the limit on this rank's silence.
    fn expect_tokens(&self, tokens: usize) {
        self.inner().into_iter().for_each(|inner| inner.expect_tokens(tokens));
    }

    /// Informs all peers that this rank has failed with `why`: their waits and next calls return an
    /// error. Only the first call has an effect. Groups made by [`Collective::split`] fail
    /// together.
    fn abort(&self, why: &str) {
        self.inner().into_iter().for_each(|inner| inner.abort(why));
    }

    /// Replaces `buffer` by its sum over the ranks (f32, bf16, f64).
    ///
    /// # Errors
    /// Same as [`Collective::call`].
    fn all_reduce(&self, call: Call, buffer: &Buffer) -> Result<()> {
        self.call(call, Operation::Reduce(Reduction::AllReduce(buffer))).map(drop)
    }

    /// Sums `full` over the ranks and leaves this rank's `1/size` of the sum in `shard` (f32,
    /// bf16).
    ///
    /// # Errors
    /// Same as [`Collective::call`].
    fn reduce_scatter(&self, call: Call, full: &Buffer, shard: &Buffer) -> Result<()> {
        let reduction = Reduction::ReduceScatter { full, shard, replicas: None };
        self.call(call, Operation::Reduce(reduction)).map(drop)
    }

    /// Starts a reduction of computed values, in parallel with computation after
    /// [`Collective::open_reduction_stream`] returned true; none if it has finished on return. The
    /// caller does not access the memory of a started one before [`Collective::finish`].
    ///
    /// # Errors
    /// Same as [`Collective::call`].
    fn start_reduction(&self, call: Call, reduction: Reduction<'_>) -> Result<Option<Ticket>> {
        self.call(call, Operation::StartReduction(reduction))
    }

    /// Starts to gather the ranks' `shard`s in order into `full` (any element). The caller accesses
    /// neither before [`Collective::finish`], and does not write `shard` before a later all-reduce
    /// or barrier of the same group has returned, because slower peers may still read it.
    ///
    /// # Errors
    /// Same as [`Collective::call`].
    fn start_all_gather(&self, call: Call, shard: &Buffer, full: &Buffer) -> Result<Ticket> {
        self.start_all_gathers(call, &[Gather { shard, full }])
    }

    /// Starts several gathers as one call with one ticket, with the rules of
    /// [`Collective::start_all_gather`] for each. The ranks give them in the same order.
    ///
    /// # Errors
    /// Same as [`Collective::call`], or `gathers` is empty.
    fn start_all_gathers(&self, call: Call, gathers: &[Gather<'_>]) -> Result<Ticket> {
        if gathers.is_empty() {
            return Err(Error::internal(format!("the gather of {call} has no memory")));
        }
        let ticket = self.call(call, Operation::StartAllGathers(gathers))?;
        ticket.ok_or_else(|| Error::internal(format!("the gather of {call} has no ticket")))
    }

    /// Copies `buffer` of rank `root` to all others (any element).
    ///
    /// # Errors
    /// Same as [`Collective::call`].
    fn broadcast(&self, call: Call, root: usize, buffer: &Buffer) -> Result<()> {
        self.call(call, Operation::Broadcast { root, buffer }).map(drop)
    }

    /// Sends `buffer` to rank `to` of this group, whose next [`Collective::recv`] from this rank
    /// receives it (any element). Waits for that call; the memory may be written again on return,
    /// for a GPU in the order of its compute stream. `call`, element and length are equal on both
    /// sides, and both memories are the host's or both a GPU's. The group's other ranks take no
    /// part. The two ranks make all calls that they share in the same order. Two ranks that both
    /// send first wait for each other, which is an error.
    ///
    /// # Errors
    /// A rank has failed, the other side differs in name, length or element, or `to` is this rank
    /// or outside the group.
    fn send(&self, call: Call, to: usize, buffer: &Buffer) -> Result<()> {
        self.call(call, Operation::Send { to, buffer }).map(drop)
    }

    /// Waits for the next message of rank `from` of this group and stores it in `buffer`. It is the
    /// other side of [`Collective::send`], with the same rules.
    ///
    /// # Errors
    /// Same as [`Collective::send`].
    fn recv(&self, call: Call, from: usize, buffer: &Buffer) -> Result<()> {
        self.call(call, Operation::Recv { from, buffer }).map(drop)
    }

    /// Returns after all ranks have called it.
    ///
    /// # Errors
    /// Same as [`Collective::call`].
    fn barrier(&self, call: Call) -> Result<()> {
        self.call(call, Operation::Barrier).map(drop)
    }
}
