//! A driver that runs nothing and counts the requested work: launches, products, bytes that kernels
//! read and write, uploads and waits for the GPU. It gives the cost of a step on a GPU without a
//! GPU. Copies that candle does itself, such as that of a residual into a layer's output, are not
//! counted. Routers choose their experts in turn, so that all experts get as many rows.

use std::cell::RefCell;
use std::convert::Infallible;
use std::sync::{LazyLock, Mutex};

use super::gemm::{DeviceMatrix, GemmElement};
use super::host_graph::HostGraph;
use super::queue_limit::QueueLimit;
use super::{Arg, DeviceGraph, Driver, Gemm, Kernel, LaunchShape, Request, WorkBeside};
use crate::error::{Error, Result};
use crate::locks::locked;

/// Operations for each byte below which a product is thin: an A100 computes 153 at its peak in
/// bf16, an H100 295.
const THIN: f64 = 100.0;

/// Operations for each byte that a GPU moves meanwhile, as expected of an H100: 650 TFLOP/s and
/// 2.25 TB/s.
const BALANCE: f64 = 289.0;

/// The work requested of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GpuWork {
    /// Number of kernel launches.
    pub launches: u64,
    /// Those of them on a second queue whose end waits behind a product.
    pub launches_beside: u64,
    /// Number of matrix products.
    pub gemms: u64,
    /// Calls of the driver for launches and products: one for each, or for all in a graph, and
    /// those that change a graph.
    pub calls: u64,
    /// Bytes that kernels read and write, each operand once.
    pub kernel_bytes: u64,
    /// Those of them by launches on a second queue that products hide: of a piece of work, at most
    /// as many as a GPU of [`BALANCE`] moves during the products between its begin and its end.
    pub hidden_bytes: u64,
    /// Bytes that products read and write, each operand once.
    pub gemm_bytes: u64,
    /// Those of them by thin products, which memory bounds on every GPU.
    pub thin_bytes: u64,
    /// Operations of products; a multiplication and an addition count as two.
    pub gemm_flops: f64,
    /// Those of them by thin products.
    pub thin_flops: f64,
    /// Those of them by other products whose operands are codes of e4m3.
    pub fp8_flops: f64,
    /// Operations of attention's products, counted likewise.
    pub attention_flops: f64,
    /// Bytes copied to the GPU.
    pub uploaded_bytes: u64,
    /// Number of times the host waited to read a result.
    pub waits: u64,
    /// Largest number of launches and products of one queue since the process began that the host
    /// had not waited for.
    pub most_ahead: u64,
}

impl std::ops::Sub for GpuWork {
    type Output = GpuWork;
    fn sub(self, before: GpuWork) -> GpuWork {
        GpuWork {
            launches: self.launches - before.launches,
            launches_beside: self.launches_beside - before.launches_beside,
            gemms: self.gemms - before.gemms,
            calls: self.calls - before.calls,
            kernel_bytes: self.kernel_bytes - before.kernel_bytes,
            hidden_bytes: self.hidden_bytes - before.hidden_bytes,
            gemm_bytes: self.gemm_bytes - before.gemm_bytes,
            thin_bytes: self.thin_bytes - before.thin_bytes,
            gemm_flops: self.gemm_flops - before.gemm_flops,
            thin_flops: self.thin_flops - before.thin_flops,
            fp8_flops: self.fp8_flops - before.fp8_flops,
            attention_flops: self.attention_flops - before.attention_flops,
            // Of steps with two and with four layers, the larger one once uploaded less, for a
            // reason that is not known yet.
            uploaded_bytes: self.uploaded_bytes.saturating_sub(before.uploaded_bytes),
            waits: self.waits - before.waits,
            most_ahead: self.most_ahead,
        }
    }
}

impl GpuWork {
    /// Returns the minimum seconds on a GPU with `flops` operations per second and `bytes` bytes
    /// per second, twice as many operations of e4m3. Attention is bound by operations. Memory
    /// bounds thin products, and kernels but for their hidden bytes. Other products are bound by
    /// the slower of the two. The times add up.
    pub fn seconds(&self, flops: f64, bytes: f64) -> f64 {
        let products = (self.gemm_flops - self.thin_flops - self.fp8_flops / 2.0) / flops;
        let operands = (self.gemm_bytes - self.thin_bytes) as f64 / bytes;
        let moved = (self.thin_bytes + self.kernel_bytes - self.hidden_bytes) as f64 / bytes;
        products.max(operands) + self.attention_flops / flops + moved
    }
}

/// The work requested since the process began, and whether the GPU is busy.
#[derive(Default)]
struct WorkCounter {
    work: GpuWork,
    busy: bool,
    first: Queue,
    second: Queue,
    /// Pieces of work on the second queue.
    pieces: u64,
}

thread_local! {
    /// Pieces of this thread's work on the second queue for which the first has not waited.
    static BESIDE: RefCell<Vec<Piece>> = const { RefCell::new(Vec::new()) };
}

/// Work on the second queue from one call of [`Driver::beside`].
struct Piece {
    number: u64,
    /// The arguments of its launches.
    args: Vec<Arg>,
    launches: u64,
    /// Products of the first queue since its begin that are not thin, and their operations.
    products: u64,
    flops: f64,
}

impl Piece {
    fn new(number: u64) -> Self {
        Piece { number, args: Vec::new(), launches: 0, products: 0, flops: 0.0 }
    }

    fn bytes(&self) -> u64 {
        self.args.iter().map(|arg| arg.moved).sum()
    }

    /// Returns the bytes that products hide.
    fn hidden(&self) -> u64 {
        self.bytes().min((self.flops / BALANCE) as u64)
    }
}

/// One of the queues of a GPU.
#[derive(Default)]
struct Queue {
    limit: QueueLimit<u64>,
    /// Its launches and products.
    all: u64,
    /// Those that the host has waited for.
    finished: u64,
}

impl Queue {
    /// Counts a launch or a product in the queue, whose length is limited as on a GPU. Returns how
    /// many the host has not waited for.
    fn queued(&mut self) -> u64 {
        self.all += 1;
        let (all, finished) = (self.all, &mut self.finished);
        let ahead = all - *finished;
        let wait = |mark| {
            *finished = (*finished).max(mark);
            Ok(())
        };
        let Ok(()) = self.limit.launched::<Infallible>(|| Ok(all), wait);
        ahead
    }
}

impl WorkCounter {
    /// Counts a launch or a product in the first or the second queue.
    fn queued(&mut self, beside: bool) {
        self.busy = true;
        self.work.calls += 1;
        let ahead = if beside { self.second.queued() } else { self.first.queued() };
        self.work.most_ahead = self.work.most_ahead.max(ahead);
    }

    /// Counts a launch in the first or the second queue.
    fn launched(&mut self, args: &[Arg], beside: bool) {
        self.work.launches += 1;
        self.work.kernel_bytes += args.iter().map(|arg| arg.moved).sum::<u64>();
        self.queued(beside);
    }
}

/// Refuses work of the first queue that uses memory which the second writes, or writes what it
/// reads, without a wait between them.
fn check_order(what: &str, args: &[Arg]) -> Result<()> {
    let conflicts = |arg: &Arg| {
        let mut others = |piece: &Piece| piece.args.iter().any(|other| conflict(arg, other));
        BESIDE.with_borrow(|pieces| pieces.iter().any(&mut others))
    };
    if args.iter().any(conflicts) {
        return Err(Error::internal(format!("{what} uses memory of the second queue before its end")));
    }
    Ok(())
}

/// Returns whether two arguments share memory that one of them is written to.
fn conflict(a: &Arg, b: &Arg) -> bool {
    let end = |arg: &Arg| match arg.rows {
        0 => arg.value,
        rows => arg.value + (rows - 1) * arg.pitch + arg.row_bytes,
    };
    let are_memory = a.rows > 0 && b.rows > 0;
    are_memory && (a.is_written || b.is_written) && a.value < end(b) && b.value < end(a)
}

/// Writes the numbers of all `experts` in turn, u32, to the memory of an argument.
fn choose_in_turn(ids: &Arg, experts: u64) {
    let count = (ids.rows * ids.row_bytes) as usize / size_of::<u32>();
    let first = std::ptr::with_exposed_provenance_mut::<u32>(ids.value as usize);
    // SAFETY: on this driver a written argument is a tensor in the host's memory, which no other
    // thread uses during its launch.
    let ids = unsafe { std::slice::from_raw_parts_mut(first, count) };
    ids.iter_mut().enumerate().for_each(|(at, id)| *id = (at as u64 % experts.max(1)) as u32);
}

static ASKED: LazyLock<Mutex<WorkCounter>> = LazyLock::new(Mutex::default);

/// Returns the work requested of the GPU since the process began.
pub fn requested_work() -> GpuWork {
    with_requested(|asked| asked.work)
}

fn with_requested<R>(change: impl FnOnce(&mut WorkCounter) -> R) -> R {
    change(&mut locked(&ASKED))
}

/// The driver that counts.
#[derive(Debug)]
pub(crate) struct LaunchCounter;

impl Driver for LaunchCounter {
    fn launch(&self, kernel: &Kernel, shape: LaunchShape, args: &[Arg]) -> Result<()> {
        if shape.is_empty() {
            return Ok(());
        }
        if let ("choose_experts_bf16" | "choose_experts_f32", [_, _, ids, _, _, experts, ..]) =
            (kernel.name, args)
        {
            choose_in_turn(ids, experts.value);
        }
        with_requested(|asked| asked.launched(args, false));
        check_order(kernel.name, args)
    }

    fn gemm(&self, gemm: &Gemm) -> Result<()> {
        let [m, n, k] = gemm.size();
        let bytes = |matrix: &DeviceMatrix, element: GemmElement| {
            (matrix.rows * matrix.cols * element.bytes()) as u64
        };
        let result = bytes(&gemm.d, gemm.result) * if gemm.beta == 0.0 { 1 } else { 2 };
        let d = Arg { is_written: true, ..gemm.d.arg };
        check_order("a product", &[gemm.a.arg, gemm.b.arg, gemm.c.arg, d])?;
        check_order("a product", gemm.scales.as_ref().map_or(&[], |scales| &scales[..]))?;
        let flops = 2.0 * m as f64 * n as f64 * k as f64;
        let moved = bytes(&gemm.a, gemm.operands) + bytes(&gemm.b, gemm.operands) + result;
        let is_thin = flops < THIN * moved as f64;
        let is_fp8 = gemm.operands == GemmElement::E4m3;
        with_requested(|asked| {
            asked.work.gemms += 1;
            asked.work.gemm_flops += flops;
            asked.work.gemm_bytes += moved;
            if is_thin {
                asked.work.thin_bytes += moved;
                asked.work.thin_flops += flops;
            } else if is_fp8 {
                asked.work.fp8_flops += flops;
            }
            asked.queued(false);
        });
        // A product hides the oldest piece alone.
        if !is_thin {
            BESIDE.with_borrow_mut(|pieces| {
                for piece in pieces.iter_mut().take(1) {
                    piece.products += 1;
                    piece.flops += if is_fp8 { flops / 2.0 } else { flops };
                }
            });
        }
        Ok(())
    }

    fn beside(&self, work: &mut dyn FnMut(&dyn Driver) -> Result<()>) -> Result<Option<Box<dyn WorkBeside>>> {
        let piece = with_requested(|asked| {
            asked.pieces += 1;
            asked.pieces
        });
        BESIDE.with_borrow_mut(|pieces| pieces.push(Piece::new(piece)));
        work(&SecondQueue { piece })?;
        Ok(Some(Box::new(SecondQueue { piece })))
    }

    fn graph(&'static self, requests: &[Request]) -> Result<Option<Box<dyn DeviceGraph>>> {
        let graph = HostGraph { driver: self, requests: requests.to_vec() };
        Ok(Some(Box::new(CountedGraph(graph))))
    }

    fn record_attention(&self, flops: &dyn Fn() -> f64) {
        let flops = flops();
        with_requested(|asked| asked.work.attention_flops += flops);
    }

    fn record_upload(&self, bytes: usize) {
        with_requested(|asked| asked.work.uploaded_bytes += bytes as u64);
    }

    fn record_read(&self) {
        with_requested(|asked| {
            asked.work.waits += u64::from(std::mem::take(&mut asked.busy));
            for queue in [&mut asked.first, &mut asked.second] {
                queue.finished = queue.all;
            }
        });
    }
}

/// A graph that counts its calls.
#[derive(Debug)]
struct CountedGraph(HostGraph<LaunchCounter>);

impl DeviceGraph for CountedGraph {
    fn change(&mut self, at: usize, request: &Request) -> Result<bool> {
        with_requested(|asked| asked.work.calls += request.calls_of_change());
        self.0.change(at, request)
    }

    fn launch(&self) -> Result<()> {
        self.0.launch()?;
        with_requested(|asked| asked.work.calls -= self.0.requests.len() as u64 - 1);
        Ok(())
    }
}

/// A piece of work on the second queue.
#[derive(Debug)]
struct SecondQueue {
    piece: u64,
}

impl Driver for SecondQueue {
    fn launch(&self, _kernel: &Kernel, shape: LaunchShape, args: &[Arg]) -> Result<()> {
        if shape.is_empty() {
            return Ok(());
        }
        with_requested(|asked| asked.launched(args, true));
        BESIDE.with_borrow_mut(|pieces| {
            for piece in pieces.iter_mut().filter(|piece| piece.number == self.piece) {
                piece.launches += 1;
                piece.args.extend(args);
            }
        });
        Ok(())
    }

    fn gemm(&self, _: &Gemm) -> Result<()> {
        Err(Error::internal("a product on the second queue"))
    }
}

impl WorkBeside for SecondQueue {
    fn join(&self) -> Result<()> {
        // A wait for a queue is one for all of its earlier work.
        let is_done = |piece: &mut Piece| piece.number <= self.piece;
        let done: Vec<_> = BESIDE.with_borrow_mut(|pieces| pieces.extract_if(.., is_done).collect());
        with_requested(|asked| {
            for piece in done.iter().filter(|piece| piece.products > 0) {
                asked.work.launches_beside += piece.launches;
                asked.work.hidden_bytes += piece.hidden();
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::column_view::{Addend, ColumnView, ColumnViewMut, Transpose};
    use crate::gpu::{In, Out};
    use crate::runtime::TensorMut;

    const KERNEL: Kernel = Kernel { name: "work", module: "tests" };

    /// Work of the second queue with `beside`, then a launch with `later` on the first: whether the
    /// launch is in order before and after a wait.
    fn in_order(beside: Arg, later: Arg) -> Result<[bool; 2]> {
        let shape = LaunchShape::line(1, 32);
        let end = LaunchCounter.beside(&mut |second| second.launch(&KERNEL, shape, &[beside]))?;
        let before = LaunchCounter.launch(&KERNEL, shape, &[later]).is_ok();
        end.map_or(Ok(()), |end| end.join())?;
        Ok([before, LaunchCounter.launch(&KERNEL, shape, &[later]).is_ok()])
    }

    /// Returns a product of `rows` rows with a matrix of 512 x 512, in bf16.
    fn multiply(rows: usize) -> Result<()> {
        let [x, w, y] =
            [rows, 512, rows].map(|rows| TensorMut::zeros((rows, 512), DType::BF16, &Device::Cpu));
        let (x, w, y) = (x?, w?, y?);
        let (y, form) = (ColumnViewMut::all(&y), Transpose::Nt);
        let gemm = Gemm::new(&y, &ColumnView::all(&x), &ColumnView::all(&w), form, 1.0, Addend::Nothing)?;
        gemm.map_or(Ok(()), |gemm| LaunchCounter.gemm(&gemm))
    }

    /// Launches and bytes that are hidden behind products of these rows, of one launch on the
    /// second queue that writes 4 MiB.
    fn hidden(products: &[usize]) -> Result<[u64; 2]> {
        let x = TensorMut::zeros((1024, 1024), DType::F32, &Device::Cpu)?;
        let (before, write) = (requested_work(), Out::<f32>::all(&x)?.arg());
        let shape = LaunchShape::line(1, 32);
        let end = LaunchCounter.beside(&mut |second| second.launch(&KERNEL, shape, &[write]))?;
        products.iter().try_for_each(|rows| multiply(*rows))?;
        end.map_or(Ok(()), |end| end.join())?;
        // This product comes too late.
        multiply(4096)?;
        let counted = requested_work() - before;
        Ok([counted.launches_beside, counted.hidden_bytes])
    }

    /// The time of both is that of the slower one: a piece of work that nothing multiplies beside
    /// is not hidden.
    #[test]
    fn products_hide_at_most_their_own_time() -> Result<()> {
        let of_512 = (2.0 * 512f64.powi(3) / BALANCE) as u64;
        assert_eq!(hidden(&[])?, [0, 0]);
        // Memory bounds a thin product too.
        assert_eq!(hidden(&[8])?, [0, 0]);
        assert_eq!(hidden(&[512])?, [1, of_512]);
        assert!(hidden(&[512, 512])?[1].abs_diff(2 * of_512) <= 1);
        assert_eq!(hidden(&[4096])?, [1, 4 << 20]);
        let work = GpuWork { kernel_bytes: 10, hidden_bytes: 4, gemm_flops: 50.0, ..GpuWork::default() };
        assert_eq!(work.seconds(1.0, 1.0), 56.0);
        Ok(())
    }

    /// Each queue has a limit of its own, as each stream of a GPU has.
    #[test]
    fn the_queues_are_limited_one_by_one() {
        let mut asked = WorkCounter::default();
        for _ in 0..1000 {
            asked.launched(&[], false);
            asked.launched(&[], true);
        }
        let ahead = [&asked.first, &asked.second].map(|queue| queue.all - queue.finished);
        assert_eq!((asked.work.launches, ahead[0]), (2000, ahead[1]));
        // Four marks behind 64 launches each.
        assert_eq!((asked.work.most_ahead, ahead[0] < 256), (256, true));
    }

    #[test]
    fn queues_use_memory_in_turn_unless_both_read_it() -> Result<()> {
        let [x, y] = [4, 4].map(|rows| TensorMut::zeros((rows, 8), DType::F32, &Device::Cpu));
        let (x, y) = (x?, y?);
        let (reads, writes) = (In::<f32>::all(&x)?.arg(), Out::<f32>::all(&x)?.arg());
        let last = x.narrow(0, 3, 1)?;
        assert_eq!(in_order(writes, reads)?, [false, true]);
        assert_eq!(in_order(reads, writes)?, [false, true]);
        assert_eq!(in_order(writes, In::<f32>::all(&last)?.arg())?, [false, true]);
        assert_eq!(in_order(reads, reads)?, [true, true]);
        assert_eq!(in_order(writes, Out::<f32>::all(&y)?.arg())?, [true, true]);
        Ok(())
    }
}
