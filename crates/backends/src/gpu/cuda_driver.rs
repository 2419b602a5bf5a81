//! The driver of NVIDIA GPUs: it loads the code that `build.rs` compiles from `kernels/`, and runs
//! it on the stream of candle's device, in order with candle's own work. Some work runs on a second
//! stream, ordered by events (`beside.rs`). Not yet run on a GPU.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

use candle_core::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DriverError, result, sys};

use super::beside::{TwoQueues, WorkBeside, launch_beside};
use super::cublas::{Cublas, scales_rows};
use super::queue_limit::QueueLimit;
use super::{Arg, DeviceGraph, Driver, Gemm, Kernel, LaunchShape, Request, launch_text};
use crate::error::{DeviceFault, Error, Result};
use crate::locks::locked;
use crate::runtime::device_memory::with_room;
use crate::runtime::device_queue::{wait_for_event, wait_for_stream};
use crate::runtime::gpu_pool::make_room_on;
use crate::runtime::gpu_support::{KERNELS_RUN_ON, NEWER_GPU};
use crate::runtime::planned_failure::PlannedFailure;

/// Aligns bytes so that the driver may read wider numbers from them.
#[repr(C, align(64))]
struct Aligned<T>(T);

/// The compiled code of each file of `kernels/`.
const CODE: &[(&str, &[u8])] = &include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// Bytes of dynamic shared memory available to a kernel without an attribute.
const SHARED_UNASKED: u32 = 48 << 10;

/// Environment variable: 1 waits after each launch, so that an error names the kernel that caused
/// it.
const SYNC_VARIABLE: &str = "FINETUNE_CUDA_SYNC";

/// One stream of one GPU.
pub(crate) struct CudaDriver {
    stream: Arc<CudaStream>,
    /// The stream on which all memory is allocated and freed: the same one, or that of the first
    /// queue.
    of_memory: Arc<CudaStream>,
    /// True if the binary has code for this GPU.
    runs_code: bool,
    /// True if products of e4m3 take scales of rows.
    scales_rows: bool,
    /// True if the host waits after each launch.
    waits: bool,
    /// Code of the context, which both queues launch.
    loaded: Arc<Mutex<Loaded>>,
    cublas: Mutex<Option<Cublas>>,
    queue: Mutex<QueueLimit<CudaEvent>>,
    /// The driver of the second queue, started at its first use.
    second: OnceLock<&'static CudaDriver>,
    /// A stream without work, on which products are captured for graphs.
    captures: OnceLock<Arc<CudaStream>>,
}

/// Handles of the CUDA driver, which live as long as the process.
#[derive(Default)]
struct Loaded {
    modules: HashMap<&'static str, DriverHandle<sys::CUmod_st>>,
    functions: HashMap<&'static str, Function>,
}

#[derive(Clone, Copy)]
pub(super) struct DriverHandle<T>(pub(super) *mut T);

// SAFETY: CUDA driver handles may be used from any thread; the driver synchronizes access itself.
unsafe impl<T> Send for DriverHandle<T> {}

#[derive(Clone, Copy)]
struct Function {
    handle: DriverHandle<sys::CUfunc_st>,
    /// Permitted bytes of dynamic shared memory.
    shared_bytes: u32,
}

impl fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaDriver(GPU {})", self.stream.context().ordinal())
    }
}

/// Returns the driver of the stream of `device`, created at the first call; none for GPUs older
/// than the code.
pub(super) fn driver_on(device: &CudaDevice) -> Option<&'static dyn Driver> {
    /// Keyed by the address of the stream, which is fixed for the life of the process.
    static DRIVERS: Mutex<Vec<(DriverHandle<sys::CUstream_st>, &'static CudaDriver)>> =
        Mutex::new(Vec::new());
    let stream = device.cuda_stream();
    let mut drivers = locked(&DRIVERS);
    let known = drivers.iter().find(|(known, _)| known.0 == stream.cu_stream());
    let driver = known.map(|(_, driver)| *driver).unwrap_or_else(|| {
        let waits = std::env::var(SYNC_VARIABLE).is_ok_and(|value| value == "1");
        // If the driver does not answer, the first launch gives its error.
        let capability = compute_capability(&stream);
        let runs_code = capability.as_ref().map_or(true, |capability| capability.0 >= 8);
        let scales_rows = capability.is_ok_and(scales_rows);
        let key = DriverHandle(stream.cu_stream());
        let driver: &'static CudaDriver = Box::leak(Box::new(CudaDriver {
            of_memory: stream.clone(),
            stream,
            runs_code,
            scales_rows,
            waits,
            loaded: Arc::default(),
            cublas: Mutex::default(),
            queue: Mutex::default(),
            second: OnceLock::new(),
            captures: OnceLock::new(),
        }));
        drivers.push((key, driver));
        driver
    });
    driver.runs_code.then_some(driver)
}

/// Returns the compute capability, from the driver itself: cudarc's answer may be the error of an
/// earlier free.
fn compute_capability(stream: &CudaStream) -> Result<(i32, i32), DriverError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    let device = stream.context().cu_device();
    // SAFETY: a context holds a valid device.
    let number = |attribute| unsafe { result::device::get_attribute(device, attribute) };
    Ok((number(MAJOR)?, number(MINOR)?))
}

/// Returns the error of a call for a stream; the host `waits` after each launch or not.
fn failed(stream: &CudaStream, waits: bool, doing: &str, error: &DriverError) -> Error {
    let ordinal = stream.context().ordinal();
    let error = Error::of_device(format!("cannot {doing} on GPU {ordinal}"), &error.to_string());
    match (error.device_fault(), waits) {
        (Some(DeviceFault::Kernel), true) => error.hint("please report this message"),
        (Some(DeviceFault::Kernel), false) => {
            error.because("a GPU reports faults late: an earlier kernel may have caused this one")
        }
        _ => error,
    }
}

impl CudaDriver {
    pub(super) fn failed(&self, doing: String, error: DriverError) -> Error {
        failed(&self.stream, self.waits, &doing, &error)
    }

    /// Waits for all launched work if each launch is synchronous.
    fn wait_if_asked(&self, doing: impl FnOnce() -> String) -> Result<()> {
        if !self.waits {
            return Ok(());
        }
        wait_for_stream(&self.stream).map_err(|error| self.failed(doing(), error))
    }

    /// Runs `call`, and once again with an empty memory pool if the GPU is out of memory: modules
    /// and libraries allocate outside the pool.
    fn with_room<T>(&self, kind: PlannedFailure, call: impl FnMut() -> Result<T>) -> Result<T> {
        with_room(kind, || make_room_on(&self.of_memory), call)
    }

    /// Returns the driver of a second queue of the GPU. Both live as long as the process.
    fn second(&self) -> Result<&'static CudaDriver> {
        if let Some(second) = self.second.get().copied() {
            return Ok(second);
        }
        let stream = self.stream.context().new_stream();
        let stream = stream.map_err(|error| self.failed("start a second stream".to_owned(), error))?;
        Ok(self.second.get_or_init(|| {
            Box::leak(Box::new(CudaDriver {
                stream,
                of_memory: self.of_memory.clone(),
                runs_code: self.runs_code,
                scales_rows: self.scales_rows,
                waits: self.waits,
                loaded: self.loaded.clone(),
                cublas: Mutex::default(),
                queue: Mutex::default(),
                second: OnceLock::new(),
                captures: OnceLock::new(),
            }))
        }))
    }

    /// Returns the stream on which products are captured.
    pub(super) fn capture_stream(&self) -> Result<&Arc<CudaStream>> {
        if let Some(stream) = self.captures.get() {
            return Ok(stream);
        }
        let stream = self.stream.context().new_stream();
        let stream = stream.map_err(|error| self.failed("start a stream for captures".to_owned(), error))?;
        Ok(self.captures.get_or_init(|| stream))
    }

    /// Launches or captures a product on `stream`.
    pub(super) fn multiply_on(&self, stream: &Arc<CudaStream>, gemm: &Gemm) -> Result<()> {
        self.cublas(&mut locked(&self.cublas))?.multiply(stream, gemm)
    }

    /// Launches a graph of so many launches and products.
    pub(super) fn launch_graph(&self, graph: sys::CUgraphExec, requests: usize) -> Result<()> {
        self.bind()?;
        self.with_room(PlannedFailure::Module, || {
            // SAFETY: the graph is alive. Its addresses are those of tensors that are freed on this
            // stream, after the graph (`deferred.rs`).
            let launched = unsafe { sys::cuGraphLaunch(graph, self.stream.cu_stream()) };
            launched.result().map_err(|error| self.failed("start a graph".to_owned(), error))
        })?;
        (0..requests).try_for_each(|_| self.queued())
    }

    /// Counts a launch or a product, and waits if the queue is too long.
    fn queued(&self) -> Result<()> {
        let (mark, wait) = (|| self.stream.record_event(None), |mark: CudaEvent| wait_for_event(&mark));
        let limited = locked(&self.queue).launched(mark, wait);
        limited.map_err(|error| self.failed("finish earlier kernels".to_owned(), error))
    }

    pub(super) fn bind(&self) -> Result<()> {
        self.stream.context().bind_to_thread().map_err(|error| self.failed("compute".to_owned(), error))
    }

    /// Returns the function of `kernel`, permitted to use `shared_bytes` of dynamic shared memory.
    pub(super) fn function(
        &self,
        kernel: &Kernel,
        shared_bytes: u32,
    ) -> Result<DriverHandle<sys::CUfunc_st>> {
        let mut loaded = locked(&self.loaded);
        let mut function = match loaded.functions.get(kernel.name) {
            Some(function) => *function,
            None => {
                let module = self.module(&mut loaded, kernel.module)?;
                let name = CString::new(kernel.name)
                    .map_err(|_| Error::internal(format!("{:?} is not a kernel name", kernel.name)))?;
                // SAFETY: modules are never unloaded.
                let handle = unsafe { result::module::get_function(module.0, name) }
                    .map_err(|error| self.failed(format!("find the kernel {}", kernel.name), error))?;
                Function { handle: DriverHandle(handle), shared_bytes: SHARED_UNASKED }
            }
        };
        if shared_bytes > function.shared_bytes {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function belongs to a loaded module.
            unsafe {
                result::function::set_function_attribute(function.handle.0, attribute, shared_bytes as i32)
            }
            .map_err(|error| {
                let doing = format!("give the kernel {} {shared_bytes} bytes of shared memory", kernel.name);
                self.failed(doing, error)
            })?;
            function.shared_bytes = shared_bytes;
        }
        loaded.functions.insert(kernel.name, function);
        Ok(function.handle)
    }

    fn module(&self, loaded: &mut Loaded, name: &'static str) -> Result<DriverHandle<sys::CUmod_st>> {
        if let Some(module) = loaded.modules.get(name) {
            return Ok(*module);
        }
        let (_, code) = CODE
            .iter()
            .find(|(module, _)| *module == name)
            .ok_or_else(|| Error::internal(format!("this binary has no kernels of {name}")))?;
        // SAFETY: the bytes are a fat binary from nvcc, which records its own length.
        let module = unsafe { result::module::load_data(code.as_ptr().cast()) };
        let module = DriverHandle(module.map_err(|error| self.cannot_load(name, error))?);
        loaded.modules.insert(name, module);
        Ok(module)
    }

    /// Loads all functions of a module.
    fn load_functions(&self, module: DriverHandle<sys::CUmod_st>) -> Result<(), DriverError> {
        let mut count = 0;
        // SAFETY: the module is loaded, and the driver writes one number.
        unsafe { sys::cuModuleGetFunctionCount(&raw mut count, module.0) }.result()?;
        let mut functions = vec![std::ptr::null_mut(); count as usize];
        // SAFETY: the module is loaded and has at least so many functions.
        unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module.0) }.result()?;
        // SAFETY: the functions belong to a loaded module.
        functions.into_iter().try_for_each(|function| unsafe { sys::cuFuncLoad(function) }.result())
    }

    /// Returns the products' library, started at the first call.
    fn cublas<'a>(&self, started: &'a mut Option<Cublas>) -> Result<&'a mut Cublas> {
        Ok(match started {
            Some(cublas) => cublas,
            none => none.insert(Cublas::new(&self.stream)?),
        })
    }

    fn cannot_load(&self, name: &str, error: DriverError) -> Error {
        let context = self.stream.context();
        if error.0 != sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU {
            return self.failed(format!("load the kernels of {name}"), error);
        }
        let capability = context.compute_capability().map_or("unknown".into(), |(a, b)| format!("{a}.{b}"));
        Error::user(format!("cannot use GPU {}", context.ordinal()))
            .because(format!(
                "its compute capability is {capability}; this binary has kernels for {KERNELS_RUN_ON}"
            ))
            .hint(NEWER_GPU)
    }
}

impl Driver for CudaDriver {
    fn launch(&self, kernel: &Kernel, shape: LaunchShape, args: &[Arg]) -> Result<()> {
        if shape.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // candle does not wait for its own kernels: do not attribute their errors to this kernel.
        self.wait_if_asked(|| format!("finish candle's operations before the kernel {}", kernel.name))?;
        let mut values: Vec<u64> = args.iter().map(|arg| arg.value).collect();
        // CUDA reads the parameter's size in bytes from each value, starting at the low end.
        let mut pointers: Vec<*mut c_void> =
            values.iter_mut().map(|value| (&raw mut *value).cast()).collect();
        let ([gx, gy, gz], [bx, by, bz]) = (shape.grid, shape.block);
        self.with_room(PlannedFailure::Module, || {
            let function = self.function(kernel, shape.shared_bytes)?;
            // SAFETY: `build.rs` generated the call from the kernel's signature, so the arguments
            // have the declared types. The tensors behind them are freed on the stream of memory,
            // after the kernel: it is this stream, or waits for this one before (`beside.rs`).
            let launched = unsafe {
                let stream = self.stream.cu_stream();
                result::launch_kernel(
                    function.0,
                    (gx, gy, gz),
                    (bx, by, bz),
                    shape.shared_bytes,
                    stream,
                    &mut pointers,
                )
            };
            launched
                .map_err(|error| self.failed(format!("start {}", launch_text(kernel, shape, args)), error))
        })?;
        self.wait_if_asked(|| format!("run {}", launch_text(kernel, shape, args)))?;
        self.queued()
    }

    fn gemm(&self, gemm: &Gemm) -> Result<()> {
        self.bind()?;
        self.wait_if_asked(|| "finish candle's operations before a product".to_owned())?;
        let mut started = locked(&self.cublas);
        self.with_room(PlannedFailure::Product, || self.cublas(&mut started)?.multiply(&self.stream, gemm))?;
        drop(started);
        self.wait_if_asked(|| format!("multiply matrices, m, n, k of {:?}", gemm.size()))?;
        self.queued()
    }

    fn scales_rows(&self) -> bool {
        self.scales_rows
    }

    fn choose_algorithm(&self, index: usize) -> Result<()> {
        self.bind()?;
        self.cublas(&mut locked(&self.cublas)).map(|cublas| cublas.choose_algorithm(index))
    }

    fn beside(&self, work: &mut dyn FnMut(&dyn Driver) -> Result<()>) -> Result<Option<Box<dyn WorkBeside>>> {
        self.bind()?;
        let queues = Queues { first: self, second: self.second()? };
        let end = launch_beside(&queues, || work(queues.second))?;
        Ok(Some(Box::new(End { of: end, first: self.stream.clone(), waits: self.waits })))
    }

    fn graph(&'static self, requests: &[Request]) -> Result<Option<Box<dyn DeviceGraph>>> {
        // With a wait behind each launch, an error names its kernel.
        if self.waits {
            return Ok(None);
        }
        let graph = self.with_room(PlannedFailure::Module, || self.chain(requests))?;
        Ok(Some(Box::new(graph)))
    }

    fn preload(&self) -> Result<()> {
        self.bind()?;
        self.with_room(PlannedFailure::Module, || self.second().map(drop))?;
        for (name, _) in CODE {
            self.with_room(PlannedFailure::Module, || {
                let module = self.module(&mut locked(&self.loaded), name)?;
                self.load_functions(module).map_err(|error| self.cannot_load(name, error))
            })?;
        }
        let mut started = locked(&self.cublas);
        self.with_room(PlannedFailure::Product, || self.cublas(&mut started).map(drop))
    }
}

/// The two queues of a GPU.
struct Queues<'a> {
    first: &'a CudaDriver,
    second: &'static CudaDriver,
}

impl TwoQueues for Queues<'_> {
    type Mark = CudaEvent;

    fn follow(&self) -> Result<()> {
        let Queues { first, second } = self;
        let followed = second.stream.join(&first.stream);
        followed.map_err(|error| first.failed("order two streams".to_owned(), error))
    }

    fn mark(&self) -> Result<CudaEvent> {
        let event = self.second.stream.record_event(None);
        event.map_err(|error| self.first.failed("order two streams".to_owned(), error))
    }

    fn finish(&self) {
        // The failure before this one is reported.
        let _ = wait_for_stream(&self.second.stream);
    }
}

/// The end of work on the second queue.
#[derive(Debug)]
struct End {
    of: CudaEvent,
    first: Arc<CudaStream>,
    /// True if the host waits after each launch.
    waits: bool,
}

impl WorkBeside for End {
    fn join(&self) -> Result<()> {
        let joined = self.first.context().bind_to_thread().and_then(|()| self.first.wait(&self.of));
        joined.map_err(|error| failed(&self.first, self.waits, "order two streams", &error))
    }
}
