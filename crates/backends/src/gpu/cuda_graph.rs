//! Graphs of NVIDIA GPUs: a chain of kernels and of products, each product a graph of its own that
//! a stream without other work captures. **Not yet run on a GPU.**
//!
//! Nothing is captured on the stream that computes, where candle allocates and frees memory.

use std::ffi::c_void;

use candle_core::cuda_backend::cudarc::driver::{DriverError, sys};

use super::cuda_driver::CudaDriver;
use super::request::{DeviceGraph, Request};
use super::{Arg, Gemm, Kernel, LaunchShape};
use crate::error::Result;

/// A graph that is not instantiated.
#[derive(Debug)]
struct Template(sys::CUgraph);

// SAFETY: one thread at a time uses a graph, and any thread may.
unsafe impl Send for Template {}

impl Drop for Template {
    fn drop(&mut self) {
        // SAFETY: made by the driver, and destroyed only here. A failure leaks it.
        let _ = unsafe { sys::cuGraphDestroy(self.0) };
    }
}

/// An instantiated graph.
#[derive(Debug)]
struct Instance(sys::CUgraphExec);

// SAFETY: as `Template`.
unsafe impl Send for Instance {}

impl Drop for Instance {
    fn drop(&mut self) {
        // SAFETY: made by the driver, and destroyed only here; the driver keeps what still runs.
        let _ = unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}

/// A node of a template.
#[derive(Debug, Clone, Copy)]
struct Node(sys::CUgraphNode);

// SAFETY: as `Template`, to which it belongs.
unsafe impl Send for Node {}

/// The graph of a chain of requests.
#[derive(Debug)]
pub(super) struct CudaGraph {
    driver: &'static CudaDriver,
    instance: Instance,
    /// The nodes of the requests, in their order.
    nodes: Vec<Node>,
    /// The graph that the nodes belong to.
    _template: Template,
}

/// The values of a launch's arguments, at addresses that stay the same.
struct Values {
    values: Vec<u64>,
    pointers: Vec<*mut c_void>,
}

impl Values {
    fn new(args: &[Arg]) -> Self {
        let mut values: Vec<u64> = args.iter().map(|arg| arg.value).collect();
        // CUDA reads the parameter's size in bytes from each value, starting at the low end.
        let pointers = values.iter_mut().map(|value| (&raw mut *value).cast()).collect();
        Values { values, pointers }
    }
}

impl CudaDriver {
    /// Returns the settings of a launch in a graph; `values` must outlive them.
    fn node_of(
        &self,
        kernel: &Kernel,
        shape: LaunchShape,
        values: &mut Values,
    ) -> Result<sys::CUDA_KERNEL_NODE_PARAMS> {
        debug_assert_eq!(values.values.len(), values.pointers.len());
        let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (shape.grid, shape.block);
        Ok(sys::CUDA_KERNEL_NODE_PARAMS {
            func: self.function(kernel, shape.shared_bytes)?.0,
            gridDimX: grid_x,
            gridDimY: grid_y,
            gridDimZ: grid_z,
            blockDimX: block_x,
            blockDimY: block_y,
            blockDimZ: block_z,
            sharedMemBytes: shape.shared_bytes,
            kernelParams: values.pointers.as_mut_ptr(),
            extra: std::ptr::null_mut(),
            kern: std::ptr::null_mut(),
            // The current one.
            ctx: std::ptr::null_mut(),
        })
    }

    /// Returns the graph of a product, which is not launched.
    fn captured(&self, gemm: &Gemm) -> Result<Template> {
        let stream = self.capture_stream()?;
        let failed = |error| self.failed("capture a product".to_owned(), error);
        // No other stream is captured, and no call of another thread is in its way.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives as long as the process and has no work.
        unsafe { sys::cuStreamBeginCapture_v2(stream.cu_stream(), mode) }.result().map_err(failed)?;
        let multiplied = self.multiply_on(stream, gemm);
        let mut graph = std::ptr::null_mut();
        // SAFETY: the capture of this stream began above; the driver writes one handle.
        let ended = unsafe { sys::cuStreamEndCapture(stream.cu_stream(), &raw mut graph) }.result();
        // The handle is null after a failed capture.
        let template = (!graph.is_null()).then_some(Template(graph));
        multiplied?;
        ended.map_err(failed)?;
        template.ok_or_else(|| failed(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)))
    }

    /// Returns the graph of requests, in their order.
    ///
    /// # Errors
    /// Fails if the driver refuses it.
    pub(super) fn chain(&'static self, requests: &[Request]) -> Result<CudaGraph> {
        self.bind()?;
        let failed = |error| self.failed("make a graph".to_owned(), error);
        let mut graph = std::ptr::null_mut();
        // SAFETY: the driver writes one handle.
        unsafe { sys::cuGraphCreate(&raw mut graph, 0) }.result().map_err(failed)?;
        let (template, mut nodes) = (Template(graph), Vec::<Node>::with_capacity(requests.len()));
        for request in requests {
            let before: Vec<sys::CUgraphNode> = nodes.last().map(|node| node.0).into_iter().collect();
            let mut node = std::ptr::null_mut();
            let added = match request {
                Request::Launch { kernel, shape, args } => {
                    let mut values = Values::new(args);
                    let params = self.node_of(kernel, *shape, &mut values)?;
                    // SAFETY: all handles are alive; the driver copies the arguments, which have
                    // the types of the kernel's signature (`build.rs`).
                    unsafe {
                        sys::cuGraphAddKernelNode_v2(
                            &raw mut node,
                            template.0,
                            before.as_ptr(),
                            before.len(),
                            &raw const params,
                        )
                    }
                }
                Request::Product(gemm) => {
                    let child = self.captured(gemm)?;
                    // SAFETY: all handles are alive; the driver copies the child.
                    unsafe {
                        sys::cuGraphAddChildGraphNode(
                            &raw mut node,
                            template.0,
                            before.as_ptr(),
                            before.len(),
                            child.0,
                        )
                    }
                }
            };
            added.result().map_err(failed)?;
            nodes.push(Node(node));
        }
        let mut instance = std::ptr::null_mut();
        // SAFETY: the graph is alive and has no allocations; the driver writes one handle.
        unsafe { sys::cuGraphInstantiateWithFlags(&raw mut instance, template.0, 0) }
            .result()
            .map_err(failed)?;
        Ok(CudaGraph { driver: self, instance: Instance(instance), nodes, _template: template })
    }
}

impl CudaGraph {
    /// Returns false if the driver does not change a node in this way.
    fn is_changed(&self, result: sys::CUresult) -> Result<bool> {
        match result {
            sys::CUresult::CUDA_ERROR_INVALID_VALUE
            | sys::CUresult::CUDA_ERROR_NOT_SUPPORTED
            | sys::CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE => Ok(false),
            result => match result.result() {
                Ok(()) => Ok(true),
                Err(error) => Err(self.driver.failed("change a graph".to_owned(), error)),
            },
        }
    }
}

impl DeviceGraph for CudaGraph {
    fn change(&mut self, at: usize, request: &Request) -> Result<bool> {
        self.driver.bind()?;
        let (instance, node) = (self.instance.0, self.nodes[at].0);
        let changed = match request {
            Request::Launch { kernel, shape, args } => {
                let mut values = Values::new(args);
                let params = self.driver.node_of(kernel, *shape, &mut values)?;
                // SAFETY: as in `chain`; the node belongs to the instance's template.
                unsafe { sys::cuGraphExecKernelNodeSetParams_v2(instance, node, &raw const params) }
            }
            Request::Product(gemm) => {
                let child = self.driver.captured(gemm)?;
                // SAFETY: as above; the driver copies the arguments of the child.
                unsafe { sys::cuGraphExecChildGraphNodeSetParams(instance, node, child.0) }
            }
        };
        self.is_changed(changed)
    }

    fn launch(&self) -> Result<()> {
        self.driver.launch_graph(self.instance.0, self.nodes.len())
    }
}
