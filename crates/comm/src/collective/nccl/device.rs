//! Interface of the backend to a GPU: three streams, marks on them, and small copies to and from
//! the host.
//!
//! `Cuda` implements it for GPUs; a fake in host memory lets the backend's tests run without one.

use std::ops::Range;

use super::library::RawStream;
use crate::error::Result;

/// Streams of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommStream {
    /// All computation, and the calls that must finish before later computation.
    Compute,
    /// Gathers, in parallel with the computation.
    Gather,
    /// Started reductions, in parallel with both.
    Reduce,
}

impl CommStream {
    /// Number of streams.
    pub(super) const COUNT: usize = 3;
}

/// Streams of a GPU; see the module.
pub trait GpuStreams: Send + Sync + 'static {
    /// A point on a stream that the work has reached or not; clones are the same point.
    type Mark: Clone + Send + Sync + 'static;
    /// Device memory with its counterpart on the host.
    type Scratch: Send + 'static;

    /// Makes this device the current one of the calling thread.
    ///
    /// # Errors
    /// The driver refuses.
    fn bind(&self) -> Result<()>;

    /// The CUDA stream of `lane`.
    fn stream(&self, lane: CommStream) -> RawStream;

    /// Marks the end of all work that is on the stream now.
    ///
    /// # Errors
    /// The driver refuses or reports an earlier error.
    fn mark(&self, lane: CommStream) -> Result<Self::Mark>;

    /// Makes later work on the stream wait for the mark, without a wait of the host.
    ///
    /// # Errors
    /// The driver refuses or reports an earlier error.
    fn follow(&self, lane: CommStream, mark: &Self::Mark) -> Result<()>;

    /// Returns true if the work before the mark has finished, without waiting.
    ///
    /// # Errors
    /// The work before the mark has failed.
    fn reached(&self, mark: &Self::Mark) -> Result<bool>;

    /// Allocates scratch of `bytes` bytes.
    ///
    /// # Errors
    /// Device or host has too little memory.
    fn scratch(&self, bytes: usize) -> Result<Self::Scratch>;

    /// Device address of the scratch.
    fn address(&self, scratch: &Self::Scratch) -> usize;

    /// Counterpart on the host. No copy is pending there: a mark after the last one was reached.
    ///
    /// # Errors
    /// The host memory is not accessible.
    fn host<'a>(&self, scratch: &'a mut Self::Scratch) -> Result<&'a mut [u8]>;

    /// Starts to copy `range` of its bytes from the host to the device, on the compute stream.
    ///
    /// # Errors
    /// The driver refuses the copy.
    fn put(&self, scratch: &mut Self::Scratch, range: Range<usize>) -> Result<()>;

    /// Starts to copy `range` of its bytes from the device to the host, on the compute stream.
    ///
    /// # Errors
    /// The driver refuses the copy.
    fn fetch(&self, scratch: &mut Self::Scratch, range: Range<usize>) -> Result<()>;
}
