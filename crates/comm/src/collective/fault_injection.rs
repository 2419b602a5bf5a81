//! Planted faults in the ranks of a real run, over any backend, for tests of the end of runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::in_process::{InjectedFault, InjectedFaultKind};
use super::{Call, Collective, Operation, Phase, Ticket};
use crate::error::{Error, ErrorCategory, Result};
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

    fn strike(&self, first: bool) -> Result<()> {
        let text = format!("planted fault {}", self.fault);
        if first {
            (self.notice)(&text);
        }
        match self.fault.kind {
            InjectedFaultKind::Error => return Err(Error::new(ErrorCategory::Transient, text)),
            InjectedFaultKind::Panic => panic!("{text}"),
            // Silent, as if the process had been killed.
            InjectedFaultKind::Exit => std::process::exit(i32::from(ErrorCategory::Internal.exit_code())),
            InjectedFaultKind::Device(failure) => failure.plan(),
            InjectedFaultKind::LateKernelFault => return Err(self.fault.late_kernel_fault()),
            InjectedFaultKind::SlowLink(time) => {
                self.link_delay.store(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
            }
            kind => kind.hold_up(),
        }
        Ok(())
    }
}

impl std::fmt::Debug for FaultInjector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} with planted fault {}", self.inner, self.fault)
    }
}

impl Collective for FaultInjector {
    fn inner(&self) -> Option<&dyn Collective> {
        Some(&*self.inner)
    }

    fn call(&self, call: Call, operation: Operation<'_>) -> Result<Option<Ticket>> {
        if let InjectedFaultKind::SlowLinkTo(slow, time) = self.fault.kind
            && matches!(operation, Operation::Send { to, .. } if to == slow)
            && self.entered.load(Ordering::Relaxed) >= self.fault.occurrence
        {
            clock::pass(time);
        }
        let delay = self.link_delay.load(Ordering::Relaxed);
        if delay > 0 {
            clock::pass(Duration::from_nanos(delay));
        }
        self.inner.call(call, operation)
    }

    fn enter(&self, phase: Phase) -> Result<()> {
        self.inner.enter(phase)?;
        if (self.inner.rank(), phase) != (self.fault.rank, self.fault.phase) {
            return Ok(());
        }
        let time = self.entered.fetch_add(1, Ordering::Relaxed) + 1;
        if self.fault.strikes_at(time) { self.strike(time == self.fault.occurrence) } else { Ok(()) }
    }
}
