//! Ops measured by the parameters that they read and write: quantized panels, embeddings,
//! gradients, the optimizer.

use std::collections::BTreeSet;

use candle_core::{DType, Device};

use super::inputs::{token_ids, too_large};
use super::products::weight_in;
use super::{BenchShapes, TimedOp};
use crate::backends::gpu::has_kernels;
use crate::error::Result;
use crate::ops::adamw::cases::FIRST;
use crate::ops::adamw::{AdamWPiece, AdamWStep, adamw};
use crate::ops::adamw_int8::{Int8State, STATE_BLOCK, adamw_int8};
use crate::ops::dora::weight_norm;
use crate::ops::elementwise::{add_into, sums_of_squares};
use crate::ops::embedding::{columns_of, columns_of_backward, embed, embed_backward, rows_of};
use crate::ops::matmul_quantized::cases::whole;
use crate::ops::matmul_quantized::{Weight, dequantize};
use crate::ops::stochastic_rounding::StochasticRounding;
use crate::quant::{BlockType, GgmlFormat, GridCodes, GridFormat, GridZeros, QuantFormat, ScaleDtype};
use crate::runtime::copy::{copy_into, zero};
use crate::runtime::rng::RngStream;

const F32_BYTES: usize = 4;

/// Values of the tensor whose copy gives the copy rate: 256 MiB, more than caches hold.
const COPIED: usize = 64 << 20;

/// Minimum if less memory is available: 64 MiB, more than most caches hold.
const COPIED_AT_LEAST: usize = 16 << 20;

/// The rank of adapters.
const RANK: usize = 16;

/// The constants of a typical update.
const STEP: AdamWStep =
    AdamWStep { learning_rate: 1e-4, weight_decay: 0.01, update: 10, grad_scale: 0.5, ..FIRST };

pub(super) fn ops(shapes: &BenchShapes) -> Vec<TimedOp> {
    let mut ops = panels(shapes);
    ops.extend([
        row_norms(shapes),
        lookup(shapes),
        lookup_backward(shapes),
        adapter_lookup(shapes),
        adapter_lookup_backward(shapes),
        angles_of_positions(shapes),
        cast(shapes),
        zeroed(shapes),
        accumulated(shapes),
        squares(shapes),
        update(shapes),
        update_int8(shapes),
    ]);
    ops
}

/// Times a copy from memory to memory, f32: by the driver on a GPU, by all threads on the CPU. A
/// processor also reads the memory that a copy overwrites, so an update in place may exceed the
/// copy rate.
///
/// # Errors
/// Fails if a copy too large for caches takes more than `memory` bytes.
pub(super) fn copy(device: &Device, memory: u64) -> Result<TimedOp> {
    let bytes = |values: usize| 2 * F32_BYTES * values;
    let copied = usize::try_from(memory).unwrap_or(usize::MAX).min(bytes(COPIED)) / bytes(1);
    if copied < COPIED_AT_LEAST {
        return Err(too_large(bytes(COPIED_AT_LEAST) as u64, memory));
    }
    let (on_cpu, what) = (device.is_cpu(), ("copy", format!("{copied}"), DType::F32));
    Ok(TimedOp::moving(bytes(copied), what, move |inputs| {
        let x = inputs.normal_as(DType::F32, 1.0, copied)?;
        // Zeros would be allocated lazily, at the first write.
        let y = if on_cpu { Some(inputs.normal_as(DType::F32, 1.0, copied)?) } else { None };
        Ok(Box::new(move || match &y {
            Some(y) => copy_into(y, &x),
            None => Ok(x.copy().map(drop)?),
        }))
    }))
}

/// Returns the shape of a block's widest weight as text, and its number of values.
fn widest(shapes: &BenchShapes) -> (String, usize) {
    let (d, f) = (shapes.widths.hidden_size, shapes.widths.intermediate_size);
    (format!("{f}x{d}"), f * d)
}

/// Times the panel of a block's widest weight: in NF4, and in formats of other tools that have
/// kernels of their own.
fn panels(shapes: &BenchShapes) -> Vec<TimedOp> {
    let int4 = GridFormat {
        codes: GridCodes::Int4,
        columns: shapes.widths.hidden_size,
        row_block: 1,
        column_block: 128,
        scales: ScaleDtype::F16,
        zeros: GridZeros::Bytes,
        by_column: false,
    };
    let fp8 = GridFormat {
        codes: GridCodes::E4m3,
        row_block: 128,
        scales: ScaleDtype::F32,
        zeros: GridZeros::Implied,
        ..int4
    };
    let formats = [
        ("nf4, double quantization", QuantFormat::default()),
        ("int4 with zeros, groups of 128", QuantFormat::Grid(int4)),
        ("fp8, blocks of 128x128", QuantFormat::Grid(fp8)),
        ("q4_K", QuantFormat::Ggml(GgmlFormat { kind: BlockType::Q4K })),
    ];
    formats.map(|(name, format)| panel(shapes, name, format)).into()
}

fn panel(shapes: &BenchShapes, name: &str, format: QuantFormat) -> TimedOp {
    let dtype = shapes.dtype;
    let shape = whole(&format, (shapes.widths.intermediate_size, shapes.widths.hidden_size));
    let (rows, columns) = shape;
    let bytes = format.scheme().bytes(rows * columns) + shapes.bytes(rows * columns);
    TimedOp::moving(bytes, ("dequantize", format!("{rows}x{columns}, {name}"), dtype), move |inputs| {
        let weight = weight_in(format, inputs, shape)?;
        Ok(Box::new(move || dequantize(&[&weight], dtype).map(drop)))
    })
}

/// Times DoRA's norms of a weight with an adapter.
fn row_norms(shapes: &BenchShapes) -> TimedOp {
    let (d, f) = (shapes.widths.hidden_size, shapes.widths.intermediate_size);
    let (shape, count) = widest(shapes);
    let bytes = shapes.bytes(count) + F32_BYTES * (RANK * (d + f) + f);
    TimedOp::moving(bytes, ("weight_norm", format!("{shape}, r {RANK}"), shapes.dtype), move |inputs| {
        let weight = inputs.sets(|_| inputs.normal(0.02, (f, d)))?;
        // Only kernels compute with factors in bf16.
        let dtype = if has_kernels(inputs.device) { inputs.dtype } else { DType::F32 };
        let factor = |shape: (usize, usize)| inputs.normal_as(dtype, 0.02, shape);
        let (a, b) = (factor((RANK, d))?, factor((f, RANK))?);
        Ok(Box::new(move || weight_norm(Weight::Dense(weight.next()?), &a, &b, 2.0).map(drop)))
    })
}

/// Returns the bytes of the token ids, and the number of distinct ids.
fn ids(shapes: &BenchShapes) -> (usize, usize) {
    let ids = token_ids(shapes.tokens, shapes.widths.vocab_size, 0);
    (size_of_val(&ids[..]), ids.iter().collect::<BTreeSet<_>>().len())
}

fn lookup(shapes: &BenchShapes) -> TimedOp {
    let (n, d, vocab) = (shapes.tokens, shapes.widths.hidden_size, shapes.widths.vocab_size);
    let (id_bytes, different) = ids(shapes);
    let (dtype, bytes) = (shapes.dtype, shapes.bytes((different + n) * d) + id_bytes);
    TimedOp::moving(bytes, ("embed", format!("{n} of {vocab}x{d}"), dtype), move |inputs| {
        let table = inputs.normal(1.0, (vocab, d))?;
        let ids = inputs.sets(|set| Ok(token_ids(n, vocab, set)))?;
        ids.calls(move |ids| embed(&table, ids, 1.0, dtype).map(drop))
    })
}

fn lookup_backward(shapes: &BenchShapes) -> TimedOp {
    let (n, d, vocab) = (shapes.tokens, shapes.widths.hidden_size, shapes.widths.vocab_size);
    let (id_bytes, different) = ids(shapes);
    let bytes = shapes.bytes(n * d) + 2 * F32_BYTES * different * d + id_bytes;
    let what = ("embed_backward", format!("{n} of {vocab}x{d}"), shapes.dtype);
    TimedOp::moving(bytes, what, move |inputs| {
        let grad = inputs.zeros((vocab, d))?;
        let sets = inputs.sets(|set| Ok((token_ids(n, vocab, set), inputs.normal(1.0, (n, d))?)))?;
        sets.calls(move |(ids, dy)| embed_backward(&grad, ids, dy, 1.0, None))
    })
}

fn adapter_lookup(shapes: &BenchShapes) -> TimedOp {
    let (n, vocab, (id_bytes, different)) = (shapes.tokens, shapes.widths.vocab_size, ids(shapes));
    let what = ("columns_of", format!("{n} of {RANK}x{vocab}"), DType::F32);
    TimedOp::moving(F32_BYTES * (different + n) * RANK + id_bytes, what, move |inputs| {
        let a = inputs.normal_as(DType::F32, 1.0, (RANK, vocab))?;
        inputs.sets(|set| Ok(token_ids(n, vocab, set)))?.calls(move |ids| columns_of(&a, ids).map(drop))
    })
}

fn adapter_lookup_backward(shapes: &BenchShapes) -> TimedOp {
    let (n, vocab, (id_bytes, different)) = (shapes.tokens, shapes.widths.vocab_size, ids(shapes));
    let what = ("columns_of_backward", format!("{n} of {RANK}x{vocab}"), DType::F32);
    TimedOp::moving(F32_BYTES * (2 * different + n) * RANK + id_bytes, what, move |inputs| {
        let grad = inputs.zeros((RANK, vocab))?;
        let sets = inputs
            .sets(|set| Ok((token_ids(n, vocab, set), inputs.normal_as(DType::F32, 1.0, (n, RANK))?)))?;
        sets.calls(move |(ids, du)| columns_of_backward(&grad, ids, du, None))
    })
}

/// Times the lookup of rows of two f32 tables, as rotary angles are picked by position.
fn angles_of_positions(shapes: &BenchShapes) -> TimedOp {
    let (n, vocab, (id_bytes, different)) = (shapes.tokens, shapes.widths.vocab_size, ids(shapes));
    let what = ("rows_of", format!("{n} of 2 {vocab}x{RANK}"), DType::F32);
    TimedOp::moving(2 * F32_BYTES * (different + n) * RANK + id_bytes, what, move |inputs| {
        let table = || inputs.normal_as(DType::F32, 1.0, (vocab, RANK));
        let (tables, ids) = ([table()?, table()?], inputs.sets(|set| Ok(token_ids(n, vocab, set)))?);
        Ok(Box::new(move || rows_of([&tables[0], &tables[1]], ids.next()?).map(drop)))
    })
}

/// Times the cast of a weight from its f32 master.
fn cast(shapes: &BenchShapes) -> TimedOp {
    let ((shape, count), dtype) = (widest(shapes), shapes.dtype);
    let what = ("copy_into", format!("{shape} to {}", dtype.as_str()), DType::F32);
    TimedOp::moving(F32_BYTES * count + shapes.bytes(count), what, move |inputs| {
        let sets =
            inputs.sets(|_| Ok((inputs.normal(1.0, count)?, inputs.normal_as(DType::F32, 1.0, count)?)))?;
        sets.calls(move |(to, from)| copy_into(to, from))
    })
}

fn zeroed(shapes: &BenchShapes) -> TimedOp {
    let (shape, count) = widest(shapes);
    TimedOp::moving(F32_BYTES * count, ("zero", shape, DType::F32), move |inputs| {
        inputs.sets(|_| inputs.normal_as(DType::F32, 1.0, count))?.calls(zero)
    })
}

/// Times the addition of a gradient to that of an earlier micro-batch.
fn accumulated(shapes: &BenchShapes) -> TimedOp {
    let (shape, count) = widest(shapes);
    TimedOp::moving(3 * F32_BYTES * count, ("add_into", shape, DType::F32), move |inputs| {
        let sets = inputs.sets(|_| Ok((inputs.zeros(count)?, inputs.normal_as(DType::F32, 1.0, count)?)))?;
        sets.calls(move |(sum, grad)| add_into(sum, grad))
    })
}

fn squares(shapes: &BenchShapes) -> TimedOp {
    let (shape, count) = widest(shapes);
    TimedOp::moving(F32_BYTES * count, ("sums_of_squares", shape, DType::F32), move |inputs| {
        let grads = inputs.sets(|_| inputs.normal_as(DType::F32, 1.0, count))?;
        grads.calls(|grad| sums_of_squares(&[&**grad], grad.device()).map(drop))
    })
}

fn update(shapes: &BenchShapes) -> TimedOp {
    let (shape, count) = widest(shapes);
    // Parameter and both moments are read and written, the gradient read.
    TimedOp::moving(7 * F32_BYTES * count, ("adamw", shape, DType::F32), move |inputs| {
        let values = || inputs.normal_as(DType::F32, 0.02, count);
        let sets =
            inputs.sets(|_| Ok(([values()?, values()?], [inputs.zeros(count)?, inputs.zeros(count)?])))?;
        sets.calls(move |([param, grad], [mean, square])| {
            let rounding = StochasticRounding::new(RngStream::new(0), 0);
            adamw(&[AdamWPiece { param, value: None, rounding, grad, moments: [mean, square], step: STEP }])
        })
    })
}

/// Times the update with 8-bit state on the parameter's device.
fn update_int8(shapes: &BenchShapes) -> TimedOp {
    let (shape, count) = widest(shapes);
    let state = 2 * (count + F32_BYTES * count.div_ceil(STATE_BLOCK));
    TimedOp::moving(3 * F32_BYTES * count + 2 * state, ("adamw_int8", shape, DType::F32), move |inputs| {
        let values = || inputs.normal_as(DType::F32, 0.02, count);
        let moment = || Int8State::zeros(count, inputs.device);
        let sets = inputs.sets(|_| Ok(([values()?, values()?], [moment()?, moment()?])))?;
        sets.calls(move |([param, grad], [mean, square])| {
            let rounding = StochasticRounding::new(RngStream::new(0), 0);
            adamw_int8(&[AdamWPiece {
                param,
                value: None,
                rounding,
                grad,
                moments: [mean, square],
                step: STEP,
            }])
        })
    })
}
