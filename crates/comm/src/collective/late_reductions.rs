//! A group whose started reductions run as late as possible, for tests of the computation beside
//! them.
//!
//! The memory of a reduction holds NaN until the reduction is finished, so an early read gives NaN,
//! and an early write is detected.

use std::collections::VecDeque;
use std::slice::from_raw_parts_mut;
use std::sync::{Arc, Mutex};

use super::{Call, Collective, Operation, Ticket};
use crate::error::{Error, Result};
use crate::locks::locked;
use crate::runtime::buffer::Buffer;

/// All bits of a byte: a NaN in every float type.
const NAN: u8 = 0xff;

/// A communicator with late reductions. Groups split from it share the list of calls.
#[derive(Debug)]
pub struct LateReductions {
    inner: Arc<dyn Collective>,
    late: Mutex<VecDeque<LateReduction>>,
    calls: Arc<Mutex<Vec<LateCall>>>,
}

/// Start or end of a reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LateCall {
    /// A reduction of memory at an address has started.
    Started(Call, usize),
    /// The reduction has finished.
    Finished(Call, usize),
}

#[derive(Debug)]
struct LateReduction {
    call: Call,
    full: Buffer,
    sum: Buffer,
    /// Contents of both after the reduction.
    done: [Vec<u8>; 2],
}

impl LateReductions {
    /// Wraps `inner`; reductions run when they are finished.
    pub fn new(inner: Arc<dyn Collective>) -> Self {
        LateReductions { inner, late: Mutex::default(), calls: Arc::default() }
    }

    /// Started and finished reductions of this communicator and those split from it.
    pub fn calls(&self) -> Arc<Mutex<Vec<LateCall>>> {
        Arc::clone(&self.calls)
    }
}

#[allow(clippy::mut_from_ref, reason = "a buffer is memory that others write")]
fn bytes(buffer: &Buffer) -> &mut [u8] {
    // SAFETY: host memory of that length, which the test's only thread of this rank does not use
    // now.
    unsafe {
        from_raw_parts_mut(std::ptr::with_exposed_provenance_mut::<u8>(buffer.address()), buffer.bytes())
    }
}

impl Collective for LateReductions {
    fn inner(&self) -> Option<&dyn Collective> {
        Some(&*self.inner)
    }

    fn call(&self, call: Call, operation: Operation<'_>) -> Result<Option<Ticket>> {
        let Operation::StartReduction(reduction) = operation else {
            return self.inner.call(call, operation);
        };
        self.inner.call(call, Operation::Reduce(reduction))?;
        let (full, sum) = (reduction.full().clone(), reduction.sum().clone());
        let done = [&full, &sum].map(|buffer| bytes(buffer).to_vec());
        [&full, &sum].into_iter().for_each(|buffer| bytes(buffer).fill(NAN));
        locked(&self.calls).push(LateCall::Started(call, full.address()));
        locked(&self.late).push_back(LateReduction { call, full, sum, done });
        Ok(Some(Ticket(u64::MAX)))
    }

    fn open_reduction_stream(&self) -> Result<bool> {
        Ok(true)
    }

    fn finish(&self, ticket: Ticket) -> Result<()> {
        if ticket.0 != u64::MAX {
            return self.inner.finish(ticket);
        }
        let late = locked(&self.late).pop_front();
        let LateReduction { call, full, sum, done } =
            late.ok_or_else(|| Error::internal("a reduction is finished that was not started"))?;
        for buffer in [&full, &sum] {
            if bytes(buffer).iter().any(|byte| *byte != NAN) {
                return Err(Error::internal(format!("{call} was written while it was summed")));
            }
        }
        for (buffer, done) in [&full, &sum].into_iter().zip(done) {
            bytes(buffer).copy_from_slice(&done);
        }
        locked(&self.calls).push(LateCall::Finished(call, full.address()));
        Ok(())
    }

    fn split(&self, color: usize) -> Result<Box<dyn Collective>> {
        let inner = Arc::from(self.inner.split(color)?);
        Ok(Box::new(LateReductions { inner, late: Mutex::default(), calls: self.calls() }))
    }
}
