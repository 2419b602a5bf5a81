//! The delta rule on the CPU: a task is a span and a key head with its value heads, which share the
//! products of keys and queries. Their gradients of a key head are summed in their order, so the
//! bits do not depend on the number of threads.

mod backward;
mod chunk;

use std::vec::IntoIter;

use candle_core::Tensor;
use rayon::prelude::*;

use super::{DeltaHeads, DeltaInputs, DeltaOutput, GateGrads, Span, states_of};
use crate::error::Result;
use crate::ops::matmul::{ColumnView, ColumnViewMut};
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{
    FloatElement, PlainElement, dims2, read, tensor, update, update_in_f32, with_elem,
};
use backward::BackwardTask;
use chunk::{ForwardTask, HeadGate};

/// The inputs of all tasks.
struct DeltaRows<'a, T> {
    heads: DeltaHeads,
    qkv: &'a [T],
    a: GateColumns<'a, T>,
    b: GateColumns<'a, T>,
    gates: Vec<HeadGate>,
}

/// The columns `[N, V]` of a gate; `data` holds the elements of its tensor.
struct GateColumns<'a, T> {
    data: &'a [T],
    stride: usize,
    start: usize,
}

impl<'a, T: FloatElement> GateColumns<'a, T> {
    fn new(data: &'a [T], columns: ColumnView<'_>) -> Result<Self> {
        let (_, stride) = dims2(columns.tensor)?;
        Ok(GateColumns { data, stride, start: columns.start })
    }

    fn at(&self, row: usize, head: usize) -> f32 {
        self.data[row * self.stride + self.start + head].widen()
    }
}

/// Returns the constants of each value head.
fn gates(inputs: &DeltaInputs<'_>) -> Result<Vec<HeadGate>> {
    let in_f32 = |x: &Tensor| -> Result<Vec<f32>> {
        with_elem!(x.dtype(), P => Ok(read::<P>(x)?.iter().map(|x| x.widen()).collect()))
    };
    let (a_log, dt_bias) = (in_f32(inputs.a_log)?, in_f32(inputs.dt_bias)?);
    Ok(a_log.iter().zip(dt_bias).map(|(a_log, dt_bias)| HeadGate { rate: -a_log.exp(), dt_bias }).collect())
}

/// Deals pieces of `len` values to `heads` heads in turn.
fn dealt<T>(data: &mut [T], len: usize, heads: usize) -> Vec<IntoIter<&mut [T]>> {
    let mut of_heads: Vec<Vec<&mut [T]>> = (0..heads).map(|_| Vec::new()).collect();
    for (i, piece) in data.chunks_exact_mut(len).enumerate() {
        of_heads[i % heads].push(piece);
    }
    of_heads.into_iter().map(Vec::into_iter).collect()
}

/// Takes the pieces of a span from those of a head; `at` is the row of the next piece.
fn taken<X>(pieces: &mut IntoIter<X>, at: usize, span: &Span) -> Vec<X> {
    pieces.by_ref().skip(span.q_start - at).take(span.q_len).collect()
}

pub(super) fn forward(
    inputs: DeltaInputs<'_>,
    heads: DeltaHeads,
    spans: &[Span],
    state: Option<&TensorMut>,
) -> Result<DeltaOutput> {
    let (rows, _) = dims2(inputs.qkv)?;
    let (keys, group_state) = (heads.num_key_heads, heads.group() * heads.state_len());
    let chunks = if state.is_some() { 0 } else { states_of(spans) };
    let mut states = vec![0f32; chunks * keys * group_state];
    let mut carried = match state {
        Some(state) => Some(read::<f32>(state)?.to_vec()),
        None => None,
    };
    let out = with_elem!(inputs.qkv.dtype(), T => {
        let (qkv, a, b) = (read::<T>(inputs.qkv)?, read::<T>(inputs.a.tensor)?, read::<T>(inputs.b.tensor)?);
        let (a, b) = (GateColumns::new(&a, inputs.a)?, GateColumns::new(&b, inputs.b)?);
        let all = DeltaRows { heads, qkv: &qkv, a, b, gates: gates(&inputs)? };
        let mut out = T::zeros(rows * heads.value_width());
        let mut out_of = dealt(&mut out, heads.group() * heads.value_dim, keys);
        let mut saved_of = dealt(&mut states, group_state, keys);
        let mut carried_of = carried.as_mut().map(|carried| dealt(carried, group_state, keys));
        let mut tasks = Vec::new();
        let mut end = 0;
        for span in spans {
            for head in 0..keys {
                tasks.push(ForwardTask {
                    key_head: head,
                    first: span.q_start,
                    out: taken(&mut out_of[head], end, span),
                    states: saved_of[head].by_ref().take(states_of(&[*span])).collect(),
                    carried: carried_of.as_mut().and_then(|carried| carried[head].next()),
                });
            }
            end = span.q_start + span.q_len;
        }
        tasks.into_par_iter().with_max_len(1).for_each(|task| task.run(&all));
        tensor(out, (rows, heads.value_width()))
    })?;
    if let (Some(state), Some(carried)) = (state, carried) {
        update(state, |state: &mut [f32]| state.copy_from_slice(&carried))?;
    }
    let shape = (chunks, heads.num_value_heads, heads.key_dim, heads.value_dim);
    Ok(DeltaOutput { out, states: tensor(states, shape)? })
}

/// The gradients of one row of a key head: of its query, its key and the values of its value heads.
struct GradRow<'a, T> {
    q: &'a mut [T],
    k: &'a mut [T],
    v: &'a mut [T],
}

/// The gradients of the gates of one token and value head.
#[derive(Debug, Clone, Copy, Default)]
struct GateGrad {
    a: f32,
    b: f32,
    a_log: f32,
}

/// Returns the rows of `d: [N, 2 K·Dk + V·Dv]` by key heads.
fn grad_rows<T>(d: &mut [T], heads: DeltaHeads) -> Vec<IntoIter<GradRow<'_, T>>> {
    let mut of_heads: Vec<Vec<GradRow<'_, T>>> = (0..heads.num_key_heads).map(|_| Vec::new()).collect();
    for row in d.chunks_exact_mut(heads.conv_width()) {
        let (q, rest) = row.split_at_mut(heads.key_width());
        let (k, v) = rest.split_at_mut(heads.key_width());
        let keys = q.chunks_exact_mut(heads.key_dim).zip(k.chunks_exact_mut(heads.key_dim));
        let values = v.chunks_exact_mut(heads.group() * heads.value_dim);
        for (of_head, ((q, k), v)) in of_heads.iter_mut().zip(keys.zip(values)) {
            of_head.push(GradRow { q, k, v });
        }
    }
    of_heads.into_iter().map(Vec::into_iter).collect()
}

pub(super) fn backward(
    inputs: DeltaInputs<'_>,
    output: &DeltaOutput,
    dout: &Tensor,
    heads: DeltaHeads,
    spans: &[Span],
    grads: GateGrads<'_>,
) -> Result<Tensor> {
    let (rows, width) = dims2(inputs.qkv)?;
    let states = read::<f32>(&output.states)?;
    with_elem!(inputs.qkv.dtype(), T => {
        let mut dqkv = T::zeros(rows * width);
        let of_gates: Vec<GateGrad> = {
            let (qkv, dout) = (read::<T>(inputs.qkv)?, read::<T>(dout)?);
            let (a, b) = (read::<T>(inputs.a.tensor)?, read::<T>(inputs.b.tensor)?);
            let (a, b) = (GateColumns::new(&a, inputs.a)?, GateColumns::new(&b, inputs.b)?);
            let all = DeltaRows { heads, qkv: &qkv, a, b, gates: gates(&inputs)? };
            let mut rows_of = grad_rows(&mut dqkv, heads);
            let (mut tasks, mut end, mut chunk) = (Vec::new(), 0, 0);
            for span in spans {
                for (head, rows) in rows_of.iter_mut().enumerate() {
                    let rows = taken(rows, end, span);
                    tasks.push(BackwardTask { key_head: head, first: span.q_start, first_chunk: chunk, rows });
                }
                end = span.q_start + span.q_len;
                chunk += states_of(&[*span]);
            }
            let places: Vec<(usize, usize)> = tasks.iter().map(|task| (task.first, task.key_head)).collect();
            let (dout, states): (&[T], &[f32]) = (&dout, &states);
            let tasks = tasks.into_par_iter().with_max_len(1);
            let done: Vec<Vec<GateGrad>> = tasks.map(|task| task.run(&all, dout, states)).collect();
            gates_by_row(rows, heads, &places, &done)
        };
        write_gates::<T>(grads.da, &of_gates, |grad| grad.a)?;
        write_gates::<T>(grads.db, &of_gates, |grad| grad.b)?;
        add_gates(grads.params.a_log, &of_gates, |grad| grad.a_log)?;
        add_gates(grads.params.dt_bias, &of_gates, |grad| grad.a)?;
        tensor(dqkv, (rows, width))
    })
}

/// Returns the gradients of the gates `[N, V]` from those of the tasks, which begin at a row and
/// belong to a key head.
fn gates_by_row(
    rows: usize,
    heads: DeltaHeads,
    places: &[(usize, usize)],
    done: &[Vec<GateGrad>],
) -> Vec<GateGrad> {
    let (group, values) = (heads.group(), heads.num_value_heads);
    let mut all = vec![GateGrad::default(); rows * values];
    for ((first, head), grads) in places.iter().zip(done) {
        for (i, grads) in grads.chunks_exact(group).enumerate() {
            all[(first + i) * values + head * group..][..group].copy_from_slice(grads);
        }
    }
    all
}

/// Writes one number of each gradient to the columns `[N, V]` of `to`.
fn write_gates<T: FloatElement>(
    to: ColumnViewMut<'_>,
    grads: &[GateGrad],
    of: impl Fn(&GateGrad) -> f32,
) -> Result<()> {
    let (_, width) = dims2(to.tensor)?;
    update(to.tensor, |data: &mut [T]| {
        for (row, grads) in data.chunks_exact_mut(width).zip(grads.chunks_exact(to.len)) {
            row[to.start..].iter_mut().zip(grads).for_each(|(to, grad)| *to = T::nearest(of(grad)));
        }
    })
}

/// Adds one number of each gradient to the sums of the value heads, rows in order.
fn add_gates(to: Option<&TensorMut>, grads: &[GateGrad], of: impl Fn(&GateGrad) -> f32) -> Result<()> {
    let Some(to) = to else { return Ok(()) };
    update_in_f32(to, |sums| {
        for grads in grads.chunks_exact(sums.len().max(1)) {
            sums.iter_mut().zip(grads).for_each(|(sum, grad)| *sum += of(grad));
        }
    })
}
