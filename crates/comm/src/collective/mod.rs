//! What ranks say to one another: sums, gathers, broadcasts, and messages between two, over memory that each rank holds.
//!
//! A [`Collective`] is one rank's end of a group. Every rank of the group makes the same calls in the same order, but
//! for messages, which two ranks make alone; a call that does not match its peers' is an error that names both, never a
//! wait without end. Backends: `local`
//! (ranks are threads of this process; sums in ascending order of ranks, so exact), `nccl` (GPUs) and `mpi` (CPU
//! clusters, feature `mpi`). Bytes are counted as a ring would send them, which is what the formulas of the plan say.
//!
//! What is gathered and when is the strategies' business; who the ranks are is `launch`'s, how their processes
//! find each other [`crate::rendezvous`]'s.

mod buffer_checks;
mod call_record;
mod fault_injection;
mod hang_watch;
pub mod in_process;
// Tests of the crates above use it, too; a release build does without.
#[cfg(debug_assertions)]
pub mod late_reductions;
pub mod launch;
mod memory_marks;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod nccl;
mod phase;
mod progress;
mod rank_threads;
mod reduction;
mod single_rank;
mod step_clock;
mod timed;
mod traffic;

pub use fault_injection::{FaultInjector, FaultNotice};
pub use hang_watch::{HangLimits, HangReport, HangWatch};
pub use memory_marks::HeldBytes;
pub use phase::Phase;
pub use progress::ProgressBoard;
pub use rank_threads::RankFailure;
pub use reduction::Reduction;
pub use single_rank::SingleRank;
pub use step_clock::{StepPart, StepSecs};
pub use timed::{CollectiveTimer, PhaseReader, TimedCollective, WorkGuard};
pub use traffic::{Op, Traffic};

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use self::launch::Launch;
use crate::error::{Error, Result};
use crate::runtime::buffer::Buffer;

/// Whether this build can connect the ranks of several processes on CPUs. GPUs are connected by NCCL in every build that
/// can use them.
pub const CONNECTS_PROCESSES: bool = cfg!(feature = "mpi");

/// Runs `work` for each rank that `launch` gives this process among those that a launcher started, on CPUs, with its place
/// in the process. `armed` gets what ends the ranks' waits with a failure that was heard of elsewhere.
///
/// # Errors
/// The failure that came first; this build has no MPI.
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
        |place, world| work(place, world),
    )
    .map(drop);
    #[cfg(not(feature = "mpi"))]
    {
        drop((armed, work));
        let what = format!("cannot connect the ranks of {}", launch.source.name());
        Err(RankFailure::heard(Error::internal(what).because("this build has no MPI")))
    }
}

/// Names a call for people and for the check that all ranks make the same one: `("gradients of block", 3)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Call {
    /// What is communicated.
    pub what: &'static str,
    /// Which one of them.
    pub index: usize,
}

impl Call {
    /// Of something that there is one of.
    pub const fn single(what: &'static str) -> Self {
        Call { what, index: usize::MAX }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        named(f, self.what, self.index)
    }
}

/// `gradients of block 3`, `squares of gradients`
fn named(f: &mut fmt::Formatter<'_>, what: &str, index: usize) -> fmt::Result {
    f.write_str(what)?;
    if index == usize::MAX { Ok(()) } else { write!(f, " {index}") }
}

/// A gather or a reduction that was started and not yet finished.
#[derive(Debug)]
#[must_use = "the memory is filled only by `finish`"]
pub struct Ticket(pub(in crate::collective) u64);

/// One rank's end of a group of ranks.
///
/// All methods take `&self`: the memory they write is behind [`Buffer`], as tensors' is everywhere in this program.
///
/// # Errors
/// [`crate::error::ErrorCategory::Transient`] when a peer failed or called something else: the error names the rank, its phase and its last call.
pub trait Collective: Send + Sync + std::fmt::Debug {
    /// This rank in the group.
    fn rank(&self) -> usize;

    /// Ranks in the group.
    fn size(&self) -> usize;

    /// Replaces `buffer` by its sum over the ranks (f32, bf16, f64).
    ///
    /// # Errors
    /// When a rank has failed, or the ranks' calls do not agree in kind, length or element.
    fn all_reduce(&self, call: Call, buffer: &Buffer) -> Result<()>;

    /// Sums `full` over the ranks and leaves this rank's `1/size` of the sum in `shard` (f32, bf16).
    ///
    /// # Errors
    /// When a rank has failed, or the ranks' calls do not agree in kind, length or element.
    fn reduce_scatter(&self, call: Call, full: &Buffer, shard: &Buffer) -> Result<()>;

    /// As [`Collective::reduce_scatter`] in this group and then a sum of the shards over the ranks of `replicas`,
    /// which hold the same shard of other groups. In-process and over MPI the additions are in ascending order of all ranks,
    /// as one rank would make them; NCCL sums inside the groups first, `(x0 + x1) + (x2 + x3)`, and picks the order in each,
    /// so there hsdp differs from one rank by the rounding of f32 sums.
    ///
    /// # Errors
    /// When a rank has failed, or the ranks' calls do not agree in kind, length or element.
    fn reduce_scatter_across(
        &self,
        call: Call,
        replicas: &dyn Collective,
        full: &Buffer,
        shard: &Buffer,
    ) -> Result<()> {
        self.reduce_scatter(call, full, shard)?;
        replicas.all_reduce(call, shard)
    }

    /// Makes ready for reductions that go on beside computation, where the backend has them; says whether it does. All
    /// ranks call it, while nothing is started and not finished. Later calls change nothing.
    ///
    /// # Errors
    /// When a rank has failed, or another call is made instead.
    fn open_reduction_lane(&self) -> Result<bool> {
        Ok(false)
    }

    /// Starts a reduction, beside computation after [`Collective::open_reduction_lane`] said so, of what was computed before;
    /// none when it is done on return. Of a started one the caller touches no memory before [`Collective::finish`].
    ///
    /// # Errors
    /// When a rank has failed, or the ranks' calls do not agree in kind, length or element.
    fn start_reduction(&self, call: Call, reduction: Reduction<'_>) -> Result<Option<Ticket>> {
        reduction.make(self, call).map(|()| None)
    }

    /// Starts to put the ranks' `shard`s side by side into `full` (any element). Neither memory is touched by the
    /// caller before [`Collective::finish`]; `shard` is not written before a later all-reduce or barrier of the same
    /// group has returned, because slower peers may still read it.
    ///
    /// # Errors
    /// When a rank has failed, or the ranks' calls do not agree in kind, length or element.
    fn start_all_gather(&self, call: Call, shard: &Buffer, full: &Buffer) -> Result<Ticket>;

    /// Waits for a started gather or reduction. Gathers are finished in the order in which they were started, and so are
    /// reductions.
    ///
    /// # Errors
    /// When a rank has failed, or an older one is not finished.
    fn finish(&self, ticket: Ticket) -> Result<()>;

    /// Copies `buffer` of rank `root` to all others (any element).
    ///
    /// # Errors
    /// When a rank has failed, or the ranks' calls do not agree in kind, length or element.
    fn broadcast(&self, call: Call, root: usize, buffer: &Buffer) -> Result<()>;

    /// Sends `buffer` to rank `to` of this group, whose next [`Collective::recv`] from this rank takes it (any element).
    /// Waits until that has been called; the memory may be written again on return, a GPU's in the order of its compute
    /// stream. `call`, element and length are the same on both sides, and either both memories are the host's or both a
    /// GPU's. The other ranks of the group take no part, and messages are no part of the order of its other calls, but
    /// for the two: they make all calls that they share in the same order. Two ranks that both send first wait for each
    /// other, which is an error.
    ///
    /// # Errors
    /// When a rank has failed, the other side does not agree in name, length or element, or `to` is this rank or none
    /// of the group.
    fn send(&self, call: Call, to: usize, buffer: &Buffer) -> Result<()>;

    /// Waits for what rank `from` of this group sends, in the order in which it sends it, and leaves it in `buffer`. As
    /// [`Collective::send`], whose other side it is.
    ///
    /// # Errors
    /// As [`Collective::send`].
    fn recv(&self, call: Call, from: usize, buffer: &Buffer) -> Result<()>;

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// When a rank has failed, or another call is made instead.
    fn barrier(&self, call: Call) -> Result<()>;

    /// The group of the ranks that give the same `color`, in ascending order of their rank here. All ranks call it.
    ///
    /// # Errors
    /// When a rank has failed, or another call is made instead.
    fn split(&self, color: usize) -> Result<Box<dyn Collective>>;

    /// This end as its backend's own type, for backends that sum across groups in a way of their own.
    fn as_backend(&self) -> Option<&dyn Any> {
        None
    }

    /// Bytes sent and calls made by this end so far.
    fn traffic(&self) -> Traffic;

    /// Says what this rank is doing now, for its peers' messages; the place where planted faults strike.
    ///
    /// # Errors
    /// When a fault is planted here, or a peer has failed.
    fn enter(&self, phase: Phase) -> Result<()>;

    /// A sign of life between calls: this rank computes. What watches over ranks takes one that gives none for too long
    /// for one that hangs; where nothing watches it does nothing.
    fn heartbeat(&self) {}

    /// What this rank computes from now on is a micro-batch of so many tokens: how long it may be silent depends on them.
    fn expect_tokens(&self, _tokens: usize) {}

    /// Tells all peers that this rank has failed with `why`: their waits and next calls return an error. Called once;
    /// later calls change nothing. Groups made by [`Collective::split`] fail together.
    fn abort(&self, why: &str);
}
