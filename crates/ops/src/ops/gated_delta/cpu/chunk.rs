//! One chunk of one head: its products, its triangular system and the step of its state.

use super::{DeltaRows, GateColumns};
use crate::backends::gemm::{MatView, MatViewMut, Threads, matmul};
use crate::backends::simd;
use crate::instruction_set::vectorized;
use crate::ops::gated_delta::{CHUNK, NORM_EPS};
use crate::runtime::cpu_tensor::FloatElement;

/// The constants of a value head.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadGate {
    /// The decay rate, −exp(a_log).
    pub(super) rate: f32,
    pub(super) dt_bias: f32,
}

/// The gates of one token of a value head.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct TokenGate {
    /// The step size.
    pub(super) beta: f32,
    /// The logarithm of the decay, and its derivative by `a`.
    pub(super) log_decay: f32,
    pub(super) slope: f32,
}

impl HeadGate {
    fn of_token(self, a: f32, b: f32) -> TokenGate {
        let x = a + self.dt_bias;
        // Beyond 20 the softplus is its argument, in f32.
        let softplus = if x > 20.0 { x } else { x.exp().ln_1p() };
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        TokenGate { beta: sigmoid(b), log_decay: self.rate * softplus, slope: self.rate * sigmoid(x) }
    }
}

/// A matrix of a product: `rows × cols` values, transposed if asked.
pub(super) fn view(data: &[f32], rows: usize, cols: usize) -> MatView<'_, f32> {
    MatView::new(data, rows, cols, cols)
}

/// Computes `dst = [dst +] a · b` for a dense destination of `width` columns, in one thread.
pub(super) fn product(
    dst: &mut [f32],
    width: usize,
    accumulate: bool,
    a: MatView<'_, f32>,
    b: MatView<'_, f32>,
) {
    matmul(MatViewMut { data: dst, stride: width, accumulate }, a, b, 1.0, Threads::One);
}

/// Sets the number of values; those that were there may keep what they held.
pub(super) fn sized(values: &mut Vec<f32>, len: usize) -> &mut [f32] {
    values.resize(len, 0.0);
    values
}

/// The keys and queries of a chunk of a key head. A task uses one for all its chunks: fresh memory
/// would have to be zeroed.
#[derive(Default)]
pub(super) struct KeyChunk {
    pub(super) len: usize,
    pub(super) dim: usize,
    /// Normed keys, then normed queries over √Dk: `[2·len, Dk]`.
    pub(super) kq: Vec<f32>,
    /// The inverse norm of each row of `kq` before it was scaled.
    pub(super) inverse: Vec<f32>,
    /// The products of every row of `kq` with every key: `[2·len, len]`.
    pub(super) products: Vec<f32>,
}

impl KeyChunk {
    /// Computes the chunk of `len` tokens from row `first` on.
    pub(super) fn fill<T: FloatElement>(
        &mut self,
        all: &DeltaRows<'_, T>,
        head: usize,
        first: usize,
        len: usize,
    ) {
        let (heads, dim) = (all.heads, all.heads.key_dim);
        let scale = 1.0 / (dim as f32).sqrt();
        (self.len, self.dim) = (len, dim);
        let (kq, inverse) = (sized(&mut self.kq, 2 * len * dim), sized(&mut self.inverse, 2 * len));
        for (i, (to, inverse)) in kq.chunks_exact_mut(dim).zip(inverse).enumerate() {
            let (row, start, scale) = match i.checked_sub(len) {
                None => (i, heads.key_width(), 1.0),
                Some(i) => (i, 0, scale),
            };
            let at = (first + row) * heads.conv_width() + start + head * dim;
            *inverse = write_normed(to, &all.qkv[at..at + dim], scale);
        }
        let products = sized(&mut self.products, 2 * len * len);
        product(products, len, false, view(&self.kq, 2 * len, dim), view(&self.kq, len, dim).t());
    }

    /// Returns keys and queries, `[2·len, Dk]`.
    pub(super) fn view(&self) -> MatView<'_, f32> {
        view(&self.kq, 2 * self.len, self.dim)
    }

    pub(super) fn keys(&self) -> MatView<'_, f32> {
        view(&self.kq, self.len, self.dim)
    }
}

/// The rows of a chunk whose products with the state before it are computed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum StateRows {
    Keys,
    KeysAndQueries,
}

/// A chunk of a value head, solved from the state before it. A task uses one for all its chunks.
#[derive(Default)]
pub(super) struct ValueChunk {
    len: usize,
    dim: usize,
    pub(super) gates: Vec<TokenGate>,
    /// e^γ_i, the decay of the state before the chunk at each token.
    pub(super) from_start: Vec<f32>,
    /// D_Ci, the decay of each token's part at the end of the chunk.
    pub(super) to_end: Vec<f32>,
    /// D_ij for j ≤ i, else 0: `[len, len]`.
    pub(super) decays: Vec<f32>,
    /// The system without its diagonal of ones: β_i D_ij (k_i·k_j) for j < i, else 0.
    pub(super) system: Vec<f32>,
    /// D_ij (q_i·k_j) for j ≤ i, else 0.
    pub(super) scores: Vec<f32>,
    /// The products of keys and queries with the state before the chunk, `[2·len, Dv]`, if those of
    /// the queries were asked for.
    read: Vec<f32>,
    /// v_i − e^γ_i Sᵀk_i: `[len, Dv]`.
    pub(super) missing: Vec<f32>,
    /// The corrections u: `[len, Dv]`.
    pub(super) added: Vec<f32>,
}

impl ValueChunk {
    /// Computes the chunk of `keys` from row `first` on, from the state `[Dk, Dv]` before it; it is
    /// zero if none is given.
    pub(super) fn solve<T: FloatElement>(
        &mut self,
        all: &DeltaRows<'_, T>,
        keys: &KeyChunk,
        head: usize,
        first: usize,
        (state, rows): (Option<&[f32]>, StateRows),
    ) {
        let (heads, len, dim) = (all.heads, keys.len, all.heads.value_dim);
        self.gates.clear();
        self.gates.extend(token_gates(all.gates[head], [&all.a, &all.b], head, first, len));
        self.decay(dim);
        self.weigh(&keys.products);
        // At least two rows: a product of one has another order of sums.
        let rows = if rows == StateRows::Keys { len.max(2) } else { 2 * len };
        let read = sized(&mut self.read, rows * dim);
        match state {
            Some(state) => {
                product(read, dim, false, view(&keys.kq, rows, keys.dim), view(state, keys.dim, dim));
            }
            None => read.fill(0.0),
        }
        sized(&mut self.missing, len * dim);
        sized(&mut self.added, len * dim);
        for i in 0..len {
            let at = (first + i) * heads.conv_width() + 2 * heads.key_width() + head * dim;
            let row = i * dim..(i + 1) * dim;
            let read = &self.read[row.clone()];
            write_missing(&mut self.missing[row.clone()], &all.qkv[at..at + dim], read, self.from_start[i]);
            let (before, added) = self.added.split_at_mut(row.start);
            write_scaled(&mut added[..dim], &self.missing[row], self.gates[i].beta);
            subtract_rows(&mut added[..dim], before, &self.system[i * len..][..i]);
        }
    }

    /// Computes the decays of the gates.
    fn decay(&mut self, dim: usize) {
        let len = self.gates.len();
        let mut sum = 0.0;
        let mut sums = [0f32; CHUNK];
        for (to, gate) in sums.iter_mut().zip(&self.gates) {
            sum += gate.log_decay;
            *to = sum;
        }
        let sums = &sums[..len];
        if self.len != len {
            // No value right of the diagonals is written.
            for matrix in [&mut self.decays, &mut self.system, &mut self.scores] {
                matrix.clear();
                matrix.resize(len * len, 0.0);
            }
        }
        (self.len, self.dim) = (len, dim);
        for (i, row) in self.decays.chunks_exact_mut(len).enumerate() {
            write_decays(&mut row[..=i], &sums[..=i], sums[i]);
        }
        self.from_start.clear();
        self.from_start.extend(sums.iter().map(|sum| decay(*sum)));
        self.to_end.clear();
        self.to_end.extend_from_slice(&self.decays[(len - 1) * len..]);
    }

    /// Computes system and scores from the products of the keys.
    fn weigh(&mut self, products: &[f32]) {
        let len = self.len;
        for i in 0..len {
            let at = i * len;
            let (decays, keys) = (&self.decays[at..at + i], &products[at..at + i]);
            write_products(&mut self.system[at..at + i], decays, keys, self.gates[i].beta);
            let (decays, queries) = (&self.decays[at..=at + i], &products[(len + i) * len..][..=i]);
            write_products(&mut self.scores[at..=at + i], decays, queries, 1.0);
        }
    }

    /// Returns e^γ_C, the decay of the state over the chunk.
    pub(super) fn whole(&self) -> f32 {
        self.from_start[self.len - 1]
    }

    /// Writes the corrections with the decays of their parts at the end of the chunk to `added`.
    pub(super) fn write_added_at_end(&self, added: &mut Vec<f32>) {
        let rows = sized(added, self.added.len()).chunks_exact_mut(self.dim);
        let rows = rows.zip(self.added.chunks_exact(self.dim));
        rows.zip(&self.to_end).for_each(|((to, from), factor)| write_scaled(to, from, *factor));
    }

    /// Writes the outputs, `[len, Dv]`.
    fn write_outputs(&self, out: &mut Vec<f32>) {
        let (len, dim) = (self.len, self.dim);
        let out = sized(out, len * dim);
        let rows = out.chunks_exact_mut(dim).zip(self.read[len * dim..].chunks_exact(dim));
        rows.zip(&self.from_start).for_each(|((to, from), factor)| write_scaled(to, from, *factor));
        product(out, dim, true, view(&self.scores, len, len), view(&self.added, len, dim));
    }
}

/// Returns the gates of `len` tokens from row `first` on; `columns` are those of a and b.
fn token_gates<T: FloatElement>(
    gate: HeadGate,
    [a, b]: [&GateColumns<'_, T>; 2],
    head: usize,
    first: usize,
    len: usize,
) -> impl Iterator<Item = TokenGate> {
    (first..first + len).map(move |row| gate.of_token(a.at(row, head), b.at(row, head)))
}

/// The forward of a span in the value heads of a key head.
pub(super) struct ForwardTask<'a, T> {
    pub(super) key_head: usize,
    /// The first row.
    pub(super) first: usize,
    /// The results of each row.
    pub(super) out: Vec<&'a mut [T]>,
    /// The states before each chunk but the first; none in a generation.
    pub(super) states: Vec<&'a mut [f32]>,
    /// The states before and after the span, in a generation.
    pub(super) carried: Option<&'a mut [f32]>,
}

impl<T: FloatElement> ForwardTask<'_, T> {
    pub(super) fn run(mut self, all: &DeltaRows<'_, T>) {
        let (heads, dim) = (all.heads, all.heads.value_dim);
        let (mut own, chunks, is_carried) =
            (Vec::new(), self.out.len().div_ceil(CHUNK), self.carried.is_some());
        let states: &mut [f32] = match self.carried.take() {
            Some(carried) => carried,
            None => {
                own.resize(heads.group() * heads.state_len(), 0f32);
                &mut own
            }
        };
        let (mut keys, mut chunk) = (KeyChunk::default(), ValueChunk::default());
        let (mut outputs, mut added) = (Vec::new(), Vec::new());
        for (i, out) in self.out.chunks_mut(CHUNK).enumerate() {
            let first = self.first + i * CHUNK;
            if i > 0
                && let Some(saved) = self.states.get_mut(i - 1)
            {
                saved.copy_from_slice(states);
            }
            keys.fill(all, self.key_head, first, out.len());
            for (member, state) in states.chunks_exact_mut(heads.state_len()).enumerate() {
                let head = self.key_head * heads.group() + member;
                let before = (i > 0 || is_carried).then_some(&*state);
                chunk.solve(all, &keys, head, first, (before, StateRows::KeysAndQueries));
                chunk.write_outputs(&mut outputs);
                for (out, row) in out.iter_mut().zip(outputs.chunks_exact(dim)) {
                    narrow(&mut out[member * dim..][..dim], row);
                }
                if i + 1 < chunks || is_carried {
                    scale(state, chunk.whole());
                    chunk.write_added_at_end(&mut added);
                    product(state, dim, true, keys.keys().t(), view(&added, keys.len, dim));
                }
            }
        }
    }
}

vectorized! {
    /// Writes `x · factor` over the norm of x; returns the inverse norm.
    fn write_normed<T: FloatElement>(to: &mut [f32], x: &[T], factor: f32) -> f32 {
        let inverse = 1.0 / (simd::sum_of(x, |x| x.widen() * x.widen()) + NORM_EPS).sqrt();
        for (to, x) in to.iter_mut().zip(x) {
            *to = x.widen() * inverse * factor;
        }
        inverse
    }
}

/// Logarithm of the smallest decay that is not zero. Parts decayed further change no digit of a
/// sum, and processors take a hundred times as long for products with subnormal numbers.
const FORGOTTEN: f32 = -60.0;

/// Returns e^log, a decay.
#[inline(always)]
fn decay(log: f32) -> f32 {
    if log < FORGOTTEN { 0.0 } else { simd::exp(log) }
}

vectorized! {
    /// Writes e^(own − sums).
    fn write_decays(to: &mut [f32], sums: &[f32], own: f32) {
        for (to, sum) in to.iter_mut().zip(sums) {
            *to = decay(own - sum);
        }
    }
}

vectorized! {
    fn write_products(to: &mut [f32], a: &[f32], b: &[f32], factor: f32) {
        for ((to, a), b) in to.iter_mut().zip(a).zip(b) {
            *to = a * b * factor;
        }
    }
}

vectorized! {
    fn write_missing<T: FloatElement>(to: &mut [f32], v: &[T], read: &[f32], decay: f32) {
        for ((to, v), read) in to.iter_mut().zip(v).zip(read) {
            *to = v.widen() - decay * read;
        }
    }
}

vectorized! {
    pub(super) fn write_scaled(to: &mut [f32], from: &[f32], factor: f32) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = from * factor;
        }
    }
}

vectorized! {
    pub(super) fn scale(values: &mut [f32], factor: f32) {
        for value in values {
            *value *= factor;
        }
    }
}

vectorized! {
    pub(super) fn narrow<T: FloatElement>(to: &mut [T], from: &[f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = T::nearest(*from);
        }
    }
}

/// Columns whose sums stay in registers while rows are subtracted.
const COLUMNS: usize = 4 * simd::LANES;

vectorized! {
    /// Subtracts `rows`, each times its factor, from `row`, in order.
    pub(super) fn subtract_rows(row: &mut [f32], rows: &[f32], factors: &[f32]) {
        let width = row.len();
        let (blocks, rest) = row.as_chunks_mut::<COLUMNS>();
        for (i, block) in blocks.iter_mut().enumerate() {
            let [a, b, c, d] = block.as_chunks_mut::<{ simd::LANES }>().0 else { continue };
            let (mut sums_a, mut sums_b, mut sums_c, mut sums_d) = (*a, *b, *c, *d);
            for (row, factor) in rows.chunks_exact(width).zip(factors) {
                let (row, _) = row[i * COLUMNS..(i + 1) * COLUMNS].as_chunks();
                subtract_lanes(&mut sums_a, &row[0], *factor);
                subtract_lanes(&mut sums_b, &row[1], *factor);
                subtract_lanes(&mut sums_c, &row[2], *factor);
                subtract_lanes(&mut sums_d, &row[3], *factor);
            }
            (*a, *b, *c, *d) = (sums_a, sums_b, sums_c, sums_d);
        }
        let start = width - rest.len();
        for (row, factor) in rows.chunks_exact(width).zip(factors) {
            for (value, row) in rest.iter_mut().zip(&row[start..]) {
                *value -= factor * row;
            }
        }
    }
}

#[inline(always)]
fn subtract_lanes(sums: &mut [f32; simd::LANES], row: &[f32; simd::LANES], factor: f32) {
    for (sum, value) in sums.iter_mut().zip(row) {
        *sum -= factor * value;
    }
}
