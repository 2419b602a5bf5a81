//! The emulator as a driver: kernels compiled for the host, with addresses of CPU tensors as
//! arguments.
//!
//! Launches run synchronously, so nothing waits. Each thread has its own state
//! (`kernels/emu/emu.cpp`).
//!
//! Tests of the operations run single pieces of work on it; [`super::host_driver`] selects it for a
//! whole process.

mod library;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char};
use std::sync::OnceLock;

use super::gemm::{DeviceMatrix, GemmElement};
use super::host_graph::HostGraph;
use super::recorder::{record_begin, record_end, record_launch, record_product, record_upload};
use super::{Arg, DeviceGraph, Driver, Gemm, Kernel, LaunchShape, Request, WorkBeside, launch_text};
use crate::error::{DeviceFault, Error, Result};
use crate::quant::E4M3;
use crate::runtime::device_memory::with_room;
use crate::runtime::planned_failure::PlannedFailure;
use half::bf16;

/// The order in which the emulator runs the threads of a block and the blocks of a grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// Thread 0 first.
    #[default]
    Forward,
    /// Thread 0 last.
    Reverse,
    /// A pseudo-random order with this seed.
    Shuffled(u64),
}

/// The emulator's settings; a correct kernel gives the same bits under all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EmulatorSchedule {
    /// The order of threads and blocks.
    pub order: Order,
    /// True if asynchronous copies deliver at their wait, not at once.
    pub late_copies: bool,
    /// True if memory accesses are counted.
    pub counts: bool,
}

/// Sums over the accesses of launches: `emu::Counters` of `kernels/emu/launch.h`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Accesses of a warp to global memory.
    pub global_requests: u64,
    /// Sectors of 32 bytes that these accesses touch.
    pub global_sectors: u64,
    /// Minimum number of sectors for the bytes moved.
    pub global_least_sectors: u64,
    /// Steps in which the banks of shared memory serve lanes.
    pub shared_phases: u64,
    /// Additional steps caused by bank conflicts.
    pub bank_conflicts: u64,
}

#[repr(C)]
struct RawArg {
    value: u64,
    rows: u64,
    row_bytes: u64,
    pitch: u64,
}

#[repr(C)]
struct RawOptions {
    order: u32,
    late: u32,
    count: u32,
    seed: u64,
}

/// Signature of `finetune_emu_launch` of `kernels/emu/emu.cpp`: returns 0, or another number with
/// the reason as text in `error`.
type LaunchFunction = unsafe extern "C" fn(
    name: *const c_char,
    grid: *const u32,
    block: *const u32,
    shared_bytes: u32,
    args: *const RawArg,
    count: usize,
    options: *const RawOptions,
    counters: *mut Counters,
    error: *mut c_char,
    error_bytes: usize,
) -> i32;

unsafe extern "C" {
    fn finetune_emu_launch(
        name: *const c_char,
        grid: *const u32,
        block: *const u32,
        shared_bytes: u32,
        args: *const RawArg,
        count: usize,
        options: *const RawOptions,
        counters: *mut Counters,
        error: *mut c_char,
        error_bytes: usize,
    ) -> i32;
}

/// The process-wide schedule of threads outside [`Emulator::run`].
static OF_PROCESS: OnceLock<EmulatorSchedule> = OnceLock::new();

/// Sets the schedule of all threads that have not run a kernel yet; the first call wins.
pub(crate) fn run_all_by(schedule: EmulatorSchedule) {
    OF_PROCESS.get_or_init(|| schedule);
}

thread_local! {
    static SCHEDULE: Cell<EmulatorSchedule> = Cell::new(OF_PROCESS.get().copied().unwrap_or_default());
    /// Names of the kernels launched since the last [`Emulator::run`] began.
    static LAUNCHED: RefCell<BTreeSet<&'static str>> = const { RefCell::new(BTreeSet::new()) };
    static COUNTERS: Cell<Counters> = Cell::default();
}

/// The emulator; its state is per thread.
#[derive(Debug)]
pub struct Emulator;

impl Emulator {
    /// Runs `work` with kernels emulated by `schedule`, and returns the counters of its launches.
    pub fn run<R>(schedule: EmulatorSchedule, work: impl FnOnce() -> R) -> (R, Counters) {
        LAUNCHED.take();
        let before = (SCHEDULE.replace(schedule), COUNTERS.replace(Counters::default()));
        let result = super::with_host_driver(&Emulator, work);
        SCHEDULE.set(before.0);
        (result, COUNTERS.replace(before.1))
    }

    /// Returns the names of the kernels that the last run on this thread launched.
    pub fn launched() -> BTreeSet<&'static str> {
        LAUNCHED.with_borrow(Clone::clone)
    }
}

impl Driver for Emulator {
    fn launch(&self, kernel: &Kernel, shape: LaunchShape, args: &[Arg]) -> Result<()> {
        launch(kernel, shape, args, false)
    }

    fn gemm(&self, gemm: &Gemm) -> Result<()> {
        record_product(gemm);
        with_room(PlannedFailure::Product, || Ok(()), || multiply(gemm))
    }

    fn beside(&self, work: &mut dyn FnMut(&dyn Driver) -> Result<()>) -> Result<Option<Box<dyn WorkBeside>>> {
        let mut launches = Launches::default();
        work(&launches)?;
        launches.number = record_begin(launches.written());
        if !SCHEDULE.get().late_copies {
            launches.run()?;
        }
        Ok(Some(Box::new(launches)))
    }

    fn graph(&'static self, requests: &[Request]) -> Result<Option<Box<dyn DeviceGraph>>> {
        Ok(Some(Box::new(HostGraph { driver: self, requests: requests.to_vec() })))
    }

    fn record_upload(&self, bytes: usize) {
        record_upload(bytes);
    }
}

/// Runs a launch of the first queue or, with `is_beside`, of the second.
fn launch(kernel: &Kernel, shape: LaunchShape, args: &[Arg], is_beside: bool) -> Result<()> {
    if shape.is_empty() {
        return Ok(());
    }
    record_launch(kernel, shape, args, is_beside);
    with_room(PlannedFailure::Module, || Ok(()), || run(kernel, shape, args))
}

/// Launches on the second queue, which run when they are waited for: as late as possible.
#[derive(Debug, Default)]
struct Launches {
    launches: RefCell<Vec<(Kernel, LaunchShape, Vec<Arg>)>>,
    /// The number of this work for the recorder.
    number: usize,
}

impl Launches {
    /// Returns the addresses that the launches write to.
    fn written(&self) -> Vec<u64> {
        let launches = self.launches.borrow();
        let args = launches.iter().flat_map(|(_, _, args)| args);
        args.filter(|arg| arg.is_written).map(|arg| arg.value).collect()
    }

    fn run(&self) -> Result<()> {
        let launches = self.launches.take();
        launches.iter().try_for_each(|(kernel, shape, args)| launch(kernel, *shape, args, true))
    }
}

impl Driver for Launches {
    fn launch(&self, kernel: &Kernel, shape: LaunchShape, args: &[Arg]) -> Result<()> {
        self.launches.borrow_mut().push((*kernel, shape, args.to_vec()));
        Ok(())
    }

    fn gemm(&self, _: &Gemm) -> Result<()> {
        Err(Error::internal("a product on the second queue"))
    }
}

impl WorkBeside for Launches {
    fn join(&self) -> Result<()> {
        record_end(self.number);
        self.run()
    }
}

/// Runs a launch.
fn run(kernel: &Kernel, shape: LaunchShape, args: &[Arg]) -> Result<()> {
    if PlannedFailure::Launch.strikes() {
        return Err(at_fault(kernel, shape, args, "a test planned that it is"));
    }
    LAUNCHED.with_borrow_mut(|launched| launched.insert(kernel.name));
    let schedule = SCHEDULE.get();
    let (order, seed) = match schedule.order {
        Order::Forward => (0, 0),
        Order::Reverse => (1, 0),
        Order::Shuffled(seed) => (2, seed),
    };
    let options =
        RawOptions { order, late: schedule.late_copies.into(), count: schedule.counts.into(), seed };
    let raw = |&Arg { value, rows, row_bytes, pitch, .. }: &Arg| RawArg { value, rows, row_bytes, pitch };
    let raw_args: Vec<RawArg> = args.iter().map(raw).collect();
    let name =
        CString::new(kernel.name).map_err(|_| Error::internal("a kernel's name contains a zero byte"))?;
    let (mut counters, mut error) = (Counters::default(), [0 as c_char; 800]);
    let launch_on_host = library::launch_function();
    // SAFETY: the arrays outlive the call and have the given lengths; the layouts match
    // launch.h. The addresses in `args` belong to tensors that the caller holds, and the
    // emulator checks each access to them.
    let failed = unsafe {
        launch_on_host(
            name.as_ptr(),
            shape.grid.as_ptr(),
            shape.block.as_ptr(),
            shape.shared_bytes,
            raw_args.as_ptr(),
            raw_args.len(),
            &raw const options,
            &raw mut counters,
            error.as_mut_ptr(),
            error.len(),
        )
    };
    let mut sum = COUNTERS.get();
    sum.global_requests += counters.global_requests;
    sum.global_sectors += counters.global_sectors;
    sum.global_least_sectors += counters.global_least_sectors;
    sum.shared_phases += counters.shared_phases;
    sum.bank_conflicts += counters.bank_conflicts;
    COUNTERS.set(sum);
    if failed == 0 {
        return Ok(());
    }
    // SAFETY: the call terminated the text with a zero byte inside the array.
    let text = unsafe { CStr::from_ptr(error.as_ptr()) }.to_string_lossy().into_owned();
    Err(at_fault(kernel, shape, args, &text))
}

/// Multiplies matrices, one element of the result after the other.
fn multiply(gemm: &Gemm) -> Result<()> {
    let inputs = [(&gemm.a, gemm.operands), (&gemm.b, gemm.operands)];
    let results = [(&gemm.c, gemm.result), (&gemm.d, gemm.result)];
    for (matrix, element) in inputs.into_iter().chain(results) {
        check_inside(matrix, element)?;
    }
    let [m, n, k] = gemm.size();
    if let Some(scales) = &gemm.scales
        && [m, n].into_iter().zip(scales).any(|(count, arg)| arg.row_bytes < 4 * count as u64)
    {
        return Err(Error::internal("a product has fewer scales than rows or columns"));
    }
    // Offset of element `at`, and distance between consecutive elements of a sum.
    let steps = |matrix: &DeviceMatrix, transposed: bool| {
        if transposed { (matrix.leading, 1) } else { (1, matrix.leading) }
    };
    let [(a_row, a_next), (b_next, b_col)] =
        [steps(&gemm.a, gemm.transposed[0]), steps(&gemm.b, gemm.transposed[1])];
    for col in 0..n {
        for row in 0..m {
            let term = |at: usize| {
                let a = read(&gemm.a, gemm.operands, row * a_row + at * a_next);
                a * read(&gemm.b, gemm.operands, at * b_next + col * b_col)
            };
            let mut product = gemm.alpha * (0..k).map(term).sum::<f32>();
            if let Some([of_row, of_column]) = &gemm.scales {
                product = product
                    * read_at(of_column.value, GemmElement::F32, col)
                    * read_at(of_row.value, GemmElement::F32, row);
            }
            let at = row + col * gemm.d.leading;
            // With a zero beta C is not read: it may be NaN.
            let c = |at| gemm.beta * read(&gemm.c, gemm.result, at);
            let added = if gemm.beta == 0.0 { 0.0 } else { c(row + col * gemm.c.leading) };
            write(&gemm.d, gemm.result, at, product + added);
        }
    }
    Ok(())
}

fn at_fault(kernel: &Kernel, shape: LaunchShape, args: &[Arg], why: &str) -> Error {
    Error::of_fault(
        DeviceFault::Kernel,
        format!("kernel {} of kernels/{}.cu failed", kernel.name, kernel.module),
    )
    .because(why)
    .because(format!("the launch: {}", launch_text(kernel, shape, args)))
    .hint("please report this message")
}

/// Checks that every element of `matrix` is inside the byte ranges of its tensor.
fn check_inside(matrix: &DeviceMatrix, element: GemmElement) -> Result<()> {
    let (bytes, arg) = (element.bytes() as u64, &matrix.arg);
    let inside = matrix.rows as u64 * bytes <= arg.row_bytes
        && matrix.cols as u64 <= arg.rows
        && matrix.leading as u64 * bytes == arg.pitch;
    if inside {
        return Ok(());
    }
    Err(Error::internal("a product reaches outside its tensor").because(format!("{matrix:?} of {element:?}")))
}

fn read(matrix: &DeviceMatrix, element: GemmElement, at: usize) -> f32 {
    read_at(matrix.arg.value, element, at)
}

fn read_at(start: u64, element: GemmElement, at: usize) -> f32 {
    let address = start as usize + at * element.bytes();
    // SAFETY: `multiply` has checked that its operands are inside their tensors, which are alive;
    // addresses of tensors are aligned.
    unsafe {
        match element {
            GemmElement::F32 => *std::ptr::with_exposed_provenance::<f32>(address),
            GemmElement::Bf16 => (*std::ptr::with_exposed_provenance::<bf16>(address)).to_f32(),
            GemmElement::E4m3 => E4M3[usize::from(*std::ptr::with_exposed_provenance::<u8>(address))],
        }
    }
}

fn write(matrix: &DeviceMatrix, element: GemmElement, at: usize, value: f32) {
    let address = matrix.arg.value as usize + at * element.bytes();
    // SAFETY: as in `read`; no other thread accesses the result of a running product.
    unsafe {
        match element {
            GemmElement::F32 => *std::ptr::with_exposed_provenance_mut::<f32>(address) = value,
            GemmElement::Bf16 => {
                *std::ptr::with_exposed_provenance_mut::<bf16>(address) = bf16::from_f32(value);
            }
            // `Gemm` has no such result.
            GemmElement::E4m3 => {}
        }
    }
}
