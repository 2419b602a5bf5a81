//! The backward of the chunks of a head, from the last one to the first.
//!
//! With the forward's u = `added`, P = `scores`, A = `system`, R = `read`, the state S before and
//! the gradient dS of the state after a chunk:
//!
//! ```text
//! du = Pᵀ dO + D_C (K dS),  B = (I + A)⁻ᵀ du,  dA = −B uᵀ,  dP = dO uᵀ
//! Y = [−β e^γ B; e^γ dO],  d[K; Q] = Y Sᵀ + …,  dS before = e^γ_C dS + [K; Q]ᵀ Y
//! ```

use super::chunk::{KeyChunk, ValueChunk, narrow, product, scale, subtract_rows, view, write_scaled};
use super::{DeltaRows, GateGrad, GradRow};
use crate::backends::simd;
use crate::instruction_set::vectorized;
use crate::ops::gated_delta::CHUNK;
use crate::runtime::cpu_tensor::FloatElement;

/// The backward of a span in the value heads of a key head.
pub(super) struct BackwardTask<'a, T> {
    pub(super) key_head: usize,
    /// The first row, and the number of the state before the second chunk.
    pub(super) first: usize,
    pub(super) first_chunk: usize,
    pub(super) rows: Vec<GradRow<'a, T>>,
}

impl<T: FloatElement> BackwardTask<'_, T> {
    /// Writes the gradients of the rows; returns those of the gates, `[rows, V / K]`.
    pub(super) fn run(mut self, all: &DeltaRows<'_, T>, dout: &[T], states: &[f32]) -> Vec<GateGrad> {
        let (heads, group) = (all.heads, all.heads.group());
        let mut gates = vec![GateGrad::default(); self.rows.len() * group];
        let mut dstates = vec![0f32; group * heads.state_len()];
        let count = self.rows.len().div_ceil(CHUNK);
        let chunks = self.rows.chunks_mut(CHUNK).zip(gates.chunks_mut(CHUNK * group)).enumerate();
        for (i, (rows, gates)) in chunks.rev() {
            let first = self.first + i * CHUNK;
            let keys = KeyChunk::of(all, self.key_head, first, rows.len());
            let mut grads = KeyGrads::zeros(&keys);
            for (member, dstate) in dstates.chunks_exact_mut(heads.state_len()).enumerate() {
                let head = self.key_head * group + member;
                let state = i.checked_sub(1).map(|before| {
                    let at = (self.first_chunk + before) * heads.num_value_heads + head;
                    &states[at * heads.state_len()..][..heads.state_len()]
                });
                let chunk = ValueChunk::of(all, &keys, head, first, state);
                let dout = head_rows(dout, head, first, &keys, heads.value_dim, heads.value_width());
                let grad =
                    ChunkGrads { keys: &keys, chunk: &chunk, dim: heads.value_dim, is_last: i + 1 == count };
                let dvalues = grad.run(&mut grads, dout, state, dstate);
                for (row, (d, to)) in dvalues.v.chunks_exact(heads.value_dim).zip(rows.iter_mut()).enumerate()
                {
                    narrow(&mut to.v[member * heads.value_dim..][..heads.value_dim], d);
                    gates[row * group + member] = dvalues.gate(&chunk, row);
                }
            }
            grads.finish(&keys);
            grads.write(&keys, rows);
        }
        gates
    }
}

/// Returns the rows of a head in f32, `[len, dim]`, of a matrix with `width` columns.
fn head_rows<T: FloatElement>(
    data: &[T],
    head: usize,
    first: usize,
    keys: &KeyChunk,
    dim: usize,
    width: usize,
) -> Vec<f32> {
    let mut rows = vec![0f32; keys.len * dim];
    for (i, to) in rows.chunks_exact_mut(dim).enumerate() {
        widen(to, &data[(first + i) * width + head * dim..][..dim]);
    }
    rows
}

/// The gradients of the keys and queries of a chunk, summed over value heads.
struct KeyGrads {
    /// `[2·len, Dk]`, like [`KeyChunk::kq`].
    kq: Vec<f32>,
    /// Those of the products, `[2·len, len]`.
    products: Vec<f32>,
}

impl KeyGrads {
    fn zeros(keys: &KeyChunk) -> Self {
        KeyGrads { kq: vec![0.0; keys.kq.len()], products: vec![0.0; keys.products.len()] }
    }

    /// Adds the gradients of the products to those of keys and queries.
    fn finish(&mut self, keys: &KeyChunk) {
        let (len, dim) = (keys.len, keys.dim);
        let all = view(&self.products, 2 * len, len);
        // d[K; Q] += d[KKᵀ; QKᵀ] K and dK += d[KKᵀ; QKᵀ]ᵀ [K; Q].
        product(&mut self.kq, dim, true, all, keys.keys());
        product(&mut self.kq, dim, true, all.t(), keys.view());
    }

    /// Writes the gradients of the keys and queries before their norms.
    fn write<T: FloatElement>(&self, keys: &KeyChunk, rows: &mut [GradRow<'_, T>]) {
        let (len, dim) = (keys.len, keys.dim);
        let scale = 1.0 / (dim as f32).sqrt();
        for (i, row) in rows.iter_mut().enumerate() {
            let of = |i: usize| (&self.kq[i * dim..][..dim], &keys.kq[i * dim..][..dim]);
            let ((d, normed), inverse) = (of(i), keys.inverse[i]);
            write_norm_gradient(row.k, d, normed, inverse, 1.0);
            let ((d, normed), inverse) = (of(len + i), keys.inverse[len + i]);
            write_norm_gradient(row.q, d, normed, inverse, scale);
        }
    }
}

/// The gradients of a chunk of a value head.
struct ValueGrads {
    /// Those of the values, `[len, Dv]`.
    v: Vec<f32>,
    /// Those of β, and of the logarithm of the decay, by token.
    beta: Vec<f32>,
    log_decay: Vec<f32>,
}

impl ValueGrads {
    /// Returns the gradients of what the gates of a token are computed from.
    fn gate(&self, chunk: &ValueChunk, row: usize) -> GateGrad {
        let gate = chunk.gates[row];
        GateGrad {
            a: self.log_decay[row] * gate.slope,
            b: self.beta[row] * gate.beta * (1.0 - gate.beta),
            a_log: self.log_decay[row] * gate.log_decay,
        }
    }
}

/// The backward of one chunk of a value head.
struct ChunkGrads<'a> {
    keys: &'a KeyChunk,
    chunk: &'a ValueChunk,
    /// The width of a value, Dv.
    dim: usize,
    /// True for the last chunk of a span, whose final state has no gradient.
    is_last: bool,
}

impl ChunkGrads<'_> {
    /// Returns the gradients of the values and gates, given `dout: [len, Dv]`; adds those of keys
    /// and queries, and replaces the gradient of the state after the chunk by that of the state
    /// before it.
    fn run(
        &self,
        grads: &mut KeyGrads,
        dout: Vec<f32>,
        state: Option<&[f32]>,
        dstate: &mut [f32],
    ) -> ValueGrads {
        let (len, dim) = (self.keys.len, self.dim);
        // Rows 0..len are B, the others dO.
        let mut rhs = self.corrections(&dout, dstate);
        rhs.extend(dout);
        let mut products = vec![0f32; 2 * len * len];
        product(&mut products, len, false, view(&rhs, 2 * len, dim), view(&self.chunk.added, len, dim).t());
        let mut grad = self.values(&rhs);
        // The gradients of γ.
        let mut sums = self.weights(grads, &products, &mut grad.beta);
        if !self.is_last {
            self.state_after(grads, &mut sums, state, dstate);
        }
        if let Some(state) = state {
            self.state_before(grads, &mut sums, rhs, state, dstate);
        }
        // γ is a running sum.
        let mut sum = 0.0;
        for (to, d) in grad.log_decay.iter_mut().zip(&sums).rev() {
            sum += d;
            *to = sum;
        }
        grad
    }

    /// Adds the gradients by the state after the chunk, those of γ to `sums`.
    fn state_after(&self, grads: &mut KeyGrads, sums: &mut [f32], state: Option<&[f32]>, dstate: &[f32]) {
        let (keys, chunk, dim) = (self.keys, self.chunk, self.dim);
        let (len, key_dim) = (keys.len, keys.dim);
        let added = chunk.added_at_end();
        let mut dkeys = vec![0f32; len * key_dim];
        product(&mut dkeys, key_dim, false, view(&added, len, dim), view(dstate, key_dim, dim).t());
        let mut at_end = state.map_or(0.0, |state| chunk.whole() * dot(state, dstate));
        for (i, d) in dkeys.chunks_exact(key_dim).enumerate() {
            let along = dot(d, &keys.kq[i * key_dim..][..key_dim]);
            at_end += along;
            sums[i] -= along;
        }
        sums[len - 1] += at_end;
        add(&mut grads.kq[..len * key_dim], &dkeys);
    }

    /// Adds the gradients by the state before the chunk, those of γ to `sums`; `rhs` is B, then dO.
    fn state_before(
        &self,
        grads: &mut KeyGrads,
        sums: &mut [f32],
        mut rhs: Vec<f32>,
        state: &[f32],
        dstate: &mut [f32],
    ) {
        let (keys, chunk, dim) = (self.keys, self.chunk, self.dim);
        let (len, key_dim) = (keys.len, keys.dim);
        // Y in place of the right-hand sides.
        for (i, row) in rhs.chunks_exact_mut(dim).enumerate() {
            let factor = if i < len { -chunk.gates[i].beta } else { 1.0 };
            scale(row, factor * chunk.from_start[i % len]);
        }
        let rhs = view(&rhs, 2 * len, dim);
        let mut dkq = vec![0f32; 2 * len * key_dim];
        product(&mut dkq, key_dim, false, rhs, view(state, key_dim, dim).t());
        for (i, d) in dkq.chunks_exact(key_dim).enumerate() {
            sums[i % len] += dot(d, &keys.kq[i * key_dim..][..key_dim]);
        }
        add(&mut grads.kq, &dkq);
        scale(dstate, chunk.whole());
        product(dstate, dim, true, keys.view().t(), rhs);
    }

    /// Returns B, `[len, Dv]`.
    fn corrections(&self, dout: &[f32], dstate: &[f32]) -> Vec<f32> {
        let (keys, chunk, dim) = (self.keys, self.chunk, self.dim);
        let len = keys.len;
        let mut d = vec![0f32; len * dim];
        if !self.is_last {
            product(&mut d, dim, false, keys.keys(), view(dstate, keys.dim, dim));
            d.chunks_exact_mut(dim).zip(&chunk.to_end).for_each(|(row, factor)| scale(row, *factor));
        }
        product(&mut d, dim, true, view(&chunk.scores, len, len).t(), view(dout, len, dim));
        // The transposed system, whose rows are contiguous.
        let mut factors = vec![0f32; len * len];
        for (i, row) in chunk.system.chunks_exact(len).enumerate() {
            row.iter().enumerate().for_each(|(j, value)| factors[j * len + i] = *value);
        }
        for i in (0..len).rev() {
            let (row, after) = d[i * dim..].split_at_mut(dim);
            subtract_rows(row, after, &factors[i * len + i + 1..(i + 1) * len]);
        }
        d
    }

    /// Returns the gradients of the values and, in part, of β.
    fn values(&self, rhs: &[f32]) -> ValueGrads {
        let (chunk, dim, len) = (self.chunk, self.dim, self.keys.len);
        let mut grads =
            ValueGrads { v: vec![0f32; len * dim], beta: vec![0.0; len], log_decay: vec![0.0; len] };
        for (i, d) in rhs[..len * dim].chunks_exact(dim).enumerate() {
            grads.beta[i] = dot(d, &chunk.missing[i * dim..][..dim]);
            write_scaled(&mut grads.v[i * dim..][..dim], d, chunk.gates[i].beta);
        }
        grads
    }

    /// Adds the gradients of the products of keys and queries, given `products`: B uᵀ, then dO uᵀ.
    /// Adds those of β, and returns those of γ by the decays D_ij.
    fn weights(&self, grads: &mut KeyGrads, products: &[f32], beta: &mut [f32]) -> Vec<f32> {
        let (chunk, len) = (self.chunk, self.keys.len);
        let mut sums = vec![0f32; len];
        let mut row_grads = [0f32; CHUNK];
        for i in 0..len {
            let (own, query) = (i * len, (len + i) * len);
            let weights = DecayedRow {
                decays: &chunk.decays[own..own + i],
                system: &chunk.system[own..own + i],
                scores: &chunk.scores[own..own + i],
            };
            let (dsystem, dscores) = (&products[own..own + i], &products[query..=query + i]);
            row_grads[..i].fill(0.0);
            add_decay_gradients(&mut row_grads[..i], &weights, dsystem, dscores);
            sums[i] += simd_sum(&row_grads[..i]);
            subtract(&mut sums[..i], &row_grads[..i]);
            let key_products = &self.keys.products[own..own + i];
            beta[i] -= dot3(dsystem, weights.decays, key_products);
            add_products(&mut grads.products[own..own + i], dsystem, weights.decays, -chunk.gates[i].beta);
            let decays = &chunk.decays[own..=own + i];
            add_products(&mut grads.products[query..=query + i], dscores, decays, 1.0);
        }
        sums
    }
}

/// The entries of a row left of the diagonal.
struct DecayedRow<'a> {
    decays: &'a [f32],
    system: &'a [f32],
    scores: &'a [f32],
}

vectorized! {
    /// Adds the gradients of log D_ij of a row; `dsystem` has the opposite sign.
    fn add_decay_gradients(to: &mut [f32], row: &DecayedRow<'_>, dsystem: &[f32], dscores: &[f32]) {
        let weights = row.system.iter().zip(row.scores);
        for (((to, (system, score)), dsystem), dscore) in to.iter_mut().zip(weights).zip(dsystem).zip(dscores) {
            *to += dscore * score - dsystem * system;
        }
    }
}

vectorized! {
    fn widen<T: FloatElement>(to: &mut [f32], from: &[T]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = from.widen();
        }
    }
}

vectorized! {
    fn add(to: &mut [f32], from: &[f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to += from;
        }
    }
}

vectorized! {
    fn subtract(to: &mut [f32], from: &[f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to -= from;
        }
    }
}

vectorized! {
    fn add_products(to: &mut [f32], a: &[f32], b: &[f32], factor: f32) {
        for ((to, a), b) in to.iter_mut().zip(a).zip(b) {
            *to += a * b * factor;
        }
    }
}

vectorized! {
    fn dot(a: &[f32], b: &[f32]) -> f32 {
        simd::sum_of2(a, b, |a, b| a * b)
    }
}

vectorized! {
    fn simd_sum(a: &[f32]) -> f32 {
        simd::sum_of(a, |a| a)
    }
}

vectorized! {
    fn dot3(a: &[f32], b: &[f32], c: &[f32]) -> f32 {
        let mut products = [0f32; CHUNK];
        for ((to, b), c) in products.iter_mut().zip(b).zip(c) {
            *to = b * c;
        }
        simd::sum_of2(a, &products[..a.len()], |a, bc| a * bc)
    }
}

vectorized! {
    /// Writes the gradient of x, given `d`, that of `y = x · factor / ‖x‖`.
    fn write_norm_gradient<T: FloatElement>(to: &mut [T], d: &[f32], y: &[f32], inverse: f32, factor: f32) {
        // y over the factor is the unit vector h, and dx = (dh − h (h·dh)) / ‖x‖.
        let along = simd::sum_of2(d, y, |d, y| d * y) / factor;
        for ((to, d), y) in to.iter_mut().zip(d).zip(y) {
            *to = T::nearest(inverse * (d * factor - y * along));
        }
    }
}
