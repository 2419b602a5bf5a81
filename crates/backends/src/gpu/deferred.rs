//! Deferred launches: while a thread computes a pass over a block for a graph, its launches and
//! products are recorded. At the end they are launched together (`block_graphs.rs`), in their
//! order. **Not yet run on a GPU.**
//!
//! The result is that of launches one by one, because everything between a recorded launch and its
//! end is one of these:
//! - **Memory that is allocated, and set or uploaded when it is new.** It does not overlap memory
//!   of recorded launches: the recording holds their tensors, so none is freed before it is
//!   launched. A request is recorded only if every address in it is of a held tensor.
//! - **Other work of the device**: copies, operations of candle, reads and waits. It launches the
//!   recorded work first ([`issue_deferred`]). Operations of candle in the code of a block itself
//!   cannot be seen here, so only blocks without them are deferred (`BlockConfig::launches_alone`).
//!
//! The recording holds at most [`HELD_BYTES`] of results, then it is launched as one part of the
//! block. A second queue would overtake it, so a deferred block has none.

use std::cell::RefCell;
use std::collections::HashSet;

use candle_core::Device;

use super::block_graphs::{BlockGraphs, BlockPass, PartKey};
use super::held::{Held, is_held, replace_held};
use super::request::Request;
use super::{Arg, Driver, Gemm, Kernel, LaunchShape, real_driver_on};
use crate::error::{Error, Result};
use crate::runtime::deferred::{Issue, defer_by, issue_deferred};

/// Bytes of results that recorded launches hold at most, with those of the last launch beside
/// them: those of all launches of a pass over a block of 1,024 columns for a micro-batch of about
/// 1,000 tokens.
pub const HELD_BYTES: usize = 256 << 20;

/// The recording of a thread.
struct Recording {
    device: Device,
    driver: &'static dyn Driver,
    graphs: BlockGraphs,
    /// The pass, and the number of parts that were launched before.
    part: PartKey,
    requests: Vec<Request>,
    /// The addresses that the requests write to, and their bytes in all.
    written: (HashSet<u64>, u64),
    /// An error of a launch that had no caller to return it to.
    failed: Option<Error>,
}

thread_local! {
    static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// The driver of a thread that records.
#[derive(Debug)]
struct Deferring;

/// Returns the driver that records the work of this thread on `device`, if it does.
pub(super) fn recording_driver(device: &Device) -> Option<&'static dyn Driver> {
    let is_recorded = |recording: &Recording| recording.device.same_device(device);
    RECORDING.with_borrow(|recording| recording.as_ref().is_some_and(is_recorded)).then_some(&Deferring)
}

/// Returns whether this thread defers its launches on `device`.
pub fn is_deferring(device: &Device) -> bool {
    recording_driver(device).is_some()
}

/// Launches what this thread has recorded before an operation of candle in an op. The block's end
/// returns an error of it.
pub(super) fn issue_before_candle() {
    if let Err(error) = issue_deferred() {
        RECORDING.with_borrow_mut(|recording| {
            if let Some(recording) = recording {
                recording.failed.get_or_insert(error);
            }
        });
    }
}

/// Launches what this thread has recorded.
fn issue() -> Result<()> {
    let taken = RECORDING.with_borrow_mut(|recording| {
        let recording = recording.as_mut().filter(|recording| !recording.requests.is_empty())?;
        let part = recording.part;
        recording.part.part += 1;
        recording.written = Default::default();
        let requests = std::mem::take(&mut recording.requests);
        Some((recording.driver, recording.graphs.clone(), part, requests))
    });
    let Some((driver, graphs, part, requests)) = taken else { return Ok(()) };
    let held = replace_held(Some(Held::default()));
    let issued = graphs.issue(driver, part, requests);
    // Its memory is freed behind the launches.
    drop(held);
    issued
}

impl Recording {
    /// Returns an error that had no caller yet.
    fn check(&mut self) -> Result<()> {
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Records a request if all of its memory is held. Returns the request if not.
    fn record(&mut self, request: Request) -> Option<Request> {
        if request.memory().iter().any(|arg| !is_held(arg.value)) {
            return Some(request);
        }
        let (addresses, bytes) = &mut self.written;
        for arg in request.written() {
            *bytes += if addresses.insert(arg.value) { arg.rows * arg.row_bytes } else { 0 };
        }
        self.requests.push(request);
        None
    }

    fn is_full(&self) -> bool {
        self.written.1 > HELD_BYTES as u64
    }
}

/// Records a request of this thread, or launches it behind everything recorded before.
fn request(request: Request) -> Result<()> {
    let at_once = RECORDING.with_borrow_mut(|recording| -> Result<_> {
        let recording = recording.as_mut().ok_or_else(|| Error::internal("a launch behind its block"))?;
        recording.check()?;
        Ok(recording.record(request).map(|request| (recording.driver, request)))
    })?;
    if let Some((driver, request)) = at_once {
        issue()?;
        return request.issue(driver);
    }
    if RECORDING.with_borrow(|recording| recording.as_ref().is_some_and(Recording::is_full)) {
        issue()?;
    }
    Ok(())
}

/// Calls the device's own driver.
fn real<R>(call: impl FnOnce(&'static dyn Driver) -> R) -> Option<R> {
    RECORDING.with_borrow(|recording| recording.as_ref().map(|recording| recording.driver)).map(call)
}

impl Driver for Deferring {
    fn launch(&self, kernel: &Kernel, shape: LaunchShape, args: &[Arg]) -> Result<()> {
        if shape.is_empty() {
            return Ok(());
        }
        request(Request::Launch { kernel: *kernel, shape, args: args.to_vec() })
    }

    fn gemm(&self, gemm: &Gemm) -> Result<()> {
        request(Request::Product(Box::new(*gemm)))
    }

    fn scales_rows(&self) -> bool {
        real(|driver| driver.scales_rows()).unwrap_or(true)
    }

    fn choose_algorithm(&self, _: usize) -> Result<()> {
        Err(Error::internal("another algorithm inside a block"))
    }

    fn record_attention(&self, flops: &dyn Fn() -> f64) {
        real(|driver| driver.record_attention(flops));
    }

    fn record_upload(&self, bytes: usize) {
        real(|driver| driver.record_upload(bytes));
    }

    fn record_read(&self) {
        issue_before_candle();
        real(|driver| driver.record_read());
    }
}

/// Ends the recording of a thread, even if it panics.
struct Ended(Option<Issue>);

impl Drop for Ended {
    fn drop(&mut self) {
        defer_by(self.0);
        RECORDING.set(None);
        drop(replace_held(None));
    }
}

impl BlockGraphs {
    /// Computes `work`, a pass over block `layer` on `device`, whose launches are requested
    /// together at its end: by one call if they are those of an earlier pass. On a CPU without
    /// kernels it is computed as usual. In `work` all operations on tensors are those of `ops` and
    /// of `runtime`.
    ///
    /// If `work` fails, the launches before are requested all the same, as without graphs; if it
    /// panics, they are dropped.
    ///
    /// # Errors
    /// Those of `work` and of its launches. The driver makes no graph: it is out of memory, for
    /// example.
    pub fn run<R>(
        &self,
        device: &Device,
        layer: usize,
        pass: BlockPass,
        work: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let is_recording = RECORDING.with_borrow(Option::is_some);
        let Some(driver) = real_driver_on(device).filter(|_| !is_recording) else { return work() };
        RECORDING.set(Some(Recording {
            device: device.clone(),
            driver,
            graphs: self.clone(),
            part: PartKey { layer, pass, part: 0 },
            requests: Vec::new(),
            written: Default::default(),
            failed: None,
        }));
        replace_held(Some(Held::default()));
        let ended = Ended(defer_by(Some(issue)));
        let result = work();
        let check = |recording: &mut Option<Recording>| recording.as_mut().map_or(Ok(()), Recording::check);
        let issued = RECORDING.with_borrow_mut(check).and_then(|()| issue());
        drop(ended);
        let result = result?;
        issued.map(|()| result)
    }
}

#[cfg(all(test, feature = "kernel-emu"))]
mod tests;
