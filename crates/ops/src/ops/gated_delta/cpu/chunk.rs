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

/// The keys and queries of a chunk of a key head.
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
    pub(super) fn of<T: FloatElement>(all: &DeltaRows<'_, T>, head: usize, first: usize, len: usize) -> Self {
        let (heads, dim) = (all.heads, all.heads.key_dim);
        let scale = 1.0 / (dim as f32).sqrt();
        let (mut kq, mut inverse) = (vec![0f32; 2 * len * dim], vec![0f32; 2 * len]);
        for (i, (to, inverse)) in kq.chunks_exact_mut(dim).zip(&mut inverse).enumerate() {
            let (row, start, scale) = match i.checked_sub(len) {
                None => (i, heads.key_width(), 1.0),
                Some(i) => (i, 0, scale),
            };
            let at = (first + row) * heads.conv_width() + start + head * dim;
            *inverse = write_normed(to, &all.qkv[at..at + dim], scale);
        }
        let mut products = vec![0f32; 2 * len * len];
        product(&mut products, len, false, view(&kq, 2 * len, dim), view(&kq, len, dim).t());
        KeyChunk { len, dim, kq, inverse, products }
    }

    /// Returns keys and queries, `[2·len, Dk]`.
    pub(super) fn view(&self) -> MatView<'_, f32> {
        view(&self.kq, 2 * self.len, self.dim)
    }

    pub(super) fn keys(&self) -> MatView<'_, f32> {
        view(&self.kq, self.len, self.dim)
    }
}

/// A chunk of a value head, solved from the state before it.
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
    /// The products of keys and queries with the state before the chunk, `[2·len, Dv]`.
    pub(super) read: Vec<f32>,
    /// v_i − e^γ_i Sᵀk_i: `[len, Dv]`.
    pub(super) missing: Vec<f32>,
    /// The corrections u: `[len, Dv]`.
    pub(super) added: Vec<f32>,
}

impl ValueChunk {
    /// Computes the chunk of `len` tokens from row `first` on, from the state `[Dk, Dv]` before it;
    /// it is zero if none is given.
    pub(super) fn of<T: FloatElement>(
        all: &DeltaRows<'_, T>,
        keys: &KeyChunk,
        head: usize,
        first: usize,
        state: Option<&[f32]>,
    ) -> Self {
        let (heads, len, dim) = (all.heads, keys.len, all.heads.value_dim);
        let mut chunk =
            ValueChunk::decayed(token_gates(all.gates[head], [&all.a, &all.b], head, first, len), dim);
        chunk.weigh(&keys.products);
        if let Some(state) = state {
            product(&mut chunk.read, dim, false, keys.view(), view(state, keys.dim, dim));
        }
        for i in 0..len {
            let at = (first + i) * heads.conv_width() + 2 * heads.key_width() + head * dim;
            let row = i * dim..(i + 1) * dim;
            let read = &chunk.read[row.clone()];
            write_missing(&mut chunk.missing[row.clone()], &all.qkv[at..at + dim], read, chunk.from_start[i]);
            let (before, added) = chunk.added.split_at_mut(row.start);
            write_scaled(&mut added[..dim], &chunk.missing[row], chunk.gates[i].beta);
            subtract_rows(&mut added[..dim], before, &chunk.system[i * len..][..i]);
        }
        chunk
    }

    /// Returns a chunk with these gates and their decays, and memory for the rest.
    fn decayed(gates: Vec<TokenGate>, dim: usize) -> Self {
        let len = gates.len();
        let mut sum = 0.0;
        let mut sums = [0f32; CHUNK];
        for (to, gate) in sums.iter_mut().zip(&gates) {
            sum += gate.log_decay;
            *to = sum;
        }
        let sums = &sums[..len];
        let mut decays = vec![0f32; len * len];
        for (i, row) in decays.chunks_exact_mut(len).enumerate() {
            write_decays(&mut row[..=i], &sums[..=i], sums[i]);
        }
        let zeros = |rows: usize, width: usize| vec![0f32; rows * width];
        ValueChunk {
            len,
            dim,
            gates,
            from_start: sums.iter().map(|sum| decay(*sum)).collect(),
            to_end: decays[(len - 1) * len..].to_vec(),
            decays,
            system: zeros(len, len),
            scores: zeros(len, len),
            read: zeros(2 * len, dim),
            missing: zeros(len, dim),
            added: zeros(len, dim),
        }
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

    /// Returns the corrections with the decays of their parts at the end of the chunk.
    pub(super) fn added_at_end(&self) -> Vec<f32> {
        let mut added = vec![0f32; self.added.len()];
        let rows = added.chunks_exact_mut(self.dim).zip(self.added.chunks_exact(self.dim));
        rows.zip(&self.to_end).for_each(|((to, from), factor)| write_scaled(to, from, *factor));
        added
    }

    /// Returns the outputs, `[len, Dv]`.
    fn outputs(&self) -> Vec<f32> {
        let (len, dim) = (self.len, self.dim);
        let mut out = vec![0f32; len * dim];
        let rows = out.chunks_exact_mut(dim).zip(self.read[len * dim..].chunks_exact(dim));
        rows.zip(&self.from_start).for_each(|((to, from), factor)| write_scaled(to, from, *factor));
        product(&mut out, dim, true, view(&self.scores, len, len), view(&self.added, len, dim));
        out
    }
}

/// Returns the gates of `len` tokens from row `first` on; `columns` are those of a and b.
fn token_gates<T: FloatElement>(
    gate: HeadGate,
    [a, b]: [&GateColumns<'_, T>; 2],
    head: usize,
    first: usize,
    len: usize,
) -> Vec<TokenGate> {
    (first..first + len).map(|row| gate.of_token(a.at(row, head), b.at(row, head))).collect()
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
        for (i, out) in self.out.chunks_mut(CHUNK).enumerate() {
            let first = self.first + i * CHUNK;
            if i > 0
                && let Some(saved) = self.states.get_mut(i - 1)
            {
                saved.copy_from_slice(states);
            }
            let keys = KeyChunk::of(all, self.key_head, first, out.len());
            for (member, state) in states.chunks_exact_mut(heads.state_len()).enumerate() {
                let head = self.key_head * heads.group() + member;
                let before = (i > 0 || is_carried).then_some(&*state);
                let chunk = ValueChunk::of(all, &keys, head, first, before);
                for (out, row) in out.iter_mut().zip(chunk.outputs().chunks_exact(dim)) {
                    narrow(&mut out[member * dim..][..dim], row);
                }
                if i + 1 < chunks || is_carried {
                    scale(state, chunk.whole());
                    let added = chunk.added_at_end();
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

vectorized! {
    /// Subtracts the sum of `rows`, each times its factor, from `row`: four rows at a time.
    pub(super) fn subtract_rows(row: &mut [f32], rows: &[f32], factors: &[f32]) {
        let width = row.len();
        let whole = factors.len() / 4 * 4;
        for (rows, f) in rows.chunks_exact(4 * width).zip(factors.chunks_exact(4)) {
            let (a, rows) = rows.split_at(width);
            let (b, rows) = rows.split_at(width);
            let (c, d) = rows.split_at(width);
            for ((((row, a), b), c), d) in row.iter_mut().zip(a).zip(b).zip(c).zip(d) {
                *row = *row - f[0] * a - f[1] * b - f[2] * c - f[3] * d;
            }
        }
        for (rows, f) in rows[whole * width..].chunks_exact(width).zip(&factors[whole..]) {
            for (row, a) in row.iter_mut().zip(rows) {
                *row -= f * a;
            }
        }
    }
}
