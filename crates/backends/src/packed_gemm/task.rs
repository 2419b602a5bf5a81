//! The parts of a product: the side packed once for all tasks, and the work of a task. Either side
//! may be unpacked rows.

use std::cell::Cell;
use std::ops::Range;

use super::destination::{Accumulator, Destination};
use super::each_chunk;
use super::micro_kernel::{MicroKernel, OpenKernel};
use super::packing::{self, DequantizedPart};
use super::tile::{PackSource, PackedFormat, RowsInMemory, SQUARE, Strip, Tile};
use crate::mat_view::{GemmMatrix, GemmOperand, MatView, OperandRole, Threads};
use crate::runtime::cpu_tensor::FloatElement;

thread_local! {
    /// The shared operand of the last product on this thread: fresh memory would cost page faults.
    static LAST_SHARED: Cell<Vec<Tile>> = const { Cell::new(Vec::new()) };
    /// The memory of the last task on this thread.
    static LAST_TASK: Cell<TaskMemory> = const { Cell::new(TaskMemory::EMPTY) };
}

/// The buffers of a task.
#[derive(Default)]
struct TaskMemory {
    /// The packed strips of the task's own side.
    own: Vec<Tile>,
    /// The last dequantized part of an operand.
    dequantized: DequantizedPart,
}

impl TaskMemory {
    const EMPTY: TaskMemory = TaskMemory { own: Vec::new(), dequantized: DequantizedPart::EMPTY };
}

/// Strips packed from one dequantized part, which stays in the L2 cache with them. The 4-bit codes
/// of that many columns fill a cache line: with two strips each line was read twice, and a step of
/// QLoRA on the 1B shape took 6 % longer.
const STRIPS: usize = 4;

/// Returns a buffer of `len` tiles, which the caller writes before they are read.
fn resized(memory: &mut Vec<Tile>, len: usize) -> &mut [Tile] {
    if memory.len() < len {
        memory.resize(len, Tile::ZERO);
    }
    &mut memory[..len]
}

/// An operand of a product, with its factor of the term.
pub(super) struct Side<'a, M> {
    pub(super) kernel: MicroKernel,
    pub(super) role: OperandRole,
    pub(super) matrix: M,
    pub(super) term: Option<MatView<'a, f32>>,
}

impl<M: GemmMatrix> Side<'_, M> {
    /// The number of outer elements.
    pub(super) fn outer(&self) -> usize {
        if self.role == OperandRole::Left { self.matrix.rows() } else { self.matrix.cols() }
    }

    pub(super) fn inner(&self) -> usize {
        inner(&self.matrix, self.role)
    }

    /// Returns the bytes of one step of a packed strip.
    pub(super) fn step_bytes(&self) -> usize {
        self.kernel.format(&self.matrix, self.role).tiles_per_step() * size_of::<Tile>()
    }

    /// Returns the term if `part` includes the last inner elements, with which it is added.
    fn term_after(&self, part: &Range<usize>) -> Option<&MatView<'_, f32>> {
        self.term.as_ref().filter(|_| part.end == self.inner())
    }

    /// Returns the layout of strips with these inner elements.
    fn layout(&self, part: &Range<usize>) -> StripLayout {
        let format = self.kernel.format(&self.matrix, self.role);
        let term = self.term_after(part);
        let term = term.map(|term| (self.kernel.format(term, self.role), inner(term, self.role)));
        let len =
            if self.rows(&(0..self.outer()), part).is_some() { 0 } else { format.strip_len(part.len()) };
        StripLayout { format, inner: part.len(), len, term }
    }

    /// Returns a range of outer and inner elements in place, if the kernel multiplies rows in
    /// memory.
    fn rows(&self, outer: &Range<usize>, part: &Range<usize>) -> Option<RowsInMemory<'_>> {
        if self.role == OperandRole::Right || !self.kernel.takes_rows() {
            return None;
        }
        let GemmOperand { data, strides } = self.matrix.dense_bf16().filter(|dense| dense.strides.1 == 1)?;
        let data = data.get(outer.start * strides.0 + part.start..)?;
        RowsInMemory::new(data, strides.0, outer.len(), part.len())
    }

    /// Packs some outer elements with these inner elements, strip by strip.
    fn pack(
        &self,
        tiles: &mut [Tile],
        outer: Range<usize>,
        part: &Range<usize>,
        memory: &mut DequantizedPart,
    ) {
        let layout = self.layout(part);
        let total = layout.total();
        if layout.len > 0 {
            pack(self, tiles, total, &self.matrix, outer.clone(), part.clone(), memory);
        }
        if let Some(term) = self.term_after(part) {
            let all = 0..inner(term, self.role);
            pack(self, &mut tiles[layout.len..], total, term, outer, all, memory);
        }
    }
}

fn inner(matrix: &impl GemmMatrix, role: OperandRole) -> usize {
    if role == OperandRole::Left { matrix.cols() } else { matrix.rows() }
}

/// Fills strips that begin `stride` tiles apart with elements of a matrix on this side.
fn pack<M>(
    side: &Side<'_, M>,
    tiles: &mut [Tile],
    stride: usize,
    from: &impl GemmMatrix,
    outer: Range<usize>,
    inner: Range<usize>,
    memory: &mut DequantizedPart,
) {
    let Side { kernel, role, .. } = *side;
    let (format, len) = (kernel.format(from, role), inner.len());
    for (tiles, start) in tiles.chunks_mut(STRIPS * stride).zip(outer.clone().step_by(STRIPS * SQUARE)) {
        let part = start..(start + STRIPS * SQUARE).min(outer.end);
        let source = PackSource::of(from, part.clone(), inner.clone(), role, format, memory);
        for (tiles, start) in tiles.chunks_mut(stride).zip((0..part.len()).step_by(SQUARE)) {
            let here = start..(start + SQUARE).min(part.len());
            packing::pack(kernel, &mut tiles[..format.strip_len(len)], format, source, here, len, role);
        }
    }
}

/// The layout of a strip of a side: its tiles, then those of the term's factor.
#[derive(Clone, Copy)]
struct StripLayout {
    format: PackedFormat,
    inner: usize,
    len: usize,
    /// Format and inner elements of the term's factor.
    term: Option<(PackedFormat, usize)>,
}

impl StripLayout {
    fn total(self) -> usize {
        self.len + self.term.map_or(0, |(format, inner)| format.strip_len(inner))
    }

    /// Returns strip number `number` of `all` outer elements, without the term's part.
    fn strip(self, tiles: &[Tile], number: usize, all: usize) -> Strip<'_> {
        let outer = SQUARE.min(all - number * SQUARE);
        let tiles = &tiles[number * self.total()..][..self.len];
        Strip { tiles, format: self.format, outer, inner: self.inner }
    }

    /// Returns the term's part of strip number `number`.
    fn term_of(self, tiles: &[Tile], number: usize, all: usize) -> Option<Strip<'_>> {
        let (format, inner) = self.term?;
        let outer = SQUARE.min(all - number * SQUARE);
        let tiles = &tiles[number * self.total() + self.len..][..format.strip_len(inner)];
        Some(Strip { tiles, format, outer, inner })
    }
}

/// A range of outer and inner elements of one side, packed for all tasks, or as rows in memory.
pub(super) struct SharedOperand<'a> {
    kernel: MicroKernel,
    role: OperandRole,
    outer: Range<usize>,
    inner: Range<usize>,
    layout: StripLayout,
    tiles: Vec<Tile>,
    rows: Option<RowsInMemory<'a>>,
}

impl<'a> SharedOperand<'a> {
    pub(super) fn pack<M: GemmMatrix>(
        side: &'a Side<'_, M>,
        outer: Range<usize>,
        inner: Range<usize>,
        threads: Threads,
    ) -> Self {
        let layout = side.layout(&inner);
        let mut tiles = LAST_SHARED.with(Cell::take);
        let len = outer.len().div_ceil(SQUARE) * layout.total();
        each_chunk(threads, resized(&mut tiles, len), layout.total().max(1), |number, tiles| {
            let start = outer.start + number * SQUARE;
            let mut task = LAST_TASK.with(Cell::take);
            side.pack(tiles, start..(start + SQUARE).min(outer.end), &inner, &mut task.dequantized);
            LAST_TASK.with(|last| last.set(task));
        });
        let rows = side.rows(&outer, &inner);
        SharedOperand { kernel: side.kernel, role: side.role, outer, inner, layout, tiles, rows }
    }

    /// Keeps the buffer for the next product.
    pub(super) fn keep_memory(self) {
        LAST_SHARED.with(|last| last.set(self.tiles));
    }

    /// Runs a task: adds the products of the packed inner elements to `sums`, the blocks of these
    /// outer elements of the other side and of some strips of this one. An empty `sums` means a
    /// temporary block, which needs all inner elements. With the last inner elements, adds the term
    /// and writes the blocks to `dst`.
    pub(super) fn add_part<D: FloatElement, M: GemmMatrix>(
        &self,
        dst: &Destination<'_, D>,
        own: &Side<'_, M>,
        outer: Range<usize>,
        strips: Range<usize>,
        sums: &mut [Accumulator],
    ) {
        let mut memory = LAST_TASK.with(Cell::take);
        let layout = own.layout(&self.inner);
        let count = outer.len().div_ceil(SQUARE);
        let tiles = resized(&mut memory.own, count * layout.total());
        own.pack(tiles, outer.clone(), &self.inner, &mut memory.dequantized);
        let own_rows = own.rows(&outer, &self.inner);
        let mut square = Accumulator::default();
        let kernel = self.kernel.open();
        let first = strips.start;
        for (i, j) in strips.flat_map(|i| (0..count).map(move |j| (i, j))) {
            let square = sums.get_mut((i - first) * count + j).unwrap_or(&mut square);
            let accumulate = self.inner.start > 0;
            let (shared_at, own_at) = (self.outer.start + i * SQUARE, outer.start + j * SQUARE);
            let at = if self.role == OperandRole::Left { (shared_at, own_at) } else { (own_at, shared_at) };
            let is_last = self.inner.end == own.inner();
            if is_last {
                dst.prefetch(at);
            }
            let of_shared = || self.layout.strip(&self.tiles, i, self.outer.len());
            let of_own = || layout.strip(tiles, j, outer.len());
            let sums = square.values_mut();
            match (&self.rows, &own_rows) {
                (Some(rows), _) => kernel.multiply_rows(&rows.strip(i), &of_own(), sums, SQUARE, accumulate),
                (_, Some(rows)) => {
                    kernel.multiply_rows(&rows.strip(j), &of_shared(), sums, SQUARE, accumulate)
                }
                _ => self.multiply_strips(&kernel, sums, &of_shared(), &of_own(), accumulate),
            }
            if !is_last {
                continue;
            }
            let shared_term = self.layout.term_of(&self.tiles, i, self.outer.len());
            if let Some((shared, own)) = shared_term.zip(layout.term_of(tiles, j, outer.len())) {
                self.multiply_strips(&kernel, square.values_mut(), &shared, &own, true);
            }
            // SAFETY: no other task has these outer elements of its own side with these strips of
            // the shared one.
            unsafe { dst.add(self.kernel.set(), at, square) };
        }
        LAST_TASK.with(|last| last.set(memory));
    }

    fn multiply_strips(
        &self,
        kernel: &OpenKernel,
        sums: &mut [f32],
        shared: &Strip<'_>,
        own: &Strip<'_>,
        accumulate: bool,
    ) {
        let (left, right) = if self.role == OperandRole::Left { (shared, own) } else { (own, shared) };
        kernel.multiply(left, right, sums, SQUARE, accumulate);
    }
}
