//! Planted faults in the ranks of a real run, over any backend, for tests of the end of runs.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::in_process::{InjectedFault, InjectedFaultKind};
use super::{Call, Collective, Phase, Reduction, Ticket, Traffic};
use crate::error::{Error, ErrorCategory, Result};
use crate::runtime::buffer::Buffer;
use crate::runtime::clock;

/// Callback with a description at the moment of a fault, from which tests measure time.
pub type FaultNotice = Arc<dyn Fn(&str) + Send + Sync>;

/// A communicator with a fault that strikes when it enters a phase.
pub struct FaultInjector {
    inner: Arc<dyn Collective>,
    fault: InjectedFault,
    notice: FaultNotice,
    entered: AtomicU64,
    /// Extra nanoseconds of each call.
    link_delay: AtomicU64,
}

impl FaultInjector {
    /// Wraps `inner` with `fault`, which must be a fault of this rank.
    pub fn new(inner: Arc<dyn Collective>, fault: InjectedFault, notice: &FaultNotice) -> Self {
        FaultInjector {
            inner,
            fault,
            notice: Arc::clone(notice),
            entered: AtomicU64::new(0),
            link_delay: AtomicU64::new(0),
        }
    }

    /// The inner communicator, after the delay of a slow link.
    fn link(&self) -> &dyn Collective {
        let delay = self.link_delay.load(Ordering::Relaxed);
        if delay > 0 {
            clock::pass(Duration::from_nanos(delay));
        }
        &*self.inner
    }

    fn strike(&self, first: bool) -> Result<()> {
        let text = format!("planted fault {}", self.fault);
        if first {
            (self.notice)(&text);
        }
        match self.fault.kind {
            InjectedFaultKind::Error => Err(Error::new(ErrorCategory::Transient, text)),
            InjectedFaultKind::Panic => panic!("{text}"),
            // Silent, as if the process had been killed.
            InjectedFaultKind::Exit => std::process::exit(i32::from(ErrorCategory::Internal.exit_code())),
            InjectedFaultKind::Device(failure) => {
                failure.plan();
                Ok(())
            }
            InjectedFaultKind::LateKernelFault => Err(self.fault.late_kernel_fault()),
            InjectedFaultKind::SlowLink(time) => {
                self.link_delay.store(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
                Ok(())
            }
            kind => {
                kind.hold_up();
                Ok(())
            }
        }
    }
}

impl std::fmt::Debug for FaultInjector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} with planted fault {}", self.inner, self.fault)
    }
}

impl Collective for FaultInjector {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn all_reduce(&self, call: Call, buffer: &Buffer) -> Result<()> {
        self.link().all_reduce(call, buffer)
    }

    fn reduce_scatter(&self, call: Call, full: &Buffer, shard: &Buffer) -> Result<()> {
        self.link().reduce_scatter(call, full, shard)
    }

    fn reduce_scatter_across(
        &self,
        call: Call,
        replicas: &dyn Collective,
        full: &Buffer,
        shard: &Buffer,
    ) -> Result<()> {
        self.link().reduce_scatter_across(call, replicas, full, shard)
    }

    fn open_reduction_lane(&self) -> Result<bool> {
        self.inner.open_reduction_lane()
    }

    fn start_reduction(&self, call: Call, reduction: Reduction<'_>) -> Result<Option<Ticket>> {
        self.link().start_reduction(call, reduction)
    }

    fn start_all_gather(&self, call: Call, shard: &Buffer, full: &Buffer) -> Result<Ticket> {
        self.link().start_all_gather(call, shard, full)
    }

    fn finish(&self, ticket: Ticket) -> Result<()> {
        self.inner.finish(ticket)
    }

    fn broadcast(&self, call: Call, root: usize, buffer: &Buffer) -> Result<()> {
        self.link().broadcast(call, root, buffer)
    }

    fn send(&self, call: Call, to: usize, buffer: &Buffer) -> Result<()> {
        let struck = self.entered.load(Ordering::Relaxed) >= self.fault.occurrence;
        if let InjectedFaultKind::SlowLinkTo(slow, time) = self.fault.kind
            && slow == to
            && struck
        {
            clock::pass(time);
        }
        self.link().send(call, to, buffer)
    }

    fn recv(&self, call: Call, from: usize, buffer: &Buffer) -> Result<()> {
        self.link().recv(call, from, buffer)
    }

    fn barrier(&self, call: Call) -> Result<()> {
        self.link().barrier(call)
    }

    fn split(&self, color: usize) -> Result<Box<dyn Collective>> {
        self.inner.split(color)
    }

    fn as_backend(&self) -> Option<&dyn Any> {
        self.inner.as_backend()
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }

    fn enter(&self, phase: Phase) -> Result<()> {
        self.inner.enter(phase)?;
        if (self.inner.rank(), phase) != (self.fault.rank, self.fault.phase) {
            return Ok(());
        }
        let time = self.entered.fetch_add(1, Ordering::Relaxed) + 1;
        if self.fault.strikes_at(time) { self.strike(time == self.fault.occurrence) } else { Ok(()) }
    }

    fn abort(&self, why: &str) {
        self.inner.abort(why);
    }
}
