//! Launches of the kernels for formats of other tools: `kernels/dequantize_grid.cu` and
//! `kernels/dequantize_blocks.cu`.

use candle_core::{DType, Tensor};

use super::{Source, shift, values_per_block};
use crate::backends::gpu::{Driver, In, LaunchShape, Out, kernels, number};
use crate::error::Result;
use crate::ops::matmul_quantized::Quantized;
use crate::quant::{BlockType, GridCodes, GridFormat, RunMeaning};

/// Fills `panel`, `[out, in]` in bf16 or f32, with the values of a matrix with a grid of scales.
pub(super) fn grid(
    driver: &dyn Driver,
    weight: &Quantized,
    format: &GridFormat,
    panel: &Tensor,
) -> Result<()> {
    let (count, dtype, (rows, columns)) = (panel.elem_count(), panel.dtype(), weight.shape);
    let shape = LaunchShape::line(count.div_ceil(values_per_block(dtype)), 256);
    let codes = In::all(weight.run(RunMeaning::Codes)?)?;
    let scales = In::optional(weight.optional_run(RunMeaning::Scales))?;
    let bytes = |meaning| In::optional(weight.optional_run(meaning));
    let (scale_bytes, zeros) = (bytes(RunMeaning::ScaleBytes)?, bytes(RunMeaning::Zeros)?);
    let column_groups = bytes(RunMeaning::ColumnGroups)?;
    let (factor, implied_zero) = (weight.offset, f32::from(format.codes.implied_zero()));
    let (scale_type, zero_type) = (format.scales as u32, format.zeros as u32);
    let groups = number(format.groups())?;
    // Cells may exceed the matrix.
    let sizes = [columns, format.row_block.min(rows), format.column_block.min(columns)];
    let [columns, row_block, column_block] = sizes;
    let (columns, row_block, column_block) = (number(columns)?, number(row_block)?, number(column_block)?);
    let [columns_shift, row_shift, column_shift] = sizes.map(shift);
    let count = count as i64;
    macro_rules! launch {
        ($kernel:ident) => {{
            let panel = Out::all(panel)?;
            kernels::$kernel(
                driver,
                shape,
                codes,
                scales,
                scale_bytes,
                zeros,
                column_groups,
                factor,
                implied_zero,
                scale_type,
                zero_type,
                groups,
                columns,
                columns_shift,
                row_block,
                row_shift,
                column_block,
                column_shift,
                panel,
                count,
            )
        }};
    }
    match (format.codes, dtype) {
        (GridCodes::Int4, DType::BF16) => launch!(dequantize_grid_int4_bf16),
        (GridCodes::Int4, _) => launch!(dequantize_grid_int4_f32),
        (GridCodes::Int8, DType::BF16) => launch!(dequantize_grid_int8_bf16),
        (GridCodes::Int8, _) => launch!(dequantize_grid_int8_f32),
        (GridCodes::E4m3, DType::BF16) => launch!(dequantize_grid_e4m3_bf16),
        (GridCodes::E4m3, _) => launch!(dequantize_grid_e4m3_f32),
        (GridCodes::E2m1, DType::BF16) => launch!(dequantize_grid_e2m1_bf16),
        (GridCodes::E2m1, _) => launch!(dequantize_grid_e2m1_f32),
    }
}

/// Fills `panel`, `[out, in]` in bf16 or f32, with the values of blocks of GGUF.
pub(super) fn blocks(
    driver: &dyn Driver,
    source: &Source<'_>,
    kind: BlockType,
    panel: &Tensor,
) -> Result<()> {
    let (count, dtype) = (panel.elem_count(), panel.dtype());
    // Sixteen bytes of values for each thread.
    let shape = LaunchShape::line(count.div_ceil(256 * 16 / dtype.size_in_bytes()), 256);
    let blocks = In::all(source.weight.run(RunMeaning::Codes)?)?;
    let values = In::optional(source.values.as_ref())?;
    let (number_of_kind, elements, bytes) = (kind as u32, kind.elements().ilog2(), number(kind.bytes())?);
    let count = count as i64;
    macro_rules! launch {
        ($kernel:ident) => {{
            let panel = Out::all(panel)?;
            kernels::$kernel(driver, shape, blocks, values, number_of_kind, elements, bytes, panel, count)
        }};
    }
    match dtype {
        DType::BF16 => launch!(dequantize_blocks_bf16),
        _ => launch!(dequantize_blocks_f32),
    }
}
