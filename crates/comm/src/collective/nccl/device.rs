//! What the backend needs of a GPU: three streams, marks on them, and a few bytes to and fro.
//!
//! `Cuda` is the real one; a stand-in in host memory lets the backend's tests run without a GPU.

use std::ops::Range;

use super::library::RawStream;
use crate::error::Result;

/// Which of a rank's streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommStream {
    /// All computation, and the calls that are done for what is computed after them.
    Compute,
    /// Gathers, beside the computation.
    Gather,
    /// Reductions that were started, beside both.
    Reduce,
}

impl CommStream {
    /// How many there are.
    pub(super) const COUNT: usize = 3;
}

/// See the module.
pub trait GpuStreams: Send + Sync + 'static {
    /// A point on a stream that work has reached or not; clones are the same point.
    type Mark: Clone + Send + Sync + 'static;
    /// Memory of the device with its counterpart on the host.
    type Scratch: Send + 'static;

    /// Makes this device the current one of the calling thread.
    ///
    /// # Errors
    /// When the driver refuses.
    fn bind(&self) -> Result<()>;

    /// The CUDA stream of a lane.
    fn stream(&self, lane: CommStream) -> RawStream;

    /// Marks the end of all that is on the stream now.
    ///
    /// # Errors
    /// When the driver refuses or has met an earlier error.
    fn mark(&self, lane: CommStream) -> Result<Self::Mark>;

    /// Lets what comes next on the stream wait for the mark; the host goes on.
    ///
    /// # Errors
    /// When the driver refuses or has met an earlier error.
    fn follow(&self, lane: CommStream, mark: &Self::Mark) -> Result<()>;

    /// Whether the work before the mark is done; one question, no waiting.
    ///
    /// # Errors
    /// When the work before the mark has failed.
    fn reached(&self, mark: &Self::Mark) -> Result<bool>;

    /// New scratch of `bytes` bytes.
    ///
    /// # Errors
    /// When device or host has not enough memory.
    fn scratch(&self, bytes: usize) -> Result<Self::Scratch>;

    /// Its address on the device.
    fn address(&self, scratch: &Self::Scratch) -> usize;

    /// Its counterpart on the host. Nothing is under way there: a mark after the last copy was reached.
    ///
    /// # Errors
    /// When the memory cannot be had from the host.
    fn host<'a>(&self, scratch: &'a mut Self::Scratch) -> Result<&'a mut [u8]>;

    /// Starts to bring `range` of its bytes from the host, on the compute stream.
    ///
    /// # Errors
    /// When the driver refuses the copy.
    fn put(&self, scratch: &mut Self::Scratch, range: Range<usize>) -> Result<()>;

    /// Starts to bring `range` of its bytes to the host, on the compute stream.
    ///
    /// # Errors
    /// When the driver refuses the copy.
    fn fetch(&self, scratch: &mut Self::Scratch, range: Range<usize>) -> Result<()>;
}
