//! Cases of products with a quantized weight.

use candle_core::{DType, Device, Tensor};

use super::{
    Quantized, QuantizedRun, Weight, dequantize, matmul_weight, matmul_weight_plus_low_rank, matmul_weights,
    quantized_reference,
};
use crate::error::Result;
use crate::ops::case::{CaseRunner, OpCase, TensorPair, Tolerance};
use crate::ops::matmul::{self, Addend, ColumnView, ColumnViewMut, LowRank, Transpose};
use crate::quant::{
    BlockType, GgmlFormat, GridCodes, GridFormat, GridZeros, QuantBuffer, QuantFormat, QuantScheme as _,
    RunDtype, RunMeaning, ScaleDtype,
};
use crate::recipe::enums::QuantKind;
use crate::runtime::rng::RngStream;

/// Returns a quantized matrix of normal values on the device, and on the host.
pub(in crate::ops) fn quantized(
    runner: &CaseRunner<'_>,
    format: QuantFormat,
    shape: (usize, usize),
) -> Result<[Quantized; 2]> {
    let (n, stream) = (shape.0 * shape.1, RngStream::new(0).named("quantized"));
    let format = match format {
        QuantFormat::Grid(grid) => QuantFormat::Grid(GridFormat { columns: shape.1, ..grid }),
        other => other,
    };
    let values = stream.normals(0..n as u64, 1.0);
    let quantized = match format {
        QuantFormat::Grid(grid) => stored(&grid, n, stream),
        QuantFormat::Ggml(format) => blocks(format, n, stream),
        _ => QuantBuffer::new(format, n, &|start, piece| {
            piece.copy_from_slice(&values[start..start + piece.len()]);
            Ok(())
        })?,
    };
    let on = |device: &Device| -> Result<Quantized> {
        let memory = &quantized.runs;
        let runs = format.scheme().runs(n).into_iter().map(|run| {
            let values = match run.meaning.dtype() {
                RunDtype::U8 => Tensor::from_slice(memory.bytes(run.meaning), run.elements, device)?,
                RunDtype::F32 => Tensor::from_slice(memory.floats(run.meaning), run.elements, device)?,
            };
            Ok(QuantizedRun { meaning: run.meaning, values })
        });
        Ok(Quantized { format, shape, runs: runs.collect::<Result<_>>()?, offset: memory.offset })
    };
    Ok([on(runner.device)?, on(&Device::Cpu)?])
}

/// Returns a shape whose rows the format can hold: of blocks of GGUF whole ones, a few wider.
pub(in crate::ops) fn whole(format: &QuantFormat, (rows, columns): (usize, usize)) -> (usize, usize) {
    match format {
        QuantFormat::Ggml(format) => (rows, columns.next_multiple_of(format.kind.elements())),
        _ => (rows, columns),
    }
}

/// Returns a matrix of random blocks with outer scales near 2⁻¹¹.
fn blocks(format: GgmlFormat, n: usize, stream: RngStream) -> QuantBuffer {
    let mut matrix = QuantBuffer::zeros(QuantFormat::Ggml(format), n);
    // The places of the upper bytes of scales in f16 in a block, or that of an exponent.
    let (size, places, scale) = match format.kind {
        BlockType::Q6K => (format.kind.bytes(), vec![209], 0x10),
        BlockType::Q2K => (format.kind.bytes(), vec![81, 83], 0x10),
        BlockType::Q3K => (format.kind.bytes(), vec![109], 0x10),
        BlockType::MXFP4 => (format.kind.bytes(), vec![0], 122),
        _ => (format.kind.bytes(), vec![1, 3], 0x10),
    };
    for (at, byte) in matrix.runs.bytes_mut(RunMeaning::Codes).iter_mut().enumerate() {
        *byte = if places.contains(&(at % size)) { scale } else { stream.bits(at as u64) as u8 };
    }
    matrix
}

/// Returns a matrix of random codes, zeros and groups, with scales near 1/8.
fn stored(format: &GridFormat, n: usize, stream: RngStream) -> QuantBuffer {
    let mut matrix = QuantBuffer::zeros(QuantFormat::Grid(*format), n);
    matrix.runs.offset = 8.0;
    let groups = format.groups() as u64;
    for run in format.runs(n) {
        let bits = |at: usize| stream.part(run.meaning as u64).bits(at as u64);
        match run.meaning {
            RunMeaning::Scales => {
                let scales = matrix.runs.floats_mut(run.meaning).iter_mut();
                scales.enumerate().for_each(|(at, scale)| *scale = (bits(at) % 8 + 8) as f32 / 64.0);
            }
            meaning => {
                let bytes = matrix.runs.bytes_mut(meaning).iter_mut().enumerate();
                bytes.for_each(|(at, byte)| {
                    *byte = match (meaning, format.scales) {
                        (RunMeaning::ColumnGroups, _) => ((bits(at / 2) % groups) >> (at % 2 * 8)) as u8,
                        (RunMeaning::ScaleBytes, ScaleDtype::E4m3Over | ScaleDtype::E4m3Times) => {
                            0x38 + (bits(at) % 8) as u8
                        }
                        (RunMeaning::ScaleBytes, ScaleDtype::E8m0) => 122 + (bits(at) % 4) as u8,
                        // The upper byte of 1/8.
                        (RunMeaning::ScaleBytes, ScaleDtype::F16) if at % 2 == 1 => 0x30,
                        (RunMeaning::ScaleBytes, _) if at % 2 == 1 => 0x3e,
                        // No NaN in e4m3.
                        (RunMeaning::Codes, _) if format.codes == GridCodes::E4m3 => bits(at) as u8 & 0xbf,
                        // From 2 to below 8 in bf16, or from 0 to 15.
                        (RunMeaning::Zeros, _) if format.zeros == GridZeros::AsScales && at % 2 == 1 => 0x40,
                        (RunMeaning::Zeros, _) => (bits(at) % 16) as u8,
                        _ => bits(at) as u8,
                    };
                });
            }
        }
    }
    matrix
}

/// Returns a format of other tools for rows of 72 values.
pub(super) const fn grid(codes: GridCodes, cell: [usize; 2], scales: ScaleDtype) -> GridFormat {
    let [row_block, column_block] = cell;
    GridFormat {
        codes,
        columns: 72,
        row_block,
        column_block,
        scales,
        zeros: GridZeros::Implied,
        by_column: false,
    }
}

/// The tested formats of bitsandbytes; the first is that of QLoRA's paper.
pub(in crate::ops) const FORMATS: [QuantFormat; 6] = [
    QuantFormat::of_kind(QuantKind::Nf4, 64, true),
    QuantFormat::of_kind(QuantKind::Nf4, 64, false),
    QuantFormat::of_kind(QuantKind::Fp4, 128, true),
    QuantFormat::of_kind(QuantKind::Int8, 64, false),
    QuantFormat::int8_rows(72),
    // The last block is a short one.
    QuantFormat::of_kind(QuantKind::Nf4, 4096, false),
];

/// The tested formats of other tools. A matrix gives them its width.
pub(in crate::ops) const KEPT: [QuantFormat; 19] = [
    QuantFormat::Ggml(GgmlFormat { kind: BlockType::Q4K }),
    QuantFormat::Ggml(GgmlFormat { kind: BlockType::Q6K }),
    QuantFormat::Ggml(GgmlFormat { kind: BlockType::Q2K }),
    QuantFormat::Ggml(GgmlFormat { kind: BlockType::IQ4NL }),
    QuantFormat::Ggml(GgmlFormat { kind: BlockType::Q3K }),
    QuantFormat::Ggml(GgmlFormat { kind: BlockType::Q5K }),
    QuantFormat::Ggml(GgmlFormat { kind: BlockType::IQ4XS }),
    QuantFormat::Ggml(GgmlFormat { kind: BlockType::Q4_1 }),
    QuantFormat::Ggml(GgmlFormat { kind: BlockType::Q5_0 }),
    QuantFormat::Ggml(GgmlFormat { kind: BlockType::Q5_1 }),
    QuantFormat::Ggml(GgmlFormat { kind: BlockType::MXFP4 }),
    QuantFormat::Grid(GridFormat {
        zeros: GridZeros::Bytes,
        ..grid(GridCodes::Int4, [1, 32], ScaleDtype::F16)
    }),
    QuantFormat::Grid(GridFormat {
        zeros: GridZeros::Bytes,
        by_column: true,
        ..grid(GridCodes::Int4, [1, 24], ScaleDtype::F16)
    }),
    QuantFormat::Grid(grid(GridCodes::Int8, [1, 72], ScaleDtype::BF16)),
    QuantFormat::Grid(GridFormat {
        zeros: GridZeros::AsScales,
        ..grid(GridCodes::Int4, [1, 24], ScaleDtype::BF16)
    }),
    QuantFormat::Grid(grid(GridCodes::E4m3, [16, 32], ScaleDtype::F32)),
    QuantFormat::Grid(grid(GridCodes::E2m1, [1, 24], ScaleDtype::E8m0)),
    QuantFormat::Grid(grid(GridCodes::E2m1, [1, 16], ScaleDtype::E4m3Over)),
    QuantFormat::Grid(grid(GridCodes::E2m1, [1, 16], ScaleDtype::E4m3Times)),
];

/// Returns the cases of products with a quantized weight.
pub(in crate::ops) fn cases() -> Vec<OpCase> {
    let mut cases = Vec::new();
    for format in FORMATS.into_iter().chain(KEPT) {
        let (scheme, double_quant) = (format.scheme(), format.scheme().double_quant());
        let nested = if double_quant { " nested" } else { "" };
        let name = match format {
            QuantFormat::Grid(_) | QuantFormat::Ggml(_) => scheme.describe(),
            _ => format!("{} {}{nested}", scheme.name(), scheme.hint().block_size),
        };
        // Rows that are not a multiple of a block. Formats with nested or row scales, and one of
        // blocks, also get more columns than a panel, whose bounds are the same for all formats.
        let mut shapes = vec![((53, 72), "53x72"), ((48, 41), "48x41")];
        let has_wide = match format {
            QuantFormat::Ggml(format) => format.kind == BlockType::Q4K,
            QuantFormat::Grid(_) | QuantFormat::Int8Rows(_) => true,
            QuantFormat::FourBit(_) | QuantFormat::Int8(_) => double_quant,
        };
        if has_wide {
            shapes.push(((600, 2104), "600x2104"));
        }
        for (shape, what) in shapes {
            let shape = whole(&format, shape);
            for (form, accumulate) in [(Transpose::Nt, false), (Transpose::Nn, true)] {
                let what =
                    format!("{name}, {form:?} {what}{}", if accumulate { ", accumulated" } else { "" });
                let tolerance = if accumulate { Tolerance::BACKWARD } else { Tolerance::FORWARD };
                cases.push(OpCase::new("matmul_weight", what, tolerance, move |runner| {
                    product(runner, format, shape, 7, form, accumulate)
                }));
            }
        }
    }
    cases.extend(side_by_side());
    cases.extend(with_low_rank());
    cases
}

/// Returns the cases of a low-rank matrix added to products, small ones and ones that a CPU packs;
/// one of them has two parts of inner elements.
fn with_low_rank() -> Vec<OpCase> {
    let mut cases = Vec::new();
    let weights = [("dense", LowRankWeight::Run), ("nf4", LowRankWeight::Nf4), ("bf16", LowRankWeight::Bf16)];
    for (rows, shape) in [(7, (53, 72)), (70, (160, 416)), (40, (200, 2600))] {
        for (form, (what, kind)) in
            [Transpose::Nt, Transpose::Nn].into_iter().flat_map(|form| weights.map(|weight| (form, weight)))
        {
            let name = format!("{form:?} {rows}x{}x{}, {what}", shape.0, shape.1);
            cases.push(OpCase::new(
                "matmul_weight_plus_low_rank",
                name,
                Tolerance::BACKWARD,
                move |runner| low_rank_case(runner, rows, shape, form, kind),
            ));
        }
    }
    cases
}

/// The weight beside a low-rank matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
enum LowRankWeight {
    /// Dense, in the dtype of the activations.
    Run,
    /// Dense, as a frozen weight is stored: with f32 activations the product is computed in f32.
    Bf16,
    /// Quantized, in blocks.
    Nf4,
}

/// Compares a product added to a matrix, with a low-rank term of rank 12.
fn low_rank_case(
    runner: &CaseRunner<'_>,
    rows: usize,
    shape: (usize, usize),
    form: Transpose,
    kind: LowRankWeight,
) -> Result<Vec<TensorPair>> {
    let r = 12;
    let [here, plain] = quantized(runner, FORMATS[0], shape)?;
    let is_dense = kind != LowRankWeight::Nf4;
    let dtype = if kind == LowRankWeight::Bf16 { DType::BF16 } else { runner.dtype };
    let dense = runner.normal_as(dtype, "dense", shape)?;
    let (k, n, factor) = match form {
        Transpose::Nt => (shape.1, shape.0, (shape.0, r)),
        _ => (shape.0, shape.1, (r, shape.1)),
    };
    let (a, onto) = (runner.normal("a", (rows, k + 3))?, runner.normal("onto", (rows, n))?);
    let dst = runner.normal("dst", (rows, n))?;
    let (u, factor) = (runner.normal_f32("u", (rows, r))?, runner.normal_f32("factor", factor)?);
    let a_of = |tensor| ColumnView { tensor, start: 2, len: k };
    let weight = if is_dense { Weight::Dense(&dense.here) } else { Weight::Quantized(&here) };
    let low_rank = LowRank { u: ColumnView::all(&u.here), factor: &factor.here, scale: 0.5 };
    let (to, added) = (ColumnViewMut::all(&dst.here), Addend::Matrix(&onto.here));
    matmul_weight_plus_low_rank(to, a_of(&a.here), weight, form, added, low_rank)?;
    // Summed in f32 and rounded once.
    let wide = crate::ops::empty(rows, n, DType::F32, onto.plain.device())?;
    let onto = onto.plain.to_dtype(DType::F32)?;
    let (to, added) = (ColumnViewMut::all(&wide), Addend::Matrix(&onto));
    let a_wide = a.plain.to_dtype(DType::F32)?;
    if is_dense {
        let dense = dense.plain.to_dtype(DType::F32)?;
        matmul::reference(to, a_of(&a_wide), ColumnView::all(&dense), form, 1.0, added)?;
    } else {
        let dense = plain.dequantize_reference()?.to_dtype(runner.dtype)?.to_dtype(DType::F32)?;
        matmul::reference(to, a_of(&a_wide), ColumnView::all(&dense), form, 1.0, added)?;
    }
    let (u, factor) = (ColumnView::all(&u.plain), ColumnView::all(&factor.plain));
    matmul::reference(to, u, factor, form, 0.5, Addend::Destination)?;
    Ok(vec![TensorPair::new(dst.here.into_tensor(), wide.into_tensor())])
}

/// Compares the product of `rows` rows with a weight of this shape, with extra columns on both
/// sides of the operands.
pub(in crate::ops) fn product(
    runner: &CaseRunner<'_>,
    format: QuantFormat,
    shape: (usize, usize),
    rows: usize,
    form: Transpose,
    accumulate: bool,
) -> Result<Vec<TensorPair>> {
    let [here, plain] = quantized(runner, format, shape)?;
    let (k, n) = if form == Transpose::Nt { (shape.1, shape.0) } else { shape };
    let (a, dst) = (runner.normal("a", (rows, k + 3))?, runner.normal("dst", (rows, n + 5))?);
    let a_of = |tensor| ColumnView { tensor, start: 2, len: k };
    let dst_of = |tensor| ColumnViewMut { tensor, start: 4, len: n };
    let addend = Addend::destination_if(accumulate);
    matmul_weight(dst_of(&dst.here), a_of(&a.here), Weight::Quantized(&here), form, addend)?;
    quantized_reference(dst_of(&dst.plain), a_of(&a.plain), &plain, form, addend)?;
    Ok(vec![dst.pair()])
}

/// Returns the cases of stacked weights: all quantized, or one of them dense.
fn side_by_side() -> Vec<OpCase> {
    let mut cases = Vec::new();
    let dense = [("quantized", false), ("one dense", true)];
    for (form, (what, has_dense)) in
        [Transpose::Nt, Transpose::Nn].into_iter().flat_map(|form| dense.map(|dense| (form, dense)))
    {
        let name = format!("{form:?} {what}");
        cases.push(OpCase::new("matmul_weights", name, Tolerance::BACKWARD, move |runner| {
            side_by_side_case(runner, form, has_dense)
        }));
    }
    cases.push(OpCase::new("dequantize", "29x72 and 48x72", Tolerance::FORWARD, |runner| {
        let [first, first_plain] = quantized(runner, FORMATS[0], (29, 72))?;
        let [second, second_plain] = quantized(runner, FORMATS[4], (48, 72))?;
        let plain = [first_plain.dequantize_reference()?, second_plain.dequantize_reference()?];
        Ok(vec![TensorPair::new(dequantize(&[&first, &second], runner.dtype)?, Tensor::cat(&plain, 0)?)])
    }));
    cases
}

/// Compares a stack of `(29 + 48) x 72`, added to a matrix.
fn side_by_side_case(runner: &CaseRunner<'_>, form: Transpose, has_dense: bool) -> Result<Vec<TensorPair>> {
    let [first, first_plain] = quantized(runner, FORMATS[0], (29, 72))?;
    let [second, second_plain] = quantized(runner, FORMATS[4], (48, 72))?;
    let dense = runner.normal("dense", (48, 72))?;
    let (k, n) = if form == Transpose::Nt { (72, 77) } else { (77, 72) };
    let (a, dst, onto) =
        (runner.normal("a", (7, k + 3))?, runner.normal("dst", (7, n))?, runner.normal("onto", (7, n))?);
    let a_of = |tensor, start, len| ColumnView { tensor, start, len };
    let weights = [
        Weight::Quantized(&first),
        if has_dense { Weight::Dense(&dense.here) } else { Weight::Quantized(&second) },
    ];
    let added = Addend::Matrix(&onto.here);
    matmul_weights(ColumnViewMut::all(&dst.here), a_of(&a.here, 2, k), &weights, form, added)?;
    let mut addend = Addend::Matrix(&onto.plain);
    if form == Transpose::Nt {
        dst.plain.slice_set(&onto.plain, 0, 0)?;
        addend = Addend::Destination;
    }
    let widths = [(0, 29), (29, 48)];
    for (index, (start, len)) in widths.into_iter().enumerate() {
        let (dst, a) = if form == Transpose::Nt {
            (ColumnViewMut { tensor: &dst.plain, start, len }, a_of(&a.plain, 2, k))
        } else {
            (ColumnViewMut::all(&dst.plain), a_of(&a.plain, 2 + start, len))
        };
        match index {
            0 => quantized_reference(dst, a, &first_plain, form, addend)?,
            _ if has_dense => {
                let dense = ColumnView::all(&dense.plain);
                matmul::reference(dst, a, dense, form, 1.0, Addend::Destination)?;
            }
            _ => quantized_reference(dst, a, &second_plain, form, Addend::Destination)?,
        }
    }
    Ok(vec![dst.pair()])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The match asks for the case of a new format.
    #[test]
    fn every_format_has_a_case() {
        let index = |format: &QuantFormat| match format {
            QuantFormat::FourBit(_) => 0,
            QuantFormat::Int8(_) => 1,
            QuantFormat::Int8Rows(_) => 2,
            QuantFormat::Grid(grid) => match grid.codes {
                GridCodes::Int4 => 3,
                GridCodes::Int8 => 4,
                GridCodes::E4m3 => 5,
                GridCodes::E2m1 => 6,
            },
            QuantFormat::Ggml(_) => 7,
        };
        let mut indices: Vec<usize> = FORMATS.iter().chain(&KEPT).map(index).collect();
        indices.sort_unstable();
        indices.dedup();
        assert_eq!(indices, [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}
