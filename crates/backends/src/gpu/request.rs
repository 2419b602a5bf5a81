//! Requests of a driver as values, and graphs of them.

use std::fmt::Debug;

use super::{Arg, Driver, Gemm, Kernel, LaunchShape};
use crate::error::Result;

/// A launch or a product.
#[derive(Debug, Clone)]
pub enum Request {
    /// A kernel, its threads and its arguments.
    Launch {
        /// The kernel that runs.
        kernel: Kernel,
        /// The threads of the launch.
        shape: LaunchShape,
        /// The arguments, in their order.
        args: Vec<Arg>,
    },
    /// A product of matrices.
    Product(Box<Gemm>),
}

impl Request {
    /// Requests it of a driver.
    pub(super) fn issue(&self, driver: &dyn Driver) -> Result<()> {
        match self {
            Request::Launch { kernel, shape, args } => driver.launch(kernel, *shape, args),
            Request::Product(gemm) => driver.gemm(gemm),
        }
    }

    /// Returns whether both compute the same from the same memory: all numbers have equal bits.
    pub(super) fn is_same(&self, other: &Request) -> bool {
        match (self, other) {
            (Request::Launch { kernel, shape, args }, Request::Launch { kernel: k, shape: s, args: a }) => {
                (kernel, shape, args) == (k, s, a)
            }
            (Request::Product(gemm), Request::Product(other)) => gemm.is_same(other),
            _ => false,
        }
    }

    /// Returns whether a graph with one of them can be changed to the other: the same function, or
    /// products of the same sizes and types.
    pub(super) fn is_alike(&self, other: &Request) -> bool {
        match (self, other) {
            (Request::Launch { kernel, args, .. }, Request::Launch { kernel: k, args: a, .. }) => {
                let sizes = |args: &[Arg]| args.iter().map(|arg| arg.size).collect::<Vec<_>>();
                kernel == k && sizes(args) == sizes(a)
            }
            (Request::Product(gemm), Request::Product(other)) => gemm.is_alike(other),
            _ => false,
        }
    }

    /// Returns the calls of the driver that replace another request by it in a graph. That of a
    /// product is captured: the capture begins, multiplies, ends, is set and is destroyed.
    pub(super) fn calls_of_change(&self) -> u64 {
        match self {
            Request::Launch { .. } => 1,
            Request::Product(_) => 5,
        }
    }

    /// Returns the addresses that it uses. All arguments with accessible memory have one.
    pub(super) fn memory(&self) -> Vec<&Arg> {
        let args: Vec<&Arg> = match self {
            Request::Launch { args, .. } => args.iter().collect(),
            Request::Product(gemm) => {
                let matrices = [&gemm.a, &gemm.b, &gemm.c, &gemm.d].map(|matrix| &matrix.arg);
                matrices.into_iter().chain(gemm.scales.iter().flatten()).collect()
            }
        };
        args.into_iter().filter(|arg| arg.rows > 0).collect()
    }

    /// Returns the memory that it writes.
    pub(super) fn written(&self) -> Vec<&Arg> {
        match self {
            Request::Launch { args, .. } => args.iter().filter(|arg| arg.is_written).collect(),
            Request::Product(gemm) => vec![&gemm.d.arg],
        }
    }
}

/// Requests that a device runs in their order by one call.
pub trait DeviceGraph: Debug + Send {
    /// Replaces the request in a place by one that is alike. Returns false if the driver refuses
    /// it; the graph must not be launched then.
    ///
    /// # Errors
    /// An operation of the device failed; the graph must not be launched then.
    fn change(&mut self, at: usize, request: &Request) -> Result<bool>;

    /// Runs the requests, after all earlier launches.
    ///
    /// # Errors
    /// Those of [`Driver::launch`].
    fn launch(&self) -> Result<()>;
}
